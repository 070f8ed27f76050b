"""What is attacked: anything that makes a trainer for a model, a loss, data and a plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fodp._checks import PrivacyError
from fodp.clipping.engine import LossFunction
from fodp.plan import Plan
from fodp.training.trainer import Trainer

MakeTrainer = Callable[[nn.Module, LossFunction, Any, Plan], Trainer]
"""(model, loss_fn, dataset, plan) to a fresh trainer: the pipeline under audit."""


def plain_trainer(model: nn.Module, loss_fn: LossFunction, dataset: Any, plan: Plan) -> Trainer:
    """`fodp.Trainer` with nothing added; methods that score proposals get a made-up public score."""

    def made_up() -> float:
        return sum(float(p.detach().double().sin().sum()) for p in model.parameters())

    return Trainer(model, loss_fn, dataset, plan, public_score=made_up if plan.algorithm.proposes else None)


class Canvas(nn.Module):
    """A model of a few tensors in which an example's gradient is the example itself: the auditor paints gradients.

    `show` sets the gradient of every record for the next step; `losses` is the loss function that goes with it.
    """

    def __init__(self, tensors: int, width: int):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(tensors))
        for weight in self.parameters():
            nn.init.zeros_(weight)
        self.gradients = torch.zeros(0, tensors, width)  # a plain attribute: no parameter, no buffer

    def show(self, gradients: Tensor) -> None:
        """The gradients of all records, as (record, tensor, coordinate)."""
        self.gradients = gradients

    def forward(self, gradients: Tensor) -> Tensor:
        """One number per example, linear in the parameters."""
        parts = [part(gradients[:, place]).squeeze(1) for place, part in enumerate(self.parts)]
        return torch.stack(parts).sum(0)

    @staticmethod
    def losses(model: nn.Module, batch: Any) -> Tensor:
        """The loss whose gradient is what was painted for the batch's records."""
        assert isinstance(model, Canvas)
        return model(model.gradients[batch[0]])


def rehearsal(plan: Plan, seed: int, **changes: Any) -> Plan:
    """The plan as an audit runs it: seeded, with these changes, and accounted fast, for nobody asks for its ε."""
    return replace(plan, accountant="rdp", **{"seed": seed, **changes})


def columns(dataset: Any) -> tuple[Tensor, ...]:
    """The columns of a data set made of tensors; others are refused."""
    found = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(found, tuple) and found and all(isinstance(column, Tensor) for column in found):
        return found
    raise PrivacyError(f"an audit adds and removes rows: give a TensorDataset or tensors, got {type(dataset).__name__}")
