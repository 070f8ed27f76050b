"""Memories of earlier private releases: what FO-DP-SGD mixes into its next query.

A memory sees releases and nothing else, so everything it returns is post-processing of the
private transcript: it costs no privacy and changes no sensitivity (paper, Prop. "history-conditioned
query structure"). A window K counts the present step: it looks back at lags 1 to K-1.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fodp.memory.passes import Floats, Weights, mix_and_remember
from fodp.memory.window import WindowMemory, normalised, turned
from fodp.support import checks

# The few numbers by lag are plain floats: after a pass over the window, which leaves nothing else in the caches, every
# call into NumPy or PyTorch costs ten times its work.

_HUGE = 1e300


def noise_floor(std: float, size: int, gamma: float) -> float:
    """Norm that the EMA trend has when releases are nothing but noise: std·√(D·γ/(2-γ)).

    The scale on which κ and ζ mean something: below it a trend says nothing about the gradient.

    Args:
        std: the standard deviation of a release's noise.
        size: the number D of trained numbers.
        gamma: γ of the trend.

    Returns:
        The norm.

    Example:
        >>> round(noise_floor(std=1.1, size=1_000_000, gamma=0.1))
        252
    """
    return std * math.sqrt(size * gamma / (2 - gamma))


class UniformMemory(WindowMemory):
    """The plain average of the window (the paper's ablation, eq. uniform_memory_design)."""

    def __init__(self, window: int = 8):
        super().__init__(window)

    def by_lag(self) -> Floats:
        """All the same."""
        return normalised([1.0] * self.filled)


class ExponentialMemory(WindowMemory):
    """Geometrically decaying weights (the paper's ablation, eq. exponential_weights_memory_design).

    `decay` is γ_exp in (0, 1); the paper gives no value. 0.8 spreads the weight over about five
    releases, most of a window of eight.
    """

    def __init__(self, window: int = 8, decay: float = 0.8):
        super().__init__(window)
        self.decay = checks.open_fraction("decay", decay)

    def by_lag(self) -> Floats:
        """decay^(j-1), normalised."""
        return normalised([self.decay**lag for lag in range(self.filled)])


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
    ):
        super().__init__(window)
        self.alpha = checks.fraction("alpha", alpha)
        self.lam = checks.at_least_zero("lam", lam)
        self.tau = checks.at_least_zero("tau", tau)
        self.gamma = checks.fraction("gamma", gamma)
        self.kappa = checks.positive("kappa", kappa)
        self.zeta = checks.positive("zeta", zeta)
        self.eps = checks.positive("eps", eps)
        self._lags = range(1, self.window)
        self._log_power_law = [(self.alpha - 1) * math.log(j + 1) - self.lam * j for j in self._lags]
        self._scored = self.tau > 0 and self.window > 1  # else the kernel is fixed: no score is ever asked for
        self._trend: Tensor | None = None
        # ‖EMA‖, and ‖s̃ - EMA‖ by lag. On another device than the CPU they are tensors there, and nothing is read.
        self._trend_norm: float | Tensor = 0.0
        self._distances: Weights = []

    def _mix_and_remember(self, vector: Tensor, weights: Weights, scale: float | None) -> None:
        """Also follow the trend, EMA₁ = s̃₀, then EMA ← γ·s̃ + (1-γ)·EMA, and take every release's distance to it."""
        if not self._scored:
            super()._mix_and_remember(vector, weights, scale)
            return
        assert self._table is not None
        if self._trend is None:
            self._trend = torch.zeros_like(vector, requires_grad=False)
        gamma = self.gamma if self._writes else 1.0
        newest, kept = self._writes % self._slots, min(self._slots, self._writes + 1)
        squares = mix_and_remember(vector, self._table, weights, scale, self._trend, gamma, newest, kept)
        self._take_squares(squares, newest, kept)

    def _take_squares(self, squares: Weights, newest: int, kept: int) -> None:
        """‖row - trend‖² of the rows and then ‖trend‖², as `mix_and_remember` gives them."""
        if isinstance(squares, Tensor):
            roots = squares.sqrt()
            self._distances, self._trend_norm = turned(roots[:-1], newest), roots[-1]
            return
        self._distances = [math.sqrt(squares[(newest - age) % self._slots]) for age in range(kept)]
        self._trend_norm = math.sqrt(squares[-1])

    @property
    def inconsistency(self) -> Tensor:
        """ν_j for the lags that can be looked back at."""
        if not self._scored:
            return torch.zeros(self.filled, dtype=torch.float64)  # no trend is followed
        scale = self._scale()
        if isinstance(self._distances, Tensor):
            return self._distances / scale
        return torch.tensor([distance / float(scale) for distance in self._distances], dtype=torch.float64)

    def _scale(self) -> float | Tensor:
        if isinstance(self._trend_norm, Tensor):
            return self._trend_norm.clamp(min=self.kappa) + self.eps
        return max(self._trend_norm, self.kappa) + self.eps

    @property
    def confidence(self) -> Tensor:
        """χ_t: near one when the trend is long compared with ζ."""
        return torch.as_tensor(self._confidence(), dtype=torch.float64)

    def _confidence(self) -> float | Tensor:
        return self._trend_norm / (self._trend_norm + self.zeta)

    def weights_when_full(self) -> Floats:
        """Those of the power law alone: without a trend nothing is tempered."""
        largest = max(self._log_power_law, default=0.0)
        return normalised([math.exp(log - largest) for log in self._log_power_law])

    def by_lag(self) -> Weights:
        """a_j, normalised."""
        logs = self._log_power_law[: self.filled]
        if self._scored and isinstance(self._distances, Tensor):
            return self._by_lag_there(self._distances)
        if self._scored:
            # A tempering beyond all floats is a weight of zero; the limit keeps it from being infinity times nothing.
            tempering = min(float(self._confidence()) * self.tau / float(self._scale()), _HUGE)
            scores = zip(logs, self._distances, self._lags, strict=False)
            logs = [log - tempering * distance * j for log, distance, j in scores]
        largest = max(logs, default=0.0)  # its weight is one before they are normalised: no under- or overflow
        if largest == -math.inf:
            return [1.0, *[0.0] * (len(logs) - 1)]  # all beyond floats, the nearest release the least
        return normalised([math.exp(log - largest) for log in logs])

    def _by_lag_there(self, distances: Tensor) -> Tensor:
        """The same where the distances are on a device: nothing is read, and nothing of it waits."""
        tempering = (self._confidence() * self.tau / self._scale()).clamp(max=_HUGE)  # type: ignore[union-attr]
        lags = torch.arange(1, len(distances) + 1, dtype=torch.float64, device=distances.device)
        logs = (self.alpha - 1) * (lags + 1).log() - self.lam * lags - tempering * distances * lags
        weights = (logs - logs.amax()).exp()
        nearest = (lags == 1).double()  # all beyond floats: -inf less -inf is not a number
        weights = torch.where(logs.amax() == -math.inf, nearest, weights)
        return weights / weights.sum()

    def state_views(self) -> dict[str, Any]:
        """The same as `state_dict()` without copies, to be written to a file before the next `write`."""
        return super().state_views() | {
            "trend": self._trend,
            "trend_norm": float(self._trend_norm),
            "distances": self._distances.tolist() if isinstance(self._distances, Tensor) else list(self._distances),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        super().load_state_dict(state)
        self._trend = None if state["trend"] is None else state["trend"].clone()
        self._trend_norm, self._distances = float(state["trend_norm"]), list(state["distances"])
        if self._trend is not None and not self._trend.is_cpu:
            there = torch.tensor([self._trend_norm, *self._distances], dtype=torch.float64, device=self._trend.device)
            self._trend_norm, self._distances = there[0], there[1:]
