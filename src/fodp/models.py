"""Classifiers for the data sets, the default per-example loss, and accuracy on data declared public."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from fodp._checks import PrivacyError, shown, whole
from fodp.data.cards import Card

Batch = tuple[Tensor, Tensor]  # images and labels


def mlp(card: Card) -> nn.Module:
    """The paper's classifier: hidden layers of 64 and 32 tanh units. Takes flat or unflattened images."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(card.features, 64),
        nn.Tanh(),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, card.classes),
    )


def logistic(card: Card) -> nn.Module:
    """Multinomial logistic regression: a single linear layer. Takes flat or unflattened images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(card.features, card.classes))


def cnn(card: Card) -> nn.Module:
    """A small convolutional network: 3x3 convolution, GroupNorm, tanh and halving, until the side is 4 to 7.

    GroupNorm, because BatchNorm mixes the examples of a lot; tanh, because bounded activations keep
    per-example gradients short (Papernot et al. 2021). 0.11M parameters for CIFAR-10, 5 thousand for digits.
    """
    if len(card.shape) != 3 or min(card.shape[1:]) < 8:
        raise PrivacyError(f"cnn needs images of at least 8x8 pixels, got shape {card.shape}; use mlp or logistic")
    channels, height, width = card.shape
    layers: list[nn.Module] = []
    wide = 32
    while min(height, width) >= 8:
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.GroupNorm(8, wide), nn.Tanh(), nn.AvgPool2d(2)]
        channels, height, width, wide = wide, height // 2, width // 2, min(2 * wide, 128)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, card.classes))


MODELS: dict[str, Callable[[Card], nn.Module]] = {"mlp": mlp, "cnn": cnn, "logistic": logistic}


def wants_flat(name: str) -> bool:
    """Whether to load data with `flatten=True` for this model; one's own functions get whole images."""
    return name in ("mlp", "logistic")


def build(name: str, card: Card) -> nn.Module:
    """Build `mlp`, `cnn`, `logistic` or the user's own `module:function` for a data set.

    The function is called with `classes` (a number) and `shape` (of one example, channels first) as far as
    it accepts them; its module may lie in the current directory. Weights come from torch's default
    generator: call `torch.manual_seed` before for the same ones again.
    """
    if not isinstance(name, str):
        raise PrivacyError(f"the model must be a name, got {shown(name)}")
    if name in MODELS:
        return MODELS[name](card)
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise PrivacyError(f"the model must be one of {', '.join(MODELS)} or your own module:function; got {name!r}")
    with _current_directory_importable():
        function = _import(name, module_name, function_name)
        try:
            model = function(**_accepted(function, {"classes": card.classes, "shape": card.shape}))
        except Exception as error:
            raise PrivacyError(
                f"model {name} failed with {type(error).__name__}: {one_line(error)}; "
                "it is called with classes and shape if it accepts them, and nothing else"
            ) from error
    if not isinstance(model, nn.Module):
        raise PrivacyError(f"model {name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _import(name: str, module_name: str, function_name: str) -> Callable[..., object]:
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise PrivacyError(
            f"cannot import model {name} ({type(error).__name__}: {one_line(error)}); "
            "module:function is looked up in the current directory and among installed packages"
        ) from error
    if not callable(function):
        raise PrivacyError(f"model {name} must be a function that returns a model, got {type(function).__name__}")
    return function


def _accepted(function: Callable[..., object], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the offered arguments that the function takes by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some compiled callables have no signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    by_keyword = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {key: value for key, value in offered.items() if key in by_keyword}


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """An installed command, unlike `python -m`, does not look for modules where it is called."""
    here = os.getcwd()
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's module may have tidied up itself
            sys.path.remove(here)


def one_line(error: Exception) -> str:
    """The error's message, short enough to be part of another."""
    return " ".join(str(error).split())[:200]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The default loss: one cross-entropy per example, unreduced, as private training needs it."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels, reduction="none")


def accuracy(model: nn.Module, dataset: Dataset[Any], batch_size: int = 1000) -> tuple[float, float]:
    """The share of right answers and the mean loss on a data set, in evaluation mode.

    Say what it is computed on: a score on private examples is itself private. Leaves the model's modes and
    torch's random state as they were (a DataLoader would draw a seed).
    """
    whole("batch_size", batch_size)
    size = len(dataset)  # type: ignore[arg-type]
    if size == 0:
        raise PrivacyError("accuracy needs at least one example, got an empty data set")
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    modes = [(module, module.training) for module in model.modules()]
    right, loss = 0, 0.0
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, size, batch_size):
                images, labels = _slice(dataset, start, min(start + batch_size, size))
                scores, labels = model(images.to(device)), labels.to(device)
                right += int((scores.argmax(dim=1) == labels).sum())
                loss += float(functional.cross_entropy(scores.double(), labels, reduction="sum"))
    finally:
        for module, training in modes:  # one by one: a frozen part may have been in evaluation mode before
            module.training = training
    return right / size, loss / size


def _slice(dataset: Dataset[Any], start: int, stop: int) -> Batch:
    if isinstance(dataset, TensorDataset):
        images, labels = dataset[start:stop]
    else:
        images, labels = default_collate([dataset[i] for i in range(start, stop)])
    return images, labels
