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
from typing import Any

import numpy as np

import fodp
from fodp.accounting import Phase, phases_to_data
from fodp.accounting.budget import RenyiBudget, Repetitions
from fodp.accounting.releases import Floats
from fodp.accounting.renyi import ORDERS
from fodp.errors import ConfigurationError, LedgerError
from fodp.ledger.account import Account
from fodp.ledger.admission import Admission, Spending
from fodp.ledger.holds import Hold, Queue, holds
from fodp.ledger.replays import Left, left_behind, to_data
from fodp.ledger.rows import UNNAMED, DataState, Entry
from fodp.ledger.store import Store
from fodp.support import checks

_LARGE_DELTA = 1e-3  # hardly meant
DATASETS = 20  # that are looked at unless all are asked for


class Ledger:
    """The spending of many runs in one SQLite file, or on a server, that is only ever added to.

    Guarantee: everything released from data under a name with a budget is (ε, δ)-differentially private together,
    whatever was run, and however runs were chosen after seeing earlier ones. A Rényi filter refuses what would exceed
    the budget. Every step's event is in the file before its release is used, so a crash can only over-count, and
    processes on one file cannot overspend together.

    A new run holds what its whole plan costs until it ends, so that runs do not starve each other.

    Args:
        path: the file, or the address of a PostgreSQL database (`postgresql://…`).
        dataset: your name for the data. Runs without a name are written down, each for itself.
        budget: (ε, δ) of the data under this name. The first run that names one fixes it.
        allow_changed_data: go on where the data under the name is not what it was on this machine.
        allow_other_name: go on where the data is in the ledger under another name, whose budget it would escape.
        create: make the file if there is none.
        verify: refuse a ledger with damaged rows; False opens it all the same, to say what is wrong with it.
        older: open a ledger that is older than the mark beside it knows, to accept that.
        wait: seconds to wait for room, if what other runs hold and have not used would do.

    Raises:
        LedgerError: a file that is damaged, gone, older than known or no ledger.
        BudgetError: (when a run begins) another budget than the one that was fixed, or no room for the run.
        ConfigurationError: a budget without a name, or one that is no pair.

    Example:
        >>> import fodp, tempfile
        >>> ledger = fodp.Ledger(tempfile.mkdtemp() + "/people.sqlite", dataset="people", budget=(3, 1e-5))
        >>> ledger.left("people")
        1.0
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
                    f"budget is a pair (epsilon, delta), such as (3, 1e-5), got {checks.shown(budget)}: an epsilon "
                    "without its delta says nothing"
                )
            checks.positive("the budget's epsilon", budget[0])
            if checks.open_fraction("the budget's delta", budget[1]) > _LARGE_DELTA:
                checks.warn(
                    f"the budget's delta {budget[1]:g} is above {_LARGE_DELTA:g}: publishing that share of the records "
                    "as they are would satisfy it. Take a tenth of one over a public guess of their number"
                )
        self.dataset, self._wanted = dataset, budget
        self._queue = Queue(wait)
        self.store = Store(path, create=create, verify=verify, older=older)
        self._admission = Admission(self.store, budget, allow_changed_data, allow_other_name)

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
        return self._admission.budget(dataset)

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

    def more_like_the_last(self, dataset: str) -> int | None:
        """How many more runs (or selections) like the newest one fit into what is left; None if nothing limits them.

        There is no "ε left": a filter promises the ε of the whole budget, not one of the part that was spent.
        """
        with self.store.reading():
            budget, newest = self.budget(dataset), self.store.begun(dataset, 1)
            left = 0.0 if budget is None else budget.capacity - self.store.of_data(dataset).taken
        cost = next((e.rdp if e.kind == "selection" else e.data.get("hold") for e in newest), None)
        return None if budget is None or not cost else max(0, int(left / cost))

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
        self._queue.report_to(tell)

    def refuse_unfit(
        self, phases: Sequence[Phase], steps: int, *, seed: str | None = None, unit: str = "record"
    ) -> None:
        """Raise if a new run of this many steps would not fit: into the budget, for a used seed, for another unit.

        Changes nothing.
        """
        if self.dataset is not None:
            self._admission.refuse_other_unit(self.dataset, unit)
            budget = self._admission.agreed_budget(self.dataset, phases)
            self._admission.refuse_used_seed(seed, budget is not None)
            if budget is not None:
                dataset, costs = self.dataset, budget.costs(phases)
                self._queue.until_fit(lambda: self._admission.refuse_no_room(dataset, budget, costs, steps))

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
            if self.dataset not in (None, known.dataset):
                raise LedgerError(f"the run belongs to the data set {known.dataset!r}, not {self.dataset!r}")
            if known.data["phases"] != phases_to_data(phases):
                raise LedgerError("the ledger knows this run with other events: resume it with its own plan")
        dataset = self._name(run) if known is None else known.dataset
        agreed, unit = self._admission.agreed_budget(dataset, phases), str(about.get("unit", "record"))
        wish = Spending(dataset, run, steps, lambda b: b.costs(phases), unit, seed, fingerprint, known is None)

        def attempt() -> tuple[Account, Left | None]:
            left: Left | None = None
            with self.store.writing():
                budget, costs, changed = self._admission.admitted(wish, agreed)
                data = {**_who(), "about": about, "hold": self._admission.hold(wish, budget, costs)}
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
        run, agreed = name or f"selection-{uuid.uuid4().hex}", self._admission.agreed_budget(self.dataset, phases)
        curve = repetitions.rdp(phases)
        data = {**_who(), "phases": phases_to_data(phases), "mean": repetitions.mean, "shape": str(repetitions.shape)}

        def costs(budget: RenyiBudget) -> Floats:
            return np.array([0.0, curve[ORDERS.index(budget.order)]])

        with self.store.writing():
            first = self.store.of_run(run).first
            if first:
                known, price = self.store.entry(first), ("phases", "mean", "shape")
                same = all(json.dumps(known.data.get(word)) == json.dumps(data[word]) for word in price)
                if known.kind != "selection" or known.dataset != self.dataset or not same:
                    raise LedgerError(
                        f"{self.path} knows {run!r} as something else: a selection is charged as it began"
                    )
                self._admission.check_fingerprint(self.dataset, "", fingerprint)
                return run
            _, paid, _ = self._admission.admitted(Spending(self.dataset, "", 1, costs, unit, None, fingerprint), agreed)
            steps, rdp = sum(phase.steps for phase in phases), None if paid is None else float(paid[1])
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

    def _begun(self, run: str) -> Entry | None:
        """The row that began a run, if it was begun here."""
        with self.store.reading():
            first = self.store.of_run(run).first
            entry = self.store.entry(first) if first else None
        return entry if entry is not None and entry.kind == "run" else None

    def _name(self, run: str) -> str:
        return self.dataset if self.dataset is not None else UNNAMED + run


def _who() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, as in some containers
        user = "unknown"
    return {"who": f"{user}@{socket.gethostname()}", "fodp": fodp.__version__}
