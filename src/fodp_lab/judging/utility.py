"""What the utility comparison says: standings, one change at a time, and whether its three goals are met."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fodp_lab.judging.results import FIELDS
from fodp_lab.judging.statistics import Difference, paired
from fodp_lab.judging.verdicts import BETTER, Standing, compare
from fodp_lab.paper import utility
from fodp_lab.paper.fair import BASELINE, CEILING
from fodp_lab.paper.records import Records
from fodp_lab.paper.utility import (
    AUGMENTED_ROW,
    FOLLOWED,
    FRACTIONAL_NOISE,
    FRACTIONAL_ROWS,
    OPTIMISED_ROW,
    RECIPE_LABEL,
    RECIPE_ROW,
    UNTUNED,
    Comparison,
    Trial,
)

MET, MISSED, UNKNOWN = "met", "missed", "not decided yet"
UNTUNED_LOSS, RECIPE_LOSS, RECIPE_SHARE, HALVED = 0.015, 0.005, 2 / 3, 0.5

# One change at a time: a row, the row without that change, and what the change is.
CHANGES: tuple[tuple[str, str, str], ...] = (
    ("DP-SGD, fan-in", BASELINE, "shape fan-in"),
    ("DP-SGD, kronecker", BASELINE, "shape kronecker"),
    ("DP-SGD, kronecker", "DP-SGD, fan-in", "shape kronecker instead of fan-in"),
    ("DP-SGD, transcript", BASELINE, "shape from the transcript"),
    ("DP-SGD, per-layer clipping", BASELINE, "clipping by layer"),
    ("DP-SGD, normalised clipping", BASELINE, "normalised instead of clipped"),
    ("FO-DP-SGD", BASELINE, "fractional memory (β=0.65)"),
    ("FO-DP-SGD, fan-in", "DP-SGD, fan-in", "fractional memory, with fan-in"),
    ("DP-Adam", BASELINE, "Adam"),
    ("fractional noise", BASELINE, "fractional noise"),
    ("fractional noise, fan-in", "DP-SGD, fan-in", "fractional noise, with fan-in"),
    ("DP-SGD, fan-in, linear decay, untuned", "DP-SGD, fan-in, untuned", "linear decay, untuned"),
    ("DP-SGD, fan-in, trapezoid, untuned", "DP-SGD, fan-in, untuned", "a trapezoid, untuned"),
    (f"DP-SGD, fan-in{FOLLOWED}{UNTUNED}", "DP-SGD, fan-in, untuned", "the rate by transcript, untuned"),
    ("DP-SGD, fan-in, EMA, untuned", "DP-SGD, fan-in, untuned", "exponential average of iterates, untuned"),
    ("DP-SGD, fan-in, tail average, untuned", "DP-SGD, fan-in, untuned", "tail average of iterates, untuned"),
    ("DP-SGD, fan-in, power-law average, untuned", "DP-SGD, fan-in, untuned", "power-law average of iterates, untuned"),
    ("DP-SGD, kronecker, untuned", "DP-SGD, fan-in, untuned", "shape kronecker instead of fan-in, untuned"),
    ("fractional noise, fan-in, untuned", "DP-SGD, fan-in, untuned", "fractional noise, untuned"),
    (
        "fractional noise, fan-in, trapezoid, untuned",
        "DP-SGD, fan-in, trapezoid, untuned",
        "fractional noise, with a trapezoid, untuned",
    ),
    (RECIPE_LABEL, "DP-SGD, fan-in, EMA, untuned", "fractional noise, with an exponential average, untuned"),
    (OPTIMISED_ROW.label, RECIPE_LABEL, "optimised coefficients of the noise, untuned"),
    (AUGMENTED_ROW.label, RECIPE_LABEL, "four augmented views of each image, at four times the work, untuned"),
)


@dataclass(frozen=True)
class Goal:
    """A goal that was set before the runs, and what they say."""

    words: str
    status: str
    reason: str
    evidence: tuple[str, ...] = ()


class Utility:
    """All that `utility.jsonl` of a folder implies, searches of `fair.jsonl` included; runs may be missing."""

    def __init__(self, folder: str | Path):
        self.records = Records(Path(folder) / "utility.jsonl", FIELDS, beside=utility.taken_over(Path(folder)))
        self.suite = utility.Suite(self.records)
        self.quick = False
        as_quick = utility.Suite(self.records, quick=True)
        if not any(_recorded(self.suite)) and any(_recorded(as_quick)):
            self.suite, self.quick = as_quick, True

    @property
    def trials(self) -> dict[Trial, Comparison]:
        """Every setting with its rows."""
        return self.suite.comparisons

    @cached_property
    def standings(self) -> dict[Trial, list[Standing]]:
        """The rows of each setting with recorded final runs, the best first."""
        return {trial: compare(comparison, trial.setting) for trial, comparison in self.trials.items()}

    @property
    def seeds(self) -> dict[Trial, int]:
        """How many seeds every row of a setting has, at least: 0 where one has none."""
        return {
            trial: min(len(c.accuracies(row, trial.setting)) for row in c.rows.values())
            for trial, c in self.trials.items()
        }

    def difference(self, trial: Trial, label: str, against: str) -> Difference | None:
        """One row minus another, paired by seed; None where fewer than two seeds have both."""
        c = self.trials[trial]
        if label not in c.rows or against not in c.rows:
            return None
        return paired(*(c.accuracies(c.rows[name], trial.setting) for name in (label, against)))

    def validation(self) -> dict[str, dict[Trial, float]]:
        """Validation accuracy by row and setting: of searched rows the best run's."""
        found: dict[str, dict[Trial, float]] = {}
        for trial, c in self.trials.items():
            for label, row in c.rows.items():
                choice = c.choice(row, trial.setting)
                if label != CEILING and choice is not None and choice.validation == choice.validation:
                    found.setdefault(label, {})[trial] = choice.validation
        return found

    def goals(self) -> list[Goal]:
        """The goals of the comparison; the first is judged for lr="auto" alone and with the rate rule."""
        words = "with no tuning run ({}) at most 1.5 points below the searched row of the same method, in every setting"
        return [
            self._untuned(words.format('lr="auto"'), UNTUNED),
            self._untuned(words.format('lr="auto", rate_rule="transcript"'), FOLLOWED + UNTUNED),
            self._recipe(),
            self._fractional(),
        ]

    def _untuned(self, words: str, suffix: str) -> Goal:
        found, open_pairs = [], 0
        for trial, c in self.trials.items():
            for label in c.rows:
                searched = label.removesuffix(suffix)
                if searched != label and searched in c.rows:
                    d = self.difference(trial, label, searched)
                    open_pairs += d is None
                    found += [] if d is None else [(f"{trial.name}, {searched}", d)]
        return _judged(words, found, open_pairs, lambda d: d.mean >= -UNTUNED_LOSS)

    def _recipe(self) -> Goal:
        words = (
            "the recipe never worse than searched DP-SGD by more than half a point, and better by intervals in at "
            "least two thirds of the settings"
        )
        found = [(trial, self.difference(trial, RECIPE_LABEL, BASELINE)) for trial in self.trials]
        known = [(trial, d) for trial, d in found if d is not None]
        better = [trial for trial, d in known if d.low > 0]
        strictly = [trial for trial, _ in known if _verdict(self.standings[trial], RECIPE_LABEL) == BETTER]
        low = [trial for trial, d in known if d.mean < -RECIPE_LOSS]
        told = (
            f"better by the 95% interval in {len(better)} of {len(known)} settings (after Holm's correction over all "
            f"rows in {len(strictly)}), more than half a point worse in {len(low)}"
        )
        status = MET if not low and len(better) >= RECIPE_SHARE * len(found) else MISSED
        if len(known) < len(found):
            status, told = (MISSED if low else UNKNOWN), f"{told}; {len(found) - len(known)} settings are not recorded"
        return Goal(words, status, told, tuple(f"{trial.name}: {in_points(d)}" for trial, d in known))

    def _fractional(self) -> Goal:
        words = "fractional noise better than DP-SGD by intervals where accounting halves the accumulated noise"
        fractional = {row.label for row in (*FRACTIONAL_ROWS, RECIPE_ROW) if row.method == FRACTIONAL_NOISE}
        pairs = [(a, b) for a, b, _ in CHANGES if a in fractional and b not in fractional]
        halved = [trial for trial in self.trials if trial.promise() <= HALVED]
        found, open_pairs = [], 0
        for trial in halved:
            for label, against in pairs:
                if {label, against} <= self.trials[trial].rows.keys():
                    d = self.difference(trial, label, against)
                    open_pairs += d is None
                    name = f"{trial.name} (noise {trial.promise():.2f} of DP-SGD's), {label} against {against}"
                    found += [] if d is None else [(name, d)]
        return _judged(words, found, open_pairs, lambda d: d.low > 0)


def _judged(
    words: str, found: Sequence[tuple[str, Difference]], open_pairs: int, holds: Callable[[Difference], bool]
) -> Goal:
    """Met if it holds for every pair; one that fails is enough to miss it."""
    good = [name for name, d in found if holds(d)]
    told = f"holds in {len(good)} of {len(found)} comparisons"
    if found:
        worst = min(found, key=lambda each: each[1].mean)
        told += f"; the lowest is {worst[0]}: {in_points(worst[1])}"
    status = MISSED if len(good) < len(found) else MET
    if open_pairs:
        told += f"; {open_pairs} are not recorded"
    if status == MET and (open_pairs or not found):
        status = UNKNOWN
    return Goal(words, status, told, tuple(f"{name}: {in_points(d)}" for name, d in found))


def in_points(d: Difference) -> str:
    """A difference in percentage points, with its interval."""
    return f"{100 * d.mean:+.1f} points [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def _verdict(rows: Sequence[Standing], label: str) -> str:
    return next((row.verdict for row in rows if row.label == label), "")


def _recorded(suite: utility.Suite) -> list[bool]:
    return [bool(c.accuracies(row, trial.setting)) for trial, c in suite.comparisons.items() for row in c.rows.values()]
