"""What an option is: public numbers of a plan that compose with every method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fodp.errors import ConfigurationError
from fodp.step import PublicNumbers


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What an option's state may know of a run that begins: the plan, the model, and records that are nobody's."""

    plan: PublicNumbers
    size: int  # of a release
    multipliers: Sequence[float] = ()  # of the events that a step's last query has
    engine: Any = None  # `fodp.clipping.engine.Engine`, of the model
    sample: Callable[[int], Any] | None = None  # public records for a step; None: the loss is in the owner's loop
    same: Callable[[Callable[[], Tensor], Callable[[], Tensor]], Tensor] = lambda make, empty: make()  # on all ranks


class Option:
    """A choice that composes with every method. Derive a frozen dataclass and give it a row: `fodp.options.register`.

    Its fields are public numbers with defaults; their names are its part of the flat spelling, `params=dict(name=…)`.
    What it cannot meet stands in `fodp.options.conflicts`, under its word or one of its `features`.
    """

    def start(self, run: Beginning) -> Any:
        """Its state for a run, with `state_dict` and `load_state_dict`; None: it remembers nothing."""
        return None

    @property
    def features(self) -> Mapping[str, str]:
        """Words for the table of conflicts beside its own, each with what a message calls it."""
        return {}

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        """Numbers to change when an audit runs a shortened version of a plan: `steps` steps instead of `of`."""
        return {}


def numbers(option: Any) -> dict[str, Any]:
    """The numbers of an option or of a method, by name."""
    return {field.name: getattr(option, field.name) for field in fields(option)}


def refuse_unused(params: Any, acting: bool, needed: str, *names: str) -> None:
    """Refuse numbers that differ from their defaults and would do nothing without what is `needed`."""
    defaults = {field.name: field.default for field in fields(params)}
    for name in names:
        if not acting and getattr(params, name) != defaults[name]:
            raise ConfigurationError(unused(name, needed))


def unused(name: str, needed: str) -> str:
    """The sentence about a number that would do nothing."""
    return f"{name} does nothing without {needed}: set that too, or leave {name} out"
