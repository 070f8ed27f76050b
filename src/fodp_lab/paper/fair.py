"""The fair comparison: every method at the same (ε, δ), tuned under one budget, judged by one rule (`RULE`).

Rows that users add are kept beside the records, so that the report shows them too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fodp.errors import PrivacyError
from fodp.methods import find
from fodp_lab.paper.records import Records
from fodp_lab.paper.spec import NON_PRIVATE, RunSpec

# As the report publishes it.
RULE = """\
The protocol, fixed before the runs:

- Settings: CIFAR-10 at ε=2 and ε=8, SVHN and CIFAR-100 at ε=8; δ=1e-5, accountant pld, 1,000 steps at q=0.04,
  C=1, the paper's classifier and split. Noise is calibrated for each method, so that none spends more.
- Search, on `train[6000:]` (never the test set, never the training set; the thousand images before it score the
  proposals of SA-DPSGD), one seed of its own. First eight learning rates, a factor two apart, for 250 steps with
  the noise of the full run. Then the best three for all 1,000 steps. Then, at the best of these, two other values
  of the one parameter that is the method's own, if it has one. The best full-length run decides; ties go to the
  smaller rate.
- Final rows: seeds 1 to 10 on the test set, final accuracy, no early stopping. A seed fixes the initial
  weights, the masks and the noise for all methods, so differences are paired.
- Better (worse) than DP-SGD: the mean paired difference is above (below) zero with a t-test's p value below
  0.05 after Holm's correction over all rows of the setting. Otherwise not decidable; and equal in practice if
  the 95% interval lies within one percentage point of zero.

One row, Block-DP-SGD with its grid of rates, was added after the search had begun and before any final run; its idea
is from notes that had tried it on these test images. Every further row makes Holm's correction stricter for all.

The non-private ceiling gets the same search. The exact twin takes FO-DP-SGD's choice, since it is the same
method. Anyone can add a row: it goes through the same search and the same seeds."""

SEARCH_SEED = 1000
SGD_RATES = tuple(0.0125 * 2**k for k in range(8))  # 0.0125 to 1.6
ADAM_RATES = tuple(0.0001 * 2**k for k in range(8))  # 0.0001 to 0.0128
BLOCK_RATES = tuple(0.1 * 2**k for k in range(8))  # 0.1 to 12.8: its steps in the first layer are 48 times shorter


@dataclass(frozen=True)
class Setting:
    """A data set, a budget, and how it is trained: as in the paper, unless something else is said."""

    dataset: str
    epsilon: float
    model: str = "mlp"
    sampling_rate: float = 0.04
    lot_size: float = 200.0

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.dataset}, ε={self.epsilon:g}"


SETTINGS = (Setting("cifar10", 2.0), Setting("cifar10", 8.0), Setting("svhn", 8.0), Setting("cifar100", 8.0))


@dataclass(frozen=True)
class Protocol:
    """How long, how often, where."""

    settings: tuple[Setting, ...] = SETTINGS
    steps: int = 1000
    search_steps: int = 250
    rates: int = 8  # how many of a row's learning rates, evenly spread
    best: int = 3
    seeds: tuple[int, ...] = tuple(range(1, 11))

    def rates_of(self, row: "Row") -> tuple[float, ...]:
        """The learning rates to try."""
        return row.rates[:: max(1, len(row.rates) // self.rates)]


FULL = Protocol()
# Shows that everything works, in minutes; its numbers mean nothing.
QUICK = Protocol(settings=SETTINGS[1:2], steps=100, search_steps=25, rates=2, best=1, seeds=(1, 2))


@dataclass(frozen=True)
class Row:
    """A contender: a method, what is fixed, the rates to try, and other values of its one own parameter.

    `like` names the row whose choice is taken over instead of a search of its own; `caveat` is told with every
    recommendation of it.
    """

    label: str
    method: str
    params: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = SGD_RATES
    own: str = ""
    values: tuple[Any, ...] = ()
    like: str = ""
    caveat: str = ""
    variant: str = ""

    def spec(self, setting: Setting, steps: int, **changes: Any) -> RunSpec:
        """A run of this row."""
        base = RunSpec(
            dataset=setting.dataset,
            model=setting.model,
            sampling_rate=setting.sampling_rate,
            lot_size=setting.lot_size,
            method=self.method,
            params=self.params,
            plan_steps=steps,
            steps=steps,
            target_epsilon=setting.epsilon,
            accountant="pld",
            score_every=100,
            variant=self.variant,
        )
        if self.method == NON_PRIVATE:  # one ceiling per data set, whatever the budget
            base = base.with_(target_epsilon=None, noise_multiplier=None)
        return base.with_(**changes)


BASELINE, FO, TWIN, CEILING = "DP-SGD", "FO-DP-SGD", "exact twin of FO", "not private"
ROWS: tuple[Row, ...] = (
    Row(BASELINE, "dp-sgd"),
    Row("DP-SGD, momentum", "dp-sgd", dict(momentum=0.9), own="momentum", values=(0.5, 0.7)),
    Row(FO, "fo-dp-sgd", dict(beta=0.9), own="beta", values=(0.65, 0.4)),
    Row(TWIN, "fo-twin", dict(beta=0.9), like=FO),
    Row("FO, uniform memory", "fo-uniform", dict(beta=0.9), own="beta", values=(0.65, 0.4)),
    Row("FO, exponential memory", "fo-exponential", dict(beta=0.9), own="beta", values=(0.65, 0.4)),
    Row("Post-FM-DP-SGD", "post-fm-dp-sgd", dict(beta=0.9), own="beta", values=(0.65, 0.4)),
    Row("DOPPLER", "doppler"),
    Row("DiSK", "disk", dict(kappa=0.7), own="kappa", values=(0.5, 0.9)),
    Row("DP-IS", "dp-is", own="rate_cap", values=(1.25, 2.0)),
    Row("DP-SAM", "dp-sam", own="rho", values=(0.02, 0.1)),
    Row("DP-SAT", "dp-sat", own="rho", values=(0.01, 0.1)),
    Row("SA-DPSGD", "sa-dpsgd", own="k", values=(3.0, 30.0)),
    Row(
        "Block-DP-SGD",
        "block-dp-sgd",
        rates=BLOCK_RATES,
        own="width",
        values=(16.0, 4.0),
        caveat="added after the search had begun, and its idea had been tried on these test images before, so confirm "
        "it on other data",
    ),
    Row("DP-Adam", "dp-adam", rates=ADAM_RATES, own="beta2", values=(0.99, 0.9)),
    Row("DP-AdamBC", "dp-adambc", rates=ADAM_RATES, own="bc_floor", values=(0.01, 0.1)),
    Row("DP-AdamW", "dp-adamw", rates=ADAM_RATES, own="weight_decay", values=(0.001, 0.1)),
    Row("ADP-AdamW", "adp-adamw", rates=ADAM_RATES, own="decay", values=(0.97, 0.995)),
    Row("DP-Adam-AC", "dp-adam-ac", rates=ADAM_RATES, own="quantile", values=(0.5, 0.9)),
    Row(CEILING, NON_PRIVATE),
)


@dataclass(frozen=True)
class Choice:
    """What the search chose for a row in a setting, and its validation accuracy."""

    params: Mapping[str, Any]
    validation: float
    at_edge: bool  # the best rate is the smallest or largest tried: a wider grid might do better


class Comparison:
    """The comparison as a pure function of its records: what to run next, what was chosen, which runs count."""

    def __init__(
        self,
        rows: Iterable[Row],
        records: Records,
        protocol: Protocol = FULL,
        code: Callable[[RunSpec], str] | None = None,
    ):
        self.rows = {row.label: row for row in rows}
        self.protocol, self._records, self._code = protocol, records, code

    def rounds(self) -> Iterator[tuple[str, list[RunSpec]]]:
        """The runs in the order in which they can be known: three search stages, then the final rows."""
        pairs = [(row, setting) for setting in self.protocol.settings for row in self.rows.values()]
        for number in (1, 2, 3):
            yield f"search {number} of 3", [spec for pair in pairs for spec in self.search(*pair, number)]
        final = [self.final(*pair) for pair in pairs]
        # One seed of everything after the other, so that what an interrupted run leaves is balanced.
        yield "final rows", [spec for specs in zip(*final, strict=True) for spec in specs]

    def search(self, row: Row, setting: Setting, number: int) -> list[RunSpec]:
        """The runs of search stage 1, 2 or 3; a stage follows from the records of those before it."""
        p = self.protocol
        if row.like or not row.rates:
            return []
        if number == 1:
            start = row.spec(setting, p.steps, seed=SEARCH_SEED, scored_on="validation").with_(steps=p.search_steps)
            return [start.with_(params={"lr": rate}) for rate in p.rates_of(row)]
        if number == 2:
            return [spec.with_(steps=p.steps) for spec in self._ranked(self.search(row, setting, 1))[: p.best]]
        best = self._ranked(self.search(row, setting, 2))
        return [best[0].with_(params={row.own: value}) for value in row.values] if best else []

    def choice(self, row: Row, setting: Setting) -> Choice | None:
        """The row's settings, from the records alone; None while the search is not complete."""
        if row.like:
            return self.choice(self.rows[row.like], setting)
        if not row.rates:
            return Choice(row.params, float("nan"), False)
        rates = self.protocol.rates_of(row)
        ranked = self._ranked(self.search(row, setting, 2) + self.search(row, setting, 3))
        if len(ranked) < min(self.protocol.best, len(rates)) + len(row.values):
            return None
        return Choice(ranked[0].params, self._score(ranked[0]), ranked[0].params["lr"] in (rates[0], rates[-1]))

    def final(self, row: Row, setting: Setting) -> list[RunSpec]:
        """The runs that count; none while the search is not complete."""
        choice = self.choice(row, setting)
        if choice is None:
            return []
        spec = row.spec(setting, self.protocol.steps, params=choice.params)
        return [spec.with_(seed=seed) for seed in self.protocol.seeds]

    def accuracies(self, row: Row, setting: Setting, name: str = "final_accuracy") -> dict[int, float]:
        """Final (or best) test accuracy by seed, as far as recorded."""
        found = ((spec.seed, self._record(spec)) for spec in self.final(row, setting))
        return {seed: record[name] for seed, record in found if record is not None}

    def _ranked(self, specs: list[RunSpec]) -> list[RunSpec]:
        """Those with a record, the best first; ties go to the smaller learning rate."""
        known = [spec for spec in specs if self._record(spec) is not None]
        return sorted(known, key=lambda spec: (-self._score(spec), spec.params["lr"]))

    def _record(self, spec: RunSpec) -> dict[str, Any] | None:
        return self._records.get(spec.key, None if self._code is None else self._code(spec))

    def _score(self, spec: RunSpec) -> float:
        record = self._record(spec)
        assert record is not None
        return float(record["final_accuracy"])


# ---- rows that users add -----------------------------------------------------------------------------------------

_CHALLENGERS = "challengers.jsonl"


def challenge(
    folder: Path, label: str, method: str, params: dict[str, Any], lr: float | None, modules: tuple[str, ...]
) -> Row:
    """Write a row down. Without a learning rate it gets the same search as all others."""
    algorithm = find(method).from_dict(params)  # refuses what the method does not know
    if label in {row.label for row in ROWS}:
        raise PrivacyError(f"the comparison has a row {label!r} already: choose another --label")
    if lr is not None:
        params = {**params, "lr": lr}
    rates = () if lr is not None else ADAM_RATES if not algorithm.options.update.is_plain else SGD_RATES
    record = {"key": label, "method": method, "params": params, "rates": rates, "modules": modules}
    Records(folder / _CHALLENGERS).append(record)
    return _challenger(record)


def rows_in(folder: Path) -> tuple[Row, ...]:
    """All rows of the comparison in this folder: ours, then the challengers."""
    return ROWS + tuple(_challenger(record) for record in Records(folder / _CHALLENGERS))


def modules_in(folder: Path) -> tuple[str, ...]:
    """What must be imported for the challengers' methods to exist."""
    return tuple(dict.fromkeys(name for record in Records(folder / _CHALLENGERS) for name in record["modules"]))


def _challenger(record: dict[str, Any]) -> Row:
    return Row(record["key"], record["method"], record["params"], rates=tuple(record["rates"]))
