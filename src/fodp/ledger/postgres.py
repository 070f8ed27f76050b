"""The ledger's rows on a PostgreSQL server, for a team: the same rows, seals and chain as in a file.

Whoever writes holds an advisory lock from before the first look until the commit, so checking and reserving are one
thing here too. What is looked for is looked for by a column and by an expression of it, which have different indexes.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fodp._checks import ConfigurationError, LedgerError
from fodp.ledger.header import RESTORE, Header, NoLedger
from fodp.ledger.rows import Raw

_FOUND_BY = ("by_dataset", "by_run", "by_mark")
_TRIGGERS = ("fodp_no_change", "fodp_no_truncate")
_LOCK = 0x666F6470  # "fodp": of all processes that write, in one database
_SCHEMA = [
    "CREATE TABLE fodp_header (identity text NOT NULL, key text NOT NULL, seal text NOT NULL)",
    "CREATE TABLE fodp_entries (id bigint PRIMARY KEY, at double precision NOT NULL, kind text NOT NULL, "
    "dataset text NOT NULL, run text NOT NULL, steps bigint, rdp double precision, data text NOT NULL, "
    "state text NOT NULL, by_dataset bigint NOT NULL, by_run bigint NOT NULL, by_mark bigint, chain text NOT NULL, "
    "seal text NOT NULL)",
    "CREATE INDEX fodp_by_id ON fodp_entries ((id + 0))",
    *(f"CREATE INDEX fodp_{column}_1 ON fodp_entries ({column}, id)" for column in _FOUND_BY),
    *(f"CREATE INDEX fodp_{column}_2 ON fodp_entries (({column} + 0), id)" for column in _FOUND_BY),
    "CREATE FUNCTION fodp_refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
    "CREATE TRIGGER fodp_no_change BEFORE UPDATE OR DELETE ON fodp_entries FOR EACH ROW EXECUTE FUNCTION fodp_refuse()",
    "CREATE TRIGGER fodp_no_truncate BEFORE TRUNCATE ON fodp_entries EXECUTE FUNCTION fodp_refuse()",
]


class PostgresRows:
    """The tables `fodp_header` and `fodp_entries` of one database. Nothing here is believed: the store checks seals."""

    def __init__(self, address: str, *, create: bool, verify: bool):
        self.path = address
        psycopg = _driver()
        self._errors = psycopg.errors
        with self.plainly("cannot be used", "see that the server can be reached and that you may use the database"):
            self._refuse_password(psycopg.conninfo.conninfo_to_dict(address))
            self._connection = psycopg.connect(address, autocommit=True)
            self._idle = psycopg.pq.TransactionStatus.IDLE
            # On the server's disk before the release is used, whatever its default is; and nobody waits for ever.
            self._connection.execute("SET synchronous_commit = on; SET lock_timeout = '30s'")
            if not self._exists():
                self._create(create)
        if verify:
            found = self.faults()
            if found:
                raise LedgerError(f"the ledger {self.path} is damaged ({found[0]}): {RESTORE}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def header(self) -> Header:
        """Which ledger this is, and its key."""
        return Header.read(self._all("SELECT identity, key, seal FROM fodp_header"), self.path)

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[None]:
        """All or nothing; one that writes holds the only write lock from its beginning, one that reads one moment."""
        self._connection.execute("BEGIN" if write else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            if write:  # what is read after the lock is what its last holder committed
                self._connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if not self._connection.closed and self.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @property
    def in_transaction(self) -> bool:
        """Is one under way?"""
        return bool(self._connection.info.transaction_status != self._idle)

    def insert(self, row: Raw) -> None:
        """Add a row, within a transaction that writes."""
        self._connection.execute(f"INSERT INTO fodp_entries VALUES ({', '.join(['%s'] * len(row))})", row)

    def newest(self) -> int:
        """The number of the newest row, 0 if there is none: two indexes must say the same."""
        last = self._all("SELECT id FROM fodp_entries ORDER BY id DESC LIMIT 1")
        self._refuse_two_answers(last, self._all("SELECT id FROM fodp_entries ORDER BY (id + 0) DESC LIMIT 1"))
        return int(last[0][0]) if last else 0

    def find(self, column: str, number: int, limit: int) -> list[int]:
        """The newest rows that are found by a number, newest first: two indexes must say the same."""
        found = [
            self._all(f"SELECT id FROM fodp_entries WHERE {name} = %s ORDER BY id DESC LIMIT %s", (number, limit))
            for name in (column, f"({column} + 0)")
        ]
        self._refuse_two_answers(*found)
        return [row[0] for row in found[0]]

    def row(self, number: int) -> Raw | None:
        """The row with this number."""
        rows = self._all("SELECT * FROM fodp_entries WHERE id = %s", (number,))
        return Raw._make(rows[0]) if len(rows) == 1 else None

    def rows(self, first: int, last: int, kind: str | None = None) -> list[Raw]:
        """The rows between two numbers, oldest first."""
        condition = "" if kind is None else "AND kind = %(kind)s "
        query = f"SELECT * FROM fodp_entries WHERE id BETWEEN %(first)s AND %(last)s {condition}ORDER BY id"
        return [Raw._make(row) for row in self._all(query, {"first": first, "last": last, "kind": kind})]

    def begun(self, number: int, limit: int, skip: int) -> list[int]:
        """The runs and selections of a data set, newest first, for those who leaf through them."""
        query = (
            "SELECT id FROM fodp_entries WHERE by_dataset = %s AND kind IN ('run', 'selection') "
            "ORDER BY id DESC LIMIT %s OFFSET %s"
        )
        return [row[0] for row in self._all(query, (number, limit, skip))]

    def next_dataset(self, number: int) -> int | None:
        """The data set that comes next in an index, by its number."""
        query = "SELECT by_dataset FROM fodp_entries WHERE by_dataset > %s ORDER BY by_dataset LIMIT 1"
        found = self._all(query, (number,))
        return int(found[0][0]) if found else None

    def faults(self) -> list[str]:
        """What is missing beside the rows. The server checks its own files (`pg_amcheck`, data checksums)."""
        query = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'fodp_entries'::regclass AND tgenabled = 'O'"
        found = {row[0] for row in self._all(query)}
        return [f"the trigger {name} is gone" for name in _TRIGGERS if name not in found]

    def _exists(self) -> bool:
        # Not to_regclass: it may remember from before the lock that there was none.
        query = "SELECT 1 FROM pg_tables WHERE tablename = 'fodp_entries' AND schemaname = ANY (current_schemas(false))"
        return bool(self._all(query))

    def _create(self, create: bool) -> None:
        """Make the tables, all or nothing; if another process was first, its ledger is the one."""
        if not create:
            raise NoLedger(f"there is no ledger in {self.path}: name the right database, or restore it")
        with self.transaction(write=True):
            if self._exists():
                return
            for statement in _SCHEMA:
                self._connection.execute(statement)
            header = Header.new(secrets.token_bytes(32))
            self._connection.execute("INSERT INTO fodp_header VALUES (%s, %s, %s)", header.values())

    def _all(self, query: str, values: Any = None) -> list[Any]:
        with self.plainly():
            return list(self._connection.execute(query, values).fetchall())

    def _refuse_two_answers(self, one: Any, other: Any) -> None:
        if one != other:
            raise LedgerError(
                f"the ledger {self.path} is damaged (its indexes contradict each other), so it may have forgotten what "
                f"was spent: {RESTORE}"
            )

    def _refuse_password(self, parts: dict[str, Any]) -> None:
        if parts.get("password"):
            self.path = "of this address"
            raise ConfigurationError(
                "the address of the ledger has a password in it, which would be written into the folder of the run: "
                "leave it out, and keep it in ~/.pgpass or PGPASSWORD"
            )

    @contextmanager
    def plainly(self, what: str = "cannot be read", fix: str = "see that it can be, then resume") -> Iterator[None]:
        """One line for whatever the server has to say; damage gets its own advice."""
        try:
            yield
        except (self._errors.DataCorrupted, self._errors.IndexCorrupted, self._errors.UndefinedTable) as error:
            raise LedgerError(f"the ledger {self.path} is damaged ({_first_line(error)}): {RESTORE}") from None
        except self._errors.Error as error:
            raise LedgerError(f"the ledger {self.path} {what} ({_first_line(error)}): {fix}") from None
        except OSError as error:  # of the mark
            raise LedgerError(f"the mark of the ledger {self.path} {what} ({error}): {fix}") from None


def _driver() -> Any:
    try:
        import psycopg
        import psycopg.conninfo
    except ImportError:
        raise LedgerError('a ledger on PostgreSQL needs its driver: pip install "fodp[postgres]"') from None
    return psycopg


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
