"""What a batch is padded to in a loop of one's own: whether the model's outputs, and their gradients, mind.

How a record is compared with itself alone is `fodp.clipping.padding`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fodp.clipping import self_check
from fodp.clipping.batches import doubled
from fodp.clipping.padding import ADVICE, moved, padded_records
from fodp.draws import Pass, Source
from fodp.errors import DataError
from fodp.lots.reading import Fetcher
from fodp.sampling import Lot
from fodp.support import forms

if TYPE_CHECKING:
    from fodp.sources.examiner import Examiner

Shapes = list[tuple[int, dict[tuple[int, ...], tuple[int, ...]]]]  # of a place: shapes in the lot, and the record's own
Common = list[tuple[slice, ...]]  # of outputs: what a record has alone and in its lot


@dataclass(frozen=True)
class Padded:
    """A lot whose records have other shapes alone: the tensors of its batch, and of some records' own batches."""

    batch: list[Any]
    alone: list[tuple[int, int, list[Any]]]  # place in the lot, number of the record, tensors of its own batch
    source: Source
    batched_by: str | None
    rows: int
    shapes: Shapes = field(default_factory=list)

    def refuse_difference(self, engine: "Examiner", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the model gives a record another output, or that another gradient, with its lot's padding than
        without."""
        leaves, form = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.shape[:1] == (self.rows,)]
        if not places:
            return  # not this lot but an evaluation that forgot no_grad; or the step will be refused
        found = [self._place(leaves[i]) for i in places]
        sources = [place for place in found if place is not None]
        if len(sources) < len(found):
            raise DataError(
                f"{self.batched_by} makes records look otherwise in a lot than alone, and the model is given other "
                f"tensors than the loader's, so that it cannot be seen whether that has an effect: {ADVICE}"
            )
        for row, record, own in self.alone:
            in_lot, alone = leaves.copy(), leaves.copy()
            for i, place in zip(places, sources, strict=True):
                in_lot[i], alone[i] = leaves[i].detach()[row : row + 1], own[place]
            passes = [_OnePass(engine, given, form, self.source, record) for given in (in_lot, alone)]
            outputs = [each.outputs(False) for each in passes]
            self.shapes.append((row, _shapes([*self.batch, *outputs[0]], [*own, *outputs[1]])))
            if not self_check.is_rounding(engine, _apart(passes), lambda passes=passes: _apart(passes, True)):  # type: ignore[misc]
                raise DataError(
                    f"the model's output for a record depends on how far other records of its lot make "
                    f"{self.batched_by} pad it: one long record would change the gradients of all: {ADVICE}"
                )

    def _place(self, leaf: Tensor) -> int | None:
        """Which tensor of the batch this is."""
        for i, given in enumerate(self.batch):
            if isinstance(given, Tensor) and (
                given is leaf or (given.shape == leaf.shape and given.dtype == leaf.dtype and torch.equal(given, leaf))
            ):
                return i
        return None


@dataclass(frozen=True)
class _OnePass:
    """The model on one record, in one of its two shapes."""

    engine: "Examiner"
    leaves: list[Any]  # the model's arguments
    form: TreeSpec
    source: Source
    record: int

    def outputs(self, double: bool) -> list[Tensor]:
        """What the model gives for the record."""
        return self._run(double, lambda current, found: found)

    def numbers(self, double: bool, common: Common) -> list[Tensor]:
        """The common part of each output, and the gradient of a made-up loss of it."""

        def work(current: Pass, outputs: list[Tensor]) -> list[Tensor]:
            parts = [output[where] for output, where in zip(outputs, common, strict=True)]
            telling = [part for part in parts if part.requires_grad]
            if not telling:
                return parts
            loss = torch.stack(
                [(part * weights(part.numel()).reshape(part.shape).to(part)).sum().double() for part in telling]
            ).sum()
            parameters = self.engine.layout.parameters
            gradients = current.backward(lambda: torch.autograd.grad(loss, parameters, allow_unused=True))
            return [*parts, torch.cat([g.to_dense().flatten() for g in gradients if g is not None])]

        return self._run(double, work)

    def _run(self, double: bool, work: Callable[[Pass, list[Tensor]], list[Tensor]]) -> list[Tensor]:
        change = doubled if double else lambda leaf: leaf
        given = [change(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(given, self.form)

        def passed(current: Pass) -> list[Tensor]:
            outputs = current.forward(lambda: self.engine.model(*args, **kwargs))
            found = [o for o in tree_leaves(outputs) if isinstance(o, Tensor) and o.shape[:1] == (1,)]
            return work(current, [o for o in found if o.is_floating_point()])

        with torch.enable_grad():
            records = torch.tensor([self.record])
            found: list[Tensor] = self.engine.site.run(passed, self.source, records, lambda rows: None, single=True)
        return [number.detach() for number in found]


def _apart(passes: list[_OnePass], double: bool = False) -> float:
    """How far apart the two shapes of a record are, relative to the larger."""
    first, second = (each.outputs(double) for each in passes)
    if [o.dim() for o in first] != [o.dim() for o in second]:
        return float("inf")
    common = [
        tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        for a, b in zip(first, second, strict=True)
    ]
    in_lot, alone = (each.numbers(double, common) for each in passes)
    if [n.shape for n in in_lot] != [n.shape for n in alone]:
        return float("inf")
    return max((moved(a, b) for a, b in zip(in_lot, alone, strict=True)), default=0.0)


def _shapes(in_lot: list[Any], alone: list[Any]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What shape a record's tensors have alone, by that in the lot; nothing where one shape has become two."""
    pairs = {(tuple(a.shape[1:]), tuple(b.shape[1:])) for a, b in zip(in_lot, alone, strict=False) if _two(a, b)}
    found = dict(pairs)
    return found if len(found) == len(pairs) else {}


def _two(here: Any, alone: Any) -> bool:
    return isinstance(here, Tensor) and isinstance(alone, Tensor) and 0 < here.dim() == alone.dim()


def weights(count: int) -> Tensor:
    """Fixed numbers, without PyTorch's generator."""
    return torch.arange(1, count + 1, dtype=torch.float64).mul(12.9898).sin()


def compare_alone(fetcher: Fetcher, lot: Lot, source: Source, batch: Any) -> Padded | None:
    """Collate some records of the lot alone; None where they look there as they do in the lot."""
    alone = padded_records(fetcher, lot.indices, lot.records, source, batch)
    own = [(row, record, list(forms.leaves(rows))) for row, record, rows in alone]
    if not own:
        return None
    return Padded(list(forms.leaves(batch)), own, source, fetcher.batched_by, len(lot.indices))
