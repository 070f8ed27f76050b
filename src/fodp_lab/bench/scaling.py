"""Cost per step against parameters, window and batch, each over a factor of 100, with a fitted power."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from fodp_lab.bench.contenders import fodp_contender
from fodp_lab.bench.measure import Say, WorkerError, interleaved

# What is varied on the paper's MLP with FO-DP-SGD K=8: the first layer's width, K, the expected lot.
AXES: dict[str, tuple[int, ...]] = {
    "parameters": (16, 35, 75, 160, 345, 745, 1600),
    "window": (2, 4, 9, 20, 43, 93, 200),
    "batch": (20, 43, 93, 200, 431, 928, 2000),
}


def scaling(turns: int, burst_seconds: float, say: Say, axes: dict[str, Sequence[int]] | None = None) -> Any:
    """For every axis the points (x, milliseconds) and the fit a + b·x^p."""
    return {axis: _axis(axis, values, turns, burst_seconds, say) for axis, values in (axes or AXES).items()}


def _axis(axis: str, values: Sequence[int], turns: int, burst_seconds: float, say: Say) -> dict[str, Any]:
    specs, warm_up = {}, {}
    for value in values:
        contender = fodp_contender(str(value), "fo-dp-sgd", window=value if axis == "window" else 8)
        changes = {"parameters": {"width": value}, "batch": {"batch": value}}.get(axis, {})
        specs[str(value)], warm_up[str(value)] = contender.spec("mlp", **changes), contender.warm_up
    times, workers, failed = interleaved(
        specs, warm_up, 1, turns, burst_seconds, lambda text: say(f"{axis}: {text}")
    )  # fmt: skip
    if failed:
        raise WorkerError(next(f"{axis} {name}: {why}" for name, why in failed.items()))
    xs = [workers[name].parameters if axis == "parameters" else int(name) for name in times]
    milliseconds = [round(1e3 * statistics.median(seconds), 4) for seconds in times.values()]
    return {"x": xs, "milliseconds": milliseconds, **fit(xs, milliseconds)}


def fit(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """The best a + b·x^p with a, b ≥ 0 by relative error: p is one for a cost that is linear beside a fixed part."""
    x, y = np.asarray(xs, dtype=float) / max(xs), np.asarray(ys, dtype=float)
    found = []
    for power in np.arange(0.5, 2.001, 0.01):
        (fixed, growing), error = nnls(np.stack((np.ones_like(x), x**power), axis=1) / y[:, None], np.ones_like(y))
        found.append((error, power, fixed, growing))
    _, power, fixed, growing = min(found)
    return {"exponent": round(float(power), 2), "fixed_ms": float(fixed), "growing_ms": float(growing)}
