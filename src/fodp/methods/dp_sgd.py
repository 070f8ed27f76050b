"""DP-SGD: clip each example's gradient, sum, add noise."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fodp.accounting import Event, Phase
from fodp.methods.base import Method
from fodp.step import PublicNumbers, Step


class DPSGD(Method):
    """s̃_t = Σ clip(g_i, C) + N(0, σ²C²·I); one Poisson-subsampled Gaussian event (q, σ) per step."""

    name = "dp-sgd"
    summary = "The canonical baseline; momentum optional."
    reference = "Abadi et al., Deep Learning with Differential Privacy, CCS 2016"
    noise_meaning = "σ: noise std over C, and the event's multiplier"
    advice = "The first thing to try, with a tuned learning rate."

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        return (1.0,)

    def events(self, plan: PublicNumbers) -> tuple[Phase, ...]:
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps),)

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        gradients = step.gradients(lot)
        clipped_sum = gradients.clipped_sum(step.clip_norm)
        std = step.adapt_clip(gradients, clipped_sum, std=step.plan.noise_multiplier * step.clip_norm)
        return step.release(clipped_sum, std)
