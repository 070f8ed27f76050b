"""The fractional memory of a fixed kernel (τ = 0) as a short sum of exponentials: a few vectors, whatever the window.

Σ_j ρ^(j-1)·s̃_{t-j} follows the recursion S ← ρ·S + s̃, so a kernel Σ_m c_m·ρ_m^(j-1) needs one vector per term and
no ring. It never ends, whereas the window does: what it has beyond the window is part of the stated error.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp.errors import PrivacyError
from fodp.memory.passes import Floats
from fodp.memory.window import WindowMemory, normalised
from fodp.support import checks

Array = npt.NDArray[np.float64]

_MOST_TERMS = 6
_TRIALS = 17  # slowest and fastest rates that are tried; odd, so that the slowest may be λ itself
_REACH = 1e-6  # `weights` leaves out the old lags that have less than this together


class Kernel(NamedTuple):
    """Σ_m shares_m·decays_m^(j-1), and the largest error of its normalised weights at any step (ℓ1)."""

    decays: Array
    shares: Array
    error: float


class ExponentialSumMemory(WindowMemory):
    """Approximates `FractionalMemory(alpha, window, lam=lam, tau=0)` with the fewest exponentials that do.

    `error` bounds Σ_j |ŵ_j - w_j| over all lags, those beyond the window included, at every step from the first
    on. So the average read is off by at most `error` times the largest release so far; an error above `tolerance`
    is refused. Shares are never negative: what is read is an average, as in the paper.
    """

    def __init__(self, alpha: float = 0.8, window: int = 128, *, lam: float = 0.05, tolerance: float = 0.05):
        super().__init__(checks.whole("window", window, minimum=2, maximum=10_000))
        self.alpha = checks.fraction("alpha", alpha)
        self.lam = checks.at_least_zero("lam", lam)
        self.tolerance = checks.open_fraction("tolerance", tolerance)
        self.decays, self.shares, self.error = fitted(self.alpha, self.window, self.lam, self.tolerance)
        self._terms: list[tuple[float, float]] = list(zip(self.decays.tolist(), self.shares.tolist(), strict=True))
        self._slots = len(self._terms)
        self._reach = math.ceil(math.log(_REACH) / math.log(self.decays.max()))

    @property
    def filled(self) -> int:
        """How many lags `weights` tells: all that have been seen, but for those with hardly any weight."""
        return min(self._reach, self._writes)

    def by_lag(self) -> Floats:
        """Those of the sum, normalised."""
        return normalised((_values(self.decays, self.filled) @ self.shares).tolist())

    def _by_row(self) -> Floats:
        # Plain floats: between passes over memory every call into NumPy costs ten times its work.
        seen = math.fsum(share * (1 - rho**self._writes) / (1 - rho) for rho, share in self._terms)  # Σ over the lags
        return [share / seen for _, share in self._terms]

    def _order(self) -> list[int]:
        return list(range(self._slots))

    def _keep(self, release: Tensor, table: Tensor) -> None:
        """S ← ρ·S + s̃ for each term."""
        for row, (rho, _) in zip(table, self._terms, strict=True):
            torch.add(release, row, alpha=rho, out=row)


@functools.cache
def fitted(alpha: float, window: int, lam: float, tolerance: float) -> Kernel:
    """The fewest exponentials whose error is at most the tolerance."""
    lags = np.arange(1, window, dtype=np.float64)
    logs = (alpha - 1) * np.log(lags + 1) - lam * lags
    kernel: Array = np.exp(logs - logs.max())
    kernel /= kernel.sum()
    slowest = np.clip(max(lam, 1 / window), None, 20.0) * np.geomspace(0.25, 4, _TRIALS)
    error = math.inf
    for terms in range(1, _MOST_TERMS + 1):
        decays, shares = min(
            (
                _least_squares(kernel, np.exp(-np.geomspace(low, high, terms)))
                for low in slowest
                for high in (low * np.geomspace(1.3, max(2.0, 3 / low), _TRIALS) if terms > 1 else [low])
            ),
            key=lambda found: _late_error(kernel, *found),
        )
        found = max(_late_error(kernel, decays, shares), _early_error(kernel, decays, shares))
        if found <= tolerance:
            return Kernel(decays, shares, found)
        error = min(error, found)
    raise PrivacyError(
        f"up to {_MOST_TERMS} exponentials miss the weights of alpha={alpha}, window={window}, lam={lam} by "
        f"{error:.3f}, more than {tolerance}: raise window or lam, so that the window does not end while its weights "
        f"are large (lam·window of 4 or more), or allow a larger error, or leave compact out"
    )


def _values(decays: Array, count: int) -> Array:
    """ρ_m^(j-1), a row for each lag j = 1, …, count."""
    values: Array = decays ** np.arange(count)[:, None]
    return values


def _least_squares(kernel: Array, decays: Array) -> tuple[Array, Array]:
    """The non-negative shares nearest to the kernel over all lags to infinity, without the terms that get none."""
    from scipy.optimize import nnls

    gram = 1 / (1 - np.outer(decays, decays))  # Σ_j ρ_m^(j-1)·ρ_n^(j-1)
    root = np.linalg.cholesky(gram + 1e-12 * gram.max() * np.eye(len(decays)))
    shares = nnls(root.T, np.linalg.solve(root, kernel @ _values(decays, len(kernel))))[0]
    return decays[shares > 0], shares[shares > 0]


def _late_error(kernel: Array, decays: Array, shares: Array) -> float:
    """Σ|ŵ - w| at its largest from a full window on: it is convex in the normaliser, so at its first or last value."""
    found = _values(decays, len(kernel)) @ shares
    normalisers = found.sum(), (shares / (1 - decays)).sum()
    return float(max(np.abs(found / n - kernel).sum() + 1 - found.sum() / n for n in normalisers))


def _early_error(kernel: Array, decays: Array, shares: Array) -> float:
    """Σ|ŵ - w| at its largest while the window fills."""
    found = _values(decays, len(kernel)) @ shares
    sums = zip(found.cumsum(), kernel.cumsum(), strict=True)
    return float(max(np.abs(found[:t] / f - kernel[:t] / k).sum() for t, (f, k) in enumerate(sums, start=1)))
