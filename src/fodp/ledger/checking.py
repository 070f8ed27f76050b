"""Whether a ledger can be believed: every row, the chain, and every sum computed again from the events. Linear."""

import functools
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any

from fodp.accounting import Phase, phases_from_data
from fodp.accounting.budget import RenyiBudget, Repetitions
from fodp.accounting.renyi import ORDERS
from fodp.ledger.book import Ledger
from fodp.ledger.rows import DataState, Entry, RunState, states_after

_MOST = 1000  # faults that are listed: a file of another kind has one a row


def faults(ledger: Ledger, tick: Callable[[], object] = lambda: None) -> list[str]:
    """What is wrong with the ledger: damage, edits, sums that are not those of the events, an exceeded budget.

    `tick` is called twice for every row: this reads all of them, first for their chain and then for their sums.
    """
    store, sums = ledger.store, _Sums()
    found = store.faults()
    found += islice(store.chain_faults(tick=tick), _MOST)
    if found:
        return found  # the rest would be computed from numbers that are not ours
    for row in store.raw_rows():
        tick()
        found += sums.faults(row.entry())
    if store.known_before() is not None:
        found.append("it is older than the mark beside it knows (see `fodp ledger accept-rollback`)")
    return found


class _Sums:
    """Follows the rows from the first one on and computes everything again that they state."""

    def __init__(self) -> None:
        self._data: dict[str, DataState] = defaultdict(DataState)
        self._runs: dict[str, RunState] = defaultdict(RunState)
        self._budgets: dict[str, RenyiBudget] = {}
        self._events: dict[str, Entry] = {}
        self._floor: dict[str, int] = {}  # steps that an earlier process may have used

    def faults(self, entry: Entry) -> list[str]:
        """What is wrong with the next row."""
        before = self._runs[entry.run] if entry.run else RunState()
        words = (entry.id, entry.kind, entry.steps, entry.rdp, entry.data)
        expected = states_after(*words, self._data[entry.dataset], before)
        self._data[entry.dataset] = entry.of_data
        if entry.run:
            self._runs[entry.run] = entry.of_run
        if entry.kind == "budget":
            self._budgets[entry.dataset] = RenyiBudget(**entry.data)
        if entry.kind in ("run", "selection"):
            self._events[entry.run] = entry
        if entry.kind == "resume":
            self._floor[entry.run] = before.steps or 0
        wrong = [] if (entry.of_data, entry.of_run) == expected else [f"entry {entry.id} states sums that are not so"]
        return wrong + ([] if entry.steps is None else self._faults_of_cost(entry, entry.steps))

    def _faults_of_cost(self, entry: Entry, steps: int) -> list[str]:
        found = []
        if steps < self._floor.get(entry.run, 0):
            found.append(f"entry {entry.id} gives back steps that an earlier process may have used")
        budget = self._budgets.get(entry.dataset)
        if budget is None:
            return found
        expected = _cost(self._events.get(entry.run), steps, budget)
        # Older versions' bounds at fractional orders were looser, so a cost may be above what it is found to be now.
        if entry.rdp is None or entry.rdp < expected * (1 - 1e-6) - 1e-12:
            found.append(f"entry {entry.id} states a cost of {entry.rdp}, its events cost {expected:g}")
        if entry.of_data.spent > budget.capacity * (1 + 1e-9):
            found.append(f"entry {entry.id} exceeds the budget of {entry.dataset!r}")
        return found


def repeated(entry: Entry) -> tuple[Repetitions, tuple[Phase, ...]]:
    """What a selection is the best of."""
    return Repetitions(entry.data["mean"], float(entry.data["shape"])), phases_from_data(entry.data["phases"])


def _cost(begun: Entry | None, steps: int, budget: RenyiBudget) -> float:
    """Of the first steps of a run, or of a selection; infinite where the ledger does not know its events."""
    if begun is None or "phases" not in begun.data:
        return float("inf")
    if begun.kind == "selection":
        repetitions, phases = repeated(begun)
        return float(repetitions.rdp(phases)[ORDERS.index(budget.order)])
    costs = _costs(json.dumps(begun.data["phases"]), budget)
    return float(costs[steps]) if 0 <= steps < len(costs) else float("inf")


@functools.lru_cache(maxsize=64)
def _costs(phases: str, budget: RenyiBudget) -> Any:
    """Runs of one kind are many; their costs are computed once."""
    return budget.costs(phases_from_data(json.loads(phases)))
