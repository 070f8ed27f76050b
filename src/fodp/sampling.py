"""Poisson lots: every record joins a lot independently, with the declared public rate.

That is the sampling the accountants amplify by. Nothing here derives a rate from data or skips a lot because
it is empty, and nothing but the lot itself shows how many records it has: that number is private.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
)

from fodp import _checks
from fodp._checks import ConfigurationError, DataError, PrivacyError
from fodp._datasets import refuse_foreign
from fodp._forms import Form, leaves, mapped
from fodp._looks import Looks, is_rare
from fodp.draws import Site, Source, Unkeyable, generators_kept
from fodp.draws.generators import foreign_state, restore_foreign
from fodp.repeats import refuse_repeated
from fodp.skips import applies, skipped_indices

Collate = Callable[[list[Any]], Any]

# Entries of tensors that are gathered at once, of lots far larger than usual: a larger piece of memory is asked of
# the system anew each time, page by page, which takes longer than all that is done with it.
_FETCHED_AT_ONCE = 2**22


class WordStreams(Protocol):
    """What sampling needs of `fodp.noise.Streams`: independent uniform 64-bit words per (step, name)."""

    @property
    def seed(self) -> int | None:
        """What the words can be repeated by; None: nothing."""
        ...

    def words(self, count: int, step: int, name: str) -> npt.NDArray[np.uint64]:
        """`count` independent uniform 64-bit words."""
        ...


def poisson_indices(words: npt.NDArray[np.uint64], rate: float) -> npt.NDArray[np.int64]:
    """The places i with word_i < ⌊rate·2⁶⁴⌋, in increasing order.

    The bound is exact integer arithmetic: with uniform words each place is taken with a probability of at
    most `rate`, short of it by less than 2⁻⁶⁴, and a rate of 1 takes all.
    """
    bound = _bound(_checks.fraction("rate", rate))
    return np.arange(words.size, dtype=np.int64) if bound is None else (words < bound).nonzero()[0]


@functools.cache
def _bound(rate: float) -> np.uint64 | None:
    """⌊rate·2⁶⁴⌋, None for the rate 1."""
    bound = int(math.ldexp(rate, 64))  # scaling by 2⁶⁴ is exact, int() rounds down
    return None if bound == 2**64 else np.uint64(bound)


@dataclasses.dataclass(frozen=True, eq=False)
class Lot:
    """One Poisson lot. Step, rate and name are public; which and how many records it has is private."""

    step: int
    rate: float
    name: str
    indices: torch.Tensor = dataclasses.field(repr=False)  # int64, increasing
    # What the records are called in draws of their own (`fodp.draws`): their places in the data, unless a replay
    # of the run without one of them says otherwise.
    names: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    # Where records take turns: those whose turn it was, increasing; None: all.
    among: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    # Where the unit is a person (`fodp.people`): for each record the number of its owner. Records of one lie together.
    owners: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    # Of a lot that several ranks divide (`fodp.ranks`): the places of this rank's records in the whole lot, and how
    # many records that has.
    places: torch.Tensor | None = dataclasses.field(default=None, repr=False)
    drawn: int | None = dataclasses.field(default=None, repr=False)

    @property
    def count(self) -> int:
        """How many have been drawn, on all ranks together: records, or people. Private."""
        if self.drawn is not None:
            return self.drawn
        return len(self.indices if self.owners is None else self.owners.unique_consecutive())

    def own(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of numbers for each record of the whole lot, those of the records here."""
        return numbers if self.places is None else numbers[self.places.to(numbers.device, non_blocking=True)]

    @property
    def records(self) -> torch.Tensor:
        """A number for each record, under which it draws."""
        return self.indices if self.names is None else self.names


class Lots(Protocol):
    """What draws the lots of a run."""

    @property
    def rate(self) -> float:
        """The chance of a record, or of one whose turn it is."""

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step and name, at the usual rate or at one given for this step."""

    def whose_turn(self, step: int) -> torch.Tensor | None:
        """Indices eligible at this step, or None if all are. Secret: for audits only."""

    def next_round(self, step: int) -> int:
        """The first step, from this one on, at which new groups may be drawn."""


class PoissonSampler:
    """Draws lots from `size` records: each record independently with probability `rate`, empty lots included.

    The lot of a (step, name) depends on nothing but the streams, the rate and, where it is drawn by skips
    (`fodp.skips`: from four million records on), the size. With secure streams it can be drawn only once.

    `turns` b above 1: each record belongs to one of b groups, and step t draws from group t mod b only (`rate` is the
    chance of a record whose turn it is). The group of a record is drawn for it alone and stays secret: a record more
    or less moves nobody to another group, wherever in the data it is. Groups last as long as the process: a secure run
    that is resumed draws others, so it goes on with a whole round (`next_round`).
    """

    _by_skips = True  # where records have no names of their own to be drawn by

    def __init__(self, size: int, rate: float, streams: WordStreams, turns: int = 1) -> None:
        self.size = _checks.whole("size", size)
        self.rate = _checks.fraction("rate", rate)
        self.turns = _checks.whole("turns", turns)
        self._streams = streams
        self._groups: npt.NDArray[np.uint64] | None = None

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step, at the sampler's rate or at one given for this step."""
        used = self.rate if rate is None else _checks.fraction("rate", rate)
        among, bound = self.whose_turn(step), _bound(used)
        if self._by_skips and bound is not None and applies(self.size, used):  # in time and memory of the lot
            indices = skipped_indices(self._streams, self.size, int(bound), step, name)
        else:
            indices = poisson_indices(self._words(step, name), used)
        if self._groups is not None:
            indices = indices[self._groups[indices] == step % self.turns]
        return Lot(step, used, name, torch.from_numpy(indices), among=among)

    def whose_turn(self, step: int) -> torch.Tensor | None:
        """The records that this step may draw, in increasing order; None: all."""
        if self.turns == 1:
            return None
        return torch.from_numpy((self._groups_at(step) == step % self.turns).nonzero()[0])

    def next_round(self, step: int) -> int:
        """The first step, from this one on, at which new groups may be drawn: earlier, a record could have two turns
        in one round."""
        return -(-step // self.turns) * self.turns

    def _groups_at(self, step: int) -> npt.NDArray[np.uint64]:
        if self._groups is None:
            first = step if self._streams.seed is None else 0
            if first != self.next_round(first):
                raise PrivacyError(
                    f"records take turns in rounds of {self.turns} steps, and step {step} is within one: go on with "
                    f"step {self.next_round(step)}"
                )
            self._groups = self._words(first, "turns") % np.uint64(self.turns)
        return self._groups

    def _words(self, step: int, name: str) -> npt.NDArray[np.uint64]:
        """A word for each of those who may be drawn."""
        return self._streams.words(self.size, step, name)


class PoissonBatchSampler(Sampler[list[int]]):
    """Poisson lots for a `DataLoader` over a map-style data set; use `LotCollate` with it for empty lots.

    Yields exactly `steps` lists of indices, those of steps `start` to `start + steps - 1`, empty ones
    included. It runs once: going over the same lots again and accounting them as fresh ones would break the
    guarantee. `len()` is the number of steps, a public number.

        lots = PoissonBatchSampler(data, rate, steps, streams)
        loader = DataLoader(data, batch_sampler=lots, collate_fn=LotCollate(data))
    """

    def __init__(self, dataset: Any, rate: float, steps: int, streams: WordStreams, start: int = 0) -> None:
        if tensor_columns(dataset) is not None and not isinstance(dataset, TensorDataset):
            raise ConfigurationError("a DataLoader cannot index a tuple of tensors; wrap it: TensorDataset(*tensors)")
        self._sampler = PoissonSampler(record_count(dataset), rate, streams)
        self._steps = range(_checks.whole("start", start, minimum=0), start + _checks.whole("steps", steps))
        self._used = False

    def __iter__(self) -> Iterator[list[int]]:
        # a generator: a DataLoader with workers asks for two iterators and uses one
        if self._used:
            raise PrivacyError(
                f"the lots of steps {self._steps.start} to {self._steps.stop - 1} were already drawn; "
                f"for more steps make a new PoissonBatchSampler with start={self._steps.stop}"
            )
        self._used = True
        for step in self._steps:
            yield self._sampler.draw(step).indices.tolist()

    def __len__(self) -> int:
        return len(self._steps)


class LotCollate:
    """A `collate_fn` that turns an empty lot into a batch like any other, without records.

    The empty batch takes structure, types and the other dimensions from the data set's first record: no collate
    function is ever given an empty list. Lists with an item for each record are marked (`fodp._forms.Ragged`).
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None, *, counted: bool = False) -> None:
        if not counted:
            record_count(dataset)
        self._records = _records(dataset)
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
        self._records = _records(dataset)
        self._columns = tensor_columns(dataset) if collate_fn is None else None
        self._collate = LotCollate(dataset, collate_fn, counted=True)
        # How many records to fetch at a time, None where that is not known beforehand.
        self.rows_at_once = None if self._columns is None else _rows_of(self._columns, _FETCHED_AT_ONCE)
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
                column.index_select(0, indices.to(column.device, non_blocking=True)) for column in self._columns
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
            self._reading.foreign = self._reading.alone = True  # each record with generators of its own from now on
            self._reading.quiet = False
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


def record_count(dataset: Any, owners: Any = None) -> int:
    """How many records a map-style data set has; refuses what cannot be sampled record by record.

    A tuple of tensors counts as columns: record i is row i of each. Data that holds a record twice is refused
    (`fodp.repeats`), unless `owners` say that both places are one person's.
    """
    count = _size(dataset)
    refuse_repeated(dataset, owners)
    return count


def _size(dataset: Any) -> int:
    """The same, without a look for repeats."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "a DataLoader draws batches of its own, which are not the Poisson lots that the plan accounts for: pass "
            "its data set, loader.dataset (and collate_fn=loader.collate_fn, if it has one of its own)"
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{kind} is an iterable data set, which cannot be Poisson sampled; load its records into a "
            "map-style Dataset (__len__ and __getitem__), for example a TensorDataset or list(dataset)"
        )
    refuse_foreign(dataset)
    columns = tensor_columns(dataset)
    if columns is not None:
        count = _common_length(columns)
    elif not all(hasattr(dataset, m) for m in ("__len__", "__getitem__")):
        raise DataError(
            f"{kind} is not a map-style data set: it needs __len__, and __getitem__ for records 0 to len-1; "
            "wrap it in a torch.utils.data.Dataset or TensorDataset"
        )
    else:
        count = len(dataset)
    if count == 0:
        raise DataError("the data set has no records; private training needs at least one")
    return count


def _common_length(columns: tuple[torch.Tensor, ...]) -> int:
    lengths = {column.shape[:1] for column in columns}
    if len(lengths) != 1 or lengths == {()}:
        raise DataError(
            "the tensors of a data set must share their leading dimension, the records: give each a row for every "
            "record"
        )
    return lengths.pop()[0]


def _rows_of(columns: tuple[torch.Tensor, ...], entries: int) -> int:
    """How many records have so many entries."""
    return max(1, entries // max(1, sum(math.prod(column.shape[1:]) for column in columns)))


def tensor_columns(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The columns of a data set that is made of tensors, else None."""
    if isinstance(dataset, TensorDataset):
        # a subclass may change records on the way out, so only the class itself is taken apart
        return dataset.tensors if type(dataset) is TensorDataset else None
    is_columns = isinstance(dataset, tuple) and dataset and all(isinstance(c, torch.Tensor) for c in dataset)
    return dataset if is_columns else None


def _records(dataset: Any) -> Any:
    """The data set as something whose item i is record i."""
    _size(dataset)
    return TensorDataset(*dataset) if isinstance(dataset, tuple) and tensor_columns(dataset) else dataset
