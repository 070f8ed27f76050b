"""Public sizes in place of rates: a plan's numbers from the public size of the data, a batch and epochs."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fodp.accounting import MOST_STEPS
from fodp.errors import ConfigurationError
from fodp.support import checks

CHECKS: Mapping[str, Callable[[str, Any], object]] = {
    "public_size": checks.whole,
    "batch": checks.positive,
    "epochs": checks.positive,
    "sampling_rate": checks.fraction,
    "lot_size": checks.positive,
    "steps": partial(checks.whole, maximum=MOST_STEPS),
    "delta": checks.open_fraction,
}
SIZES = ("public_size", "batch", "epochs")  # what may be said beside the fields of a plan


def usual_delta(public_size: int) -> float:
    """δ where none is given: 1e-5, or about a tenth of one over the public number of records (or people), if smaller.

    Example:
        >>> usual_delta(5000), usual_delta(60000)
        (1e-05, 2e-06)
    """
    return min(1e-5, float(f"{0.1 / public_size:.0e}"))


def steps_of(epochs: Any, rate: float, name: str = "epochs") -> int:
    """How many steps at this rate are so many passes over the data."""
    steps = checks.positive(name, epochs) / rate
    if steps > MOST_STEPS:
        raise ConfigurationError(f"{name} {epochs:g} at a sampling rate of {rate:g} are more than {MOST_STEPS:g} steps")
    return max(1, round(steps))


def completed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling rate, lot size, steps and δ: as given, or from the sizes. What does not agree is refused.

    q = batch / public_size, L = batch (or q·public_size), steps = round(epochs / q), δ = `usual_delta(public_size)`.
    With people as the unit, sizes are numbers of people.

    Example:
        >>> completed(dict(public_size=1000, batch=100, epochs=3))
        {'sampling_rate': 0.1, 'lot_size': 100, 'steps': 30, 'delta': 1e-05}
    """
    said = {name: given[name] for name in CHECKS if given.get(name) is not None}
    checks.together(*(partial(check, name, said[name]) for name, check in CHECKS.items() if name in said))
    size, batch = said.get("public_size"), said.get("batch")
    if size is not None and batch is not None:
        if batch > size:
            raise ConfigurationError(f"batch {batch:g} is more than public_size {size}: take a smaller one")
        _agree(said, "sampling_rate", batch / size, "batch / public_size")
    if "sampling_rate" not in said:
        raise ConfigurationError("sampling_rate is missing: give it, or batch and public_size")
    if batch is not None:
        _agree(said, "lot_size", batch, "batch")
    elif size is not None and "lot_size" not in said:
        said["lot_size"] = max(1.0, said["sampling_rate"] * size)
    if "epochs" in said:
        _agree(said, "steps", steps_of(said["epochs"], said["sampling_rate"]), "epochs / sampling_rate")
    if size is not None and "delta" not in said:
        said["delta"] = usual_delta(size)
    instead = {"lot_size": "batch", "steps": "epochs", "delta": "public_size"}
    for name, other in instead.items():
        if name not in said:
            raise ConfigurationError(f"{name} is missing: give it, or {other}")
    return {name: said[name] for name in ("sampling_rate", *instead)}


def _agree(said: dict[str, Any], name: str, value: float, source: str) -> None:
    """Fill in a number, or compare it with what was said of it."""
    if not math.isclose(said.setdefault(name, value), value, rel_tol=1e-9):
        raise ConfigurationError(f"{name} is {said[name]!r}, and {source} is {value:.10g}: leave one of them out")
