"""What helps at equal ε beyond a method's filter: shapes, rates without a search, averages, fractional noise.

A second comparison beside `fair`, under its rules (`RULE`) and with records of its own. Every setting is a
`fair.Comparison` with rows and a length of its own, so that all stays within an hour on two cores.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from fodp.errors import PrivacyError
from fodp.methods import find, recipe
from fodp.plan import Plan
from fodp_lab.paper import fair, variants
from fodp_lab.paper.fair import ADAM_RATES, BASELINE, BLOCK_RATES, CEILING, SEARCH_SEED, SGD_RATES, Choice, Row
from fodp_lab.paper.models import DIGITS
from fodp_lab.paper.records import Records
from fodp_lab.paper.spec import NON_PRIVATE, RunSpec

# As the page publishes it.
RULE = """\
The protocol, fixed before the runs:

- Every row of a setting has the same (ε, δ=1e-5), accountant pld, sampling rate, divisor, number of steps and C=1; its
  noise is calibrated for it.
- A *searched* row gets eight learning rates, a factor two apart, for a quarter of the steps with the noise of the full
  run; the best three for all steps; then, at the best of these, two other values of the one parameter that is its own,
  if it has one. The search sees validation data alone, with one seed of its own.
- An *untuned* row gets no search at all: what it is called is what is run. One run on validation data, with the seed of
  the searches, is recorded beside it. It chooses nothing.
- Final rows: seeds 1 to 10 on the test set, final accuracy, no early stopping. A seed fixes the initial weights, the
  masks and the noise, so differences are paired.
- Better (worse) than searched DP-SGD, flat clipping: the mean paired difference is above (below) zero with a t-test's p
  value below 0.05 after Holm's correction over all rows of the setting. Otherwise not decidable; and equal in practice
  if the 95% interval lies within one percentage point of zero.
- Fractional noise takes part where accounting alone promises at least a tenth less accumulated noise."""

PROMISE = 0.9  # of DP-SGD's accumulated noise: where fractional noise keeps more than this it does not take part
WIDE_RATES = tuple(0.05 * 2**k for k in range(8))  # 0.05 to 6.4: models with norms bear larger steps
FAN_IN, KRONECKER, TRANSCRIPT = dict(shape="fan-in"), dict(shape="kronecker"), dict(shape="transcript")
WIDTHS, SIDES = (16.0, 4.0), ("both",)  # beside fan-in's own 64 and kronecker's outputs alone
FO, AUTO, FRACTIONAL_NOISE = dict(beta=0.65), dict(lr="auto"), "fo-noise"
RULED, TRAPEZOID = dict(rate_rule="transcript"), dict(lr_schedule="trapezoid")
RECIPE_LABEL, UNTUNED, FOLLOWED = "the recipe", ", untuned", ", rate by transcript"


def _auto(label: str, method: str = "dp-sgd", **params: Any) -> Row:
    """A row without a search."""
    return Row(label + UNTUNED, method, {**params, **AUTO}, rates=())


RECIPE_ROW = Row(RECIPE_LABEL, recipe.METHOD, dict(recipe.PARAMS), rates=())
(_VIEWS,) = variants.AUGMENTED
AUGMENTED_ROW = replace(RECIPE_ROW, label=f"{RECIPE_LABEL}, {_VIEWS}", variant=_VIEWS)
# A record: it was no better than the recipe, and went out of the library.
OPTIMISED_ROW = _auto(
    "fractional noise, fan-in, EMA, optimised (no longer in the library)",
    FRACTIONAL_NOISE,
    coefficients="optimised",
    **FAN_IN,
    average="ema",
)
FITTED = dict(order=None)  # order and bands are the plan's choice: what accumulates the least noise
FRACTIONAL_ROWS = (
    Row("fractional noise", FRACTIONAL_NOISE, FITTED),
    Row(
        "fractional noise, fan-in",
        FRACTIONAL_NOISE,
        {**FITTED, **FAN_IN},
        rates=BLOCK_RATES,
        own="width",
        values=WIDTHS,
    ),
    _auto("fractional noise, fan-in", FRACTIONAL_NOISE, **FITTED, **FAN_IN),
    _auto("fractional noise, fan-in, trapezoid", FRACTIONAL_NOISE, **FITTED, **FAN_IN, **TRAPEZOID),
)
FULL_ROWS: tuple[Row, ...] = (
    Row(BASELINE, "dp-sgd"),
    Row("DP-SGD, fan-in", "dp-sgd", FAN_IN, rates=BLOCK_RATES, own="width", values=WIDTHS),
    Row("DP-SGD, kronecker", "dp-sgd", KRONECKER, rates=BLOCK_RATES, own="shape_sides", values=SIDES),
    Row("DP-SGD, transcript", "dp-sgd", TRANSCRIPT, rates=BLOCK_RATES),
    Row("FO-DP-SGD", "fo-dp-sgd", FO),
    Row("FO-DP-SGD, fan-in", "fo-dp-sgd", {**FO, **FAN_IN}, rates=BLOCK_RATES, own="width", values=WIDTHS),
    Row(
        "FO-DP-SGD, kronecker",
        "fo-dp-sgd",
        {**FO, **KRONECKER},
        rates=BLOCK_RATES,
        own="shape_sides",
        values=SIDES,
    ),
    Row("FO-DP-SGD, transcript", "fo-dp-sgd", {**FO, **TRANSCRIPT}, rates=BLOCK_RATES),
    Row("DP-SGD, per-layer clipping", "dp-sgd", dict(clip="per-layer")),
    Row("DP-SGD, normalised clipping", "dp-sgd", dict(clip="normalised")),
    Row("DP-Adam", "dp-adam", rates=ADAM_RATES),
    _auto("DP-SGD, fan-in", **FAN_IN),
    _auto("FO-DP-SGD, fan-in", "fo-dp-sgd", **FO, **FAN_IN),
    _auto("DP-SGD, kronecker", **KRONECKER),
    _auto("DP-Adam", "dp-adam"),
    _auto("DP-SGD, fan-in, linear decay", **FAN_IN, lr_schedule="linear"),
    _auto("DP-SGD, fan-in, trapezoid", **FAN_IN, **TRAPEZOID),
    _auto("DP-SGD, fan-in" + FOLLOWED, **FAN_IN, **RULED),
    _auto("DP-SGD, kronecker" + FOLLOWED, **KRONECKER, **RULED),
    _auto("FO-DP-SGD, fan-in" + FOLLOWED, "fo-dp-sgd", **FO, **FAN_IN, **RULED),
    _auto("DP-SGD, fan-in, EMA", **FAN_IN, average="ema"),
    _auto("DP-SGD, fan-in, tail average", **FAN_IN, average="tail"),
    _auto("DP-SGD, fan-in, power-law average", **FAN_IN, average="power"),
    *FRACTIONAL_ROWS,
    RECIPE_ROW,
    Row(CEILING, NON_PRIVATE),
)
# Learned shapes of FO, and what hardly differs from another row, are shown where runs are cheap.
_DEAR = ("FO-DP-SGD", "FO-DP-SGD, kronecker", "FO-DP-SGD, transcript")
MOST_ROWS = tuple(row for row in FULL_ROWS if row.label not in _DEAR)
_FEWER = (
    *_DEAR, "DP-SGD, kronecker", "DP-SGD, transcript", "DP-SGD, normalised clipping", "FO-DP-SGD, fan-in", "DP-Adam",
    "FO-DP-SGD, fan-in, untuned", "DP-Adam, untuned", "fractional noise",
    "DP-SGD, fan-in, linear decay, untuned", "DP-SGD, fan-in, trapezoid, untuned",
    "DP-SGD, fan-in, tail average, untuned", "DP-SGD, fan-in, power-law average, untuned",
    "DP-SGD, kronecker" + FOLLOWED + UNTUNED, "FO-DP-SGD, fan-in" + FOLLOWED + UNTUNED,
)  # fmt: skip
FEWER_ROWS = tuple(row for row in FULL_ROWS if row.label not in _FEWER)
_SHORT = (
    BASELINE, "DP-SGD, fan-in", "DP-SGD, fan-in, untuned", "DP-SGD, kronecker, untuned", "DP-SGD, fan-in, EMA, untuned",
    "DP-SGD, fan-in" + FOLLOWED + UNTUNED, "fractional noise, fan-in, untuned", RECIPE_LABEL, CEILING,
)  # fmt: skip
SHORT_ROWS = tuple(row for row in FULL_ROWS if row.label in _SHORT)
# Models with norms: flat clipping bears larger rates there.
WIDE_ROWS = tuple(replace(row, rates=WIDE_RATES) if row.rates == SGD_RATES else row for row in SHORT_ROWS)
_NOISY = (*_SHORT, "DP-SGD, fan-in, trapezoid, untuned")
NOISE_ROWS = (*(row for row in FULL_ROWS if row.label in _NOISY or row in FRACTIONAL_ROWS), OPTIMISED_ROW)


@dataclass(frozen=True, eq=False)
class Trial:
    """A setting with its rows and its length; `seconds` is what a step took here on one thread, for the first estimate.

    `seen`: its test examples had been looked at before this comparison was made.
    """

    setting: fair.Setting
    rows: tuple[Row, ...] = FULL_ROWS
    steps: int = 1000
    seconds: float = 0.005
    seen: bool = True

    @property
    def name(self) -> str:
        """As tables show it: what differs from the paper's classifier and rate is said."""
        model = {"mlp": "MLP", "small-cnn": "conv net", "text-transformer": "transformer"}[self.setting.model]
        rate = "" if self.setting.sampling_rate == 0.04 else f", q={self.setting.sampling_rate:g}"
        return f"{self.setting.dataset.removesuffix('-1000')} {model}, ε={self.setting.epsilon:g}{rate}"

    def protocol(self, seeds: tuple[int, ...] = tuple(range(1, 11))) -> fair.Protocol:
        """The search and the seeds of the fair comparison, at this length."""
        return fair.Protocol((self.setting,), self.steps, max(1, self.steps // 4), seeds=seeds)

    def promise(self) -> float:
        """The noise that fractional noise accumulates over the run, as a share of DP-SGD's: by accounting alone."""
        return _promise(self.setting, self.steps)


# One setting after the other, so that what an interrupted run leaves is whole settings.
TRIALS = (
    Trial(fair.Setting(DIGITS, 2.0, "mlp", 0.1, 100.0), FULL_ROWS, 400, 0.0015),
    Trial(fair.Setting("cifar10", 8.0), MOST_ROWS),
    Trial(fair.Setting("svhn", 8.0), MOST_ROWS),
    Trial(fair.Setting("sst2", 8.0, "text-transformer"), WIDE_ROWS, 200, 0.047, seen=False),
    Trial(fair.Setting("cifar10", 8.0, "small-cnn"), (*WIDE_ROWS, AUGMENTED_ROW), 200, 0.05),
    Trial(fair.Setting("cifar10", 8.0, "mlp", 0.008, 40.0), NOISE_ROWS, 1000, 0.003),
    Trial(fair.Setting("svhn", 8.0, "small-cnn"), WIDE_ROWS, 200, 0.05),
    Trial(fair.Setting("cifar10", 2.0), FEWER_ROWS),
    Trial(fair.Setting("cifar100", 8.0), FEWER_ROWS),
)


class Comparison(fair.Comparison):
    """One trial as a pure function of its records. Rows without a search have one run on validation data."""

    def search(self, row: Row, setting: fair.Setting, number: int) -> list[RunSpec]:
        """As in the fair comparison; the one validation run of an untuned row is part of stage 2."""
        if row.rates or row.like:
            return super().search(row, setting, number)
        spec = row.spec(setting, self.protocol.steps, seed=SEARCH_SEED, scored_on="validation")
        return [spec] if number == 2 else []

    def choice(self, row: Row, setting: fair.Setting) -> Choice | None:
        """As in the fair comparison; an untuned row waits for nothing."""
        if row.rates or row.like:
            return super().choice(row, setting)
        known = [spec for spec in self.search(row, setting, 2) if self._record(spec) is not None]
        return Choice(row.params, self._score(known[0]) if known else float("nan"), False)

    def work(self, row: Row) -> int:
        """How many steps all runs of a row have together."""
        p = self.protocol
        if not row.rates:
            return p.steps * (1 + len(p.seeds))
        rates = len(p.rates_of(row))
        return p.search_steps * rates + p.steps * (min(p.best, rates) + len(row.values) + len(p.seeds))


@dataclass
class Suite:
    """All trials over one set of records."""

    records: Records
    quick: bool = False
    seeds: int | None = None
    code: Callable[[RunSpec], str] | None = None
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comparisons = {trial: self._comparison(trial) for trial in TRIALS}

    def _comparison(self, trial: Trial) -> Comparison:
        protocol = trial.protocol()
        if self.quick:  # shows that every row runs in every setting; the numbers mean nothing
            protocol = replace(protocol, steps=8, search_steps=2, rates=1, best=1, seeds=(1, 2))
        if self.seeds is not None:
            protocol = replace(protocol, seeds=protocol.seeds[: self.seeds])
        rows = []
        for row in trial.rows:
            reason = "" if row == OPTIMISED_ROW and self.code is None else _why_not(row)
            if reason:
                self.left_out.append(f"{row.label}: {reason}")
            elif row not in (*FRACTIONAL_ROWS, OPTIMISED_ROW) or trial.promise() <= PROMISE:
                rows.append(row)
        self.left_out = list(dict.fromkeys(self.left_out))
        return Comparison(rows, self.records, protocol, self.code)

    def rounds(self, only_search: bool = False) -> Iterator[tuple[str, list[RunSpec]]]:
        """Trial by trial: its search, then its final rows, one seed of all rows after the other.

        With `only_search` the test set is not touched: that is how a recipe is chosen.
        """
        for trial, comparison in self.comparisons.items():
            for title, specs in comparison.rounds():
                if not only_search or title.startswith("search"):
                    yield f"{trial.name}: {title}", specs

    def left_out_notes(self) -> list[str]:
        """Which rows this code cannot run, and why."""
        return [f"left out: {line}" for line in self.left_out]

    def estimated(self, jobs: int) -> list[str]:
        """How long all of it takes, what is recorded included."""
        found = self.estimate()
        lines = [f"{trial.name}: about {seconds / 60:.0f} minutes of one core" for trial, seconds in found.items()]
        return [*lines, f"together about {sum(found.values()) / 60 / jobs:.0f} minutes with {jobs} processes"]

    def estimate(self) -> dict[Trial, float]:
        """Seconds on one core that each trial takes as a whole, by what its recorded runs took, if there are any."""
        return {trial: _seconds(trial, comparison, self.records) for trial, comparison in self.comparisons.items()}


def _seconds(trial: Trial, comparison: Comparison, records: Iterable[dict[str, Any]]) -> float:
    s = trial.setting
    this = dict(dataset=s.dataset, model=s.model, sampling_rate=s.sampling_rate)
    runs = [r for r in records if all(r["run"][name] == value for name, value in this.items())]
    # Short runs are mostly their beginning and their scores.
    long = [r["seconds"] / r["run"]["steps"] for r in runs if r["run"]["steps"] >= trial.steps]
    each = mean(long) if long else trial.seconds
    # The recipe may be one of the other rows.
    distinct = {(row.method, repr(row.params), row.rates, row.variant): row for row in comparison.rows.values()}
    return each * sum(comparison.work(row) for row in distinct.values())


def taken_over(folder: Path) -> list[dict[str, Any]]:
    """Runs of the fair comparison, of which those that are also this one's are not computed again."""
    return list(Records(folder / "fair.jsonl"))


def _why_not(row: Row) -> str:
    """Why this code cannot run a row: it lacks the method, or does not know a parameter. Empty if it can."""
    if row.method == NON_PRIVATE:
        return ""
    try:
        find(row.method).from_dict(dict(row.params))
    except PrivacyError as error:
        return str(error).split(";")[0].splitlines()[0]
    return ""


@cache
def _promise(setting: fair.Setting, steps: int) -> float:
    noise = []
    for method, params in ((FRACTIONAL_NOISE, FITTED), ("dp-sgd", {})):
        plan = Plan.calibrated(
            target_epsilon=setting.epsilon, sampling_rate=setting.sampling_rate, steps=steps, clip_norm=1.0, seed=0,
            lot_size=setting.lot_size, delta=1e-5, method=method, params=params, accountant="pld",
        )  # fmt: skip
        noise.append(find(method).from_dict(dict(plan.params)).accumulated_noise(plan))
    return noise[0] / noise[1]
