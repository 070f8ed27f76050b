"""A high-water mark beside a ledger: an old copy that is put back knows less than the mark, and is refused.

It is a lower bound: it is raised when a run begins, saves or ends, not for every block of steps. Whoever restores the
mark together with the ledger restores what it knew; then only checkpoints of runs that went on know better.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from fodp._checks import LedgerError
from fodp._files import atomically
from fodp.ledger.fingerprint import secret_file


class Mark(NamedTuple):
    """A row that a ledger once had."""

    ledger: str
    entry: int
    chain: str

    def seal(self) -> str:
        """A checksum, so that damage does not look like a rollback."""
        return hashlib.blake2b(json.dumps(self).encode(), digest_size=16).hexdigest()


class MarkFile:
    """The small file that keeps it: beside a file, and among the user's own for a ledger on a server."""

    def __init__(self, ledger: Path | str):
        self._ledger = ledger
        if isinstance(ledger, Path):
            self.path = ledger.with_name(ledger.name + ".mark")
        else:
            name = hashlib.blake2b(ledger.encode(), digest_size=16).hexdigest()
            self.path = secret_file().parent / "ledgers" / f"{name}.mark"

    def read(self) -> Mark | None:
        """What is known; None if there is no mark."""
        try:
            said = json.loads(self.path.read_bytes())
            mark = Mark(str(said["ledger"]), int(said["entry"]), str(said["chain"]))
            if said["seal"] == mark.seal():
                return mark
            reason = "its checksum is wrong"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
        raise LedgerError(
            f"{self.path}, which says how far the ledger had come, cannot be read ({reason}): make it readable, or "
            "restore it; delete it only if you know that the ledger beside it is the newest copy"
        )

    def write(self, mark: Mark) -> None:
        """Replace the mark; whoever may use the ledger may use it too."""
        if isinstance(self._ledger, str):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomically(self.path) as part:
            part.write_text(json.dumps({**mark._asdict(), "seal": mark.seal()}) + "\n", encoding="utf-8")
            if isinstance(self._ledger, Path):
                part.chmod(self._ledger.stat().st_mode & 0o666)
