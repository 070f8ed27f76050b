"""The ledger: runs and budgets of data sets, and what may still be spent on them."""

import getpass
import itertools
import json
import math
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fodp
from fodp import _checks
from fodp._checks import BudgetError, ConfigurationError, DataError, LedgerError
from fodp.accounting import Phase, phases_to_data, rounded_up
from fodp.accounting.budget import RenyiBudget, Repetitions
from fodp.accounting.releases import Floats
from fodp.accounting.renyi import ORDERS
from fodp.ledger.account import Account
from fodp.ledger.fingerprint import comparable
from fodp.ledger.holds import Hold, NoRoom, Queue, holds, told
from fodp.ledger.replays import Left, left_behind, to_data
from fodp.ledger.rows import UNNAMED, DataState, Entry
from fodp.ledger.store import Store

DATASETS = 20  # that are looked at unless all are asked for


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


class Ledger:
    """The spending of many runs in one SQLite file, or on a server (`postgresql://…`), that is only ever added to.

    Every step's event is in the file before its release is used; a crash can only over-count. `dataset` is your
    name for the data; runs under one name share its `budget` (ε, δ), which is fixed by the first run that names
    one and refuses, by a Rényi filter, what would exceed it. Processes on one file cannot overspend together.
    Unnamed runs are written down, each for itself. Where data under a name no longer is what it was on this
    machine, runs stop unless `allow_changed_data`; where it is in the ledger under another name, whose budget it
    would escape, they stop unless `allow_other_name`.

    A new run holds what its whole plan costs until it ends, so that runs do not starve each other; one that does not
    fit is refused, or waits up to `wait` seconds if what others hold but have not used would do.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dataset: str | None = None,
        budget: tuple[float, float] | None = None,
        allow_changed_data: bool = False,
        allow_other_name: bool = False,
        create: bool = True,
        verify: bool = True,
        older: bool = False,
        wait: float = 0.0,
    ):
        if dataset is not None and not (isinstance(dataset, str) and dataset.strip()):
            raise ConfigurationError(f"dataset must be a name for the data, got {dataset!r}")
        if budget is not None:
            if dataset is None:
                raise ConfigurationError("a budget belongs to a data set: name it (dataset=, --dataset-name)")
            if not isinstance(budget, tuple | list) or len(budget) != 2:
                raise ConfigurationError(
                    f"budget is a pair (epsilon, delta), such as (3, 1e-5), got {_checks.shown(budget)}: an epsilon "
                    "without its delta says nothing"
                )
            _checks.positive("the budget's epsilon", budget[0])
            _checks.open_fraction("the budget's delta", budget[1])
        self.dataset, self._wanted = dataset, budget
        self.allow_changed_data, self.allow_other_name = allow_changed_data, allow_other_name
        self._queue = Queue(wait)
        self.store = Store(path, create=create, verify=verify, older=older)

    def __repr__(self) -> str:
        named = "" if self.dataset is None else f", dataset={self.dataset!r}"
        return f"Ledger({str(self.path)!r}{named})"

    @property
    def path(self) -> Path | str:
        """The file, or the address of the server."""
        return self.store.path

    @property
    def identity(self) -> str:
        """The random name that a ledger got when it was made: a copy has it too, a new file under its path does not."""
        return self.store.header.identity

    def close(self) -> None:
        """Close the file."""
        self.store.close()

    def has_charged(self, run: str, phases: Sequence[Phase]) -> bool:
        """Is this run in here, in the data set of this ledger, with all of these phases counted as used?"""
        first = self._begun(run)
        return (
            first is not None
            and first.dataset == self._name(run)
            and first.data["phases"] == phases_to_data(phases)
            and self.steps(run) == sum(phase.steps for phase in phases)
        )

    def steps(self, run: str) -> int | None:
        """How many steps of the run count as used; None if the ledger does not know the run."""
        return self.store.of_run(run).steps

    def budget(self, dataset: str) -> RenyiBudget | None:
        """The budget of a data set, if it has one."""
        with self.store.reading():
            row = self.store.of_data(dataset).budget
            return RenyiBudget(**self.store.entry(row).data) if row else None

    def budget_of(self, run: str) -> RenyiBudget | None:
        """The budget that guards the data of a run, if it has one."""
        first = self._begun(run)
        return None if first is None else self.budget(first.dataset)

    def left(self, dataset: str) -> float:
        """How much of the budget's capacity is left: 1 for all of it, infinity where there is no budget.

        A name that the ledger does not know is refused: a typing error would seem to have no limit.
        """
        with self.store.reading():
            budget, state = self.budget(dataset), self.store.of_data(dataset)
        if budget is not None:
            return max(0.0, 1 - state.taken / budget.capacity)
        if dataset != self.dataset:
            self.known(dataset)
        wanted = dataset == self.dataset and self._wanted is not None
        return 1.0 if wanted and not state.runs else math.inf  # its first run fixes the budget

    def known(self, dataset: str) -> DataState:
        """What the rows of a data set come to; LedgerError where there are none."""
        state = self.store.of_data(dataset)
        if state == DataState():
            raise LedgerError(
                f"{self.path} knows no data set {dataset!r}; it knows {self.names() or 'none'}: mend the name"
            )
        return state

    def names(self) -> str:
        """The names of data that the ledger knows, for a message; not all, if they are many."""
        names = [name for name, _ in itertools.islice(self.store.datasets(), DATASETS + 1)]
        return ", ".join(sorted(names[:DATASETS])) + (", …" if len(names) > DATASETS else "")

    def holds(self, dataset: str) -> list[Hold]:
        """Who keeps a part of the data set's budget for steps to come, newest first."""
        return holds(self.store, dataset)

    def has_budgets(self) -> bool:
        """Has any data set in here a budget, or is about to get one?"""
        return self._wanted is not None or any(self.store.select("budget"))

    def unit(self, dataset: str) -> str | None:
        """Whom the spending on a data set is about, "record" or "person"; None while there is none."""
        if self.store.marked(f"unit of {dataset}", limit=1):
            return "person"
        return "record" if self.store.of_data(dataset).runs else None

    def refuse_stranger(self, run: str, digest: str, position: tuple[int, str]) -> None:
        """Raise unless this ledger saw the checkpoint being written and has not forgotten anything since before."""
        with self.store.reading():
            number = int(position[0])
            known = 1 <= number <= self.store.count() and self.store.entry(number).chain == position[1]
            seen = any(entry.run == run for entry in self.store.marked(f"digest {digest}"))
        if not known:
            raise LedgerError(
                f"the checkpoint was written with another ledger than {self.path}, or with a later state of it, and "
                "only that knows what was spent: a run goes on only with its ledger"
            )
        if not seen:
            raise LedgerError(
                "the checkpoint is not one that this run wrote (its ledger does not know it), so it was tampered with: "
                "restore a copy of it"
            )

    def tell_waiting(self, tell: Callable[[str], object]) -> None:
        """Have it said when a run begins to wait for room, and for whom."""
        self._queue.tell = tell

    def refuse_unfit(
        self, phases: Sequence[Phase], steps: int, *, seed: str | None = None, unit: str = "record"
    ) -> None:
        """Raise if a new run of this many steps would not fit: into the budget, for a used seed, for another unit.

        Changes nothing.
        """
        if self.dataset is not None:
            self._refuse_other_unit(self.dataset, unit)
            budget = self._agreed_budget(self.dataset, phases)
            self._refuse_used_seed(seed, budget is not None)
            if budget is not None:
                dataset, costs = self.dataset, budget.costs(phases)
                self._queue.until_fit(lambda: self._refuse_no_room(dataset, budget, costs, steps))

    def open(
        self,
        run: str,
        phases: Sequence[Phase],
        steps: int,
        *,
        about: Mapping[str, Any] | None = None,
        fingerprint: str | None = None,
        seed: str | None = None,
        replays: bool = False,
    ) -> Account:
        """Begin a run of the first `steps` steps of `phases`, or take up the one that was begun under this id.

        A new run that does not fit into the budget as a whole is refused, and so is one whose `seed`, a keyed mark of
        it, another run has used, if either's data has a budget. Whoever held the run before, in a process that is
        still alive, gets no more steps. `replays` says that the run is seeded: its releases are witnessed, so that a
        step which is repeated is the same release.
        """
        known, about = self._begun(run), dict(about or {})
        if known is not None:
            self._refuse_other_run(known, phases)
        dataset = self._name(run) if known is None else known.dataset
        agreed, unit = self._agreed_budget(dataset, phases), str(about.get("unit", "record"))
        wish = Spending(dataset, run, steps, lambda b: b.costs(phases), unit, seed, fingerprint, known is None)

        def attempt() -> tuple[Account, Left | None]:
            left: Left | None = None
            with self.store.writing():
                budget, costs, changed = self._admitted(wish, agreed)
                data = {**_who(), "about": about, "hold": self._hold(wish, budget, costs)}
                if known is None:
                    data |= {"phases": phases_to_data(phases), "seed": seed, "planned": steps}
                    data |= {"unused_from": 0} if replays else {}
                    rdp = None if costs is None else 0.0
                    opened = self.store.append("run", dataset, run, steps=0, rdp=rdp, data=data)
                else:
                    left = left_behind(self.store, run) if replays else None
                    data |= {} if left is None else {"unused_from": left.unused_from, **to_data(left.digests)}
                    opened = self.store.append("resume", dataset, run, data=data)
                # Its tail is there before the row is: without it nobody could tell after a kill what was used.
                return Account(self.store, opened, costs, budget, steps, changed), left

        account, left = self._queue.until_fit(attempt)
        for file in () if left is None else left.files:
            with suppress(OSError):
                file.unlink()
        return account

    def release(self, run: str) -> Hold:
        """Give back what a run holds for steps to come; what it used stays charged.

        Meant for runs that died. One that is still alive goes on while there is room, as if it had been resumed late.
        """
        with self.store.writing():
            state = self.store.of_run(run)
            if not state.holds:
                raise LedgerError(f"{self.path} knows no run {run!r} that holds anything: see `fodp ledger show`")
            hold = Hold.of(self.store, state)
            self.store.append("release", hold.dataset, run, data=_who())
        return hold

    def charge_selection(
        self,
        phases: Sequence[Phase],
        repetitions: Repetitions,
        *,
        unit: str = "record",
        name: str | None = None,
        fingerprint: str | None = None,
    ) -> str:
        """Charge for releasing the best of `repetitions.draw()` runs of `phases`; returns the charge's id.

        `unit` is that of the runs' plans, `fingerprint` that of their data. With `name`, an id that only this selection
        has, a charge that is in the ledger already is not made again.

        The runs themselves then go without this ledger, and nothing of them but the best one may be looked at.
        """
        if self.dataset is None:
            raise ConfigurationError("a selection is charged to a data set: name it (dataset=, --dataset-name)")
        run, agreed = name or f"selection-{uuid.uuid4().hex}", self._agreed_budget(self.dataset, phases)
        curve = repetitions.rdp(phases)
        data = {**_who(), "phases": phases_to_data(phases), "mean": repetitions.mean, "shape": str(repetitions.shape)}

        def costs(budget: RenyiBudget) -> Floats:
            return np.array([0.0, curve[ORDERS.index(budget.order)]])

        with self.store.writing():
            first = self.store.of_run(run).first
            if first:
                self._refuse_other_selection(self.store.entry(first), data)
                self._check_fingerprint(self.dataset, "", fingerprint)
                return run
            _, price, _ = self._admitted(Spending(self.dataset, "", 1, costs, unit, None, fingerprint), agreed)
            steps, rdp = sum(phase.steps for phase in phases), None if price is None else float(price[1])
            self.store.append("selection", self.dataset, run, steps=steps, rdp=rdp, data=data)
        return run

    def accept_rollback(self) -> Entry:
        """Go on with a ledger that is older than what was known, on purpose: every privacy card says so from now on."""
        mark = self.store.known_before()
        if mark is None:
            raise LedgerError(f"{self.path} is not older than what is known of it: there is nothing to accept")
        data = {**_who(), "known": mark.entry, "found": self.store.count()}
        with self.store.writing():
            return self.store.append("rollback", "", data=data)

    def _admitted(self, wish: Spending, agreed: RenyiBudget | None) -> tuple[RenyiBudget | None, Floats | None, bool]:
        """The budget, the costs, and whether the data has changed; or a refusal. Within `writing()`.

        Everything is looked at again: another process may have been quicker since `agreed` was.
        """
        dataset, stored = wish.dataset, self.budget(wish.dataset)
        if stored is not None:
            self._refuse_other_budget(dataset, stored)
        budget = stored or agreed
        costs = None if budget is None else wish.costs(budget)
        if wish.begins:
            self._refuse_used_seed(wish.seed, budget is not None)
            self._refuse_other_unit(dataset, wish.unit)
            if wish.unit == "person" and not self.store.marked(f"unit of {dataset}", limit=1):
                self.store.append("unit", dataset, data={"unit": wish.unit})
        if budget is not None and costs is not None:
            if wish.begins:
                self._refuse_no_room(dataset, budget, costs, wish.steps)
            if stored is None:
                self._refuse_late_budget(dataset)
                data = {"epsilon": budget.epsilon, "delta": budget.delta, "order": budget.order}
                self.store.append("budget", dataset, data=data)
        return budget, costs, self._check_fingerprint(dataset, wish.run, wish.fingerprint)

    def _hold(self, wish: Spending, budget: RenyiBudget | None, costs: Floats | None) -> float | None:
        """What is kept free for the whole plan; for a run that is taken up again, as much of it as there still is."""
        if budget is None or costs is None:
            return None
        left = budget.capacity - self.store.others_taken(wish.dataset, wish.run)
        return max(0.0, min(float(costs[wish.steps]), left))

    def _begun(self, run: str) -> Entry | None:
        """The row that began a run, if it was begun here."""
        with self.store.reading():
            first = self.store.of_run(run).first
            entry = self.store.entry(first) if first else None
        return entry if entry is not None and entry.kind == "run" else None

    def _name(self, run: str) -> str:
        return self.dataset if self.dataset is not None else UNNAMED + run

    def _agreed_budget(self, dataset: str, phases: Sequence[Phase]) -> RenyiBudget | None:
        """The budget in the ledger; where there is none yet, the wanted one at an order that suits this run."""
        stored = self.budget(dataset)
        if stored is not None or self._wanted is None:
            self._refuse_other_budget(dataset, stored)
            return stored
        self._refuse_late_budget(dataset)
        return RenyiBudget.suited_to(phases, float(self._wanted[0]), float(self._wanted[1]))

    def _refuse_other_selection(self, known: Entry, data: Mapping[str, Any]) -> None:
        """A name stands for one price."""
        same = all(json.dumps(known.data.get(word)) == json.dumps(data[word]) for word in ("phases", "mean", "shape"))
        if known.kind != "selection" or known.dataset != self.dataset or not same:
            raise LedgerError(f"{self.path} knows {known.run!r} as something else: a selection is charged as it began")

    def _refuse_other_budget(self, dataset: str, stored: RenyiBudget | None) -> None:
        if stored is None or self._wanted is None or (stored.epsilon, stored.delta) == tuple(map(float, self._wanted)):
            return
        raise BudgetError(
            f"the budget of {dataset!r} in {self.path} is ({rounded_up(stored.epsilon, 6)}, {stored.delta:g}), not "
            f"({self._wanted[0]:g}, {self._wanted[1]:g}): a budget is fixed once and for all; leave it out"
        )

    def _refuse_late_budget(self, dataset: str) -> None:
        state = self.store.of_data(dataset)
        if state.runs and not state.budget:
            raise BudgetError(
                f"{dataset!r} has runs in {self.path} from before it had a budget, which must be fixed before the "
                "first one: go on without a budget, or begin another ledger and say what it does not cover"
            )

    def _refuse_no_room(self, dataset: str, budget: RenyiBudget, costs: Floats, steps: int) -> None:
        state = self.store.of_data(dataset)
        left = budget.capacity - state.taken
        if costs[steps] <= left:
            return
        fitting = max(0, int(np.searchsorted(costs, left, side="right")) - 1)
        raise NoRoom(
            f"the budget of {dataset!r} ({rounded_up(budget.epsilon, 6)}, {budget.delta:g}) has "
            f"{max(0.0, left) / budget.capacity:.1%} left and this needs {costs[steps] / budget.capacity:.1%}: "
            + (f"only {fitting} of its {steps} steps would fit" if fitting else "nothing of it fits")
            + "; take fewer steps or more noise"
            + told(self.store, dataset, budget),
            later=bool(costs[steps] <= budget.capacity - state.spent),
        )

    def _refuse_other_unit(self, dataset: str, unit: str) -> None:
        """An epsilon for people and one for single records do not add up to anything."""
        people = bool(self.store.marked(f"unit of {dataset}", limit=1))
        if people != (unit == "person") and (people or self.store.of_data(dataset).runs):
            raise LedgerError(
                f"what was spent on {dataset!r} in {self.path} is about a {'person' if people else 'record'}, and the "
                f"unit of this run is a {unit}: the two do not add up. Give the runs about a {unit} another name for "
                "the data (dataset=, --dataset-name; --allow-other-name says that it has two), with a budget of its own"
            )

    def _refuse_used_seed(self, seed: str | None, guarded: bool) -> None:
        """Two runs under one seed have the same masks and noise, on whatever data: their difference has none."""
        for entry in [] if seed is None else self.store.marked(f"seed {seed}"):
            if guarded or self.budget(entry.dataset) is not None:
                raise LedgerError(
                    f"run {entry.run[:12]} on {entry.dataset!r} in {self.path} used this seed, and whoever sees two "
                    "runs under one seed subtracts their noise without knowing it: take another seed, or leave it out; "
                    "to go on with that run, resume it"
                )

    def _refuse_other_run(self, known: Entry, phases: Sequence[Phase]) -> None:
        if self.dataset is not None and self.dataset != known.dataset:
            raise LedgerError(f"the run belongs to the data set {known.dataset!r}, not {self.dataset!r}")
        if known.data["phases"] != phases_to_data(phases):
            raise LedgerError("the ledger knows this run with other events: resume it with its own plan")

    def _check_fingerprint(self, dataset: str, run: str, mark: str | None) -> bool:
        """Is the data another than before? Then stop, or write down that it was allowed."""
        if mark is None:
            return False
        newest = self.store.of_data(dataset).data
        mine = self._comparable_mark(newest, mark)
        changed = mine is not None and mine != mark
        if changed and not self.allow_changed_data:
            raise DataError(
                f"the data is not what it was when {dataset!r} was last used on this machine: use another name for "
                "other data, or say that it has changed on purpose (--allow-changed-data, allow_changed_data=True)"
            )
        if changed or mine is None:
            if not self.allow_other_name:
                self._refuse_other_name(dataset, mark)
            data = {"fingerprint": mark, "allowed_change": changed, "before": newest}
            self.store.append("data", dataset, run, data=data)
        return changed

    def _comparable_mark(self, row: int, mark: str) -> str | None:
        """The newest fingerprint of a data set that was made with the key of `mark`; `row` is the newest of all."""
        while row:
            data = self.store.entry(row).data
            if comparable(data["fingerprint"], mark):
                return str(data["fingerprint"])
            row = int(data["before"])
        return None

    def _refuse_other_name(self, dataset: str, mark: str) -> None:
        """Unnamed runs among themselves have no budget to escape from."""
        known = sorted({entry.dataset for entry in self.store.marked(f"data {mark}")} - {dataset})
        if not known and not dataset.startswith(UNNAMED):
            known = [entry.dataset for entry in self.store.marked(f"data unnamed {mark}", limit=1)]
        if known:
            advice = "" if known[0].startswith(UNNAMED) else "use that name, or "
            raise DataError(
                f"this data is in {self.path} as {known[0]!r} already, whose budget does not count what is released "
                f"under another name: {advice}say that it has two on purpose (--allow-other-name, "
                "allow_other_name=True)"
            )


def _who() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, as in some containers
        user = "unknown"
    return {"who": f"{user}@{socket.gethostname()}", "fodp": fodp.__version__}
