"""A high-water mark beside a ledger: an old copy that is put back knows less than the mark, and is refused.

The mark is a lower bound: it is raised when a run begins, saves or ends, not for every block of steps. Whoever restores
the mark together with the ledger restores what it knew; then only checkpoints of runs that went on know better.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from fodp.errors import LedgerError
from fodp.ledger.fingerprint import secret_file
from fodp.support.files import atomically


class Mark(NamedTuple):
    """A row that a ledger once had."""

    ledger: str
    entry: int
    chain: str

    def said(self) -> dict[str, object]:
        """As it is written down, with a checksum, so that damage does not look like a rollback."""
        return {**self._asdict(), "seal": hashlib.blake2b(json.dumps(self).encode(), digest_size=16).hexdigest()}


def mark_path(ledger: Path | str) -> Path:
    """Where a ledger's mark is: beside a file, and among the user's own files for a ledger on a server."""
    if isinstance(ledger, Path):
        return ledger.with_name(ledger.name + ".mark")
    name = hashlib.blake2b(ledger.encode(), digest_size=16).hexdigest()
    return secret_file().parent / "ledgers" / f"{name}.mark"


def read_mark(path: Path) -> Mark | None:
    """What is known; None if there is no mark."""
    try:
        said = json.loads(path.read_bytes())
        mark = Mark(str(said["ledger"]), int(said["entry"]), str(said["chain"]))
        if said["seal"] == mark.said()["seal"]:
            return mark
        reason = "its checksum is wrong"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
    raise LedgerError(
        f"{path}, which says how far the ledger had come, cannot be read ({reason}): make it readable, or restore it; "
        "delete it only if you know that the ledger beside it is the newest copy"
    )


def write_mark(ledger: Path | str, mark: Mark) -> None:
    """Replace the mark; whoever may use the ledger may use its mark too."""
    path = mark_path(ledger)
    if isinstance(ledger, str):
        path.parent.mkdir(parents=True, exist_ok=True)
    with atomically(path) as part:
        part.write_text(json.dumps(mark.said()) + "\n", encoding="utf-8")
        if isinstance(ledger, Path):
            part.chmod(ledger.stat().st_mode & 0o666)
