"""DP-Adam: Adam on the releases of DP-SGD."""

from dataclasses import dataclass

from fodp.methods.dp_sgd import DPSGD, DPSGDParams


@dataclass(frozen=True, kw_only=True)
class DPAdamParams(DPSGDParams):
    """Adam's β₁, β₂ and ε are `beta1`, `beta2` and `adam_eps`."""

    lr: float = 0.01
    update: str = "adam"


class DPAdam(DPSGD):
    """One event (q, σ) per step; the moments are functions of releases.

    Its second moment is mostly the noise's own variance: then it is DP-SGD with momentum and learning rate
    lr·L/(σC) (Tang et al. 2024).
    """

    name = "dp-adam"
    summary = "Adam on the release."
    reference = "Kingma & Ba 2015 on DP-SGD releases; analysed by Tang et al., AAAI 2024"
    advice = "When no learning rate can be tuned: one rate does for many models."
    insists = True
    Params = DPAdamParams
