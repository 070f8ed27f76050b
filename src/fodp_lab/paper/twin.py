"""The exact twin of FO-DP-SGD: DP-SGD at σ/β, then a feedback filter on its releases.

β·s + (1-β)·u + N(0, σ²C²) = β·(s + N(0, (σC/β)²)) + (1-β)·u, and u depends on earlier outputs only. So this
method draws the same trajectory from an ordinary DP-SGD release; a row of the fair comparison shows it.
"""

from torch import Tensor

from fodp.memory.window import WindowMemory
from fodp.methods import register
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.options.schedule import value_at
from fodp.step import Step


@register
class Twin(FODPSGD):
    """An ordinary DP-SGD release with noise σC/β: event (q, σ/β). All the rest is post-processing."""

    name = "fo-twin"
    summary = "DP-SGD at σ/β with FO-DP-SGD's memory as a feedback filter: its exact twin."

    def step(self, step: Step, memory: WindowMemory) -> Tensor:
        """Release first, then remember."""
        C, sigma = step.clip_norm, step.plan.noise_multiplier
        beta = value_at(self.params.beta, step.number)
        lot = step.draw()
        gradients = step.gradients(lot)
        clipped_sum = gradients.clipped_sum(C)
        release = step.release(clipped_sum, step.adapt_clip(gradients, clipped_sum, std=sigma * C / beta))
        u = memory.read()
        output = beta * release if u is None else beta * release + (1 - beta) * u
        memory.write(output)
        return output
