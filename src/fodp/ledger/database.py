"""What the two databases of a ledger, an SQLite file and a PostgreSQL server, have in common.

Whatever is looked for is looked for in two indexes, and both must agree: a damaged index can hide a row, and a row
that is hidden has no checksum that could fail.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fodp.errors import LedgerError
from fodp.ledger.rows import RESTORE, Header, Raw

FOUND_BY = ("by_dataset", "by_run", "by_mark")


class Database(ABC):
    """The rows of one ledger. Nothing that is read here is believed: the store checks seals."""

    path: Path | str
    errors: tuple[type[Exception], ...]  # what the database raises
    _connection: Any
    # Words of the database: how transactions begin, and what else a writer locks; the tables; the place of a value.
    begin_reading: str
    begin_writing: str
    lock = ""
    table: str
    headers: str
    place: str
    rows_as_they_lie: str  # the table, read without an index
    rows_by_dataset: str  # the table, read by the index of data sets
    # Two ways to ask for the newest row, and for the newest rows with a number in a column.
    newest_twice: tuple[str, str]
    found_twice: tuple[str, str]

    @property
    @abstractmethod
    def in_transaction(self) -> bool:
        """Is a transaction under way?"""

    @abstractmethod
    def faults(self) -> list[str]:
        """What is wrong with the database itself; reads all of it."""

    @abstractmethod
    def _is_damage(self, error: Exception) -> bool: ...

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def header(self) -> Header:
        """Which ledger this is, and its key."""
        return Header.read(self._all(f"SELECT identity, key, seal FROM {self.headers}"), self.path)

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All or nothing. One that writes holds the only write lock throughout; one that reads sees one moment."""
        self._execute(self.begin_writing if write else self.begin_reading)
        try:
            if write and self.lock:  # what is read after the lock is what its last holder committed
                self._execute(self.lock)
            yield
            self._execute("COMMIT")
        except BaseException:
            if self.in_transaction:
                self._execute("ROLLBACK")
            raise

    def insert(self, row: Raw) -> None:
        """Add a row, within a transaction that writes."""
        self._execute(f"INSERT INTO {self.table} VALUES ({', '.join('?' * len(row))})", row)

    def newest(self) -> int:
        """The number of the newest row, 0 if there is none."""
        return next(iter(self._agreed(self.newest_twice)), 0)

    def find(self, column: str, number: int, limit: int) -> list[int]:
        """The newest rows with this number in a column, newest first."""
        return self._agreed([query.format(column=column) for query in self.found_twice], (number, limit))

    def rows(self, first: int, last: int, kind: str | None = None) -> list[Raw]:
        """The rows between two numbers, oldest first; all kinds, or one."""
        query = (
            f"SELECT * FROM {self.rows_as_they_lie} WHERE id BETWEEN ? AND ? {'' if kind is None else 'AND kind = ? '}"
        )
        values = (first, last) if kind is None else (first, last, kind)
        return [Raw._make(row) for row in self._all(f"{query}ORDER BY id", values)]

    def row(self, number: int) -> Raw | None:
        """The row with this number."""
        return next(iter(self.rows(number, number)), None)

    def begun(self, number: int, limit: int, skip: int) -> list[int]:
        """The runs and selections of a data set, newest first, for those who page through them."""
        kinds = "kind IN ('run', 'selection') ORDER BY id DESC LIMIT ? OFFSET ?"
        query = f"SELECT id FROM {self.rows_by_dataset} WHERE by_dataset = ? AND {kinds}"
        return [row[0] for row in self._all(query, (number, limit, skip))]

    def next_dataset(self, number: int) -> int | None:
        """The data set that comes next in an index, by its number."""
        query = f"SELECT by_dataset FROM {self.rows_by_dataset} WHERE by_dataset > ? ORDER BY by_dataset LIMIT 1"
        return next((int(row[0]) for row in self._all(query, (number,))), None)

    @contextmanager
    def plainly(self, what: str = "cannot be read", fix: str = "see that it can be, then resume") -> Iterator[None]:
        """One line for whatever the database or the system has to say; damage gets its own advice."""
        try:
            yield
        except self.errors as error:
            if self._is_damage(error):
                what, fix = "is damaged, or no ledger", RESTORE
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LedgerError(f"the ledger {self.path} {what} ({said}): {fix}") from None
        except OSError as error:
            raise LedgerError(f"the ledger {self.path} {what} ({error}): {fix}") from None

    def _execute(self, query: str, values: Any = None) -> Any:
        """Run a statement with `?` in the place of each value."""
        return self._connection.execute(query.replace("?", self.place), values or ())

    def refuse_faults(self, found: list[str]) -> None:
        """Raise if something is wrong with the database itself."""
        if found:
            raise LedgerError(f"the ledger {self.path} is damaged ({found[0]}): {RESTORE}")

    def _all(self, query: str, values: Any = None) -> list[Any]:
        with self.plainly():
            return list(self._execute(query, values).fetchall())

    def _agreed(self, queries: Any, values: Any = None) -> list[int]:
        one, other = ([row[0] for row in self._all(query, values)] for query in queries)
        if one != other:
            raise LedgerError(
                f"the ledger {self.path} is damaged (its indexes contradict each other), so it may have forgotten what "
                f"was spent: {RESTORE}"
            )
        return one
