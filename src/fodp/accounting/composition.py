"""What a run costs: ε(δ) of a planned sequence of releases, and the noise that meets a target ε.

A release of one lot is an `Event`, a run a sequence of `Phase`s. All ε here hold for a plan fixed in advance,
under Poisson sampling, and for adding or removing one record unless a function says otherwise. They are upper
bounds. FO-DP-SGD at noise σ and mixing β costs exactly what DP-SGD costs at noise σ/β.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fodp.accounting.events import MOST_STEPS, Event, Phase
from fodp.accounting.loss_distributions import LossAccountant
from fodp.accounting.releases import Accountant, Floats, Release, round_rate, rounding
from fodp.accounting.renyi import ORDERS, RenyiAccountant
from fodp.errors import BudgetError, PrivacyError
from fodp.support import checks
from fodp.support.words import in_our_words

ACCOUNTANTS = ("pld", "rdp", "rdp-classic")
"""Privacy-loss distributions; Rényi with the tight conversion; Rényi with the paper's formula."""

SEARCH = (1e-4, 1e6)  # the noise among which calibration looks

Numbers = float | Sequence[float]
"""A number, or one per phase."""

Tally = tuple[tuple[Release, int], ...]
"""Releases, and how often each is made."""


def epsilon_of(phases: Sequence[Phase], delta: float, accountant: str = "pld") -> float:
    """The ε of all phases together.

    Guarantee: the run is (ε, δ)-differentially private for adding or removing one record. Never negative,
    0 for no steps. Schedules with more than 128 different events are rounded to slightly costlier ones.

    Args:
        phases: the events of all steps, fixed in advance.
        delta: δ, between 0 and 1.
        accountant: "pld" (tight), "rdp" or "rdp-classic" (the paper's formula).

    Returns:
        ε, infinite where no finite one holds.

    Raises:
        ConfigurationError: for a δ or an accountant that does not exist.

    Example:
        >>> from fodp.accounting import Event, Phase, epsilon_of
        >>> round(epsilon_of([Phase((Event(0.04, 1.1),), 6250)], 1e-5), 1)
        21.1
    """
    _check(delta, accountant)
    return _cost(tally(phases), delta, accountant)


def epsilon_curve(phases: Sequence[Phase], delta: float, accountant: str, points: Sequence[int]) -> list[float]:
    """The ε after the first n steps, for each n of the non-decreasing `points`.

    Guarantee: each value is an upper bound for that prefix, as `epsilon_of(truncate(phases, n), …)`, but all
    are computed in one pass. It holds for stopping there by plan, not because of what the data showed.

    Args:
        phases: the events of all steps, fixed in advance.
        delta: δ, between 0 and 1.
        accountant: as for `epsilon_of`.
        points: numbers of steps, none smaller than the one before it.

    Returns:
        One ε for each point.

    Raises:
        PrivacyError: points decrease, or are more than the steps that are planned.

    Example:
        >>> from fodp.accounting import Event, Phase, epsilon_curve
        >>> curve = epsilon_curve([Phase((Event(0.04, 1.1),), 100)], 1e-5, "pld", [0, 50, 100])
        >>> [round(value, 1) for value in curve]
        [0.0, 1.8, 2.3]
    """
    _check(delta, accountant)
    planned = sum(phase.steps for phase in phases)
    for earlier, later in zip([0, *points], points, strict=False):
        checks.whole("points", later, minimum=0)
        if later < earlier:
            raise PrivacyError(f"points must not decrease, got {later} after {earlier}")
        if later > planned:
            raise PrivacyError(f"points holds {later}, more than the {planned} steps that are planned")
    rounded = rounded_releases(phases)
    spent = accountant_of(accountant, tally(phases))
    curve: list[float] = []
    for chunk in _between(phases, points):
        for event, count in chunk.items():
            spent.add(*rounded[event], count)
        if chunk or not curve:
            curve.append(spent.epsilon(delta))
        else:
            curve.append(curve[-1])
    # More steps never cost less, so the largest value so far is a bound and irons out float noise.
    return [float(value) for value in np.maximum.accumulate(curve)]


def epsilon_for_group(phases: Sequence[Phase], delta: float, k: int) -> float:
    """The ε at the same δ for a person who contributed `k` records.

    Guarantee: the run is (ε, δ)-differentially private for adding or removing all k records at once. Tight
    for each step: the number of the person's records in a lot is binomial (Ganesh 2024). Where records take turns,
    those of one person may have different ones, and what they add to a round is no longer one release: there it is
    what follows from the ε of one record, whatever the mechanism.

    Args:
        phases: the events of all steps, fixed in advance.
        delta: δ, the same for the person as for a record.
        k: how many records the person has.

    Returns:
        ε, infinite where no finite one holds.

    Raises:
        ConfigurationError: δ does not lie between 0 and 1, or k is no whole number from 1 on.

    Example:
        >>> from fodp.accounting import Event, Phase, epsilon_for_group
        >>> round(epsilon_for_group([Phase((Event(0.04, 1.1),), 100)], 1e-5, 2), 1)
        5.0
    """
    checks.open_fraction("delta", delta)
    checks.whole("k", k)
    if k > 1 and any(phase.turns > 1 for phase in phases):
        return _epsilon_of_any_group(phases, delta, k)
    return _cost(tally(phases), delta, records=k)


def _epsilon_of_any_group(phases: Sequence[Phase], delta: float, k: int) -> float:
    """k·ε₁, where one record has (ε₁, δ₁) and δ₁·(1 + e^ε₁ + … + e^((k-1)·ε₁)) is at most δ: holds for all mechanisms.

    ε₁ falls as δ₁ rises, and so does how much of δ it takes; the largest δ₁ that fits is looked for.
    """

    def fits(log_delta: float) -> bool:
        one = epsilon_of(phases, math.exp(log_delta))
        return math.isfinite(one) and log_delta + (k - 1) * one + math.log(k) <= math.log(delta)

    low, high = math.log(1e-300), math.log(delta)
    if not fits(low):
        return math.inf
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return k * epsilon_of(phases, math.exp(low))


def epsilon_replace_one(phases: Sequence[Phase], delta: float) -> float:
    """The ε for exchanging one record for another, with the data set's size unchanged.

    Guarantee: the run is (ε, δ)-differentially private under replace-one adjacency, which is about twice as
    strong a demand as add-or-remove. Why the pair of distributions behind it suffices: `LossAccountant`.

    Args:
        phases: the events of all steps, fixed in advance.
        delta: δ, between 0 and 1.

    Returns:
        ε, infinite where no finite one holds.

    Raises:
        ConfigurationError: δ does not lie between 0 and 1.

    Example:
        >>> from fodp.accounting import Event, Phase, epsilon_replace_one
        >>> round(epsilon_replace_one([Phase((Event(0.04, 1.1),), 100)], 1e-5), 1)
        3.3
    """
    checks.open_fraction("delta", delta)
    return _cost(tally(phases), delta, replace=True)


def rdp_curve(phases: Sequence[Phase]) -> tuple[Floats, Floats]:
    """Orders, and an upper bound on the Rényi divergence of all phases together at each order.

    Guarantee: (order, value)-Rényi differential privacy for adding or removing one record. Unlike ε these
    values may be added up over runs that were chosen after seeing earlier results (a privacy filter).

    Args:
        phases: the events of all steps.

    Returns:
        The orders, and the bound at each of them, as two arrays.

    Example:
        >>> from fodp.accounting import Event, Phase, rdp_curve
        >>> orders, bounds = rdp_curve([Phase((Event(1.0, 2.0),), 3)])
        >>> bool((bounds >= 3 * orders / 8).all())  # three Gaussian releases: order / (2·2²) each
        True
    """
    spent = RenyiAccountant()
    for (rate, noise), count in tally(phases):
        spent.add(rate, noise, count)
    return np.array(ORDERS, dtype=float), np.array(spent.rdp)


@in_our_words("epsilon", has_plan=False)
def epsilon(
    *,
    noise_multiplier: Numbers,
    sampling_rate: Numbers,
    steps: int | Sequence[int],
    delta: float,
    beta: Numbers = 1.0,
    accountant: str = "pld",
) -> float:
    """The ε of FO-DP-SGD with noise σ and mixing β, which is that of DP-SGD with noise σ/β.

    Guarantee: (ε, δ)-differential privacy for adding or removing one record, under Poisson sampling. Each
    argument but δ may be a sequence with one value per phase of the run; single numbers hold for all phases.

    Args:
        noise_multiplier: σ, the noise's standard deviation over the clip norm.
        sampling_rate: the probability q of each record to be drawn in a step.
        steps: how many steps.
        delta: δ, between 0 and 1.
        beta: β of FO-DP-SGD; 1 is DP-SGD.
        accountant: "pld" (tight), "rdp" or "rdp-classic" (the paper's formula).

    Returns:
        ε, infinite where no finite one holds.

    Raises:
        ConfigurationError: for numbers that do not fit, all of them in one message.

    Example:
        >>> round(epsilon(noise_multiplier=1.1, sampling_rate=0.04, steps=6250, delta=1e-5, beta=0.9), 1)
        17.4
    """
    _refuse_numbers(
        delta, accountant, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, steps=steps, beta=beta
    )
    return epsilon_of(_phases(noise_multiplier, sampling_rate, steps, beta), delta, accountant)


@in_our_words("calibrate", has_plan=False)
def calibrate(
    *,
    target_epsilon: float,
    sampling_rate: Numbers,
    steps: int | Sequence[int],
    delta: float,
    beta: Numbers = 1.0,
    accountant: str = "pld",
) -> float:
    """The noise multiplier σ with which FO-DP-SGD meets a target ε.

    Guarantee: `epsilon` at the returned σ is at most the target and at least 99% of it. Rate, steps and β may
    be sequences with one value per phase; σ is the same in all phases.

    Args:
        target_epsilon: the ε that is not exceeded.
        sampling_rate: the probability q of each record to be drawn in a step.
        steps: how many steps.
        delta: δ, between 0 and 1.
        beta: β of FO-DP-SGD; 1 is DP-SGD.
        accountant: "pld" (tight), "rdp" or "rdp-classic" (the paper's formula).

    Returns:
        σ, the noise multiplier.

    Raises:
        ConfigurationError: for numbers that do not fit, all of them in one message.
        BudgetError: no noise meets the target.

    Example:
        >>> sigma = calibrate(target_epsilon=8, sampling_rate=0.04, steps=100, delta=1e-5)
        >>> epsilon(noise_multiplier=sigma, sampling_rate=0.04, steps=100, delta=1e-5) <= 8
        True
    """
    _refuse_numbers(
        delta, accountant, target_epsilon=target_epsilon, sampling_rate=sampling_rate, steps=steps, beta=beta
    )
    return calibrate_scale(lambda noise: _phases(noise, sampling_rate, steps, beta), target_epsilon, delta, accountant)


def calibrate_scale(
    phases_at: Callable[[float], Sequence[Phase]],
    target_epsilon: float,
    delta: float,
    accountant: str = "pld",
    price: Callable[[Sequence[Phase]], float] | None = None,
) -> float:
    """The smallest noise x, to within 1% of ε, at which `phases_at(x)` costs at most `target_epsilon`.

    Guarantee: the returned x was itself evaluated and its ε is not above the target.

    Args:
        phases_at: the events at a noise; more noise must not cost more. Some may not depend on it.
        target_epsilon: the ε that is not exceeded.
        delta: δ, between 0 and 1.
        accountant: as for `epsilon_of`.
        price: what phases cost, where it is not the ε of making them once.

    Returns:
        The noise x.

    Raises:
        BudgetError: ε stays above the target at any noise.
        PrivacyError: ε stays below the target without noise.

    Example:
        >>> from fodp.accounting import Event, Phase, calibrate_scale
        >>> noise = calibrate_scale(lambda x: [Phase((Event(0.04, x),), 100)], 2.0, 1e-5)
        >>> 1.9 < epsilon_of([Phase((Event(0.04, noise),), 100)], 1e-5) <= 2.0
        True
    """
    target = checks.positive("target_epsilon", target_epsilon)
    _check(delta, accountant)

    @functools.cache
    def cost(noise: float) -> float:
        phases = phases_at(noise)
        return epsilon_of(phases, delta, accountant) if price is None else price(phases)

    # From a guess, two bounds that are close together: ε(low) > target >= ε(high).
    low = high = _guess(phases_at, target, delta)
    growth = 1.05
    while cost(high) > target:
        if high == SEARCH[1]:
            raise BudgetError(
                f"target_epsilon={target:g} cannot be met: at noise {high:g} epsilon is still {cost(high):.4g} "
                f"(delta={delta:g}, accountant {accountant}). Releases that do not depend on this noise may "
                "cost that much by themselves; raise the target or delta, or plan fewer steps or a lower rate"
            )
        low, high, growth = high, min(high * growth, SEARCH[1]), growth**2
    while cost(low) <= target:
        if low == SEARCH[0]:
            raise PrivacyError(
                f"target_epsilon={target:g} leaves nothing to calibrate: noise {low:g} meets it already "
                f"(epsilon {cost(low):.4g}); lower the target, or check that steps is above 0"
            )
        low, high, growth = max(low / growth, SEARCH[0]), low, growth**2
    # Secant steps on log ε against log x, where the curve is nearly straight, aiming just below the target.
    # A bisection follows two steps that hardly narrowed the bracket, so flat or kinked curves end soon too.
    slow = 0
    while cost(high) < 0.997 * target and high / low > 1 + 1e-9:
        width, drop = math.log(high / low), _log(cost(low)) - _log(cost(high))
        share = 0.5
        if slow < 2 and math.isfinite(drop):
            share = min(max((_log(cost(low)) - _log(0.9985 * target)) / drop, 0.02), 0.98)
        x = low * math.exp(share * width)
        low, high = (low, x) if cost(x) <= target else (x, high)
        slow = 0 if math.log(high / low) <= width / 2 else (slow + 1) % 3
    return high


def _guess(phases_at: Callable[[float], Sequence[Phase]], target: float, delta: float) -> float:
    """About the noise that meets the target, as if the sum of all privacy losses were normal; takes next to no time."""
    low, high = SEARCH
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        variance = sum(n * q**2 * math.expm1(min(z**-2, 700.0)) for (q, z), n in tally(phases_at(middle)))
        # ε of a normal loss, roughly: its mean and as many standard deviations as have δ above them
        tails = max(0.0, _log(min(1.0, math.sqrt(variance))) - math.log(delta) - 1)
        about = variance / 2 + math.sqrt(2 * variance * tails)
        low, high = (middle, high) if about > target else (low, middle)
    return high


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _check(delta: float, accountant: str) -> None:
    checks.open_fraction("delta", delta)
    checks.one_of("accountant", accountant, ACCOUNTANTS)


def _refuse_numbers(delta: float, accountant: str, **columns: Any) -> None:
    """Raise one error for all numbers, alone or one for each phase, that do not fit."""
    found: list[Callable[[], object]] = []
    for name, column in columns.items():
        for value in column if isinstance(column, Sequence) and not isinstance(column, str) else [column]:
            found.append(functools.partial(_NUMBERS[name], name, value))
    checks.together(
        *found,
        lambda: checks.open_fraction("delta", delta),
        lambda: checks.one_of("accountant", accountant, ACCOUNTANTS),
    )


_NUMBERS: dict[str, Callable[[str, Any], object]] = {
    "noise_multiplier": checks.positive,
    "target_epsilon": checks.positive,
    "sampling_rate": checks.fraction,
    "beta": checks.fraction,
    "steps": functools.partial(checks.whole, minimum=0, maximum=MOST_STEPS),
}


def _phases(noise: Numbers, rate: Numbers, steps: int | Sequence[int], beta: Numbers) -> list[Phase]:
    """One phase per entry of the sequences among the arguments; numbers are repeated."""
    columns = {"noise_multiplier": noise, "sampling_rate": rate, "steps": steps, "beta": beta}
    lengths = {name: len(c) for name, c in columns.items() if isinstance(c, Sequence) and not isinstance(c, str)}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise PrivacyError(f"sequences need one value per phase, all equally many and at least one: {found}")
    rows = next(iter(lengths.values()), 1)
    table = [columns[name] if name in lengths else [columns[name]] * rows for name in columns]
    return [_phase(*row) for row in zip(*table, strict=True)]


def _phase(noise: float, rate: float, steps: int, beta: float) -> Phase:
    ratio = checks.positive("noise_multiplier", noise) / checks.fraction("beta", beta)
    return Phase((Event(rate, ratio),), steps)


def accountant_of(name: str, tally: Tally, **options: Any) -> Accountant:
    """An accountant to which parts of the tally can be added; `options` are those of `LossAccountant`."""
    if name == "pld":
        return LossAccountant(dict(tally), **options)
    return RenyiAccountant(classic=name == "rdp-classic")


@functools.lru_cache(maxsize=256)
def _cost(tally: Tally, delta: float, accountant: str = "pld", *, records: int = 1, replace: bool = False) -> float:
    spent = accountant_of(accountant, tally, records=records, replace=replace)
    for (rate, noise), count in tally:
        spent.add(rate, noise, count)
    return spent.epsilon(delta)


def rounded_releases(phases: Sequence[Phase]) -> dict[Event, Release]:
    """What each event is counted as: itself, or something slightly costlier. Phases without steps have no events."""
    events = {event for phase in phases if phase.steps for event in phase.events}
    releases = {e: (round_rate(float(e.sampling_rate)), float(e.noise_multiplier)) for e in events}
    rounded = rounding(releases.values())
    return {event: rounded[release] for event, release in releases.items()}


def tally(phases: Sequence[Phase]) -> Tally:
    """How often each release is made; their order does not matter to a plan fixed in advance."""
    rounded = rounded_releases(phases)
    counts: Counter[Release] = Counter()
    for phase in phases:
        for event in phase.events if phase.steps else ():
            counts[rounded[event]] += phase.times
    return tuple(sorted(counts.items()))


def _between(phases: Sequence[Phase], points: Sequence[int]) -> Iterator[Counter[Event]]:
    """For each point, how often each event happens between the point before it and itself."""
    queue = [(phase, 0) for phase in reversed(phases)]  # each with how many of its steps are done
    done = 0
    for point in points:
        chunk: Counter[Event] = Counter()
        while done < point:
            phase, before = queue.pop()
            after = min(phase.steps, before + point - done)
            times = phase.times_after(after) - phase.times_after(before)
            if times:
                chunk.update({event: times * phase.events.count(event) for event in phase.events})
            if after < phase.steps:
                queue.append((phase, after))
            done += after - before
        yield chunk
