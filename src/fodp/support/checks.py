"""Argument checks: each names the value, the rule and the fix, and stops before any data is touched."""

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from fodp.errors import ConfigurationError

# Packages that call each other on the user's behalf: a warning points at the first line that is in none of them.
_NOT_THE_USERS = (
    "fodp", "fodp_lab", "torch", "transformers", "accelerate", "lightning", "lightning_utilities", "pytorch_lightning",
    "sklearn", "joblib", "imblearn", "dataclasses", "contextlib", "functools", "threading",
)  # fmt: skip


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the user's line: the first one on the way here that is in no library."""
    warnings.warn(message, category, stacklevel=_levels_to_the_user())


def _levels_to_the_user() -> int:
    frame, level = sys._getframe(2), 2  # of whoever called `warn`
    while str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        if frame.f_back is None:
            return 2  # nobody else: a command
        frame, level = frame.f_back, level + 1
    return level


def called_by_the_user(depth: int = 2) -> bool:
    """Whether the function that many calls up was called from outside of these libraries."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_USERS


def listed(problems: Sequence[str]) -> str:
    """One problem as it is, several with numbers, in one message."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} things to mend: " + "; ".join(f"({n}) {text}" for n, text in enumerate(problems, 1))


def together(*checks: Callable[[], object]) -> None:
    """Make all checks, and raise one error for all that refuse."""
    refused = refusals(*checks)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        raise ConfigurationError(listed([str(error) for error in refused]))


def refusals(*checks: Callable[[], object]) -> list[ConfigurationError]:
    """What the checks refuse."""
    found = []
    for check in checks:
        try:
            check()
        except ConfigurationError as error:
            found.append(error)
    return found


def shown(value: object) -> str:
    """The value as an error message shows it, on one line: a megabyte of digits helps nobody."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of many thousand digits
        return "a huge number"
    text = " ".join(text.split()) if "\n" in text else text  # arrays are printed over several lines
    return text if len(text) <= 80 else f"{text[:77]}..."


def number(name: str, value: object) -> float:
    """A finite real number, NumPy's too; booleans, strings, NaN and infinities are refused."""
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        raise ConfigurationError(f"{name} must be a finite number, got {shown(value)}")
    return float(value)


def positive(name: str, value: object) -> float:
    """A number above zero."""
    if type(value) is float and 0 < value < math.inf:  # asked in every step
        return value
    checked = number(name, value)
    if checked <= 0:
        raise ConfigurationError(f"{name} must be above 0, got {shown(value)}")
    return checked


# A norm of which float32 holds the square is at most 1.9e19, and the weight C/‖g‖ must not fall below 1.2e-38, where
# float32 loses digits and may round it up by a half: C ≥ 2.2e-19.
LEAST_CLIP_NORM, MOST_CLIP_NORM = 1e-18, 1e30


def clip_norm(name: str, value: object) -> float:
    """A bound on gradients' norms that float32 can keep: its weights have all their digits, its sums are finite."""
    if type(value) is float and LEAST_CLIP_NORM <= value <= MOST_CLIP_NORM:
        return value
    checked = positive(name, value)
    if not LEAST_CLIP_NORM <= checked <= MOST_CLIP_NORM:
        raise ConfigurationError(
            f"{name} must lie between {LEAST_CLIP_NORM:g} and {MOST_CLIP_NORM:g}, where float32 keeps it; got "
            f"{shown(value)}: scale the loss, and the learning rate against it"
        )
    return checked


def at_least_zero(name: str, value: object) -> float:
    """A number of zero or more."""
    if type(value) is float and 0 <= value < math.inf:  # asked in every step
        return value
    checked = number(name, value)
    if checked < 0:
        raise ConfigurationError(f"{name} must be at least 0, got {shown(value)}")
    return checked


def fraction(name: str, value: object) -> float:
    """A number in (0, 1]."""
    checked = number(name, value)
    if not 0 < checked <= 1:
        raise ConfigurationError(f"{name} must lie in (0, 1], got {shown(value)}")
    return checked


def open_fraction(name: str, value: object) -> float:
    """A number in (0, 1)."""
    checked = number(name, value)
    if not 0 < checked < 1:
        raise ConfigurationError(f"{name} must lie strictly between 0 and 1, got {shown(value)}")
    return checked


def whole(name: str, value: object, minimum: int = 1, maximum: int | None = None) -> int:
    """A whole number, NumPy's too, of at least `minimum` and at most `maximum`."""
    checked = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if checked is None or checked < minimum:
        raise ConfigurationError(f"{name} must be a whole number of at least {minimum}, got {shown(value)}")
    if maximum is not None and checked > maximum:
        raise ConfigurationError(f"{name} must be at most {maximum}, got {shown(value)}")
    return checked


def switch(name: str, value: object) -> bool:
    """True or False: "no" would count as a yes."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, got {shown(value)}")
    return value


def function(name: str, value: object) -> None:
    """None, or what can be called."""
    if value is not None and not callable(value):
        raise ConfigurationError(f"{name} must be a function, got {shown(value)}")


def numbers(name: str, values: object) -> tuple[float, ...]:
    """A sequence of finite numbers."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigurationError(f"{name} must be a sequence of numbers, got {shown(values)}")
    return tuple(number(f"each of {name}", value) for value in values)


def builtin(value: Any) -> Any:
    """Numbers of NumPy's as Python's, also within lists and tuples, so that they can be stored; others as they are."""
    if type(value) in (list, tuple):
        return type(value)(map(builtin, value))
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """One of the listed words."""
    allowed = list(choices)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}; got {shown(value)}")
    return value


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False
