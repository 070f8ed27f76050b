"""Verdicts on running times, from the turns that the methods took side by side."""

from fodp_lab.judging.results import Results
from fodp_lab.judging.statistics import LEVEL, Difference, holm
from fodp_lab.judging.verdicts import NOT_DECIDABLE, NOT_REPRODUCED, REPRODUCED, Verdict, ratio, undecided
from fodp_lab.paper.catalog import DP_SGD, FO

SMALL = 1.10


def relative(results: Results, label: str, to: str = DP_SGD) -> Difference | None:
    """Time of a method relative to another's, by turns; None if not recorded."""
    a, b = results.runtime.get(label), results.runtime.get(to)
    return ratio(a, b) if a and b else None


def small_overhead(results: Results) -> Verdict:
    """FO-DP-SGD takes at most a tenth longer than DP-SGD."""
    r = relative(results, FO)
    if r is None:
        return undecided("two turns of both methods are needed")
    status = REPRODUCED if r.high <= SMALL else NOT_REPRODUCED if r.low > SMALL else NOT_DECIDABLE
    return Verdict(status, f"{_times(r)} the time of DP-SGD over {r.n} turns")


def faster(results: Results) -> Verdict:
    """FO-DP-SGD takes less time than the three that the paper names."""
    found = {label: relative(results, FO, label) for label in ("DP-Adam", "DP-SAM", "DP-SAT")}
    known = {label: r for label, r in found.items() if r is not None}
    if len(known) < len(found):
        return undecided("two turns of all four methods are needed")
    statuses = []
    for r, p in zip(known.values(), holm([r.p for r in known.values()]), strict=True):
        statuses.append(NOT_DECIDABLE if p >= LEVEL else REPRODUCED if r.mean < 1 else NOT_REPRODUCED)
    status = next((s for s in (NOT_REPRODUCED, NOT_DECIDABLE) if s in statuses), REPRODUCED)
    return Verdict(status, "; ".join(f"{_times(r)} the time of {label}" for label, r in known.items()))


def comparable(results: Results) -> Verdict:
    """FO-DP-SGD and DP-Adam-AC are within a tenth of each other."""
    r = relative(results, "DP-Adam-AC", FO)
    if r is None:
        return undecided("two turns of both methods are needed")
    inside, outside = r.low >= 1 / SMALL and r.high <= SMALL, r.high < 1 / SMALL or r.low > SMALL
    status = REPRODUCED if inside else NOT_REPRODUCED if outside else NOT_DECIDABLE
    return Verdict(status, f"DP-Adam-AC takes {_times(r)} the time of {FO}")


def _times(r: Difference) -> str:
    return f"{r.mean:.3f}× [{r.low:.3f}, {r.high:.3f}]"
