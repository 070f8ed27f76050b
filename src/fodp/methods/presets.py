"""Private optimizers that are DP-SGD with certain parts: one row each, no step of their own."""

from collections.abc import Mapping
from dataclasses import field, make_dataclass
from typing import Any

from fodp.methods.dp_sgd import DPSGD, DPSGDParams


def _preset(
    class_name: str, about: str, *, params: Mapping[str, Any], about_params: str, **row: str | bool
) -> type[DPSGD]:
    """DP-SGD under another name, with these defaults and this row in the table of methods."""
    defaults = [(name, type(value), field(default=value)) for name, value in params.items()]
    described = {"__doc__": about_params, "__module__": __name__}
    own = make_dataclass(
        f"{class_name}Params", defaults, bases=(DPSGDParams,), namespace=described, frozen=True, kw_only=True
    )
    own.__qualname__ = f"{class_name}.Params"  # where pickle finds it
    return type(class_name, (DPSGD,), {"__doc__": about, "__module__": __name__, "Params": own, **row})


DPAdam = _preset(
    "DPAdam",
    """One event (q, σ) per step; the moments are functions of releases.

    Its second moment is mostly the noise's own variance: then it is DP-SGD with momentum and learning rate
    lr·L/(σC) (Tang et al. 2024).
    """,
    name="dp-adam",
    summary="Adam on the release.",
    reference="Kingma & Ba 2015 on DP-SGD releases; analysed by Tang et al., AAAI 2024",
    advice="When no learning rate can be tuned: one rate does for many models.",
    params=dict(update="adam"),
    about_params="Adam's β₁, β₂ and ε are `beta1`, `beta2` and `adam_eps`.",
    owns_optimizer=True,
)

DPAdamBC = _preset(
    "DPAdamBC",
    """θ ← θ - lr·m̂/√max(v̂ - Φ, floor). One event (q, σ) per step; Φ is made of public numbers.""",
    name="dp-adambc",
    summary="DP-Adam with bias correction of the second moment for the noise.",
    reference="Tang, Shpilevskiy & Lécuyer, DP-AdamBC, AAAI 2024",
    advice="Where Adam is wanted for its adaptivity and the noise is small enough to leave some.",
    reconstruction="the floor is a fraction of Φ instead of the published absolute constant",
    params=dict(update="adambc"),
    about_params="`bc_floor` is the least second moment as a fraction of the noise's variance Φ = (σC/L)².",
    owns_optimizer=True,
)

DPAdamW = _preset(
    "DPAdamW",
    """One event (q, σ) per step; decay acts on public parameters.""",
    name="dp-adamw",
    summary="Adam with decoupled weight decay on the release.",
    reference="Chooi et al., DP-AdamW, arXiv 2511.07843",
    advice="As dp-adam, for models that are usually trained with weight decay.",
    params=dict(update="adamw", weight_decay=0.01),
    about_params="PyTorch's default decay.",
    owns_optimizer=True,
)

Doppler = _preset(
    "Doppler",
    """m_t = -Σ a_r·m_{t-r} + Σ b_r·g̃_{t-r}, divided by its response to a constant; one event (q, σ).""",
    name="doppler",
    summary="Low-pass filter on the releases; FO-DP-SGD is of this class.",
    reference="Zhang, Bu, Hong & Razaviyayn, DOPPLER, NeurIPS 2024",
    advice="Smoother steps that bear a larger learning rate; tune it again.",
    params=dict(filter="doppler"),
    about_params="`filter_a` and `filter_b` are the filter's coefficients; the default is bias-corrected EMA momentum.",
)
