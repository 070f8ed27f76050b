"""DiSK: DP-SGD with a simplified Kalman filter on the gradients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.options.filter import RESPONSE_LENGTH
from fodp.step import PublicNumbers, Step
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class DiSKParams:
    """Gain κ (1 is DP-SGD) and step γ of the finite difference. γ = (1-κ)/κ needs one gradient only."""

    kappa: float = 0.7
    gamma: float = 0.5

    def __post_init__(self) -> None:
        checks.fraction("kappa", self.kappa)
        checks.positive("gamma", self.gamma)


@dataclass
class DiSKState(DataclassState):
    """Where the last gradients were taken, what they were estimated to be, and how many releases are in that."""

    point: Tensor | None = None
    estimate: Tensor | None = None
    seen: int = 0


class DiSK(DPSGD):
    """y_t releases Σ clip(c·g_i(θ + γd) + (1-c)·g_i(θ)), d = θ_t - θ_{t-1}; ĝ ← (1-κ)·ĝ + κ·y.

    The two gradients of an example are combined first and clipped once, so sensitivity is C: one event (q, σ).
    """

    name = "disk"
    summary = "Simplified Kalman filter: predicts the gradient's change, corrects with the release."
    reference = "Zhang et al., DiSK, ICLR 2025"
    cost = "two gradients (one if γ = (1-κ)/κ)"
    advice = "The nearest relative of FO-DP-SGD with a model of how gradients move."
    correlates_noise = True
    moves_points = True
    Params = DiSKParams

    def init(self, plan: PublicNumbers, size: int) -> DiSKState:
        return DiSKState()

    def step(self, step: Step, state: DiSKState) -> Tensor:
        """Predict at the extrapolated point, correct with gain κ."""
        kappa, gamma = self.params.kappa, self.params.gamma
        c = (1 - kappa) / (kappa * gamma)
        theta = step.parameters()
        lot = step.draw()
        if state.point is None or c == 0:
            gradients = step.gradients(lot)
        else:
            ahead = gamma * (theta - state.point)
            at = ((c, ahead),) if math.isclose(c, 1) else ((c, ahead), (1 - c, None))
            gradients = step.gradients(lot, at=at)
        clipped_sum = gradients.clipped_sum(step.clip_norm)
        std = step.adapt_clip(gradients, clipped_sum, std=step.plan.noise_multiplier * step.clip_norm)
        y = step.release(clipped_sum, std)
        estimate = y if state.estimate is None else torch.lerp(state.estimate, y, kappa)
        state.point, state.estimate, state.seen = theta, estimate.clone(), state.seen + 1
        return estimate

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """κ(1-κ)^k: what an estimate keeps of a release."""
        kappa, length = self.params.kappa, min(plan.steps, RESPONSE_LENGTH)
        return [kappa * (1 - kappa) ** lag for lag in range(length)]

    def noise_gains(self, state: DiSKState) -> Sequence[float]:
        """In all 1 at first, κ/(2-κ) in the long run."""
        kappa, before = self.params.kappa, min(state.seen, RESPONSE_LENGTH) - 1
        return [*((kappa * (1 - kappa) ** lag) ** 2 for lag in range(before)), (1 - kappa) ** (2 * before)]
