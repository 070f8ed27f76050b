"""How privacy loss is added up: Rényi divergences and privacy-loss distributions, both over dp-accounting.

Both accountants take Poisson-subsampled Gaussian releases through `add(rate, noise, count)`, where `noise`
is the noise multiplier of one release, and answer `epsilon(delta)`. Every approximation here errs upwards.
`fodp.accounting` is the door for users; dp-accounting takes a second to import, so only functions import it.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Release = tuple[float, float]
"""One release: (sampling rate, noise multiplier)."""

ORDERS: tuple[float, ...] = (
    *(1.02, 1.05),  # for an epsilon in the hundreds
    *(round(1 + step / 10, 1) for step in range(1, 100)),
    *range(11, 64),
    *(round(64 * 1.2**step) for step in range(20)),  # up to 2045, for an epsilon of a few thousandths
)
ROUND_OFF = 2e-15  # of one release's Rényi divergence: measured at most 5e-16
FFT_NOISE = 1e-15  # in delta, per composed release: measured 1e-17
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


# --- Rényi divergences -------------------------------------------------------------------------------------


class RenyiAccountant:
    """Rényi differential privacy on a fixed set of orders; holds for adaptively chosen releases too.

    `classic` converts by the paper's ε = min over orders of RDP + log(1/δ)/(order-1), otherwise by the
    tighter conversion of Canonne, Kamath and Steinke (2020, proposition 12) in dp-accounting.
    """

    def __init__(self, *, classic: bool = False) -> None:
        self.classic = classic
        self.rdp: Floats = np.zeros(len(ORDERS))

    def add(self, rate: float, noise: float, count: int) -> None:
        """Take note of `count` releases."""
        self.rdp = self.rdp + count * release_rdp(rate, noise)

    def epsilon(self, delta: float) -> float:
        """An upper bound on the ε of everything added so far."""
        if not self.rdp.any():
            return 0.0
        orders = np.array(ORDERS)
        if self.classic:
            return max(0.0, float(np.min(self.rdp + math.log(1 / delta) / (orders - 1))))
        from dp_accounting.rdp import compute_epsilon

        return max(0.0, float(compute_epsilon(orders, self.rdp, delta)[0]))


@functools.lru_cache(maxsize=4096)
def release_rdp(rate: float, noise: float) -> Floats:
    """Rényi divergence of one Poisson-subsampled Gaussian release at every order of ORDERS."""
    if noise < LEAST_NOISE:
        return np.full(len(ORDERS), np.inf)
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(ORDERS)
    with _quiet():
        accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(min(noise, MOST_NOISE))))
    # The divergence rises with the order, so a higher order's value is a bound too. dp-accounting's series
    # for orders below 2 overshoots by as much as a factor of four, and sometimes gives up (infinity).
    rdp: Floats = np.minimum.accumulate(accountant.rdp[::-1])[::-1] + ROUND_OFF
    rdp.flags.writeable = False
    return rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's warning that a fractional order is left out, which we expect and handle."""
    logger = logging.getLogger("absl")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


# --- privacy-loss distributions ----------------------------------------------------------------------------


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
    """

    def __init__(self, tally: Mapping[Release, int], *, records: int = 1, replace: bool = False) -> None:
        self.records = records
        self.replace = replace
        self.span = 2 if replace else records  # the largest shift of one lot's sum, in units of sensitivity
        self.interval, self.sharp = _interval(tally, self.span)
        self.hopeless = self.interval > 10  # losses in the millions: nothing to be exact about
        self.added: Counter[Release] = Counter()
        self.subsampled: Any = None
        self.full_batch = 0.0  # Σ 1/z² of releases with rate 1: together they are one Gaussian release

    def add(self, rate: float, noise: float, count: int) -> None:
        """Take note of `count` releases."""
        if count == 0:
            return
        noise = min(max(noise, LEAST_NOISE / 2), MOST_NOISE)
        self.added[rate, noise] += count
        if rate == 1.0:
            self.full_batch += count * (self.span / noise) ** 2
        elif not self.hopeless:
            part = _composed(rate, noise, count, self.interval, self.records, self.replace)
            self.subsampled = part if self.subsampled is None else self.subsampled.compose(part)

    def epsilon(self, delta: float) -> float:
        """An upper bound on the ε of everything added so far."""
        if not self.added:
            return 0.0
        # FFT rounding can hide a little tail mass (dp-accounting alone reports too small an ε at δ=1e-12), so
        # δ pays for it; where hardly anything of δ is left, Rényi divergences, which use logarithms, answer.
        usable = delta - FFT_NOISE * self.added.total()
        if usable < delta / 2 or self.hopeless:
            return self._fallback(delta)
        epsilon = max(0.0, float(self._distribution().get_epsilon_for_delta(usable)))
        # Both are upper bounds; the grid is the looser one only where it had to be coarse.
        return epsilon if self.sharp and math.isfinite(epsilon) else min(epsilon, self._fallback(delta))

    def _distribution(self) -> Any:
        if not self.full_batch:
            return self.subsampled
        full = _gaussian(self.full_batch**-0.5, self.interval)
        return full if self.subsampled is None else self.subsampled.compose(full)

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


def _interval(tally: Mapping[Release, int], span: int) -> tuple[float, bool]:
    """The grid on which losses are kept, and whether it is as fine as wanted; a coarse grid overstates ε."""
    variance = releases = reach = largest = 0.0
    for (rate, noise), count in _full_batch_merged(tally):
        noise = min(max(noise, 1e-9), MOST_NOISE)
        drawn = -math.expm1(span * math.log1p(-rate)) if rate < 1 else 1.0  # chance that the lot is touched
        divergence = math.log1p(drawn**2 * math.expm1(min((span / noise) ** 2, 500.0)))
        transport = ((span * rate) ** 2 + span * rate * (1 - rate)) / (2 * noise**2)
        variance += count * (span * rate) ** 2 * math.expm1(min(noise**-2, 50.0))
        releases += count
        reach += count * min(divergence, transport)  # both bound the mean loss
        largest = max(largest, (span**2 / 2 + 10 * span * noise) / noise**2 + math.log(drawn))
    if not releases:
        return 1e-4, True
    coarse = min(math.sqrt(variance / releases) / 16, 8e-3 * span)
    wanted = max(coarse / 4, min(coarse, largest / 2**16))  # 65 thousand cells are quick
    # The floors keep arrays below a million cells or so, and cells above the noise of float64.
    interval = max(wanted, reach / 2**19, largest / 2**18, 1e-7)
    return interval, interval == wanted and releases <= 1e6


def _full_batch_merged(tally: Mapping[Release, int]) -> list[tuple[Release, int]]:
    """Releases of all records are Gaussian, hence together one Gaussian release."""
    full = sum(count / max(noise, 1e-9) ** 2 for (rate, noise), count in tally.items() if rate == 1.0)
    rest = [(release, count) for release, count in tally.items() if release[0] < 1.0]
    return [*rest, ((1.0, full**-0.5), 1)] if full else rest


@functools.lru_cache(maxsize=4)
def _composed(rate: float, noise: float, count: int, interval: float, records: int, replace: bool) -> Any:
    single = _single(rate, noise, interval, records, replace)
    if count <= 10_000:
        return single.self_compose(count)
    # dp-accounting may compute size**count as a whole number, so large counts go in blocks.
    blocks, rest = divmod(count, 1000)
    whole = single.self_compose(1000).self_compose(blocks)
    return whole.compose(single.self_compose(rest)) if rest else whole


@functools.lru_cache(maxsize=8)
def _single(rate: float, noise: float, interval: float, records: int, replace: bool) -> Any:
    if records > 1:
        return _mixture(rate, noise, interval, records)
    return _gaussian(noise, interval, rate, replace=replace)


def _gaussian(noise: float, interval: float, rate: float = 1.0, *, replace: bool = False) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    relation = NeighboringRelation.REPLACE_ONE if replace else NeighboringRelation.ADD_OR_REMOVE_ONE
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=rate,
        value_discretization_interval=interval,
        neighboring_relation=relation,
    )


def _mixture(rate: float, noise: float, interval: float, records: int) -> Any:
    """Losses of N(0,z²) and Σⱼ Binomial(k,q)(j) N(j,z²) against each other.

    dp-accounting has this too (`from_mixture_gaussian_mechanism`), but finds thresholds only to 1e-6, which
    slightly understates δ, and takes seconds; here they are found to float precision.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from scipy.special import log_ndtr, logsumexp
    from scipy.stats import binom

    drawn = np.arange(records + 1)
    weights = binom.pmf(drawn, records, rate)
    drawn, weights = drawn[weights > 0], weights[weights > 0]

    def loss(x: Floats) -> Floats:  # log of mixture density over N(0,z²) density, rising in x
        exponent = (drawn * x[:, None] - drawn**2 / 2) / noise**2
        return np.asarray(logsumexp(exponent, b=weights, axis=1))

    def threshold(levels: Floats) -> Floats:  # the x where the loss passes each level, by bisection
        low = np.full_like(levels, -40 * noise)
        high = np.full_like(levels, records + 40 * noise)
        for _ in range(45):
            middle = (low + high) / 2
            below = loss(middle) < levels
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return high

    def deltas(epsilons: Floats, *, mixture_above: bool) -> Floats:
        # δ(ε) = upper(S) - e^ε lower(S), where S are the outcomes with loss above ε.
        x = threshold(epsilons if mixture_above else -epsilons)
        side = 1.0 if mixture_above else -1.0
        mixture = logsumexp(log_ndtr(side * (drawn - x[:, None]) / noise), b=weights, axis=1)
        zero = log_ndtr(-side * x / noise)
        upper, lower = (mixture, zero) if mixture_above else (zero, mixture)
        difference = np.clip(np.exp(upper) - np.exp(epsilons + lower), 0.0, 1.0)
        return np.maximum.accumulate(difference[::-1])[::-1]

    lowest, highest = loss(np.array([-10.5 * noise, records + 10.5 * noise]))
    pmfs = []
    for mixture_above in (True, False):  # the person leaves; the person joins
        first, last = (lowest, highest) if mixture_above else (-highest, -lowest)
        cells = range(math.floor(first / interval), math.ceil(last / interval) + 1)
        values = deltas(np.array(cells) * interval, mixture_above=mixture_above)
        pmfs.append(pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, cells[0], cells[-1], values))
    return privacy_loss_distribution.PrivacyLossDistribution(*pmfs)
