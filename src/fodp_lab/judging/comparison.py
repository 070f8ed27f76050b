"""The fair comparison judged by its rule: one verdict per row and setting."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fodp_lab.judging.statistics import LEVEL, MARGIN, Difference, Summary, holm, paired, summarize
from fodp_lab.paper.fair import CEILING, DP_SGD, Comparison, Setting

BETTER, WORSE, EQUAL, OPEN = "better", "worse", "equal in practice", "not decidable"
BASE, REFERENCE = "baseline", "not private"


@dataclass(frozen=True)
class Contender:
    """A row of the comparison in one setting."""

    label: str
    params: Mapping[str, Any]
    validation: float
    at_edge: bool
    summary: Summary
    difference: Difference | None
    p: float | None
    verdict: str


def compare(comparison: Comparison, setting: Setting) -> list[Contender]:
    """All rows with recorded runs, the best first. The ceiling is a reference, not a test."""
    scores = {label: comparison.accuracies(row, setting) for label, row in comparison.rows.items()}
    base = scores.get(DP_SGD, {})
    tests = {
        label: test
        for label, values in scores.items()
        if label not in (DP_SGD, CEILING) and (test := paired(values, base)) is not None
    }
    corrected = dict(zip(tests, holm([d.p for d in tests.values()]), strict=True))
    found = []
    for label, values in scores.items():
        choice = comparison.choice(comparison.rows[label], setting)
        if values and choice is not None:
            d, p = tests.get(label), corrected.get(label)
            found.append(Contender(label, choice.params, choice.validation, choice.at_edge,
                                   summarize(values.values()), d, p, _verdict(label, d, p)))  # fmt: skip
    return sorted(found, key=lambda c: -c.summary.mean)


def _verdict(label: str, d: Difference | None, p: float | None) -> str:
    if label in (DP_SGD, CEILING):
        return BASE if label == DP_SGD else REFERENCE
    if d is None or p is None:
        return OPEN
    if p < LEVEL:
        return BETTER if d.mean > 0 else WORSE
    return EQUAL if max(abs(d.low), abs(d.high)) <= MARGIN else OPEN
