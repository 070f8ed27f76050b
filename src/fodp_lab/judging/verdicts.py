"""From recorded numbers to verdicts: the rules, what decides each claim of the paper, and the fair comparison judged.

The rules were written before any full-length record was read, but for the rule "number": see its last sentence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fodp_lab.judging.results import BySeed, Line, Results, panels
from fodp_lab.judging.statistics import (
    LEVEL,
    MARGIN,
    Difference,
    Summary,
    difference,
    holm,
    paired,
    summarize,
)
from fodp_lab.paper import fair
from fodp_lab.paper.catalog import DP_SGD, FO, PRINTED_FINAL

REPRODUCED, NOT_REPRODUCED, NOT_DECIDABLE = "reproduced", "not reproduced", "not decidable"

RULES = {
    "better": (
        "A is better than B if the mean paired difference over seeds is above zero with a t-test's p below 0.05 "
        "after Holm's correction over the comparisons of the claim. It is not better if the difference is below "
        "zero with p below 0.05, or if its 95% interval lies within one percentage point of zero (equal in "
        "practice). Otherwise it is not decidable. A claim with several comparisons is reproduced if all hold, "
        "and not reproduced if one fails. Five seeds, as in the paper's table of final accuracies; three where the "
        "paper shows single runs (five were planned; cut for time when one of each had been seen), one for `clipping`."
    ),
    "number": (
        "A number is reproduced if our 95% interval and the paper's overlap and ours is at most twice as wide, and "
        "not reproduced if they do not overlap; otherwise it is not decidable. For the baseline β=1 it is reproduced "
        "only if our mean itself lies in the paper's interval, and not reproduced otherwise. The condition on the "
        "width was added after the first 28 full-length records had been seen (two seeds per row); it is stricter."
    ),
    "one seed": (
        "With one seed per panel there is no test. The score is the accuracy averaged over the second half of "
        "training. Reproduced if FO-DP-SGD scores highest in every panel; not reproduced if in some panel "
        "another method is ahead by more than one percentage point; otherwise not decidable."
    ),
    "runtime": (
        "All methods take turns in one process, so ratios are paired by turn; their 95% interval is a t-interval "
        "of log ratios. A small overhead means at most 1.10×, comparable means within 10%, faster means a ratio "
        "below one with p below 0.05 after Holm's correction."
    ),
    "exact": "Follows from the accountant alone, without randomness.",
}


@dataclass(frozen=True)
class Verdict:
    """What the records say about a claim, why in one sentence, and each comparison behind it with its own status."""

    status: str
    reason: str
    evidence: tuple[tuple[str, str], ...] = ()


def undecided(why: str) -> Verdict:
    """For lack of runs."""
    return Verdict(NOT_DECIDABLE, why)


@dataclass(frozen=True)
class Pair:
    """A claimed order: `better` above `worse`, as values by seed."""

    better: str
    worse: str
    high: BySeed
    low: BySeed


def final(a: Line, b: Line) -> Pair:
    """Judged by the accuracy after the last step."""
    return Pair(a.label, b.label, a.final, b.final)


def best(a: Line, b: Line) -> Pair:
    """Judged by the best accuracy of the run."""
    return Pair(a.label, b.label, a.values("best_accuracy"), b.values("best_accuracy"))


def trajectory(a: Line, b: Line) -> Pair:
    """Judged by the accuracy averaged over all epochs."""
    return Pair(a.label, b.label, a.average, b.average)


def late(a: Line, b: Line) -> Pair:
    """Judged by the accuracy averaged over the second half of training."""
    return Pair(a.label, b.label, a.late, b.late)


def equal_epsilon(a: Line, b: Line, share: float = 1.0) -> Pair:
    """Judged at equal ε: both curves averaged over the (lowest share of the) budgets that both pass through."""
    if not (a.records and b.records):
        return Pair(a.label, b.label, {}, {})
    ours, theirs = a.epsilons, b.epsilons
    start, end = max(ours[0], theirs[0]), min(ours[-1], theirs[-1])
    grid = np.linspace(start, start + share * (end - start), 100)

    def mean(line: Line, epsilons: list[float]) -> BySeed:
        curves = zip(line.records, line.curves, strict=True)
        return {seed: float(np.interp(grid, epsilons, curve).mean()) for seed, curve in curves}

    return Pair(a.label, b.label, mean(a, ours), mean(b, theirs))


def all_better(pairs: Sequence[Pair]) -> Verdict:
    """Every pair is in the claimed order, by the rule "better"."""
    return _judge(pairs, MARGIN, "points", lambda v: f"{100 * v:+.2f}")


def all_sooner(pairs: Sequence[Pair], margin: float) -> Verdict:
    """The same for epochs: `low` of each pair holds the epochs of the one that is claimed to be slower."""
    return _judge(pairs, margin, "epochs saved", lambda v: f"{v:+.1f}")


def _judge(pairs: Sequence[Pair], margin: float, unit: str, show: Callable[[float], str]) -> Verdict:
    tests = [paired(pair.high, pair.low) for pair in pairs]
    known = [test for test in tests if test is not None]
    if len(known) < len(pairs):
        return undecided(f"{len(pairs) - len(known)} of {len(pairs)} comparisons lack two common seeds")
    evidence = []
    for pair, test, p in zip(pairs, known, holm([test.p for test in known]), strict=True):
        numbers = f"{show(test.mean)} [{show(test.low)}, {show(test.high)}] {unit}, p={p:.2g}"
        status = _order(test, p, margin)
        how = " (equal in practice)" if status == NOT_REPRODUCED and p >= LEVEL else ""
        evidence.append((status, f"{pair.better} over {pair.worse}: {numbers}{how}"))
    seeds = " or ".join(str(n) for n in sorted({test.n for test in known}))
    statuses = [status for status, _ in evidence]
    if len(evidence) == 1:
        return Verdict(statuses[0], f"{evidence[0][1]}, {seeds} seeds")
    holding, failing, open_ = (statuses.count(s) for s in (REPRODUCED, NOT_REPRODUCED, NOT_DECIDABLE))
    reason = f"comparisons: {len(pairs)}; holding: {holding}; failing: {failing}; open: {open_}; {seeds} seeds"
    return Verdict(_all(statuses), reason, tuple(sorted(evidence, key=lambda e: _ORDER.index(e[0]))))


def _order(test: Difference, p: float, margin: float) -> str:
    """Does one claimed order hold?"""
    if p < LEVEL:
        return REPRODUCED if test.mean > 0 else NOT_REPRODUCED
    return NOT_REPRODUCED if max(abs(test.low), abs(test.high)) <= margin else NOT_DECIDABLE


_ORDER = (REPRODUCED, NOT_REPRODUCED, NOT_DECIDABLE)


def _all(statuses: Sequence[str]) -> str:
    """Of a claim that needs all of these to hold."""
    if NOT_REPRODUCED in statuses:
        return NOT_REPRODUCED
    return NOT_DECIDABLE if NOT_DECIDABLE in statuses or not statuses else REPRODUCED


def overlaps(lines: Sequence[tuple[Line, tuple[float, float, float, float]]]) -> Verdict:
    """Our interval of the final accuracy meets the paper's, for every row."""
    evidence = []
    for line, (mean, _, low, high) in lines:
        s = summarize(line.final.values())
        if s.n < 2:
            return undecided(f"{line.label} has {s.n} runs; an interval needs two")
        narrow = s.high - s.low <= 2 * (high - low)  # a wide interval meets everything
        meets = s.low <= high and low <= s.high
        status = NOT_REPRODUCED if not meets else REPRODUCED if narrow else NOT_DECIDABLE
        ours = f"{line.label} {s.mean:.4f} ± {s.std:.4f}, 95% interval [{s.low:.4f}, {s.high:.4f}]"
        evidence.append((status, f"{ours}; paper {mean:.4f}, [{low:.4f}, {high:.4f}]"))
    if len(evidence) == 1:
        return Verdict(*evidence[0])
    statuses = [status for status, _ in evidence]
    reason = f"{statuses.count(REPRODUCED)} of {len(lines)} intervals meet the paper's"
    return Verdict(_all(statuses), reason, tuple(evidence))


def mean_inside(line: Line, low: float, high: float) -> Verdict:
    """Our mean lies in the paper's interval; if not, say by how much it misses."""
    s = summarize(line.final.values())
    if s.n < 2:
        return undecided(f"{line.label} has {s.n} runs; a mean with an interval needs two")
    ours = f"our mean is {s.mean:.4f} ± {s.std:.4f}, 95% interval [{s.low:.4f}, {s.high:.4f}], {s.n} seeds"
    if low <= s.mean <= high:
        return Verdict(REPRODUCED, f"{ours}; the paper's interval is [{low:.4f}, {high:.4f}]")
    miss = s.mean - high if s.mean > high else low - s.mean
    overlap = s.low <= high and low <= s.high
    meets = "the two intervals overlap" if overlap else "the two intervals do not overlap"
    return Verdict(
        NOT_REPRODUCED,
        f"{ours}; that is {100 * miss:.2f} points {'above' if s.mean > high else 'below'} the paper's interval "
        f"[{low:.4f}, {high:.4f}], and {meets}. The paper names neither its images nor its initial weights nor its "
        "normalisation; `reference` varies them",
    )


def first_everywhere(panels: dict[str, list[Line]], label: str) -> Verdict:
    """One seed per panel: the named row has the highest score in each, by the rule "one seed"."""
    evidence = []
    for name, lines in panels.items():
        if not all(line.records for line in lines):
            return undecided(f"panel {name} is not complete")
        scores = {line.label: summarize(line.late.values()).mean for line in lines}
        rival = max((other for other in scores if other != label), key=lambda other: scores[other])
        gap = scores[label] - scores[rival]
        status = REPRODUCED if gap > 0 else NOT_REPRODUCED if gap < -MARGIN else NOT_DECIDABLE
        told = f"{name}: {label} {scores[label]:.4f}, best other {rival} {scores[rival]:.4f}"
        evidence.append((status, told))
    statuses = [status for status, _ in evidence]
    first = statuses.count(REPRODUCED)
    behind = statuses.count(NOT_REPRODUCED)
    reason = f"{label} is first in {first} of {len(evidence)} panels and behind by more than a point in {behind}"
    return Verdict(_all(statuses), reason, tuple(evidence))


# ---- what decides each claim ----------------------------------------------------------------------------------

Judge = Callable[[Results], Verdict]
How = Callable[[Line, Line], Pair]


def one_over(experiment: str, label: str, how: How, panel: str | None = None, *others: str) -> Judge:
    """The named row above the named others, or above all others of its panel."""
    return _against_others(experiment, label, how, panel, others)


def all_over(experiment: str, label: str, how: How, panel: str | None = None, *tops: str) -> Judge:
    """The named tops, or all others of the panel, above the named row."""
    return _against_others(experiment, label, lambda row, top: how(top, row), panel, tops)


def _against_others(experiment: str, label: str, how: How, panel: str | None, only: Sequence[str]) -> Judge:
    def judge(results: Results) -> Verdict:
        row = results.line(experiment, label, panel)
        others = [line for line in results.panel(experiment, row.panel) if line.label != label]
        return all_better([how(row, line) for line in others if not only or line.label in only])

    return judge


def at_low_epsilon(a: Line, b: Line) -> Pair:
    """At equal ε, over the lowest third of the budgets that both curves pass through."""
    return equal_epsilon(a, b, share=1 / 3)


def epsilon_falls_with_beta(results: Results) -> Verdict:
    """ε grows with the epochs and falls with β."""
    lines = [line for line in results.lines["beta-joint"] if line.records]
    if len(lines) < 2:
        return undecided("fewer than two values of β are recorded")
    ends = [(line.label, line.epsilons[-1]) for line in lines]
    falls = all(ends[i][1] > ends[i + 1][1] for i in range(len(ends) - 1))
    rises = all(a <= b for line in lines for a, b in zip(line.epsilons, line.epsilons[1:], strict=False))
    told = ", ".join(f"{label}: ε={value:.2f}" for label, value in ends)
    return Verdict(REPRODUCED if falls and rises else NOT_REPRODUCED, f"after the last epoch {told}")


def sooner(results: Results) -> Verdict:
    """FO-DP-SGD needs fewer epochs than DP-SGD to reach 95% of DP-SGD's mean final accuracy."""
    pairs = []
    for panel in panels(results.lines["accuracy"]):
        fo, base = results.line("accuracy", FO, panel), results.line("accuracy", DP_SGD, panel)
        if not (fo.records and base.records):
            return undecided(f"{panel} is not recorded")
        target = 0.95 * summarize(base.final.values()).mean
        pairs.append(Pair(f"{panel}: {FO}", "DP-SGD", base.to_reach(target), fo.to_reach(target)))
        length = base.epochs[-1]
    return all_sooner(pairs, margin=length / 100)


def other_rows(results: Results) -> Verdict:
    """The final accuracies of the six other methods of the paper's table."""
    others = [label for label in PRINTED_FINAL if label not in (FO, DP_SGD)]
    return overlaps([(results.line("final-accuracy", label), PRINTED_FINAL[label]) for label in others])


def fixed_budgets(results: Results) -> Verdict:
    """FO-DP-SGD over DP-SGD in every setting of the fair comparison."""
    c = results.fair
    pairs = [
        Pair(f"{s.name}: {FO}", "DP-SGD", c.accuracies(c.rows[fair.FO], s), c.accuracies(c.rows[fair.BASELINE], s))
        for s in c.protocol.settings
    ]
    return all_better(pairs)


def not_a_filter(results: Results) -> Verdict:
    """Refuted if the exact twin, a filter on ordinary releases, reaches the same accuracy everywhere."""
    c = results.fair
    gaps = []
    for s in c.protocol.settings:
        ours, twin = c.accuracies(c.rows[fair.FO], s), c.accuracies(c.rows[fair.TWIN], s)
        gaps += [abs(ours[seed] - twin[seed]) for seed in ours.keys() & twin.keys()]
    if len(gaps) < 2:
        return undecided("the twin's rows are not recorded")
    told = (
        f"DP-SGD at σ/β followed by a filter on its releases differs from {FO} by at most "
        f"{100 * max(gaps):.2f} points in {len(gaps)} paired runs"
    )
    return Verdict(NOT_REPRODUCED if max(gaps) <= MARGIN else NOT_DECIDABLE, told)


def clipping(sigma: str) -> Judge:
    """FO-DP-SGD first at every clipping norm."""

    def judge(results: Results) -> Verdict:
        found = panels(results.lines["clipping"]).items()
        return first_everywhere({p: lines for p, lines in found if p.startswith(f"σ={sigma},")}, FO)

    return judge


def baseline(results: Results) -> Verdict:
    """β=1 gives what the paper says."""
    return mean_inside(results.line("final-accuracy", DP_SGD), *PRINTED_FINAL[DP_SGD][2:])


def main_row(results: Results) -> Verdict:
    """The main configuration gives what the paper says."""
    return overlaps([(results.line("final-accuracy", FO), PRINTED_FINAL[FO])])


# ---- running times, of turns that the methods took side by side -----------------------------------------------

SMALL = 1.10


def ratio(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Time of a over time of b, turn by turn: geometric mean with interval and the p value against one."""
    d = difference(np.log(np.asarray(a) / np.asarray(b))) if len(a) == len(b) else None
    if d is None:
        return None
    return Difference(d.n, float(np.exp(d.mean)), float(np.exp(d.low)), float(np.exp(d.high)), d.p)


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


# ---- the fair comparison --------------------------------------------------------------------------------------

BETTER, WORSE, EQUAL, OPEN = "better", "worse", "equal in practice", "not decidable"
BASE, REFERENCE = "baseline", "not private"


@dataclass(frozen=True)
class Standing:
    """A row of the comparison in one setting."""

    label: str
    params: Mapping[str, Any]
    validation: float
    at_edge: bool
    summary: Summary
    difference: Difference | None
    p: float | None
    verdict: str


def compare(comparison: fair.Comparison, setting: fair.Setting) -> list[Standing]:
    """All rows with recorded runs, the best first. The ceiling is a reference, not a test."""
    scores = {label: comparison.accuracies(row, setting) for label, row in comparison.rows.items()}
    base = scores.get(fair.BASELINE, {})
    tests = {
        label: test
        for label, values in scores.items()
        if label not in (fair.BASELINE, fair.CEILING) and (test := paired(values, base)) is not None
    }
    corrected = dict(zip(tests, holm([d.p for d in tests.values()]), strict=True))
    found = []
    for label, values in scores.items():
        choice = comparison.choice(comparison.rows[label], setting)
        if values and choice is not None:
            d, p = tests.get(label), corrected.get(label)
            found.append(Standing(label, choice.params, choice.validation, choice.at_edge,
                                   summarize(values.values()), d, p, _standing(label, d, p)))  # fmt: skip
    return sorted(found, key=lambda c: -c.summary.mean)


def _standing(label: str, d: Difference | None, p: float | None) -> str:
    if label in (fair.BASELINE, fair.CEILING):
        return BASE if label == fair.BASELINE else REFERENCE
    if d is None or p is None:
        return OPEN
    if p < LEVEL:
        return BETTER if d.mean > 0 else WORSE
    return EQUAL if max(abs(d.low), abs(d.high)) <= MARGIN else OPEN


@lru_cache(maxsize=4)
def standings(results: Results) -> dict[str, list[Standing]]:
    """The rows of the fair comparison, judged, by the name of the setting."""
    return {setting.name: compare(results.fair, setting) for setting in results.fair.protocol.settings}
