"""Classifiers for the data sets, and the default per-example loss."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from fodp.data.cards import Card
from fodp.errors import ConfigurationError
from fodp.support.checks import shown
from fodp.support.imports import current_directory_importable, one_line

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
        raise ConfigurationError(
            f"cnn needs images of at least 8x8 pixels, got shape {card.shape}; use mlp or logistic"
        )
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


def build(name: str | Callable[..., object], card: Card) -> nn.Module:
    """Build `mlp`, `cnn`, `logistic` or the user's own `module:function` (or the function itself) for a data set.

    The function is called with `classes` (a number; 1 for a regression) and `shape` (of one example, channels
    first) as far as it accepts them; its module may lie in the current directory. Weights come from torch's default
    generator: call `torch.manual_seed` before for the same ones again.
    """
    if isinstance(name, str) and name in MODELS:
        return MODELS[name](card)
    with current_directory_importable():
        function = _function(name)
        try:
            model = function(**_arguments(function, card))
        except Exception as error:
            raise ConfigurationError(
                f"model {name} failed with {type(error).__name__}: {one_line(error)}; "
                "it is called with classes and shape if it accepts them, and nothing else"
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"model {name} must return a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigurationError(
            f"model {name} is compiled to TorchScript, which cannot be looked into; return it uncompiled"
        )
    for parameter_name, parameter in model.named_parameters():
        if not (is_lazy(parameter) or parameter.is_meta) and not parameter.isfinite().all():
            raise ConfigurationError(
                f"the parameter {parameter_name} of model {name} is not finite: look at its initial weights"
            )
    return model


def source_code(name: str, model: nn.Module, card: Card) -> str:
    """Python that builds a model such as `build` has built, without fodp: layers by name, or the user's function."""
    if name in MODELS and isinstance(model, nn.Sequential):
        return f"model = nn.Sequential({', '.join(f'nn.{layer!r}' for layer in model)})"
    module_name, _, function_name = name.partition(":")
    words = ", ".join(f"{key}={value!r}" for key, value in _arguments(_function(name), card).items())
    return f"from {module_name} import {function_name}\nmodel = {function_name}({words})"


def _arguments(function: Callable[..., object], card: Card) -> dict[str, Any]:
    return _accepted(function, {"classes": card.classes, "shape": card.shape})


def _function(name: str | Callable[..., object]) -> Callable[..., object]:
    if callable(name):
        return name
    module_name, colon, function_name = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not (module_name and colon and function_name):
        raise ConfigurationError(
            f"the model must be one of {', '.join(MODELS)} or your own module:function; got {shown(name)}"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:
        raise ConfigurationError(
            f"cannot import model {name} ({type(error).__name__}: {one_line(error)}); "
            "module:function is looked up in the current directory and among installed packages"
        ) from error
    if not callable(function):
        raise ConfigurationError(f"model {name} must be a function that returns a model, got {type(function).__name__}")
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


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The default loss: one cross-entropy per example, unreduced, as private training needs it."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels, reduction="none")


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of a regression: the squared error of each example, in units of half the target's public range."""
    inputs, targets = batch
    return functional.mse_loss(model(inputs).flatten(), targets, reduction="none")


def loss_for(card: Card, device: torch.device | None = None) -> Callable[[nn.Module, Batch], Tensor]:
    """The default loss per example for the target of a data set; with a device, of records that are sent there."""
    loss = squared_error if card.is_regression else cross_entropy
    return loss if device is None or device.type == "cpu" else sent(loss, device)


def sent(loss: Callable[[nn.Module, Batch], Tensor], device: torch.device) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss whose records are sent to a device first, without waiting for it."""

    def there(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = (part.to(device, non_blocking=True) for part in batch)
        return loss(model, (inputs, targets))

    return there
