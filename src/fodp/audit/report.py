"""What an audit found: a lower bound on ε beside the claimed one, and whatever contradicts the claim."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fodp.errors import PrivacyError
from fodp.plan import Plan

Progress = Callable[[float], None]
"""Told the fraction that is done."""

LEVEL = 1e-6
"""The probability of a false alarm of a whole audit, unless another confidence is asked for."""

SHOWN = 20  # contradictions that are written out; the others are counted


def silent(done: float) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one attack.

    faults: what contradicts the claim, in words; empty if the attack found nothing.
    epsilon_lower: the true ε is at least this, with the stated confidence; None for attacks that measure no ε.
    numbers: what was counted and measured. series: samples for the plot.
    """

    attack: str
    summary: str
    faults: tuple[str, ...]
    numbers: dict[str, Any]
    epsilon_claimed: float
    delta: float
    epsilon_lower: float | None = None
    confidence: float | None = None
    series: dict[str, list[float]] = field(default_factory=dict, repr=False)

    @property
    def consistent(self) -> bool:
        """Whether the claim survived this attack."""
        return not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the plot's samples."""
        return {
            "attack": self.attack,
            "consistent": self.consistent,
            "summary": self.summary,
            "epsilon_claimed": self.epsilon_claimed,
            "epsilon_lower": self.epsilon_lower,
            "delta": self.delta,
            "confidence": self.confidence,
            "faults": list(self.faults[:SHOWN]),
            "fault_count": len(self.faults),
            "numbers": self.numbers,
        }


class Refused(PrivacyError):
    """A run stopped itself in the middle of its steps."""


@contextmanager
def stepping() -> Iterator[None]:
    """From here on a refusal is the run's and says something about it; before, it is the user's to mend."""
    try:
        yield
    except PrivacyError as refusal:
        raise Refused(str(refusal)) from refusal


def refused(attack: str, plan: Plan, refusal: Refused) -> Finding:
    """The run stopped itself: what it does is not what its plan promises."""
    words = f"refused: {refusal}"
    return Finding(attack, words, (words,), {}, plan.epsilon(), plan.delta)


@dataclass(frozen=True)
class Report:
    """All attacks of one audit. Consistent is not proved: it says that these attacks found nothing."""

    plan: Plan
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        lines = [f"  {'fault' if f.faults else 'clean'} {f.attack}: {f.summary}" for f in self.findings]
        verdict = "consistent" if self.consistent else "VIOLATED"
        return "\n".join([f"<Report on {self.plan.method}: {verdict}>", *lines])

    @property
    def consistent(self) -> bool:
        """Whether the claim survived every attack."""
        return all(finding.consistent for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """For CI: 0 consistent, 1 violation found."""
        return 0 if self.consistent else 1

    @property
    def epsilon_lower(self) -> float | None:
        """The best lower bound at the plan's δ among the attacks that have one."""
        at_delta = [f.epsilon_lower for f in self.findings if f.delta == self.plan.delta]
        return max((bound for bound in at_delta if bound is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "method": self.plan.method,
            "consistent": self.consistent,
            "epsilon_claimed": self.plan.epsilon(),
            "epsilon_lower": self.epsilon_lower,
            "delta": self.plan.delta,
            "attacks": [finding.to_dict() for finding in self.findings],
        }
