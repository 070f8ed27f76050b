"""One running training's hold on the ledger."""

import time
from typing import Any

import numpy as np

from fodp.accounting.budget import RenyiBudget
from fodp.accounting.releases import Floats
from fodp.errors import LedgerError
from fodp.ledger.replays import TAKEN_OVER, ReleaseLog
from fodp.ledger.rows import Entry
from fodp.ledger.store import Store

# Steps are reserved for this many seconds ahead, or for longer where a durable write is slow: 100 writes' time, so that
# writing settles at about 1% of the run; rounded up to a power of two, so up to twice as long.
_AHEAD, _AT_MOST, _WRITES = 0.5, 10.0, 100


class Account:
    """One running training's hold on the ledger: it grants steps, in blocks, before they are taken.

    It belongs to the process that opened it: one that was forked from it gets no steps.
    """

    def __init__(
        self, store: Store, opened: Entry, costs: Floats | None, budget: RenyiBudget | None, last: int, changed: bool
    ):
        self._store, self._opened, self._costs, self._last = store, opened, costs, last
        self.budget, self.data_changed = budget, changed  # the budget that guards the data, if there is one
        self._before = self.charged = opened.of_run.steps or 0  # how many of the run's steps count as used
        self.position = (opened.id, opened.chain)
        self._asked: tuple[float, int] | None = None  # when was the last block granted, at which step
        self._write_seconds = 0.0
        self._settled = False
        self._log = ReleaseLog(store, opened) if opened.data.get("unused_from") is not None else None  # of a seeded run

    def covers(self, step: int) -> bool:
        """May step number `step` (from 0) be taken? Reserves it, and some more, if need be; no if the budget is spent.

        Steps that were charged before, by a run that is now replayed from a seed, are not charged again: see `witness`.
        """
        self._store.refuse_other_process()
        if step < self.charged and not self._settled:
            return True
        if self._log is not None:
            self._log.open()  # again, where the run has settled
        started, wanted = time.perf_counter(), self.charged
        with self._store.writing():
            self._refuse_lost_hold()
            wanted = max(wanted, min(step + self._block(started, step), self._last, self._affordable()))
            # Also to go on below: a run that has settled says by its last row that it takes no steps.
            entry = self._append("reserve", wanted) if wanted > self.charged or step < self.charged else None
        if entry is not None:
            self._written(entry)
        self._asked, self._write_seconds = (time.perf_counter(), step), time.perf_counter() - started
        return step < self.charged

    def settle(self, steps: int) -> None:
        """The training has stopped in good order after `steps` steps: give back what was reserved and not used."""
        # An earlier process may have got further: that stays charged. Steps that were jumped over were never granted.
        with self._store.writing():
            self._refuse_lost_hold()
            entry = self._append("settle", max(min(steps, self.charged), self._before))
        self._written(entry)
        self._asked, self._settled = None, True
        if self._log is not None:
            self._log.remove()

    def note_checkpoint(self, step: int, file_digest: str) -> None:
        """Remember a checkpoint that is about to get its name."""
        with self._store.writing():
            self._refuse_lost_hold()
            data = {"step": step, "digest": file_digest, **self._released()}
            self._store.append("checkpoint", self._opened.dataset, self._opened.run, data=data)
        self._forget_pending()

    def repeats(self, step: int) -> bool:
        """May the charged steps from this one on be taken again? Of a seeded run, if it is known what each released."""
        return self._log is None or self._log.repeats(step)

    def witness(self, step: int, tags: bytes) -> None:
        """Write down what a step of a seeded run is about to use; `tags` are hashes of what it released.

        A step that was witnessed before must have released the same, to the last bit: the noise is the same, and who
        sees it on two different sums takes it off.
        """
        self._store.refuse_other_process()
        if self._log is None:
            raise LedgerError("this run was not opened as a seeded one, so its steps have no witness")
        self._log.see(step, tags)

    def _affordable(self) -> int:
        """How many steps of the run fit into what others leave of the budget."""
        if self._costs is None or self.budget is None:
            return self._last
        left = self.budget.capacity - self._store.others_taken(self._opened.dataset, self._opened.run)
        free = max(left, self._store.of_run(self._opened.run).hold or 0.0)  # rounding may say less than is held
        return int(np.searchsorted(self._costs, free, side="right")) - 1

    def _append(self, kind: str, steps: int) -> Entry:
        rdp = None if self._costs is None else float(self._costs[steps])
        data = self._released()
        return self._store.append(kind, self._opened.dataset, self._opened.run, steps=steps, rdp=rdp, data=data)

    def _released(self) -> dict[str, Any]:
        return {} if self._log is None else self._log.pending()

    def _written(self, entry: Entry) -> None:
        """A row that says how many steps count as used is on the disk."""
        self._settled, self.charged, self.position = False, entry.steps or 0, (entry.id, entry.chain)
        self._forget_pending()

    def _forget_pending(self) -> None:
        if self._log is not None:
            self._log.forget_pending()

    def _block(self, now: float, step: int) -> int:
        if self._asked is None or step <= self._asked[1]:
            return 1
        seconds = (now - self._asked[0]) / (step - self._asked[1])
        ahead = min(max(_AHEAD, _WRITES * self._write_seconds), _AT_MOST)
        steps = max(1, int(ahead / max(seconds, 1e-6)))
        # A power of two: the file tells how many steps fill the time, and with it how large their lots are.
        return 1 << (steps - 1).bit_length()

    def _refuse_lost_hold(self) -> None:
        if self._store.of_run(self._opened.run).opened != self._opened.id:
            raise LedgerError(TAKEN_OVER)
