"""Private optimizers that are DP-SGD with certain options: one row each, no step of their own."""

from types import MappingProxyType

from fodp.methods.dp_sgd import DPSGD


class DPAdam(DPSGD):
    """One event (q, σ) per step; the moments are functions of releases.

    Its second moment is mostly the noise's own variance: then it is DP-SGD with momentum and learning rate
    lr·L/(σC) (Tang et al. 2024). Adam's β₁, β₂ and ε are `beta1`, `beta2` and `adam_eps`.
    """

    name = "dp-adam"
    summary = "Adam on the release."
    reference = "Kingma & Ba 2015 on DP-SGD releases; analysed by Tang et al., AAAI 2024"
    advice = "When no learning rate can be tuned: one rate does for many models."
    defaults = MappingProxyType({"update": "adam"})


class DPAdamBC(DPSGD):
    """θ ← θ - lr·m̂/√max(v̂ - Φ, floor). One event (q, σ) per step; Φ is made of public numbers.

    `bc_floor` is the least second moment as a fraction of the noise's variance Φ = (σC/L)².
    """

    name = "dp-adambc"
    summary = "DP-Adam with bias correction of the second moment for the noise."
    reference = "Tang, Shpilevskiy & Lécuyer, DP-AdamBC, AAAI 2024"
    advice = "Where Adam is wanted for its adaptivity and the noise is small enough to leave some."
    reconstruction = "the floor is a fraction of Φ instead of the published absolute constant"
    defaults = MappingProxyType({"update": "adambc"})


class DPAdamW(DPSGD):
    """One event (q, σ) per step; decay acts on public parameters, by PyTorch's default."""

    name = "dp-adamw"
    summary = "Adam with decoupled weight decay on the release."
    reference = "Chooi et al., DP-AdamW, arXiv 2511.07843"
    advice = "As dp-adam, for models that are usually trained with weight decay."
    defaults = MappingProxyType({"update": "adamw", "weight_decay": 0.01})


class Doppler(DPSGD):
    """m_t = -Σ a_r·m_{t-r} + Σ b_r·g̃_{t-r}, divided by its response to a constant; one event (q, σ).

    `filter_a` and `filter_b` are the filter's coefficients; the default is bias-corrected EMA momentum.
    """

    name = "doppler"
    summary = "Low-pass filter on the releases; FO-DP-SGD is of this class."
    reference = "Zhang, Bu, Hong & Razaviyayn, DOPPLER, NeurIPS 2024"
    advice = "Smoother steps that bear a larger learning rate; tune it again."
    defaults = MappingProxyType({"filter": "doppler"})


class BlockDPSGD(DPSGD):
    """The gradient of block l times b_l = min(1, √(w/inputs of l)), clipped as a whole; the release times b_l again.

    The name that DP-SGD with `shape="fan-in"` had before every method could have it (`fodp.options.scaling`). b is
    public, made of shapes alone, so sensitivity and event (q, σ) are DP-SGD's.
    """

    name = "block-dp-sgd"
    summary = "DP-SGD with public weights per layer, before clipping and again after the release."
    reference = "This library; of the family of group-wise clipping (He et al., ICLR 2023)"
    advice = "Where the first layer is much wider than the others; `shape='fan-in'` gives it to every method."
    defaults = MappingProxyType({"shape": "fan-in"})
