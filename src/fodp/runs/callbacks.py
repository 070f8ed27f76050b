"""What a run shows and keeps while it trains: a bar, a log, checkpoints."""

import csv
import io
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fodp import accounting
from fodp.callbacks import Callback
from fodp.errors import PrivacyError
from fodp.runs.export import write_weights
from fodp.runs.folder import write_atomically
from fodp.state.checkpoint import make_room_for_all
from fodp.support import checks
from fodp.support.files import give_room_back, give_spare_back, refuse_unwritable

if TYPE_CHECKING:
    from fodp.trainer import Trainer


class CSVLog(Callback):
    """One line per epoch: epoch, step, the ε of the steps so far (a running display) and every score that is new.

    A score that was not computed in an epoch leaves its cell empty; a name that first comes up later adds a column.
    """

    order = 1
    FIELDS = ("epoch", "step", "epsilon")

    def __init__(self, path: str | Path):
        self.path = Path(path)
        refuse_unwritable(self.path)
        self._file: TextIO | None = None
        self._fields: list[str] = list(self.FIELDS)

    def on_start(self, trainer: "Trainer") -> None:
        """Open the file; keep earlier lines only up to the step that is resumed from."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in self._rows() if int(row["step"]) <= trainer.step] if trainer.step else []
        self._begin(list(kept[0]) if kept else list(self.FIELDS), kept)

    def _begin(self, fields: list[str], rows: list[dict[str, str]]) -> None:
        """Write the header and earlier lines, and keep the file open for more."""
        self._fields, text = fields, io.StringIO()
        writer = csv.DictWriter(text, fields, restval="")
        writer.writeheader()
        writer.writerows(rows)
        if self._file is not None:
            self._file.close()
        write_atomically(self.path, text.getvalue())
        self._file = self.path.open("a", newline="", encoding="utf-8")

    def _rows(self) -> list[dict[str, str]]:
        """The lines so far, without a last one that a crash has cut; refuses a file that is no log of ours."""
        if not self.path.exists():
            return []
        try:
            rows = list(csv.DictReader(self.path.read_bytes().decode().rpartition("\n")[0].splitlines()))
            for row in rows:
                if tuple(row)[:3] != self.FIELDS or None in row:
                    raise ValueError(f"the line {row}")
                int(row["step"])
                for value in row.values():
                    float(value or 0)
        except (ValueError, TypeError, csv.Error) as error:
            raise PrivacyError(
                f"{self.path} is damaged ({checks.shown(str(error))}): it is only a log, move it away and resume"
            ) from None
        return rows

    def on_epoch(self, trainer: "Trainer") -> None:
        """Write a line."""
        row: dict[str, Any] = {
            "epoch": -(-trainer.step // trainer.steps_per_epoch),
            "step": trainer.step,
            "epsilon": trainer.epsilon(),
            **{name: score for name, score in trainer.metrics.items() if name in trainer.metrics.new},
        }
        added = [name for name in row if name not in self._fields]
        if added:
            self._begin([*self._fields, *added], self._rows())
        assert self._file is not None
        try:
            csv.DictWriter(self._file, self._fields, restval="").writerow(row)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def on_stop(self, trainer: "Trainer") -> None:
        """Close the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> PrivacyError:
        return PrivacyError(f"{self.path} could not be written ({error.strerror}): free the disk, then resume")


class Checkpoint(Callback):
    """A checkpoint every `every` epochs and whenever a fit ends, also after Ctrl-C.

    With a `share` below one, an epoch goes without when saving would take more than that share of the time so far
    since the last one: a crash then loses a little more, and short epochs cost little. Before the first release, room
    on the disk is taken for all later ones, so that a disk that fills up meanwhile does not lose the training. If the
    last one cannot be written all the same, `weights.safetensors` beside it gets the weights and their privacy card.
    """

    order = 2

    def __init__(self, path: str | Path, every: int = 1, share: float = 1.0):
        self.path, self.every, self.share = Path(path), checks.whole("every", every), checks.fraction("share", share)
        refuse_unwritable(self.path)  # now, and not when something is to be saved
        self._epochs = 0
        self._saved_at = self._seconds = 0.0  # when the last one was ready, and how long it took
        self._saved_step: int | None = None  # in this fit

    def on_start(self, trainer: "Trainer") -> None:
        """Save before the first release, so that there is always something to resume from, and room for the rest."""
        self._saved_step = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if trainer.step == 0:
            self._save(trainer)
        if self.path.exists():
            make_room_for_all(self.path, trainer.session, trainer.optimizer)

    def on_epoch(self, trainer: "Trainer") -> None:
        """Save now and then."""
        self._epochs += 1
        affordable = self.share == 1 or self._seconds <= self.share * (time.perf_counter() - self._saved_at)
        if self._epochs % self.every == 0 and affordable:
            self._save(trainer)

    def on_stop(self, trainer: "Trainer") -> None:
        """Save what there is; a step that broke off in the middle is not worth it."""
        give_spare_back(self.path)  # the ledger and the result may need it now
        try:
            if trainer.between_steps and self._saved_step != trainer.step:
                self._save(trainer)
        except PrivacyError as error:
            raise self._with_weights(trainer, error) from None
        finally:
            give_room_back(self.path)

    def _save(self, trainer: "Trainer") -> None:
        started = time.perf_counter()
        trainer.save(self.path)
        self._saved_step = trainer.step
        self._saved_at = time.perf_counter()
        self._seconds = self._saved_at - started

    def _with_weights(self, trainer: "Trainer", error: PrivacyError) -> PrivacyError:
        """The last checkpoint could not be written: save the weights at least, which are far smaller."""
        file = self.path.with_name("weights.safetensors")
        give_room_back(self.path)
        try:
            with trainer.averaged():
                write_weights(trainer.model.state_dict(), trainer.privacy_card(), file)
        except PrivacyError:
            file.unlink(missing_ok=True)
            return PrivacyError(f"{error}. Nor could the weights: what was trained since that checkpoint is lost")
        return PrivacyError(f"{error}. The weights of step {trainer.step} and their privacy card are in {file}")


class Progress(Callback):
    """A bar on the terminal with the public score and ε so far."""

    order = 1

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),  # stdout stays for results
        )

    def on_start(self, trainer: "Trainer") -> None:
        """Show the bar."""
        note = ""
        self._task = self._bar.add_task("training", total=trainer.last_step, completed=trainer.step, note=note)
        self._bar.start()

    def on_step(self, trainer: "Trainer") -> None:
        """Move it on."""
        self._bar.update(self._task, completed=trainer.step)

    def on_epoch(self, trainer: "Trainer") -> None:
        """Show score and ε."""
        note = f"ε {accounting.rounded_up(trainer.epsilon(), 3)}"
        if "accuracy" in trainer.metrics:
            note = f"accuracy {trainer.metrics['accuracy']:.3f}  {note}"
        self._bar.update(self._task, note=note)

    def on_stop(self, trainer: "Trainer") -> None:
        """Leave the bar as it stands."""
        self._bar.stop()
