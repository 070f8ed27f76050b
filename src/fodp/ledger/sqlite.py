"""The ledger's rows in one SQLite file.

Whatever is looked for is looked for in two indexes, which lie on different pages, and both must say the same: a
damaged index can hide a row, and what is not there has no checksum.
"""

import os
import secrets
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fodp._checks import LedgerError
from fodp._files import atomically
from fodp.ledger.header import RESTORE, Header, NoLedger
from fodp.ledger.rows import Raw

VERSION = 3
_TABLE = """CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    dataset TEXT NOT NULL,
    run TEXT NOT NULL,
    steps INTEGER,
    rdp REAL,
    data TEXT NOT NULL,
    state TEXT NOT NULL,
    by_dataset INTEGER NOT NULL,
    by_run INTEGER NOT NULL,
    by_mark INTEGER,
    chain TEXT NOT NULL,
    seal TEXT NOT NULL
)"""
_ABORT = "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
_FOUND_BY = ("by_dataset", "by_run", "by_mark")
_TRIGGERS = {
    "no_update": f"CREATE TRIGGER no_update BEFORE UPDATE ON entries {_ABORT}",
    "no_delete": f"CREATE TRIGGER no_delete BEFORE DELETE ON entries {_ABORT}",
    "no_replace": "CREATE TRIGGER no_replace BEFORE INSERT ON entries "
    f"WHEN NEW.id <= (SELECT max(id) FROM entries) {_ABORT}",
}
_SCHEMA = {
    "header": "CREATE TABLE header (identity TEXT NOT NULL, key TEXT NOT NULL, seal TEXT NOT NULL)",
    "entries": _TABLE,
    "by_id": "CREATE INDEX by_id ON entries (id)",
    **{
        name: f"CREATE INDEX {name} ON entries ({column})"
        for column in _FOUND_BY
        for name in (f"{column}_1", f"{column}_2")
    },
    **_TRIGGERS,
}
_DAMAGED = tuple(
    getattr(sqlite3, f"SQLITE_{name}") for name in ("ERROR", "CORRUPT", "NOTADB", "FORMAT", "TOOBIG", "MISMATCH")
)
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PATIENCE = 5.0  # seconds without a word while another process holds the ledger
_SMALL = 2**20  # bytes: SQLite's own check of such a file takes milliseconds


class _Patient(sqlite3.Connection):
    """Waits as long as another process holds the file, a database browser perhaps; says so after some seconds.

    A run that has trained for hours must not end because somebody looks at its ledger. SQLite itself waits a second at
    a time, in between signals are heard.
    """

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        """Execute a statement when the file is free."""
        began, told = time.monotonic(), False
        while True:
            try:
                return super().execute(*statement)
            except sqlite3.OperationalError as error:
                if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF not in _LOCKED:
                    raise
            if not told and time.monotonic() - began >= _PATIENCE:
                told = True
                print(
                    "fodp: waiting for the ledger, which another program holds: end what that does with it (a database "
                    "browser with an open transaction?). Nothing is lost. Ctrl-C twice breaks off, resuming goes on",
                    file=sys.stderr,
                    flush=True,
                )


class SQLiteRows:
    """The file. Nothing here is believed: the store checks the seals of the rows it is given."""

    def __init__(self, path: Path, *, create: bool, verify: bool):
        self.path = path
        if "\0" in str(path):
            raise LedgerError(f"the ledger's name {str(path)!r} holds a zero byte: name a writable file")
        with self.plainly("cannot be used", "name a file that you may read and write, in a folder that is there"):
            self._refuse_lost(create)
            if not path.exists():
                _create(path)
            # Never creates: a file that vanished in between must not come back empty.
            self._connection = sqlite3.connect(
                f"file:{quote(os.fsencode(path))}?mode=rw",
                uri=True,
                isolation_level=None,
                timeout=1.0,
                factory=_Patient,
                check_same_thread=False,
            )
            # Text that is damaged is no reason to fail where it is read: its row's seal will not fit.
            self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
            # On disk before the release is used; EXTRA survives a power cut right after the commit too.
            self._connection.execute("PRAGMA synchronous = EXTRA")
            self._refuse_other_version()
        if verify:
            found = self._faults_of_schema() or self._quick_faults()
            if found:
                raise LedgerError(f"the ledger {path} is damaged ({found[0]}): {RESTORE}")

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def header(self) -> Header:
        """Which ledger this is, and its key."""
        with self.plainly():
            rows = self._connection.execute("SELECT identity, key, seal FROM header").fetchall()
        return Header.read(rows, str(self.path))

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All or nothing; one that writes holds the only write lock from its beginning."""
        self._connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @property
    def in_transaction(self) -> bool:
        """Is one under way?"""
        return self._connection.in_transaction

    def insert(self, row: Raw) -> None:
        """Add a row, within a transaction that writes."""
        self._connection.execute(f"INSERT INTO entries VALUES ({', '.join('?' * len(row))})", row)

    def newest(self) -> int:
        """The number of the newest row, 0 if there is none: the table and an index must say the same."""
        with self.plainly():
            last = self._connection.execute("SELECT id FROM entries NOT INDEXED ORDER BY id DESC LIMIT 1").fetchone()
            again = self._connection.execute(
                "SELECT id FROM entries INDEXED BY by_id WHERE id > 0 ORDER BY id DESC LIMIT 1"
            ).fetchone()
        self._refuse_two_answers(last, again)
        return 0 if last is None else int(last[0])

    def find(self, column: str, number: int, limit: int) -> list[int]:
        """The newest rows that are found by a number, newest first: two indexes must say the same."""
        found = []
        with self.plainly():
            for index in (f"{column}_1", f"{column}_2"):
                query = f"SELECT id FROM entries INDEXED BY {index} WHERE {column} = ? ORDER BY id DESC LIMIT ?"
                found.append([row[0] for row in self._connection.execute(query, (number, limit))])
        self._refuse_two_answers(*found)
        return found[0]

    def row(self, number: int) -> Raw | None:
        """The row with this number, from the table itself."""
        with self.plainly():
            rows = self._connection.execute("SELECT * FROM entries NOT INDEXED WHERE id = ?", (number,)).fetchall()
        return Raw._make(rows[0]) if rows else None

    def rows(self, first: int, last: int, kind: str | None = None) -> list[Raw]:
        """The rows between two numbers, oldest first."""
        condition = "1" if kind is None else "kind = :kind"
        query = f"SELECT * FROM entries NOT INDEXED WHERE id BETWEEN :first AND :last AND {condition} ORDER BY id"
        with self.plainly():
            found = self._connection.execute(query, {"first": first, "last": last, "kind": kind})
            return [Raw._make(row) for row in found]

    def begun(self, number: int, limit: int, skip: int) -> list[int]:
        """The runs and selections of a data set, newest first, for those who leaf through them."""
        query = (
            "SELECT id FROM entries INDEXED BY by_dataset_1 WHERE by_dataset = ? AND kind IN ('run', 'selection') "
            "ORDER BY id DESC LIMIT ? OFFSET ?"
        )
        with self.plainly():
            return [row[0] for row in self._connection.execute(query, (number, limit, skip))]

    def next_dataset(self, number: int) -> int | None:
        """The data set that comes next in an index, by its number."""
        query = "SELECT by_dataset FROM entries INDEXED BY by_dataset_1 WHERE by_dataset > ? ORDER BY 1 LIMIT 1"
        with self.plainly():
            found = self._connection.execute(query, (number,)).fetchone()
        return None if found is None else int(found[0])

    def faults(self) -> list[str]:
        """What SQLite itself finds wrong, and what is missing: reads the whole file."""
        with self.plainly():
            found = [row[0] for row in self._connection.execute("PRAGMA integrity_check")]
        return [f"SQLite finds damage: {text}" for text in found if text != "ok"] + self._faults_of_schema()

    def _quick_faults(self) -> list[str]:
        """What SQLite's quick check finds in a small file; a large one shows when its rows are used."""
        with self.plainly():
            if os.path.getsize(self.path) > _SMALL:
                return []
            found = [row[0] for row in self._connection.execute("PRAGMA quick_check(1)")]
        return [text for text in found if text != "ok"]

    def _faults_of_schema(self) -> list[str]:
        with self.plainly():
            found = dict(self._connection.execute("SELECT name, sql FROM sqlite_master").fetchall())
        gone = [f"the trigger {name} is gone" for name in _TRIGGERS if name not in found]
        other = [f"the schema of {name} is not ours" for name in sorted(found) if found[name] != _SCHEMA.get(name)]
        return gone + other + [f"{name} is gone" for name in _SCHEMA if name not in found and name not in _TRIGGERS]

    def _refuse_lost(self, create: bool) -> None:
        if self.path.is_file() and self.path.stat().st_size == 0:
            raise LedgerError(
                f"the ledger {self.path} is empty, so it has lost what was spent: {RESTORE}; delete the file only if "
                "nothing was ever spent"
            )
        if not create and not self.path.exists():
            raise NoLedger(f"there is no ledger {self.path}: name the right file, or restore it")

    def _refuse_other_version(self) -> None:
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version == VERSION:
            return
        if 0 < version < VERSION:
            raise LedgerError(
                f"{self.path} is a ledger of an earlier version of fodp (store {version}, this one reads {VERSION}): "
                "go on with the version that wrote it; a new ledger would be a new budget"
            )
        raise LedgerError(
            f"{self.path} is no ledger of this version (store {version}, this one reads {VERSION}). If it was one, "
            f"{RESTORE}; if a later version of fodp wrote it, use that"
        )

    def _refuse_two_answers(self, one: Any, other: Any) -> None:
        if one != other:
            raise LedgerError(
                f"the ledger {self.path} is damaged (its indexes contradict each other), so it may have forgotten what "
                f"was spent: {RESTORE}"
            )

    @contextmanager
    def plainly(self, what: str = "cannot be read", fix: str = "see that it can be") -> Iterator[None]:
        """One line for whatever SQLite or the system has to say; damage gets its own advice."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:  # UnicodeError: a message that cites what is damaged
            code = getattr(error, "sqlite_errorcode", None)
            damaged = isinstance(error, UnicodeError) or (code is not None and code & 0xFF in _DAMAGED)
            raise LedgerError(
                f"the ledger {self.path} {'is damaged, or no ledger' if damaged else what} ({error}): "
                f"{RESTORE if damaged else fix}"
            ) from None
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} {what} ({error}): {fix}") from None


def _create(path: Path) -> None:
    """Make the file complete before it gets its name, so that nobody ever sees half a ledger; for its owner only."""
    with atomically(path, keep=True) as part:  # if another process was first, its ledger is the one
        connection = sqlite3.connect(part)
        connection.execute("PRAGMA synchronous = EXTRA")
        header = Header.new(secrets.token_bytes(32))
        script = ";\n".join(
            [*_SCHEMA.values(), f"INSERT INTO header VALUES {header.values()}", f"PRAGMA user_version = {VERSION}"]
        )
        connection.executescript(f"BEGIN;\n{script};\nCOMMIT;")
        connection.close()
