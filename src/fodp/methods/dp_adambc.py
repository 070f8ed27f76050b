"""DP-AdamBC: DP-Adam with the noise's variance taken out of the second moment."""

from dataclasses import dataclass

from fodp.methods.dp_adam import DPAdam, DPAdamParams


@dataclass(frozen=True, kw_only=True)
class DPAdamBCParams(DPAdamParams):
    """`bc_floor` is the least second moment as a fraction of the noise's variance Φ = (σC/L)²."""

    lr: float = 0.003
    update: str = "adambc"


class DPAdamBC(DPAdam):
    """θ ← θ - lr·m̂/√max(v̂ - Φ, floor). One event (q, σ) per step; Φ is made of public numbers."""

    name = "dp-adambc"
    summary = "DP-Adam with bias correction of the second moment for the noise."
    reference = "Tang, Shpilevskiy & Lécuyer, DP-AdamBC, AAAI 2024"
    advice = "Where Adam is wanted for its adaptivity and the noise is small enough to leave some."
    reconstruction = "the floor is a fraction of Φ instead of the published absolute constant"
    Params = DPAdamBCParams
