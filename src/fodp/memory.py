"""Memories of earlier private releases: what FO-DP-SGD mixes into its next query.

A memory sees releases and nothing else, so everything it returns is post-processing of the
private transcript: it costs no privacy and changes no sensitivity (paper, Prop. "history-conditioned
query structure"). A window K counts the present step: it looks back at lags 1 to K-1.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import PrivacyError

# Inner products run in float32 over blocks of this many entries and are added up in float64:
# exact enough for the scores at the speed of one pass through memory.
_BLOCK = 1 << 16

# The few numbers by lag live in NumPy: on vectors that short PyTorch's calls cost more than their work.
Floats = npt.NDArray[np.float64]

# ‖s̃ - EMA‖² from inner products keeps its digits unless it is less than this part of ‖s̃‖² + ‖EMA‖².
_CANCELS = 0.1


def noise_floor(std: float, size: int, gamma: float) -> float:
    """Norm that the EMA trend has when releases are nothing but noise: std·√(D·γ/(2-γ)).

    The scale on which κ and ζ mean something: below it a trend says nothing about the gradient.
    """
    return std * math.sqrt(size * gamma / (2 - gamma))


class WindowMemory:
    """A ring of the last K-1 releases; `read()` is their average under `weights`.

    Subclasses give the weights by lag; this class keeps the ring.
    """

    def __init__(self, window: int):
        self.window = _checks.whole("window", window, maximum=100_000)
        self._ring: Tensor | None = None  # K-1 rows, made at the first write
        self._writes = 0

    @property
    def filled(self) -> int:
        """How many lags can be looked back at now: K_t - 1."""
        return min(self.window - 1, self._writes)

    @property
    def weights(self) -> Tensor:
        """Normalised weights of lags 1, 2, … (float64, they sum to one; empty when K_t = 1)."""
        return torch.from_numpy(self._by_lag())

    def _by_lag(self) -> Floats:
        raise NotImplementedError

    def read(self, out: Tensor | None = None) -> Tensor | None:
        """The memory state u: the weighted average of past releases, or None when K_t = 1.

        Reading changes nothing. The result never aliases the memory.
        """
        if self._ring is None or self.filled == 0:
            return None
        by_row = np.empty(self.filled)
        by_row[self._rows()] = self._by_lag()
        return torch.mv(self._ring[: self.filled].t(), torch.from_numpy(by_row).to(self._ring), out=out)

    def write(self, release: Tensor) -> None:
        """Remember a release (a copy of it) and forget the oldest beyond the window."""
        if release.dim() != 1:
            raise PrivacyError(f"a release is one flat vector, got shape {tuple(release.shape)}")
        if self._ring is None:
            self._ring = release.new_zeros(self.window - 1, release.numel())
        if release.numel() != self._ring.shape[1]:
            raise PrivacyError(f"a release of {release.numel()} entries does not fit {self._ring.shape[1]}")
        if self.window > 1:
            self._ring[self._writes % (self.window - 1)] = release
        self._writes += 1

    def _rows(self) -> list[int]:
        """The ring rows of lags 1, 2, …: the newest release first."""
        return [(self._writes - lag) % (self.window - 1) for lag in range(1, self.filled + 1)]

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        return {
            "window": self.window,
            "writes": self._writes,
            "ring": None if self._ring is None else self._ring.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        if state["window"] != self.window:
            raise PrivacyError(f"the saved memory has window {state['window']}, this one {self.window}")
        self._writes = int(state["writes"])
        self._ring = None if state["ring"] is None else state["ring"].clone()


class UniformMemory(WindowMemory):
    """The plain average of the window (the paper's ablation, eq. uniform_memory_design)."""

    def __init__(self, window: int = 8):
        super().__init__(window)

    def _by_lag(self) -> Floats:
        return np.full(self.filled, 1 / max(1, self.filled))


class ExponentialMemory(WindowMemory):
    """Geometrically decaying weights (the paper's ablation, eq. exponential_weights_memory_design).

    `decay` is γ_exp in (0, 1); the paper gives no value. 0.8 spreads the weight over about five
    releases, most of a window of eight.
    """

    def __init__(self, window: int = 8, decay: float = 0.8):
        super().__init__(window)
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
    ):
        super().__init__(window)
        self.alpha = _checks.fraction("alpha", alpha)
        self.lam = _checks.at_least_zero("lam", lam)
        self.tau = _checks.at_least_zero("tau", tau)
        self.gamma = _checks.fraction("gamma", gamma)
        self.kappa = _checks.positive("kappa", kappa)
        self.zeta = _checks.positive("zeta", zeta)
        self.eps = _checks.positive("eps", eps)
        self._lags = np.arange(1, self.window, dtype=np.float64)
        self._log_power_law: Floats = (self.alpha - 1) * np.log(self._lags + 1) - self.lam * self._lags
        self._trend: Tensor | None = None  # the EMA of all releases, also those beyond the window
        # Inner products that give every score without another pass over the ring, by ring row:
        self._squares: Floats = np.zeros(self.window - 1)  # ‖s̃‖²
        self._distances: Floats = np.zeros(self.window - 1)  # ‖s̃ - EMA‖
        self._trend_square = 0.0  # ‖EMA‖²

    def write(self, release: Tensor) -> None:
        """Remember a release and follow the trend: EMA₁ = s̃₀, then EMA ← γ·s̃ + (1-γ)·EMA."""
        row = self._writes % max(1, self.window - 1)
        super().write(release)
        if self.tau == 0 or self.window == 1:
            return  # the kernel is fixed: no score is ever asked for
        assert self._ring is not None
        if self._trend is None:
            self._trend = release.clone()
        else:
            self._trend.lerp_(release, self.gamma)
        # One Gram row per step: the trend against every remembered release, and itself.
        ring, squares = self._ring[: self.filled], self._squares[: self.filled]
        self._trend_square, squares[row] = _square(self._trend), _square(release)
        apart = squares - 2 * _inner(ring, self._trend) + self._trend_square
        close = apart < _CANCELS * (squares + self._trend_square)
        if close.any():  # under noise only in the first few steps, or when γ is near one
            apart[close] = _squared_distances(ring[torch.from_numpy(close).to(ring.device)], self._trend)
        self._distances[: self.filled] = np.sqrt(apart)

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
            with np.errstate(over="ignore"):  # a tempering beyond all floats is a weight of zero
                log_kernel = (
                    log_kernel - self._confidence() * self.tau * self._inconsistency() * self._lags[: self.filled]
                )
            log_kernel = np.maximum(log_kernel, -np.finfo(np.float64).max)
        kernel: Floats = np.exp(log_kernel - log_kernel.max())  # the largest is one: no under- or overflow of the sum
        return kernel / kernel.sum()

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        return super().state_dict() | {
            "trend": None if self._trend is None else self._trend.clone(),
            "squares": torch.from_numpy(self._squares.copy()),
            "distances": torch.from_numpy(self._distances.copy()),
            "trend_square": self._trend_square,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        super().load_state_dict(state)
        self._trend = None if state["trend"] is None else state["trend"].clone()
        self._squares = state["squares"].cpu().numpy().copy()
        self._distances = state["distances"].cpu().numpy().copy()
        self._trend_square = float(state["trend_square"])


def _inner(rows: Tensor, vector: Tensor) -> Floats:
    """⟨row, vector⟩ of every row, summed over blocks in float64."""
    starts = range(0, len(vector), _BLOCK)
    parts = torch.stack([torch.mv(rows[:, i : i + _BLOCK], vector[i : i + _BLOCK]) for i in starts])
    return parts.cpu().numpy().sum(0, dtype=np.float64)


def _square(vector: Tensor) -> float:
    """‖vector‖², summed over blocks in float64."""
    return math.fsum(torch.stack([torch.dot(part, part) for part in vector.split(_BLOCK)]).tolist())


def _squared_distances(rows: Tensor, vector: Tensor) -> Floats:
    """‖row - vector‖² of every row: subtracted first, so that nothing cancels; blocks as in `_inner`."""
    starts = range(0, len(vector), _BLOCK)
    parts = [(rows[:, i : i + _BLOCK] - vector[i : i + _BLOCK]).square_().sum(1) for i in starts]
    return torch.stack(parts).cpu().numpy().sum(0, dtype=np.float64)
