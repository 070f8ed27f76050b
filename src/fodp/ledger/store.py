"""An append-only table in one SQLite file, every row chained to the one before by a hash.

Triggers refuse changes and deletions. The chain shows edits made behind SQLite's back, and a file that has any is
not used. It cannot show that the last rows were cut off or that the whole file was exchanged, which is why
checkpoints remember a row.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fodp._checks import PrivacyError
from fodp._files import atomically

VERSION = 2
_SCHEMA = f"""
BEGIN;
CREATE TABLE entries (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    dataset TEXT NOT NULL,
    run TEXT NOT NULL,
    steps INTEGER,
    rdp REAL,
    data TEXT NOT NULL,
    chain TEXT NOT NULL
);
CREATE INDEX by_dataset ON entries (dataset, run, id, rdp);
CREATE INDEX by_run ON entries (run, kind, id);
CREATE TRIGGER no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER no_replace BEFORE INSERT ON entries WHEN NEW.id <= (SELECT max(id) FROM entries)
    BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
PRAGMA user_version = {VERSION};
COMMIT;
"""
_WAIT_SECONDS = 30  # for another process to finish its transaction


class Entry(NamedTuple):
    """One row. `steps` and `rdp` say how much of the run counts as used from here on, all of it together."""

    id: int
    at: float
    kind: str
    dataset: str
    run: str
    steps: int | None
    rdp: float | None
    data: dict[str, Any]
    chain: str


class Store:
    """The file. Entries are appended within `writing()`, which holds the only write lock and is all or nothing.

    Without `verify` a file whose rows were changed is opened too, to say what is wrong with it.
    """

    def __init__(self, path: str | Path, *, create: bool = True, verify: bool = True):
        self.path = Path(path)
        if "\0" in str(path):
            raise PrivacyError(f"the ledger's name {str(path)!r} holds a zero byte: name a writable file")
        with self._plainly("cannot be used", "name a writable file"):
            if self.path.is_file() and self.path.stat().st_size == 0:
                raise PrivacyError(
                    f"the ledger {self.path} is empty, so it has lost what was spent: restore a copy; delete the file "
                    "only if nothing was ever spent"
                )
            if not self.path.exists():
                if not create:
                    raise PrivacyError(f"there is no ledger {self.path}: name the right file, or restore it")
                _create(self.path)
            # Never creates: a file that vanished in between must not come back empty.
            self._connection = sqlite3.connect(
                f"file:{quote(str(self.path))}?mode=rw",
                uri=True,
                isolation_level=None,
                timeout=_WAIT_SECONDS,
                check_same_thread=False,
            )
            # On disk before the release is used; EXTRA survives a power cut right after the commit too.
            self._connection.execute("PRAGMA synchronous = EXTRA")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version != VERSION:
                raise PrivacyError(
                    f"{self.path} is no ledger of this version (found {version}, this version reads {VERSION}): use "
                    "the version of fodp that wrote it, or name another file"
                )
        changed = self._changed_rows() if verify else []
        if changed:
            raise PrivacyError(
                f"the ledger {self.path} was changed by something else than fodp ({changed[0]}), so it no longer knows "
                "what was spent: restore a copy of it; `fodp ledger check` lists what is wrong"
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the write lock: what is read in here is still true when it is written. Nothing is half done."""
        with self._plainly("could not be written", "nothing was released; free the disk or the file, then resume"):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

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
        last = self.last()
        number, before = (1, "") if last is None else (last.id + 1, last.chain)
        values = (number, whole_minutes(), kind, dataset, run, steps, rdp, json.dumps(data or {}, sort_keys=True))
        chain = _link(before, values)
        self._connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, chain))
        return Entry(number, values[1], kind, dataset, run, steps, rdp, data or {}, chain)

    def select(self, condition: str = "1", arguments: tuple[Any, ...] = ()) -> list[Entry]:
        """The rows that meet a condition, oldest first."""
        with self._plainly("cannot be read", "restore a copy of it"):
            rows = self._connection.execute(f"SELECT * FROM entries WHERE {condition} ORDER BY id", arguments)
            return [Entry._make((*row[:7], json.loads(row[7]), row[8])) for row in rows]

    def last(self, condition: str = "1", arguments: tuple[Any, ...] = ()) -> Entry | None:
        """The newest row that meets a condition."""
        found = self.select(f"id = (SELECT max(id) FROM entries WHERE {condition})", arguments)
        return found[0] if found else None

    def others_rdp(self, dataset: str, run: str) -> float:
        """What all other runs on the data set count as having used: the last word of each."""
        with self._plainly("cannot be read", "restore a copy of it"):
            row = self._connection.execute(
                "SELECT coalesce(sum(rdp), 0) FROM entries WHERE id IN (SELECT max(id) FROM entries "
                "WHERE dataset = ? AND run != ? AND rdp IS NOT NULL GROUP BY run)",
                (dataset, run),
            ).fetchone()
        return float(row[0])

    def faults(self) -> list[str]:
        """What is wrong with the file: damage, missing triggers, rows that break the chain."""
        with self._plainly("cannot be read", "restore a copy of it"):
            found = [
                f"SQLite finds damage: {row[0]}"
                for row in self._connection.execute("PRAGMA integrity_check")
                if row[0] != "ok"
            ]
            names = {row[0] for row in self._connection.execute("SELECT name FROM sqlite_master WHERE type='trigger'")}
            found += [f"the trigger {n} is gone" for n in ("no_update", "no_delete", "no_replace") if n not in names]
        return found + self._changed_rows()

    def _changed_rows(self) -> list[str]:
        """Rows that break the chain."""
        with self._plainly("cannot be read", "restore a copy of it"):
            rows = self._connection.execute("SELECT * FROM entries ORDER BY id").fetchall()
        found, before, expected = [], "", 1
        for row in rows:
            if row[0] != expected:
                found.append(f"entry {expected} is missing")
            if row[8] != _link(before, row[:8]):
                found.append(f"entry {row[0]} was changed, or the one before it")
            before, expected = str(row[8]), row[0] + 1
        return found

    @contextmanager
    def _plainly(self, what: str, fix: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, json.JSONDecodeError) as error:
            raise PrivacyError(f"the ledger {self.path} {what} ({error}): {fix}") from None


def whole_minutes() -> float:
    """The time now, without seconds: how fast steps follow each other tells how large their lots are."""
    return time.time() // 60 * 60.0


def _link(before: str, values: tuple[Any, ...]) -> str:
    return hashlib.sha256((before + json.dumps(values, default=repr)).encode()).hexdigest()  # repr: not ours anyway


def _create(path: Path) -> None:
    """Make the file complete before it gets its name, so that nobody ever sees half a ledger."""
    with atomically(path, keep=True) as part:  # if another process was first, its ledger is the one
        connection = sqlite3.connect(part)
        connection.execute("PRAGMA synchronous = EXTRA")
        connection.executescript(_SCHEMA)
        connection.close()
        os.chmod(part, 0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
