"""Rényi divergences of releases: for plans, and for budgets that are spent adaptively."""

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from fodp.accounting.releases import LEAST_NOISE, MOST_NOISE, Floats, Release

ORDERS: tuple[float, ...] = (
    *(1.001, 1.0015, 1.002, 1.003, 1.005, 1.007, 1.01, 1.015, 1.02, 1.03, 1.04, 1.05, 1.07),  # for a large epsilon
    *(1.1, 1.15, *(round(1 + step / 10, 1) for step in range(2, 100))),
    *range(11, 64),
    *(round(64 * 1.2**step) for step in range(20)),  # up to 2045, for an epsilon of a few thousandths
)
ROUND_OFF = 2e-15  # of one release's Rényi divergence: measured at most 5e-16
_ROUNDING = 1 + 1e-9  # and of its value, relatively: measured at most 1e-11
_BY_QUADRATURE = 11  # orders up to here are integrated; above are whole numbers, whose divergence is a finite sum
_LEAST_INTEGRABLE = 0.05  # noise below which the integral would take long; epsilon is in the hundreds there


class RenyiAccountant:
    """Rényi differential privacy on a fixed set of orders; holds for adaptively chosen releases too.

    `classic` converts by the paper's ε = min over orders of RDP + log(1/δ)/(order-1), otherwise by the
    tighter conversion of Canonne, Kamath and Steinke (2020, proposition 12).
    """

    def __init__(self, *, classic: bool = False) -> None:
        self.classic = classic
        self.added: Counter[Release] = Counter()

    def add(self, rate: float, noise: float, count: int) -> None:
        """Take note of `count` releases; a negative count takes them back."""
        self.added[rate, noise] += count

    @property
    def rdp(self) -> Floats:
        """The Rényi divergence of everything added so far, at each order."""
        # Summed afresh: what is infinite, or very large, could not be subtracted again from a running sum.
        return sum((n * release_rdp(*release) for release, n in self.added.items() if n), np.zeros(len(ORDERS)))

    def epsilon(self, delta: float) -> float:
        """An upper bound on the ε of everything added so far."""
        return epsilon_from_rdp(self.rdp, delta, classic=self.classic)


def epsilon_from_rdp(rdp: Floats, delta: float, *, classic: bool = False) -> float:
    """The ε at δ of what has this Rényi divergence at each of `ORDERS`; `classic` as in `RenyiAccountant`."""
    if np.isnan(rdp).any():  # a comparison with nan would make it ε = 0
        raise ArithmeticError("a Rényi divergence is not a number; please report this plan: no ε is known for it")
    if not rdp.any():
        return 0.0
    orders = np.array(ORDERS)
    if classic:
        return max(0.0, float(np.min(rdp + math.log(1 / delta) / (orders - 1))))
    if -math.expm1(-rdp[0]) < delta**2:  # δ ≤ √(1 - e^-KL) at ε = 0, and KL is at most any order's divergence
        return 0.0
    return max(0.0, float(np.min(rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))))


@functools.lru_cache(maxsize=4096)
def release_rdp(rate: float, noise: float, orders: tuple[float, ...] = ORDERS) -> Floats:
    """Upper bounds on the Rényi divergence of one Poisson-subsampled Gaussian release at every order.

    With w(x) = 1 - q + q·exp((x - ½)/z²), the likelihood ratio, and x normal with variance z² it is
    log E[w^order] / (order - 1) (Mironov, Talwar and Zhang 2019).
    """
    if noise < LEAST_NOISE:
        return np.full(len(orders), np.inf)
    noise = min(noise, MOST_NOISE)
    if rate == 1:
        rdp = np.array(orders) / (2 * noise**2)
    else:
        whole = {math.ceil(order) for order in orders if order > _BY_QUADRATURE or noise < _LEAST_INTEGRABLE}
        logs = {float(order): _log_moment(rate, noise, order) for order in whole}
        rest = [order for order in orders if order <= _BY_QUADRATURE and noise >= _LEAST_INTEGRABLE]
        logs |= dict(zip(rest, _log_moments(rate, noise, rest), strict=True)) if rest else {}
        # The divergence rises with the order: where only whole orders are known, the next one's is a bound.
        rdp = np.array([logs[known] / (known - 1) for o in orders for known in [o if o in logs else math.ceil(o)]])
    rdp = rdp * _ROUNDING + ROUND_OFF
    rdp.setflags(write=False)
    return rdp


def _log_moment(rate: float, noise: float, order: int) -> float:
    """log E[w^order] of a whole order: the sum over how often the shifted part of w is taken."""
    taken, log_choices = _log_choices(order)
    exponents = log_choices + taken * math.log(rate) + (order - taken) * math.log1p(-rate)
    exponents = exponents + taken * (taken - 1) / (2 * noise**2)
    top = float(exponents.max())
    return top + math.log(float(np.exp(exponents - top).sum()))


@functools.lru_cache(maxsize=256)
def _log_choices(order: int) -> tuple[Floats, Floats]:
    from scipy.special import gammaln

    taken = np.arange(order + 1.0)
    return taken, gammaln(order + 1.0) - gammaln(taken + 1) - gammaln(order - taken + 1)


def _log_moments(rate: float, noise: float, orders: Sequence[float]) -> Floats:
    """log E[w^order] by the trapezoidal rule, whose error is far below that of floats.

    Why: the integrand is analytic where |Im x| < πz², since w is not 0 there, and on a line at height a it is at most
    exp(a²/2z²) times as large as on the real one. The rule with step s then errs by a share of at most
    2exp(a²/2z² - 2πa/s). With a = κz, s = cz the exponent is κ²/2 - 2πκ/c: at most -60 for c as chosen here and
    κ = πz, or κ = 9 where noise is above 3. What is cut off, beyond 13 standard deviations of each part of
    w^order, is less.
    """
    pace = 0.5 if noise > 3 else 2 * math.pi**2 * noise / (60 + (math.pi * noise) ** 2 / 2)
    x = np.arange(-13 * noise, max(orders) + 13 * noise, pace * noise)
    exponent = (x - 0.5) / noise**2
    small = np.minimum(exponent, 1.0)
    log_ratio = np.where(
        exponent < 1,
        np.log1p(rate * np.expm1(small)),
        math.log(rate) + exponent + np.log1p((1 / rate - 1) * np.exp(-np.maximum(exponent, 1.0))),
    )
    log_density = -((x / noise) ** 2) / 2 + math.log(pace / math.sqrt(2 * math.pi))
    moments = []
    for order in orders:
        exponents = order * log_ratio + log_density
        top = float(exponents.max())
        log_moment = top + math.log(float(np.exp(exponents - top).sum()))
        if (
            log_moment < 0.5
        ):  # its precision would be lost: E w is 1, so E[w^order] - 1 = E[w^order - 1 - order·(w - 1)]
            log_moment = math.log1p(float(_excess(log_ratio, order, log_density).sum()))
        moments.append(log_moment)
    return np.array(moments)


def _excess(y: Floats, order: float, log_density: Floats) -> Floats:
    """e^(order·y) - 1 - order·(e^y - 1), times the density; by its series where the terms cancel."""
    a, density = order, np.exp(log_density)
    small = np.minimum(y, 30 / order)
    series = 1 / 2 + small * ((a + 1) / 6 + small * ((a * a + a + 1) / 24 + small * (a**3 + a * a + a + 1) / 120))
    plain = np.where(
        np.abs(a * small) < 1e-3, a * (a - 1) * small**2 * series, np.expm1(a * small) - a * np.expm1(small)
    )
    # A large ratio is no float, and where it is large the density may be none: only their product is.
    large = np.exp(a * y + log_density) - a * np.exp(y + log_density) + (a - 1) * density
    return np.where(a * y < 30, plain * density, large)
