"""Time per step of every method on the paper's MLP, relative to dp-sgd, in interleaved bursts, one thread.

make bench-methods
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch

from fodp.bench.steps import private
from fodp.bench.workloads import WORKLOADS
from fodp.methods import METHODS

BURST = 30  # steps in a row before the next contender: training runs in a steady state

# The paper's table of relative runtimes, where it has the method.
PAPER = {
    "dp-adam": 1.29,
    "dp-adamw": 1.11,
    "dp-is": 1.11,
    "dp-sam": 1.57,
    "dp-sat": 1.50,
    "dp-adam-ac": 1.03,
    "fo-dp-sgd": 1.02,
}


def burst(step: Callable[[], None], count: int) -> float:
    """Median time of some steps in a row."""
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of interleaved bursts (default 8)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mlp = WORKLOADS["mlp"]
    contenders = {name: private(mlp, name, 0, {})[0] for name in METHODS}
    contenders["dp-sam per-example"] = private(mlp, "dp-sam", 0, {"variant": "per-example"})[0]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)
    start = time.perf_counter()
    contenders["dp-is"]()  # its first step reads all the data, as every 250th does
    refresh = time.perf_counter() - start
    for turn in range(options.rounds + 1):
        for name, step in order.sample(list(contenders.items()), len(contenders)):
            spent = burst(step, 2 if name == "dp-sam per-example" else BURST)
            if turn:  # the first round is warm-up
                times[name].append(spent)
    base = times["dp-sgd"]
    rows = []
    for name, spent in times.items():
        extra = refresh / 250 if name == "dp-is" else 0.0
        ratios = sorted((mine + extra) / other for mine, other in zip(spent, base, strict=True))
        tenth = len(ratios) // 10
        rows.append(
            {
                "method": name,
                "milliseconds": 1e3 * (statistics.median(spent) + extra),
                "ratio": statistics.median(ratios),
                "paired_10": ratios[tenth],
                "paired_90": ratios[-1 - tenth],
                "paper": PAPER.get(name),
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'method':20} {'ms':>7} {'/dp-sgd':>8}   {'middle 80% paired':18} {'paper':>6}")
    for row in rows:
        span = f"{row['paired_10']:.2f} to {row['paired_90']:.2f}"
        paper = f"{row['paper']:.2f}" if row["paper"] else ""
        print(f"{row['method']:20} {row['milliseconds']:7.2f} {row['ratio']:8.2f}   {span:18} {paper:>6}")


if __name__ == "__main__":
    main()
