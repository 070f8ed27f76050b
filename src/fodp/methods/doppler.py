"""DOPPLER: DP-SGD with a low-pass filter on the releases."""

from dataclasses import dataclass

from fodp.methods.dp_sgd import DPSGD, DPSGDParams


@dataclass(frozen=True, kw_only=True)
class DopplerParams(DPSGDParams):
    """`filter_a` and `filter_b` are the filter's coefficients; the default is bias-corrected EMA momentum."""

    filter: str = "doppler"


class Doppler(DPSGD):
    """m_t = -Σ a_r·m_{t-r} + Σ b_r·g̃_{t-r}, divided by its response to a constant; one event (q, σ)."""

    name = "doppler"
    summary = "Low-pass filter on the releases; FO-DP-SGD is of this class."
    reference = "Zhang, Bu, Hong & Razaviyayn, DOPPLER, NeurIPS 2024"
    advice = "Smoother steps that bear a larger learning rate; tune it again."
    Params = DopplerParams
