"""The folder of a run: configuration, per-epoch metrics, result, statement, checkpoint, plot, ledger."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from fodp.errors import ConfigurationError, LedgerError, PrivacyError
from fodp.support.files import Hold, atomically, is_address, refuse_unwritable

_TEXTS = ("run", "ledger", "dataset_name", "budget")  # of a configuration; what else is wrong shows when it is used


def write_atomically(file: Path, text: str) -> None:
    """Write all or nothing, durably: a crash leaves the old file in place."""
    try:
        with atomically(file) as part:
            part.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise PrivacyError(
            f"{file} could not be written ({error.strerror or error}): free the disk or make the folder writable"
        ) from None


class RunFolder:
    """Names the files of a run and writes them atomically."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.csv"
        self.result = self.path / "result.json"
        self.statement = self.path / "privacy.txt"
        self.checkpoint = self.path / "checkpoint.pt"
        self.ledger = self.path / "ledger.sqlite"
        self.plot = self.path / "accuracy.png"
        self._hold = Hold(self.path / "run.lock")
        self._made: list[Path] = []  # folders that `create` has made, the innermost first
        self._before: set[str] | None = None  # what was in this one; None: it was not created here

    def create(self) -> None:
        """Make the folder; one that holds a run already is not overwritten."""
        try:
            holds_a_run = self.config.exists()
            if not holds_a_run:
                self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
                self._before = {file.name for file in self.path.iterdir()}
                self.take()
                holds_a_run = self.config.exists()  # another process may have made one a moment ago
        except PrivacyError:
            raise
        except (OSError, ValueError) as error:  # not writable; a name too long, or with a zero byte
            raise ConfigurationError(
                f"{self.path} cannot be written ({_reason(error)}): choose another --out"
            ) from None
        if holds_a_run:
            raise ConfigurationError(
                f"{self.path} holds a run already: go on with it (--resume), or choose another folder (--out)"
            )
        self.tidy()

    def refuse_unusable(self) -> None:
        """Raise if the folder plainly cannot be made or written. Makes nothing."""
        try:
            refuse_unwritable(self.config)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; choose another --out") from None

    def take(self) -> None:
        """Let this process own the folder until it leaves it or ends; refuses while another one owns it."""
        if not self._hold.take(f"process {os.getpid()} on {socket.gethostname()}"):
            owner = self._hold.path.read_text(encoding="utf-8", errors="replace") or "another process"
            raise LedgerError(
                f"{self.path} belongs to a run that {owner} is working on: wait for it or stop it, or choose another "
                "folder (--out)"
            )

    def leave(self) -> None:
        """Let other processes have the folder."""
        self._hold.leave()

    def discard(self) -> None:
        """Remove what was written since `create`, and folders that it made: the run was refused before it began."""
        if self._before is None or not self._hold.held:
            return
        with suppress(OSError):  # what cannot be removed stays
            for file in self.path.iterdir():
                if file.name not in self._before and file.is_file() and file != self._hold.path:
                    file.unlink()
            self.leave()
            for folder in self._made:
                folder.rmdir()

    def tidy(self) -> None:
        """Remove what a killed process had begun to write."""
        written = (self.config, self.metrics, self.result, self.statement, self.checkpoint, self.plot, self.ledger)
        for file in written:
            for part in self.path.glob(f"{file.name}.*.part"):  # as `atomically` names them
                part.unlink(missing_ok=True)

    def ledger_of(self, config: dict[str, Any]) -> Path | str:
        """The ledger that the run is kept in: a file or an address named by the user, or the folder's own."""
        named = config.get("ledger")
        return self.ledger if not named else str(named) if is_address(named) else Path(named)

    def write(self, file: Path, text: str) -> None:
        """All or nothing."""
        write_atomically(file, text)

    def read_config(self) -> dict[str, Any]:
        """The configuration the run was started with."""
        try:
            config = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigurationError(
                f"{self.path} holds no run (no {self.config.name}): start one without --resume"
            ) from None
        except (OSError, ValueError, RecursionError) as error:  # not there to read, not text, not JSON
            raise LedgerError(f"{self.config} cannot be read ({_reason(error)}): restore a copy of it") from None
        if not isinstance(config, dict) or not all(isinstance(config.get(key, ""), str) for key in _TEXTS):
            raise LedgerError(f"{self.config} is not a run's configuration: restore a copy of it")
        return config


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
