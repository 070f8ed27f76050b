"""The clipping engine: per-example gradient norms and weighted sums, never the gradients themselves.

One forward pass records each layer's input; one backward pass, which skips the ordinary weight
gradients, brings the gradient of each layer's output; from the two follow every norm and, by one
re-weighted product per layer, the sum ("book-keeping"). On its first lot the engine compares itself
with the one-example loop, and looks whether examples of a whole lot stay apart; where not it takes the loop, which
computes every example's gradient from that example alone and is always right.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import register_module_forward_hook

from fodp._checks import PrivacyError
from fodp.clipping import fallback, self_check
from fodp.clipping.batches import Batch, Keyed, batch_size, plain, take
from fodp.clipping.combine import merged, scaled
from fodp.clipping.fallback import Unseparable
from fodp.clipping.findings import refuse_errors
from fodp.clipping.precision import Caller
from fodp.clipping.rules import RULES
from fodp.clipping.uses import Use
from fodp.draws import Pass, Site, Unkeyable
from fodp.flat import Layout

LossFunction = Callable[[nn.Module, Batch], Tensor]
# Where to evaluate: (coefficient, flat offset from the parameters or None) each; gradients add up.
Points = Sequence[tuple[float, Tensor | None]]
HERE: Points = ((1.0, None),)

_FIRST_LOTS = 2  # that are looked at whole
_NOBODY = torch.zeros(0, dtype=torch.int64)
# How many numbers a pass over a lot may record; larger lots take several passes. Recorded are inputs and gradients
# of all layers at once, where ordinary training frees the ones while it makes the others.
_RECORDED_AT_ONCE = 2**24


@dataclass
class _Call:
    """One call of one module in the recorded forward pass."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    outputs: list[tuple[int, GradientEdge, torch.Size]] = field(default_factory=list)  # place, gradient, shape


class Engine:
    """Per-example gradients of one model under one loss function.

    `method` is "auto" (book-keeping, checked against the loop on first use) or "loop" (one example
    at a time). Neither changes the result beyond float tolerance.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, method: str = "auto"):
        if method not in ("auto", "loop"):
            raise PrivacyError(f"the engine must be auto or loop, got {method!r}")
        refuse_errors(model)
        self.model, self.loss_fn = model, loss_fn
        self.layout = Layout(model)
        self._trainable = {id(p) for p in self.layout.parameters}
        owned = [(m, dict(m.named_parameters(recurse=fallback.is_unit(m)))) for m in model.modules()]
        trained = [(m, {n: p for n, p in mine.items() if id(p) in self._trainable}) for m, mine in owned]
        self._owners = {module: mine for module, mine in trained if mine}
        self._shared: set[tuple[int, int]] = set()  # inputs of modules without a rule that hold no examples
        # Harmless in evaluation mode only; model.train() may come any time.
        self._watched = any(isinstance(m, _BatchNorm | _InstanceNorm) for m in model.modules())
        self.half_precision = False
        self._loop = method == "loop"
        self._checked = False
        self._kept_apart = 0  # how many lots have shown that examples are
        self.look_again = False  # whether the next lot is to be looked at too
        self.site = Site("the model or its loss")
        self._caller: Caller | None = None
        self.rows_at_once: int | None = None  # fixed by the first recorded batch

    def uses(self, batch: Batch, points: Points = HERE, copies: int = 1) -> list[Use | None] | None:
        """For each parameter its merged use in this batch; None when the loop must be taken instead."""
        rows = batch_size(batch)
        if rows == 0:
            return None
        self._examine(batch)
        if not self._checked or self._loop:
            return None
        try:
            return self.recorded(batch, points, copies)
        except Unseparable as reason:
            self._take_loop(str(reason))
            return None

    def most_rows(self, batch: Batch) -> int | None:
        """How many rows of this batch may be recorded at once; None for all."""
        self._examine(batch)
        return self.rows_at_once

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Norms and sums in full precision; the loss alone runs as the caller has switched it."""
        outer, self._caller = self._caller, Caller(self.layout.device.type)
        try:
            with self._caller.switched_off():
                yield
        finally:
            self._caller = outer

    def example_gradients(self, batch: Batch, points: Points = HERE, copies: int = 1) -> Iterator[Tensor]:
        """The reference: each example's flat gradient, computed from that example alone."""
        for start in range(0, batch_size(batch), copies):
            total = self.layout.zeros()
            for coefficient, offset in points:
                with self.shifted(offset):
                    one = take(batch, slice(start, start + copies))
                    _, found = self._differentiate(one, lambda: self.layout.parameters, single=True)
                if all(gradient is None for gradient in found):
                    raise PrivacyError(
                        "the loss reaches no trainable parameter of the model, so its sum would be noise alone: look "
                        "for detach(), no_grad() or a reentrant checkpoint whose input needs no gradient "
                        "(use_reentrant=False mends that) between the parameters and the loss"
                    )
                for view, gradient in zip(self.layout.views(total), found, strict=True):
                    if gradient is not None:
                        view.add_(gradient.to(view.dtype), alpha=coefficient / copies)
            yield total

    def losses(self, batch: Batch) -> Tensor:
        """One loss per example, or a clear refusal."""
        if self._watched:
            refuse_errors(self.model)
        with torch.enable_grad(), nullcontext() if self._caller is None else self._caller.autocast():
            losses = self.loss_fn(self.model, plain(batch))
        rows = batch_size(batch)
        if not isinstance(losses, Tensor) or losses.shape != (rows,):
            raise PrivacyError(
                f"loss_fn must return one loss per example, a vector as long as the lot, got {_form(losses, rows)}: "
                "each example's gradient is clipped by itself, so a mean or sum comes too late (use reduction='none')"
            )
        if not losses.requires_grad:
            raise PrivacyError("the loss does not depend on any trainable parameter")
        return losses

    def _differentiate(
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
            return losses, current.backward(lambda: _backward(losses, inputs)) if inputs else ()

        source, records = (batch.source, batch.records) if isinstance(batch, Keyed) else (None, _NOBODY)
        with nullcontext() if self._caller is None else self._caller.products():
            while True:
                try:
                    return self.site.run(work, source, records, lambda rows: self.losses(take(batch, rows)), single)
                except Unkeyable as reason:
                    if self.site.alone and single:
                        raise
                    self.site.alone = True
                    if not single:
                        raise Unseparable(f"{self.site.what} draws random numbers, and {reason}") from None

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

    def _examine(self, batch: Batch) -> None:
        """Look at the first lots, and at any that is asked for: are this model and this loss what they must be?"""
        if batch_size(batch) == 0 or not (self.look_again or self._kept_apart < _FIRST_LOTS):
            return
        self.look_again = False
        self_check.refuse_unsteady(self, batch)
        if self._loop:
            self._kept_apart += 1
        elif batch_size(batch) > 1:  # one cannot tell a wrong layout from a right one
            self._compare(batch)

    def _compare(self, batch: Batch) -> None:
        """Compare with the loop once, and look whether the examples of this lot stay apart."""
        if not self._checked:
            problem = self_check.problem(self, batch)
            if problem is None:
                return
            self._checked = True
            if problem:
                return self._take_loop(problem)
        try:
            problem = self_check.mixing(self, batch)
        except Unseparable as reason:
            return self._take_loop(str(reason))
        if problem and self._kept_apart:
            raise PrivacyError(
                f"{problem}; earlier lots did not show it, and what was released from them is not covered by the "
                "stated epsilon. Start again with engine='loop', which gives the loss one example at a time, or change "
                "the loss so that each example's depends on that example alone"
            )
        if problem:
            return self._take_loop(problem)
        self._kept_apart += 1

    def traced(self, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
        """The losses, and the gradient of every output of every layer with trainable parameters."""
        calls: list[_Call] = []
        losses, gradients = self._record_calls(batch, calls)
        dims = [fallback.output_dim(call.module, index) for call in calls for index, _, _ in call.outputs]
        return losses.detach(), [g if g is None else g.movedim(d, 0) for g, d in zip(gradients, dims, strict=True)]

    def recorded(self, batch: Batch, points: Points = HERE, copies: int = 1) -> list[Use | None]:
        """The same by book-keeping, checked or not; raises `Unseparable` where it cannot tell examples apart."""
        by_parameter: dict[int, list[Use]] = {id(p): [] for p in self.layout.parameters}
        with torch.no_grad():
            for coefficient, offset in points:
                with self.shifted(offset):
                    for parameter, use in self._record(batch):
                        by_parameter[parameter].append(scaled(use, coefficient))
            found = [merged(uses) if uses else None for uses in by_parameter.values()]
            return [use if use is None or copies == 1 else use.grouped(copies) for use in found]

    def _record(self, batch: Batch) -> Iterator[tuple[int, Use]]:
        """Forward and backward once; yields (parameter id, use) for every use."""
        count = batch_size(batch)
        calls: list[_Call] = []
        _, found_gradients = self._record_calls(batch, calls)
        if self.rows_at_once is None:
            self._weigh(calls, count)
        gradients = iter(found_gradients)
        for call in calls:
            found = [(index, next(gradients), shape) for index, _, shape in call.outputs]
            back = [(i, g if g.shape == shape else g.reshape(shape)) for i, g, shape in found if g is not None]
            if not back:
                continue  # this call did not reach the loss
            if call.versions != _versions(call.args, call.kwargs):
                raise Unseparable(f"an input of {type(call.module).__name__} was changed in place later on")
            for name, use in self._uses_of(call, back, count).items():
                if name in call.parameters:
                    yield id(call.parameters[name]), use

    def _record_calls(self, batch: Batch, calls: list[_Call]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Forward and backward once: fills `calls`; returns the losses and the gradients of the calls' outputs."""

        @contextmanager
        def recording() -> Iterator[None]:
            calls.clear()
            # One hook on all modules costs less than one each; it sees what the layer itself made, before other hooks.
            handle = register_module_forward_hook(partial(self._note, calls), with_kwargs=True)
            try:
                yield
            finally:
                handle.remove()

        return self._differentiate(batch, lambda: [edge for call in calls for _, edge, _ in call.outputs], recording)

    def _weigh(self, calls: list[_Call], count: int) -> None:
        """From what this batch records follows how large a part of a lot may be."""
        inputs = sum(tensor.numel() for call in calls for tensor in call.args if isinstance(tensor, Tensor))
        outputs = sum(shape.numel() for call in calls for _, _, shape in call.outputs)
        self.rows_at_once = max(1, _RECORDED_AT_ONCE * count // max(1, inputs + outputs))

    def _note(
        self, calls: list[_Call], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """The hook: remember a call of a module with trainable parameters."""
        owned = self._owners.get(module)
        if owned is None:
            return
        with torch._C.DisableTorchFunction():  # a mode would be asked for every attribute of a tensor
            call = _Call(module, owned, args, kwargs, _versions(args, kwargs))
            for index, tensor in enumerate((out,) if isinstance(out, Tensor) else fallback._tensors(out)):
                if tensor.requires_grad:
                    if tensor.dtype not in (torch.float32, torch.float64):  # the model's own, or autocast
                        self.half_precision = True
                    # The edge stays the gradient of this very output, whatever is done to it in place later.
                    call.outputs.append((index, get_gradient_edge(_origin(module, tensor)), tensor.shape))
            calls.append(call)

    def _take_loop(self, reason: str) -> None:
        self._loop = True
        warnings.warn(
            f"per-example gradients run one example at a time, which is slow: {reason}. Layers must keep the "
            "examples apart, in their first dimension, and parameters be used by their own modules only",
            stacklevel=2,
        )

    def _uses_of(self, call: _Call, back: list[tuple[int, Tensor]], count: int) -> dict[str, Use]:
        rule = RULES.get(type(call.module))
        if rule is None:
            return fallback.uses(call.module, call.parameters, call.args, call.kwargs, back, count, self._shared)
        inputs = call.args[0] if call.args else call.kwargs["input"]
        gradient = back[0][1]
        least = 1 if isinstance(call.module, nn.Embedding) else 2
        if inputs.dim() < least or inputs.shape[0] != count or gradient.shape[0] != count:
            kind = type(call.module).__name__
            raise Unseparable(f"{kind} got {_form(inputs, count)}, whose first dimension is not the lot's")
        return rule(call.module, inputs.detach(), gradient)


def _form(value: Any, rows: int) -> str:
    """A tensor's shape for a message; the size of a lot is private and stands there as a word."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "shape (" + ", ".join("lot" if size == rows else str(size) for size in value.shape) + ")"


def _origin(module: nn.Module, output: Tensor) -> Tensor:
    """The tensor that a layer's output is a view of: changing the view in place cuts off its own edge."""
    base = output._base
    if base is None or type(module) not in RULES or base.numel() != output.numel():
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


def _backward(losses: Tensor, inputs: Sequence[Tensor | GradientEdge]) -> tuple[Tensor | None, ...]:
    """Gradients of the summed losses; None where they do not reach."""
    ones = torch.ones_like(losses)  # not losses.sum(), which has no graph under an outer no_grad()
    return torch.autograd.grad(losses, inputs, ones, allow_unused=True)  # type: ignore[arg-type]


def _versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    return [a._version for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not a.is_inference()]
