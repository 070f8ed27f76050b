"""Which part of a model a rank holds, where every parameter is divided by the rows of its first dimension.

The slice of a parameter is a range of its numbers, so that of the flat vector of all parameters is one range for each
of them. What a rank keeps of releases, offsets and memories are these ranges, one after another.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fodp.noise.ranges import Ranges
from fodp.ranks.group import Alone


class Slices:
    """The parts of some parameters that this rank holds, and how whole vectors are made of them and divided again.

    Each parameter takes a collective of its own, so that no more than one is held twice. All ranks must call alike.
    PyTorch's way of dividing rows: ⌈rows/R⌉ for each of the first ranks, what is left for the next, none for the rest.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], ranks: Alone):
        self._ranks = ranks
        self._most = [_rows(shape[0], ranks.count) * math.prod(shape[1:]) for shape in shapes]  # of any rank
        self._numbers = [math.prod(shape) for shape in shapes]
        starts = list(accumulate(self._numbers, initial=0))
        local = [_span(ranks.rank, most, numbers) for most, numbers in zip(self._most, self._numbers, strict=True)]
        self.sizes = tuple(end - begin for begin, end in local)
        self.size = sum(self.sizes)
        spans = tuple((at + begin, at + end) for at, (begin, end) in zip(starts, local, strict=False))
        self.ranges = Ranges(starts[-1], spans)

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's slices of the sum of all ranks' flat vectors; the vector itself is wiped: it has no noise."""
        count = self._ranks.count
        padded = (_padded(p, most * count) for p, most in zip(whole.split(self._numbers), self._most, strict=True))
        found = self._ranks.scattered(padded, whole.numel())
        local = torch.cat([part[:size] for part, size in zip(found, self.sizes, strict=True)])
        whole.zero_()
        return local

    def gather(self, local: Tensor) -> Tensor:
        """The whole flat vector, of all ranks' slices."""
        return torch.cat(list(self.gather_each(local.split(list(self.sizes)))))

    def gather_each(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """All numbers of each parameter, flat, of all ranks' slices of it."""
        padded = (_padded(part.reshape(-1), most) for part, most in zip(parts, self._most, strict=True))
        for whole, numbers in zip(self._ranks.gathered(padded, self.ranges.size), self._numbers, strict=True):
            yield whole[:numbers]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's slices of a flat vector that all ranks have."""
        return torch.cat([whole[begin:end] for begin, end in self.ranges.spans])

    def add(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks of what each has made of its slices."""
        return self._ranks.added(numbers)


def _rows(rows: int, count: int) -> int:
    """That the first ranks get."""
    return -(-rows // count)


def _span(rank: int, most: int, numbers: int) -> tuple[int, int]:
    return min(numbers, rank * most), min(numbers, (rank + 1) * most)


def _padded(flat: Tensor, size: int) -> Tensor:
    if flat.numel() == size:
        return flat.contiguous()
    padded = flat.new_zeros(size)
    padded[: flat.numel()] = flat
    return padded
