"""Every table as plain data: rendered as Markdown under `results/tables` and as HTML in the report."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fodp_lab.judging.results import Line, Record, Results
from fodp_lab.judging.statistics import Difference, Summary, holm, paired, summarize
from fodp_lab.judging.verdicts import relative, standings
from fodp_lab.paper.catalog import (
    AS_HERE,
    DP_SGD,
    EXPERIMENTS,
    METHODS,
    PRINTED_FINAL,
    PRINTED_RELATIVE,
    PRINTED_SECONDS,
    RUNTIME,
)

# The row against which the others of its panel are compared.
BASELINES = {
    "final-accuracy": DP_SGD,
    "accuracy": DP_SGD,
    "insertion": "DP-SGD",
    "memory-design": "current only",
    "window": "K=1",
    "order": "α=0.8",
    "beta-tradeoff": "β=1",
    "beta-joint": "β=1",
    "reference": AS_HERE,
    "sensitivity": "defaults",
}
NONE = "–"


@dataclass(frozen=True)
class Table:
    """A title, columns, rows of text, and what a reader must know."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown, ending with a line break."""
        lines = [f"### {self.title}", "", _pipes(self.columns), _pipes(["---"] * len(self.columns))]
        lines += [_pipes(row) for row in self.rows] or [_pipes(["no runs recorded"] + [NONE] * (len(self.columns) - 1))]
        return "\n".join([*lines, "", self.note, ""] if self.note else [*lines, ""])


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, digits: int = 4) -> str:
    """Rounded, or a dash."""
    return NONE if value is None or math.isnan(value) else f"{value:.{digits}f}"


def mean_std(s: Summary) -> str:
    """Mean ± standard deviation."""
    return number(s.mean) if math.isnan(s.std) else f"{s.mean:.4f} ± {s.std:.4f}"


def interval(s: Summary) -> str:
    """The 95% interval."""
    return NONE if math.isnan(s.low) else f"[{s.low:.4f}, {s.high:.4f}]"


def points(d: Difference | None) -> str:
    """A difference of accuracies, in percentage points."""
    return NONE if d is None else f"{100 * d.mean:+.2f} [{100 * d.low:+.2f}, {100 * d.high:+.2f}]"


def tables_of(results: Results, name: str) -> list[Table]:
    """The tables of one experiment, by its name."""
    if name == RUNTIME:
        return [_runtime(results)]
    if name == "fair":
        return _fair(results)
    return [_experiment(results, name)]


def _experiment(results: Results, name: str) -> Table:
    lines = results.lines[name]
    many = len({line.panel for line in lines}) > 1
    baseline = BASELINES.get(name)
    differences = _against(lines, baseline) if baseline else {}
    columns = ["panel"] * many + ["row", "final accuracy", "95% interval", "best", "final loss", "ε", "seeds"]
    columns += [f"points against {baseline} [95%]", "p (Holm)"] if baseline else []
    columns += ["paper", "paper's 95% interval"] if name == "final-accuracy" else []
    rows = []
    for line in lines:
        final = summarize(line.final.values())
        row = [line.panel] * many + [line.label, mean_std(final), interval(final)]
        row += [mean_std(summarize(line.values("best_accuracy").values()))]
        row += [number(summarize(line.values("final_loss").values()).mean, 3), number(line.epsilon, 2), str(final.n)]
        if baseline:
            d, p = differences.get((line.panel, line.label), (None, None))
            row += [points(d), NONE if p is None else f"{p:.2g}"]
        if name == "final-accuracy":
            mean, std, low, high = PRINTED_FINAL[line.label]
            row += [f"{mean:.4f} ± {std:.4f}", f"[{low:.4f}, {high:.4f}]"]
        rows.append(tuple(row))
    return Table(EXPERIMENTS[name].title, tuple(columns), tuple(rows), _note(results, name))


def _note(results: Results, name: str) -> str:
    found, wanted = results.missing(name)
    spec = EXPERIMENTS[name].rows[0].spec
    scored = (
        "2,000 test images" + ", or as the row says" * (name == "reference")
        if spec.scored_on == "test"
        else "`train[6000:]`, never the test set"
    )
    note = f"Mean ± sample standard deviation over seeds, scored on the {scored}; Student-t 95% intervals; "
    note += f"ε at δ={spec.delta:g} by Rényi DP with the classic conversion. {found} of {wanted} runs recorded."
    return note + (" Short runs: the numbers mean nothing." if results.quick else "")


def _against(lines: Sequence[Line], baseline: str) -> dict[tuple[str, str], tuple[Difference, float]]:
    """Paired differences of final accuracy, p values corrected over the whole experiment."""
    base = {line.panel: line.final for line in lines if line.label == baseline}
    found = {
        (line.panel, line.label): test
        for line in lines
        if line.label != baseline and (test := paired(line.final, base[line.panel])) is not None
    }
    return dict(zip(found, zip(found.values(), holm([d.p for d in found.values()]), strict=True), strict=True))


def _runtime(results: Results) -> Table:
    rows = []
    for label in METHODS:
        turns, r = results.runtime.get(label), relative(results, label)
        ratio = "1" if label == DP_SGD else NONE if r is None else f"{r.mean:.3f} [{r.low:.3f}, {r.high:.3f}]"
        seconds = number(sum(turns), 1) if turns else NONE
        rows.append((label, seconds, ratio, f"{PRINTED_SECONDS[label]:.1f}", f"{PRINTED_RELATIVE[label]:.2f}"))
    columns = ("method", "seconds", "relative [95%]", "paper: seconds", "paper: relative")
    return Table("Runtime, 250 epochs", columns, tuple(rows) if results.rounds else (), _runtime_note(results))


def _runtime_note(results: Results) -> str:
    if not results.rounds:
        return ""
    steps = [record["steps"] for record in results.rounds]
    epochs = sum(steps) * EXPERIMENTS["final-accuracy"].rows[0].spec.sampling_rate
    days = sorted({record["at"][:10] for record in results.rounds})
    return (
        f"CIFAR-10, one thread, evaluation included, accounting not. Seconds: the sum of {len(steps)} turns of "
        f"{steps[0]} steps, {epochs:g} epochs; in each round every method has one turn, all in one process. Measured "
        f"{' to '.join(days[:: max(1, len(days) - 1)])}, code `{results.rounds[0]['code']}`. Relative: geometric mean "
        f"of the ratios to {DP_SGD}, round by round, with a 95% interval. The paper's machine is not known, so only "
        "the relative columns can be compared."
    )


def _fair(results: Results) -> list[Table]:
    columns = ("row", "chosen on validation", "validation", "test accuracy", "95% interval",
               "points against DP-SGD [95%]", "p (Holm)", "verdict", "seeds")  # fmt: skip
    tables = []
    for setting in results.fair.protocol.settings:
        rows = []
        for c in standings(results)[setting.name]:
            chosen = ", ".join(settings(c.params))
            edge = " (edge of the grid)" if c.at_edge else ""
            p = NONE if c.p is None else f"{c.p:.2g}"
            rows.append((c.label, chosen + edge, number(c.validation), mean_std(c.summary), interval(c.summary),
                         points(c.difference), p, c.verdict, str(c.summary.n)))  # fmt: skip
        tables.append(Table(f"Fair comparison: {setting.name}", columns, tuple(rows)))
    return tables


def settings(params: Mapping[str, Any]) -> list[str]:
    """Parameters as `name=value`, without digits that say nothing."""
    return [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()]


def runs_as_csv(results: Results) -> str:
    """Every recorded run as one row, for a spreadsheet; the curves are in the records alone."""
    columns = ("suite", "method", "data", "parameters", "seed", "steps", "scored on", "σ", "C", "ε", "final", "best",
               "loss", "seconds", "code", "key")  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(_run("paper", record) for record in results.paper)
    writer.writerows(_run("fair", record) for record in results.fair_records)
    return out.getvalue()


def _run(suite: str, r: Record) -> list[Any]:
    run = r["run"]
    chosen = " ".join([*settings(run["params"]), *([f"({run['variant']})"] if "variant" in run else [])])
    numbers = [r["noise_multiplier"], run["clip_norm"], r["final_epsilon"]]
    return [
        suite, r["algorithm"], run["dataset"], chosen, r["seed"], run["steps"], run["scored_on"],
        *("" if value is None else round(value, 4) for value in numbers),
        r["final_accuracy"], r["best_accuracy"], round(r["final_loss"], 4), r["seconds"], r["code"], r["key"],
    ]  # fmt: skip


def names() -> list[str]:
    """All tables, in the order of the report."""
    return [*EXPERIMENTS, RUNTIME, "fair"]
