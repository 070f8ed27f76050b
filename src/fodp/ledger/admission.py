"""What may be spent: whether a run or a selection fits into a budget and is about the same data, unit and seed."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fodp.accounting import Phase, rounded_up
from fodp.accounting.budget import RenyiBudget
from fodp.accounting.releases import Floats
from fodp.errors import BudgetError, DataError, LedgerError
from fodp.ledger.fingerprint import comparable
from fodp.ledger.holds import NoRoom, told
from fodp.ledger.rows import UNNAMED
from fodp.ledger.store import Store


class Spending(NamedTuple):
    """What a run or a selection wants to spend: on which data, about whom, and how its cost follows from a budget."""

    dataset: str
    run: str
    steps: int
    costs: Callable[[RenyiBudget], Floats]  # after each step
    unit: str
    seed: str | None
    fingerprint: str | None
    begins: bool = True  # not one that is taken up again


class Admission:
    """Decides for one ledger: what it wants as a budget, and what its user allows, against what its rows say."""

    def __init__(self, store: Store, wanted: tuple[float, float] | None, changed_data: bool, other_name: bool):
        self._store, self._file, self._wanted = store, store.path, wanted
        self._allow_changed_data, self._allow_other_name = changed_data, other_name

    def budget(self, dataset: str) -> RenyiBudget | None:
        """The budget of a data set, if it has one."""
        with self._store.reading():
            row = self._store.of_data(dataset).budget
            return RenyiBudget(**self._store.entry(row).data) if row else None

    def admitted(self, wish: Spending, agreed: RenyiBudget | None) -> tuple[RenyiBudget | None, Floats | None, bool]:
        """The budget, the costs, and whether the data has changed; or a refusal. Within `writing()`.

        Everything is looked at again: another process may have been quicker since `agreed` was.
        """
        dataset, stored = wish.dataset, self.budget(wish.dataset)
        if stored is not None:
            self._refuse_other_budget(dataset, stored)
        budget = stored or agreed
        costs = None if budget is None else wish.costs(budget)
        if wish.begins:
            self.refuse_used_seed(wish.seed, budget is not None)
            self.refuse_other_unit(dataset, wish.unit)
            if wish.unit == "person" and not self._store.marked(f"unit of {dataset}", limit=1):
                self._store.append("unit", dataset, data={"unit": wish.unit})
        if budget is not None and costs is not None:
            if wish.begins:
                self.refuse_no_room(dataset, budget, costs, wish.steps)
            if stored is None:
                self._refuse_late_budget(dataset)
                data = {"epsilon": budget.epsilon, "delta": budget.delta, "order": budget.order}
                self._store.append("budget", dataset, data=data)
        return budget, costs, self.check_fingerprint(dataset, wish.run, wish.fingerprint)

    def hold(self, wish: Spending, budget: RenyiBudget | None, costs: Floats | None) -> float | None:
        """What is kept free for the whole plan; for a run that is taken up again, as much of it as there still is."""
        if budget is None or costs is None:
            return None
        left = budget.capacity - self._store.others_taken(wish.dataset, wish.run)
        return max(0.0, min(float(costs[wish.steps]), left))

    def agreed_budget(self, dataset: str, phases: Sequence[Phase]) -> RenyiBudget | None:
        """The budget in the ledger; where there is none yet, the wanted one at an order that suits this run."""
        stored = self.budget(dataset)
        if stored is not None or self._wanted is None:
            self._refuse_other_budget(dataset, stored)
            return stored
        self._refuse_late_budget(dataset)
        return RenyiBudget.suited_to(phases, float(self._wanted[0]), float(self._wanted[1]))

    def _refuse_other_budget(self, dataset: str, stored: RenyiBudget | None) -> None:
        if stored is None or self._wanted is None or (stored.epsilon, stored.delta) == tuple(map(float, self._wanted)):
            return
        raise BudgetError(
            f"the budget of {dataset!r} in {self._file} is ({rounded_up(stored.epsilon, 6)}, {stored.delta:g}), not "
            f"({self._wanted[0]:g}, {self._wanted[1]:g}): a budget is fixed once and for all; leave it out"
        )

    def _refuse_late_budget(self, dataset: str) -> None:
        state = self._store.of_data(dataset)
        if state.runs and not state.budget:
            raise BudgetError(
                f"{dataset!r} has runs in {self._file} from before it had a budget, which must be fixed before the "
                "first one: go on without a budget, or begin another ledger and say what it does not cover"
            )

    def refuse_no_room(self, dataset: str, budget: RenyiBudget, costs: Floats, steps: int) -> None:
        """Raise if so many steps cost more than the runs on this data have left."""
        state = self._store.of_data(dataset)
        left = budget.capacity - state.taken
        if costs[steps] <= left:
            return
        fitting = max(0, int(np.searchsorted(costs, left, side="right")) - 1)
        raise NoRoom(
            f"the budget of {dataset!r} ({rounded_up(budget.epsilon, 6)}, {budget.delta:g}) has "
            f"{max(0.0, left) / budget.capacity:.1%} left and this needs {costs[steps] / budget.capacity:.1%}: "
            + (f"only {fitting} of its {steps} steps would fit" if fitting else "nothing of it fits")
            + "; take fewer steps or more noise"
            + told(self._store, dataset, budget),
            later=bool(costs[steps] <= budget.capacity - state.spent),
        )

    def refuse_other_unit(self, dataset: str, unit: str) -> None:
        """An epsilon for people and one for single records do not add up to anything."""
        people = bool(self._store.marked(f"unit of {dataset}", limit=1))
        if people != (unit == "person") and (people or self._store.of_data(dataset).runs):
            raise LedgerError(
                f"what was spent on {dataset!r} in {self._file} is about a {'person' if people else 'record'}, and the "
                f"unit of this run is a {unit}: the two do not add up. Give the runs about a {unit} another name for "
                "the data (dataset=, --dataset-name; --allow-other-name says that it has two), with a budget of its own"
            )

    def refuse_used_seed(self, seed: str | None, guarded: bool) -> None:
        """Two runs under one seed have the same masks and noise, on whatever data: their difference has none."""
        for entry in [] if seed is None else self._store.marked(f"seed {seed}"):
            if guarded or self.budget(entry.dataset) is not None:
                raise LedgerError(
                    f"run {entry.run[:12]} on {entry.dataset!r} in {self._file} used this seed, and whoever sees two "
                    "runs under one seed subtracts their noise without knowing it: take another seed, or leave it out; "
                    "to go on with that run, resume it"
                )

    def check_fingerprint(self, dataset: str, run: str, mark: str | None) -> bool:
        """Is the data another than before? Then stop, or write down that it was allowed."""
        if mark is None:
            return False
        newest = self._store.of_data(dataset).data
        mine = self._comparable_mark(newest, mark)
        changed = mine is not None and mine != mark
        if changed and not self._allow_changed_data:
            raise DataError(
                f"the data is not what it was when {dataset!r} was last used on this machine: use another name for "
                "other data, or say that it has changed on purpose (--allow-changed-data, allow_changed_data=True)"
            )
        if changed or mine is None:
            if not self._allow_other_name:
                self._refuse_other_name(dataset, mark)
            data = {"fingerprint": mark, "allowed_change": changed, "before": newest}
            self._store.append("data", dataset, run, data=data)
        return changed

    def _comparable_mark(self, row: int, mark: str) -> str | None:
        """The newest fingerprint of a data set that was made with the key of `mark`; `row` is the newest of all."""
        while row:
            data = self._store.entry(row).data
            if comparable(data["fingerprint"], mark):
                return str(data["fingerprint"])
            row = int(data["before"])
        return None

    def _refuse_other_name(self, dataset: str, mark: str) -> None:
        """Unnamed runs among themselves have no budget to escape from."""
        known = sorted({entry.dataset for entry in self._store.marked(f"data {mark}")} - {dataset})
        if not known and not dataset.startswith(UNNAMED):
            known = [entry.dataset for entry in self._store.marked(f"data unnamed {mark}", limit=1)]
        if known:
            advice = "" if known[0].startswith(UNNAMED) else "use that name, or "
            raise DataError(
                f"this data is in {self._file} as {known[0]!r} already, whose budget does not count what is released "
                f"under another name: {advice}say that it has two on purpose (--allow-other-name, "
                "allow_other_name=True)"
            )
