"""What is kept of a search while it lasts: how many runs, which are done, the best so far. Nobody may look at it."""

import json
import math
import os
import secrets
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fodp.errors import LedgerError, PrivacyError
from fodp.support.files import atomically


@dataclass
class State:
    """`draws` is the candidate of each run, in their order; the ids are those of the charges in the ledger."""

    draws: list[int]
    selection: str = field(default_factory=lambda: f"selection-{secrets.token_hex(16)}")
    final_run: str = field(default_factory=lambda: secrets.token_hex(16))
    subsample_key: str = field(default_factory=lambda: secrets.token_hex(16))
    done: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None  # place, score and lot of the best run so far
    final: dict[str, Any] | None = None  # the score of the run on all data, where there is one


class Sealed:
    """A folder for its owner alone (mode 0700, files 0600) with the state and the best run's weights, gone at the end.

    Of other runs nothing is kept: the best so far takes the place of the one before it. The state names the file of the
    weights that belong to it, so a kill between the two leaves no score beside the weights of another run.
    """

    def __init__(self, folder: Path):
        self.path = folder / "sealed"
        self._state = self.path / "state.json"

    def begin(self, state: State) -> None:
        """Write the state of a search that has not made a run yet."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise PrivacyError(f"{self.path} could not be made ({error.strerror}): choose another --out") from None
        self._write(state)

    def read(self) -> State:
        """The state of the search that is resumed."""
        try:
            state = State(**json.loads(self._state.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise LedgerError(
                f"{self._state} is gone, and with it how many runs the search is to make: another number would not be "
                "the one that was paid for. Start a new search in another folder; what was charged stays charged"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise LedgerError(f"{self._state} cannot be read ({error}): restore a copy of it") from None
        self._forget_others(state)
        return state

    def take_in(self, state: State, place: int, found: dict[str, Any]) -> None:
        """One run is done. It is the best so far, or it is forgotten."""
        if _better(found, state.best):
            self._keep(f"best-{place}", found["weights"])
            state.best = {"place": place, "score": found["score"], "lot": found["lot"]}
        state.done.append(place)
        self._write(state)

    def keep_final(self, state: State, found: dict[str, Any]) -> None:
        """The run on all data is done; its weights take the place of the best run's."""
        self._keep("final", found["weights"])
        state.final = {"score": found["score"]}
        self._write(state)

    def weights(self, state: State) -> bytes:
        """Of what will leave; empty where that diverged."""
        file = self._weights(state)
        try:
            return file.read_bytes()
        except OSError as error:
            raise LedgerError(f"{file} cannot be read ({error.strerror}): restore a copy of it") from None

    def remove(self) -> None:
        """Leave nothing."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _weights(self, state: State) -> Path:
        """A run that is in the state is never made again, so no later try writes a file of this name."""
        assert state.best is not None
        return self.path / ("final" if state.final else f"best-{state.best['place']}")

    def _keep(self, name: str, weights: bytes) -> None:
        try:
            with atomically(self.path / name) as part:
                part.write_bytes(weights)
        except OSError as error:
            raise PrivacyError(f"{self.path / name} could not be written ({error.strerror}): free the disk") from None

    def _write(self, state: State) -> None:
        try:
            with atomically(self._state) as part:
                part.write_text(json.dumps(asdict(state)), encoding="utf-8")
                os.chmod(part, 0o600)
        except OSError as error:
            raise PrivacyError(f"{self._state} could not be written ({error.strerror}): free the disk") from None
        self._forget_others(state)

    def _forget_others(self, state: State) -> None:
        """Also what a kill has left of a run that is made anew."""
        wanted = {self._state} | ({self._weights(state)} if state.best else set())
        for file in set(self.path.iterdir()) - wanted:
            file.unlink(missing_ok=True)


def _better(found: dict[str, Any], best: dict[str, Any] | None) -> bool:
    """By score; among equals by a lot that each run has drawn, so that the order of runs says nothing."""
    if found["score"] is None:  # diverged: worse than anything
        return False
    return best is None or (found["score"], found["lot"]) > (best["score"], best["lot"])


def finite(score: float) -> float | None:
    """A score that can be compared, else None."""
    return score if math.isfinite(score) else None
