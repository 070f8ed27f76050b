"""Releases as the accountants take them: rates and noise, rounded so that few different ones remain.

Both accountants take Poisson-subsampled Gaussian releases through `add(rate, noise, count)`, where `noise`
is the noise multiplier of one release, and answer `epsilon(delta)`. Every approximation here errs upwards.
`fodp.accounting` is the door for users; SciPy takes a while to import, so only functions import it.
"""

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Release = tuple[float, float]
"""One release: (sampling rate, noise multiplier)."""

LEAST_NOISE, MOST_NOISE = 1e-6, 1e9  # below, ε is called infinite; above, counted as this much
LEAST_RATE, MOST_RATE = 1e-100, 1 - 1e-12  # rates below are counted as this much; above, as 1
MAX_DISTINCT = 128  # more different releases than this are rounded, or a schedule would take minutes


class Accountant(Protocol):
    """Adds up releases; tells what they cost together."""

    def add(self, rate: float, noise: float, count: int) -> None:
        """Take note of `count` releases."""

    def epsilon(self, delta: float) -> float:
        """An upper bound on the ε of everything added so far."""


def rounding(releases: Iterable[Release]) -> dict[Release, Release]:
    """Map every release to one that costs at least as much, so that only a few different ones remain.

    Schedules make every step different. Lowering the noise or raising the rate only raises ε, and both are
    moved by as small a factor as leaves MAX_DISTINCT releases. The grids are nested: a prefix of a schedule
    is never rounded more than the whole.
    """
    distinct = set(releases)
    rounded = {release: release for release in distinct}
    ratio = 1.0025
    while len(set(rounded.values())) > MAX_DISTINCT:
        rounded = {(q, z): (min(1.0, _grid(q, ratio, up=True)), _grid(z, ratio, up=False)) for q, z in distinct}
        ratio *= ratio
    return rounded


def round_rate(rate: float) -> float:
    """The rate, rounded up near 0 and 1, where the formulas overflow or cancel; a larger rate only costs more."""
    return 1.0 if rate > MOST_RATE else max(rate, LEAST_RATE)


def _grid(value: float, ratio: float, *, up: bool) -> float:
    place = math.log(value) / math.log(ratio)
    whole = math.ceil(place - 1e-9) if up else math.floor(place + 1e-9)
    moved = math.exp(whole * math.log(ratio))
    return max(value, moved) if up else min(value, moved)
