"""Adaptive quantile clipping (Andrew et al., NeurIPS 2021): a noisy count moves the clip norm.

The count of examples whose norm is within the clip norm is released jointly with the sum, and the sum
gets so little more noise that the pair costs exactly what the sum alone would have cost.
"""

import math

from fodp import _checks
from fodp._checks import PrivacyError


class AdaptiveClip:
    """The current clip norm C, and how a noisy count of unclipped examples moves it.

    C ← clamp(C·exp(-rate·(b̃ - quantile)), low, high), where b̃ is the noisy fraction of the lot whose gradient
    norm is at most C. Everything here is computed from releases and public numbers.
    """

    def __init__(
        self, start: float, quantile: float, count_noise: float, lot_size: float, rate: float, low: float, high: float
    ):
        self.clip_norm = start
        self.quantile = _checks.open_fraction("quantile", quantile)
        self.count_noise = _checks.positive("count_noise", count_noise)
        self.lot_size, self.rate = lot_size, _checks.positive("clip_rate", rate)
        self.low, self.high = _checks.clip_norm("clip_min", low), _checks.clip_norm("clip_max", high)
        if not low <= start <= high:
            raise PrivacyError(f"the clip norm {start:g} must lie between clip_min {low:g} and clip_max {high:g}")

    def rest(self, multiplier: float) -> float:
        """The multiplier that is left for the sum: z_D = (z⁻² - (2σ_b)⁻²)^(-½); the count has sensitivity ½."""
        whole, count = 1 / multiplier, 0.5 / self.count_noise
        left = whole * whole - count * count
        if not left > 0:
            raise PrivacyError(
                f"count_noise {self.count_noise:g} leaves nothing of the noise multiplier {multiplier:g} for the "
                f"gradients: raise it above {multiplier / 2:g}"
            )
        return float(left**-0.5)

    def fraction_of(self, noisy_count: float) -> float:
        """b̃: the noisy share of unclipped examples, from a released centred count Σ(1[‖g‖ ≤ C] - ½)."""
        return min(1.0, max(0.0, noisy_count / self.lot_size + 0.5))

    def move(self, noisy_count: float) -> None:
        """Take a released count in; acts on the next step."""
        change = -self.rate * (self.fraction_of(noisy_count) - self.quantile)
        moved = self.clip_norm * math.exp(min(change, 700.0))
        self.clip_norm = min(self.high, max(self.low, moved))
