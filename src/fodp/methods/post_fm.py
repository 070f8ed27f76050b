"""Post-FM-DP-SGD: fractional memory after a standard release, the paper's comparison to FO-DP-SGD."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fodp.memory import noise_floor
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_dp_sgd import FODPSGDParams
from fodp.options.filter import MemoryAfterRelease, mixed_response
from fodp.options.schedule import in_short, value_at
from fodp.step import PublicNumbers, Step


class PostFM(DPSGD):
    """v_t = β·g̃_t + (1-β)·u(g̃_{t-1}, …) of ordinary DP-SGD releases g̃; event (q, σ), not (q, σ/β).

    It reads earlier releases, FO-DP-SGD earlier outputs of its own: that, and σ against σ/β, is all the
    difference between "memory before noise" and "memory after noise".
    """

    name = "post-fm-dp-sgd"
    summary = "Fractional memory after the standard release (the paper's comparison)."
    reference = "Partohaghighi & Marcia, eqs. post_fm_memory_results to post_fm_parameter_update_results"
    advice = "To separate where memory acts from how much noise there is."
    correlates_noise = True
    Params = FODPSGDParams

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        return super().in_short(steps, of) | {"beta": in_short(self.params.beta, steps, of)}

    def init(self, plan: PublicNumbers, size: int) -> MemoryAfterRelease:
        floor = noise_floor(plan.noise_multiplier * plan.clip_norm, size, self.params.gamma)
        return MemoryAfterRelease(value_at(self.params.beta, 0), self.params.memory(floor))

    def step(self, step: Step, memory: MemoryAfterRelease) -> Tensor:
        """An ordinary DP-SGD release, then memory."""
        return memory.mix_(super().step(step, None), value_at(self.params.beta, step.number))

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        return mixed_response(value_at(self.params.beta, 0), self.params.memory(floor=1.0))

    def noise_gains(self, memory: MemoryAfterRelease) -> Sequence[float]:
        return memory.noise_gains()
