"""Poisson lots: every record joins a lot independently, with the declared public rate.

That is the sampling the accountants amplify by. Nothing here derives a rate from data or skips a lot because
it is empty.
"""

import functools
import math

import numpy as np
import numpy.typing as npt
import torch

from fodp.errors import PrivacyError
from fodp.lots.skips import applies, skipped_indices
from fodp.sampling import Lot, WordStreams
from fodp.support import checks


def poisson_indices(words: npt.NDArray[np.uint64], rate: float) -> npt.NDArray[np.int64]:
    """The places i with word_i < ⌊rate·2⁶⁴⌋, in increasing order.

    The bound is exact integer arithmetic: with uniform words each place is taken with a probability of at
    most `rate`, short of it by less than 2⁻⁶⁴, and a rate of 1 takes all.
    """
    bound = bound_of(rate)
    return np.arange(words.size, dtype=np.int64) if bound is None else (words < bound).nonzero()[0]


@functools.lru_cache(maxsize=None, typed=True)
def bound_of(rate: float) -> np.uint64 | None:
    """⌊rate·2⁶⁴⌋, None for the rate 1."""
    bound = int(math.ldexp(checks.fraction("rate", rate), 64))  # scaling by 2⁶⁴ is exact, int() rounds down
    return None if bound == 2**64 else np.uint64(bound)


class PoissonSampler:
    """Draws lots from `size` records: each record independently with probability `rate`, empty lots included.

    The lot of a (step, name) depends on nothing but the streams, the rate and, where it is drawn by skips
    (`fodp.lots.skips`: from four million records on), the size. With secure streams it can be drawn only once.

    `turns` b above 1: each record belongs to one of b groups, and step t draws from group t mod b only (`rate` is the
    chance of a record whose turn it is). The group of a record is drawn for it alone and stays secret: a record more
    or less moves nobody to another group, wherever in the data it is. Groups last as long as the process: a secure run
    that is resumed draws others, so it goes on with a whole round (`next_round`).
    """

    _by_skips = True  # where records have no names of their own to be drawn by

    def __init__(self, size: int, rate: float, streams: WordStreams, turns: int = 1) -> None:
        self.size = checks.whole("size", size)
        self.rate = checks.fraction("rate", rate)
        self.turns = checks.whole("turns", turns)
        self._streams = streams
        self._groups: npt.NDArray[np.uint64] | None = None

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        """The lot of this step, at the sampler's rate or at one given for this step."""
        used = self.rate if rate is None else checks.fraction("rate", rate)
        among, bound = None if self.turns == 1 else self.whose_turn(step), bound_of(used)
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
