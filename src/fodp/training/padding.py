"""Records that look otherwise in a lot than alone: what a `collate_fn` pads, and whether a model minds.

A `collate_fn` that pads to the longest record of a lot lets that record change how all others look. That is harmless
where padding has no effect, and not where a model takes a mean over all positions.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from fodp._checks import PrivacyError
from fodp.draws import Source
from fodp.sampling import Fetcher, Lot

if TYPE_CHECKING:
    from fodp.training.recorder import Recorder

_COMPARED = 3  # records of a lot
_TOLERANCE = 1e-3
ADVICE = (
    "pad to a fixed length that is public, or give the model a mask so that padding has no effect (a mean over a "
    "record's own positions only)"
)


@dataclass(frozen=True)
class Padded:
    """A lot whose records have other shapes alone: the tensors of its batch, and of some records' own batches."""

    batch: list[Any]
    alone: list[tuple[int, int, list[Any]]]  # place in the lot, number of the record, tensors of its own batch
    source: Source

    def refuse_difference(self, recorder: "Recorder", leaves: list[Any], places: list[int], form: TreeSpec) -> None:
        """Raise if the model gives a record another output alone than in its lot."""
        sources = [self._place(leaves[i]) for i in places]
        if None in sources:
            raise PrivacyError(
                "collate_fn makes records look otherwise in a lot than alone, and the model is given other tensors "
                f"than the loader's, so that it cannot be seen whether that has an effect: {ADVICE}"
            )
        whole = self._outputs(recorder, leaves, form, torch.tensor(self._records(leaves, places)))
        for row, record, own in self.alone:
            given = dict(zip(places, [own[s] for s in sources if s is not None], strict=True))
            changed = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            found = self._outputs(recorder, changed, form, torch.tensor([record]))
            if len(found) != len(whole) or not all(_close(a[row], b[0]) for a, b in zip(whole, found, strict=True)):
                raise PrivacyError(
                    "the model's output for a record depends on how far other records of its lot make collate_fn pad "
                    f"it: one long record would change the gradients of all: {ADVICE}"
                )

    def _place(self, leaf: Tensor) -> int | None:
        """Which tensor of the batch this is."""
        for i, given in enumerate(self.batch):
            if isinstance(given, Tensor) and (
                given is leaf or (given.shape == leaf.shape and given.dtype == leaf.dtype and torch.equal(given, leaf))
            ):
                return i
        return None

    def _records(self, leaves: list[Any], places: list[int]) -> list[int]:
        """Numbers for the rows of the lot: the compared ones draw under their own."""
        numbers = [-1] * len(leaves[places[0]])
        for row, record, _ in self.alone:
            numbers[row] = record
        spare = max(numbers) + 1
        return [spare + i if number < 0 else number for i, number in enumerate(numbers)]

    def _outputs(self, recorder: "Recorder", leaves: list[Any], form: TreeSpec, records: Tensor) -> list[Tensor]:
        args, kwargs = tree_unflatten(leaves, form)
        outputs = recorder.site.run(
            lambda current: current.forward(lambda: recorder.model(*args, **kwargs)),
            self.source,
            records,
            lambda rows: None,
            single=len(records) == 1,
        )
        found = [o for o in tree_leaves(outputs) if isinstance(o, Tensor) and o.shape[:1] == (len(records),)]
        return [o.detach() for o in found if o.is_floating_point()]


def compare_alone(fetcher: Fetcher, lot: Lot, source: Source, batch: Any) -> Padded | None:
    """Collate some records of the lot alone; None where they look there as they do in the lot."""
    whole = tree_leaves(batch)
    alone = []
    for row in torch.linspace(0, len(lot.indices) - 1, min(len(lot.indices), _COMPARED)).long().tolist():
        index, record = int(lot.indices[row]), int(lot.records[row])
        own = tree_leaves(fetcher.alone(index, source, record))
        if len(own) != len(whole):
            raise PrivacyError(f"collate_fn returns another form of batch for one record than for a lot: {ADVICE}")
        pairs = [(a[row], b[0]) for a, b in zip(whole, own, strict=True) if _are_rows(a, b, len(lot.indices))]
        if not all(_close(a, b) for a, b in pairs):
            raise PrivacyError(
                "collate_fn makes another batch of a record alone than in its lot, so it mixes records (or normalises "
                "by the lot): let it treat every record by itself"
            )
        if any(a.shape != b.shape for a, b in pairs):
            alone.append((row, record, own))
    return Padded(whole, alone, source) if alone else None


def _are_rows(in_lot: Any, alone: Any, rows: int) -> bool:
    return (
        isinstance(in_lot, Tensor)
        and isinstance(alone, Tensor)
        and in_lot.shape[:1] == (rows,)
        and alone.shape[:1] == (1,)
        and in_lot.dim() == alone.dim()
    )


def _close(here: Tensor, alone: Tensor) -> bool:
    """Equal where both have entries."""
    common = tuple(slice(0, min(a, b)) for a, b in zip(here.shape, alone.shape, strict=True))
    here, alone = here[common].double(), alone[common].double()
    return torch.allclose(here, alone, rtol=_TOLERANCE, atol=_TOLERANCE * _size(alone), equal_nan=True)


def _size(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
