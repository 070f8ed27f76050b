"""ADP-AdamW: DP-AdamW with a public noise schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from fodp.accounting import Event, Phase
from fodp.methods.dp_sgd import DPSGD
from fodp.step import PublicNumbers, Step
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class ADPAdamWParams:
    """`decay` is the factor on the noise per epoch of round(1/q) steps; 1 is DP-AdamW.

    The noise falls in at most `plateaus` steps of equal length, each at the value of its first epoch: a
    schedule of hundreds of different values would take minutes to account.
    """

    decay: float = 0.99
    plateaus: int = 16

    def __post_init__(self) -> None:
        checks.fraction("decay", self.decay)
        checks.whole("plateaus", self.plateaus)


class ADPAdamW(DPSGD):
    """σ_e = σ_0·decay^e from epoch e on, in plateaus; events (q, σ_e), composed over all steps.

    A reconstruction: the paper's source for ADP-AdamW (Chilukoti et al. 2025) could not be read; "adaptive"
    is taken to be the decaying noise multiplier of the same group's other work. It could also mean adaptive
    clipping (`quantile` does that, with any method) or noise that follows the gradients (which would need queries
    of its own). The schedule is public, so it costs nothing beyond what its smaller noise costs: calibration moves
    σ_0 so that the total ε is the target.
    """

    name = "adp-adamw"
    summary = "DP-AdamW with noise that decays by a public schedule."
    reference = "Chilukoti et al., arXiv 2502.11329 (read as noise decay)"
    noise_meaning = "σ_0, the first value of the schedule σ_e = σ_0·decay^e"
    advice = "When the end of training needs less noise than its start; total ε is calibrated."
    reconstruction = "the whole definition: the source could not be read"
    Params = ADPAdamWParams
    defaults = MappingProxyType({"update": "adamw", "weight_decay": 0.01})

    def events(self, plan: PublicNumbers) -> tuple[Phase, ...]:
        length = self._plateau(plan)
        return tuple(
            Phase((Event(plan.sampling_rate, self._noise(plan, start)),), min(length, plan.steps - start))
            for start in range(0, plan.steps, length)
        )

    def step(self, step: Step, state: Any) -> Tensor:
        """DP-SGD's step with the noise of this plateau."""
        lot = step.draw()
        gradients = step.gradients(lot)
        clipped_sum = gradients.clipped_sum(step.clip_norm)
        std = step.adapt_clip(gradients, clipped_sum, std=self._noise(step.plan, step.number) * step.clip_norm)
        return step.release(clipped_sum, std)

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        return (1.0,)

    def step_noise(self, plan: PublicNumbers, step: int) -> float:
        return self._noise(plan, step) * plan.clip_norm

    def _noise(self, plan: PublicNumbers, step: int) -> float:
        length = self._plateau(plan)
        epoch = step // length * length // _per_epoch(plan)
        return plan.noise_multiplier * self.params.decay**epoch

    def _plateau(self, plan: PublicNumbers) -> int:
        """Steps of one plateau: whole epochs."""
        epochs = -(-plan.steps // _per_epoch(plan))
        return _per_epoch(plan) * -(-epochs // self.params.plateaus)


def _per_epoch(plan: PublicNumbers) -> int:
    return max(1, round(1 / plan.sampling_rate))
