"""The pipeline under audit: whatever makes a trainer for a model, a loss, data and a plan."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fodp.clipping.engine import LossFunction
from fodp.errors import DataError
from fodp.identity.repeats import EQUAL_ROWS
from fodp.noise import keyed_from
from fodp.plan import Plan
from fodp.trainer import Trainer

MakeTrainer = Callable[..., Trainer]
"""(model, loss_fn, dataset, plan) to a fresh trainer: the pipeline under audit. For a plan whose unit is a person it is
also given `owners`, for the Trainer."""


def plain_trainer(
    model: nn.Module, loss_fn: LossFunction, dataset: Any, plan: Plan, owners: Sequence[int | str] | None = None
) -> Trainer:
    """`fodp.Trainer` with nothing added; methods that score proposals get a made-up public score."""

    def made_up() -> float:
        return sum(float(p.detach().double().sin().sum()) for p in model.parameters())

    score = made_up if plan.algorithm.has_acceptance_test else None
    return Trainer(model, loss_fn, dataset, plan, owners=owners, public_score=score)


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


class How(TypedDict, total=False):
    """How an audit runs a pipeline; every attack takes these keywords.

    seed: the audit's own random numbers, and the key of secure runs, so that an audit can be repeated; default 0.
    secure: True or False runs every plan in that mode; None (default) runs it in its own mode.
    """

    seed: int
    secure: bool | None


@dataclass(frozen=True)
class Pipeline:
    """The pipeline under audit: what makes its trainers, under which seed, in which mode."""

    make: MakeTrainer
    seed: int = 0
    secure: bool | None = None

    def rehearsal(self, plan: Plan, **changes: Any) -> Plan:
        """The plan as an audit runs it: in the audit's mode, with these changes, and with fast accounting.

        Nobody asks a rehearsal for its ε. Where records take turns, a rate is at most what makes their drawing certain.
        """
        secure = plan.seed is None if self.secure is None else self.secure
        if "sampling_rate" in changes:
            changes["sampling_rate"] = min(changes["sampling_rate"], 1 / plan.algorithm.turns)
        return replace(plan, accountant="rdp", **{"seed": None if secure else self.seed, **changes})

    def trainer(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        dataset: Any,
        plan: Plan,
        owners: Sequence[int | str] | None = None,
    ) -> Trainer:
        """A fresh trainer. A secure one takes its key from the audit's seed; all else is as in real secure runs.

        Records that are not finite are accepted: attacks plant them, and a pipeline whose data holds one must keep its
        promise all the same.
        """
        key = hashlib.blake2b(b"%d" % self.seed, digest_size=32, person=b"fodp.audit").digest()
        with keyed_from(key) if plan.seed is None else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=EQUAL_ROWS)  # attacks plant such rows too
            whose = {"owners": owners} if plan.unit == "person" else {}
            trainer = self.make(model, loss_fn, dataset, plan, **whose)
        trainer.accept_non_finite()
        return trainer

    def painted(self, canvas: "Canvas", records: int | Tensor, plan: Plan) -> Trainer:
        """A fresh trainer on painted gradients, without the augmentation, which is written for real records.

        Where the unit is a person, each has what is painted for them twice.
        """
        numbers = torch.arange(records) if isinstance(records, int) else records
        if plan.unit == "person":
            numbers = numbers.repeat_interleave(2)
        trainer = self.trainer(canvas, Canvas.losses, TensorDataset(numbers), plan, numbers.tolist())
        trainer.source.set_augmentation_aside()
        return trainer


def in_short(plan: Plan, steps: int) -> Plan:
    """The whole course of a plan in fewer steps: what acts late in it, or seldom, acts in these.

    The noise stays; schedules, and what is counted in steps, go with the steps (`Method.in_short`).
    """
    if steps >= plan.steps:
        return plan
    return replace(plan, steps=steps, params={**plan.params, **plan.algorithm.in_short(steps, plan.steps)})


def columns(dataset: Any) -> tuple[Tensor, ...]:
    """The columns of a data set made of tensors; others are refused."""
    found = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(found, tuple) and found and all(isinstance(column, Tensor) for column in found):
        return found
    raise DataError(f"an audit adds and removes rows: give a TensorDataset or tensors, got {type(dataset).__name__}")
