"""Adaptive quantile clipping (Andrew et al., NeurIPS 2021): a noisy count moves the clip norm.

The count of examples whose norm is within the clip norm is released jointly with the sum, and the sum
gets so little more noise that the pair costs exactly what the sum alone would have cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fodp.errors import ConfigurationError
from fodp.options.option import Beginning, Option
from fodp.support import checks


@dataclass(frozen=True)
class Quantile(Option):
    """The clip norm is adapted so that about the share `quantile` of the examples is unclipped. It costs no ε.

    A noisy count of unclipped examples (`count_noise`; None: L/20, or z where that is larger) is released jointly with
    the sum. C starts at the plan's clip norm, moves by `clip_rate`, within `clip_min` and `clip_max`.
    """

    quantile: float = 0.5
    count_noise: float | None = None
    clip_rate: float = 0.2
    clip_min: float = 1e-3
    clip_max: float = 1e3

    def __post_init__(self) -> None:
        checks.open_fraction("quantile", self.quantile)
        if self.count_noise is not None:
            checks.positive("count_noise", self.count_noise)
        checks.positive("clip_rate", self.clip_rate)
        for name in ("clip_min", "clip_max"):
            checks.clip_norm(name, getattr(self, name))
        if self.clip_min > self.clip_max:
            raise ConfigurationError(f"clip_min must not exceed clip_max, got {self.clip_min!r} and {self.clip_max!r}")

    def start(self, run: Beginning) -> "AdaptiveClip":
        return AdaptiveClip(self, run.plan.clip_norm, run.plan.lot_size, run.multipliers)


class AdaptiveClip:
    """The current clip norm C, and how a noisy count of unclipped examples moves it.

    C ← clamp(C·exp(-clip_rate·(b̃ - quantile)), clip_min, clip_max), where b̃ is the noisy fraction of the lot whose
    gradient norm is at most C. Everything here is computed from releases and public numbers. `multipliers` are those of
    the events that the count will share with a sum: a count that would leave nothing of one is refused.
    """

    def __init__(self, settings: Quantile, clip_norm: float, lot_size: float, multipliers: Sequence[float]):
        self.settings, self.lot_size = settings, lot_size
        self.clip_norm = self.used = clip_norm  # of the next step, and of the one that was taken last
        low, high = settings.clip_min, settings.clip_max
        if not low <= clip_norm <= high:
            raise ConfigurationError(
                f"the clip norm {clip_norm:g} must lie between clip_min {low:g} and clip_max {high:g}"
            )
        # At least z, however large that is: then the count is a quarter of what a step costs.
        usual = max(lot_size / 20, *multipliers)
        self.count_noise = usual if settings.count_noise is None else settings.count_noise
        for multiplier in multipliers:
            self.rest(multiplier)

    def rest(self, multiplier: float) -> float:
        """The multiplier that is left for the sum: z_D = (z⁻² - (2σ_b)⁻²)^(-½); the count has sensitivity ½."""
        whole, count = 1 / multiplier, 0.5 / self.count_noise
        left = whole * whole - count * count
        if not left > 0:
            raise ConfigurationError(
                f"count_noise {self.count_noise:g} leaves nothing of the noise multiplier {multiplier:g} for the "
                f"gradients: raise it above {multiplier / 2:g}"
            )
        return float(left**-0.5)

    def fraction_of(self, noisy_count: float) -> float:
        """b̃: the noisy share of unclipped examples, from a released centred count Σ(1[‖g‖ ≤ C] - ½)."""
        return min(1.0, max(0.0, noisy_count / self.lot_size + 0.5))

    def move(self, noisy_count: float) -> None:
        """Take a released count in; acts on the next step."""
        wanted, fraction = self.settings, self.fraction_of(noisy_count)
        self.used = self.clip_norm
        moved = self.clip_norm * math.exp(min(-wanted.clip_rate * (fraction - wanted.quantile), 700.0))
        self.clip_norm = min(wanted.clip_max, max(wanted.clip_min, moved))

    def state_dict(self) -> dict[str, Any]:
        """The clip norm of the next step."""
        return {"clip_norm": self.clip_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved clip norm."""
        self.clip_norm = self.used = float(state["clip_norm"])
