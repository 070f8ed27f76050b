"""The looks at the model of a loop of one's own: the clipping engine's questions, on the rows that it is given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fodp.clipping import self_check
from fodp.clipping.batches import Batch, Keyed, batch_size, plain, take
from fodp.clipping.engine import Engine
from fodp.clipping.fallback import Unseparable
from fodp.clipping.findings import refuse_errors
from fodp.clipping.recording import Recording
from fodp.draws import Source
from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.inputs.bad_records import explain_rows
from fodp.sampling import Lot
from fodp.sources.padding import Padded, weights

TRAINER = "use fodp.Trainer, which computes the gradients itself"
_COMPARED = 4
_MADE_UP = 8  # lots of made-up rows, where a first lot says nothing about the model


class Examiner(Engine):
    """The engine of a model whose passes are its owner's: it asks `fodp.clipping.self_check`'s questions of the model.

    Its own passes are over the rows that the owner gives the model, under a made-up loss of the outputs. The gradients
    of a lot come from the owner's passes (`fodp.sources.caught`). `mean`: the owner's loss is the mean over the lot.
    `refused` makes the error that is raised for data that does not fit.
    """

    def __init__(self, model: nn.Module, mean: bool, refused: Callable[[DataError], DataError]):
        super().__init__(model, self._probe)
        self.mean, self._refused = mean, refused
        self.is_looking = False  # its passes are under way, and no hook takes them for the owner's
        self.joint_losses: set[int] = set()  # which of the model's outputs are losses that join examples
        self._looked_at: Lot | None = None  # the lot, or part of one, that was looked at last: in all its passes
        self._rebuild: Callable[[list[Tensor]], Any]  # the model's arguments from those that hold examples

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around passes of the library's own over what the owner has computed."""
        self.is_looking = True
        try:
            yield
        finally:
            self.is_looking = False

    def examine(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], lot: Lot, source: Source, padded: Padded | None
    ) -> None:
        """Look at the model before the owner's pass over this lot, where a look is due."""
        if self._looked_at is lot or self.looks.due(self.looks.step, self.looks.again):
            self._look(args, kwargs, lot, source)
        if padded is not None:
            self._look_at_padding(args, kwargs, padded)

    def refuse_woken(self) -> None:
        """Raise if model.train() has woken a frozen BatchNorm."""
        if self._watched:
            refuse_errors(self.model)

    @property
    def is_checked(self) -> bool:
        """Whether the model's gradients were compared with those of one example at a time."""
        return self._checked

    @property
    def records_modules(self) -> bool:
        """Whether layers are recorded by their modules, also where parts of the model are called by themselves."""
        return self._by_module

    def recording(self, catch: Callable[[Tensor], Any]) -> Recording | None:
        """For one pass of the owner's; None: no lot has shown yet where the examples lie."""
        return self._recording(catch) if self._by_module or self._axes is not None else None

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any], lot: Lot, source: Source) -> None:
        """The engine's questions, on the model's real inputs, with a made-up loss of its outputs."""
        rows = len(lot.indices)
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if has_rows(leaf, rows)]
        if not places:
            return  # not this lot but an evaluation that forgot no_grad; or the step will be refused

        def rebuild(parts: list[Tensor]) -> Any:
            given = dict(zip(places, parts, strict=True))
            return tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], form)

        batch, self._rebuild = Keyed([_finite(leaves[i].detach()) for i in places], lot.records, source), rebuild
        with self.looking():
            try:
                with self._aside():
                    self._ask(batch, lot)
            except Unseparable as reason:
                self._take_loop(str(reason))
            except Exception as error:
                found = explain_rows(
                    lambda some: self.run_keyed(take(batch, torch.tensor(some))), lot.indices.tolist(), error
                )
                if found is None:
                    raise
                found = self._refused(found)
                raise found from found.__cause__
            finally:
                del self._rebuild

    def _ask(self, batch: Keyed, lot: Lot) -> None:
        self_check.refuse_unsteady(self, batch)
        if self.site.alone:
            self._take_loop("what it draws cannot be told apart by example")
        if batch_size(batch) > 1:
            self._look_at_pairs(batch, lot)
        elif not self._by_module and self._axes is None:
            self._learn(batch)
        self._look_at_losses(batch)

    def _look_at_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any], padded: Padded) -> None:
        """Whether a record's padding has an effect, on any lot in which records look otherwise than alone."""
        with self.looking(), self._aside():
            padded.refuse_difference(self, args, kwargs)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Around passes that leave the generators as they were, in the model's own precision."""
        with torch.autocast(self.layout.device.type, enabled=False), torch.random.fork_rng(devices=[]):
            yield

    def _look_at_pairs(self, batch: Keyed, lot: Lot) -> None:
        if not self._checked:
            problem = self._problem(batch)
            for shift in range(_MADE_UP):  # empty rows, say, or all was dropped out: any others will do
                if problem is None:
                    problem = self._problem_with_made_up(batch, shift)
            if problem is None:
                raise ConfigurationError(
                    "the model cannot be checked on the first lot, for its outputs are not finite, have no gradient or "
                    "rest on ties: normalise the data, look at the initial weights"
                )
            if problem:
                self._take_loop(problem)
            self._checked = True
        problem = self_check.mixing(self, batch)
        if problem:
            self._take_loop(problem)
        if self._looked_at is not lot:
            self._looked_at = lot
            self.looks.told(self.looks.step)

    def _problem_with_made_up(self, batch: Keyed, shift: int) -> str | None:
        """The same of other numbers, in turns with other words: what a first lot holds must not end a run."""
        tables = [m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        words = min(tables) if tables and shift % 2 else None
        made_up = Keyed([_made_up(part, words) for part in batch.rows], batch.records + shift, batch.source)
        try:
            return self._problem(made_up)
        except PrivacyError:
            raise
        except Exception:  # a model that takes no such words, labels among its inputs for one
            if words is None:
                raise
            return None

    def _look_at_losses(self, batch: Keyed) -> None:
        """Is a loss that the model itself returns the declared reduction of its examples' own?"""
        some = take(batch, slice(0, _COMPARED))
        together = self._scalars(some)
        if not together:
            return
        alone = [self._scalars(take(some, slice(i, i + 1))) for i in range(batch_size(some))]
        for place, value in together.items():
            own = torch.stack([each[place] for each in alone if place in each])
            expected = own.mean() if self.mean else own.sum()
            if len(own) < len(alone) or not torch.allclose(value, expected, rtol=1e-3, atol=1e-6, equal_nan=True):
                self.joint_losses.add(place)

    def _scalars(self, batch: Keyed) -> dict[int, Tensor]:
        """Numbers with a gradient that the model returns for these rows."""
        outputs = self.run_keyed(batch)
        found = {i: o for i, o in enumerate(outputs_of(outputs)) if o.dim() == 0 and o.requires_grad}
        return {i: o.detach().double() for i, o in found.items()}

    def run_keyed(self, batch: Keyed) -> Any:
        """The model's output for these rows, with their own draws."""

        def work(rows: Batch) -> Any:
            args, kwargs = self._rebuild(plain(rows))
            with torch.enable_grad():
                return self.model(*args, **kwargs)

        single = batch_size(batch) == 1
        return self.site.run(
            lambda current: current.forward(lambda: work(batch)),
            batch.source,
            batch.records,
            lambda rows: work(take(batch, rows)),
            single,
        )

    def _probe(self, model: nn.Module, batch: Batch) -> Tensor:
        """One made-up loss per example: the outputs times fixed random numbers."""
        rows = len(batch[0])
        args, kwargs = self._rebuild(batch)
        parts = []
        for output in outputs_of(model(*args, **kwargs)):
            if not output.requires_grad or output.dim() == 0:
                continue  # a scalar, such as a loss, says nothing about one example
            if output.shape[0] != rows:
                self._take_loop("it returns tensors whose first dimension is not the lot's")
            flat = output.reshape(rows, -1)
            parts.append(flat @ weights(flat.shape[1]).to(flat))
        if not parts:
            self._take_loop("it returns no tensor with a row for each example")
        return torch.stack(parts).sum(0)

    def _take_loop(self, reason: str) -> None:
        # There is no loop to take here.
        raise ConfigurationError(
            "the model must keep the examples of a lot apart, in the first dimension of its layers and outputs, and "
            f"use weights through their own layers only: {reason}. Change that, or {TRAINER}"
        )


def _finite(tensor: Tensor) -> Tensor:
    """Anything finite will do for a check of the model."""
    return torch.where(tensor.isfinite(), tensor, 0.5) if tensor.is_floating_point() else tensor


def _made_up(tensor: Tensor, words: int | None) -> Tensor:
    """Other numbers of the same kind, the same in every run; whole ones below `words`, or as they are."""
    if not tensor.is_floating_point():
        if words is None or tensor.dtype == torch.bool:
            return tensor
        return torch.arange(tensor.numel()).mul(7919).remainder(words).reshape(tensor.shape).to(tensor)
    return weights(tensor.numel()).reshape(tensor.shape).to(tensor)


def has_rows(leaf: Any, rows: int) -> bool:
    """Whether it is a tensor with a row for each example."""
    return isinstance(leaf, Tensor) and leaf.shape[:1] == (rows,)


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors that a model returns, also in objects of its own."""
    return list(_found(output))


def _found(output: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, Tensor))
