"""Reading the records of a lot into one batch; an empty lot gives a batch like any other, without records."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    default_collate,
)

from fodp.draws import Site, Source, Unkeyable, generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.errors import ConfigurationError, DataError
from fodp.lots.records import record_count, records_in, rows_of, tensor_columns
from fodp.support import checks
from fodp.support.forms import Form, leaves, mapped
from fodp.support.looks import Looks, is_rare

Collate = Callable[[list[Any]], Any]

# Entries of tensors that are gathered at once, of lots far larger than usual: a larger piece of memory is asked of
# the system anew each time, page by page, which takes longer than all that is done with it.
_FETCHED_AT_ONCE = 2**22


@dataclass(frozen=True, kw_only=True)
class LotReading:
    """How the records of a lot are read; each field is a keyword of `Trainer` and of `make_private`.

    Args:
        collate_fn: makes a batch of a list of records: tensors with the examples first, lists with an item for each
            example (ragged data, texts), and dicts, lists and tuples of them (also a tokenizer's `BatchEncoding`). It
            is never given an empty list. Where it pads to the longest record of a lot, the padding must have no effect.
        num_workers: processes that read lots ahead while others are trained on: the run is the same, bit for bit. Data
            made of tensors, and methods with several lots in a step, are read without them.
        pin_memory: whether workers put batches into memory that an accelerator copies from quickly.
        microbatch: the most examples that are in flight at once; None for what fits.
        allow_non_finite: takes data of tensors that is not finite, which is else refused before the first step: an
            example without a finite gradient counts as zero.
    """

    collate_fn: Collate | None = None
    num_workers: int = 0
    pin_memory: bool = False
    microbatch: int | None = None
    allow_non_finite: bool = False

    def __post_init__(self) -> None:
        """Raise for values that no lot could be read with."""
        checks.function("collate_fn", self.collate_fn)
        checks.whole("num_workers", self.num_workers, minimum=0)
        checks.switch("pin_memory", self.pin_memory)
        checks.switch("allow_non_finite", self.allow_non_finite)
        if self.microbatch is not None:
            checks.whole("microbatch", self.microbatch)
        if self.pin_memory and not self.num_workers:
            raise ConfigurationError("pin_memory is for batches that workers read ahead: set num_workers too")


class LotCollate:
    """A `collate_fn` that turns an empty lot into a batch like any other, without records.

    The empty batch takes structure, types and the other dimensions from the data set's first record: no collate
    function is ever given an empty list. Lists with an item for each record are marked (`fodp.support.forms.Ragged`).
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None, *, counted: bool = False) -> None:
        if not counted:
            record_count(dataset)
        self._records = records_in(dataset)
        self._collate: Collate = default_collate if collate_fn is None else collate_fn
        self._learned: tuple[Form, Any] | None = None

    def refuse_what_cannot_be_divided(self) -> None:
        """Raise unless the batch of some records can be had from a larger one, by taking their rows."""
        self._learn()[0].refuse_what_cannot_be_divided()

    def __call__(self, records: list[Any]) -> Any:
        """The batch of these records; of none, an empty one."""
        form, empty = self._learn()
        return form.marked(self._collate(records), len(records)) if records else form.emptied(empty)

    def plainly(self, records: list[Any]) -> Any:
        """What the collate function itself makes of them."""
        return self._collate(records)

    def _learn(self) -> tuple[Form, Any]:
        if self._learned is None:
            foreign = foreign_state()
            try:
                with generators_kept():  # a data set may draw when it is read; nobody else's draws change for it
                    record = self._records[0]
                    one, two, three = (self._collate(_copies(record, n)) for n in (1, 2, 3))
            finally:
                restore_foreign(foreign)
            form = Form.of(two, three)
            self._learned = form, form.emptied(one)
        return self._learned


class Fetcher:
    """Fetches the records of a lot as one batch; empty lots give a batch with leading dimension 0.

    `TensorDataset` and tuples of tensors, without a `collate_fn`, are gathered column by column and give a
    tuple of tensors. Any other map-style data set is read record by record and collated. What it draws for a record,
    from PyTorch's, NumPy's or Python's generator, depends on that record and the source alone; a `collate_fn` may
    draw by PyTorch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None, owners: Any = None) -> None:
        self.size = record_count(dataset, owners)
        self._records = records_in(dataset)
        self._columns = tensor_columns(dataset) if collate_fn is None else None
        self._collate = LotCollate(dataset, collate_fn, counted=True)
        # How many records to fetch at a time, None where that is not known beforehand.
        self.rows_at_once = None if self._columns is None else rows_of(self._columns, _FETCHED_AT_ONCE)
        # What makes a batch of many records at once, and could pad them to the longest; None: each is read by itself.
        self.batched_by: str | None = None
        if collate_fn is not None:
            self.batched_by = "collate_fn"
        elif self._columns is None and callable(getattr(self._records, "__getitems__", None)):
            self.batched_by = f"__getitems__ of the {type(self._records).__name__}"
        self._reading, self._collating = Site("the data set"), Site("collate_fn")
        self.looks = Looks()  # in which steps a record is read and collated again, to compare

    def fetch(self, indices: torch.Tensor, source: Source | None = None, records: torch.Tensor | None = None) -> Any:
        """The batch of these records, in memory of its own. `records` are the numbers that they draw under."""
        if self._columns is not None:
            return tuple(
                [column.index_select(0, indices.to(column.device, non_blocking=True)) for column in self._columns]
            )
        names = indices if records is None else records
        found = self._read(indices, source, names)
        if source is None or not found:
            return self._collate(found)
        if not self.looks.due(source.step, is_rare(source.step)):
            return self._collated(found, source, names)
        self._refuse_unsteady(found[0], self._read(indices[:1], source, names[:1])[0])
        if len(found) == 1:  # one record alone tells little
            return self._collated(found, source, names)
        self.looks.told(source.step)
        first = copy.copy(found[0])  # a collate function may take its records apart
        before = mapped(self._collated([copy.copy(first)], source, names[:1]), _cloned)
        batch = self._collated(found, source, names)
        self._refuse_memory(before, self._collated([first], source, names[:1]))
        return batch

    @property
    def forms(self) -> tuple[torch.Tensor, ...] | None:
        """Empty columns: the shapes and types of records that are tensors, which are public; None where they differ."""
        return None if self._columns is None else tuple(column[:0] for column in self._columns)

    def records_of(self, numbers: list[int]) -> list[Any]:
        """Some records as the data set gives them, without draws of their own."""
        return self._read_plainly(numbers)

    def made_batch(self, records: list[Any]) -> Any:
        """What collating makes of some records, not compared with any other batch."""
        return self._collate.plainly(records)

    def records(self, indices: torch.Tensor, source: Source) -> list[Any]:
        """These records as the data set gives them, not yet a batch."""
        return self._read(indices, source, indices)

    def refuse_what_cannot_be_divided(self) -> None:
        """Raise if `collate_fn` makes batches whose rows cannot be told from what is no record's."""
        if self._columns is None:
            self._collate.refuse_what_cannot_be_divided()

    def alone(self, index: int, source: Source, record: int) -> Any:
        """The batch that one record makes by itself."""
        return self.fetch(torch.tensor([index]), source, torch.tensor([record]))

    def _read(self, indices: torch.Tensor, source: Source | None, names: torch.Tensor) -> list[Any]:
        if source is None:
            return self._read_plainly(indices.tolist())
        if not self._reading.alone:
            found: list[Any] = []
            with generators_kept() as marks:
                self._reading.look_for_foreign(lambda: found.extend(self._read(indices, None, names)))
                if not marks.moved() and not self._reading.foreign:
                    return found
            self._reading.take_seeded()
        return [
            self._reading.run(
                lambda current, at=index: current.forward(lambda: self._records[at]),  # type: ignore[misc]
                source,
                name[None],
                lambda _: None,
                single=True,
            )
            for index, name in zip(indices.tolist(), names, strict=True)
        ]

    def _read_plainly(self, indices: list[int]) -> list[Any]:
        """All at once from a data set that knows how: a table on disk is read once and not row by row."""
        at_once = getattr(self._records, "__getitems__", None)
        if not callable(at_once) or len(indices) < 2:
            return [self._records[index] for index in indices]
        found = list(at_once(indices))
        if len(found) != len(indices):
            raise DataError(
                f"__getitems__ of the {type(self._records).__name__} returned another number of records than it "
                "was asked for: it must return one for each, in their order"
            )
        return found

    def _refuse_unsteady(self, first: Any, second: Any) -> None:
        """Raise if one record, read twice with the same random numbers, is two; among others it may be padded."""
        if not _alike(first, second, longer=callable(getattr(self._records, "__getitems__", None))):
            raise DataError(
                "a record that was read twice, with the same random numbers, was not the same: the data set draws from "
                "a generator of its own, or remembers what it has read, and one record would change what others draw. "
                "Let it draw with the global functions of PyTorch, NumPy or Python"
            )

    @staticmethod
    def _refuse_memory(before: Any, after: Any) -> None:
        """Raise if `collate_fn` makes another batch of one record once it was given others."""
        if not all(map(_alike, leaves(before), leaves(after))):
            raise DataError(
                "collate_fn made another batch of one record, with the same random numbers, after it was given others: "
                "it remembers what it has seen, and one record would change what others are. Let it treat every batch "
                "by itself"
            )

    def _collated(self, found: list[Any], source: Source, names: torch.Tensor) -> Any:
        batch: list[Any] = []
        first = copy.copy(found[0])  # a collate function may take its records apart

        def collate() -> None:
            try:
                batch[:] = [
                    self._collating.run(
                        lambda current: current.forward(lambda: self._collate(found)),
                        source,
                        names,
                        lambda rows: self._collate(_copies(first, len(rows))),
                    )
                ]
            except Unkeyable as reason:
                raise ConfigurationError(
                    f"collate_fn draws random numbers for the whole lot, and {reason}: draw for each record in the "
                    "data set, or in the model"
                ) from None

        self._collating.look_for_foreign(collate)
        if self._collating.foreign:
            raise ConfigurationError(
                "collate_fn draws from NumPy's or Python's generator for the whole lot, where one record more changes "
                "what all others draw: draw for each record in the data set, or with PyTorch's functions"
            )
        return batch[0]


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _alike(first: Any, second: Any, longer: bool = False) -> bool:
    """Whether two records are the same, as far as they can be compared; `longer`: up to where the shorter one ends."""
    if isinstance(first, Mapping):
        return isinstance(second, Mapping) and all(_alike(first[key], second.get(key), longer) for key in first)
    if isinstance(first, list | tuple):
        if not isinstance(second, list | tuple) or (len(first) != len(second) and not longer):
            return False
        return all(_alike(here, there, longer) for here, there in zip(first, second, strict=False))
    if isinstance(first, torch.Tensor | np.ndarray | float):
        here, there = (torch.as_tensor(value) for value in (first, second))
        if longer and here.dim() == there.dim():
            common = tuple(slice(0, min(sizes)) for sizes in zip(here.shape, there.shape, strict=True))
            here, there = here[common], there[common]
        same = here.shape == there.shape and here.dtype == there.dtype
        return same and bool(((here == there) | ((here != here) & (there != there))).all())
    return not isinstance(first, int | str | bytes) or first == second


def _copies(record: Any, count: int) -> list[Any]:
    return [copy.copy(record) for _ in range(count)]


def collate_lot(dataset: Any, indices: torch.Tensor, collate_fn: Collate | None = None) -> Any:
    """The batch of these records; see `Fetcher`, which spares the checks of every call but the first."""
    return Fetcher(dataset, collate_fn).fetch(indices)
