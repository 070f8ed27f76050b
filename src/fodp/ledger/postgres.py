"""The ledger's rows on a PostgreSQL server, for a team: the same rows, seals and chain as in a file.

Whoever writes holds an advisory lock from before the first look until the commit: checking and reserving are one
transaction here too. The two ways to look for a row are a column and an expression of it, which have different indexes.
"""

import secrets
from typing import Any

from fodp.errors import ConfigurationError, LedgerError
from fodp.ledger.database import FOUND_BY, Database
from fodp.ledger.rows import Header, NoLedger

_TRIGGERS = ("fodp_no_change", "fodp_no_truncate")
_LOCK = 0x666F6470  # "fodp": of all processes that write, in one database
_SCHEMA = [
    "CREATE TABLE fodp_header (identity text NOT NULL, key text NOT NULL, seal text NOT NULL)",
    "CREATE TABLE fodp_entries (id bigint PRIMARY KEY, at double precision NOT NULL, kind text NOT NULL, "
    "dataset text NOT NULL, run text NOT NULL, steps bigint, rdp double precision, data text NOT NULL, "
    "state text NOT NULL, by_dataset bigint NOT NULL, by_run bigint NOT NULL, by_mark bigint, chain text NOT NULL, "
    "seal text NOT NULL)",
    "CREATE INDEX fodp_by_id ON fodp_entries ((id + 0))",
    *(f"CREATE INDEX fodp_{column}_1 ON fodp_entries ({column}, id)" for column in FOUND_BY),
    *(f"CREATE INDEX fodp_{column}_2 ON fodp_entries (({column} + 0), id)" for column in FOUND_BY),
    "CREATE FUNCTION fodp_refuse() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
    "CREATE TRIGGER fodp_no_change BEFORE UPDATE OR DELETE ON fodp_entries FOR EACH ROW EXECUTE FUNCTION fodp_refuse()",
    "CREATE TRIGGER fodp_no_truncate BEFORE TRUNCATE ON fodp_entries EXECUTE FUNCTION fodp_refuse()",
]


class PostgresRows(Database):
    """The tables `fodp_header` and `fodp_entries` of one database."""

    path: str
    table = rows_as_they_lie = rows_by_dataset = "fodp_entries"
    begin_reading, begin_writing = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "BEGIN"
    lock = f"SELECT pg_advisory_xact_lock({_LOCK})"
    headers, place = "fodp_header", "%s"
    newest_twice = (
        "SELECT id FROM fodp_entries ORDER BY id DESC LIMIT 1",
        "SELECT id FROM fodp_entries ORDER BY (id + 0) DESC LIMIT 1",
    )
    found_twice = (
        "SELECT id FROM fodp_entries WHERE {column} = ? ORDER BY id DESC LIMIT ?",
        "SELECT id FROM fodp_entries WHERE ({column} + 0) = ? ORDER BY id DESC LIMIT ?",
    )

    def __init__(self, address: str, *, create: bool, verify: bool):
        self.path = address
        psycopg = _driver()
        self.errors, known = (psycopg.errors.Error,), psycopg.errors
        self._damage = (known.DataCorrupted, known.IndexCorrupted, known.UndefinedTable)
        with self.plainly("cannot be used", "see that the server can be reached and that you may use the database"):
            self._refuse_password(psycopg.conninfo.conninfo_to_dict(address))
            self._connection = psycopg.connect(address, autocommit=True)
            self._idle = psycopg.pq.TransactionStatus.IDLE
            # On the server's disk before the release is used, whatever its default is; and nobody waits for ever.
            self._connection.execute("SET synchronous_commit = on; SET lock_timeout = '30s'")
            if not self._exists():
                self._create(create)
        if verify:
            self.refuse_faults(self.faults())

    @property
    def in_transaction(self) -> bool:
        """Is a transaction under way?"""
        return not self._connection.closed and bool(self._connection.info.transaction_status != self._idle)

    def _is_damage(self, error: Exception) -> bool:
        return isinstance(error, self._damage)

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
                self._execute(statement)
            self._execute("INSERT INTO fodp_header VALUES (?, ?, ?)", Header.new(secrets.token_bytes(32)).values())

    def _refuse_password(self, parts: dict[str, Any]) -> None:
        if parts.get("password"):
            raise ConfigurationError(
                "the address of the ledger has a password in it, which would be written into the folder of the run: "
                "leave it out, and keep it in ~/.pgpass or PGPASSWORD"
            )


def _driver() -> Any:
    try:
        import psycopg
        import psycopg.conninfo
    except ImportError:
        raise LedgerError('a ledger on PostgreSQL needs its driver: pip install "fodp[postgres]"') from None
    return psycopg
