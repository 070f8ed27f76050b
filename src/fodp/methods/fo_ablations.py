"""FO-DP-SGD with a uniform or an exponential memory: the query-level designs of the paper's ablation."""

from dataclasses import dataclass

from fodp.memory import ExponentialMemory, UniformMemory
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.options import schedule
from fodp.options.schedule import Schedule
from fodp.step import PublicNumbers
from fodp.support import checks


@dataclass(frozen=True, kw_only=True)
class FOUniformParams:
    """β and the window K, as in FO-DP-SGD."""

    beta: Schedule = 0.9
    window: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", schedule.checked("beta", self.beta, checks.fraction))
        checks.whole("window", self.window)


class FOUniform(FODPSGD):
    """s̃_t = β·s_t + (1-β)·(plain average of the window) + N(0, σ²C²·I); event (q, σ/β), as FO-DP-SGD."""

    name = "fo-uniform"
    summary = "FO-DP-SGD with equal weights over the window (ablation)."
    advice = "To see whether the shape of the memory matters."
    Params = FOUniformParams

    def init(self, plan: PublicNumbers, size: int) -> UniformMemory:
        return UniformMemory(self.params.window)


@dataclass(frozen=True, kw_only=True)
class FOExponentialParams(FOUniformParams):
    """β and K as in fo-uniform, and the decay γ_exp, for which the paper gives no value."""

    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.open_fraction("decay", self.decay)


class FOExponential(FODPSGD):
    """s̃_t = β·s_t + (1-β)·(geometric average of the window) + N(0, σ²C²·I); event (q, σ/β)."""

    name = "fo-exponential"
    summary = "FO-DP-SGD with geometrically decaying weights (ablation)."
    advice = "To see whether the shape of the memory matters."
    Params = FOExponentialParams

    def init(self, plan: PublicNumbers, size: int) -> ExponentialMemory:
        return ExponentialMemory(self.params.window, self.params.decay)
