"""Time per step of every method on the paper's MLP, relative to dp-sgd, one thread.

    make bench-methods

Each method is paired with dp-sgd alone, in interleaved bursts: with all in one process the caches of the others
would decide. Several processes, one after the other, for chance makes each faster or slower for all its life. Prints
the median of the paired ratios and its middle 80%.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from fodp.cli._malloc import keep_freed_memory
from fodp.methods import METHODS
from fodp_lab.bench.steps import private
from fodp_lab.bench.workloads import WORKLOADS

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
REFRESH = 250  # dp-is reads all the data every so many steps


def paired(mine: Callable[[], None], other: Callable[[], None], rounds: int, count: int) -> list[tuple[float, float]]:
    """Median step times of both, burst by burst, in turns; the first burst is warm-up."""
    pairs = []
    for turn in range(rounds + 1):
        if turn % 2:
            pairs.append((burst(mine, count), burst(other)))
        else:
            second = burst(other)
            pairs.append((burst(mine, count), second))
    return pairs[1:]


def measured(name: str, rounds: int) -> list[tuple[float, float]]:
    """One method against dp-sgd, both made anew: seconds per step of either in every round."""
    method, _, variant = name.partition(" ")
    step = private(WORKLOADS["mlp"], method, 0, {"variant": variant} if variant else {})[0]
    extra = 0.0
    if method == "dp-is":
        usual = burst(step, REFRESH)  # the first step reads all the data, and checks the engine
        extra = (burst(step, 1) - usual) / REFRESH  # this one reads all the data again
    base = private(WORKLOADS["mlp"], "dp-sgd", 0, {})[0]
    return [(mine + extra, other) for mine, other in paired(step, base, rounds, 2 if variant else BURST)]


def row(name: str, starts: int, rounds: int) -> dict[str, object]:
    """The same in several processes, and its statistics."""
    command = [sys.executable, __file__, "--measure", name, "--rounds", str(rounds)]
    pairs = [pair for _ in range(starts) for pair in json.loads(subprocess.check_output(command))]
    ratios = sorted(mine / other for mine, other in pairs)
    tenth = len(ratios) // 10
    return {
        "method": name,
        "milliseconds": 1e3 * statistics.median(mine for mine, _ in pairs),
        "ratio": statistics.median(ratios),
        "paired_10": ratios[tenth],
        "paired_90": ratios[-1 - tenth],
        "paper": PAPER.get(name),
    }


def burst(step: Callable[[], None], count: int = BURST) -> float:
    """Median time of some steps in a row, of this thread alone: what else runs takes its turns in between."""
    spent = []
    for _ in range(count):
        start = time.thread_time()
        step()
        spent.append(time.thread_time() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=6, help="processes per method (default 6)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of interleaved bursts in each (default 4)")
    everyone = [*METHODS, "dp-sam per-example"]
    parser.add_argument("--only", nargs="+", choices=everyone, metavar="METHOD", help="these methods only")
    parser.add_argument("--json", action="store_true", help="print the result as JSON only")
    parser.add_argument("--measure", metavar="METHOD", help=argparse.SUPPRESS)  # what each process is asked for
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.measure:
        print(json.dumps(measured(options.measure, options.rounds)))
        return
    rows = [row(name, options.starts, options.rounds) for name in options.only or everyone]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'method':20} {'ms':>7} {'/dp-sgd':>8}   {'middle 80% paired':18} {'paper':>6}")
    for found in rows:
        span = f"{found['paired_10']:.2f} to {found['paired_90']:.2f}"
        paper = f"{found['paper']:.2f}" if found["paper"] else ""
        print(f"{found['method']:20} {found['milliseconds']:7.2f} {found['ratio']:8.2f}   {span:18} {paper:>6}")


if __name__ == "__main__":
    main()
