"""What a run costs: ε(δ) of a planned sequence of releases, and the noise that meets a target ε.

A release of one lot is an `Event`, a run a sequence of `Phase`s. All ε here hold for a plan fixed in advance,
under Poisson sampling, and for adding or removing one record unless a function says otherwise. They are upper
bounds. FO-DP-SGD at noise σ and mixing β costs exactly what DP-SGD costs at noise σ/β.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np

from fodp import _accountants, _checks
from fodp._accountants import Accountant, Floats, LossAccountant, Release, RenyiAccountant
from fodp._checks import PrivacyError

ACCOUNTANTS = ("pld", "rdp", "rdp-classic")
"""Privacy-loss distributions; Rényi with the tight conversion; Rényi with the paper's formula."""

MOST_STEPS = 10**15  # of a phase: whole numbers far beyond are no floats any more
SEARCH = (1e-4, 1e6)  # the noise among which calibration looks

Numbers = float | Sequence[float]
"""A number, or one per phase."""

Tally = tuple[tuple[Release, int], ...]
"""Releases, and how often each is made."""


@dataclass(frozen=True)
class Event:
    """The joint release of one lot: Gaussian noise on sums over a Poisson sample of the records.

    `sampling_rate` is the chance q of each record to be drawn, `noise_multiplier` the noise's standard
    deviation divided by what one record can change.
    """

    sampling_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        _checks.fraction("sampling_rate", self.sampling_rate)
        _checks.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class Phase:
    """`steps` consecutive steps, each of which makes exactly the releases `events`, one per lot it draws."""

    events: tuple[Event, ...]
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple) or not all(isinstance(event, Event) for event in self.events):
            raise PrivacyError(f"events must be a tuple of Event, got {self.events!r}")
        if not self.events:
            raise PrivacyError("events is empty: a step that releases nothing is not a step; leave the phase out")
        _checks.whole("steps", self.steps, minimum=0, maximum=MOST_STEPS)


def rounded_up(value: float, digits: int = 4) -> str:
    """An ε or δ as people are shown it: with so many significant digits, never below the value itself.

    A guarantee that is rounded to nearest claims, half of the time, more than holds.

    Example:
        >>> rounded_up(1.23412), rounded_up(0.5), rounded_up(1e-05)
        ('1.235', '0.5', '1e-05')
    """
    if not math.isfinite(value):
        return str(value)
    # repr is the shortest text of this very float: 0.1 stays 0.1, though the float is a little more.
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(float(value))))
    return f"{float(up):.{digits}g}"


def joint(*multipliers: float) -> float:
    """The noise multiplier of several releases of the same lot together: z = (Σ zᵢ⁻²)^(-½).

    Guarantee: the releases side by side are one Gaussian release with this multiplier. Counting them as
    separate events would be wrong, since they share the lot and its luck.
    """
    if not multipliers:
        raise PrivacyError("joint() needs at least one noise multiplier")
    inverse = math.hypot(*(1 / _checks.positive("noise multiplier", z) for z in multipliers))
    return 1 / inverse


def truncate(phases: Sequence[Phase], steps: int) -> tuple[Phase, ...]:
    """The first `steps` steps of `phases`."""
    _checks.whole("steps", steps, minimum=0)
    prefix: list[Phase] = []
    left = steps
    for phase in phases:
        if left == 0:
            break
        taken = min(left, phase.steps)
        if taken:
            prefix.append(Phase(phase.events, taken))
        left -= taken
    if left:
        raise PrivacyError(f"steps={steps} is more than the {steps - left} steps that are planned")
    return tuple(prefix)


def epsilon_of(phases: Sequence[Phase], delta: float, accountant: str = "pld") -> float:
    """The ε of all phases together.

    Guarantee: the run is (ε, δ)-differentially private for adding or removing one record. Never negative,
    0 for no steps. Schedules with more than 128 different events are rounded to slightly costlier ones.
    """
    _check(delta, accountant)
    return _cost(tally(phases), delta, accountant)


def epsilon_curve(phases: Sequence[Phase], delta: float, accountant: str, points: Sequence[int]) -> list[float]:
    """The ε after the first n steps, for each n of the non-decreasing `points`.

    Guarantee: each value is an upper bound for that prefix, as `epsilon_of(truncate(phases, n), …)`, but all
    are computed in one pass. It holds for stopping there by plan, not because of what the data showed.
    """
    _check(delta, accountant)
    planned = sum(phase.steps for phase in phases)
    for earlier, later in zip([0, *points], points, strict=False):
        _checks.whole("points", later, minimum=0)
        if later < earlier:
            raise PrivacyError(f"points must not decrease, got {later} after {earlier}")
        if later > planned:
            raise PrivacyError(f"points holds {later}, more than the {planned} steps that are planned")
    rounded = rounded_releases(phases)
    spent = _accountant(accountant, tally(phases))
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
    for each step: the number of the person's records in a lot is binomial (Ganesh 2024).
    """
    _checks.open_fraction("delta", delta)
    return _cost(tally(phases), delta, records=_checks.whole("k", k))


def epsilon_replace_one(phases: Sequence[Phase], delta: float) -> float:
    """The ε for exchanging one record for another, with the data set's size unchanged.

    Guarantee: the run is (ε, δ)-differentially private under replace-one adjacency, which is about twice as
    strong a demand as add-or-remove. Why the pair of distributions behind it suffices: `LossAccountant`.
    """
    _checks.open_fraction("delta", delta)
    return _cost(tally(phases), delta, replace=True)


def rdp_curve(phases: Sequence[Phase]) -> tuple[Floats, Floats]:
    """Orders, and an upper bound on the Rényi divergence of all phases together at each order.

    Guarantee: (order, value)-Rényi differential privacy for adding or removing one record. Unlike ε these
    values may be added up over runs that were chosen after seeing earlier results (a privacy filter).
    """
    spent = RenyiAccountant()
    for (rate, noise), count in tally(phases):
        spent.add(rate, noise, count)
    return np.array(_accountants.ORDERS, dtype=float), np.array(spent.rdp)


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

    Example:
        >>> round(epsilon(noise_multiplier=1.1, sampling_rate=0.04, steps=6250, delta=1e-5, beta=0.9), 1)
        17.4
    """
    return epsilon_of(_phases(noise_multiplier, sampling_rate, steps, beta), delta, accountant)


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

    Example:
        >>> sigma = calibrate(target_epsilon=8, sampling_rate=0.04, steps=100, delta=1e-5)
        >>> epsilon(noise_multiplier=sigma, sampling_rate=0.04, steps=100, delta=1e-5) <= 8
        True
    """
    return calibrate_scale(lambda noise: _phases(noise, sampling_rate, steps, beta), target_epsilon, delta, accountant)


def calibrate_scale(
    phases_at: Callable[[float], Sequence[Phase]],
    target_epsilon: float,
    delta: float,
    accountant: str = "pld",
) -> float:
    """The smallest noise x, to within 1% of ε, at which `phases_at(x)` costs at most `target_epsilon`.

    Guarantee: the returned x was itself evaluated and its ε is not above the target. More noise must not
    cost more. Releases that do not depend on x may be among the phases; if they, or anything else, keep ε
    above the target at any noise, this refuses.
    """
    target = _checks.positive("target_epsilon", target_epsilon)
    _check(delta, accountant)

    @functools.cache
    def cost(noise: float) -> float:
        return epsilon_of(phases_at(noise), delta, accountant)

    low = high = 1.0  # ε(low) > target >= ε(high)
    while cost(high) > target:
        low, high = high, high * 10
        if high > SEARCH[1]:
            raise PrivacyError(
                f"target_epsilon={target:g} cannot be met: at noise {low:g} epsilon is still {cost(low):.4g} "
                f"(delta={delta:g}, accountant {accountant}). Releases that do not depend on this noise may "
                "cost that much by themselves; raise the target or delta, or plan fewer steps or a lower rate"
            )
    while cost(low) <= target:
        low, high = low / 10, low
        if low < SEARCH[0]:
            raise PrivacyError(
                f"target_epsilon={target:g} leaves nothing to calibrate: noise {high:g} meets it already "
                f"(epsilon {cost(high):.4g}); lower the target, or check that steps is above 0"
            )
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


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _check(delta: float, accountant: str) -> None:
    _checks.open_fraction("delta", delta)
    _checks.one_of("accountant", accountant, ACCOUNTANTS)


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
    ratio = _checks.positive("noise_multiplier", noise) / _checks.fraction("beta", beta)
    return Phase((Event(rate, ratio),), steps)


def _accountant(name: str, tally: Tally, *, records: int = 1, replace: bool = False) -> Accountant:
    if name == "pld":
        return LossAccountant(dict(tally), records=records, replace=replace)
    return RenyiAccountant(classic=name == "rdp-classic")


@functools.lru_cache(maxsize=256)
def _cost(tally: Tally, delta: float, accountant: str = "pld", *, records: int = 1, replace: bool = False) -> float:
    spent = _accountant(accountant, tally, records=records, replace=replace)
    for (rate, noise), count in tally:
        spent.add(rate, noise, count)
    return spent.epsilon(delta)


def rounded_releases(phases: Sequence[Phase]) -> dict[Event, Release]:
    """What each event is counted as: itself, or something slightly costlier. Phases without steps have no events."""
    events = {event for phase in phases if phase.steps for event in phase.events}
    releases = {e: (_accountants.round_rate(float(e.sampling_rate)), float(e.noise_multiplier)) for e in events}
    rounded = _accountants.rounding(releases.values())
    return {event: rounded[release] for event, release in releases.items()}


def tally(phases: Sequence[Phase]) -> Tally:
    """How often each release is made; their order does not matter to a plan fixed in advance."""
    rounded = rounded_releases(phases)
    counts: Counter[Release] = Counter()
    for phase in phases:
        for event in phase.events if phase.steps else ():
            counts[rounded[event]] += phase.steps
    return tuple(sorted(counts.items()))


def _between(phases: Sequence[Phase], points: Sequence[int]) -> Iterator[Counter[Event]]:
    """For each point, how often each event happens between the point before it and itself."""
    queue = [(phase.events, phase.steps) for phase in reversed(phases)]
    done = 0
    for point in points:
        chunk: Counter[Event] = Counter()
        while done < point:
            events, steps = queue.pop()
            taken = min(steps, point - done)
            if taken:
                chunk.update({event: taken * events.count(event) for event in events})
            if taken < steps:
                queue.append((events, steps - taken))
            done += taken
        yield chunk
