"""From guesses to lower bounds on ε. No model and no data here, only counts.

Every bound holds with the stated level: if the claim is true, the bound exceeds it with at most that probability.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy import optimize, stats

from fodp import accounting
from fodp.accounting import Event, Phase
from fodp.errors import PrivacyError
from fodp.support import checks


def proportion_lower(successes: int, trials: int, level: float) -> float:
    """Clopper and Pearson: the largest p such that as many successes or more have probability `level` at most."""
    return float(stats.beta.ppf(level, successes, trials - successes + 1)) if successes else 0.0


def two_sided(successes: int, trials: int, rate: float) -> float:
    """The exact probability, doubled, of a count at least as far out on its side under Binomial(trials, rate)."""
    low = stats.binom.cdf(successes, trials, rate)
    high = stats.binom.sf(successes - 1, trials, rate)
    return float(min(1.0, 2 * min(low, high)))


def exposure_lower(correct: int, signals: Sequence[float], level: float) -> float:
    """How many times more a canary shows than was promised, at least: 1 or less is consistent.

    `signals` holds for each guess the promised signal μ = 1/z, so that a right guess has probability Φ(μ/2) at
    most (Gaussian DP). Guesses whose probabilities differ are as good as binomial with their mean (Hoeffding 1956).
    """
    found = proportion_lower(correct, len(signals), level) if signals else 0.0
    if found <= 0.5:
        return 0.0
    values, counts = np.unique(np.asarray(signals), return_counts=True)

    def excess(scale: float) -> float:
        return float(np.average(stats.norm.cdf(scale * values / 2), weights=counts)) - found

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high))


def epsilon_at_exposure(phases: Sequence[Phase], delta: float, scale: float) -> float:
    """ε of the plan if one example really showed `scale` times as much as promised; tight for Gaussian noise."""
    if scale <= 0:
        return 0.0
    scaled = [
        replace(phase, events=tuple(Event(e.sampling_rate, e.noise_multiplier / scale) for e in phase.events))
        for phase in phases
    ]
    return accounting.epsilon_of(scaled, delta, "pld")


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The probability of as many correct guesses or more if the training is (ε, δ)-private.

    Each canary was in the data with probability ½, all independently, and one run was made. Corollary 5.4 of
    Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise PrivacyError(f"{correct} correct of {guesses} guesses about {canaries} canaries: the order must be ≤")
    right = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, beta)
    just_below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    alpha = float((just_below / np.arange(1, correct + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, level: float) -> float:
    """The largest ε that so many correct guesses of one run reject at this level."""
    checks.open_fraction("level", level)

    def rejected(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) < level

    low, high = 0.0, 1.0
    while rejected(high):
        low, high = high, high + 1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low
