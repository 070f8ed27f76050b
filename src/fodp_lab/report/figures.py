"""The one drawing of every chart: whole as PNG and SVG for print, panel by panel as SVG inside the report's page."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fodp_lab.report.charts import FO_COLOUR, INK, Chart, Mark, Panel
from fodp_lab.report.inline_svg import inline

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.axisbelow": True, "svg.hashsalt": "fodp", "svg.fonttype": "none", "figure.constrained_layout.use": True,
}  # fmt: skip
_WIDTH = 7.2  # inches: a text width
_POINTS = 125  # of a curve in the page; the records have them all


def save(charts: Iterable[Chart], folder: Path) -> None:
    """Write every chart as PNG (200 dpi) and SVG; the same charts give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        with _figure(*_layout(chart)) as (figure, axes):
            for axis, panel in zip(axes.flat, chart.panels, strict=False):
                _panel(axis, panel, chart.kind)
            for axis in list(axes.flat)[len(chart.panels) :]:
                axis.set_axis_off()
            if chart.kind == "lines":
                _share_labels(axes)
            _legend(figure)
            figure.suptitle(chart.title, fontsize=10)
            figure.savefig(folder / f"{chart.name}.png", dpi=200, metadata={"Software": None})
            _save_svg(figure, folder / f"{chart.name}.svg")


def panels(chart: Chart) -> Iterator[str]:
    """Each panel of a chart as an SVG element of its own, without legend: a page lays them out as it has room."""
    for number, panel in enumerate(chart.panels):
        size = (3.7, 2.5) if chart.kind == "lines" else (4.2, _height(chart, panel))
        out = io.StringIO()
        with _figure(size, 1, 1) as (figure, axes):
            _panel(axes[0, 0], panel, chart.kind, thin=True)
            figure.draw_without_rendering()  # lays it out
            _save_svg(figure, out, transparent=True)
        words = f"{chart.title}{': ' if panel.title else ''}{panel.title}", panel.described(chart.kind)
        yield inline(out.getvalue(), f"{chart.name}-{number}", *words, [mark.label for mark in panel.marks])


@contextmanager
def _figure(size: tuple[float, float], down: int, across: int) -> Iterator[tuple[Any, Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(_STYLE):  # type: ignore[arg-type]
        figure, axes = plt.subplots(down, across, figsize=size, squeeze=False)
        yield figure, axes
        plt.close(figure)


def _save_svg(figure: Any, out: Any, transparent: bool = False) -> None:
    figure.set_layout_engine("none")  # it is laid out already
    figure.savefig(out, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})


def _layout(chart: Chart) -> tuple[tuple[float, float], int, int]:
    """Size in inches, panels down, panels across."""
    across = min(2, len(chart.panels)) if chart.kind != "lines" or len(chart.panels) > 3 else len(chart.panels)
    down = -(-len(chart.panels) // across)
    if chart.kind == "lines":
        return (_WIDTH if across > 1 else 4.6, 2.6 * down + 0.75), down, across
    tallest = max(_height(chart, panel) for panel in chart.panels)
    return (_WIDTH if across > 1 else 5.6, tallest * down + 0.6), down, across


def _height(chart: Chart, panel: Panel) -> float:
    return (0.22 if chart.kind == "dots" else 0.36) * len(panel.rows) + 0.7


def _panel(axis: Any, panel: Panel, kind: str, thin: bool = False) -> None:
    if kind == "lines":
        _lines(axis, panel, thin)
    else:
        _rows(axis, panel, kind)


def _lines(axis: Any, panel: Panel, thin: bool) -> None:
    for number, mark in enumerate(panel.marks):
        colour, main = _colour(mark), mark.colour in (INK, FO_COLOUR)
        every = -(-len(mark.y) // _POINTS) if thin else 1
        keep = slice((len(mark.y) - 1) % every, None, every)  # the last point stays
        axis.plot(
            mark.x[keep], mark.y[keep], color=colour, label=mark.label, lw=1.5 if main else 1.1,
            ls=(0, (4, 1.5)) if mark.dashed else "-", zorder=3 if main else 2, gid=f"mark-{number}",
        )  # fmt: skip
        if mark.low:
            axis.fill_between(mark.x[keep], mark.low[keep], mark.high[keep], color=colour, alpha=0.12, lw=0)
    axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    axis.margins(x=0.01)


def _share_labels(axes: Any) -> None:
    """What the first panel says on its left is not said again within a row."""
    for axis in axes[:, 1:].flat:
        if axis.get_ylabel() == axes[0, 0].get_ylabel():
            axis.set_ylabel("")


def _rows(axis: Any, panel: Panel, kind: str) -> None:
    places = {row: -number for number, row in enumerate(panel.rows)}
    shared = len({len(mark.x) for mark in panel.marks}) == 1 and len(panel.marks) > 1 and kind == "bars"
    step = 0.38 if shared else (0.26 if sum(len(mark.x) for mark in panel.marks) > len(panel.rows) else 0.0)
    for number, mark in enumerate(panel.marks):
        shift = step * ((len(panel.marks) - 1) / 2 - number) if step else 0.0
        at = [places[str(row)] + shift for row in mark.x]
        error = None
        if mark.low:
            below = [y - low for y, low in zip(mark.y, mark.low, strict=True)]
            error = [below, [high - y for y, high in zip(mark.y, mark.high, strict=True)]]
        if kind == "bars":
            axis.barh(at, mark.y, height=0.36, color=_colour(mark), label=mark.label, xerr=error,
                      error_kw=dict(lw=1, capsize=2))  # fmt: skip
            for place, y, high in zip(at, mark.y, mark.high or mark.y, strict=True):
                axis.annotate(f"{y:.2f}" if y > 0.6 else f"{y:.3f}", (max(y, high), place), xytext=(3, 0),
                              textcoords="offset points", va="center", fontsize=7)  # fmt: skip
        else:
            face = "white" if mark.hollow else _colour(mark)
            axis.errorbar(mark.y, at, xerr=error, fmt="o", ms=4.2, color=_colour(mark), mfc=face, lw=1.2, capsize=2,
                          label=mark.label)  # fmt: skip
    for value, label in panel.references:
        style = dict(ls=":", lw=1.2, label=label) if label else dict(ls="-", lw=0.8)
        axis.axvline(value, color="black", alpha=0.7, zorder=1, **style)
    axis.set_yticks(list(places.values()), list(places))
    axis.set_ylim(-len(places) + 0.4, 0.6)
    axis.grid(axis="y", visible=False)
    axis.set(title=panel.title, xlabel=panel.xlabel)
    if kind == "dots":
        axis.margins(x=0.08)


def _legend(figure: Any) -> None:
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        columns = len(entries) if len(entries) <= 5 else 4 if figure.get_figwidth() > 5 else 3
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)


def _colour(mark: Mark) -> str:
    return "black" if mark.colour == INK else mark.colour
