"""One picture of a report: ε claimed and found, and what each attack saw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fodp.audit.report import Finding, Report
from fodp.support.extras import pyplot
from fodp.support.files import atomically

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"


def plot_report(report: Report, out: Path) -> None:
    """Draw the report; it shows what was computed from the data without noise."""
    plt = pyplot()
    panels: dict[str, Callable[[Any, Finding], None]] = {
        "mechanism": _two_groups("score of a canary gradient, in units of the noise"),
        "one-run": _two_groups("how far training went along a canary"),
        "replay": _distances,
        "sampling": _sizes,
    }
    drawn = [finding for finding in report.findings if finding.series]
    figure, axes = plt.subplots(1, 1 + len(drawn), figsize=(4 + 3.6 * len(drawn), 3.4), layout="constrained")
    every = [axes] if not drawn else list(axes)
    _bounds(every[0], report)
    for axis, finding in zip(every[1:], drawn, strict=True):
        panels[finding.attack](axis, finding)
        axis.set_title(f"{finding.attack}: {'consistent' if finding.consistent else 'VIOLATION'}", fontsize=9)
    for axis in every:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"audit of {report.plan.method}", fontsize=10)
    with atomically(out) as part:  # readable by its owner only
        figure.savefig(part, dpi=150, format="png")
    plt.close(figure)


def _bounds(axis: Any, report: Report) -> None:
    found = [f for f in report.findings if f.epsilon_lower is not None]
    places = range(len(found))
    axis.bar([p - 0.2 for p in places], [f.epsilon_lower for f in found], 0.4, color=ORANGE, label="at least")
    axis.bar([p + 0.2 for p in places], [f.epsilon_claimed for f in found], 0.4, color=BLUE, label="claimed")
    axis.set_xticks(list(places), [f"{f.attack}\nδ={f.delta:.2g}" for f in found])
    axis.set_ylabel("ε")
    axis.legend(frameon=False, fontsize=8)


def _two_groups(label: str) -> Callable[[Any, Finding], None]:
    def draw(axis: Any, finding: Finding) -> None:
        groups = [finding.series["in"], finding.series["out"]]
        axis.hist(groups, bins=40, label=["in the data", "not in it"], color=[ORANGE, GREY], histtype="step")
        axis.set_xlabel(label, fontsize=8)
        axis.legend(frameon=False, fontsize=8)

    return draw


def _distances(axis: Any, finding: Finding) -> None:
    ratios = finding.series["distance over bound"]
    axis.plot(range(len(ratios)), ratios, ".", color=BLUE)
    axis.axhline(1.0, color=ORANGE)
    axis.set_xlabel("query pair", fontsize=8)
    axis.set_ylabel("distance / bound", fontsize=8)


def _sizes(axis: Any, finding: Finding) -> None:
    sizes = finding.series["lot sizes"]
    bins = range(int(min(sizes, default=0)), int(max(sizes, default=0)) + 2)
    axis.hist(sizes, bins=list(bins), color=GREY)
    axis.set_xlabel("lot size", fontsize=8)
