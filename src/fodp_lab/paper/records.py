"""Append-only records: one JSON line per run, never changed, read back by key."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fodp.errors import PrivacyError


class Records:
    """The runs in one file. A line cut short by a crash is passed over and closed off before the next.

    A whole line that lacks one of `fields` was not written by us, and is refused. Runs `beside` the file are found by
    key where it has none, and are not listed.
    """

    def __init__(self, path: str | Path, fields: Sequence[str] = (), beside: Iterable[dict[str, Any]] = ()):
        self.path = Path(path)
        self._fields = fields
        self._beside = {record["key"]: record for record in beside}
        self._found: dict[str, dict[str, Any]] = {}
        for record in self._read():
            self._found[record["key"]] = record

    def get(self, key: str, code: str | None = None) -> dict[str, Any] | None:
        """The latest record of a run, of the given version of the code if one is given."""
        for record in (self._found.get(key), self._beside.get(key)):
            if record is not None and code in (None, record["code"]):
                return record
        return None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def append(self, record: dict[str, Any]) -> None:
        """Write one more line and see it safely to the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n"
        with self.path.open("ab+") as file:
            if file.tell() and not _ends_line(file):
                line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._found[record["key"]] = record

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise PrivacyError(f"the records {self.path} cannot be read ({error})") from None
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut short by a crash; that run is computed again
            if not isinstance(record, dict) or "key" not in record:
                continue
            missing = [field for field in self._fields if field not in record]
            if missing:
                raise PrivacyError(
                    f"line {number} of the records {self.path} lacks {missing[0]!r}: take it out, "
                    "and `fodp reproduce` computes that run again"
                )
            yield record


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One process at a time adds to a file of records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{path}.lock", timeout=0):
            yield
    except Timeout:
        raise PrivacyError(
            f"another process is adding to {path}: wait for it, or choose another folder with --out"
        ) from None


def _ends_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")
