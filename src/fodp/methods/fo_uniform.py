"""FO-DP-SGD with a uniform memory: a query-level design of the paper's ablation."""

from dataclasses import dataclass
from typing import Any

from fodp import _checks
from fodp.memory import UniformMemory
from fodp.methods.base import CommonParams
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.methods.parts import schedule
from fodp.methods.parts.schedule import Schedule
from fodp.step import PublicNumbers


@dataclass(frozen=True, kw_only=True)
class FOUniformParams(CommonParams):
    """β and the window K, as in FO-DP-SGD."""

    beta: Schedule = 0.9
    window: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "beta", schedule.checked("beta", self.beta, _checks.fraction))
        _checks.whole("window", self.window)

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        """The schedule of β too."""
        return super().in_short(steps, of) | {"beta": schedule.in_short(self.beta, steps, of)}


class FOUniform(FODPSGD):
    """s̃_t = β·s_t + (1-β)·(plain average of the window) + N(0, σ²C²·I); event (q, σ/β), as FO-DP-SGD."""

    name = "fo-uniform"
    summary = "FO-DP-SGD with equal weights over the window (ablation)."
    advice = "To see whether the shape of the memory matters."
    Params = FOUniformParams

    def init(self, plan: PublicNumbers, size: int) -> UniformMemory:
        return UniformMemory(self.params.window)
