"""FO-DP-SGD with an exponential memory: a query-level design of the paper's ablation."""

from dataclasses import dataclass

from fodp.memory import ExponentialMemory
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.methods.fo_uniform import FOUniformParams
from fodp.step import PublicNumbers
from fodp.support import checks


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
