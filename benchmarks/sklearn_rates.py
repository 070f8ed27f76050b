"""The estimators of `fodp.sklearn` as they are by default and with other settings: scores on held-out rows.

    python benchmarks/sklearn_rates.py                      the table of docs/scikit-learn.md
    python benchmarks/sklearn_rates.py --ratios 2 4 6 8     how `auto_ratio` was chosen, on other splits

The data sets embedded in scikit-learn, and one made-up regression, for ε = 1, 3 and 8, δ=1e-5, everything else at its
default. A seed draws the split (a fifth is held out), the start and the noise. Accuracy in percent; of a regression R²
in percent. All columns have the same seeds, and differences have their standard error.
"""

import argparse
import math
import warnings
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.model_selection import train_test_split

from fodp.cli._malloc import keep_freed_memory
from fodp.sklearn import PrivateClassifier, PrivateLogisticRegression, PrivateRegressor

# Until 0.1.0: the paper's method with a fixed rate, and the mean over the second half of the fit.
BEFORE = {PrivateClassifier: 1.0, PrivateLogisticRegression: 2.0, PrivateRegressor: 0.5}
FIRST_SEED = {True: 0, False: 100}  # ratios were chosen on other splits than those of the table
_TEN = [(0, 40), (0, 50), (0, 300), (0, 4000), (0, 0.25), (0, 0.5), (0, 0.6), (0, 0.3), (0, 0.5), (0, 0.15)]
_ERRORS = [(0, 4), (0, 6), (0, 30), (0, 700), (0, 0.05), (0, 0.2), (0, 0.6), (0, 0.08), (0, 0.1), (0, 0.05)]
_WORST = [(0, 50), (0, 60), (0, 350), (0, 6000), (0, 0.3), (0, 1.5), (0, 1.8), (0, 0.4), (0, 0.8), (0, 0.3)]
_WINE = [
    (11, 15), (0, 6), (1, 4), (10, 30), (70, 170), (0, 4), (0, 6), (0, 0.7), (0, 4), (1, 13), (0.4, 1.8), (1, 4.5),
    (200, 1700),
]  # fmt: skip
BOUNDS: dict[str, Any] = {
    "digits": (0, 16),
    "breast cancer": [*_TEN, *_ERRORS, *_WORST],
    "wine": _WINE,
    "iris": [(4, 8), (2, 4.5), (1, 7), (0, 2.5)],
    "diabetes": (-0.15, 0.2),
    "made up": (-1, 1),
}
TARGETS = {"diabetes": (0, 350), "made up": (-5, 5)}


def rows_of(name: str) -> tuple[Any, Any]:
    if name == "made up":
        rows = np.random.default_rng(0).uniform(-1, 1, (2000, 5))
        return rows, 3 * rows[:, 0] - rows[:, 1] ** 2 + rows[:, 2] * rows[:, 3]
    return getattr(datasets, "load_" + name.replace(" ", "_"))(return_X_y=True)


def score(name: str, kind: Any, epsilon: float, seed: int, **chosen: Any) -> float:
    """Of one fit, on the fifth that was held out."""
    rows, targets = rows_of(name)
    train, held, train_targets, held_targets = train_test_split(rows, targets, test_size=0.2, random_state=seed)
    public: dict[str, Any] = dict(epsilon=epsilon, delta=1e-5, bounds=BOUNDS[name], random_state=seed, **chosen)
    public["public_size"] = round(len(train), -1)
    if name in TARGETS:
        public["target_bounds"] = TARGETS[name]
    else:
        public["classes"] = len(np.unique(targets))
    return 100 * kind(**public).fit(train, train_targets).score(held, held_targets)


def gain(now: list[float], before: list[float]) -> str:
    """The mean difference with its standard error."""
    each = [a - b for a, b in zip(now, before, strict=True)]
    error = stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return f"{mean(each):+.1f} ± {error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, help="how many; default 10, with --ratios 3")
    parser.add_argument("--data", nargs="+", default=list(BOUNDS), choices=list(BOUNDS), metavar="NAME")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--ratios", type=float, nargs="+", help="columns for these values of auto_ratio")
    options = parser.parse_args()
    first = FIRST_SEED[options.ratios is not None]
    seeds = range(first, first + (options.seeds or (10 if options.ratios is None else 3)))
    ratios = {f"ratio {ratio:g}": dict(params=dict(auto_ratio=ratio)) for ratio in options.ratios or ()}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    head = ["data", "estimator", "ε", "before", *(ratios or ["default", "default − before"])]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
    for name in options.data:
        for kind in [PrivateRegressor] if name in TARGETS else [PrivateClassifier, PrivateLogisticRegression]:
            for epsilon in options.epsilons:
                columns: dict[str, dict[str, Any]] = {"before": dict(method="fo-dp-sgd", lr=BEFORE[kind])}
                columns |= ratios or {"default": {}}
                found = {
                    column: [score(name, kind, epsilon, seed, **chosen) for seed in seeds]
                    for column, chosen in columns.items()
                }
                shown = [f"{mean(each):.1f}" for each in found.values()]
                if not ratios:
                    shown.append(gain(found["default"], found["before"]))
                print(f"| {name} | {kind.__name__} | {epsilon:g} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
