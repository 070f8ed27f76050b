"""What a ledger says: who spent what, when and on what, what is left, and whether the file can be believed."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from fodp import accounting
from fodp.accounting import Phase, phases_from_data, rounded_up
from fodp.accounting.budget import RenyiBudget
from fodp.accounting.renyi import epsilon_from_rdp
from fodp.described import Described
from fodp.ledger.book import Ledger
from fodp.ledger.checking import faults as faults
from fodp.ledger.checking import repeated
from fodp.ledger.holds import when
from fodp.ledger.rows import DataState, Entry

_DELTAS = (1e-5, 1e-6, 1e-8)
_NOT_COVERED = (
    "what was trained on this data without this ledger, or under another name; a choice of hyper-parameters made by "
    "looking at the data itself; scores on data that is itself private; {people}; public numbers "
    "(sampling rate, lot size, steps) that came from the data; seeded runs against whoever knows the seed, and against "
    "everybody if a seed was used for a second run that this ledger, or this machine, does not know of; "
    "floating-point and timing attacks"
)


def not_covered(unit: str) -> str:
    """What no guarantee of a ledger counts."""
    people = "people with several examples" if unit == "record" else "people whose records have several owners' names"
    return _NOT_COVERED.format(people=people)


def summary(ledger: Ledger, dataset: str | None = None) -> list[dict[str, Any]]:
    """One record per data set: its budget, its runs and selections, and ε at several δ. Changes nothing."""
    rows: dict[str, list[Entry]] = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)  # that one fingerprint goes by
    rollbacks = []
    for entry in ledger.store.select():
        if entry.kind == "rollback":
            rollbacks.append(f"{when(entry)}, by {entry.data['who']}")
            continue
        rows[entry.dataset].append(entry)
        if entry.kind == "data":
            names[entry.data["fingerprint"]].add(entry.dataset)
    return [
        {
            **_of_dataset(name, ledger.budget(name), rows[name]),
            "also_known_as": _others(name, names.values()),
            "rollbacks": rollbacks,
        }
        for name in rows
        if dataset in (None, name)
    ]


def card(record: dict[str, Any]) -> str:
    """The privacy card of one data set in plain text."""
    lines = [f"Privacy card of the data set {record['dataset']!r}", ""]
    budget = record["budget"]
    if budget is not None:
        lines += [
            "Guarantee: everything ever released under this name in this ledger is "
            f"({rounded_up(budget['epsilon'], 6)}, {rounded_up(budget['delta'], 6)})-differentially private, "
            "whatever was run, and however runs were chosen after seeing earlier ones.",
            f"Spent: {budget['spent']:.1%} of the budget; left: {budget['left']:.1%}"
            + (f"; held by runs that have not ended: {budget['held']:.1%}." if budget["held"] > 1e-9 else "."),
            "The same budget at other deltas: " + _pairs(budget["epsilons"]) + ".",
        ]
    lines += [
        "If the runs below had been fixed in advance: " + _pairs(record["epsilons"]) + ".",
        Described((), unit=record["unit"]).protected(),
        f"Added up by: {record['accountant']}"
        + ("" if budget is None else f"; the budget is kept by a Rényi filter at the fixed order {budget['order']:g}")
        + ".",
        "",
        "Runs:",
    ]
    for run in record["runs"]:
        about = run["about"]
        lines.append(
            f"  {run['began']}  {run['run'][:12]}  {run['who']}  {about.get('method', '')}  {run['steps']} of "
            f"{run['planned']} steps  epsilon {rounded_up(run['epsilon'])} at delta {rounded_up(run['delta'], 6)}  "
            f"{about.get('randomness', '')}  {run['state']}"
        )
    for chosen in record["selections"]:
        lines.append(
            f"  {chosen['began']}  {chosen['run'][:22]}  {chosen['who']}  best of a random number of runs, mean "
            f"{chosen['mean']:g}, shape {chosen['shape']}  epsilon {rounded_up(chosen['epsilon'])} at "
            f"delta {rounded_up(chosen['delta'], 6)}"
        )
    lines += _how(record)
    for change in record["changes"]:
        lines.append(f"  {change}  the data was changed on purpose; each version has the guarantee for itself only")
    others = record["also_known_as"]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        lines.append(
            f"  This data is in the ledger as {', '.join(map(repr, others[:3]))}{more} too: what was released under "
            "all these names adds up, and no guarantee above counts the others."
        )
    lines += [
        f"  {rollback}  an older copy of this ledger was put back on purpose: what it forgot is not counted above"
        for rollback in record["rollbacks"]
    ]
    lines += ["", f"Not covered: {not_covered(record['unit'])}."]
    return "\n".join(lines)


def _how(record: dict[str, Any]) -> list[str]:
    """How the runs drew lots and made noise; what several say alike is said once."""
    said: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in (*record["runs"], *record["selections"]):
        said[tuple(one["described"])].append(one["run"][:22] if "mean" in one else one["run"][:12])
    return [
        line
        for sentences, names in said.items()
        for line in ("", f"How {', '.join(names)} drew lots and made noise:", *(f"  {words}" for words in sentences))
    ]


def _of_dataset(name: str, budget: RenyiBudget | None, rows: list[Entry]) -> dict[str, Any]:
    last: dict[str, Entry] = {entry.run: entry for entry in rows if entry.steps is not None}
    begun = [entry for entry in rows if entry.kind == "run"]
    selected = [entry for entry in rows if entry.kind == "selection"]
    deltas, unit = _deltas(budget), "person" if any(entry.kind == "unit" for entry in rows) else "record"
    used = [phase for entry in begun for phase in _covered(entry, last[entry.run], budget)]
    return {
        "dataset": name,
        "unit": unit,
        "budget": None if budget is None else budget_record(budget, rows[-1].of_data),
        "epsilons": {delta: _together(used, selected, delta) for delta in deltas},
        "accountant": "privacy loss distributions" if not selected else "Rényi DP",
        "runs": [run_record(entry, last[entry.run], budget) for entry in begun],
        "selections": [selection_record(entry, budget, unit) for entry in selected],
        "changes": [when(e) for e in rows if e.kind == "data" and e.data["allowed_change"]],
    }


def budget_record(budget: RenyiBudget, state: DataState) -> dict[str, Any]:
    """What is said of a budget and of what runs have left of it."""
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "order": budget.order,
        "spent": state.spent / budget.capacity,
        "held": (state.taken - state.spent) / budget.capacity,
        "left": max(0.0, 1 - state.taken / budget.capacity),
        "epsilons": {delta: budget.epsilon_at(delta) for delta in _deltas(budget)},
    }


def _deltas(budget: RenyiBudget | None) -> list[float]:
    return sorted({*_DELTAS, *([budget.delta] if budget else [])}, reverse=True)


def _others(name: str, groups: Iterable[set[str]]) -> list[str]:
    return sorted({other for group in groups if name in group for other in group} - {name})


def run_record(first: Entry, last: Entry, budget: RenyiBudget | None) -> dict[str, Any]:
    """What is said of one run, from the row that began it and the newest one that says what it used."""
    delta = float(first.data["about"].get("delta", _DELTAS[0] if budget is None else budget.delta))
    return {
        "run": first.run,
        "who": first.data["who"],
        "began": when(first),
        "last": when(last),
        "about": first.data["about"],
        "planned": first.data["planned"],
        "steps": last.steps,
        "state": _state(first, last, budget),
        "stopped_early": _stopped_early(first, last, budget),
        "epsilon": _epsilon(first, last, budget, delta),
        "delta": delta,
        "share": None if budget is None else (last.rdp or 0.0) / budget.capacity,
        "events": first.data["phases"],
        "described": list(Described.of_run(phases_from_data(first.data["phases"]), first.data["about"]).sentences()),
    }


def selection_record(entry: Entry, budget: RenyiBudget | None, unit: str) -> dict[str, Any]:
    """What is said of one selection."""
    repetitions, phases = repeated(entry)
    delta = max(_DELTAS) if budget is None else budget.delta
    return {
        "run": entry.run,
        "who": entry.data["who"],
        "began": when(entry),
        "mean": entry.data["mean"],
        "shape": entry.data["shape"],
        "epsilon": repetitions.epsilon(phases, delta),
        "delta": delta,
        "share": None if budget is None else (entry.rdp or 0.0) / budget.capacity,
        "events": entry.data["phases"],
        "described": list(Described.of_run(phases, {"unit": unit}).sentences()),
    }


def _together(used: list[Phase], selected: list[Entry], delta: float) -> float:
    """ε of all runs as if planned in advance; selections have no loss distribution, so with them Rényi answers."""
    if not selected:
        return accounting.epsilon_of(used, delta)
    rdp = accounting.rdp_curve(used)[1]
    for entry in selected:
        repetitions, phases = repeated(entry)
        rdp = rdp + repetitions.rdp(phases)
    return epsilon_from_rdp(rdp, delta)


def _covered(first: Entry, last: Entry, budget: RenyiBudget | None) -> tuple[Phase, ...]:
    """What a run counts as having released: the steps used, and without a budget all that were fixed beforehand.

    Where a run stopped may tell what it saw; the steps up to there cost what they cost only to a filter.
    """
    phases, used, planned = phases_from_data(first.data["phases"]), last.steps or 0, first.data["planned"]
    return accounting.truncate(phases, used if budget is not None else max(used, planned))


def _epsilon(first: Entry, last: Entry, budget: RenyiBudget | None, delta: float) -> float:
    """The run's own ε, whatever made it stop: of all steps that were fixed beforehand, or the budget's if smaller."""
    whole = accounting.epsilon_of(_covered(first, last, None), delta)
    unfinished = (last.steps or 0) < first.data["planned"]
    return min(whole, budget.epsilon) if unfinished and budget is not None and budget.delta <= delta else whole


def _stopped_early(first: Entry, last: Entry, budget: RenyiBudget | None) -> bool:
    """Did it end before the end that was fixed beforehand, with no budget to cover that?"""
    return budget is None and last.kind == "settle" and (last.steps or 0) < first.data["planned"]


def _state(first: Entry, last: Entry, budget: RenyiBudget | None) -> str:
    if _stopped_early(first, last, budget):
        return "stopped early without a budget: epsilon is that of all its planned steps"
    return "ended in order" if last.kind == "settle" else "running, or crashed"


def _pairs(epsilons: dict[float, float]) -> str:
    return ", ".join(
        f"epsilon {rounded_up(epsilon)} at delta {rounded_up(delta, 6)}" for delta, epsilon in epsilons.items()
    )
