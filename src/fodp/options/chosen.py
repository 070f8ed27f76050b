"""What a plan has chosen: one option of each kind, read from the flat spelling and written down in it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from fodp.errors import ConfigurationError
from fodp.options.average import Average
from fodp.options.clip import Clip
from fodp.options.filter import Filter
from fodp.options.option import Option, unused
from fodp.options.quantile import Quantile
from fodp.options.rate import Rate
from fodp.options.scaling import Scaling
from fodp.options.schedule import ClipSchedule, NoiseSchedule, Schedules
from fodp.options.table import KINDS, flat, known_names, needed_for, row_for, row_of
from fodp.options.update import KNOWS_ITS_NOISE, Update
from fodp.support import checks

FILTERED_TWICE = "a filter before an update that takes out its noise"


@dataclass(frozen=True)
class Options:
    """One option of each kind; None: the release as it is, the clip norm as it is, no average."""

    rate: Rate
    filter: Filter | None
    update: Update
    clip: Clip
    quantile: Quantile | None
    scaling: Scaling | None
    noise_schedule: NoiseSchedule | None
    clip_schedule: ClipSchedule | None
    average: Average | None

    def __iter__(self) -> Iterator[tuple[str, Option | None]]:
        """Every kind with its choice."""
        return ((field.name, getattr(self, field.name)) for field in fields(self))

    def flat(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """Every number that acts, by its flat name. No option at all is told where another is `usual`."""
        found: dict[str, Any] = {}
        for kind, option in self:
            here = KINDS[kind]
            if option is not None or usual.get(here.name, here.usual) != here.nothing:
                found |= {name: value for name, value in flat(kind, option).items() if name not in found}
        return found

    @cached_property
    def schedules(self) -> Schedules | None:
        """The public factors of all steps; None where they do not change."""
        if self.noise_schedule is None and self.clip_schedule is None:
            return None
        noise = 1.0 if self.noise_schedule is None else self.noise_schedule.noise_schedule
        return Schedules(noise, 1.0 if self.clip_schedule is None else self.clip_schedule.clip_schedule)

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        """Numbers to change when an audit runs a shortened version of a plan, so that all that acts late acts there."""
        return {n: v for _, option in self if option is not None for n, v in option.in_short(steps, of).items()}

    @property
    def features(self) -> dict[str, str]:
        """Words for the table of conflicts, each with what a message calls it."""
        found: dict[str, str] = {}
        for kind, option in self:
            if option is not None:
                word, here = row_for(kind, option).word, KINDS[kind]
                said = here.name if word is None else f"{here.name}={word!r}"
                found |= {here.called: said, said: said, **option.features}
        if self.filter is not None and KNOWS_ITS_NOISE in found:
            found[FILTERED_TWICE] = f"{found['a filter']} with {found['an update']}"
        return found


def read(given: Mapping[str, Any], usual: Mapping[str, Any]) -> Options:
    """The options that flat parameters choose, with a method's own defaults; a name that would not act is refused."""
    chosen: dict[str, Any] = {}
    acting: set[str] = set()
    for kind, here in KINDS.items():
        said = {here.name: here.usual, **usual, **given}
        row = row_of(kind, said[here.name])
        names = set() if row is None else {field.name for field in fields(row.option)} - acting  # type: ignore[arg-type]
        acting |= names | {here.name}
        chosen[kind] = None if row is None else row.option(**{name: said[name] for name in names if name in said})
    defaults = known_names()
    for name, value in given.items():
        if name not in acting:
            _refuse_unused(name, value, defaults[name])
    return Options(**chosen)


def _refuse_unused(name: str, value: Any, default: Any) -> None:
    """A value that is the default is what was recorded of another choice, and may stay."""
    if isinstance(default, float):
        checks.number(name, value)
    if isinstance(default, tuple):
        value = checks.numbers(name, value)
    if value != default:
        raise ConfigurationError(unused(name, needed_for(name)))


def folded(params: Mapping[str, Any], objects: Mapping[str, Option | None]) -> dict[str, Any]:
    """Flat parameters with the spelling of objects (by their kinds) in them; what is said twice must agree."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        option = objects.get(kind)
        if option is None:
            continue
        own = dict(flat(kind, option))
        for name in own.keys() & found.keys():  # another object has it: one of the two may leave it at its default
            if own[name] not in (found[name], next(f.default for f in fields(option) if f.name == name)):  # type: ignore[arg-type]
                raise ConfigurationError(f"{name} is said twice, {found[name]!r} and {own[name]!r}: leave one out")
            del own[name]
        for name in own.keys() & params.keys():
            if params[name] != own[name]:
                raise ConfigurationError(
                    f"{kind}={option!r} and params say different things, {name}={own[name]!r} and {params[name]!r}: "
                    "leave one out"
                )
        found |= own
    return {**params, **found}
