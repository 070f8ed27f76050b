"""Privacy-loss distributions of releases: nearly exact for plans that are fixed in advance.

Losses of independent releases add up, so the spectra of their distributions multiply, and one inverse Fourier transform
gives the distribution of a whole plan, however many steps it has.
"""

import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from fodp.accounting.pairs import Pair, Rounded
from fodp.accounting.releases import LEAST_NOISE, MOST_NOISE, Floats, Release
from fodp.accounting.renyi import ORDERS, RenyiAccountant

FFT_NOISE = 1e-15  # in δ, per composed release; tests/accounting/test_exactness.py compares with long doubles
LOSS_NOISE = 1e-13  # in ε, per composed release: rounding in the shares of neighbours
OUTSIDE = 1e-16  # chance of a loss above the window, which is charged to δ
MOST_CELLS = 2**19  # of a release or of the window; a plan that would want more gets a coarser grid


class LossAccountant:
    """Privacy-loss distributions: nearly exact, for releases whose noise and rate are fixed in advance.

    `records` asks for a person with that many records, all present or all absent; `replace` for exchanging
    one record for another. Which pair of distributions is the worst case? Let Hα be the divergence that is δ
    at α = e^ε. The rest of the lot is the same on both sides, so condition on it; and since
    Hα(P‖Q) = 1 - α + α·H₁/α(Q‖P), one side is enough. For possible shifts vᵢ (in units of sensitivity)

      Hα(N(0,z²) ‖ Σ wᵢ N(vᵢ,z²)) = E[(1 - α Σ wᵢ exp(Yᵢ - E Yᵢ²/2))₊],   Cov(Yᵢ,Yⱼ) = ⟨vᵢ,vⱼ⟩/z²,

    which by Kahane's convexity inequality grows with every covariance: the worst shifts all point the same
    way at full length, and one dimension suffices. Therefore

      records: N(0,z²) against Σⱼ Binomial(k,q)(j) N(j,z²), as in Ganesh (2024), "Tight group-level DP
               guarantees for DP-SGD with sampling via mixture of Gaussians mechanisms";
      replace: (1-q)N(0,z²) + qN(-1,z²) against (1-q)N(0,z²) + qN(1,z²), the pair that dp-accounting uses
               for REPLACE_ONE. With records a and b and α ≥ 1, Hα is the supremum over sets S of
               qN(a)(S) - αqN(b)(S) - (α-1)(1-q)N(0)(S); seen from a, the shifts are at most 2 and 1.

    Dominating pairs compose adaptively (Zhu, Dong and Wang 2022, theorem 10).

    `tally` is all that will ever be added, for it decides the grid. A `detail` below 1 makes the grid coarser: quicker,
    and an upper bound still.
    """

    def __init__(
        self, tally: Mapping[Release, int], *, records: int = 1, replace: bool = False, detail: float = 1.0
    ) -> None:
        self.records, self.replace = records, replace
        self.added: Counter[Release] = Counter()
        self.sides: list[_Side] = []
        pairs = {release: self._pair(*release) for release in tally if release[1] >= LEAST_NOISE}
        self.hopeless = len(pairs) < len(tally) or not all(pair.is_tame() for pair in pairs.values())
        if pairs and not self.hopeless:
            variances, ranges = zip(*(pair.spread() for pair in pairs.values()), strict=True)
            variance = sum(count * each for count, each in zip(tally.values(), variances, strict=True))
            interval = self._interval(
                math.sqrt(variance / sum(tally.values())), max(ranges), math.sqrt(variance), detail
            )
            # Chernoff's bound wants one over the standard deviation, where losses are nearly normal, or over the range.
            lowest = min(1 / math.sqrt(variance), 2 / max(ranges))
            tilts = np.geomspace(lowest, max(30 / math.sqrt(variance), 10 * lowest), 10)
            rounded = {release: pair.rounded(interval) for release, pair in pairs.items()}
            for side in (0,) if replace else (0, 1):  # replacing is the same both ways
                one = {release: both[side] for release, both in rounded.items()}
                self.sides.append(_Side(one, tally, interval, tilts))

    def _pair(self, rate: float, noise: float) -> Pair:
        noise = min(noise, MOST_NOISE)
        if self.replace:
            return Pair(noise, {0: 1 - rate, 1: rate}, {0: 1 - rate, -1: rate})
        if self.records == 1:
            return Pair(noise, {0: 1 - rate, 1: rate}, {0: 1.0})
        from scipy.stats import binom

        drawn = range(self.records + 1)
        return Pair(noise, dict(zip(drawn, binom.pmf(drawn, self.records, rate).tolist(), strict=True)), {0: 1.0})

    def _interval(self, deviation: float, single: float, whole: float, detail: float) -> float:
        """The grid's interval, from the standard deviation and range of a release's loss and of the plan's."""
        span = 2 if self.replace else self.records  # the largest shift of one lot's sum, in units of sensitivity
        # Rounding adds about a sixth of the interval's square to the variance of each loss.
        wanted = min(deviation / 16, 2e-3 * span) / detail
        interval = max(wanted, max(single, 20 * whole) / min(MOST_CELLS, 2**22 / span))
        self.sharp = interval == wanted
        return interval

    def add(self, rate: float, noise: float, count: int) -> None:
        """Take note of `count` releases; a negative count takes them back."""
        if count:
            self.added[rate, noise] += count
            for side in self.sides:
                side.add((rate, noise), count)

    def epsilon(self, delta: float) -> float:
        """An upper bound on the ε of everything added so far."""
        if not any(self.added.values()):
            return 0.0
        # FFT rounding can hide a little tail mass (dp-accounting alone reports too small an ε at δ=1e-12), so
        # δ pays for it; where hardly anything of δ is left, Rényi divergences, which use logarithms, answer.
        usable = delta - FFT_NOISE * self.added.total()
        if usable < delta / 2 or self.hopeless:
            return self._fallback(delta)
        epsilon = max(side.epsilon(usable) for side in self.sides)
        # Both are upper bounds; the grid is the looser one only where it had to be coarse.
        return epsilon if self.sharp and math.isfinite(epsilon) else min(epsilon, self._fallback(delta))

    def _fallback(self, delta: float) -> float:
        """A looser bound that needs no Fourier transform."""
        renyi = RenyiAccountant()
        if self.replace:
            for (rate, noise), count in self.added.items():
                renyi.add(rate, noise, count)
            # Remove, then add: (ε₁, δ₁) for each half gives 2ε₁ at δ₁(1+e^ε₁) ≤ 2δ₁e^ε₁. Classic conversion
            # with δ₁ = δ/(2e^ε₁) reads ε₁ = RDP + (log(2/δ) + ε₁)/(order-1); solved for ε₁:
            orders = np.array(ORDERS)
            high = orders > 2
            half = ((orders - 1) * renyi.rdp + math.log(2 / delta))[high] / (orders - 2)[high]
            return 2 * max(0.0, float(half.min()))
        for (rate, noise), count in self.added.items():
            # Any record drawn counts as all k drawn: longer shifts, hence more cost (Kahane, above).
            renyi.add(
                -math.expm1(self.records * math.log1p(-rate)) if rate < 1 else 1.0,
                noise / self.records,
                count,
            )
        return renyi.epsilon(delta)


class _Side:
    """The losses of all releases together, of one of two data sets against the other.

    They are kept as their spectrum on a circle of `cells` points. A circle has no ends: what is above the window
    comes back in below it, so the window ends where Chernoff's bound says that next to nothing is above. What is
    below it comes back in at its top, which only raises ε.
    """

    def __init__(
        self, rounded: Mapping[Release, Rounded], tally: Mapping[Release, int], interval: float, tilts: Floats
    ) -> None:
        from scipy.fft import next_fast_len

        self.rounded, self.interval, self.tilts = rounded, interval, tilts
        self.moments = {release: _log_moments(one, interval, self.tilts) for release, one in rounded.items()}
        self.added: Counter[Release] = Counter(tally)
        falling = {release: _log_moments(one, interval, -self.tilts) for release, one in rounded.items()}
        cells = self._end(self.moments) + self._end(falling)
        self.cells = next_fast_len(max(16, cells), real=True)
        self.added.clear()
        self.log_size, self.angle = np.zeros(self.cells // 2 + 1), np.zeros(self.cells // 2 + 1)
        self.spectra: dict[Release, tuple[Floats, Floats]] = {}

    def add(self, release: Release, count: int) -> None:
        """Compose `count` more releases with those so far."""
        self.added[release] += count
        if release not in self.spectra:
            if len(self.spectra) == 4:  # enough for plans that go back and forth, and little memory for schedules
                self.spectra.clear()
            self.spectra[release] = _spectrum(self.rounded[release].chances, self.cells)
        log_size, angle = self.spectra[release]
        self.log_size += count * log_size
        self.angle += count * angle

    def _end(self, moments: Mapping[Release, Floats]) -> int:
        """The place on the grid above which there is a chance of OUTSIDE at most, by Chernoff's bound."""
        total = sum(count * moments[release] for release, count in self.added.items()) + math.log(1 / OUTSIDE)
        return math.ceil(float(np.min(total / self.tilts)) / self.interval) + 1

    def epsilon(self, delta: float) -> float:
        """The ε at which everything added so far has δ."""
        from scipy.fft import irfft

        last = self._end(self.moments)
        zero = sum(count * self.rounded[release].first for release, count in self.added.items())
        chances = irfft(np.exp(self.log_size + 1j * self.angle), self.cells)
        chances = np.maximum(np.roll(chances, (zero - last - 1) % self.cells), 0.0)
        lost = OUTSIDE + sum(count * self.rounded[release].lost for release, count in self.added.items())
        slack = sum(count * (LOSS_NOISE + self.rounded[release].slack) for release, count in self.added.items())
        losses = np.arange(last - self.cells + 1, last + 1) * self.interval
        return _epsilon(losses[losses > 0], chances[losses > 0], delta - lost) + slack


def _log_moments(rounded: Rounded, interval: float, tilts: Floats) -> Floats:
    """Upper bounds on log E exp(tilt·loss) for each tilt."""
    chances, width = rounded.chances, 8 if len(rounded.chances) > 2**13 else 1
    if width > 1:
        # On every eighth point of the grid: spread so that the mean stays, which raises the mean of what is convex.
        blocks = np.pad(chances, (0, -len(chances) % width)).reshape(-1, width)
        right = blocks @ (np.arange(width) / width)
        chances = np.append(blocks.sum(axis=1) - right, 0.0)
        chances[1:] += right
    losses = (rounded.first + width * np.arange(len(chances))) * interval
    moments = np.empty(len(tilts))
    for place, tilt in enumerate(tilts):
        top = max(tilt * losses[0], tilt * losses[-1])
        moments[place] = math.log(max(1e-300, chances @ np.exp(tilt * losses - top))) + top
    return moments


def _spectrum(chances: Floats, cells: int) -> tuple[Floats, Floats]:
    """Logarithm of the size, and angle, of the Fourier transform on a circle of so many points."""
    from scipy.fft import rfft

    turns = -(-len(chances) // cells)
    spectrum = rfft(np.pad(chances, (0, turns * cells - len(chances))).reshape(turns, cells).sum(axis=0))
    return np.log(np.maximum(np.abs(spectrum), 1e-300)), np.angle(spectrum)


def _epsilon(losses: Floats, chances: Floats, delta: float) -> float:
    """The smallest ε of at least 0 with Σ chance·(1 - e^(ε-loss)) ≤ δ over losses above ε, on an even grid above 0."""
    from scipy.signal import lfilter

    if delta <= 0:
        return math.inf
    if len(losses) < 2:
        return 0.0
    interval = losses[1] - losses[0]
    above = np.cumsum(chances[::-1])[::-1]
    decay = math.nextafter(math.exp(-interval), 0.0)
    discounted = lfilter([1.0], [1.0, -decay], chances[::-1])[
        ::-1
    ]  # Σ chance·e^(ε-loss) with ε the lowest of the losses
    if above[0] - math.exp(-losses[0]) * discounted[0] <= delta:
        return 0.0
    first = int(np.argmax(above - discounted <= delta))  # the last one, where nothing is above, has 0
    return float(losses[first] + math.log((above[first] - delta) / discounted[first]))
