"""DP-SAM, the paper's SA-DP-SGD: sharpness-aware minimisation with two private queries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fodp.accounting import Event, Phase
from fodp.methods.dp_sgd import DPSGD
from fodp.step import PublicNumbers, Step
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class DPSAMParams:
    """ρ, the length of the ascent, and how much noisier the ascent query is."""

    rho: float = 0.05
    ascent_noise: float = 3.0

    def __post_init__(self) -> None:
        checks.at_least_zero("rho", self.rho)
        checks.positive("ascent_noise", self.ascent_noise)


class DPSAM(DPSGD):
    """ã on one lot, then the gradient at w + ρ·ã/‖ã‖ on a fresh one: events (q, a·σ) and (q, σ) per step.

    The ascent direction must be noisy: from a clean batch gradient, one example would move the point at which
    every other example's gradient is taken, and the sensitivity would no longer be C.

    The paper cites Phan et al. (ICDM 2017), an adaptive Laplace mechanism, for its SA-DP-SGD: that is no variant of
    DP-SGD and does not match. Its text calls the method adaptive or sharpness-aware and its running times list a DP-SAM
    in that place, so this is SAM.
    """

    name = "dp-sam"
    summary = "Sharpness-aware minimisation; the paper's SA-DP-SGD."
    reference = "Foret et al., ICLR 2021, privatised as discussed by Park et al., ICML 2023"
    noise_meaning = "σ of the descent query; the ascent query has ascent_noise times that"
    queries = "2 on fresh lots"
    cost = "two gradients"
    advice = "Where flat minima are worth a second query; dp-sat is the cheaper cousin."
    reconstruction = "the split of noise between the queries is ours"
    Params = DPSAMParams

    def events(self, plan: PublicNumbers) -> tuple[Phase, ...]:
        descent = Event(plan.sampling_rate, plan.noise_multiplier)
        ascent = Event(plan.sampling_rate, plan.noise_multiplier * self.params.ascent_noise)
        return (Phase((ascent, descent), plan.steps),)

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """Of the descent query: the ascent only moves the point at which it is asked."""
        return (1.0,)

    def step(self, step: Step, state: Any) -> Tensor:
        std, rho = step.plan.noise_multiplier * step.clip_norm, self.params.rho
        up = step.draw(name="ascent")
        a = step.release(step.gradients(up).clipped_sum(step.clip_norm), std * self.params.ascent_noise)
        lot = step.draw()
        there = ((1.0, a.mul_(rho / (step.norm(a) + 1e-16))),)
        gradients = step.gradients(lot) if rho == 0 else step.gradients(lot, at=there)
        clipped_sum = gradients.clipped_sum(step.clip_norm)
        std = step.adapt_clip(gradients, clipped_sum, std)
        return step.release(clipped_sum, std)
