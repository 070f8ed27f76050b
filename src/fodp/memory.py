"""Memories of earlier private releases: what FO-DP-SGD mixes into its next query.

A memory sees releases and nothing else, so everything it returns is post-processing of the
private transcript: it costs no privacy and changes no sensitivity (paper, Prop. "history-conditioned
query structure"). A window K counts the present step: it looks back at lags 1 to K-1.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fodp import _checks
from fodp.recall import Floats, inner_product, inner_products, squared_distances
from fodp.window import WindowMemory

# The few numbers by lag live in NumPy: on vectors that short PyTorch's calls cost more than their work.

# ‖s̃ - EMA‖² from inner products keeps its digits unless it is less than this part of ‖s̃‖² + ‖EMA‖².
_CANCELS = 0.1

_HUGE = 1e150


def noise_floor(std: float, size: int, gamma: float) -> float:
    """Norm that the EMA trend has when releases are nothing but noise: std·√(D·γ/(2-γ)).

    The scale on which κ and ζ mean something: below it a trend says nothing about the gradient.
    """
    return std * math.sqrt(size * gamma / (2 - gamma))


class UniformMemory(WindowMemory):
    """The plain average of the window (the paper's ablation, eq. uniform_memory_design)."""

    def __init__(self, window: int = 8, *, bfloat16: bool = False):
        super().__init__(window, bfloat16=bfloat16)

    def _by_lag(self) -> Floats:
        return np.full(self.filled, 1 / max(1, self.filled))


class ExponentialMemory(WindowMemory):
    """Geometrically decaying weights (the paper's ablation, eq. exponential_weights_memory_design).

    `decay` is γ_exp in (0, 1); the paper gives no value. 0.8 spreads the weight over about five
    releases, most of a window of eight.
    """

    def __init__(self, window: int = 8, decay: float = 0.8, *, bfloat16: bool = False):
        super().__init__(window, bfloat16=bfloat16)
        self.decay = _checks.open_fraction("decay", decay)

    def _by_lag(self) -> Floats:
        kernel: Floats = self.decay ** np.arange(self.filled, dtype=np.float64)
        return kernel / kernel.sum() if self.filled else kernel


class FractionalMemory(WindowMemory):
    """Confidence-aware tempered fractional memory (paper, section 3.2).

    Lag j has the weight a_j = (j+1)^(α-1) · exp(-(λ + χ·τ·ν_j)·j), normalised to sum one, where the
    inconsistency ν_j = ‖s̃_{t-j} - EMA‖ / (max(‖EMA‖, κ) + eps) compares a release with the trend
    and the confidence χ = ‖EMA‖ / (‖EMA‖ + ζ) says how much that trend is worth.

    The paper gives no values for λ, τ, γ, κ, ζ and eps. Ours, each with its reason (a release is mostly
    noise of norm σC√D, which decides what these scales mean):

    * `lam` 0.05 halves a release after 14 lags: it shapes K=32 and hardly touches K=8.
    * `tau` 0.1: on pure noise χ·ν is about 2 to 4, so tempering is felt and does not rule.
    * `gamma` 0.1 averages some 19 releases, longer than the window, so the trend is not the window itself.
    * `kappa`, `zeta` 1.0: the size of one clipped example at C=1. Whoever knows σ, C and D does better with
      `noise_floor`, the trend's norm on pure noise; the method `fo-dp-sgd` uses that.
    * `eps` 1e-12: κ > 0 already keeps the quotient finite.
    """

    def __init__(
        self,
        alpha: float = 0.8,
        window: int = 8,
        *,
        lam: float = 0.05,
        tau: float = 0.1,
        gamma: float = 0.1,
        kappa: float = 1.0,
        zeta: float = 1.0,
        eps: float = 1e-12,
        bfloat16: bool = False,
    ):
        super().__init__(window, bfloat16=bfloat16)
        self.alpha = _checks.fraction("alpha", alpha)
        self.lam = _checks.at_least_zero("lam", lam)
        self.tau = _checks.at_least_zero("tau", tau)
        self.gamma = _checks.fraction("gamma", gamma)
        self.kappa = _checks.positive("kappa", kappa)
        self.zeta = _checks.positive("zeta", zeta)
        self.eps = _checks.positive("eps", eps)
        self._lags = np.arange(1, self.window, dtype=np.float64)
        self._log_power_law: Floats = (self.alpha - 1) * np.log(self._lags + 1) - self.lam * self._lags
        self._scored = self.tau > 0 and self.window > 1  # else the kernel is fixed: no score is ever asked for
        # Inner products that give every score without another pass over the ring, by ring row:
        self._squares: Floats = np.zeros(self.window - 1)  # ‖s̃‖²
        self._along: Floats = np.zeros(self.window - 1)  # ⟨s̃, EMA⟩
        self._distances: Floats = np.zeros(self.window - 1)  # ‖s̃ - EMA‖
        self._trend_square = 0.0  # ‖EMA‖²
        self._own_trend: Tensor | None = None

    def write(self, release: Tensor) -> None:
        """Remember a release and follow the trend: EMA₁ = s̃₀, then EMA ← γ·s̃ + (1-γ)·EMA."""
        self._fit(release)
        if self._scored:
            self._follow(release)
        super().write(release)

    def _follow(self, release: Tensor) -> None:
        """Move the trend and the inner products with it; the release's row comes next."""
        assert self._table is not None
        if self._own_trend is None and not self._leading:
            self._own_trend = torch.zeros_like(release)
        trend, gamma, rows = self._trend(), self.gamma, self.filled
        products = None if self._recall is None else self._recall.products(release)
        if products is None:
            products = inner_products(self._table[: self._leading + rows], release.detach())
        if not self._leading:
            products = np.append(inner_product(trend, release.detach()), products)
        along, square = float(products[0]), float(products[-1])
        new = self._writes % (self.window - 1)
        if self._writes == 0:
            trend.copy_(release)
            along, gamma = square, 1.0
        else:
            trend.lerp_(release, gamma)
        square_now = gamma**2 * square + 2 * gamma * (1 - gamma) * along + (1 - gamma) ** 2 * self._trend_square
        self._trend_square = max(0.0, square_now)  # rounding, where trend and release cancel
        self._along[:rows] += gamma * (products[1:-1] - self._along[:rows])
        self._squares[new], self._along[new] = square, gamma * square + (1 - gamma) * along
        rows = max(rows, new + 1)
        squares = self._squares[:rows]
        apart = squares - 2 * self._along[:rows] + self._trend_square
        close = np.flatnonzero(apart < _CANCELS * (squares + self._trend_square))
        for row in close:  # under noise only in the first few steps, or when γ is near one
            remembered = release if row == new else self._ring()[row]
            apart[row] = squared_distances(remembered.unsqueeze(0), trend)[0]
        self._distances[:rows] = np.sqrt(apart)

    def _trend(self) -> Tensor:
        """The table's first row, or beside a rounded ring a vector of its own, which is not rounded."""
        trend = self._table[0] if self._leading and self._table is not None else self._own_trend
        assert trend is not None
        return trend

    @property
    def inconsistency(self) -> Tensor:
        """ν_j for the lags that can be looked back at."""
        return torch.from_numpy(self._inconsistency())

    def _inconsistency(self) -> Floats:
        return self._distances[self._rows()] / (max(math.sqrt(self._trend_square), self.kappa) + self.eps)

    @property
    def confidence(self) -> Tensor:
        """χ_t: near one when the trend is long compared with ζ."""
        return torch.tensor(self._confidence(), dtype=torch.float64)

    def _confidence(self) -> float:
        norm = math.sqrt(self._trend_square)
        return norm / (norm + self.zeta)

    def _by_lag(self) -> Floats:
        log_kernel = self._log_power_law[: self.filled]
        if not self.filled:
            return log_kernel.copy()
        if self.tau > 0:
            # A tempering beyond all floats is a weight of zero: the limits only keep it finite.
            tempering = np.minimum(self._inconsistency(), _HUGE) * min(self._confidence() * self.tau, _HUGE)
            log_kernel = log_kernel - tempering * self._lags[: self.filled]
        kernel: Floats = np.exp(log_kernel - log_kernel.max())  # the largest is one: no under- or overflow of the sum
        return kernel / kernel.sum()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        return super().state_dict() | {
            "trend": self._trend().clone() if self._scored and self._table is not None else None,
            "squares": torch.from_numpy(self._squares.copy()),
            "along": torch.from_numpy(self._along.copy()),
            "distances": torch.from_numpy(self._distances.copy()),
            "trend_square": self._trend_square,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        super().load_state_dict(state)
        if self._scored and self._table is not None:
            if not self._leading:
                self._own_trend = torch.empty_like(state["trend"])
            self._trend().copy_(state["trend"])
        self._squares = state["squares"].cpu().numpy().copy()
        self._along = state["along"].cpu().numpy().copy()
        self._distances = state["distances"].cpu().numpy().copy()
        self._trend_square = float(state["trend_square"])
