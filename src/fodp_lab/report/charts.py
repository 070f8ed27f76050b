"""Every figure as plain data: what is drawn, by `figures`, for print and for the page."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fodp_lab.judging.results import Line, Results, panels
from fodp_lab.judging.statistics import Difference, Summary, band, paired, summarize
from fodp_lab.judging.verdicts import BETTER, EQUAL, OPEN, REFERENCE, WORSE, relative, standings
from fodp_lab.paper.catalog import (
    AS_HERE,
    DP_SGD,
    EXPERIMENTS,
    FO,
    METHODS,
    PRINTED_FINAL,
    PRINTED_RELATIVE,
    RUNTIME,
)

INK, FO_COLOUR, GREY = "ink", "#d55e00", "#8a8f98"  # ink: black on white, white on black
ORANGE, SKY, GREEN, BLUE, PINK = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#cc79a7"  # Okabe and Ito
PALETTE = {"vermilion": FO_COLOUR, "grey": GREY, "orange": ORANGE, "sky": SKY, "green": GREEN, "blue": BLUE,
           "pink": PINK}  # fmt: skip
# The main configuration has one colour everywhere, and so has DP-SGD.
COLOURS = {
    DP_SGD: INK, "DP-SGD": INK, "β=1": INK, "current only": INK,
    FO: FO_COLOUR, "β=0.9": FO_COLOUR, "K=8": FO_COLOUR, "α=0.8": FO_COLOUR, "defaults": FO_COLOUR,
    "DP-Adam": SKY, "DP-AdamW": BLUE, "DP-IS": GREEN, "DP-SAM": ORANGE, "DP-SAT": PINK, "DP-Adam-AC": GREY,
    "β=0.95": BLUE, "β=0.8": GREEN, "β=0.65": PINK, "K=1": GREY, "K=2": SKY, "K=32": BLUE,
    "α=0.2": SKY, "α=0.5": BLUE, "Post-FM-DP-SGD": GREEN, "uniform": SKY, "exponential": BLUE,
}  # fmt: skip
DASHED = ("DP-AdamW", "DP-SAT", "DP-Adam-AC", "β=0.95", "β=0.65", "K=32", "α=0.5")
NAMES = {"svhn": "SVHN", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


@dataclass(frozen=True)
class Mark:
    """One series: a curve over x, or for a chart of rows one value per row name; low and high are its interval."""

    label: str
    colour: str
    x: list[float] | list[str]
    y: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    dashed: bool = False
    hollow: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `references` are values of x to compare with, each with a name; `rows` orders row names."""

    title: str
    xlabel: str
    ylabel: str
    marks: tuple[Mark, ...]
    references: tuple[tuple[float, str], ...] = ()
    rows: tuple[str, ...] = ()

    def described(self, kind: str) -> str:
        """What the panel shows, for those who do not see it: where curves end, or the value of every row."""
        if kind == "lines":
            ends = "; ".join(f"{mark.label} {mark.y[-1]:.3f}" for mark in self.marks)
            return f"{self.ylabel} against {self.xlabel}. At the end: {ends}."
        values = (f"{mark.label}: {x} {y:.3f}" for mark in self.marks for x, y in zip(mark.x, mark.y, strict=True))
        return f"{self.xlabel}. {'; '.join(values)}."


@dataclass(frozen=True)
class Chart:
    """A figure: `kind` is "lines", "dots" or "bars"; dots and bars have one row per name."""

    name: str
    title: str
    kind: str
    panels: tuple[Panel, ...]
    caption: str = ""


def draw(results: Results) -> dict[str, Chart]:
    """All figures for which something is recorded, by file name."""
    made = [
        _epochs(results, "accuracy"),
        _tradeoff(results),
        _joint(results),
        _epochs(results, "window"),
        _epochs(results, "order"),
        _insertion(results),
        *(_clipping(results, sigma) for sigma in ("1.5", "2")),
        _final(results),
        _memory(results),
        _reference(results),
        _sensitivity(results),
        _runtime(results),
        _fair(results),
    ]
    filled = (replace(chart, panels=tuple(panel for panel in chart.panels if panel.marks)) for chart in made)
    return {chart.name: chart for chart in filled if chart.panels}


def charts_of(charts: dict[str, Chart], experiment: str) -> list[Chart]:
    """The figures of one experiment."""
    return [c for c in charts.values() if c.name == experiment or c.name.startswith(f"{experiment}-sigma")]


BAND = "Lines are means over seeds, bands Student-t 95% intervals."
_MOST_BANDS = 5  # more would hide each other


def _curve(line: Line, x: Callable[[Line], list[float]]) -> Mark | None:
    if not line.records:
        return None
    label, curves, dashed = line.label, line.curves, line.label in DASHED
    if len(curves) < 3:  # an interval of two runs is too wide to draw
        return Mark(label, COLOURS.get(label, GREY), x(line), curves.mean(axis=0).tolist(), dashed=dashed)
    mean, half = band(curves)
    low, high = (mean - half).tolist(), (mean + half).tolist()
    return Mark(label, COLOURS.get(label, GREY), x(line), mean.tolist(), low, high, dashed)


def _panel(title: str, xlabel: str, lines: Sequence[Line], x: Callable[[Line], list[float]]) -> Panel:
    marks = [mark for line in lines if (mark := _curve(line, x)) is not None]
    if len(marks) > _MOST_BANDS:
        marks = [m if m.colour in (INK, FO_COLOUR) else replace(m, low=[], high=[]) for m in marks]
    return Panel(title, xlabel, "test accuracy", tuple(marks))


def _by_epoch(line: Line) -> list[float]:
    return line.epochs


def _by_epsilon(line: Line) -> list[float]:
    return line.epsilons


def _epochs(results: Results, name: str) -> Chart:
    found = panels(results.lines[name])
    made = tuple(_panel(NAMES.get(title, title), "epoch", lines, _by_epoch) for title, lines in found.items())
    few = " Only DP-SGD and FO-DP-SGD have bands." if len(found["cifar10"]) > _MOST_BANDS else ""
    return Chart(name, EXPERIMENTS[name].title, "lines", made, BAND + few)


def _tradeoff(results: Results) -> Chart:
    name = "beta-tradeoff"
    found = panels(results.lines[name])
    made = tuple(_panel(NAMES[title], "ε spent", lines, _by_epsilon) for title, lines in found.items())
    return Chart(name, EXPERIMENTS[name].title, "lines", made, BAND)


def _joint(results: Results) -> Chart:
    name = "beta-joint"
    lines = results.lines[name]
    cost = tuple(
        Mark(line.label, COLOURS[line.label], line.epochs, line.epsilons, dashed=line.label in DASHED)
        for line in lines
        if line.records
    )
    made = (_panel("CIFAR-100: utility", "epoch", lines, _by_epoch), Panel("privacy", "epoch", "ε spent", cost))
    return Chart(name, EXPERIMENTS[name].title, "lines", made, BAND)


def _insertion(results: Results) -> Chart:
    name = "insertion"
    lines = results.lines[name]
    made = (_panel("by ε", "ε spent", lines, _by_epsilon), _panel("by epoch", "epoch", lines, _by_epoch))
    return Chart(name, f"CIFAR-10: {EXPERIMENTS[name].title.lower()}", "lines", made, BAND)


def _clipping(results: Results, sigma: str) -> Chart:
    found = {p: lines for p, lines in panels(results.lines["clipping"]).items() if p.startswith(f"σ={sigma},")}
    made = tuple(_panel(p.split(", ")[1], "epoch", lines, _smooth_epochs) for p, lines in found.items())
    smooth = tuple(replace(p, marks=tuple(_smoothed(m) for m in p.marks)) for p in made)
    caption = "One seed; each point is the mean of five epochs."
    return Chart(f"clipping-sigma{sigma}", f"CIFAR-10: clipping norms at σ={sigma}", "lines", smooth, caption)


_SMOOTH = 5


def _smooth_epochs(line: Line) -> list[float]:
    n = len(line.epochs) // _SMOOTH * _SMOOTH
    return [float(e) for e in np.reshape(line.epochs[:n], (-1, _SMOOTH)).mean(axis=1)]


def _smoothed(mark: Mark) -> Mark:
    """One seed is too noisy for eight lines in a panel: the mean of five epochs, as the caption says."""
    y = np.reshape(mark.y[: len(mark.x) * _SMOOTH], (-1, _SMOOTH)).mean(axis=1)
    return replace(mark, y=[float(v) for v in y])


def _final(results: Results) -> Chart:
    lines = [line for line in results.lines["final-accuracy"] if line.records]
    lines.sort(key=lambda line: -summarize(line.final.values()).mean)
    ours = [summarize(line.final.values()) for line in lines]
    labels = [line.label for line in lines]
    theirs = [PRINTED_FINAL[label] for label in labels]
    marks = () if not lines else (
        _summaries("this project", BLUE, labels, ours, [(s.high - s.low) / 2 for s in ours]),
        Mark("the paper", FO_COLOUR, labels, [t[0] for t in theirs], [t[2] for t in theirs], [t[3] for t in theirs],
             hollow=True),
    )  # fmt: skip
    made = Panel("", "final test accuracy, 95% interval", "", marks, rows=tuple(labels))
    return Chart("final-accuracy", "CIFAR-10: final accuracy, ours beside the paper's", "dots", (made,))


def _summaries(name: str, colour: str, labels: list[str], s: Sequence[Summary], half: Sequence[float]) -> Mark:
    """Means with intervals; one run alone has none."""
    widths = [0.0 if math.isnan(h) else h for h in half]
    low, high = ([v.mean + sign * h for v, h in zip(s, widths, strict=True)] for sign in (-1, 1))
    return Mark(name, colour, labels, [v.mean for v in s], low, high)


def _memory(results: Results) -> Chart:
    lines = [line for line in results.lines["memory-design"] if line.records]
    marks = []
    for name, field_, colour in (("final", "final_accuracy", BLUE), ("best", "best_accuracy", SKY)):
        s = [summarize(line.values(field_).values()) for line in lines]
        marks.append(_summaries(name, colour, [line.label for line in lines], s, [v.std for v in s]))
    rows = tuple(line.label for line in lines)
    made = Panel("", "test accuracy, mean ± standard deviation", "", tuple(marks) if lines else (), rows=rows)
    return Chart("memory-design", "CIFAR-10: four designs of memory in the query", "bars", (made,))


def _sensitivity(results: Results) -> Chart:
    title = "CIFAR-10: the parameters that the paper leaves open"
    caption = "κ and ζ are multiples of the noise floor of the EMA, which is their default."
    return _differences(results, "sensitivity", "defaults", title, caption)


def _reference(results: Results) -> Chart:
    title = "CIFAR-10, β=1: other choices where the paper names none"
    low, high = PRINTED_FINAL[DP_SGD][2:]
    caption = f"Dotted: the ends of the paper's interval, {low:.4f} and {high:.4f}."
    chart = _differences(results, "reference", AS_HERE, title, caption)
    base = summarize(results.line("reference", AS_HERE).final.values()).mean
    ends = tuple((100 * (end - base), f"{end:.4f}") for end in (low, high))
    return replace(chart, panels=tuple(replace(p, references=(*p.references, *ends)) for p in chart.panels))


def _differences(results: Results, name: str, base: str, title: str, caption: str) -> Chart:
    """Final accuracy of the other rows of a panel against one of them."""
    finals = {line.label: line.final for line in results.panel(name, results.line(name, base).panel)}
    tests = {label: paired(final, finals[base]) for label, final in finals.items() if label != base}
    known = {label: d for label, d in tests.items() if d is not None}
    marks = (_points(f"difference to {base}", FO_COLOUR, known),) if known else ()
    axis = f"points against {base}, 95% interval"
    return Chart(name, title, "dots", (Panel("", axis, "", marks, ((0.0, ""),), tuple(known)),), caption)


def _points(label: str, colour: str, found: Mapping[str, Difference]) -> Mark:
    mean, low, high = ([100 * getattr(d, name) for d in found.values()] for name in ("mean", "low", "high"))
    return Mark(label, colour, list(found), mean, low, high)


def _runtime(results: Results) -> Chart:
    labels = [label for label in METHODS if label in results.runtime]
    ratios = [relative(results, label) for label in labels]
    seconds = {label: sum(results.runtime[label]) for label in labels}
    means = [r.mean if r else seconds[x] / seconds.get(DP_SGD, seconds[x]) for x, r in zip(labels, ratios, strict=True)]
    low = [r.low if r else m for r, m in zip(ratios, means, strict=True)]
    high = [r.high if r else m for r, m in zip(ratios, means, strict=True)]
    marks = () if not labels else (
        Mark("this project", BLUE, labels, means, low, high),
        Mark("the paper", FO_COLOUR, labels, [PRINTED_RELATIVE[label] for label in labels]),
    )  # fmt: skip
    made = Panel("", "runtime relative to DP-SGD", "", marks, ((1.0, ""),), tuple(labels))
    return Chart(RUNTIME, "CIFAR-10: runtime of 250 epochs", "bars", (made,), "The paper gives no intervals.")


def _fair(results: Results) -> Chart:
    made = []
    for setting in results.fair.protocol.settings:
        rows = standings(results)[setting.name]
        base = next((c.summary.mean for c in rows if c.label == "DP-SGD"), None)
        ceiling = next((c.summary.mean for c in rows if c.verdict == REFERENCE), None)
        known = [(c, c.difference) for c in rows if c.difference is not None]
        words = {BETTER: GREEN, WORSE: FO_COLOUR, EQUAL: BLUE, OPEN: GREY}
        groups = {word: {c.label: d for c, d in known if c.verdict == word} for word in words}
        marks = tuple(_points(word, words[word], found) for word, found in groups.items() if found)
        references = [(0.0, "")]
        if base is not None and ceiling is not None:
            references.append((100 * (ceiling - base), "not private"))
        title = setting.name.replace(setting.dataset, NAMES[setting.dataset])
        title += f" (DP-SGD {base:.3f})" if base is not None else ""
        order = tuple(c.label for c, _ in known)
        made.append(Panel(title, "points against DP-SGD, 95% interval", "", marks, tuple(references), order))
    caption = (
        "Settings were chosen on train[6000:]; the accuracies are those of the 2,000 test images, which no search saw. "
        "Dotted: plain SGD without privacy, tuned alike, after its last step."
    )
    return Chart("fair", "Fair comparison: every method at the same (ε, δ)", "dots", tuple(made), caption)
