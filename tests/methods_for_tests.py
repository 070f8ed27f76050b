"""The small problem of `fodp.testing`, for the tests over all private optimizers."""

import torch
from torch import Tensor

from fodp.testing import (
    ODD,
    SIZE,
    StopAfter,
    adversarial_data,
    data,
    delete_one,
    flat,
    losses,
    network,
    plan,
    public_loss,
    record,
    trainer,
)
from fodp.training.trainer import Trainer

__all__ = [
    "ODD",
    "SIZE",
    "StopAfter",
    "adversarial_data",
    "data",
    "delete_one",
    "flat",
    "losses",
    "network",
    "plan",
    "public_loss",
    "record",
    "trainer",
    "trajectory",
]


def trajectory(training: Trainer, steps: int | None = None) -> Tensor:
    """The parameters after each step. Never asks for ε, so that it also serves with next to no noise."""
    points = []
    for _ in range(training.plan.steps if steps is None else steps):
        training._one_step()
        points.append(flat(training.model))
    return torch.stack(points)
