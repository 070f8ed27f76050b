"""Fractional noise: DP-SGD whose noise is a fractional derivative over steps, so that less of it accumulates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fodp.accounting import Event, Phase
from fodp.methods.dp_sgd import DPSGD
from fodp.noise.banded import best_order, fractional_coefficients, inverse_coefficients
from fodp.step import PublicNumbers
from fodp.support import checks

MOST_BANDS = 128
_TRIED = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, MOST_BANDS)


@dataclass(frozen=True, kw_only=True)
class FONoiseParams:
    """`order` α of the derivative, between 0 and 1; ½ is the classical optimum for sums that accumulate when no band is
    cut off, and with few bands a higher one is better. None leaves it to `Plan.calibrated`, as with `bands`; without a
    target it is ½.

    `bands` b: over how many steps noise is correlated, and among how many groups the records take turns; at most 128,
    and at most 1/q. It takes memory for b-1 vectors of the model's size. 1 is DP-SGD. None leaves it to
    `Plan.calibrated`, which takes what accumulates the least noise at the target ε; without a target it is 1.
    """

    order: float | None = 0.5
    bands: int | None = None

    def __post_init__(self) -> None:
        if self.order is not None:
            checks.open_fraction("order", self.order)
        if self.bands is not None:
            checks.whole("bands", self.bands, maximum=MOST_BANDS)


class FONoise(DPSGD):
    """s̃_t = Σ clip(g_i, C) + σC·w_t, w = M⁻¹z: M has b bands, the coefficients of (1-x)^(-α), scaled to length 1.

    Each step's noise takes back part of the noise before it: w is the fractional derivative of order α of white noise,
    as far as b bands tell, and the noise in the sum of all releases grows more slowly than √t. In return, records take
    turns: each belongs to one of b groups, drawn for it alone; step t draws from group t mod b, with probability b·q,
    so lots are as large as ever, about L. To a record a round of b steps is one Poisson-subsampled Gaussian event
    (b·q, σ), of which there are ⌈T/b⌉: one example changes M·x by at most C, in b rows that its next round does not
    touch (the whole argument is in `fodp.noise.banded`). More bands: less noise for the same σ, but less is left to
    chance, so σ must be larger for the same ε. By accounting it pays where q is small or ε large; how much,
    `fodp calibrate --method fo-noise --set order=None --target-epsilon 8 --sampling-rate 0.01 --steps 1000` says.

    Composes with quantile clipping and schedules (noise is scaled by the σ and C of its own step, which are public; a
    round that a schedule cuts counts on both sides), shapes, filters and updates.
    Refused: exact noise. A secure run that is resumed begins a new round with new groups, and steps up to it are lost;
    a person with several records is covered by the general rule for groups alone.
    """

    name = "fo-noise"
    summary = "DP-SGD with noise that is correlated over steps by a fractional derivative; records take turns."
    reference = (
        "Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023; coefficients of "
        "Fichtenberger, Henzinger and Upadhyay, ICML 2023"
    )
    noise_meaning = "σ: std of the innovations z over C, and the multiplier of a round's event"
    cost = "one gradient, b-1 vectors of memory"
    advice = "Small sampling rates and large ε: `fodp calibrate --method fo-noise` says how much noise is saved."
    correlates_noise = True
    Params = FONoiseParams

    @property
    def turns(self) -> int:
        return self.params.bands or 1

    def strategy(self) -> tuple[float, ...]:
        return fractional_coefficients(self.params.order or 0.5, self.turns)

    def noise_response(self, plan: PublicNumbers) -> Sequence[float]:
        """M⁻¹: every step takes back some of the noise before it."""
        return list(inverse_coefficients(self.strategy(), plan.steps))

    def candidates(self, plan: PublicNumbers) -> Sequence[dict[str, Any]]:
        most = min(plan.steps, MOST_BANDS, int(1 / plan.sampling_rate + 1e-9))
        tried = [bands for bands in _TRIED if bands <= most] if self.params.bands is None else [self.params.bands]
        order = self.params.order  # what is best for so many bands, whatever the noise multiplier will be
        return [{"bands": b, **({} if order is not None else {"order": best_order(b, plan.steps)})} for b in tried]

    def describe(self) -> dict[str, Any]:
        """With what stands for None."""
        return super().describe() | {"bands": self.turns, "order": self.params.order or 0.5}

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        """So few bands that every record has its turn twice."""
        return super().in_short(steps, of) | {"bands": min(self.turns, max(1, steps // 2))}

    def events(self, plan: PublicNumbers) -> tuple[Phase, ...]:
        rate = min(1.0, self.turns * plan.sampling_rate)
        return (Phase((Event(rate, plan.noise_multiplier),), plan.steps, self.turns),)
