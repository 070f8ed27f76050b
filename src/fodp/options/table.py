"""The table of options: one row each. A plan has one choice of every kind, by a word, by a value, or none.

The flat spelling (`params=dict(average="ema", average_decay=0.99)`) is read from this table and the options' fields.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from fodp.errors import ConfigurationError
from fodp.options import average, clip, filter, quantile, rate, scaling, schedule, update
from fodp.options.option import Option
from fodp.support import checks


@dataclass(frozen=True)
class Kind:
    """What one choice is made among."""

    base: type[Option]  # what a choice must be, for it has that class's methods
    name: str  # the flat name whose value makes the choice
    usual: Any  # its value where nothing is said
    nothing: Any  # its value for no option at all; `usual` of kinds that always have one is another
    called: str  # by messages

    @property
    def may_be_none(self) -> bool:
        """Whether a plan may do without."""
        return self.usual == self.nothing


# In the order in which names are given out: `momentum` is the filter's where the filter is one of momentum.
KINDS: dict[str, Kind] = {
    "rate": Kind(rate.Rate, "lr", rate.AUTO, None, "lr"),
    "filter": Kind(filter.Filter, "filter", "none", "none", "a filter"),
    "update": Kind(update.Update, "update", "sgd", None, "an update"),
    "clip": Kind(clip.Clip, "clip", "flat", None, "a way to clip"),
    "quantile": Kind(quantile.Quantile, "quantile", None, None, "a quantile"),
    "scaling": Kind(scaling.Scaling, "shape", "none", "none", "a shape"),
    "noise_schedule": Kind(schedule.NoiseSchedule, "noise_schedule", None, None, "noise_schedule"),
    "clip_schedule": Kind(schedule.ClipSchedule, "clip_schedule", None, None, "clip_schedule"),
    "average": Kind(average.Average, "average", "none", "none", "an average"),
}


class Row(NamedTuple):
    """One option; without a word its first number, under the name of its kind, is the choice."""

    kind: str
    word: str | None
    option: type[Option]


OPTIONS: list[Row] = [
    Row("update", "sgd", update.Sgd),
    Row("update", "adam", update.Adam),
    Row("update", "adamw", update.AdamW),
    Row("update", "adambc", update.AdamBC),
    Row("update", "adamwbc", update.AdamWBC),
    Row("filter", "momentum", filter.Momentum),
    Row("filter", "doppler", filter.Doppler),
    Row("filter", "fractional", filter.Fractional),
    Row("clip", "flat", clip.Flat),
    Row("clip", "per-layer", clip.PerLayer),
    Row("clip", "normalised", clip.Normalised),
    Row("quantile", None, quantile.Quantile),
    Row("scaling", "fan-in", scaling.FanIn),
    Row("scaling", "kronecker", scaling.Kronecker),
    Row("scaling", "transcript", scaling.Transcript),
    Row("scaling", None, scaling.Factors),
    Row("noise_schedule", None, schedule.NoiseSchedule),
    Row("clip_schedule", None, schedule.ClipSchedule),
    Row("average", "ema", average.Ema),
    Row("average", "tail", average.Tail),
    Row("average", "power", average.Power),
    Row("rate", None, rate.Rate),
]


def register(kind: str, word: str, option: type[Option]) -> type[Option]:
    """Add an option of your own to the table: afterwards `params={name of the kind: word}` and its objects choose it.

    Args:
        kind: which choice it is for, a key of `KINDS`: update, filter, clip, scaling or average.
        word: its word in the flat spelling.
        option: a frozen dataclass that derives from the base class of the kind, with a default for every field.

    Returns:
        The option.

    Raises:
        ConfigurationError: it does not fit, or the word is taken.

    Example:
        >>> from dataclasses import dataclass
        >>> from fodp import options
        >>> @dataclass(frozen=True)
        ... class Newest(options.Average):
        ...     newest_weight: float = 0.5
        ...     def weight(self, earlier):
        ...         return 1.0 if earlier == 0 else self.newest_weight
        >>> _ = options.register("average", "newest", Newest)
        >>> options.unregister("average", "newest")
    """
    here = KINDS[checks.one_of("kind", kind, KINDS)]
    if not (isinstance(option, type) and issubclass(option, here.base) and is_dataclass(option)):
        raise ConfigurationError(f"an option of the kind {kind} is a dataclass that derives from {here.base.__name__}")
    if any(field.default is MISSING for field in fields(option)):
        raise ConfigurationError(f"give every field of {option.__name__} a default: then the word alone chooses it")
    if any(row.kind == kind and row.word == word for row in OPTIONS) or word == here.nothing:
        raise ConfigurationError(f"{here.name}={word!r} is in the table already: choose another word")
    if taken := {field.name for field in fields(option)} & {row_name for row in OPTIONS for row_name in _names(row)}:
        raise ConfigurationError(f"{sorted(taken)[0]} is a number of another option: choose another name")
    OPTIONS.append(Row(kind, word, option))
    return option


def unregister(kind: str, word: str) -> None:
    """Take an option of your own out of the table.

    Args:
        kind: which choice it is for, a key of `KINDS`.
        word: its word in the flat spelling.

    Example:
        >>> unregister("average", "mine")  # there is none, and nothing happens
    """
    OPTIONS[:] = [row for row in OPTIONS if (row.kind, row.word) != (kind, word)]


def _names(row: Row) -> list[str]:
    return [field.name for field in fields(row.option)]  # type: ignore[arg-type]  # every row is of a dataclass


def known_names() -> dict[str, Any]:
    """Every flat name of an option, with its default: of a name that two have, the first one's."""
    found: dict[str, Any] = {kind.name: kind.usual for kind in KINDS.values()}
    for row in OPTIONS:
        found = {field.name: field.default for field in fields(row.option)} | found  # type: ignore[arg-type]
    return found


def words_of(kind: str) -> list[str]:
    """The words among which a kind chooses."""
    return [row.word for row in OPTIONS if row.kind == kind and row.word is not None]


def row_of(kind: str, value: Any) -> Row | None:
    """The option that a flat value chooses; None: none at all."""
    here = KINDS[kind]
    if here.may_be_none and value == here.nothing and type(value) is type(here.nothing):
        return None
    rows = {row.word: row for row in OPTIONS if row.kind == kind}
    words = words_of(kind)
    if None in rows and not (isinstance(value, str) and words):
        return rows[None]
    return rows[checks.one_of(here.name, value, [here.nothing, *words] if here.may_be_none else words)]


def row_for(kind: str, option: Any) -> Row:
    """The row of an object."""
    for row in OPTIONS:
        if row.kind == kind and type(option) is row.option:
            return row
    kinds = [row for row in OPTIONS if type(option) is row.option]
    if kinds:
        raise ConfigurationError(f"{option!r} is {KINDS[kinds[0].kind].called}: say {kinds[0].kind}={option!r}")
    raise ConfigurationError(
        f"{kind} takes an option such as fodp.options.{next(r.option.__name__ for r in OPTIONS if r.kind == kind)}(), "
        f"got {checks.shown(option)}: one of your own goes in by fodp.options.register"
    )


def needed_for(name: str) -> str:
    """What must be chosen for a flat name to act."""
    found: dict[str, list[str | None]] = {}
    for row in OPTIONS:
        if name in _names(row):
            found.setdefault(row.kind, []).append(row.word)
    said = []
    for kind, words in found.items():
        named = [repr(word) for word in words if word is not None]
        said.append(f"{KINDS[kind].name}={' or '.join(named)}" if named else KINDS[kind].called)
    return " or ".join(said)


def flat(kind: str, option: Option | None) -> Mapping[str, Any]:
    """The flat spelling of one choice."""
    here = KINDS[kind]
    if option is None:
        return {here.name: here.nothing}
    row = row_for(kind, option)
    own = {name: getattr(option, name) for name in _names(row)}
    return own if row.word is None else {here.name: row.word, **own}
