"""What each compiled loop saves of a step: the same trainer with the loop and without it, in turns, on one thread.

    make bench-kernels

Prints the median of the paired ratios (without over with) and its middle 80%, and writes them to docs/kernels.json,
from which `make docs` makes a table in docs/performance.md. Loops that are no longer there keep the rows that were
measured when they were: a loop stays if it saves 10% of a step of a model with more than a million parameters.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fodp.cli._malloc import keep_freed_memory
from fodp_lab.bench.measurements import conditions
from fodp_lab.bench.steps import private
from fodp_lab.bench.workloads import WORKLOADS, Transformer, mlp

RESULTS = Path(__file__).parents[1] / "docs" / "kernels.json"
SETTLE = 35  # steps that fill the longest window
BURST_SECONDS = 0.15

# What a module sees that asks for compiled loops and gets none.
WITHOUT = SimpleNamespace(library=lambda: None, library_for=lambda *tensors: None)

# Models with more than a million parameters.
LARGE = {
    "MLP, 1.6M parameters": replace(WORKLOADS["mlp"], model=lambda: mlp(512)),
    "transformer, 1.3M parameters": replace(WORKLOADS["transformer"], model=lambda: Transformer(vocabulary=4000)),
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp-sgd": ("dp-sgd", {}),
    "fo-dp-sgd K=8": ("fo-dp-sgd", {"window": 8}),
    "fo-dp-sgd K=32": ("fo-dp-sgd", {"window": 32}),
}
# The module that uses a loop.
LOOPS = {"normals": "fodp.noise.streams", "window": "fodp.memory.passes"}


def compared(step: Callable[[], None], rounds: int) -> dict[str, dict[str, float]]:
    """For each loop, ratios of the time of a step without it to that with all of them, burst by burst in turns."""
    for _ in range(SETTLE):
        step()
    count = max(3, round(BURST_SECONDS / seconds(step, 3)))
    modules = {loop: importlib.import_module(name) for loop, name in LOOPS.items()}
    ratios: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    with_all = []
    for turn in range(rounds):
        spent = {}
        order = [None, *LOOPS] if turn % 2 else [*reversed(LOOPS), None]
        for loop in order:
            spent[loop] = seconds(step, count) if loop is None else without(modules[loop], lambda: seconds(step, count))
        with_all.append(spent[None])
        for loop, found in ratios.items():
            found.append(spent[loop] / spent[None])
    milliseconds = round(1e3 * statistics.median(with_all), 3)
    return {loop: {"milliseconds": milliseconds, **span(found)} for loop, found in ratios.items()}


def span(ratios: list[float]) -> dict[str, float]:
    """Median and middle 80%."""
    ordered, tenth = sorted(ratios), len(ratios) // 10
    low, high = ordered[tenth], ordered[-1 - tenth]
    return {"ratio": round(statistics.median(ordered), 4), "low": round(low, 4), "high": round(high, 4)}


def without(module: Any, work: Callable[[], float]) -> float:
    """The work while this module gets no compiled loops."""
    before, module.kernels = module.kernels, WITHOUT
    try:
        return work()
    finally:
        module.kernels = before


def seconds(step: Callable[[], None], count: int) -> float:
    """Median time of some steps in a row, of this thread alone."""
    spent = []
    for _ in range(count):
        start = time.thread_time()
        step()
        spent.append(time.thread_time() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="groups of bursts, an even number (default 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"loops": {}}
    where = conditions()
    stored["conditions"] = {name: where[name] for name in ("processor", "cores", "torch", "python", "system")}
    stored["conditions"]["avx512"] = "avx512f" in Path("/proc/cpuinfo").read_text()
    for loop in LOOPS:
        stored["loops"][loop] = {"kept": True, "rows": {}}
    for workload, made in LARGE.items():
        for method, (name, params) in METHODS.items():
            for loop, row in compared(private(made, name, 0, params)[0], options.rounds).items():
                stored["loops"][loop]["rows"][f"{workload}, {method}"] = row
                around = f"[{row['low']:.3f}, {row['high']:.3f}]"
                print(f"{loop:12} {workload}, {method:16} {row['ratio']:6.3f} {around}", flush=True)
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
