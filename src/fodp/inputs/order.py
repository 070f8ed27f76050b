"""Arguments in the wrong order or of another kind: told by name, where an attribute error would tell of its own."""

from typing import Any

import torch
from torch import nn

from fodp.errors import ConfigurationError
from fodp.plan import Plan

_WANTED = {
    "model": "a torch.nn.Module",
    "loss_fn": "a function loss_fn(model, batch)",
    "optimizer": "a torch.optim optimizer",
    "dataset": "a data set with records 0 to len-1",
    "plan": "a fodp.Plan",
}


def refuse_other_order(door: str, **given: Any) -> None:
    """Raise unless each argument is of its kind; `given` are the first ones, in their order."""
    wrong = [name for name, value in given.items() if not _fits(name, value)]
    if not {"model", "dataset", "plan"} & set(wrong):
        return  # a loss or an optimizer alone is told of with an example
    told = [f"{name} must be {_WANTED[name]}, got {_kind(given[name])}" for name in wrong]
    raise ConfigurationError(f"{door} takes ({', '.join(given)}) in this order: {'; '.join(told)}")


def _fits(name: str, value: Any) -> bool:
    if name == "model":
        return isinstance(value, nn.Module)
    if name == "plan":
        return isinstance(value, Plan)
    if name == "optimizer":
        return isinstance(value, torch.optim.Optimizer)
    if name == "loss_fn":
        return callable(value)
    foreign = isinstance(value, nn.Module | torch.optim.Optimizer | Plan)
    return not foreign and not (callable(value) and not hasattr(value, "__getitem__"))


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
