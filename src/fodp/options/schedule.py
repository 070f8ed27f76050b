"""Public numbers that change with the step number: piecewise constant, fixed before any data is seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fodp.errors import ConfigurationError
from fodp.options.option import Option, numbers
from fodp.step import PublicNumbers
from fodp.support import checks

# A number, or pairs (first step, value) in rising order that begin at step 0.
Schedule = float | tuple[tuple[int, float], ...]


def checked(name: str, schedule: object, check: Callable[[str, object], float]) -> Schedule:
    """A number, or a sequence of (first step, value) pairs whose values all pass `check`."""
    if not isinstance(schedule, Sequence) or isinstance(schedule, str):
        return check(name, schedule)
    try:
        pairs = tuple((checks.whole("a first step", start, 0), check(name, value)) for start, value in schedule)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} must be a number or pairs (first step, value): {error}") from None
    starts = [start for start, _ in pairs]
    if not pairs or starts[0] != 0 or sorted(set(starts)) != starts:
        raise ConfigurationError(f"{name} must begin at step 0 and go on in rising steps, got first steps {starts}")
    return pairs


def value_at(schedule: Schedule, step: int) -> float:
    """The value that holds at this step."""
    if not isinstance(schedule, tuple):
        return schedule
    return [value for start, value in schedule if start <= step][-1]


def pieces(schedule: Schedule, steps: int) -> list[tuple[float, int]]:
    """The values over a run and for how many steps each holds."""
    if not isinstance(schedule, tuple):
        return [(schedule, steps)]
    ends = [start for start, _ in schedule[1:]] + [steps]
    cut = [(value, min(end, steps) - start) for (start, value), end in zip(schedule, ends, strict=True)]
    return [(value, count) for value, count in cut if count > 0]


def in_short(schedule: Schedule, steps: int, of: int) -> Schedule:
    """The same course in fewer steps than `of`: every piece begins as far on, and the first has its step."""
    if not isinstance(schedule, tuple):
        return schedule
    return tuple({start and share_of(start, steps, of): value for start, value in schedule}.items())


def share_of(count: int, steps: int, of: int) -> int:
    """How many of `steps` are as many as `count` steps of `of`: at least one."""
    return max(1, count * steps // of)


@dataclass(frozen=True)
class Numbers:
    """The public numbers of a plan as they are at one step."""

    sampling_rate: float
    steps: int
    lot_size: float
    clip_norm: float
    noise_multiplier: float


@dataclass(frozen=True)
class _Factors(Option):
    """An option whose numbers are public factors that change with the step."""

    def __post_init__(self) -> None:
        for name, factors in numbers(self).items():
            object.__setattr__(self, name, checked(name, factors, checks.positive))

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        return {name: in_short(factors, steps, of) for name, factors in numbers(self).items()}


@dataclass(frozen=True)
class NoiseSchedule(_Factors):
    """Public factors on the noise multiplier, as pairs (first step, factor) from step 0 on."""

    noise_schedule: Schedule = 1.0


@dataclass(frozen=True)
class ClipSchedule(_Factors):
    """Public factors on the clip norm, as pairs (first step, factor) from step 0 on."""

    clip_schedule: Schedule = 1.0


@dataclass(frozen=True)
class Schedules:
    """The public factors on a plan's noise multiplier and clip norm, known for every step before the first."""

    noise: Schedule = 1.0
    clip: Schedule = 1.0

    def at(self, plan: PublicNumbers, step: int) -> Numbers:
        """The plan's numbers as a method sees them in this step."""
        noise, clip = value_at(self.noise, step), value_at(self.clip, step)
        return Numbers(
            plan.sampling_rate, plan.steps, plan.lot_size, plan.clip_norm * clip, plan.noise_multiplier * noise
        )

    def starts(self, steps: int) -> list[int]:
        """The steps at which a number changes, 0 first."""
        changes = [pair for schedule in (self.noise, self.clip) if isinstance(schedule, tuple) for pair in schedule]
        return sorted({0, *(start for start, _ in changes if start < steps)})
