"""An append-only list of rows, each with its own checksum and chained to the one before.

Whatever is read is checked first, and damage stops everything. It cannot show that the last rows were cut off or that
the whole file was exchanged, which is why checkpoints, and a mark beside the ledger, remember a row.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fodp._checks import LedgerError, PrivacyError
from fodp._forks import Owner
from fodp.ledger.header import RESTORE, is_address
from fodp.ledger.mark import Mark, MarkFile
from fodp.ledger.postgres import PostgresRows
from fodp.ledger.rows import DataState, Entry, Raw, RunState, Seals, mark_of, states_after, without
from fodp.ledger.sqlite import SQLiteRows

_AT_ONCE = 2000  # rows
_NEWEST = 100  # rows whose chain is followed on opening: all of a small ledger, some milliseconds of a large one


class Store:
    """The rows. Entries are appended within `writing()`, which holds the only write lock and is all or nothing.

    Without `verify` a file whose rows were changed is opened too, to say what is wrong with it; with `older` one that
    is older than what was known.
    """

    def __init__(self, path: str | Path, *, create: bool = True, verify: bool = True, older: bool = False):
        self.path: Path | str = str(path) if is_address(path) else Path(path)
        self._owner = Owner()
        self._mark, self._raises_mark = MarkFile(self.path), False
        self._rows: SQLiteRows | PostgresRows
        if isinstance(self.path, str):
            known = os.path.exists(self._mark.path)  # then a new ledger would be a new budget
            self._rows = PostgresRows(self.path, create=create and not known, verify=verify)
        else:
            self._refuse_new_beside_mark(create)
            self._rows = SQLiteRows(self.path, create=create, verify=verify)
        self.header = self._rows.header()
        self._seals = Seals(self.header.key)
        if verify:
            with self.reading():
                for fault in self.chain_faults(max(1, self._rows.newest() - _NEWEST + 1)):
                    raise self._damage(fault)
            if not older:
                self._refuse_older()

    def close(self) -> None:
        """Close the file."""
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
            if self._raises_mark:
                self._raise_mark()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is read in here is of one moment; within `writing()` it is that of the writer."""
        self.refuse_other_process()
        if self._rows.in_transaction:
            yield
            return
        with self._rows.plainly(), self._rows.transaction(write=False):
            yield

    def append(
        self,
        kind: str,
        dataset: str,
        run: str = "",
        *,
        steps: int | None = None,
        rdp: float | None = None,
        data: dict[str, Any] | None = None,
    ) -> Entry:
        """Add a row; only within `writing()`."""
        last, data = self.last(), data or {}
        number, before = (1, "") if last is None else (last.id + 1, last.chain)
        of_run = self.of_run(run) if run else RunState()
        states = states_after(number, kind, steps, rdp, data, self.of_data(dataset), of_run)
        mark = mark_of(kind, dataset, data)
        row = self._seals.sealed(
            before,
            (
                number,
                whole_minutes(),
                kind,
                dataset,
                run,
                steps,
                rdp,
                json.dumps(data, sort_keys=True),
                json.dumps(states),
                self._seals.number("dataset", dataset),
                self._seals.number("run", run),
                None if mark is None else self._seals.number("mark", mark),
            ),
        )
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
        found = self._newest("by_dataset", self._seals.number("dataset", dataset))
        if not found:
            return DataState()
        if found[0].dataset != dataset:
            raise self._damage(f"entry {found[0].id} is of another data set than its index says")
        return found[0].of_data

    def of_run(self, run: str) -> RunState:
        """What all rows of a run come to."""
        found = self._newest("by_run", self._seals.number("run", run))
        if not found:
            return RunState()
        if found[0].run != run:
            raise self._damage(f"entry {found[0].id} is of another run than its index says")
        return found[0].of_run

    def marked(self, mark: str, limit: int = 2**31) -> list[Entry]:
        """The newest rows that carry a mark (a seed's, a fingerprint, a digest), newest first."""
        found = self._newest("by_mark", self._seals.number("mark", mark), limit)
        for entry in found:
            if mark_of(entry.kind, entry.dataset, entry.data) != mark:
                raise self._damage(f"entry {entry.id} has another mark than its index says")
        return found

    def rows_of_run(self, run: str) -> list[Entry]:
        """All rows of a run, newest first."""
        found = self._newest("by_run", self._seals.number("run", run), 2**31)
        if any(entry.run != run for entry in found):
            raise self._damage(f"a row is of another run than its index says, which is {run!r}")
        return found

    def begun(self, dataset: str, limit: int, skip: int = 0) -> list[Entry]:
        """Runs and selections of a data set, newest first, for those who leaf through them."""
        with self.reading():
            found = self._rows.begun(self._seals.number("dataset", dataset), limit, skip)
            return [self.entry(place) for place in found]

    def datasets(self) -> Iterator[tuple[str, DataState]]:
        """All data sets, in no order, and what their rows come to; for those who look around."""
        number = self._rows.next_dataset(-1)
        while number is not None:
            (newest,) = self._newest("by_dataset", number)
            if newest.dataset:
                yield newest.dataset, newest.of_data
            number = self._rows.next_dataset(number)

    def select(self, kind: str | None = None) -> list[Entry]:
        """All rows, or those of a kind, oldest first. Reads the whole file."""
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
        """What the mark beside the ledger knows and the ledger does not; None if it is not older."""
        mark = self._mark.read()
        if mark is None:
            return None
        with self.reading():
            known = mark.ledger == self.header.identity and mark.entry <= self.count()
            return None if known and self.entry(mark.entry).chain == mark.chain else mark

    def others_taken(self, dataset: str, run: str) -> float:
        """What all other runs on the data set count as having used, or hold."""
        with self.reading():
            return without(self.of_data(dataset).taken, self.of_run(run).taken if run else 0.0)

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
            if not self._seals.follows(before, row):
                yield f"entry {row.id} was changed, or the one before it"
            before, expected = row.chain, row.id + 1
        if expected <= last:
            yield f"entry {expected} is missing"

    def _raise_mark(self) -> None:
        """Under the write lock, so that of two processes the later one has the last word."""
        with self._rows.transaction(write=True):
            last = self.last()
            if last is not None:
                self._mark.write(Mark(self.header.identity, last.id, last.chain))

    def _refuse_new_beside_mark(self, create: bool) -> None:
        """Where there was a ledger, a new one would be a new budget."""
        if create and "\0" not in str(self.path) and os.path.exists(self._mark.path) and not os.path.exists(self.path):
            raise LedgerError(
                f"the ledger {self.path} is gone, though {self._mark.path} knows that there was one: {RESTORE}; delete "
                "the mark only if nothing was ever spent"
            )

    def _refuse_older(self) -> None:
        mark = self.known_before()
        if mark is None:
            return
        if mark.ledger != self.header.identity:
            raise LedgerError(
                f"{self.path} is another ledger than the one that was here ({self._mark.path} knows it): put that back "
                "and give this one another name; if you exchanged them on purpose, "
                f"`fodp ledger accept-rollback {self.path}` goes on and writes that down"
            )
        raise LedgerError(
            f"the ledger {self.path} is older than what was known here: it ends with entry {self.count()}, and "
            f"{self._mark.path} knows entry {mark.entry}, so it has forgotten what was spent since. Restore the newest "
            f"copy; if this is the newest there is, `fodp ledger accept-rollback {self.path}` goes on and writes that "
            "down"
        )

    def _newest(self, column: str, number: int, limit: int = 1) -> list[Entry]:
        with self.reading():
            newest, found = self._rows.newest(), self._rows.find(column, number, limit)
            if found and found[0] > newest:
                raise self._damage(f"entry {found[0]} is missing")
            return [self.entry(place) for place in found]

    def _checked(self, row: Raw) -> Entry:
        if not self._seals.intact(row):
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
