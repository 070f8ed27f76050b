"""Means, intervals and paired tests: the few formulas that every table and verdict uses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.05  # of tests, and one minus the coverage of intervals
MARGIN = 0.01  # accuracy: one percentage point is equal in practice


@dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation and Student-t 95% interval; NaN where there are too few values."""

    n: int
    mean: float
    std: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A mean difference with its 95% interval and the two-sided p value of a t-test against zero."""

    n: int
    mean: float
    low: float
    high: float
    p: float


def summarize(values: Iterable[float]) -> Summary:
    """Of one sample. The standard deviation and the interval need two values."""
    sample = np.asarray(list(values), dtype=float)
    n = len(sample)
    mean = float(sample.mean()) if n else math.nan
    if n < 2:
        return Summary(n, mean, math.nan, math.nan, math.nan)
    std = float(sample.std(ddof=1))
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * std / math.sqrt(n)
    return Summary(n, mean, std, mean - half, mean + half)


def band(curves: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and half the width of the 95% interval at each point of curves, one row per seed."""
    n = len(curves)
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * curves.std(axis=0, ddof=1) / math.sqrt(n)
    return curves.mean(axis=0), half


def difference(values: Iterable[float]) -> Difference | None:
    """Is the mean of these differences zero? None for fewer than two."""
    sample = list(values)
    s = summarize(sample)
    if s.n < 2:
        return None
    error = s.std / math.sqrt(s.n)
    if error <= 1e-12:  # all differences are the same number, up to rounding
        p = 1.0 if abs(s.mean) <= 1e-12 else 0.0
    else:
        p = float(2 * stats.t.sf(abs(s.mean) / error, s.n - 1))
    return Difference(s.n, s.mean, s.low, s.high, p)


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """a minus b, seed by seed, over the seeds that both have."""
    return difference(a[seed] - b[seed] for seed in sorted(a.keys() & b.keys()))


def holm(values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: p values that may be compared with one level for all tests together."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        corrected[i] = largest
    return corrected
