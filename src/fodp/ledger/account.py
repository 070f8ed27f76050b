"""One running training's hold on the ledger."""

import time

import numpy as np

from fodp._checks import LedgerError
from fodp.accounting.budget import RenyiBudget
from fodp.accounting.releases import Floats
from fodp.ledger.rows import Entry
from fodp.ledger.store import Store

# Steps are reserved for this many seconds ahead, or for longer where a durable write is slow: 100 writes'
# time, so that writing settles at about 1% of the run; rounded up to a power of two, so up to twice as long.
_AHEAD, _AT_MOST, _WRITES = 0.5, 10.0, 100


class Account:
    """One running training's hold on the ledger: it grants steps, in blocks, before they are taken."""

    def __init__(
        self,
        store: Store,
        opened: Entry,
        costs: Floats | None,
        budget: RenyiBudget | None,
        last: int,
        charged: int,
        data_changed: bool,
    ):
        self._store, self._opened, self._costs, self._budget, self._last = store, opened, costs, budget, last
        self._before = self._granted = charged
        self.data_changed = data_changed
        self.position = (opened.id, opened.chain)
        self._asked: tuple[float, int] | None = None  # when was the last block granted, at which step
        self._write_seconds = 0.0

    @property
    def budget(self) -> RenyiBudget | None:
        """The budget that guards the run's data, if there is one."""
        return self._budget

    @property
    def charged(self) -> int:
        """How many of the run's steps count as used."""
        return self._granted

    def covers(self, step: int) -> bool:
        """May step number `step` (from 0) be taken? Reserves it, and some more, if need be; no if the budget is spent.

        Steps that were charged before, by a run that is now replayed from a seed, are not charged again.
        """
        if step < self._granted:
            return True
        started = time.perf_counter()
        with self._store.writing():
            self._refuse_lost_hold()
            wanted = min(step + self._block(started, step), self._last)
            if self._costs is not None and self._budget is not None:
                left = self._budget.capacity - self._store.others_taken(self._opened.dataset, self._opened.run)
                free = max(left, self._store.of_run(self._opened.run).hold or 0.0)  # rounding may say less than is held
                wanted = min(wanted, int(np.searchsorted(self._costs, free, side="right")) - 1)
            entry = self._append("reserve", wanted) if wanted > self._granted else None
        if entry is not None:
            self._granted, self.position = wanted, (entry.id, entry.chain)
        self._asked, self._write_seconds = (time.perf_counter(), step), time.perf_counter() - started
        return step < self._granted

    def settle(self, steps: int) -> None:
        """The training has stopped in good order after `steps` steps: give back what was reserved and not used."""
        # An earlier process may have got further: that stays charged. Steps that were jumped over were never granted.
        used = max(min(steps, self._granted), self._before)
        with self._store.writing():
            self._refuse_lost_hold()
            entry = self._append("settle", used)
        self._granted, self._asked, self.position = used, None, (entry.id, entry.chain)

    def note_checkpoint(self, step: int, digest: str) -> None:
        """Remember a checkpoint that is about to get its name."""
        with self._store.writing():
            self._refuse_lost_hold()
            self._store.append(
                "checkpoint", self._opened.dataset, self._opened.run, data={"step": step, "digest": digest}
            )

    def _append(self, kind: str, steps: int) -> Entry:
        rdp = None if self._costs is None else float(self._costs[steps])
        return self._store.append(kind, self._opened.dataset, self._opened.run, steps=steps, rdp=rdp)

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
            raise LedgerError("this run was resumed by another process, which goes on with it: this one stops here")
