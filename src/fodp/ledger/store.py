"""An append-only list of rows, each with its own checksum and chained to the one before.

Whatever is read is checked first, and damage stops everything. A store alone cannot show that its last rows were cut
off or that the whole file was exchanged: for that, checkpoints and the mark beside the ledger remember a row.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fodp.errors import LedgerError, PrivacyError
from fodp.ledger.database import Database
from fodp.ledger.mark import Mark, mark_path, read_mark, write_mark
from fodp.ledger.postgres import PostgresRows
from fodp.ledger.rows import RESTORE, DataState, Entry, Raw, RunState, mark_of, moved, states_after
from fodp.ledger.sqlite import SQLiteRows
from fodp.support.files import is_address
from fodp.support.forks import Owner

_AT_ONCE = 2000  # rows
_NEWEST = 100  # rows whose chain is followed on opening: all of a small ledger, some milliseconds of a large one
_ALL = 2**31
Data = dict[str, Any]


class Store:
    """The rows. Entries are appended within `writing()`, which holds the only write lock and is all or nothing.

    Without `verify` a ledger whose rows were changed is opened too, to say what is wrong with it; with `older` one that
    is older than what was known.
    """

    def __init__(self, path: str | Path, *, create: bool = True, verify: bool = True, older: bool = False):
        self.path: Path | str = str(path) if is_address(path) else Path(path)
        self._owner, self._raises_mark = Owner(), False
        self.mark = mark_path(self.path)
        self._rows: Database
        known = os.path.exists(self.mark)  # then a new ledger would be a new budget
        if isinstance(self.path, str):
            self._rows = PostgresRows(self.path, create=create and not known, verify=verify)
        elif create and known and not os.path.exists(self.path):
            raise LedgerError(
                f"the ledger {self.path} is gone, though {self.mark} knows that there was one: {RESTORE}; delete the "
                "mark only if nothing was ever spent"
            )
        else:
            self._rows = SQLiteRows(self.path, create=create, verify=verify)
        self.header = self._rows.header()
        if verify:
            with self.reading():
                for fault in self.chain_faults(max(1, self._rows.newest() - _NEWEST + 1)):
                    raise self._damage(fault)
            if not older:
                self._refuse_older()

    def close(self) -> None:
        """Close the ledger."""
        if self._owner.is_here:  # a server would take the word of a fork for that of its parent
            self._rows.close()

    def refuse_other_process(self) -> None:
        """A process that was forked from the one that opened the ledger has neither its connection nor its grants."""
        if not self._owner.is_here:
            raise LedgerError(
                f"the ledger {self.path} was opened before this process was forked, and what it grants holds for the "
                "process that opened it: open it again in the process that uses it, and make its run there"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the write lock: what is read in here is still true when it is written. Nothing is half done."""
        self.refuse_other_process()
        fix, self._raises_mark = "nothing was released; free the disk or the file, then resume", False
        with self._rows.plainly("could not be written", fix):
            with self._rows.transaction(write=True):
                yield
            if self._raises_mark:  # under the write lock, so that of two processes the later one has the last word
                with self._rows.transaction(write=True):
                    last = self.last()
                    if last is not None:
                        write_mark(self.path, Mark(self.header.identity, last.id, last.chain))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is read in here is of one moment; within `writing()` it is that of the writer."""
        self.refuse_other_process()
        if self._rows.in_transaction:
            yield
            return
        with self._rows.plainly(), self._rows.transaction(write=False):
            yield

    def append(self, kind: str, dataset: str, run: str = "", *, data: Data | None = None, **used: Any) -> Entry:
        """Add a row; only within `writing()`. A row that says how much was used has `steps` and, of a budget, `rdp`."""
        steps, rdp, data = used.get("steps"), used.get("rdp"), data or {}
        last = self.last()
        number, before = (1, "") if last is None else (last.id + 1, last.chain)
        of_run = self.of_run(run) if run else RunState()
        states = states_after(number, kind, steps, rdp, data, self.of_data(dataset), of_run)
        texts, mark = (json.dumps(data, sort_keys=True), json.dumps(states)), mark_of(kind, dataset, data)
        places = [self.header.number(*words) for words in (("dataset", dataset), ("run", run))]
        places.append(None if mark is None else self.header.number("mark", mark))  # type: ignore[arg-type]
        values = (number, whole_minutes(), kind, dataset, run, steps, rdp, *texts, *places)
        row = self.header.sealed(before, values)
        self._rows.insert(row)
        self._raises_mark |= kind != "reserve"  # these are many, and what a run may reserve is held from its beginning
        return row.entry()

    def last(self) -> Entry | None:
        """The newest row."""
        with self.reading():
            newest = self._rows.newest()
            return self.entry(newest) if newest else None

    def entry(self, number: int) -> Entry:
        """The row with this number."""
        with self.reading():
            row = self._rows.row(number)
        if row is None:
            raise self._damage(f"entry {number} is missing")
        return self._checked(row)

    def count(self) -> int:
        """How many rows there are."""
        with self.reading():
            return self._rows.newest()

    def of_data(self, dataset: str) -> DataState:
        """What all rows of a data set come to."""
        found = self.found("dataset", dataset, 1)
        return found[0].of_data if found else DataState()

    def of_run(self, run: str) -> RunState:
        """What all rows of a run come to."""
        found = self.found("run", run, 1)
        return found[0].of_run if found else RunState()

    def marked(self, mark: str, limit: int = _ALL) -> list[Entry]:
        """The newest rows that carry a mark (a seed's, a fingerprint, a digest), newest first."""
        return self.found("mark", mark, limit)

    def begun(self, dataset: str, limit: int, skip: int = 0) -> list[Entry]:
        """Runs and selections of a data set, newest first, for those who page through them."""
        with self.reading():
            found = self._rows.begun(self.header.number("dataset", dataset), limit, skip)
            return [self.entry(place) for place in found]

    def datasets(self) -> Iterator[tuple[str, DataState]]:
        """All data sets, in no order, and what their rows come to; for those who look around."""
        number = self._rows.next_dataset(-1)
        while number is not None:
            (newest,) = self._newest("by_dataset", number, 1)
            if newest.dataset:
                yield newest.dataset, newest.of_data
            number = self._rows.next_dataset(number)

    def select(self, kind: str | None = None) -> list[Entry]:
        """All rows, or those of a kind, oldest first. Reads the whole ledger."""
        return [self._checked(row) for row in self.raw_rows(kind=kind)]

    def raw_rows(self, first: int = 1, kind: str | None = None) -> Iterator[Raw]:
        """The rows from this number on as they lie there, unchecked.

        In parts, so that a reader does not keep others from writing; what is written meanwhile is not read.
        """
        last = self.count()
        while first <= last:
            with self.reading():
                part = self._rows.rows(first, min(last, first + _AT_ONCE - 1), kind)
            yield from part
            first += _AT_ONCE

    def known_before(self) -> Mark | None:
        """What the mark beside the ledger knows and the ledger does not; None if the ledger is not older."""
        mark = read_mark(self.mark)
        if mark is None:
            return None
        with self.reading():
            known = mark.ledger == self.header.identity and mark.entry <= self.count()
            return None if known and self.entry(mark.entry).chain == mark.chain else mark

    def others_taken(self, dataset: str, run: str) -> float:
        """What all other runs on the data set count as having used, or hold; rounded up."""
        with self.reading():
            return moved(self.of_data(dataset).taken, self.of_run(run).taken, 0.0)

    def faults(self) -> list[str]:
        """What is wrong with the file itself, rows and chain left aside. Reads all of it."""
        return self._rows.faults()

    def chain_faults(self, first: int = 1, tick: Callable[[], object] = lambda: None) -> Iterator[str]:
        """Rows, from this number on, that are not what was written or break the chain."""
        before, expected, last = "", first, self.count()
        if first > 1:
            before, expected = self.entry(first).chain, first + 1
        for row in self.raw_rows(expected):
            tick()
            if row.id != expected:
                yield f"entry {expected} is missing"
            if not self.header.intact(row, before):
                yield f"entry {row.id} was changed, or the one before it"
            before, expected = row.chain, row.id + 1
        if expected <= last:
            yield f"entry {expected} is missing"

    def _refuse_older(self) -> None:
        mark, accept = self.known_before(), f"`fodp ledger accept-rollback {self.path}` goes on and writes that down"
        if mark is None:
            return
        if mark.ledger != self.header.identity:
            raise LedgerError(
                f"{self.path} is another ledger than the one that was here ({self.mark} knows it): put that back and "
                f"give this one another name; if you exchanged them on purpose, {accept}"
            )
        raise LedgerError(
            f"the ledger {self.path} is older than what was known here: it ends with entry {self.count()}, and "
            f"{self.mark} knows entry {mark.entry}, so it has forgotten what was spent since. Restore the newest copy; "
            f"if this is the newest there is, {accept}"
        )

    def found(self, what: str, name: str, limit: int = _ALL) -> list[Entry]:
        """The newest rows of a data set, of a run, or with a mark; each must be what its index says."""
        found = self._newest(f"by_{what}", self.header.number(what, name), limit)
        for entry in found:
            own = {"dataset": entry.dataset, "run": entry.run}
            if name != (own[what] if what in own else mark_of(entry.kind, entry.dataset, entry.data)):
                raise self._damage(f"entry {entry.id} has another {what} than its index says")
        return found

    def _newest(self, column: str, number: int, limit: int) -> list[Entry]:
        with self.reading():
            newest, found = self._rows.newest(), self._rows.find(column, number, limit)
            if found and found[0] > newest:
                raise self._damage(f"entry {found[0]} is missing")
            return [self.entry(place) for place in found]

    def _checked(self, row: Raw) -> Entry:
        if not self.header.intact(row):
            raise self._damage(f"entry {row.id} was changed")
        return row.entry()

    def _damage(self, what: str) -> PrivacyError:
        return LedgerError(
            f"the ledger {self.path} is damaged, or was changed by something else than fodp ({what}), so it no longer "
            f"knows what was spent; `fodp ledger check` lists what is wrong: {RESTORE}"
        )


def whole_minutes() -> float:
    """The time now, without seconds: how fast steps follow each other tells how large their lots are."""
    return time.time() // 60 * 60.0
