"""What a release costs, as data: the event of one lot, and phases of steps that make the same events."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

from fodp.errors import PrivacyError
from fodp.support import checks

MOST_STEPS = 10**15  # of a phase: whole numbers far beyond are no floats any more


@dataclass(frozen=True)
class Event:
    """The joint release of one lot: Gaussian noise on sums over a Poisson sample of the records.

    `sampling_rate` is the chance q of each record to be drawn, `noise_multiplier` the noise's standard
    deviation divided by what one record can change.
    """

    sampling_rate: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        checks.fraction("sampling_rate", self.sampling_rate)
        checks.positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class Phase:
    """`steps` consecutive steps, each of which makes exactly the releases `events`, one per lot it draws.

    `turns` b above 1 says that records take turns: the steps come in rounds of b, the last of which may be cut short;
    in a round a record may be drawn at one step only, always the same one, that of its group. To any record a round is
    then one step, so the events count once for each round that has begun (`times`).
    """

    events: tuple[Event, ...]
    steps: int
    turns: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple) or not all(isinstance(event, Event) for event in self.events):
            raise PrivacyError(f"events must be a tuple of Event, got {self.events!r}")
        if not self.events:
            raise PrivacyError("events is empty: a step that releases nothing is not a step; leave the phase out")
        checks.whole("steps", self.steps, minimum=0, maximum=MOST_STEPS)
        checks.whole("turns", self.turns, maximum=MOST_STEPS)

    @property
    def times(self) -> int:
        """How often one record may meet the events."""
        return self.times_after(self.steps)

    def times_after(self, steps: int) -> int:
        """How often one record may have met the events after this many of the phase's steps."""
        return -(-steps // self.turns)


def rounded_up(value: float, digits: int = 4) -> str:
    """An ε or δ as people are shown it: with so many significant digits, never below the value itself.

    A guarantee that is rounded to nearest claims, half of the time, more than holds.

    Args:
        value: ε or δ.
        digits: how many significant digits are shown.

    Returns:
        The number as a text.

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
    separate events would be wrong, since they share the lot and its luck. An infinite multiplier, that of a query which
    no record can change, costs nothing.

    Args:
        multipliers: zᵢ, the noise of each release over its bound.

    Returns:
        z, infinite if all are.

    Raises:
        PrivacyError: there is none, or one is not above 0.

    Example:
        >>> round(joint(3.0, 4.0), 6)
        2.4
    """
    if not multipliers:
        raise PrivacyError("joint() needs at least one noise multiplier")
    inverse = math.hypot(*(0.0 if z == math.inf else 1 / checks.positive("noise multiplier", z) for z in multipliers))
    return 1 / inverse if inverse else math.inf


def truncate(phases: Sequence[Phase], steps: int) -> tuple[Phase, ...]:
    """The first steps of a plan's events.

    Args:
        phases: the events of all steps.
        steps: how many of them.

    Returns:
        The events of those steps.

    Raises:
        PrivacyError: fewer steps are planned.

    Example:
        >>> truncate([Phase((Event(0.1, 1.0),), 9)], 4)
        (Phase(events=(Event(sampling_rate=0.1, noise_multiplier=1.0),), steps=4, turns=1),)
    """
    checks.whole("steps", steps, minimum=0)
    prefix: list[Phase] = []
    left = steps
    for phase in phases:
        if left == 0:
            break
        taken = min(left, phase.steps)
        if taken:
            prefix.append(Phase(phase.events, taken, phase.turns))
        left -= taken
    if left:
        raise PrivacyError(f"steps={steps} is more than the {steps - left} steps that are planned")
    return tuple(prefix)


def after(phases: Sequence[Phase], steps: int) -> tuple[Phase, ...]:
    """What is left of a plan's events after its first steps; a round that is cut in two counts in both parts.

    Args:
        phases: the events of all steps.
        steps: how many of them are left out.

    Returns:
        The events of the other steps.

    Example:
        >>> after([Phase((Event(0.1, 1.0),), 9)], 4)
        (Phase(events=(Event(sampling_rate=0.1, noise_multiplier=1.0),), steps=5, turns=1),)
    """
    left: list[Phase] = []
    for phase in phases:
        skipped = min(steps, phase.steps)
        steps -= skipped
        if phase.steps > skipped:
            left.append(Phase(phase.events, phase.steps - skipped, phase.turns))
    return tuple(left)


def phases_to_data(phases: Sequence[Phase]) -> list[list[object]]:
    """Phases as plain values: [[[q, noise multiplier], …], steps] each, with a third value where records take turns.

    Args:
        phases: the events of all steps.

    Returns:
        Lists that JSON can hold.

    Example:
        >>> phases_to_data([Phase((Event(0.1, 1.0),), 9)])
        [[[[0.1, 1.0]], 9]]
    """
    return [
        [[[e.sampling_rate, e.noise_multiplier] for e in phase.events], phase.steps]
        + ([phase.turns] if phase.turns > 1 else [])
        for phase in phases
    ]


def phases_from_data(data: Sequence[Sequence[object]]) -> tuple[Phase, ...]:
    """The inverse of `phases_to_data`.

    Args:
        data: lists as that function makes them.

    Returns:
        The phases.

    Raises:
        PrivacyError: the lists are no phases.

    Example:
        >>> phases_from_data([[[[0.1, 1.0]], 9]])[0].steps
        9
    """
    try:
        return tuple(
            Phase(tuple(Event(q, z) for q, z in events), *counts)  # type: ignore[attr-defined, arg-type]
            for events, *counts in data
        )
    except (TypeError, ValueError) as error:
        raise PrivacyError(f"these are not the events of a run ({error})") from None
