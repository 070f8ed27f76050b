"""The ledger's rows in one SQLite file."""

import os
import secrets
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fodp.errors import LedgerError
from fodp.ledger.database import FOUND_BY, Database
from fodp.ledger.rows import RESTORE, Header, NoLedger
from fodp.support.files import atomically

VERSION = 3
_COLUMNS = (
    "id INTEGER PRIMARY KEY", "at REAL NOT NULL", "kind TEXT NOT NULL", "dataset TEXT NOT NULL", "run TEXT NOT NULL",
    "steps INTEGER", "rdp REAL", "data TEXT NOT NULL", "state TEXT NOT NULL", "by_dataset INTEGER NOT NULL",
    "by_run INTEGER NOT NULL", "by_mark INTEGER", "chain TEXT NOT NULL", "seal TEXT NOT NULL",
)  # fmt: skip
_TABLE = "CREATE TABLE entries (\n    " + ",\n    ".join(_COLUMNS) + "\n)"  # to the letter: it is compared
_ABORT = "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
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
    **{f"{name}_{n}": f"CREATE INDEX {name}_{n} ON entries ({name})" for name in FOUND_BY for n in (1, 2)},
    **_TRIGGERS,
}
_DAMAGED = tuple(
    getattr(sqlite3, f"SQLITE_{name}") for name in ("ERROR", "CORRUPT", "NOTADB", "FORMAT", "TOOBIG", "MISMATCH")
)
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_PATIENCE = 5.0  # seconds without a word while another process holds the ledger
_SMALL = 2**20  # bytes: SQLite's own check of such a file takes milliseconds


class _Patient(sqlite3.Connection):
    """Waits as long as another process, perhaps a database browser, holds the file; says so after some seconds.

    A run that has trained for hours must not end because somebody looks at its ledger. SQLite itself waits one second
    at a time; in between, signals are heard.
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


class SQLiteRows(Database):
    """The file."""

    path: Path
    errors = (sqlite3.Error, UnicodeError)  # UnicodeError: a message that cites what is damaged
    begin_reading, begin_writing = "BEGIN", "BEGIN IMMEDIATE"
    table, headers, place = "entries", "header", "?"
    rows_as_they_lie, rows_by_dataset = "entries NOT INDEXED", "entries INDEXED BY by_dataset_1"
    newest_twice = (
        "SELECT id FROM entries NOT INDEXED ORDER BY id DESC LIMIT 1",
        "SELECT id FROM entries INDEXED BY by_id WHERE id > 0 ORDER BY id DESC LIMIT 1",
    )
    found_twice = (
        "SELECT id FROM entries INDEXED BY {column}_1 WHERE {column} = ? ORDER BY id DESC LIMIT ?",
        "SELECT id FROM entries INDEXED BY {column}_2 WHERE {column} = ? ORDER BY id DESC LIMIT ?",
    )

    def __init__(self, path: Path, *, create: bool, verify: bool):
        self.path = path
        if "\0" in str(path):
            raise LedgerError(f"the ledger's name {str(path)!r} holds a zero byte: name a writable file")
        with self.plainly("cannot be used", "name a file that you may read and write, in a folder that is there"):
            self._refuse_lost(create)
            if not path.exists():
                _create(path)
            # Never creates: a file that vanished in between must not come back empty.
            name = f"file:{quote(os.fsencode(path))}?mode=rw"
            words: Any = dict(uri=True, isolation_level=None, timeout=1.0, check_same_thread=False)
            self._connection = sqlite3.connect(name, factory=_Patient, **words)
            # Text that is damaged is no reason to fail where it is read: its row's seal will not fit.
            self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
            # On disk before the release is used; EXTRA survives a power cut right after the commit too.
            self._execute("PRAGMA synchronous = EXTRA")
            self._refuse_other_version()
        if verify:
            self.refuse_faults(self._faults_of_schema() or self._quick_faults())

    @property
    def in_transaction(self) -> bool:
        """Is a transaction under way?"""
        return self._connection.in_transaction

    def _is_damage(self, error: Exception) -> bool:
        code = getattr(error, "sqlite_errorcode", None)
        return isinstance(error, UnicodeError) or (code is not None and code & 0xFF in _DAMAGED)

    def faults(self) -> list[str]:
        """What SQLite itself finds wrong, and what is missing. Reads the whole file."""
        found = [f"SQLite finds damage: {text}" for (text,) in self._all("PRAGMA integrity_check") if text != "ok"]
        return found + self._faults_of_schema()

    def _quick_faults(self) -> list[str]:
        """What SQLite's quick check finds in a small file; damage in a large one shows when its rows are used."""
        with self.plainly():
            small = os.path.getsize(self.path) <= _SMALL
        return [text for (text,) in self._all("PRAGMA quick_check(1)") if text != "ok"] if small else []

    def _faults_of_schema(self) -> list[str]:
        found = dict(self._all("SELECT name, sql FROM sqlite_master"))
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
        version = self._execute("PRAGMA user_version").fetchone()[0]
        told = f"(store {version}, this one reads {VERSION})"
        if 0 < version < VERSION:
            raise LedgerError(
                f"{self.path} is a ledger of an earlier version of fodp {told}: go on with the version that wrote it; "
                "a new ledger would be a new budget"
            )
        if version != VERSION:
            raise LedgerError(
                f"{self.path} is no ledger of this version {told}. If it was one, {RESTORE}; if a later version of "
                "fodp wrote it, use that"
            )


def _create(path: Path) -> None:
    """Make the file complete before it gets its name, so that nobody ever sees half a ledger; for its owner only."""
    with atomically(path, keep=True) as part:  # if another process was first, its ledger is the one
        connection = sqlite3.connect(part)
        connection.execute("PRAGMA synchronous = EXTRA")
        values = Header.new(secrets.token_bytes(32)).values()  # hexadecimal: they may stand in a statement
        script = [*_SCHEMA.values(), f"INSERT INTO header VALUES {values}", f"PRAGMA user_version = {VERSION}"]
        connection.executescript(";\n".join(["BEGIN", *script, "COMMIT;"]))
        connection.close()
