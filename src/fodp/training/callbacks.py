"""Everything optional about training: progress, logs, scores on public data, checkpoints, averages.

Callbacks see public things only: the plan, the step, ε, the model (itself post-processing of releases)
and scores on data that was declared public.
"""

import csv
import io
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fodp import _checks, accounting
from fodp._checks import PrivacyError
from fodp._extras import need
from fodp.ledger.store import whole_minutes
from fodp.models import accuracy
from fodp.training.folder import write_atomically

if TYPE_CHECKING:
    from fodp.training.trainer import Trainer


class Callback:
    """Called by the trainer at fixed moments; override what you need."""

    def on_start(self, trainer: "Trainer") -> None:
        """Before the first step of a fit."""

    def on_step(self, trainer: "Trainer") -> None:
        """After every step."""

    def on_epoch(self, trainer: "Trainer") -> None:
        """After every round(1/q) steps, and at the end."""

    def on_stop(self, trainer: "Trainer") -> None:
        """When a fit ends, also by an interrupt or an error."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint kept."""


class WeightAverage(Callback):
    """A running average of the iterates: post-processing of releases, so it costs no privacy.

    `decay` gives an exponential average; without it, the plain mean over the last `tail` fraction of
    the run. `model` is the averaged model; `Evaluate(…, average=this)` scores it.
    """

    def __init__(self, decay: float | None = None, tail: float = 0.5):
        self.decay = None if decay is None else _checks.open_fraction("decay", decay)
        self.tail = _checks.fraction("tail", tail)
        self._average: AveragedModel | None = None
        self._loaded: dict[str, Any] | None = None

    @property
    def model(self) -> nn.Module | None:
        """The averaged model, None before the average has begun."""
        return None if self._average is None or self._average.n_averaged == 0 else self._average.module

    def on_start(self, trainer: "Trainer") -> None:
        """Make room for the average."""
        if self._average is None:
            ema = None if self.decay is None else get_ema_multi_avg_fn(self.decay)
            self._average = AveragedModel(trainer.model, multi_avg_fn=ema)
            if self._loaded is not None:
                self._average.load_state_dict(self._loaded)

    def on_step(self, trainer: "Trainer") -> None:
        """Take the new iterate in."""
        assert self._average is not None
        begins = 0 if self.decay is not None else int((1 - self.tail) * trainer.last_step)
        if trainer.step > begins:
            self._average.update_parameters(trainer.model)

    def state_dict(self) -> dict[str, Any]:
        """The average so far."""
        return {} if self._average is None else {"average": self._average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a saved average."""
        self._loaded = state.get("average")
        if self._average is not None and self._loaded is not None:
            self._average.load_state_dict(self._loaded)


class Evaluate(Callback):
    """Accuracy and loss on data that you declare public (a score on private data would leak it)."""

    def __init__(self, public_dataset: Any, every: int = 1, average: WeightAverage | None = None):
        self.dataset, self.every, self.average = public_dataset, _checks.whole("every", every), average
        self._epochs = 0
        self.best = 0.0

    def on_epoch(self, trainer: "Trainer") -> None:
        """Score the model, or its average where there is one."""
        self._epochs += 1
        if self._epochs % self.every and trainer.step < trainer.last_step:
            return
        averaged = None if self.average is None else self.average.model
        score, loss = accuracy(averaged or trainer.model, self.dataset)
        if not math.isfinite(loss):
            raise PrivacyError(
                f"training has diverged: after step {trainer.step} the scores on the public data are not finite. Lower "
                "the learning rate or look at the data's scale; the epsilon of the run, "
                f"{accounting.rounded_up(trainer.stated_epsilon())}, stays spent"
            )
        self.best = max(self.best, score)
        trainer.metrics.update(accuracy=score, loss=loss, best_accuracy=self.best)

    def state_dict(self) -> dict[str, Any]:
        """Epochs seen and the best score."""
        return {"epochs": self._epochs, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._epochs, self.best = int(state.get("epochs", 0)), float(state.get("best", 0.0))


class CSVLog(Callback):
    """One line per epoch: epoch, step, the ε of the steps so far (a running display) and the public scores."""

    FIELDS = ("epoch", "step", "epsilon", "accuracy", "loss")

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: TextIO | None = None

    def on_start(self, trainer: "Trainer") -> None:
        """Open the file; keep earlier lines only up to the step that is resumed from."""
        kept = [row for row in self._rows() if int(row["step"]) <= trainer.step] if trainer.step else []
        text = io.StringIO()
        writer = csv.DictWriter(text, self.FIELDS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)
        write_atomically(self.path, text.getvalue())
        self._file = self.path.open("a", newline="")

    def _rows(self) -> list[dict[str, str]]:
        """The lines so far, without a last one that a crash has cut; refuses a file that is no log of ours."""
        if not self.path.exists():
            return []
        try:
            rows = list(csv.DictReader(self.path.read_bytes().decode().rpartition("\n")[0].splitlines()))
            for row in rows:
                if tuple(row) != self.FIELDS or not all(math.isfinite(float(value or 0)) for value in row.values()):
                    raise ValueError(f"the line {row}")
                int(row["step"])
        except (ValueError, TypeError, csv.Error) as error:
            raise PrivacyError(
                f"{self.path} is damaged ({_checks.shown(str(error))}): it is only a log, move it away and resume"
            ) from None
        return rows

    def on_epoch(self, trainer: "Trainer") -> None:
        """Write a line."""
        assert self._file is not None
        row: dict[str, Any] = {
            "epoch": -(-trainer.step // trainer.steps_per_epoch),
            "step": trainer.step,
            "epsilon": trainer.epsilon(),
        }
        row |= {name: trainer.metrics[name] for name in ("accuracy", "loss") if name in trainer.metrics}
        try:
            csv.DictWriter(self._file, self.FIELDS).writerow(row)
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


class TensorBoard(Callback):
    """ε and the public scores for TensorBoard (needs the extra `tensorboard`)."""

    def __init__(self, folder: str | Path):
        need("tensorboard", "the callback TensorBoard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def on_epoch(self, trainer: "Trainer") -> None:
        """Write the scalars of this epoch."""
        for name, value in {"epsilon": trainer.epsilon(), **trainer.metrics}.items():
            self._writer.add_scalar(name, value, trainer.step, walltime=whole_minutes())

    def on_stop(self, trainer: "Trainer") -> None:
        """Flush to disk."""
        self._writer.flush()


class Checkpoint(Callback):
    """A checkpoint every `every` epochs and whenever a fit ends, also after Ctrl-C.

    With a `share` below one, an epoch goes without when saving would take more than that share of the time so far
    since the last one: a crash then loses a little more, and short epochs cost little.
    """

    def __init__(self, path: str | Path, every: int = 1, share: float = 1.0):
        self.path, self.every, self.share = Path(path), _checks.whole("every", every), _checks.fraction("share", share)
        self._epochs = 0
        self._saved_at = self._seconds = 0.0  # when the last one was ready, and how long it took

    def on_start(self, trainer: "Trainer") -> None:
        """Save before the first release, so that there is always something to resume from."""
        if trainer.step == 0:
            self._save(trainer)

    def on_epoch(self, trainer: "Trainer") -> None:
        """Save now and then."""
        self._epochs += 1
        affordable = self.share == 1 or self._seconds <= self.share * (time.perf_counter() - self._saved_at)
        if self._epochs % self.every == 0 and affordable:
            self._save(trainer)

    def on_stop(self, trainer: "Trainer") -> None:
        """Save what there is; a step that broke off in the middle is not worth it."""
        if trainer.between_steps:
            self._save(trainer)

    def _save(self, trainer: "Trainer") -> None:
        started = time.perf_counter()
        trainer.save(self.path)
        self._saved_at = time.perf_counter()
        self._seconds = self._saved_at - started


class Progress(Callback):
    """A bar on the terminal with the public score and ε so far."""

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
