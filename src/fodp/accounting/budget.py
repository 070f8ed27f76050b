"""Budgets over several runs: a Rényi filter that refuses in time, and the price of selecting among runs.

Later runs are chosen after seeing earlier ones, so the ε of plans fixed in advance must not simply be compared
with a target. `RenyiBudget` is a privacy filter: it may be asked again and again, by anyone who has seen every
release so far.
"""

import functools
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fodp.accounting import composition
from fodp.accounting.composition import Tally
from fodp.accounting.events import Phase
from fodp.accounting.releases import Floats
from fodp.accounting.renyi import ORDERS, RenyiAccountant, epsilon_from_rdp, release_rdp
from fodp.errors import PrivacyError
from fodp.support import checks

_AT_ONCE = 2**16  # chances that are worked out at a time
_MOST_RUNS = 1e6  # a mean beyond which nobody makes runs, and a number is no longer found in seconds


@dataclass(frozen=True)
class RenyiBudget:
    """(ε, δ) for everything that is ever released from one data set, spent as Rényi divergence at one order.

    Guarantee: if every release is (order, ρ)-Rényi differentially private with ρ known before it is made, and
    none is made that would raise the sum of all ρ above `capacity`, then all releases together are
    (ε, δ)-differentially private, however releases, plans and the moment to stop were chosen after seeing
    earlier releases (fully adaptive composition: Feldman and Zrnic 2021, "Individual privacy accounting via a
    Rényi filter"; Lécuyer 2021, "Practical privacy filters and odometers with Rényi differential privacy").

    Why: with Pₜ/Qₜ the likelihood ratio of the first t releases on two neighbouring data sets and α the order,
    exp((α-1)(capacity - Σρ))·(Pₜ/Qₜ)^α is a supermartingale under Q, whatever is chosen next; the sum never
    exceeds the capacity, so E_Q (P/Q)^α ≤ exp((α-1)·capacity), which is (α, capacity)-Rényi privacy. It is
    turned into (ε, δ) by Canonne, Kamath and Steinke (2020, proposition 12).

    This needs ONE order, fixed before the first release. A rule "go on while any order has something left" lets
    results choose the order; its δ would have to be shared among the orders.
    """

    epsilon: float
    delta: float
    order: float

    def __post_init__(self) -> None:
        checks.positive("the budget's epsilon", self.epsilon)
        checks.open_fraction("the budget's delta", self.delta)
        if checks.number("order", self.order) <= 1 or self.capacity <= 0:
            raise PrivacyError(f"order {self.order:g} cannot hold a budget of ({self.epsilon:g}, {self.delta:g})")

    @classmethod
    def suited_to(cls, phases: Sequence[Phase], epsilon: float, delta: float) -> "RenyiBudget":
        """The budget at the order that lets these phases be repeated most often; later plans must live with it."""
        checks.positive("the budget's epsilon", epsilon)
        checks.open_fraction("the budget's delta", delta)
        # The choice of order cannot harm the guarantee, so a few of a schedule's releases will do to make it.
        frequent = Counter(dict(composition.tally(phases))).most_common(8)
        spent = RenyiAccountant()
        for (rate, noise), count in frequent:
            spent.add(rate, noise, count)
        orders = np.array(ORDERS)
        capacity = np.array([_capacity(order, epsilon, delta) for order in orders])
        share = np.full(len(orders), np.inf)
        share[capacity > 0] = spent.rdp[capacity > 0] / capacity[capacity > 0]
        best = int(np.argmin(share))
        if not math.isfinite(share[best]):
            raise PrivacyError(
                f"a budget of ({epsilon:g}, {delta:g}) is too small to be kept by a Rényi filter, or the plan has "
                "next to no noise: raise epsilon or delta, or the noise multiplier"
            )
        return cls(epsilon, delta, float(orders[best]))

    @property
    def capacity(self) -> float:
        """How much Rényi divergence at the order fits into (ε, δ)."""
        return _capacity(self.order, self.epsilon, self.delta)

    def epsilon_at(self, delta: float) -> float:
        """The ε that the same budget guarantees at another δ."""
        checks.open_fraction("delta", delta)
        value = self.capacity + math.log1p(-1 / self.order) - math.log(delta * self.order) / (self.order - 1)
        return max(0.0, value)

    def costs(self, phases: Sequence[Phase]) -> Floats:
        """Upper bounds on the divergence of the first n steps, for n = 0 … all of them."""
        rounded = composition.rounded_releases(phases)
        each = []
        for phase in phases:
            if phase.steps:
                steps = np.zeros(phase.steps)  # of a round the first step is charged for all
                steps[:: phase.turns] = sum(
                    float(release_rdp(*rounded[event], (self.order,))[0]) for event in phase.events
                )
                each.append(steps)
        return np.concatenate([[0.0], np.cumsum(np.concatenate(each))]) if each else np.zeros(1)


@dataclass(frozen=True)
class Repetitions:
    """How often a training is repeated when only its best result is kept: a random number with this mean.

    The distribution is Poisson (`shape` infinite), geometric (1), logarithmic (0) or truncated negative
    binomial (between), as in Papernot and Steinke (2022), "Hyperparameter tuning with Rényi differential
    privacy". Every repetition may try other hyper-parameters, drawn at random and independently of the data.

    Guarantee: releasing the best of `draw()` repetitions, and nothing else, neither the others nor their
    number, costs what `epsilon` says. Runs of a grid whose results were all looked at simply compose.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= checks.number("mean", self.mean) <= _MOST_RUNS:
            advice = ": make fewer runs" if self.mean > 1 else ""
            raise PrivacyError(f"mean must lie between 1 and {_MOST_RUNS:g}, got {self.mean!r}{advice}")
        if self.shape != math.inf:
            checks.at_least_zero("shape", self.shape)

    def draw(self) -> int:
        """A fresh number of repetitions, from the operating system's entropy. Keep it secret. Poisson may say 0.

        The whole tail is drawn: a logarithmic number may be hundreds of times its mean, and the price is that of the
        stated distribution, not of one that is cut off.
        """
        u = secrets.randbelow(2**53) / 2**53
        first, below = 0 if self.shape == math.inf else 1, 0.0
        while True:
            counts = np.arange(first, first + _AT_ONCE)
            reached = below + np.cumsum(np.exp(self._log_chances(counts)))
            place = int(np.searchsorted(reached, u, side="right"))
            if place < len(counts):
                return int(counts[place])
            if self._chance_from(first + _AT_ONCE) < 2.0**-54:  # less than a word's chance: u is above all by rounding
                return int(counts[np.searchsorted(reached, reached[-1])])  # where the sum has stopped growing
            first, below = first + _AT_ONCE, float(reached[-1])

    def rdp(self, phases: Sequence[Phase]) -> Floats:
        """An upper bound on the Rényi divergence of the selection, at every order of the accountant."""
        return _selection_cost(composition.tally(phases), self.mean, self.shape)

    def epsilon(self, phases: Sequence[Phase], delta: float) -> float:
        """ε at δ of releasing the best of a random number of runs of these phases."""
        return epsilon_from_rdp(self.rdp(phases), checks.open_fraction("delta", delta))

    def _log_chances(self, counts: npt.NDArray[np.int64]) -> Floats:
        """log Pr[K = k] for each k."""
        from scipy.special import betaln, gammaln

        if self.shape == math.inf:
            return np.asarray(counts * math.log(self.mean) - self.mean - gammaln(counts + 1.0))
        if self.mean == 1:
            return np.where(counts == 1, 0.0, -np.inf)
        gamma = _stopping_chance(self.mean, self.shape)
        rest = counts * math.log1p(-gamma) - np.log(counts)
        if self.shape == 0:
            return np.asarray(rest - math.log(-math.log(gamma)))
        # (1-γ)^k / (γ^-η - 1) · Π_{l<k} (l+η)/(l+1), a product that is 1 / (k·B(η, k))
        power = -self.shape * math.log(gamma)  # log(γ^-η - 1) is that of e^power - 1, which may be no float
        return np.asarray(rest - betaln(self.shape, counts) - power - math.log(-math.expm1(-power)))

    def _chance_from(self, count: int) -> float:
        """A bound on Pr[K ≥ count] from the first chance and the largest ratio of two that follow each other."""
        if self.mean == 1:
            return 0.0
        if self.shape == math.inf:
            ratio = self.mean / (count + 1)
        else:
            ratio = (1 - _stopping_chance(self.mean, self.shape)) * max(1.0, (count + self.shape) / (count + 1))
        first = math.exp(self._log_chances(np.array([count]))[0])
        return first / (1 - ratio) if ratio < 1 else 1.0


@functools.lru_cache(maxsize=64)
def _stopping_chance(mean: float, shape: float) -> float:
    """γ of the truncated negative binomial with this mean, by bisection: the mean falls as γ rises."""

    def mean_at(gamma: float) -> float:
        if shape == 0:
            return (1 / gamma - 1) / -math.log(gamma)
        return shape * (1 - gamma) / (gamma * -math.expm1(shape * math.log(gamma)))

    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_at(middle) > mean else (low, middle)
    return high


def _capacity(order: float, epsilon: float, delta: float) -> float:
    return float(epsilon - math.log1p(-1 / order) + math.log(delta * order) / (order - 1))


@functools.lru_cache(maxsize=64)
def _selection_cost(tally: Tally, mean: float, shape: float) -> Floats:
    """Papernot and Steinke (2022): theorem 6 for a Poisson number of runs, theorem 2 for the others."""
    spent = RenyiAccountant()
    for (rate, noise), count in tally:
        spent.add(rate, noise, count)
    if not np.isfinite(spent.rdp).all():
        return np.full(len(ORDERS), math.inf)
    orders = np.array(ORDERS)
    extra: float | Floats
    if shape == math.inf:
        # δ of one run at ε = log(1 + 1/(order-1)): the conversion of `RenyiAccountant.epsilon`, solved for δ
        left = spent.rdp - np.log1p(1 / (orders - 1))[:, None] + np.log1p(-1 / orders)
        extra = mean * np.exp(np.minimum(0.0, ((orders - 1) * left - np.log(orders)).min(axis=1)))
    else:
        log_stop = math.log(_stopping_chance(mean, shape))
        extra = (1 + shape) * float(np.min((1 - 1 / orders) * spent.rdp - log_stop / orders))
    rdp: Floats = spent.rdp + math.log(mean) / (orders - 1) + extra
    rdp = np.minimum.accumulate(rdp[::-1])[::-1]  # a higher order's value is a bound too
    rdp.setflags(write=False)
    return rdp
