"""`check_method`: every check of `fodp.testing` on one method."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fodp.errors import PrivacyError
from fodp.methods import METHODS, Method, register
from fodp.testing.checks import CHECKS

_SHOWN = 3  # faults of one check


@dataclass(frozen=True)
class MethodReport:
    """What a method has passed: the names of the checks, each with its seconds."""

    method: str
    params: Mapping[str, Any]
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        given = "".join(f" {name}={value!r}" for name, value in self.params.items())
        return f"{self.method}{given}: passed {len(self.seconds)} checks in {sum(self.seconds.values()):.1f} s\n" + (
            "\n".join(f"  {name}" for name in self.seconds)
        )


def check_method(method: type[Method], /, **params: Any) -> MethodReport:
    """Put a private optimizer with these parameters through every check of `CHECKS`.

    The method need not be registered. Checked are: events as promised and noise that is really added, queries that one
    example moves by no more than their bound while nothing else moves at all, empty lots, ε of the recorded events,
    calibration, resuming bit for bit, micro-batches, secure randomness, float64, scheduled learning rates, chance
    under much noise, refusal of unknown and meaningless parameters; and most of it again with adaptive clipping, a
    filter and AdamW.

    Guarantee: none. A method that passes has none of these mistakes on the small problem.

    Args:
        method: the class of the optimizer.
        params: its parameters, as `Plan(params=...)` takes them.

    Returns:
        A `MethodReport` with the seconds of each check.

    Raises:
        AssertionError: with everything that was found.

    Example:
        >>> from fodp.methods.dp_sgd import DPSGD
        >>> print(check_method(DPSGD, lr=0.1))  # doctest: +ELLIPSIS
        dp-sgd lr=0.1: passed 15 checks in ... s
        ...
    """
    seconds, found = {}, {}
    for name in CHECKS:
        started = time.perf_counter()
        found[name] = faults(name, method, **params)
        seconds[name] = time.perf_counter() - started
    if any(found.values()):
        lines = [f"{method.name} does not keep what a private optimizer promises"]
        for name, listed in found.items():
            more = [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
            lines += [f"  {name}?", *(f"    {fault}" for fault in listed[:_SHOWN] + more)] if listed else []
        raise AssertionError("\n".join(lines))
    return MethodReport(method.name, params, seconds)


def faults(check: str, method: type[Method], /, **params: Any) -> list[str]:
    """What one check of `CHECKS` has against a method; [] if nothing."""
    with registered(method):
        try:
            return list(CHECKS[check](method.name, params))
        except PrivacyError as refusal:
            return [f"the run was refused: {refusal}"]


@contextmanager
def registered(method: type[Method]) -> Iterator[None]:
    """The method is in the table while this lasts; one that is there already stays."""
    if METHODS.get(method.name) is method:
        yield
        return
    register(method)
    try:
        yield
    finally:
        del METHODS[method.name]
