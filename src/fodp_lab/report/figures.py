"""The charts as PNG and SVG, for print."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fodp_lab.report.charts import INK, Chart, Mark, Panel

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.axisbelow": True, "svg.hashsalt": "fodp", "svg.fonttype": "none", "figure.constrained_layout.use": True,
}  # fmt: skip
_WIDTH = 7.2  # inches: a text width


def save(charts: Iterable[Chart], folder: Path) -> None:
    """Write every chart as PNG (200 dpi) and SVG; the same charts give the same files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        with plt.rc_context(_STYLE):  # type: ignore[arg-type]
            figure = _lines(chart) if chart.kind == "lines" else _rows(chart)
            figure.savefig(folder / f"{chart.name}.png", dpi=200, metadata={"Software": None})
            figure.set_layout_engine("none")  # it is laid out already
            figure.savefig(folder / f"{chart.name}.svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)


def _lines(chart: Chart) -> Any:
    from matplotlib import pyplot as plt

    across = len(chart.panels) if len(chart.panels) < 4 else 2
    down = -(-len(chart.panels) // across)
    width = _WIDTH if across > 1 else 4.6
    figure, axes = plt.subplots(down, across, figsize=(width, 2.6 * down + 0.75), squeeze=False)
    for axis, panel in zip(axes.flat, chart.panels, strict=True):
        for mark in panel.marks:
            _line(axis, mark)
        axis.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
        axis.margins(x=0.01)
    for axis, panel in list(zip(axes.flat, chart.panels, strict=True))[1:]:
        if panel.ylabel == chart.panels[0].ylabel and axis not in axes[:, 0]:
            axis.set_ylabel("")
    _finish(figure, chart)
    return figure


def _line(axis: Any, mark: Mark) -> None:
    colour = _colour(mark)
    main = mark.colour in (INK, "#d55e00")
    style = (0, (4, 1.5)) if mark.dashed else "-"
    axis.plot(
        mark.x, mark.y, color=colour, label=mark.label, lw=1.5 if main else 1.1, ls=style, zorder=3 if main else 2
    )
    if mark.low:
        axis.fill_between(mark.x, mark.low, mark.high, color=colour, alpha=0.12, lw=0)


def _rows(chart: Chart) -> Any:
    from matplotlib import pyplot as plt

    across = min(2, len(chart.panels))
    down = -(-len(chart.panels) // across)
    tallest = max(len(panel.rows) for panel in chart.panels)
    height = (0.22 if chart.kind == "dots" else 0.36) * tallest * down + 0.7 * down + 0.6
    figure, axes = plt.subplots(down, across, figsize=(_WIDTH if across > 1 else 5.6, height), squeeze=False)
    for axis, panel in zip(axes.flat, chart.panels, strict=False):
        _row_panel(axis, panel, chart.kind)
    for axis in list(axes.flat)[len(chart.panels) :]:
        axis.set_axis_off()
    _finish(figure, chart)
    return figure


def _row_panel(axis: Any, panel: Panel, kind: str) -> None:
    places = {row: -number for number, row in enumerate(panel.rows)}
    shared = len({len(mark.x) for mark in panel.marks}) == 1 and len(panel.marks) > 1 and kind == "bars"
    step = 0.38 if shared else (0.26 if _overlapping(panel) else 0.0)
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


def _overlapping(panel: Panel) -> bool:
    return sum(len(mark.x) for mark in panel.marks) > len(panel.rows)


def _finish(figure: Any, chart: Chart) -> None:
    entries: dict[str, Any] = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        columns = len(entries) if len(entries) <= 5 else 4 if figure.get_figwidth() > 5 else 3
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(chart.title, fontsize=10)


def _colour(mark: Mark) -> str:
    return "black" if mark.colour == INK else mark.colour
