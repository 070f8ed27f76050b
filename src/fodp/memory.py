"""Memories of earlier private releases: what FO-DP-SGD mixes into its next query.

A memory sees releases and nothing else, so everything it returns is post-processing of the
private transcript: it costs no privacy and changes no sensitivity (paper, Prop. "history-conditioned
query structure"). A window K counts the present step: it looks back at lags 1 to K-1.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fodp import _checks
from fodp.recall import Floats, Products, Recall, Trend, inner_products, squared_distance
from fodp.window import WindowMemory, normalised

# The few numbers by lag are plain floats: after a pass over the window, which leaves nothing else in the caches, every
# call into NumPy or PyTorch costs ten times its work.

# ‖s̃ - EMA‖² from inner products keeps its digits unless it is less than this part of ‖s̃‖² + ‖EMA‖².
_CANCELS = 0.1

_HUGE = 1e300

# The longest window whose releases' inner products with one another are kept, so that a pass reads each release once;
# beyond it they would need a memory of their own.
_MUTUAL = 512


def noise_floor(std: float, size: int, gamma: float) -> float:
    """Norm that the EMA trend has when releases are nothing but noise: std·√(D·γ/(2-γ)).

    The scale on which κ and ζ mean something: below it a trend says nothing about the gradient.
    """
    return std * math.sqrt(size * gamma / (2 - gamma))


class UniformMemory(WindowMemory):
    """The plain average of the window (the paper's ablation, eq. uniform_memory_design)."""

    def __init__(self, window: int = 8, *, bfloat16: bool = False):
        super().__init__(window, bfloat16=bfloat16)

    def by_lag(self) -> Floats:
        """All the same."""
        return normalised([1.0] * self.filled)


class ExponentialMemory(WindowMemory):
    """Geometrically decaying weights (the paper's ablation, eq. exponential_weights_memory_design).

    `decay` is γ_exp in (0, 1); the paper gives no value. 0.8 spreads the weight over about five
    releases, most of a window of eight.
    """

    def __init__(self, window: int = 8, decay: float = 0.8, *, bfloat16: bool = False):
        super().__init__(window, bfloat16=bfloat16)
        self.decay = _checks.open_fraction("decay", decay)

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
        self._lags = range(1, self.window)
        self._log_power_law = [(self.alpha - 1) * math.log(j + 1) - self.lam * j for j in self._lags]
        self._scored = self.tau > 0 and self.window > 1  # else the kernel is fixed: no score is ever asked for
        if self._scored:
            self._slots += 1  # a release is written into a free row while the others are read
        self._products = Products(self._slots) if self._scored and self.window <= _MUTUAL else None
        # Inner products that give every score without another pass over the ring, by lag:
        self._squares: Floats = []  # ‖s̃‖²
        self._along: Floats = []  # ⟨s̃, EMA⟩
        self._distances: Floats = []  # ‖s̃ - EMA‖
        self._trend_square = 0.0  # ‖EMA‖²
        self._trend: Trend | None = None
        self._recall: Recall | None = None

    def recall(self) -> Recall | None:
        """The memory state u as a term of a query; the release that it becomes part of is remembered on the way."""
        if not self._scored or self._table is None or self._trend is None:
            return super().recall()
        row = self._writes % self._slots
        self._recall = Recall(self._table, self._order(), self._by_row(), row, self._trend, self._products)
        return self._recall

    def _keep(self, release: Tensor) -> None:
        """Remember, and follow the trend: EMA₁ = s̃₀, then EMA ← γ·s̃ + (1-γ)·EMA."""
        if not self._scored:
            super()._keep(release)
            return
        if self._trend is None:
            self._trend = Trend(torch.zeros_like(release))
        row = self._writes % self._slots
        if self._recall is not None and self._products is not None and self._recall.has_remembered(release):
            products = self._products.of(row, self.filled)
        else:
            super()._keep(release)
            assert self._table is not None
            products = inner_products(self._table, self._order(), release, self._trend.settle())
            if self._products is not None:
                self._products.put(row, products)
        self._recall = None
        gamma = self.gamma if self._writes else 1.0
        self._trend.newest, self._trend.gamma = self._rows[row], gamma
        square, along, *past = products
        self._score(square, along, past, gamma)

    def _score(self, square: float, along: float, past: Floats, gamma: float) -> None:
        """Move the inner products with the trend, and by a lag; from them follow the distances."""
        rest = 1 - gamma
        moved = gamma**2 * square + 2 * gamma * rest * along + rest**2 * self._trend_square
        self._trend_square = trend = max(0.0, moved)  # rounding, where trend and release cancel
        followed = [old + gamma * (new - old) for old, new in zip(self._along, past, strict=True)]
        self._along = [gamma * square + rest * along, *followed]
        self._squares.insert(0, square)
        del self._along[self.window - 1 :], self._squares[self.window - 1 :]
        # ‖s̃ - EMA‖² where it keeps its digits; else, in the first few steps or with γ near one, from the vectors.
        self._distances = [
            math.sqrt(apart)
            if (apart := square + trend - 2 * along) >= _CANCELS * (square + trend)
            else self._subtracted(age)
            for age, (square, along) in enumerate(zip(self._squares, self._along, strict=True))
        ]

    def _subtracted(self, age: int) -> float:
        """‖s̃ - EMA‖ of a release from the vectors themselves."""
        assert self._table is not None
        assert self._trend is not None
        return math.sqrt(squared_distance(self._rows[(self._writes - age) % self._slots], self._trend.settle()))

    @property
    def inconsistency(self) -> Tensor:
        """ν_j for the lags that can be looked back at."""
        return torch.tensor(self._inconsistency(), dtype=torch.float64)

    def _inconsistency(self) -> Floats:
        if not self._scored:
            return [0.0] * self.filled  # no trend is followed
        scale = self._scale()
        return [distance / scale for distance in self._distances]

    def _scale(self) -> float:
        return max(math.sqrt(self._trend_square), self.kappa) + self.eps

    @property
    def confidence(self) -> Tensor:
        """χ_t: near one when the trend is long compared with ζ."""
        return torch.tensor(self._confidence(), dtype=torch.float64)

    def _confidence(self) -> float:
        norm = math.sqrt(self._trend_square)
        return norm / (norm + self.zeta)

    def by_lag(self) -> Floats:
        """a_j, normalised."""
        logs = self._log_power_law[: self.filled]
        if self._scored:
            # A tempering beyond all floats is a weight of zero; the limit keeps it from being infinity times nothing.
            tempering = min(self._confidence() * self.tau / self._scale(), _HUGE)
            scores = zip(logs, self._distances, self._lags, strict=False)
            logs = [log - tempering * distance * j for log, distance, j in scores]
        largest = max(logs, default=0.0)  # its weight is one before they are normalised: no under- or overflow
        if largest == -math.inf:
            return [1.0, *[0.0] * (len(logs) - 1)]  # all beyond floats, the nearest release the least
        return normalised([math.exp(log - largest) for log in logs])

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        return super().state_dict() | {
            "trend": None if self._trend is None else self._trend.settle().clone(),
            "products": self._products and [self._products.of(row, self.window - 2) for row in self._order()],
            "squares": list(self._squares),
            "along": list(self._along),
            "distances": list(self._distances),
            "trend_square": self._trend_square,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        super().load_state_dict(state)
        self._trend, self._recall = None if state["trend"] is None else Trend(state["trend"].clone()), None
        if self._products is not None:
            for row, products in zip(self._order(), state["products"], strict=True):
                self._products.put(row, products)
        self._squares, self._along, self._distances = (list(state[name]) for name in ("squares", "along", "distances"))
        self._trend_square = float(state["trend_square"])
