"""The clipping engine: per-example gradient norms and weighted sums, never the gradients themselves.

One forward pass records each layer's input; one backward pass, which skips the ordinary weight
gradients, brings the gradient of each layer's output; from the two follow every norm and, by one
re-weighted product per layer, the sum ("book-keeping"). On its first lot the engine compares itself
with the one-example loop, and looks whether examples of a whole lot stay apart; where not it takes the loop, which
computes every example's gradient from a pass over that example alone. What a loss remembers from pass to pass reaches
others there too: it is looked for in every engine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fodp.clipping import self_check
from fodp.clipping.batches import Batch, Keyed, batch_size, sizes_of, take
from fodp.clipping.fallback import Unseparable
from fodp.clipping.findings import refuse_errors
from fodp.clipping.layers.combine import merged, scaled
from fodp.clipping.layers.rules import RULES
from fodp.clipping.layers.segments import Segments, by_owner
from fodp.clipping.layers.uses import Use
from fodp.clipping.loss_form import refuse_criterion, refuse_joint
from fodp.clipping.precision import Caller, switched_on
from fodp.clipping.recording import LayerRecording, Recording
from fodp.clipping.remembered import Outside
from fodp.clipping.watching import Axes, Unseen, Watch, learned
from fodp.draws import Pass, Site, Unkeyable
from fodp.errors import PrivacyError
from fodp.gradients import HERE, Points
from fodp.layout import Layout
from fodp.support import checks
from fodp.support.looks import Looks
from fodp.support.torch_internals import set_reentrant_checkpoint

LossFunction = Callable[[nn.Module, Batch], Tensor]

_NOTHING = nullcontext()
_NOBODY = torch.zeros(0, dtype=torch.int64)
# How many numbers a pass over a lot may record; larger lots take several passes. Recorded are inputs and gradients
# of all layers at once, where ordinary training frees the ones while it makes the others.
_RECORDED_AT_ONCE = 2**24


class Engine:
    """Per-example gradients of one model under one loss function.

    `method` is "auto" (book-keeping, checked against the loop on first use) or "loop" (one example
    at a time). Neither changes the result beyond float tolerance.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, method: str = "auto"):
        if method not in ("auto", "loop"):
            raise PrivacyError(f"the engine must be auto or loop, got {method!r}")
        refuse_errors(model)
        refuse_criterion(loss_fn)
        self.model, self.loss_fn = model, loss_fn
        self.layout = Layout(model)
        owned = [(m, dict(m.named_parameters(recurse=False))) for m in model.modules()]
        trained = [(m, {n: p for n, p in mine.items() if p.requires_grad}) for m, mine in owned]
        self._owners = {module: mine for module, mine in trained if mine}
        # Layers are recorded by their modules if all have a rule, which costs least; else every function that is given
        # a parameter is watched.
        self._by_module = all(type(module) in RULES for module in self._owners)
        self._axes: Axes | None = None  # where the examples lie in what the functions take and give
        # Harmless in evaluation mode only; model.train() may come any time.
        self._watched = any(isinstance(m, _BatchNorm | _InstanceNorm) for m in model.modules())
        self.half_precision = False
        self._loop = method == "loop"
        self._checked = False
        self.looks = Looks()
        self.outside = Outside([loss_fn], model)
        self.site = Site("the model or its loss")
        self._caller: Caller | None = None
        self.rows_at_once: int | None = None  # fixed by the first recorded batch

    def at_step(self, step: int) -> None:
        """What comes next is the lot of this step; of about 1 step in 256 it is looked at again."""
        self.looks.begin(step)

    def uses(self, batch: Batch, points: Points = HERE, copies: int = 1) -> list[Use | None] | None:
        """For each parameter its merged use in this batch; None when the loop must be taken instead."""
        rows = batch_size(batch)
        if rows == 0:
            return None
        self._examine(batch, rows)
        if not self._checked or self._loop:
            return None
        try:
            return self.recorded(batch, points, copies)
        except Unseparable as reason:
            self._take_loop(str(reason))
            return None

    @property
    def path(self) -> str:
        """How gradients are computed: rules for "layers" or "functions", the "loop", "unknown" before a lot has shown.

        A lot that does not show it takes the loop.
        """
        if self._loop or not self._checked:
            return "loop" if self._loop else "unknown"
        return "layers" if self._by_module else "functions"

    def most_rows(self, batch: Batch) -> int | None:
        """How many rows of this batch may be recorded at once; None for all."""
        self._examine(batch, batch_size(batch))
        return self.rows_at_once

    def split_as(self, rows: int | None) -> None:
        """Record at most this many rows at once, as an earlier part of the run did; None: the next batch decides."""
        self.rows_at_once = rows

    def exactly(self) -> AbstractContextManager[None]:
        """Norms and sums in full precision; the loss alone runs as the caller has switched it."""
        caller = switched_on(self.layout.device.type)
        return nullcontext() if caller is None else self._switched_off(caller)

    @contextmanager
    def _switched_off(self, caller: Caller) -> Iterator[None]:
        outer, self._caller = self._caller, caller
        try:
            with caller.switched_off():
                yield
        finally:
            self._caller = outer

    def example_gradients(self, batch: Batch, points: Points = HERE, copies: int = 1) -> Iterator[Tensor]:
        """The reference: each example's (each owner's) flat gradient, computed from that example (owner) alone."""
        for start, stop, divisor in _spans(batch, copies):
            total = self.layout.zeros()
            for coefficient, offset in points:
                with self.shifted(offset):
                    one = take(batch, slice(start, stop))
                    _, found = self.differentiate(one, lambda: self.layout.parameters, single=True)
                if all(gradient is None for gradient in found):
                    raise PrivacyError(
                        "the loss reaches no trainable parameter of the model, so its sum would be noise alone: look "
                        "for detach() or no_grad() between the parameters and the loss"
                    )
                for view, gradient in zip(self.layout.views(total), found, strict=True):
                    if gradient is not None:
                        view.add_(gradient.to(view.dtype), alpha=coefficient / divisor)
            yield total

    def losses(self, batch: Batch) -> Tensor:
        """One loss per example, or a clear refusal."""
        if self._watched:
            refuse_errors(self.model)
        rows = batch.rows if isinstance(batch, Keyed) else batch
        with torch.enable_grad(), _NOTHING if self._caller is None else self._caller.autocast():
            losses = self.loss_fn(self.model, rows)
        refuse_joint(losses, batch_size(batch))
        if not losses.requires_grad:
            raise PrivacyError("the loss does not depend on any trainable parameter")
        return losses

    def differentiate(
        self,
        batch: Batch,
        targets: Callable[[], Sequence[Tensor | GradientEdge]],
        recording: Callable[[], AbstractContextManager[Any]] = nullcontext,
        single: bool = False,
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """The losses, and their gradients at `targets()`, which is asked after the forward pass.

        `recording()` is around the forward pass, which may be repeated. What the pass draws belongs to the records
        of a keyed batch. `single`: all rows are one record's.
        """

        def forward() -> Tensor:
            with recording():
                return self.losses(batch)

        def work(current: Pass) -> tuple[Tensor, tuple[Tensor | None, ...]]:
            losses = current.forward(forward)
            inputs = targets()
            return losses, current.backward(partial(_backward, losses, inputs)) if inputs else ()

        def again(rows: Tensor) -> Tensor:
            return self.losses(take(batch, rows))

        source, records = (batch.source, batch.records) if isinstance(batch, Keyed) else (None, _NOBODY)
        checkpoints = set_reentrant_checkpoint(_Checkpoint)
        try:
            with _NOTHING if self._caller is None else self._caller.products():
                while True:
                    try:
                        return self.site.run(work, source, records, again, single)
                    except Unkeyable as reason:
                        if self.site.alone and single:
                            raise
                        self.site.take_alone()
                        if not single:
                            raise Unseparable(f"{self.site.what} draws random numbers, and {reason}") from None
        finally:
            set_reentrant_checkpoint(checkpoints)

    @contextmanager
    def shifted(self, offset: Tensor | None) -> Iterator[None]:
        """The model at parameters + offset; afterwards exactly as before."""
        if offset is None:
            yield
            return
        shifts = self.layout.views(offset)
        saved = [p.data for p in self.layout.parameters]
        try:
            # Another tensor, not another value: recorded inputs may be views of a parameter.
            for parameter, value, shift in zip(self.layout.parameters, saved, shifts, strict=True):
                parameter.data = value + shift.to(value.dtype)
            yield
        finally:
            for parameter, value in zip(self.layout.parameters, saved, strict=True):
                parameter.data = value

    def _examine(self, batch: Batch, rows: int) -> None:
        """Look at the first steps, and at any that is asked for: are this model and this loss what they must be?"""
        if not rows or not self.looks.take(again=bool(self.outside.suspects)):
            return
        self_check.refuse_unsteady(self, batch)
        if rows > 1 and (self._loop or self._compare(batch)):  # one example alone tells little
            self.looks.told(self.looks.step)

    def _compare(self, batch: Batch) -> bool:
        """Compare with the loop once, and look whether the examples of this lot stay apart; False: it does not tell."""
        if not self._checked:
            problem = self._problem(batch)
            if problem is None:
                return False
            self._checked = True
            if problem:
                self._take_loop(problem)
                return True
        try:
            problem = self_check.mixing(self, batch)
        except Unseparable as reason:
            self._take_loop(str(reason))
            return True
        if problem and self.looks.steps:
            raise PrivacyError(
                f"{problem}; earlier lots did not show it, and what was released from them is not covered by the "
                "stated epsilon. Start again with engine='loop', which gives the loss one example at a time, or change "
                "the loss so that each example's depends on that example alone"
            )
        if problem:
            self._take_loop(problem)
        return True

    def _problem(self, batch: Batch) -> str | None:
        """What is wrong with the gradients of this engine, which may take another way for it: "" nothing, None unclear.

        Where layers' rules are not enough (a parameter is used behind its module's back, examples lie in another
        dimension), functions are watched.
        """
        problem = self_check.problem(self, batch)
        if problem and self._by_module:  # rules that a user has registered hold there too, and a wrong one is heard of
            self._by_module = False
            problem = self_check.problem(self, batch)
        return problem

    def traced(self, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
        """The losses, and the gradient of everything that was made of a trainable parameter for each example."""
        recording, losses, gradients = self._recorded_pass(batch)
        return losses.detach(), recording.examples_first(gradients, len(losses))

    def recorded(self, batch: Batch, points: Points = HERE, copies: int = 1) -> list[Use | None]:
        """The uses by book-keeping, checked or not; raises `Unseparable` where it cannot tell examples apart."""
        by_parameter: dict[int, list[Use]] = {id(p): [] for p in self.layout.parameters}
        with torch.no_grad():
            for coefficient, offset in points:
                with _NOTHING if offset is None else self.shifted(offset):
                    uses = self._record(batch)
                    for parameter, use in uses if coefficient == 1 else _scaled(uses, coefficient):
                        by_parameter[parameter].append(use)
                    del uses
            found = merged_each(by_parameter.values())
            segments = _segments(batch, copies)
            if segments is not None:
                return [None if use is None else by_owner(use, segments) for use in found]
            return found if copies == 1 else [None if use is None else use.grouped(copies) for use in found]

    def _record(self, batch: Batch) -> Iterable[tuple[int, Use]]:
        """Forward and backward once: (parameter id, use) for every use."""
        recording, losses, gradients = self._recorded_pass(batch)
        count = losses.shape[0]
        self.half_precision = self.half_precision or recording.half_precision
        if self.rows_at_once is None:  # from what this batch records follows how large a part of a lot may be
            self.rows_at_once = max(1, _RECORDED_AT_ONCE * count // max(1, recording.numbers()))
        return recording.uses(gradients, count)

    def _recorded_pass(self, batch: Batch) -> tuple[Recording, Tensor, tuple[Tensor | None, ...]]:
        """Forward and backward once: the recording, the losses, and the gradients at the recording's targets."""
        made: list[Recording] = []  # one for each time that the forward pass is run

        def recording() -> Recording:
            made.append(self._recording())
            return made[-1]

        def targets() -> list[Any]:
            return made[-1].targets()

        if not self._by_module and self._axes is None:
            self._learn(batch)
        try:
            losses, gradients = self.differentiate(batch, targets, recording)
        except Unseen:  # a part of the model that other examples did not reach
            self._learn(batch)
            losses, gradients = self.differentiate(batch, targets, recording)
        return made[-1], losses, gradients

    def _recording(self, catch: Callable[[Tensor], Any] = get_gradient_edge) -> Recording:
        """For one forward pass; `catch(output)` says how the gradient of an output will be known."""
        if self._by_module:
            return LayerRecording(self._owners, catch)
        assert self._axes is not None
        return Watch(self.layout.parameters, self._axes, catch)

    def _learn(self, batch: Batch) -> None:
        """Find out where the examples lie in what the functions take and give, from copies of the first row."""
        keyed = self_check.with_draws(batch)

        def run(copies: int, mode: Callable[[], TorchFunctionMode]) -> None:
            self.differentiate(take(keyed, torch.zeros(copies, dtype=torch.int64)), lambda: (), mode)

        found = learned(self.layout.parameters, run)
        self._axes = found if self._axes is None else self._axes.with_more(found)

    def _take_loop(self, reason: str) -> None:
        self._loop = True
        checks.warn(
            f"per-example gradients run one example at a time, which is slow: {reason}. Layers must keep the "
            "examples apart, in their first dimension, and parameters be used by their own modules only"
        )


def merged_each(by_parameter: Iterable[list[Use]]) -> list[Use | None]:
    """The merged use of each parameter; None: it was not used."""
    return [uses[0] if len(uses) == 1 else merged(uses) if uses else None for uses in by_parameter]


def _segments(batch: Batch, copies: int) -> Segments | None:
    """Whose the rows are, and by what they are divided; None where every `copies` rows are an example."""
    sizes = sizes_of(batch)
    if sizes is None:
        return None
    return Segments(sizes, torch.full_like(sizes, copies) if batch.summed else sizes)


def _spans(batch: Batch, copies: int) -> Iterator[tuple[int, int, int]]:
    """Of each example, or owner: where its rows begin and end, and by what their sum is divided."""
    segments = _segments(batch, copies)
    if segments is None:
        yield from ((start, start + copies, copies) for start in range(0, batch_size(batch), copies))
        return
    stops = segments.sizes.cumsum(0)
    yield from zip((stops - segments.sizes).tolist(), stops.tolist(), segments.divisors.tolist(), strict=True)


class _Checkpoint:
    """Reentrant checkpoints as the others: they repeat their part in a backward pass that asks for all gradients.

    They refuse one that asks for some, and lose the gradients of a part whose inputs need none.
    """

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """As PyTorch calls it."""
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _scaled(uses: Iterable[tuple[int, Use]], coefficient: float) -> Iterator[tuple[int, Use]]:
    return ((parameter, scaled(use, coefficient)) for parameter, use in uses)


def _backward(losses: Tensor, inputs: Sequence[Tensor | GradientEdge]) -> tuple[Tensor | None, ...]:
    """Gradients of the summed losses; None where they do not reach."""
    ones = torch.ones_like(losses)  # not losses.sum(), which has no graph under an outer no_grad()
    return torch.autograd.grad(losses, inputs, ones, allow_unused=True)  # type: ignore[arg-type]
