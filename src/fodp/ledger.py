"""What has been spent, durably: steps are written down before their releases are used.

An append-only SQLite file. A run reserves steps in blocks; a crash between two reservations can only
over-count. Knows nothing of torch or of what a step does.
"""

import sqlite3
import time
from pathlib import Path

from fodp._checks import PrivacyError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spans (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    steps INTEGER NOT NULL,
    settled INTEGER NOT NULL,
    at REAL NOT NULL
);
"""


class Ledger:
    """The spending of runs, one row per reservation; the last row of a run holds."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._connection = sqlite3.connect(self.path, isolation_level=None)
            self._connection.execute("PRAGMA synchronous = FULL")  # on disk before the release is used
            self._connection.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise PrivacyError(f"the ledger {self.path} cannot be used ({error}); name a writable file") from None

    def reserve(self, run: str, steps: int) -> None:
        """The run may from now on have used its first `steps` steps."""
        self._write(run, steps, settled=False)

    def settle(self, run: str, steps: int) -> None:
        """The run has stopped in an orderly way and used exactly its first `steps` steps."""
        self._write(run, steps, settled=True)

    def steps(self, run: str) -> int | None:
        """How many steps of the run count as used; None if it never reserved any here."""
        row = self._connection.execute(
            "SELECT steps FROM spans WHERE run = ? ORDER BY id DESC LIMIT 1", (run,)
        ).fetchone()
        return None if row is None else int(row[0])

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _write(self, run: str, steps: int, settled: bool) -> None:
        try:
            self._connection.execute(
                "INSERT INTO spans (run, steps, settled, at) VALUES (?, ?, ?, ?)",
                (run, steps, int(settled), time.time()),
            )
        except sqlite3.Error as error:
            raise PrivacyError(
                f"the ledger {self.path} could not be written ({error}); nothing was released, free the disk "
                "or the file and resume"
            ) from None
