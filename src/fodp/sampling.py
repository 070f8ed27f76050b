"""Poisson lots: every record joins a lot independently, with the declared public rate.

That is the sampling the accountants amplify by. Nothing here derives a rate from data or skips a lot because
it is empty, and nothing but the lot itself shows how many records it has: that number is private.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Sampler, Subset, TensorDataset, default_collate

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.draws import Site, Source, Unkeyable, generators_kept

Collate = Callable[[list[Any]], Any]

# Entries of tensors that are gathered at once, of lots far larger than usual: a larger piece of memory is asked of
# the system anew each time, page by page, which takes longer than all that is done with it.
_FETCHED_AT_ONCE = 2**22
_FIRST_LOTS = 2  # in which a record is read twice


class WordStreams(Protocol):
    """What sampling needs of `fodp.noise.Streams`: independent uniform 64-bit words per (step, name)."""

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

    @property
    def records(self) -> torch.Tensor:
        """A number for each record, under which it draws."""
        return self.indices if self.names is None else self.names


class PoissonSampler:
    """Draws lots from `size` records: each record independently with probability `rate`, empty lots included.

    The lot of a (step, name) depends on nothing but the streams and the rate. With secure streams it can be
    drawn only once.
    """

    def __init__(self, size: int, rate: float, streams: WordStreams) -> None:
        self.size = _checks.whole("size", size)
        self.rate = _checks.fraction("rate", rate)
        self._streams = streams

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step, at the sampler's rate or at one given for this step."""
        used = self.rate if rate is None else _checks.fraction("rate", rate)
        indices = poisson_indices(self._streams.words(self.size, step, name), used)
        return Lot(step, used, name, torch.from_numpy(indices))


class PoissonBatchSampler(Sampler[list[int]]):
    """Poisson lots for a `DataLoader` over a map-style data set; use `LotCollate` with it for empty lots.

    Yields exactly `steps` lists of indices, those of steps `start` to `start + steps - 1`, empty ones
    included. It runs once: going over the same lots again and accounting them as fresh ones would break the
    guarantee. `len()` is the number of steps, a public number.

        lots = PoissonBatchSampler(data, rate, steps, streams)
        loader = DataLoader(data, batch_sampler=lots, collate_fn=LotCollate(data))
    """

    def __init__(self, dataset: Any, rate: float, steps: int, streams: WordStreams, start: int = 0) -> None:
        if _columns(dataset) is not None and not isinstance(dataset, TensorDataset):
            raise PrivacyError("a DataLoader cannot index a tuple of tensors; wrap it: TensorDataset(*tensors)")
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
    """A `collate_fn` that turns an empty lot into a batch like any other, with leading dimension 0.

    The empty batch takes structure, types and the other dimensions from the data set's first record.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        self._records = _records(dataset)
        self._collate: Collate = default_collate if collate_fn is None else collate_fn

    def __call__(self, records: list[Any]) -> Any:
        """The batch of these records; of none, an empty one."""
        return self._collate(records) if records else _emptied(self._collate([self._records[0]]))


class Fetcher:
    """Fetches the records of a lot as one batch; empty lots give a batch with leading dimension 0.

    `TensorDataset` and tuples of tensors, without a `collate_fn`, are gathered column by column and give a
    tuple of tensors. Any other map-style data set is read record by record and collated. What it draws for a record,
    from PyTorch's, NumPy's or Python's generator, depends on that record and the source alone; a `collate_fn` may
    draw by PyTorch.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None = None) -> None:
        self.size = record_count(dataset)
        self._records = _records(dataset)
        self._columns = _columns(dataset) if collate_fn is None else None
        self._collate = LotCollate(dataset, collate_fn)
        # How many records to fetch at a time, None where that is not known beforehand.
        self.rows_at_once = None if self._columns is None else _rows_of(self._columns, _FETCHED_AT_ONCE)
        self._reading, self._collating = Site("the data set"), Site("collate_fn")
        self._read_twice = 0  # in how many lots a record was read again, to compare

    def fetch(self, indices: torch.Tensor, source: Source | None = None, records: torch.Tensor | None = None) -> Any:
        """The batch of these records, in memory of its own. `records` are the numbers that they draw under."""
        if self._columns is not None:
            return tuple(column.index_select(0, indices.to(column.device)) for column in self._columns)
        names = indices if records is None else records
        found = self._read(indices, source, names)
        if source is None or not found:
            return self._collate(found)
        if self._read_twice < _FIRST_LOTS:
            self._read_twice += 1
            self._refuse_unsteady(found[0], self._read(indices[:1], source, names[:1])[0])
        return self._collated(found, source, names)

    def alone(self, index: int, source: Source, record: int) -> Any:
        """The batch that one record makes by itself."""
        return self.fetch(torch.tensor([index]), source, torch.tensor([record]))

    def _read(self, indices: torch.Tensor, source: Source | None, names: torch.Tensor) -> list[Any]:
        if source is None:
            return [self._records[index] for index in indices.tolist()]
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

    @staticmethod
    def _refuse_unsteady(first: Any, second: Any) -> None:
        """Raise if one record, read twice with the same random numbers, is two."""
        if not _alike(first, second):
            raise PrivacyError(
                "a record that was read twice, with the same random numbers, was not the same: the data set draws from "
                "a generator of its own, or remembers what it has read, and one record would change what others draw. "
                "Let it draw with the global functions of PyTorch, NumPy or Python"
            )

    def _collated(self, found: list[Any], source: Source, names: torch.Tensor) -> Any:
        batch: list[Any] = []

        def collate() -> None:
            try:
                batch[:] = [
                    self._collating.run(
                        lambda current: current.forward(lambda: self._collate(found)),
                        source,
                        names,
                        lambda rows: self._collate([found[0]] * len(rows)),
                    )
                ]
            except Unkeyable as reason:
                raise PrivacyError(
                    f"collate_fn draws random numbers for the whole lot, and {reason}: draw for each record in the "
                    "data set, or in the model"
                ) from None

        self._collating.look_for_foreign(collate)
        if self._collating.foreign:
            raise PrivacyError(
                "collate_fn draws from NumPy's or Python's generator for the whole lot, where one record more changes "
                "what all others draw: draw for each record in the data set, or with PyTorch's functions"
            )
        return batch[0]


def _alike(first: Any, second: Any) -> bool:
    """Whether two records are the same, as far as they can be compared."""
    if isinstance(first, Mapping):
        return isinstance(second, Mapping) and all(_alike(first[key], second.get(key)) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    if isinstance(first, torch.Tensor | np.ndarray | float):
        here, there = (torch.as_tensor(value) for value in (first, second))
        same = here.shape == there.shape and here.dtype == there.dtype
        return same and bool(((here == there) | ((here != here) & (there != there))).all())
    return not isinstance(first, int | str | bytes) or first == second


def collate_lot(dataset: Any, indices: torch.Tensor, collate_fn: Collate | None = None) -> Any:
    """The batch of these records; see `Fetcher`, which spares the checks of every call but the first."""
    return Fetcher(dataset, collate_fn).fetch(indices)


def record_count(dataset: Any) -> int:
    """How many records a map-style data set has; refuses what cannot be sampled record by record.

    A tuple of tensors counts as columns: record i is row i of each. A `Subset` or `ConcatDataset` that holds a record
    twice is refused: each place is drawn by itself, so such a record weighs twice and has half the privacy.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise PrivacyError(
            f"{kind} is an iterable data set, which cannot be Poisson sampled; load its records into a "
            "map-style Dataset (__len__ and __getitem__), for example a TensorDataset"
        )
    columns = _columns(dataset)
    if columns is not None:
        count = _common_length(columns)
    elif isinstance(dataset, Mapping) or not all(hasattr(dataset, m) for m in ("__len__", "__getitem__")):
        raise PrivacyError(
            f"{kind} is not a map-style data set: it needs __len__, and __getitem__ for records 0 to len-1; "
            "wrap it in a torch.utils.data.Dataset or TensorDataset"
        )
    else:
        count = len(dataset)
        _refuse_repeated(dataset)
    if count == 0:
        raise PrivacyError("the data set has no records; private training needs at least one")
    return count


def _refuse_repeated(dataset: Any) -> None:
    """Raise if a view of data sets shows one of their records at two places."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return
    sources: list[Any] = []
    origins = np.sort(_origins(dataset, sources))
    again = np.flatnonzero(origins[1:] == origins[:-1])
    if len(again):
        raise PrivacyError(
            f"the {type(dataset).__name__} holds {len(again)} records a second time, and one example must be one "
            "record: take each index once (Subset(data, sorted(set(indices)))) and each data set once"
        )


def _origins(dataset: Any, sources: list[Any]) -> npt.NDArray[np.int64]:
    """A number for each record, the same only for the same record of the same data set; `sources` are those so far."""
    if isinstance(dataset, Subset):
        inner, chosen = _origins(dataset.dataset, sources), np.asarray(dataset.indices)
        if chosen.size and chosen.dtype.kind not in "iub":
            raise PrivacyError(f"the indices of a Subset must be whole numbers, got {_checks.shown(chosen.flat[0])}")
        try:
            return inner[chosen.astype(np.int64).reshape(-1)]  # a negative index counts from the end, as in data sets
        except IndexError as error:
            raise PrivacyError(f"a Subset names a record that its data set does not have ({error})") from None
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_origins(part, sources) for part in dataset.datasets])
    if not any(known is dataset for known in sources):
        sources.append(dataset)
    earlier = itertools.takewhile(lambda known: known is not dataset, sources)
    return np.arange(len(dataset), dtype=np.int64) + sum(map(len, earlier))


def _common_length(columns: tuple[torch.Tensor, ...]) -> int:
    lengths = {column.shape[:1] for column in columns}
    if len(lengths) != 1 or lengths == {()}:
        raise PrivacyError("the tensors of a data set must share their leading dimension, the records")
    return lengths.pop()[0]


def _rows_of(columns: tuple[torch.Tensor, ...], entries: int) -> int:
    """How many records have so many entries."""
    return max(1, entries // max(1, sum(math.prod(column.shape[1:]) for column in columns)))


def _columns(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The columns of a data set that is made of tensors, else None."""
    if isinstance(dataset, TensorDataset):
        # a subclass may change records on the way out, so only the class itself is taken apart
        return dataset.tensors if type(dataset) is TensorDataset else None
    is_columns = isinstance(dataset, tuple) and dataset and all(isinstance(c, torch.Tensor) for c in dataset)
    return dataset if is_columns else None


def _records(dataset: Any) -> Any:
    """The data set as something whose item i is record i."""
    record_count(dataset)
    return TensorDataset(*dataset) if isinstance(dataset, tuple) and _columns(dataset) else dataset


def _emptied(batch: Any) -> Any:
    """A collated batch of one record with that record taken out."""
    if batch is None:
        return None
    if isinstance(batch, torch.Tensor | np.ndarray) and batch.ndim > 0:
        return batch[:0]
    if isinstance(batch, Mapping):
        emptied = {key: _emptied(value) for key, value in batch.items()}
        return emptied if type(batch) is dict else type(batch)(emptied)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        if any(isinstance(item, str | bytes) for item in batch):  # texts are collated to a list of texts
            return type(batch)()
        items = [_emptied(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    raise PrivacyError(
        f"cannot make an empty lot of a {type(batch).__name__}; let collate_fn return tensors with the "
        "records along dimension 0, or dicts, lists and tuples of them"
    )
