"""For each claim the function of the records that decides it; the rules are those of `verdicts`."""

from collections.abc import Callable

from fodp_lab.judging.results import Line, Results, panels
from fodp_lab.judging.statistics import MARGIN, summarize
from fodp_lab.judging.verdicts import (
    NOT_DECIDABLE,
    NOT_REPRODUCED,
    REPRODUCED,
    Pair,
    Verdict,
    all_better,
    all_sooner,
    equal_epsilon,
    first_everywhere,
    mean_inside,
    overlaps,
    undecided,
)
from fodp_lab.paper import fair, printed
from fodp_lab.paper.catalog import DP_SGD, FO

Judge = Callable[[Results], Verdict]
How = Callable[[Line, Line], Pair]


def one_over(experiment: str, label: str, how: How, panel: str | None = None, *others: str) -> Judge:
    """The named row above the named others, or above all others of its panel."""

    def judge(results: Results) -> Verdict:
        top = results.line(experiment, label, panel)
        rest = [line for line in results.panel(experiment, top.panel) if line.label != label]
        return all_better([how(top, line) for line in rest if not others or line.label in others])

    return judge


def all_over(experiment: str, label: str, how: How, panel: str | None = None, *tops: str) -> Judge:
    """The named tops, or all others of the panel, above the named row."""

    def judge(results: Results) -> Verdict:
        low = results.line(experiment, label, panel)
        rest = [line for line in results.panel(experiment, low.panel) if line.label != label]
        return all_better([how(line, low) for line in rest if not tops or line.label in tops])

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
    others = [label for label in printed.FINAL if label not in (FO, DP_SGD)]
    return overlaps([(results.line("final-accuracy", label), printed.FINAL[label]) for label in others])


def fixed_budgets(results: Results) -> Verdict:
    """FO-DP-SGD over DP-SGD in every setting of the fair comparison."""
    c = results.fair
    pairs = [
        Pair(f"{s.name}: {FO}", "DP-SGD", c.accuracies(c.rows[fair.FO], s), c.accuracies(c.rows[fair.DP_SGD], s))
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
    return mean_inside(results.line("final-accuracy", DP_SGD), *printed.FINAL[DP_SGD][2:])


def main_row(results: Results) -> Verdict:
    """The main configuration gives what the paper says."""
    return overlaps([(results.line("final-accuracy", FO), printed.FINAL[FO])])
