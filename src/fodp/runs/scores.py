"""Scores on data that is declared public, and the callbacks that make and read them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from fodp import accounting
from fodp.callbacks import Callback
from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.support import checks

if TYPE_CHECKING:
    from fodp.trainer import Trainer

Metric = Callable[[nn.Module, Any], Mapping[str, float]]


def accuracy(model: nn.Module, dataset: Dataset[Any], batch_size: int = 1000) -> tuple[float, float]:
    """The share of right answers and the mean loss on a data set, in evaluation mode.

    Say what it is computed on: a score on private examples is itself private. Leaves the model's modes and
    torch's random state as they were (a DataLoader would draw a seed).
    """
    right, loss, size = 0, 0.0, 0
    for scores, labels in _outputs(model, dataset, batch_size):
        right += int((scores.argmax(dim=1) == labels).sum())
        loss += float(functional.cross_entropy(scores.double(), labels, reduction="sum"))
        size += len(labels)
    return right / size, loss / size


def squared_error(model: nn.Module, dataset: Dataset[Any], batch_size: int = 1000) -> dict[str, float]:
    """The mean squared error of a model of numbers, as `loss`; for `Evaluate(…, metric=squared_error)`."""
    loss, size = 0.0, 0
    for outputs, targets in _outputs(model, dataset, batch_size):
        loss += float(functional.mse_loss(outputs.flatten().double(), targets.double(), reduction="sum"))
        size += len(targets)
    return {"loss": loss / size}


def _outputs(model: nn.Module, dataset: Dataset[Any], batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What the model says of each part of a data set, in evaluation mode, beside what is true."""
    checks.whole("batch_size", batch_size)
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise DataError("a score needs at least one example, got an empty data set")
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, size, batch_size):
                images, labels = _slice(dataset, start, min(start + batch_size, size))
                yield model(images.to(device)), labels.to(device)
    finally:
        for module, training in modes:  # one by one: a frozen part may have been in evaluation mode before
            module.training = training


def refuse_unfit(model: nn.Module, dataset: Dataset[Any]) -> None:
    """Raise if no accuracy can be computed of this model on such data: dicts, regression, several labels a record."""
    size = min(2, len(dataset))  # type: ignore[arg-type]
    try:
        accuracy(model, Subset(dataset, range(size)))
        _, labels = _slice(dataset, 0, size)
        fits = labels.dim() == 1 and not labels.is_floating_point()
        reason = f"the labels are {labels.dtype} of shape {tuple(labels.shape[1:])} each"
    except PrivacyError:
        raise
    except Exception as error:
        fits, reason = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not fits:
        raise ConfigurationError(
            f"Evaluate computes the accuracy of one label per record, (inputs, labels), and the public data is not of "
            f"that form ({reason}): give it a metric of your own, or write a callback that fills trainer.metrics. "
            "Nothing was released"
        )


def _slice(dataset: Dataset[Any], start: int, stop: int) -> tuple[Tensor, Tensor]:
    if isinstance(dataset, TensorDataset):
        images, labels = dataset[start:stop]
    else:
        images, labels = default_collate([dataset[i] for i in range(start, stop)])
    return images, labels


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
