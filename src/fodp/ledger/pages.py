"""A ledger to leaf through: what each data set comes to, and its runs by page, whatever the number of them."""

import itertools
import math
from typing import Any

from fodp import _checks
from fodp._checks import LedgerError
from fodp.ledger.book import Ledger
from fodp.ledger.card import budget_record, run_record, selection_record
from fodp.ledger.rows import DataState

ON_A_PAGE = 25  # runs of each data set
_DATASETS = 20  # that are looked at unless all are asked for


def overview(ledger: Ledger, dataset: str | None = None, page: int | None = 1) -> list[dict[str, Any]]:
    """One record per data set: its budget, how many runs it has, and those on this page, newest first; None is all."""
    if page is not None:
        _checks.at_least_zero("page", page - 1)
    if dataset is not None:
        return [_record(ledger, dataset, _state_of(ledger, dataset), page)]
    found = itertools.islice(ledger.store.datasets(), None if page is None else _DATASETS)
    return [_record(ledger, name, state, page) for name, state in found]


def known_names(ledger: Ledger) -> str:
    """The names of data that a ledger knows, for a message; not all, if they are many."""
    names = [name for name, _ in itertools.islice(ledger.store.datasets(), _DATASETS + 1)]
    return ", ".join(sorted(names[:_DATASETS])) + (", …" if len(names) > _DATASETS else "")


def _state_of(ledger: Ledger, dataset: str) -> DataState:
    state = ledger.store.of_data(dataset)
    if state == DataState():
        raise LedgerError(
            f"{ledger.path} knows no data set {dataset!r}; it knows {known_names(ledger) or 'none'}: mend the name"
        )
    return state


def _record(ledger: Ledger, name: str, state: DataState, page: int | None) -> dict[str, Any]:
    budget, store = ledger.budget(name), ledger.store
    pages = max(1, math.ceil(state.runs / ON_A_PAGE))
    begun = store.begun(name, state.runs) if page is None else store.begun(name, ON_A_PAGE, (page - 1) * ON_A_PAGE)
    runs, unit = [entry for entry in begun if entry.kind == "run"], ledger.unit(name) or "record"
    return {
        "dataset": name,
        "unit": unit,
        "budget": None if budget is None else budget_record(budget, state),
        "run_count": state.runs,
        "page": page,
        "pages": pages,
        "runs": [run_record(entry, store.entry(store.of_run(entry.run).used), budget) for entry in runs],
        "selections": [selection_record(entry, budget, unit) for entry in begun if entry.kind == "selection"],
    }
