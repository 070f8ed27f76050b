"""People with several records: lots draw owners, and of each at most so many records.

Whatever is drawn for a person depends on (key, step, their own name) alone: whether they join a lot, which of their
records are used, what a model draws for these. Another person more or less changes nothing of it.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fodp.errors import ConfigurationError, DataError
from fodp.lots.poisson import PoissonSampler
from fodp.sampling import Lot, WordStreams
from fodp.support import checks
from fodp.support.checks import shown

_NUMBERS = 2**40  # under which records draw (`fodp.draws`)


class BlockStreams(WordStreams, Protocol):
    """What sampling people needs of `fodp.noise.Streams`: uniform 64-bit words by (step, name, block)."""

    def words_of(self, blocks: npt.NDArray[np.uint8], step: int, name: str) -> npt.NDArray[np.uint64]:
        """A word for each block of 16 bytes, which depends on that block alone."""
        ...


class Owners:
    """Whose each record is: a name per record, whole numbers or texts.

    Each person has 16 bytes that are made of their name alone, and each record a number that is made of its owner's
    name and of its place among that owner's records.
    """

    def __init__(self, names: Any, records: int):
        known: dict[int | str, int] = {}  # by their first record
        owner = np.fromiter((known.setdefault(name, len(known)) for name in _names(names, records)), np.int64, records)
        self.count = len(known)
        self.blocks = np.stack([np.frombuffer(_hashed(name), np.uint8) for name in known])
        self.records = np.argsort(owner, kind="stable")  # of one owner side by side, in their order in the data
        self.sizes = np.bincount(owner, minlength=self.count)
        self.starts = np.cumsum(self.sizes) - self.sizes
        places = np.arange(records) - np.repeat(self.starts, self.sizes)
        self._numbers = _mixed(np.repeat(self.blocks.view("<u8")[:, 0], self.sizes) + places.astype(np.uint64))

    def numbers(self, at: npt.NDArray[np.int64], rooms: int) -> npt.NDArray[np.int64]:
        """The numbers below `rooms` under which the records at these places of `records` draw."""
        return (self._numbers[at] % np.uint64(rooms)).astype(np.int64)


class PeopleSampler(PoissonSampler):
    """Draws lots of people: each independently with probability `rate`, with at most `most` of their records.

    Where a person has more, that many are drawn at random, anew in each lot. `copies` is how many rows a record has.
    With `turns`, people belong to groups (`PoissonSampler`), each by their name.
    """

    _by_skips = False

    def __init__(
        self, owners: Owners, rate: float, most: int, streams: BlockStreams, *, copies: int = 1, turns: int = 1
    ):
        super().__init__(owners.count, rate, streams, turns)
        self.owners, self._blocks = owners, streams
        self._most, self._rooms = checks.whole("records_per_person", most), _NUMBERS // copies

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step, at the sampler's rate or at one given for this step."""
        people = super().draw(step, name, rate)
        owner, places = self._records_of(people.indices.numpy(), step, name)
        at = self.owners.starts[owner] + places
        return dataclasses.replace(
            people,
            indices=torch.from_numpy(self.owners.records[at]),
            names=torch.from_numpy(self.owners.numbers(at, self._rooms)),
            owners=torch.from_numpy(owner),
        )

    def _words(self, step: int, name: str) -> npt.NDArray[np.uint64]:
        return self._blocks.words_of(self.owners.blocks, step, name)

    def _records_of(
        self, drawn: npt.NDArray[np.int64], step: int, name: str
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each record that is used: its owner, and its place among all of its owner's."""
        sizes = self.owners.sizes[drawn]
        owner = np.repeat(drawn, sizes)
        places = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        if (sizes <= self._most).all():
            return owner, places
        words = self._blocks.words_of(_places(self.owners.blocks[owner], places), step, f"{name}.records")
        # An owner's records in the order of their words: the first ones are used.
        order = np.lexsort((words, np.repeat(np.arange(len(drawn)), sizes)))
        used = np.empty(len(owner), np.bool_)
        used[order] = places < self._most
        return owner[used], places[used]


def _names(names: Any, records: int) -> list[Any]:
    """The names as whole numbers, or as texts."""
    if isinstance(names, str | bytes) or not hasattr(names, "__len__") or isinstance(names, Mapping):
        raise ConfigurationError(f"owners must be a list, an array or a tensor of names, got {shown(names)}")
    listed = names.tolist() if hasattr(names, "tolist") else [checks.builtin(name) for name in names]
    if len(listed) != records:
        raise DataError(f"owners must name one owner for each of the {records} records, got {len(listed)}")
    kinds = {str if isinstance(name, str) else type(name) for name in listed}
    if kinds not in ({int}, {str}):
        raise DataError(
            "owners must be whole numbers, or all of them texts; a record whose owner is not known gets a name of its "
            f"own. Got {', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    return listed


def _hashed(name: int | str) -> bytes:
    kind = "number" if isinstance(name, int) else "text"
    return hashlib.blake2b(
        f"{kind} {name}".encode("utf-8", "surrogatepass"), digest_size=16, person=b"fodp.owner"
    ).digest()


def _places(blocks: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Blocks of single records: half of their owner's, and their place."""
    halves = np.stack([blocks.view("<u8")[:, 0], places.astype(np.uint64)], axis=1)
    return halves.astype("<u8").view(np.uint8)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Numbers that look unrelated for numbers that are close (the finaliser of SplitMix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
