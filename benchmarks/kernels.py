"""What each compiled loop saves of a step: the same trainer with the loop and without it, in turns, on one thread.

    make bench-kernels

Prints the median of the paired ratios (without over with) and its middle 80%, and writes them to docs/kernels.json,
from which `make docs` makes a table in docs/performance.md. Loops that are no longer there keep the rows that were
measured when they were: a loop stays if it saves 5% of a step of some workload, with and without AVX-512.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fodp.cli._malloc import keep_freed_memory
from fodp_lab.bench.measurements import conditions
from fodp_lab.bench.steps import private
from fodp_lab.bench.workloads import WORKLOADS

RESULTS = Path(__file__).parents[1] / "docs" / "kernels.json"
SETTLE = 35  # steps that fill the longest window
BURST_SECONDS = 0.15

# What a module sees that asks for compiled loops and gets none.
WITHOUT = SimpleNamespace(library=lambda: None, library_for=lambda *tensors: None, can_read=lambda *tensors: False)

DP_SGD: tuple[str, dict[str, Any]] = ("dp-sgd", {})


def fo(window: int) -> tuple[str, dict[str, Any]]:
    return "fo-dp-sgd", {"window": window}


# A loop, the modules that use it, and the steps it may matter for.
LOOPS: dict[str, tuple[tuple[str, ...], list[tuple[str, tuple[str, dict[str, Any]]]]]] = {
    "normals": (("fodp.noise.streams",), [("mlp", DP_SGD), ("embedding", DP_SGD)]),
    "window": (("fodp.memory.passes",), [(w, fo(k)) for w in ("mlp", "embedding") for k in (8, 32)]),
    "tables": (("fodp.clipping.layers.embeddings",), [("embedding", DP_SGD)]),
    "squares": (("fodp.clipping.layers.uses",), [("mlp", DP_SGD)]),
}


def compared(step: Callable[[], None], modules: list[Any], rounds: int) -> dict[str, float]:
    """Ratios of the time of a step without the loop to that with it, burst by burst in turns."""
    for _ in range(SETTLE if seconds(step, 1) < 0.1 else 2):
        step()
    count = max(3, round(BURST_SECONDS / seconds(step, 3)))
    ratios, with_it = [], []
    for turn in range(rounds):
        pair = {}
        for off in (False, True) if turn % 2 else (True, False):
            pair[off] = without(modules, lambda: seconds(step, count)) if off else seconds(step, count)
        ratios.append(pair[True] / pair[False])
        with_it.append(pair[False])
    ratios.sort()
    tenth = len(ratios) // 10
    return {
        "milliseconds": round(1e3 * statistics.median(with_it), 3),
        "ratio": round(statistics.median(ratios), 4),
        "low": round(ratios[tenth], 4),
        "high": round(ratios[-1 - tenth], 4),
    }


def without(modules: list[Any], work: Callable[[], float]) -> float:
    """The work while these modules get no compiled loops."""
    before = [module.kernels for module in modules]
    for module in modules:
        module.kernels = WITHOUT
    try:
        return work()
    finally:
        for module, own in zip(modules, before, strict=True):
            module.kernels = own


def seconds(step: Callable[[], None], count: int) -> float:
    """Median time of some steps in a row, of this thread alone."""
    spent = []
    for _ in range(count):
        start = time.thread_time()
        step()
        spent.append(time.thread_time() - start)
    return statistics.median(spent)


def named(workload: str, method: str, params: dict[str, Any]) -> str:
    return f"{workload}, {method}" + (f" K={params['window']}" if "window" in params else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of bursts, an even number (default 20)")
    parser.add_argument("--only", nargs="+", choices=LOOPS, metavar="LOOP", help="these loops only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"loops": {}}
    where = conditions()
    stored["conditions"] = {name: where[name] for name in ("processor", "cores", "torch", "python", "system")}
    stored["conditions"]["avx512"] = "avx512f" in Path("/proc/cpuinfo").read_text()
    for loop in options.only or LOOPS:
        names, steps = LOOPS[loop]
        modules, rows = [importlib.import_module(name) for name in names], {}
        for workload, (method, params) in steps:
            found = compared(private(WORKLOADS[workload], method, 0, params)[0], modules, options.rounds)
            rows[named(workload, method, params)] = found
            span = f"[{found['low']:.3f}, {found['high']:.3f}]"
            print(f"{loop:24} {named(workload, method, params):36} {found['ratio']:6.3f} {span}", flush=True)
        stored["loops"][loop] = {"kept": True, "rows": rows}
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
