"""The form of a loss function: loss_fn(model, batch) with one loss per example, told before anything is charged."""

import inspect
from typing import Any

from torch import Tensor, nn

from fodp.errors import ConfigurationError
from fodp.support.checks import shown

_EXAMPLE = """write

    def loss_fn(model, batch):
        inputs, labels = batch
        return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")"""


def refuse_criterion(loss_fn: Any) -> None:
    """Raise if this is a loss of (outputs, targets), as PyTorch's are, or cannot be called with two arguments."""
    if not callable(loss_fn):
        raise ConfigurationError(f"loss_fn must be a function loss_fn(model, batch), got {shown(loss_fn)}: {_EXAMPLE}")
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    of_torch = type(loss_fn).__module__.startswith("torch.nn.modules.") and isinstance(loss_fn, nn.Module)
    if of_torch or isinstance(loss_fn, type) or getattr(loss_fn, "__module__", None) == "torch.nn.functional":
        raise ConfigurationError(
            f"loss_fn is called as loss_fn(model, batch), and {name} takes outputs and targets: {_EXAMPLE}"
        )
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        raise ConfigurationError(
            f"loss_fn is called as loss_fn(model, batch), and {name} cannot be ({error})"
        ) from None
    except ValueError:
        pass  # built in, without a signature to look at


def refuse_joint(losses: Any, rows: int) -> None:
    """Raise unless there is one loss for each of the lot's examples."""
    if isinstance(losses, Tensor) and losses.shape == (rows,):
        return
    if losses is None:
        fix = "return the losses"
    elif isinstance(losses, tuple | list):
        fix = "return the losses alone"
    elif isinstance(losses, Tensor) and losses.dim() > 1 and losses.shape[0] == rows:
        dims = 1 if losses.dim() == 2 else tuple(range(1, losses.dim()))
        fix = f"one loss per example: take .mean({dims}) or .sum({dims}) of them"
    else:
        fix = (
            "each example's gradient is clipped by itself, so a mean or sum over examples comes too late (use "
            "reduction='none')"
        )
    raise ConfigurationError(
        f"loss_fn must return one loss per example, a vector as long as the lot, got {form(losses, rows)}: {fix}"
    )


def form(value: Any, rows: int) -> str:
    """A tensor's shape for a message; the size of a lot is private and stands there as a word."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "shape (" + ", ".join("lot" if size == rows else str(size) for size in value.shape) + ")"
