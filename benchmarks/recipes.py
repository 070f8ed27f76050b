"""Recipes without a search, compared on validation data: how `fodp.methods.recipe` is chosen.

    python benchmarks/recipes.py [--only NAME ...] [--settings NAME ...] [--seeds 2001 2002 2003 2004]

The settings of the utility comparison, scored on validation data alone and with seeds that no comparison uses. Beside
the candidates stands DP-SGD with flat clipping at the rate that the comparison's search had found. Runs are kept
(`--out`), so another call computes what is missing. Needs FODP_DATA, as `fodp reproduce utility` does.
"""

import argparse
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
KRONECKER, EMA = dict(shape="kronecker"), dict(average="ema")
FRACTIONAL, FITTED = "fo-noise", dict(order=None)


def _candidate(label: str, method: str = "dp-sgd", **params: Any) -> Row:
    return Row(label, method, {**params, "lr": "auto"}, rates=())


CANDIDATES = (
    _candidate("fan-in", **FAN_IN),
    _candidate("fan-in, rule", **FAN_IN, **RULE),
    _candidate("fan-in, linear", **FAN_IN, **LINEAR),
    _candidate("fan-in, linear, rule", **FAN_IN, **LINEAR, **RULE),
    _candidate("kronecker", **KRONECKER),
    _candidate("kronecker, rule", **KRONECKER, **RULE),
    _candidate("kronecker, linear", **KRONECKER, **LINEAR),
    _candidate("kronecker, linear, rule", **KRONECKER, **LINEAR, **RULE),
    _candidate("fractional noise, fan-in", FRACTIONAL, **FITTED, **FAN_IN),
    _candidate("fractional noise, fan-in, linear", FRACTIONAL, **FITTED, **FAN_IN, **LINEAR),
    _candidate("fractional noise, kronecker, linear", FRACTIONAL, **FITTED, **KRONECKER, **LINEAR),
    _candidate("fractional noise, fan-in, rule", FRACTIONAL, **FITTED, **FAN_IN, **RULE),
    _candidate("fractional noise, kronecker, rule", FRACTIONAL, **FITTED, **KRONECKER, **RULE),
    _candidate("fractional noise, fan-in, linear, rule", FRACTIONAL, **FITTED, **FAN_IN, **LINEAR, **RULE),
    _candidate("fractional noise, kronecker, linear, rule", FRACTIONAL, **FITTED, **KRONECKER, **LINEAR, **RULE),
    _candidate("fan-in, EMA", **FAN_IN, **EMA),
    _candidate("fractional noise, fan-in, EMA", FRACTIONAL, **FITTED, **FAN_IN, **EMA),
    _candidate("fractional noise, kronecker, EMA", FRACTIONAL, **FITTED, **KRONECKER, **EMA),
    _candidate("fractional noise, fan-in, trapezoid", FRACTIONAL, **FITTED, **FAN_IN, **TRAPEZOID),
    _candidate("fractional noise, kronecker, trapezoid", FRACTIONAL, **FITTED, **KRONECKER, **TRAPEZOID),
    _candidate("fan-in, EMA, rule", **FAN_IN, **EMA, **RULE),
    _candidate("fan-in, trapezoid, rule", **FAN_IN, **TRAPEZOID, **RULE),
    _candidate("fractional noise, fan-in, trapezoid, rule", FRACTIONAL, **FITTED, **FAN_IN, **TRAPEZOID, **RULE),
    _candidate("fractional noise, kronecker, trapezoid, rule", FRACTIONAL, **FITTED, **KRONECKER, **TRAPEZOID, **RULE),
    _candidate("fractional noise, fan-in, EMA, rule", FRACTIONAL, **FITTED, **FAN_IN, **EMA, **RULE),
    _candidate("fractional noise, kronecker, EMA, rule", FRACTIONAL, **FITTED, **KRONECKER, **EMA, **RULE),
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
        for trial in trials:
            print(f"\n{trial.name}")
            base = _scores(runner, wanted.get((trial.name, BASELINE), []))
            for label in (BASELINE, *(row.label for row in rows)):
                scores = _scores(runner, wanted.get((trial.name, label), []))
                if not scores:
                    continue
                against = [100 * (a - b) for a, b in zip(scores, base, strict=True)] if base else []
                told = (
                    f"{mean(against):+6.2f}" + (f" ± {stdev(against):.2f}" if len(against) > 1 else "")
                    if against
                    else ""
                )
                print(f"  {label:40s} {100 * mean(scores):6.2f}  {told}")


def _scores(runner: Runner, specs: list[RunSpec]) -> list[float]:
    return [runner.records.get(spec.key, code_of(spec))["final_accuracy"] for spec in specs]  # type: ignore[index]


if __name__ == "__main__":
    main()
