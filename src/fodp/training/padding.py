"""What a `collate_fn` pads in a loop of one's own: whether the model's outputs mind (`fodp.clipping.padding`)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from fodp import _forms
from fodp._checks import DataError
from fodp.clipping.padding import ADVICE, close, padded_records
from fodp.draws import Source
from fodp.sampling import Fetcher, Lot

if TYPE_CHECKING:
    from fodp.training.recorder import Recorder


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
            raise DataError(
                "collate_fn makes records look otherwise in a lot than alone, and the model is given other tensors "
                f"than the loader's, so that it cannot be seen whether that has an effect: {ADVICE}"
            )
        whole = self._outputs(recorder, leaves, form, torch.tensor(self._records(leaves, places)))
        for row, record, own in self.alone:
            given = dict(zip(places, [own[s] for s in sources if s is not None], strict=True))
            changed = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
            found = self._outputs(recorder, changed, form, torch.tensor([record]))
            if len(found) != len(whole) or not all(close(a[row], b[0]) for a, b in zip(whole, found, strict=True)):
                raise DataError(
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
    alone = padded_records(fetcher, lot.indices, lot.records, source, batch)
    own = [(row, record, list(_forms.leaves(rows))) for row, record, rows in alone]
    return Padded(list(_forms.leaves(batch)), own, source) if own else None
