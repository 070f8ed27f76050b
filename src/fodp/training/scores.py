"""Scores on data that is declared public."""

from collections import UserDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from fodp.errors import ConfigurationError, DataError, PrivacyError
from fodp.support.checks import shown, whole


class Metrics(UserDict[str, float]):
    """Public scores by name, kept until the next ones; `new` are the names set since the last epoch ended."""

    def __init__(self) -> None:
        self.new: set[str] = set()
        super().__init__()

    def __setitem__(self, name: str, value: Any) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ConfigurationError(f"the score {name!r} must be a number, got {shown(value)}") from None
        super().__setitem__(name, number)
        self.new.add(name)


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
    whole("batch_size", batch_size)
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
