"""What the records say, arranged by experiment. Nothing is computed here that a record does not imply."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fodp import accounting
from fodp_lab.paper import fair
from fodp_lab.paper.catalog import EXPERIMENTS, SEEDS, Experiment, quick
from fodp_lab.paper.records import Records
from fodp_lab.paper.spec import RunSpec

Record = dict[str, Any]
BySeed = dict[int, float]
FIELDS = ("run", "seed", "final_accuracy", "best_accuracy", "final_loss", "final_epsilon", "curve", "code", "at")


@dataclass(frozen=True)
class Line:
    """One row of an experiment with its recorded runs, by seed."""

    panel: str
    label: str
    spec: RunSpec
    records: dict[int, Record]

    def values(self, name: str) -> BySeed:
        """One number of the record for each seed."""
        return {seed: float(record[name]) for seed, record in self.records.items()}

    @property
    def final(self) -> BySeed:
        """Accuracy after the last step."""
        return self.values("final_accuracy")

    @property
    def average(self) -> BySeed:
        """Accuracy averaged over all epochs: how high the whole trajectory lies."""
        return {seed: float(np.mean(record["curve"]["accuracy"])) for seed, record in self.records.items()}

    @property
    def late(self) -> BySeed:
        """Accuracy averaged over the second half of training."""
        curves = {seed: record["curve"]["accuracy"] for seed, record in self.records.items()}
        return {seed: float(np.mean(curve[len(curve) // 2 :])) for seed, curve in curves.items()}

    @property
    def steps(self) -> tuple[int, ...]:
        """Where the curve has its points."""
        return tuple(next(iter(self.records.values()))["curve"]["steps"]) if self.records else ()

    @property
    def epochs(self) -> list[float]:
        """The same in epochs."""
        return [step * self.spec.sampling_rate for step in self.steps]

    @property
    def curves(self) -> NDArray[np.float64]:
        """Accuracy, one row per seed."""
        return np.array([record["curve"]["accuracy"] for record in self.records.values()], dtype=float)

    @property
    def epsilon(self) -> float | None:
        """ε of the whole run; None without a record or without privacy."""
        return next(iter(self.records.values()))["final_epsilon"] if self.records else None

    @property
    def epsilons(self) -> list[float]:
        """ε at each point of the curve."""
        return list(_epsilon_curve(_Hashable(self.spec), self.steps))

    def to_reach(self, target: float) -> BySeed:
        """The first epoch at which the mean of five scores is at the target; the last epoch if there is none."""
        found = {}
        for seed, record in self.records.items():
            smooth = np.convolve(record["curve"]["accuracy"], np.ones(5) / 5, mode="valid")
            reached = np.flatnonzero(smooth >= target)
            found[seed] = self.epochs[int(reached[0]) + 4] if len(reached) else self.epochs[-1]
        return found


class _Hashable:
    """A spec as a key of the cache: runs of one event schedule share their ε curve, whatever the seed."""

    def __init__(self, spec: RunSpec):
        self.plan = spec.with_(seed=0).plan()
        self.words = (self.plan.events(), self.plan.delta, self.plan.accountant)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self.words == other.words

    def __hash__(self) -> int:
        return hash(self.words)


@cache
def _epsilon_curve(of: _Hashable, steps: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(accounting.epsilon_curve(of.plan.events(), of.plan.delta, of.plan.accountant, steps))


class Results:
    """Everything recorded in one folder; files and runs may be missing."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.paper = Records(self.folder / "paper.jsonl", FIELDS)
        self.fair_records = Records(self.folder / "fair.jsonl", FIELDS)
        self.rounds = _latest(Records(self.folder / "runtime.jsonl", ("seconds", "steps", "code", "at")))
        self.quick = not self._any(lambda spec: spec) and self._any(quick)
        self.fair = fair.Comparison(fair.rows_in(self.folder), self.fair_records)
        as_quick = fair.Comparison(fair.rows_in(self.folder), self.fair_records, fair.QUICK)
        if (self.quick or not self.paper) and any(self._finals(as_quick)):
            self.fair, self.quick = as_quick, True

    def _any(self, change: Callable[[RunSpec], RunSpec]) -> bool:
        return any(self.paper.get(change(spec).key) for e in EXPERIMENTS.values() for spec in e.runs(1))

    @staticmethod
    def _finals(comparison: fair.Comparison) -> Iterator[BySeed]:
        for setting in comparison.protocol.settings:
            for row in comparison.rows.values():
                yield comparison.accuracies(row, setting)

    @cached_property
    def lines(self) -> dict[str, list[Line]]:
        """The rows of every experiment, in the catalog's order, empty ones too."""
        return {name: self._lines(experiment) for name, experiment in EXPERIMENTS.items()}

    def _lines(self, experiment: Experiment) -> list[Line]:
        found = []
        for row in experiment.rows:
            spec = quick(row.spec) if self.quick else row.spec
            seeds = range(max(experiment.seeds, SEEDS))  # what another experiment asked for more often counts here too
            records = {seed: self.paper.get(spec.with_(seed=seed).key) for seed in seeds}
            found.append(Line(row.panel, row.label, spec, {s: r for s, r in records.items() if r is not None}))
        return found

    @cached_property
    def runtime(self) -> dict[str, list[float]]:
        """Seconds of each method's turns, side by side."""
        labels = self.rounds[0]["seconds"] if self.rounds else ()
        return {label: [record["seconds"][label] for record in self.rounds] for label in labels}

    def line(self, experiment: str, label: str, panel: str | None = None) -> Line:
        """One row by its name."""
        return next(x for x in self.lines[experiment] if x.label == label and panel in (None, x.panel))

    def panel(self, experiment: str, panel: str) -> list[Line]:
        """The rows of one panel."""
        return [line for line in self.lines[experiment] if line.panel == panel]

    def missing(self, experiment: str) -> tuple[int, int]:
        """How many runs of an experiment are recorded, and how many there should be."""
        lines, seeds = self.lines[experiment], EXPERIMENTS[experiment].seeds
        return sum(sum(seed < seeds for seed in line.records) for line in lines), len(lines) * seeds

    def used(self) -> Sequence[Record]:
        """All records that the report reads."""
        return [*self.paper, *self.fair_records, *self.rounds]

    def versions(self, name: str) -> Counter[str]:
        """How many runs come from each version of the code (or of torch, or of Python)."""
        return Counter(str(record[name]) for record in (*self.paper, *self.fair_records) if name in record)


def _latest(records: Iterable[Record]) -> list[Record]:
    """The rounds of one version of the code: of the one with most of them, and of the latest of these."""
    by_code: dict[str, list[Record]] = {}
    for record in records:
        by_code.setdefault(record["code"], []).append(record)
    return max(by_code.values(), key=lambda rounds: (len(rounds), max(r["at"] for r in rounds)), default=[])


def panels(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """Rows by panel, in order."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.panel, []).append(line)
    return found
