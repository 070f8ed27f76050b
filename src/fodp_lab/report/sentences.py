"""Sentences about the results. Each is made from recorded numbers; none is written in advance."""

from collections import Counter
from collections.abc import Mapping, Sequence

from fodp_lab.judging.results import Results, panels
from fodp_lab.judging.statistics import MARGIN, Difference, paired, summarize
from fodp_lab.judging.verdicts import (
    BETTER,
    EQUAL,
    NOT_DECIDABLE,
    NOT_REPRODUCED,
    OPEN,
    REPRODUCED,
    WORSE,
    Standing,
    Verdict,
    standings,
)
from fodp_lab.paper import fair
from fodp_lab.paper.catalog import AS_HERE, DP_SGD, EXPERIMENTS, FO, METHODS, PRINTED_FINAL
from fodp_lab.report.tables import points


def summary(results: Results, verdicts: Mapping[str, Verdict]) -> list[str]:
    """How much was run, and how many claims hold."""
    counts = Counter(verdict.status for verdict in verdicts.values())
    total = len(verdicts)
    lines = [
        f"Of {total} claims of the paper, {counts[REPRODUCED]} are reproduced, {counts[NOT_REPRODUCED]} are not "
        f"reproduced, and {counts[NOT_DECIDABLE]} are not decidable from these runs."
    ]
    lines += _main_result(results)
    done = [results.missing(name) for name in EXPERIMENTS]
    short = [name for name, (found, wanted) in zip(EXPERIMENTS, done, strict=True) if found < wanted]
    lines.append(
        f"{len(results.paper)} runs of the paper's experiments, {len(results.fair_records)} runs of the fair "
        f"comparison and {len(results.rounds)} timed rounds of {len(results.runtime)} methods are recorded. "
        + (f"Not complete: {', '.join(short)}." if short else "Every row of the paper's experiments is complete.")
    )
    if results.quick:
        lines.append("**These are the short runs of `--quick`: they show that everything works, nothing else.**")
    return lines


def _main_result(results: Results) -> list[str]:
    """The paper's first comparison beside ours."""
    fo, base = results.line("final-accuracy", FO), results.line("final-accuracy", DP_SGD)
    d = paired(fo.final, base.final)
    if d is None or results.quick:
        return []
    theirs = 100 * (PRINTED_FINAL[FO][0] - PRINTED_FINAL[DP_SGD][0])
    line = (
        f"The paper's main result is that {FO} ends {theirs:.2f} points above DP-SGD (β=1) on CIFAR-10, at equal σ. "
        f"Here the difference is {points(d)} points, {d.n} seeds (ε={fo.epsilon:.1f} against {base.epsilon:.1f})."
    )
    settings = _settings(results)
    return [line + (f" {_memory(results, settings)}" if settings else "")]


def environment(results: Results) -> list[str]:
    """Which versions the records come from, and when they were made."""
    lines = []
    by_method: dict[str, Counter[str]] = {}
    for record in (*results.paper, *results.fair_records):
        by_method.setdefault(record["algorithm"], Counter())[record["code"]] += 1
    told = ", ".join(f"{method} {_counts(versions)}" for method, versions in sorted(by_method.items()))
    lines.append(f"Versions of the code (fingerprints of what it computes), with the number of runs: {told or 'none'}.")
    for name, words in (("torch", "PyTorch"), ("python", "Python")):
        lines.append(f"{words}, with the number of runs: {_counts(results.versions(name)) or 'none'}.")
    for records, words in ((results.paper, "the paper's experiments"), (results.fair_records, "the fair comparison")):
        hours = sum(record["seconds"] for record in records) / 3600
        if hours:
            lines.append(f"The runs of {words} took {hours:.1f} hours of one process, {hours / 2:.1f} with two jobs.")
    if results.rounds:
        first, last = results.rounds[0], results.rounds[-1]
        lines.append(
            f"The times are of {first['at']} to {last['at']}, code `{first['code']}`, PyTorch {first['torch']}. "
            "A version is a hash of the sources that training runs; what was measured of others is in `runtime.jsonl`."
        )
    days = sorted(record["at"] for record in results.used())
    return [*lines, f"The first record is of {days[0]}, the last of {days[-1]}."] if days else lines


def _counts(versions: Counter[str]) -> str:
    return ", ".join(f"`{version}` ({count})" for version, count in sorted(versions.items()))


def practitioner(results: Results) -> list[str]:
    """What to use, setting by setting, by the rule of the fair comparison."""
    lines, wins = [], Counter[str]()
    settings = _settings(results)
    if not settings or results.quick:
        return ["The fair comparison is not recorded in full length here, so there is no recommendation."]
    for setting in settings:
        rows = standings(results)[setting.name]
        base = _base(rows)
        assert base is not None
        better = [c for c in rows if c.verdict == BETTER]
        wins.update(c.label for c in better)
        start = f"{setting.name}: tuned DP-SGD reaches {base.summary.mean:.4f} (lr {base.params['lr']:g})"
        if better:
            told = ", ".join(f"{c.label} ({points(c.difference)} points)" for c in better)
            lines.append(f"{start}. Better by the rule: {told}.")
        else:
            lines.append(f"{start}. No method is better by the rule; use DP-SGD with a tuned learning rate.")
    worse = {c.label for s in settings for c in standings(results)[s.name] if c.verdict not in (BETTER, EQUAL)}
    safe = {label: f"{label} ({count} of {len(settings)})" for label, count in wins.items() if label not in worse}
    if safe:
        lines.append(
            f"Better in some settings and equal in practice in the others: {', '.join(safe.values())}. "
            "That is what to use on problems like these, with a tuned learning rate."
            + "".join(f" But {label} was {caveat}." for label in safe if (caveat := results.fair.rows[label].caveat))
        )
    else:
        lines.append(
            "No method is better than tuned DP-SGD without being worse elsewhere. Tune the learning rate first."
        )
    return [*lines, _memory(results, settings), *learning_rate(results)]


def _settings(results: Results) -> list[fair.Setting]:
    """Those of the fair comparison that are recorded."""
    return [s for s in results.fair.protocol.settings if _base(standings(results)[s.name]) is not None]


def _memory(results: Results, settings: Sequence[fair.Setting]) -> str:
    """What FO-DP-SGD itself is worth."""
    verdicts = [c.verdict for s in settings for c in standings(results)[s.name] if c.label == fair.FO]
    told = ", ".join(f"{word} in {verdicts.count(word)}" for word in (BETTER, EQUAL, WORSE, OPEN) if word in verdicts)
    return f"{FO} against DP-SGD at equal ε, both tuned: {told or 'not recorded'} of {len(settings)} settings."


def learning_rate(results: Results) -> list[str]:
    """What the learning rate alone is worth under the paper's own protocol."""
    lines = []
    for label in (DP_SGD, FO):
        rows = [line for line in results.lines["learning-rate"] if line.label == label and line.records]
        told = [f"{summarize(line.final.values()).mean:.4f} at {line.panel}" for line in rows]
        if len(told) > 1:
            lines.append(
                f"The learning rate alone, {label} on CIFAR-10 as in the paper (ε={rows[0].epsilon:.1f}, "
                f"{rows[0].spec.steps} steps): {', '.join(told)}."
            )
    return lines


def _base(rows: Sequence[Standing]) -> Standing | None:
    return next((c for c in rows if c.label == fair.BASELINE), None)


def fair_findings(results: Results) -> list[str]:
    """Who is better, worse, equal or undecided in each setting, and where the grid may have been too narrow."""
    lines = []
    for setting in results.fair.protocol.settings:
        rows = standings(results)[setting.name]
        told = []
        for word in (BETTER, EQUAL, WORSE, OPEN):
            group = [c for c in rows if c.verdict == word]
            found = [f"{c.label} ({points(c.difference)})" if word == BETTER else c.label for c in group]
            told += [f"{word}: {'; '.join(found)}"] if found else []
        if not told:
            lines.append(f"**{setting.name}**: not recorded.")
            continue
        seeds = sorted({c.summary.n for c in rows})
        line = f"**{setting.name}**, against DP-SGD, {' or '.join(map(str, seeds))} seeds: "
        edge = [c.label for c in rows if c.at_edge]
        line += ". ".join(word[0].upper() + word[1:] if i else word for i, word in enumerate(told)) + "."
        line += f" Best rate at the edge of its grid: {'; '.join(edge)}." if edge else ""
        lines.append(line + _ceiling(results, setting))
    return lines


def _ceiling(results: Results, setting: fair.Setting) -> str:
    """Plain SGD is a ceiling only if it ends above every private row."""
    rows, c = standings(results)[setting.name], results.fair
    best = c.accuracies(c.rows[fair.CEILING], setting, "best_accuracy") if fair.CEILING in c.rows else {}
    if _base(rows) is None or not best:
        return ""
    final = summarize(c.accuracies(c.rows[fair.CEILING], setting).values()).mean
    line = f" Without privacy: {final:.4f} at the end; {summarize(best.values()).mean:.4f} at its best step."
    above = [row.label for row in rows if row.label != fair.CEILING and row.summary.mean > final]
    if not above:
        return line
    return (
        f"{line} Private rows that end above it: {len(above)}, {above[0]} the furthest, so its end is no ceiling here."
    )


def _against(results: Results, name: str, label: str) -> dict[str, Difference]:
    """Final accuracy of the other rows of a panel against one, seed by seed; those of which two seeds are known."""
    base = results.line(name, label)
    others = [line for line in results.panel(name, base.panel) if line.label != label]
    tests = {line.label: paired(line.final, base.final) for line in others}
    return {label: d for label, d in tests.items() if d is not None}


def baseline_rates(results: Results) -> list[str]:
    """Which learning rate of each Adam method is best on validation data, and which one the experiments use."""
    lines = []
    for label, rows in panels(results.lines["baseline-rates"]).items():
        scores = {line.spec.params["lr"]: summarize(line.final.values()).mean for line in rows if line.records}
        if scores:
            best = max(scores, key=lambda rate: (scores[rate], -rate))
            used = METHODS[label][1]["lr"]
            told = ", ".join(f"{score:.4f} at {rate:g}" for rate, score in scores.items())
            lines.append(f"{label}: {told}. Best: {best:g}. The experiments use {used:g}.")
    return lines or ["The runs are not recorded."]


def order(results: Results) -> list[str]:
    """How much the fractional order matters."""
    known = _against(results, "order", "α=0.8")
    told = "; ".join(f"{label}: {points(d)} points, {d.n} seeds" for label, d in known.items())
    return [
        "The paper lists these α among its ablations and settles on 0.8, but it shows no result for α and makes no "
        "claim that numbers could decide; so there is no verdict.",
        f"Final accuracy against α=0.8: {told or 'not recorded'}.",
    ]


def sensitivity(results: Results) -> list[str]:
    """How much the parameters matter that the paper leaves open."""
    known = _against(results, "sensitivity", "defaults")
    if not known:
        return ["The runs are not recorded."]
    inside = [label for label, d in known.items() if max(abs(d.low), abs(d.high)) <= MARGIN]
    widest = max(known, key=lambda label: abs(known[label].mean))
    return [
        f"{len(inside)} of {len(known)} settings far from the defaults have a 95% interval within one percentage "
        f"point of the defaults{': ' + ', '.join(inside) if inside else ''}.",
        f"The largest mean difference is that of {widest}: {points(known[widest])} points.",
    ]


def reference(results: Results) -> list[str]:
    """Does what the paper leaves open explain by how much β=1 misses the paper's interval?

    The rule, fixed before the runs: a choice moves the result if the 95% interval of its paired difference excludes
    zero and the mean difference is larger than the miss. The miss is explained if a choice moves the result so towards
    the paper's interval.
    """
    rows = {line.label: summarize(line.final.values()).mean for line in results.panel("reference", DP_SGD)}
    known, mean = _against(results, "reference", AS_HERE), rows.pop(AS_HERE)
    if len(known) < len(rows):
        return ["The runs are not complete."]
    low, high = PRINTED_FINAL[DP_SGD][2:]
    start = f"β=1: our mean {mean:.4f}"
    if low <= mean <= high:
        return [f"{start} lies in the paper's interval [{low:.4f}, {high:.4f}]; there is no miss to explain."]
    miss, side = (low - mean, 1) if mean < low else (mean - high, -1)
    moving = {label: d for label, d in known.items() if abs(d.mean) > miss and d.low * d.high > 0}
    told = [f"{x} by {points(d)} points to {rows[x]:.4f}" for x, d in moving.items()]
    inside = [x + ("" if x in moving else " (perhaps by chance)") for x in rows if low <= rows[x] <= high]
    if any(side * d.mean > 0 for d in moving.values()):
        end = "So the miss is explained by what the paper leaves open."
    elif moving:
        end = "All of it is away from the paper's interval, so the miss is not explained."
    else:
        end = "So the miss is not explained, as far as these seeds can tell."
    return [
        f"{start} misses the paper's interval [{low:.4f}, {high:.4f}] by {100 * miss:.2f} points. A choice moves the "
        "result if it does so by more than that and the 95% interval of the paired difference excludes zero.",
        f"Choices that move it: {len(moving)} of {len(known)}{' (' + '; '.join(told) + ')' if told else ''}. {end}",
        f"The mean lies in the paper's interval with: {'; '.join(inside) or 'none of them'}.",
        *_gain(results),
    ]


def _gain(results: Results) -> list[str]:
    """Does another scale of the pixels bring the paper's gain of FO-DP-SGD over β=1?"""
    told, theirs = [], 100 * (PRINTED_FINAL[FO][0] - PRINTED_FINAL[DP_SGD][0])
    for line in results.panel("reference", FO):
        d = paired(line.final, results.line("reference", line.label, DP_SGD).final)
        told += [] if d is None else [f"{line.label}: {points(d)} points, {d.n} seeds"]
    return (
        [f"The gain of {FO} over β=1 at equal σ, for which the paper has {theirs:+.2f} points: {'; '.join(told)}."]
        if len(told) > 1
        else []
    )


_BY_EXPERIMENT = {
    "baseline-rates": baseline_rates,
    "learning-rate": learning_rate,
    "order": order,
    "reference": reference,
    "sensitivity": sensitivity,
    "fair": fair_findings,
}


def about(results: Results, name: str) -> list[str]:
    """What is to be said about one experiment besides its verdicts."""
    if name not in _BY_EXPERIMENT:
        return []
    short = ["These are the short runs of `--quick`, whose numbers mean nothing."]
    return short if results.quick else _BY_EXPERIMENT[name](results)
