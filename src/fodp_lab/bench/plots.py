"""Pictures of the results."""

from pathlib import Path
from typing import Any

import numpy as np

from fodp_lab.bench.measure import paired
from fodp_lab.bench.measurements import Measured
from fodp_lab.bench.performance_page import PLOT, SCALING_PLOT
from fodp_lab.bench.targets import PLAIN, TITLES

_FLOOR = "#90b4d8"
_COLOURS = {
    "private": "#2b6cb0",
    "unkeyed": _FLOOR,
    "by hand": _FLOOR,
    "window read": _FLOOR,
    "opacus": "#c05621",
    "jax-privacy": "#975a9e",
}


def draw(results: Measured, folder: Path) -> None:
    """Write a picture per measured part."""
    folder.mkdir(parents=True, exist_ok=True)
    workloads = {n: m for n, m in results.get("workloads", {}).items() if PLAIN in m["contenders"]}
    if workloads:
        _ratios(workloads, folder / PLOT)
    if "scaling" in results:
        _scaling(results["scaling"], folder / SCALING_PLOT)


def _ratios(workloads: dict[str, Any], out: Path) -> None:
    """Bars of time per step over plain training, by contender."""
    plt = _pyplot()
    heights = [len(m["contenders"]) - 1 for m in workloads.values()]
    figure, axes = plt.subplots(
        len(workloads), 1, figsize=(8, 1.2 + 0.28 * sum(heights) + 0.6 * len(workloads)), layout="constrained",
        squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for axis, (name, measured) in zip(axes[:, 0], workloads.items(), strict=True):
        rows = measured["contenders"]
        others = [contender for contender in rows if contender != PLAIN]
        for place, contender in enumerate(others):
            row = rows[contender]
            ratio, low, high = paired(row["milliseconds"], rows[PLAIN]["milliseconds"])
            axis.barh(place, ratio - 1, left=1, color=_COLOURS[row["kind"]])
            axis.plot([low, high], [place, place], color="black", linewidth=1.5)
            axis.text(max(ratio, high) * 1.04, place, f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", va="center")
        axis.set_yticks(range(len(others)), others)
        axis.invert_yaxis()
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", title=f"{TITLES[name]}, batch {measured['batch']}")
        axis.title.set_fontsize(10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("time per step over plain SGD (log scale; lines: intervals)")
    axes[-1, 0].margins(x=0.15)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def _scaling(parts: dict[str, Any], out: Path) -> None:
    """Time per step against each axis, with the fit."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(parts), figsize=(3.6 * len(parts), 3.4), layout="constrained", squeeze=False)
    for axis, (name, part) in zip(axes[0], parts.items(), strict=True):
        x = np.asarray(part["x"], dtype=float)
        line = np.geomspace(x.min(), x.max(), 100)
        axis.plot(line, part["fixed_ms"] + part["growing_ms"] * (line / x.max()) ** part["exponent"], color="#90b4d8")
        axis.plot(x, part["milliseconds"], "o", color="#2b6cb0")
        axis.set(xscale="log", yscale="log", xlabel=name, title=f"fixed + b·x^{part['exponent']:.2f}")
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3, which="both")
    axes[0, 0].set_ylabel("milliseconds per step")
    figure.savefig(out, dpi=150)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
