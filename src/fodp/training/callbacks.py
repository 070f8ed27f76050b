"""Everything optional about training: progress, logs, scores on public data, checkpoints, averages.

Callbacks see public things only: the plan, the step, ε, the model (itself post-processing of releases)
and scores on data that was declared public.
"""

import csv
import io
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fodp import accounting
from fodp.errors import ConfigurationError, PrivacyError
from fodp.ledger.store import whole_minutes
from fodp.runs.export import write_weights
from fodp.runs.folder import write_atomically
from fodp.state.checkpoint import make_room_for_all
from fodp.support import checks
from fodp.support.extras import need
from fodp.support.files import give_room_back, give_spare_back, refuse_unwritable
from fodp.training.scores import accuracy, refuse_unfit

if TYPE_CHECKING:
    from fodp.trainer import Trainer


Metric = Callable[[nn.Module, Any], Mapping[str, float]]


class Callback:
    """Called by the trainer at fixed moments; override what you need.

    Scores on public data go into `trainer.metrics`, by name; logs write all that are new, checkpoints keep them.
    """

    # Those of a lower order are called first: 0 makes scores, 1 reads them, 2 writes everything down.
    order = 0

    def public_data(self) -> Iterable[Any]:
        """The data that it takes as public: a fit that trains on rows of it is refused before its first step."""
        return ()

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


def listed_callbacks(callbacks: Any) -> list[Callback]:
    """Callbacks as a list; what is none is refused."""
    found = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    wrong = [callback for callback in found if not isinstance(callback, Callback)]
    if wrong or not isinstance(callbacks, Iterable):
        odd = wrong[0] if wrong else callbacks
        name = "None" if odd is None else type(odd).__name__
        raise ConfigurationError(f"callbacks must be a list of callbacks (fodp.callbacks), got {name}: callbacks=[…]")
    return found


class WeightAverage(Callback):
    """A running average of the iterates: post-processing of releases, so it costs no privacy.

    `decay` gives an exponential average; without it, the plain mean over the last `tail` fraction of
    the run. `model` is the averaged model; `Evaluate(…, average=this)` scores it. The trained model stays the last
    iterate; `params=dict(average=…)` of a plan averages for scores, exports and the model itself.
    """

    def __init__(self, decay: float | None = None, tail: float = 0.5):
        self.decay = None if decay is None else checks.open_fraction("decay", decay)
        self.tail = checks.fraction("tail", tail)
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
    """Accuracy and loss on data that you declare public (a score on private data would leak it).

    `metric(model, public_dataset)` gives other scores by name, such as `{"loss": …}` of a regression.
    """

    def __init__(
        self,
        public_dataset: Any,
        every: int = 1,
        average: WeightAverage | None = None,
        metric: Metric | None = None,
    ):
        self.dataset, self.every, self.average = public_dataset, checks.whole("every", every), average
        self.metric = metric
        self._epochs = 0
        self.best = 0.0

    def public_data(self) -> Iterable[Any]:
        """What is scored on."""
        return (self.dataset,)

    def on_start(self, trainer: "Trainer") -> None:
        """Score before anything is released, so that no mistake shows after private steps."""
        if trainer.step == 0 and self.metric is None:
            refuse_unfit(trainer.model, self.dataset)
        elif trainer.step == 0 and self.metric is not None:
            self._scores(trainer.model, self.metric)

    def on_epoch(self, trainer: "Trainer") -> None:
        """Score the model: the average of its iterates where the plan, or a `WeightAverage`, has one."""
        self._epochs += 1
        if self._epochs % self.every and trainer.step < trainer.last_step:
            return
        averaged = None if self.average is None else self.average.model
        if averaged is not None:
            scores = self._scored(averaged)
        else:
            with trainer.averaged():
                scores = self._scored(trainer.model)
        trainer.metrics.update(scores)
        if not all(math.isfinite(trainer.metrics[name]) for name in scores):
            raise PrivacyError(
                f"training has diverged: after step {trainer.step} the scores on the public data are not finite. Lower "
                "the learning rate or look at the data's scale; the epsilon of the run, "
                f"{accounting.rounded_up(trainer.stated_epsilon())}, stays spent"
            )

    def _scored(self, model: nn.Module) -> dict[str, float]:
        if self.metric is not None:
            return self._scores(model, self.metric)
        score, loss = accuracy(model, self.dataset)
        self.best = max(self.best, score)
        return {"accuracy": score, "loss": loss, "best_accuracy": self.best}

    def _scores(self, model: nn.Module, metric: Metric) -> dict[str, float]:
        scores = metric(model, self.dataset)
        if not isinstance(scores, Mapping):
            raise ConfigurationError(
                f"metric(model, dataset) gives scores by name, such as {{'loss': 0.5}}; got {checks.shown(scores)}"
            )
        return dict(scores)

    def state_dict(self) -> dict[str, Any]:
        """Epochs seen and the best score."""
        return {"epochs": self._epochs, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting."""
        self._epochs, self.best = int(state.get("epochs", 0)), float(state.get("best", 0.0))


class EarlyStopping(Callback):
    """End the run when a public score has not become better for `patience` of its values.

    The ε of a run that ends so is the whole plan's: where it ended depends on what was seen (docs/privacy.md). It saves
    time, not privacy; a budget in a ledger takes only the steps that were used. A run that was resumed stays stopped.

    Args:
        metric: a name in `trainer.metrics`, such as "accuracy" or "loss", filled by `Evaluate` or a callback of yours.
        patience: how many values in a row may be no better than the best.
        mode: "max" if larger is better, "min" if smaller.
    """

    order = 1

    def __init__(self, metric: str = "accuracy", patience: int = 5, mode: str = "max"):
        self.metric, self.patience = metric, checks.whole("patience", patience)
        self._sign = {"max": 1.0, "min": -1.0}[checks.one_of("mode", mode, ("max", "min"))]
        self.best: float | None = None
        self.waited = 0
        self._warned = False

    def on_start(self, trainer: "Trainer") -> None:
        """A run that was stopped does not go on by being resumed."""
        if self.waited >= self.patience:
            trainer.stop_early()

    def on_epoch(self, trainer: "Trainer") -> None:
        """Compare the newest value."""
        if not self._warned and trainer.metrics.new and self.metric not in trainer.metrics:
            known, self._warned = ", ".join(sorted(trainer.metrics)), True
            checks.warn(f"EarlyStopping waits for {self.metric!r}; so far the scores are {known}")
        if self.metric not in trainer.metrics.new:
            return
        score = trainer.metrics[self.metric]
        if self.best is None or self._sign * score > self._sign * self.best:
            self.best, self.waited = score, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop_early()

    def state_dict(self) -> dict[str, Any]:
        """The best score and how long it has been so."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.waited = state.get("best"), int(state.get("waited", 0))


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


class TensorBoard(Callback):
    """The ε of the steps so far and every new public score, at the step it belongs to (needs the extra `tensorboard`).

    Times are whole minutes, as in all files of a run: more exact ones tell how large the lots were.
    """

    order = 1

    def __init__(self, folder: str | Path):
        need("tensorboard", "the callback TensorBoard", extra="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def on_epoch(self, trainer: "Trainer") -> None:
        """Write the scalars of this epoch."""
        scores = {name: score for name, score in trainer.metrics.items() if name in trainer.metrics.new}
        for name, value in {"epsilon": trainer.epsilon(), **scores}.items():
            self._writer.add_scalar(name, value, trainer.step, walltime=whole_minutes())

    def on_stop(self, trainer: "Trainer") -> None:
        """Flush to disk."""
        self._writer.flush()


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
