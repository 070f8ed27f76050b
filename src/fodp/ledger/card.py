"""What a ledger says: who spent what, when and on what, and what is left: as records, by page, as a privacy card."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from fodp import accounting
from fodp.accounting import Phase, phases_from_data, rounded_up
from fodp.accounting.budget import RenyiBudget
from fodp.accounting.described import Described
from fodp.accounting.renyi import epsilon_from_rdp
from fodp.ledger.book import DATASETS, Ledger
from fodp.ledger.checking import faults as faults
from fodp.ledger.checking import repeated
from fodp.ledger.holds import when
from fodp.ledger.rows import DataState, Entry
from fodp.support import checks

ON_A_PAGE = 25  # runs of each data set
Record = dict[str, Any]
Budget = RenyiBudget | None
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


def overview(ledger: Ledger, dataset: str | None = None, page: int | None = 1) -> list[Record]:
    """One record per data set: its budget, how many runs it has, and those on this page, newest first; None is all.

    Reads no more than it shows, however large the ledger is.
    """
    if page is not None:
        checks.at_least_zero("page", page - 1)
    store = ledger.store
    found: Iterable[tuple[str, DataState]] = itertools.islice(store.datasets(), None if page is None else DATASETS)
    records = []
    for name, state in found if dataset is None else [(dataset, ledger.known(dataset))]:
        shown = (state.runs, 0) if page is None else (ON_A_PAGE, (page - 1) * ON_A_PAGE)
        begun, unit = store.begun(name, *shown), ledger.unit(name) or "record"
        record = _record(name, unit, ledger.budget(name), state, begun, lambda e: store.entry(store.of_run(e.run).used))
        pages = max(1, math.ceil(state.runs / ON_A_PAGE))
        more = ledger.more_like_the_last(name)
        records.append({**record, "run_count": state.runs, "more_runs": more, "page": page, "pages": pages})
    return records


def summary(ledger: Ledger, dataset: str | None = None) -> list[Record]:
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
    records = []
    for name in rows if dataset is None else [dataset] if dataset in rows else []:
        others = sorted({other for group in names.values() if name in group for other in group} - {name})
        record = _of_dataset(name, ledger.budget(name), rows[name])
        records.append({**record, "also_known_as": others, "rollbacks": rollbacks})
    return records


def card(record: Record) -> str:
    """The privacy card of one data set, a record of `summary`, in plain text."""
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


def _how(record: Record) -> list[str]:
    """How the runs drew lots and made noise; what several say alike is said once."""
    said: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in (*record["runs"], *record["selections"]):
        said[tuple(one["described"])].append(one["run"][:22] if "mean" in one else one["run"][:12])
    return [
        line
        for sentences, names in said.items()
        for line in ("", f"How {', '.join(names)} drew lots and made noise:", *(f"  {words}" for words in sentences))
    ]


def _of_dataset(name: str, budget: Budget, rows: list[Entry]) -> Record:
    last: dict[str, Entry] = {entry.run: entry for entry in rows if entry.steps is not None}
    begun = [entry for entry in rows if entry.kind in ("run", "selection")]
    selected, unit = (
        [e for e in begun if e.kind == "selection"],
        "person" if any(e.kind == "unit" for e in rows) else "record",
    )
    used = [phase for e in begun if e.kind == "run" for phase in _covered(e, last[e.run], budget)]
    return {
        **_record(name, unit, budget, rows[-1].of_data, begun, lambda entry: last[entry.run]),
        "epsilons": {delta: _together(used, selected, delta) for delta in _deltas(budget)},
        "accountant": "privacy loss distributions" if not selected else "Rényi DP",
        "changes": [when(e) for e in rows if e.kind == "data" and e.data["allowed_change"]],
    }


def _record(
    name: str, unit: str, budget: Budget, state: DataState, begun: list[Entry], last: Callable[[Entry], Entry]
) -> Record:
    """What is said of a data set, of the runs and selections that were `begun`, and of what is left."""
    return {
        "dataset": name,
        "unit": unit,
        "budget": None if budget is None else _left(budget, state),
        "runs": [_run(entry, last(entry), budget) for entry in begun if entry.kind == "run"],
        "selections": [_selection(entry, budget, unit) for entry in begun if entry.kind == "selection"],
    }


def _left(budget: RenyiBudget, state: DataState) -> Record:
    return {
        **dataclasses.asdict(budget),
        "spent": state.spent / budget.capacity,
        "held": (state.taken - state.spent) / budget.capacity,
        "left": max(0.0, 1 - state.taken / budget.capacity),
        "epsilons": {delta: budget.epsilon_at(delta) for delta in _deltas(budget)},
    }


def _deltas(budget: Budget) -> list[float]:
    return sorted({*_DELTAS, *([budget.delta] if budget else [])}, reverse=True)


def _run(first: Entry, last: Entry, budget: Budget) -> Record:
    """What is said of one run, from the row that began it and the newest one that says what it used."""
    delta = float(first.data["about"].get("delta", _DELTAS[0] if budget is None else budget.delta))
    phases, planned, used = phases_from_data(first.data["phases"]), first.data["planned"], last.steps or 0
    stopped = budget is None and last.kind == "settle" and used < planned
    epsilon = accounting.epsilon_of(_covered(first, last, None), delta)  # whatever made it stop
    if used < planned and budget is not None and budget.delta <= delta:
        epsilon = min(epsilon, budget.epsilon)
    state = "ended in order" if last.kind == "settle" else "running, or crashed"
    return {
        **_common(first, last, budget, phases, first.data["about"]),
        "last": when(last),
        "about": first.data["about"],
        "planned": planned,
        "steps": last.steps,
        "state": "stopped early without a budget: epsilon is that of all its planned steps" if stopped else state,
        "stopped_early": stopped,
        "epsilon": epsilon,
        "delta": delta,
    }


def _selection(entry: Entry, budget: Budget, unit: str) -> Record:
    """What is said of one selection."""
    repetitions, phases = repeated(entry)
    delta = max(_DELTAS) if budget is None else budget.delta
    return {
        **_common(entry, entry, budget, phases, {"unit": unit}),
        "mean": entry.data["mean"],
        "shape": entry.data["shape"],
        "epsilon": repetitions.epsilon(phases, delta),
        "delta": delta,
    }


def _common(first: Entry, last: Entry, budget: Budget, phases: tuple[Phase, ...], about: Record) -> Record:
    return {
        "run": first.run,
        "who": first.data["who"],
        "began": when(first),
        "share": None if budget is None else (last.rdp or 0.0) / budget.capacity,
        "events": first.data["phases"],
        "described": list(Described.of_run(phases, about).sentences()),
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


def _covered(first: Entry, last: Entry, budget: Budget) -> tuple[Phase, ...]:
    """What a run counts as having released: the steps used, and without a budget all that were fixed beforehand.

    Where a run stopped may tell what it saw; the steps up to there cost what they cost only to a filter.
    """
    phases, used, planned = phases_from_data(first.data["phases"]), last.steps or 0, first.data["planned"]
    return accounting.truncate(phases, used if budget is not None else max(used, planned))


def _pairs(epsilons: dict[float, float]) -> str:
    return ", ".join(
        f"epsilon {rounded_up(epsilon)} at delta {rounded_up(delta, 6)}" for delta, epsilon in epsilons.items()
    )
