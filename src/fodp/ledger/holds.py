"""What runs keep of a budget for their steps to come: who holds it, since when, and waiting for it."""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from fodp.accounting.budget import RenyiBudget
from fodp.errors import BudgetError
from fodp.ledger.rows import Entry, RunState
from fodp.ledger.store import Store
from fodp.support import checks

Result = TypeVar("Result")
_SHOWN, _BACK = 3, 2000  # holders that a message names, and rows in which it looks for them
_SHORTEST, _LONGEST = 0.2, 5.0  # seconds between two looks


class NoRoom(BudgetError):
    """The budget has no room for a run; `later` says whether there is room when those who hold some give it back."""

    def __init__(self, text: str, *, later: bool):
        super().__init__(text)
        self.later = later


class Hold(NamedTuple):
    """What one run keeps beyond what it used."""

    run: str
    dataset: str
    who: str
    since: str
    unused: float

    @classmethod
    def of(cls, store: Store, state: RunState) -> "Hold":
        """The hold of a run in this state."""
        opened = store.entry(state.opened)
        who = str(opened.data.get("who", "somebody"))
        return cls(opened.run, opened.dataset, who, when(opened), state.taken - (state.rdp or 0.0))


def holds(store: Store, dataset: str, back: int | None = None) -> list[Hold]:
    """Who holds some of the budget, newest first; looks at no more than the newest `back` rows."""
    found: list[Hold] = []
    with store.reading():
        missing, row = store.of_data(dataset).holders, store.count()
        oldest = 0 if back is None else max(0, row - back)
        seen: set[str] = set()
        while missing and row > oldest:
            entry, row = store.entry(row), row - 1
            if entry.dataset != dataset or not entry.run or entry.run in seen:
                continue
            seen.add(entry.run)
            if entry.of_run.holds:  # the newest row of its run
                found.append(Hold.of(store, entry.of_run))
                missing -= 1
    return found


def told(store: Store, dataset: str, budget: RenyiBudget) -> str:
    """Who holds what, as the end of a message: the newest holders only, so that a refusal is quick."""
    holders, found = store.of_data(dataset).holders, holds(store, dataset, back=_BACK)[:_SHOWN]
    if not holders:
        return ""
    shown = [f"{h.unused / budget.capacity:.1%} by {h.who} for run {h.run[:12]} since {h.since}" for h in found]
    shown += [f"the rest by {holders - len(shown)} more"] if holders > len(shown) else []
    return (
        f". Held for steps to come: {'; '.join(shown)}. What they do not use they give back when they end: wait for it "
        f"(--wait, wait=seconds); `fodp ledger release {store.path} RUN` gives back what a dead run holds"
    )


def when(entry: Entry) -> str:
    """The minute of a row."""
    return datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M UTC")


class Queue:
    """Waits for room in a budget, up to so many seconds. First come, first served is not promised."""

    def __init__(self, seconds: float):
        if seconds != math.inf:
            checks.at_least_zero("wait", seconds)
        self._seconds = seconds
        self._tell: Callable[[str], object] = lambda text: None

    def report_to(self, tell: Callable[[str], object]) -> None:
        """Have `tell` called with a sentence when waiting begins."""
        self._tell = tell

    def until_fit(self, attempt: Callable[[], Result]) -> Result:
        """Try until there is room; refuse when nothing that others hold would make any, or when the time is up."""
        ends, pause, known = time.monotonic() + self._seconds, _SHORTEST, False
        while True:
            try:
                return attempt()
            except NoRoom as refusal:
                if not refusal.later or time.monotonic() >= ends:
                    raise
                if not known:
                    self._tell(f"waiting for room: {refusal}")
                known = True
            time.sleep(max(0.0, min(pause, ends - time.monotonic())))
            pause = min(_LONGEST, pause * 1.5)
