"""Recipes without a search, compared on validation data: how `fodp.methods.recipe` is chosen.

    python benchmarks/recipes.py [--only NAME ...] [--settings NAME ...] [--seeds 2001 2002 2003 2004]

The settings of the utility comparison, scored on validation data alone and with seeds that no comparison uses. Beside
the candidates stands DP-SGD with flat clipping at the rate that the comparison's search had found. Runs are kept
(`--out`), so another call computes what is missing. Needs FODP_DATA, as `fodp reproduce utility` does.
"""

import argparse
import math
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fodp_lab.paper import utility
from fodp_lab.paper.code_version import code_of
from fodp_lab.paper.fair import BASELINE, Row
from fodp_lab.paper.runner import Runner
from fodp_lab.paper.spec import RunSpec

RESULTS = Path(__file__).parents[1] / "results"
FAN_IN, RULE, LINEAR = dict(shape="fan-in"), dict(rate_rule="transcript"), dict(lr_schedule="linear")
TRAPEZOID = dict(lr_schedule="trapezoid")
KRONECKER, TRANSCRIPT, EMA = dict(shape="kronecker"), dict(shape="transcript"), dict(average="ema")
FRACTIONAL, FITTED = "fo-noise", dict(order=None)


def _candidate(label: str, method: str = "dp-sgd", **params: Any) -> Row:
    return Row(label, method, {**params, "lr": "auto"}, rates=())


CANDIDATES = (
    _candidate("fan-in", **FAN_IN),
    _candidate("fan-in, c=1", **FAN_IN, auto_ratio=1.0),
    _candidate("fan-in, c=4", **FAN_IN, auto_ratio=4.0),
    _candidate("fan-in, rule", **FAN_IN, **RULE),
    _candidate("fan-in, linear", **FAN_IN, **LINEAR),
    _candidate("fan-in, linear, rule", **FAN_IN, **LINEAR, **RULE),
    _candidate("fan-in, trapezoid, rule", **FAN_IN, **TRAPEZOID, **RULE),
    _candidate("fan-in, EMA", **FAN_IN, **EMA),
    _candidate("fan-in, EMA, rule", **FAN_IN, **EMA, **RULE),
    _candidate("kronecker", **KRONECKER),
    _candidate("kronecker, rule", **KRONECKER, **RULE),
    _candidate("kronecker, linear", **KRONECKER, **LINEAR),
    _candidate("kronecker, linear, rule", **KRONECKER, **LINEAR, **RULE),
    _candidate("transcript", **TRANSCRIPT),
    _candidate("transcript, a block a row", **TRANSCRIPT, shape_blocks="row"),
    _candidate("fractional noise, fan-in", FRACTIONAL, **FITTED, **FAN_IN),
    _candidate("fractional noise, fan-in, linear", FRACTIONAL, **FITTED, **FAN_IN, **LINEAR),
    _candidate("fractional noise, fan-in, trapezoid", FRACTIONAL, **FITTED, **FAN_IN, **TRAPEZOID),
    _candidate("fractional noise, fan-in, EMA", FRACTIONAL, **FITTED, **FAN_IN, **EMA),
    _candidate("fractional noise, fan-in, EMA, c=1", FRACTIONAL, **FITTED, **FAN_IN, **EMA, auto_ratio=1.0),
    _candidate("fractional noise, fan-in, EMA, c=3", FRACTIONAL, **FITTED, **FAN_IN, **EMA, auto_ratio=3.0),
    _candidate("fractional noise, fan-in, EMA, c=4", FRACTIONAL, **FITTED, **FAN_IN, **EMA, auto_ratio=4.0),
    _candidate("fractional noise, kronecker, linear", FRACTIONAL, **FITTED, **KRONECKER, **LINEAR),
    _candidate("fractional noise, kronecker, trapezoid", FRACTIONAL, **FITTED, **KRONECKER, **TRAPEZOID),
    _candidate("fractional noise, kronecker, EMA", FRACTIONAL, **FITTED, **KRONECKER, **EMA),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="candidates")
    parser.add_argument("--settings", nargs="*", metavar="NAME", help="parts of settings' names")
    parser.add_argument("--seeds", nargs="*", type=int, default=[2001, 2002, 2003, 2004])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the searches are recorded")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in CANDIDATES if not options.only or row.label in options.only]
    trials = [t for t in utility.TRIALS if not options.settings or any(name in t.name for name in options.settings)]
    searched = utility.Suite(
        utility.Records(options.results / "utility.jsonl", beside=utility.taken_over(options.results))
    )
    wanted: dict[tuple[str, str], list[RunSpec]] = {}
    for trial in trials:
        comparison = searched.comparisons[trial]
        choice = comparison.choice(comparison.rows[BASELINE], trial.setting)
        baseline = [] if choice is None else [Row(BASELINE, "dp-sgd", choice.params)]
        for row in (*baseline, *rows):
            specs = [row.spec(trial.setting, trial.steps, seed=seed, scored_on="validation") for seed in options.seeds]
            wanted[trial.name, row.label] = specs
    with Runner(options.out, options.jobs) as runner:
        for seed in range(len(options.seeds)):
            runner.run([specs[seed] for specs in wanted.values()], f"seed {options.seeds[seed]}")
        scores = {key: _scores(runner, specs) for key, specs in wanted.items()}
    base = {trial: scores.get((trial.name, BASELINE), []) for trial in trials}
    print("| points against DP-SGD | " + " | ".join(trial.name for trial in trials) + " |")
    print("| --- " * (1 + len(trials)) + "|")
    print("| DP-SGD, searched | " + " | ".join(_percent(base[trial]) for trial in trials) + " |")
    for row in rows:
        print(f"| {row.label} | " + " | ".join(_cell(scores[t.name, row.label], base[t]) for t in trials) + " |")


def _cell(scores: list[float], base: list[float]) -> str:
    """The mean paired difference in points and its standard error; the score itself where there is no baseline."""
    differences = [100 * (a - b) for a, b in zip(scores, base, strict=False)]
    if not differences:
        return _percent(scores)
    error = f" ± {stdev(differences) / math.sqrt(len(differences)):.1f}" if len(differences) > 1 else ""
    return f"{mean(differences):+.1f}{error}"


def _percent(scores: list[float]) -> str:
    return f"{100 * mean(scores):.1f}%" if scores else "–"


def _scores(runner: Runner, specs: list[RunSpec]) -> list[float]:
    return [runner.records.get(spec.key, code_of(spec))["final_accuracy"] for spec in specs]  # type: ignore[index]


if __name__ == "__main__":
    main()
