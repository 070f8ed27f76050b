"""DP-SAT: sharpness-aware training along the previous release."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.step import PublicNumbers, Step
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class DPSATParams:
    """ρ, the length of the ascent; 0 is DP-SGD."""

    rho: float = 0.03

    def __post_init__(self) -> None:
        checks.at_least_zero("rho", self.rho)


@dataclass
class DPSATState(DataclassState):
    """The way to go up before the next gradient is taken: along the last release, ρ long."""

    ascent: Tensor | None = None


class DPSAT(DPSGD):
    """Gradients at w + ρ·p/‖p‖, where p is the previous release: post-processing, so one event (q, σ)."""

    name = "dp-sat"
    summary = "Sharpness-aware ascent along the previous release; one query."
    reference = "Park, Kim, Choi & Lee, Differentially Private Sharpness-Aware Training, ICML 2023"
    advice = "Flat minima at the price of DP-SGD."
    moves_points = True
    Params = DPSATParams

    def init(self, plan: PublicNumbers, size: int) -> DPSATState:
        return DPSATState()

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """DP-SGD's: the last release only moves the point at which the next is asked."""
        return (1.0,)

    def step(self, step: Step, state: DPSATState) -> Tensor:
        """Ascend along the last release, descend with a fresh one."""
        rho = self.params.rho
        lot = step.draw()
        gradients = step.gradients(lot) if state.ascent is None else step.gradients(lot, at=((1.0, state.ascent),))
        clipped_sum = gradients.clipped_sum(step.clip_norm)
        std = step.adapt_clip(gradients, clipped_sum, std=step.plan.noise_multiplier * step.clip_norm)
        release = step.release(clipped_sum, std)
        if rho > 0:
            state.ascent = release * (rho / (step.norm(release) + 1e-16))
        return release
