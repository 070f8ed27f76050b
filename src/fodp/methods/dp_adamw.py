"""DP-AdamW: DP-Adam with decoupled weight decay."""

from dataclasses import dataclass

from fodp.methods.dp_adam import DPAdam, DPAdamParams


@dataclass(frozen=True, kw_only=True)
class DPAdamWParams(DPAdamParams):
    """PyTorch's default decay."""

    update: str = "adamw"
    weight_decay: float = 0.01


class DPAdamW(DPAdam):
    """One event (q, σ) per step; decay acts on public parameters."""

    name = "dp-adamw"
    summary = "Adam with decoupled weight decay on the release."
    reference = "Chooi et al., DP-AdamW, arXiv 2511.07843"
    advice = "As dp-adam, for models that are usually trained with weight decay."
    Params = DPAdamWParams
