"""The ledger: runs and budgets of data sets, and the hold that one running training has on it."""

import getpass
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

_LARGE_DELTA = 1e-3  # hardly meant


class Opening(NamedTuple):
    """What a training says when it begins a run or takes one up."""

    run: str
    phases: Sequence[Phase]
    steps: int
    about: Mapping[str, Any]
    fingerprint: str | None
    seed: str | None
    replays: bool


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
            if _checks.open_fraction("the budget's delta", budget[1]) > _LARGE_DELTA:
                _checks.warn(
                    f"the budget's delta {budget[1]:g} is above {_LARGE_DELTA:g}: publishing that share of the records "
                    "as they are would satisfy it. Take a tenth of one over a public guess of their number"
                )
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

    def has_charged(self, run: str, phases: Sequence[Phase]) -> bool:
        """Is this run in here, in the data set of this ledger, with all of these phases counted as used?"""
        first = self._begun(run)
        return (
            first is not None
            and first.dataset == self._name(run)
            and first.data["phases"] == phases_to_data(phases)
            and self.steps(run) == sum(phase.steps for phase in phases)
        )

    def close(self) -> None:
        """Close the file."""
        self.store.close()

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
        if dataset == self.dataset:
            return math.inf if self._wanted is None or state.runs else 1.0  # its first run fixes the budget
        if state == DataState():
            from fodp.ledger.pages import known_names  # which takes ledgers

            known = known_names(self)
            raise LedgerError(f"{self.path} knows no data set {dataset!r}; it knows {known or 'none'}: mend the name")
        return math.inf

    def tell_waiting(self, tell: Callable[[str], object]) -> None:
        """Have it said when a run begins to wait for room, and for whom."""
        self._queue.tell = tell

    def holds(self, dataset: str) -> list[Hold]:
        """Who keeps a part of the data set's budget for steps to come, newest first."""
        return holds(self.store, dataset)

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

    def has_budgets(self) -> bool:
        """Has any data set in here a budget, or is about to get one?"""
        return self._wanted is not None or any(self.store.select("budget"))

    def unit(self, dataset: str) -> str | None:
        """Whom the spending on a data set is about, "record" or "person"; None while there is none."""
        if self.store.marked(f"unit of {dataset}", limit=1):
            return "person"
        return "record" if self.store.of_data(dataset).runs else None

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
                self._queue.until_fit(lambda: self._refuse_unfit(dataset, budget, costs, steps))

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
        mine = Opening(run, phases, steps, about or {}, fingerprint, seed, replays)
        known = self._begun(run)
        if known is not None:
            self._refuse_other_run(known, phases)
        dataset = self._name(run) if known is None else known.dataset
        budget = self._agreed_budget(dataset, phases)
        return self._queue.until_fit(lambda: self._opened(mine, known, dataset, budget))

    def _opened(self, mine: Opening, known: Entry | None, dataset: str, budget: RenyiBudget | None) -> Account:
        """The account of a run, or a refusal: all in one transaction."""
        costs = None if budget is None else budget.costs(mine.phases)
        left: Left | None = None
        with self.store.writing():
            stored = self.budget(dataset)
            if stored != budget and stored is not None:  # another process was quicker
                self._refuse_other_budget(dataset, stored)
                budget, costs = stored, stored.costs(mine.phases)
            if known is None:
                self._refuse_used_seed(mine.seed, budget is not None)
                self._agree_on_unit(dataset, str(mine.about.get("unit", "record")))
            if budget is not None and costs is not None:
                if known is None:
                    self._refuse_unfit(dataset, budget, costs, mine.steps)
                if stored is None:
                    self._refuse_late_budget(dataset)  # again: another process may have begun a run meanwhile
                    self._append_budget(dataset, budget)
            changed = self._check_fingerprint(dataset, mine.run, mine.fingerprint)
            data = {**_who(), "about": dict(mine.about), "hold": self._hold(mine, dataset, budget, costs)}
            if known is None:
                data |= {"phases": phases_to_data(mine.phases), "seed": mine.seed, "planned": mine.steps}
                rdp = None if costs is None else 0.0
                data |= {"unused_from": 0} if mine.replays else {}
                opened = self.store.append("run", dataset, mine.run, steps=0, rdp=rdp, data=data)
            else:
                left = left_behind(self.store, mine.run) if mine.replays else None
                data |= {} if left is None else {"unused_from": left.unused_from, **to_data(left.digests)}
                opened = self.store.append("resume", dataset, mine.run, data=data)
            # Its file is there before the row is: without it nobody could tell after a kill what was used.
            charged, unused_from = opened.of_run.steps or 0, data.get("unused_from")
            account = Account(self.store, opened, costs, budget, mine.steps, charged, changed, unused_from)
        for file in () if left is None else left.files:
            with suppress(OSError):
                file.unlink()
        return account

    def _hold(self, mine: Opening, dataset: str, budget: RenyiBudget | None, costs: Floats | None) -> float | None:
        """What is kept free for the whole plan; for a run that is taken up again, as much of it as there still is."""
        if budget is None or costs is None:
            return None
        left = budget.capacity - self.store.others_taken(dataset, mine.run)
        return max(0.0, min(float(costs[mine.steps]), left))

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
        run, budget = name or f"selection-{uuid.uuid4().hex}", self._agreed_budget(self.dataset, phases)
        curve = repetitions.rdp(phases)
        data = {**_who(), "phases": phases_to_data(phases), "mean": repetitions.mean, "shape": str(repetitions.shape)}
        with self.store.writing():
            known = self.store.of_run(run).first
            if known:
                self._refuse_other_selection(self.store.entry(known), data)
                self._check_fingerprint(self.dataset, "", fingerprint)
                return run
            self._agree_on_unit(self.dataset, unit)
            stored = self.budget(self.dataset)
            self._refuse_other_budget(self.dataset, stored)
            budget = stored or budget
            rdp = None if budget is None else float(curve[ORDERS.index(budget.order)])
            if budget is not None and rdp is not None:
                self._refuse_unfit(self.dataset, budget, np.array([0.0, rdp]), 1)
                if stored is None:
                    self._refuse_late_budget(self.dataset)
                    self._append_budget(self.dataset, budget)
            self._check_fingerprint(self.dataset, "", fingerprint)
            steps = sum(phase.steps for phase in phases)
            self.store.append("selection", self.dataset, run, steps=steps, rdp=rdp, data=data)
        return run

    def _refuse_other_selection(self, known: Entry, data: Mapping[str, Any]) -> None:
        """A name stands for one price."""
        same = all(json.dumps(known.data.get(word)) == json.dumps(data[word]) for word in ("phases", "mean", "shape"))
        if known.kind != "selection" or known.dataset != self.dataset or not same:
            raise LedgerError(f"{self.path} knows {known.run!r} as something else: a selection is charged as it began")

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

    def accept_rollback(self) -> Entry:
        """Go on with a ledger that is older than what was known, on purpose: every privacy card says so from now on."""
        mark = self.store.known_before()
        if mark is None:
            raise LedgerError(f"{self.path} is not older than what is known of it: there is nothing to accept")
        data = {**_who(), "known": mark.entry, "found": self.store.count()}
        with self.store.writing():
            return self.store.append("rollback", "", data=data)

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

    def _refuse_unfit(self, dataset: str, budget: RenyiBudget, costs: Floats, steps: int) -> None:
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

    def _agree_on_unit(self, dataset: str, unit: str) -> None:
        """Refuse another unit, or write down that this data set's is a person, before anything else is."""
        self._refuse_other_unit(dataset, unit)
        if unit == "person" and not self.store.marked(f"unit of {dataset}", limit=1):
            self.store.append("unit", dataset, data={"unit": unit})

    def _refuse_used_seed(self, seed: str | None, guarded: bool) -> None:
        """Two runs under one seed have the same masks and noise, on whatever data: their difference has none."""
        if seed is None:
            return
        for entry in self.store.marked(f"seed {seed}"):
            if guarded or self.budget(entry.dataset) is not None:
                raise LedgerError(
                    f"run {entry.run[:12]} on {entry.dataset!r} in {self.path} used this seed, and whoever sees two "
                    "runs under one seed subtracts their noise without knowing it: take another seed, or leave it out; "
                    "to go on with that run, resume it"
                )

    def _append_budget(self, dataset: str, budget: RenyiBudget) -> None:
        data = {"epsilon": budget.epsilon, "delta": budget.delta, "order": budget.order}
        self.store.append("budget", dataset, data=data)

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
