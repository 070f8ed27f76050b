"""Pairs of distributions on a line, the worst cases of one release, and their privacy loss rounded to a grid.

"Connect the dots" (Doroshenko et al. 2022): the outcomes whose loss lies between two points of the grid are shared
among these two so that both distributions keep their mass. That spreads the loss, which raises δ at every ε.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fodp.accounting.releases import Floats

TAIL = 9.5  # outcomes beyond this many standard deviations, 1e-21 of them, are charged to δ as if they told everything
MOST_EXPONENT = 650.0  # beyond, a likelihood ratio is no float

Mixture = Mapping[int, float]
"""Weights of normal distributions by their means."""


@dataclass(frozen=True)
class Rounded:
    """Losses on a grid: `chances[i]` that a loss is `first + i` intervals; `lost`, that it is beyond all bounds.

    No loss was moved down by more than `slack`.
    """

    first: int
    chances: Floats
    lost: float
    slack: float


@dataclass(frozen=True)
class Pair:
    """Mixtures of normal distributions of standard deviation `noise`: with a record's data and without, or swapped.

    Their log likelihood ratio, `loss`, rises from left to right.
    """

    noise: float
    upper: Mixture
    lower: Mixture

    @property
    def ends(self) -> tuple[float, float]:
        """Where the line is cut off."""
        means = [mean for mean, weight in [*self.upper.items(), *self.lower.items()] if weight]
        return min(means) - TAIL * self.noise, max(means) + TAIL * self.noise

    def is_tame(self) -> bool:
        """Whether likelihood ratios are floats all along the line."""
        reach = max(abs(end) for end in self.ends)
        means = max(abs(mean) for mean in (*self.upper, *self.lower))
        return means * (reach + means) / self.noise**2 < MOST_EXPONENT

    def loss(self, x: Floats) -> Floats:
        """log upper(x)/lower(x)."""
        return self._log_ratio(self.upper, x) - self._log_ratio(self.lower, x)

    def _log_ratio(self, mixture: Mixture, x: Floats) -> Floats:
        """log of the mixture's density over that of N(0, noise²); small values keep their precision."""
        excess, total = np.zeros_like(x), np.full_like(x, mixture.get(0, 0.0))
        for mean, weight in mixture.items():
            if mean and weight:
                exponent = mean * (x - mean / 2) / self.noise**2
                excess += weight * np.expm1(exponent)
                total += weight * np.exp(exponent)
        return np.where(excess > -0.5, np.log1p(np.maximum(excess, -0.5)), np.log(total))

    def _slope(self, x: Floats) -> Floats:
        """The derivative of the loss: the difference of the mean shifts given x, over the variance."""
        slope = np.zeros_like(x)
        for mixture, side in ((self.upper, 1.0), (self.lower, -1.0)):
            log_total = self._log_ratio(mixture, x)
            for mean, weight in mixture.items():
                if mean and weight:
                    exponent = mean * (x - mean / 2) / self.noise**2 - log_total
                    slope += side * mean * weight * np.exp(exponent)
        return slope / self.noise**2

    def spread(self) -> tuple[float, float]:
        """Roughly: the variance of the loss, the larger of both sides', and its range."""
        x = np.linspace(*self.ends, 4001)
        loss = self.loss(x)
        variances = []
        for mixture in (self.upper, self.lower):
            parts = [weight * np.exp(-(((x - mean) / self.noise) ** 2) / 2) for mean, weight in mixture.items()]
            density: Floats = np.sum(parts, axis=0)
            density /= density.sum()
            mean_loss = float(density @ loss)
            variances.append(float(density @ (loss - mean_loss) ** 2))
        return max(variances), float(loss[-1] - loss[0])

    def rounded(self, interval: float) -> tuple[Rounded, Rounded]:
        """The losses of upper against lower, and of lower against upper."""
        low, high = self.ends
        first = math.floor(float(self.loss(np.array([low]))[0]) / interval)
        last = math.ceil(float(self.loss(np.array([high]))[0]) / interval)
        bounded = self._limit() >= first * interval  # then nothing need be cut off on the left
        levels: Floats = np.arange(first + 1.0, last) * interval
        inner, slack = self._places(levels)
        edges = np.concatenate([[-np.inf if bounded else low], inner, [high]])
        upper, lower = self._masses(self.upper, edges), self._masses(self.lower, edges)
        with np.errstate(divide="ignore", invalid="ignore"):
            loss = np.log(upper) - np.log(lower)
        floor = np.arange(first, last) * interval
        whole = -math.expm1(-interval)
        # Of the chance, this share goes to the upper neighbour; nan is where both are 0.
        up = np.clip(np.nan_to_num(-np.expm1(floor - loss) / whole, nan=1.0), 0.0, 1.0)
        up_swapped = np.clip(np.nan_to_num(-np.expm1(loss - floor - interval) / whole, nan=1.0), 0.0, 1.0)
        return (
            Rounded(first, _shared(upper, up), self._outside(self.upper, bounded=bounded), slack),
            Rounded(-last, _shared(lower[::-1], up_swapped[::-1]), self._outside(self.lower, bounded=bounded), slack),
        )

    def _limit(self) -> float:
        """The loss left of everything."""
        leftmost = min(*self.upper, *self.lower)
        upper, lower = self.upper.get(leftmost, 0.0), self.lower.get(leftmost, 0.0)
        return math.log(upper / lower) if upper and lower else -math.inf

    def _places(self, levels: Floats) -> tuple[Floats, float]:
        """Where the loss passes each level, and the largest error in the loss."""
        if not len(levels):
            return levels, 0.0
        if set(self.upper) == {0, 1} and set(self.lower) == {0}:
            # The shifted part's likelihood ratio, (e^level - 1 + q)/q, is 1 + excess; near 0 that loses its digits.
            excess = np.expm1(levels) / self.upper[1]
            with np.errstate(divide="ignore"):
                far = np.log(np.maximum(np.exp(levels) - self.upper[0], 0.0) / self.upper[1])
            log_ratio = np.where(excess > -0.5, np.log1p(np.maximum(excess, -0.5)), far)
            x = np.clip(self.noise**2 * log_ratio + 0.5, *self.ends)
        else:
            x = self._search(levels)
        x = np.maximum.accumulate(x)
        return x, float(np.max(np.abs(self.loss(x) - levels)))

    def _search(self, levels: Floats) -> Floats:
        """Newton's method, kept between neighbouring points of a table."""
        table = np.linspace(*self.ends, 4097)
        losses = np.maximum.accumulate(self.loss(table))
        right = np.clip(np.searchsorted(losses, levels), 1, len(table) - 1)
        x = np.interp(levels, losses, table)
        for _ in range(4):
            with np.errstate(divide="ignore", invalid="ignore"):
                step = np.nan_to_num((self.loss(x) - levels) / self._slope(x), posinf=0.0, neginf=0.0)
            x = np.clip(x - step, table[right - 1], table[right])
        return x

    def _masses(self, mixture: Mixture, edges: Floats) -> Floats:
        """What the mixture has between neighbouring edges, precise also in the tails."""
        from scipy.special import ndtr

        masses = np.zeros(len(edges) - 1)
        for mean, weight in mixture.items():
            if weight:
                places = (edges - mean) / self.noise
                beyond = ndtr(-np.abs(places))
                left, right = places[:-1] < 0, places[1:] > 0
                masses += weight * np.where(left & right, 1 - beyond[:-1] - beyond[1:], np.abs(np.diff(beyond)))
        return masses

    def _outside(self, mixture: Mixture, *, bounded: bool) -> float:
        low, high = self.ends
        sides = [np.array([high, np.inf])] if bounded else [np.array([high, np.inf]), np.array([-np.inf, low])]
        return float(sum(self._masses(mixture, side)[0] for side in sides))


def _shared(masses: Floats, up: Floats) -> Floats:
    chances = np.zeros(len(masses) + 1)
    chances[1:] = masses * up
    chances[:-1] += masses - chances[1:]
    return chances
