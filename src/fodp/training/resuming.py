"""Saving and resuming a loop that somebody else runs: the same file, and the same refusals, as a Trainer's."""

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from fodp.ledger import Account, Ledger
from fodp.plan import Plan
from fodp.training import checkpoint
from fodp.training.scores import Metrics

if TYPE_CHECKING:
    from fodp.training.loop import _LoopRun


class LoopKeeper:
    """What `fodp.training.checkpoint` knows of a training, for the loop of `make_private`."""

    def __init__(
        self,
        run: "_LoopRun",
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        dataset: Any,
        ledger: Ledger | None,
    ):
        self.run, self.model, self.optimizer, self.scheduler = run, model, optimizer, scheduler
        self._dataset, self.ledger = dataset, ledger
        self.run_id = uuid.uuid4().hex
        self.plan: Plan = run.plan
        self.last_step, self._planned, self.lost_steps = run.plan.steps, run.plan.steps, 0
        self.metrics, self._weights = Metrics(), run.weights
        self._jumped_to_the_end = False

    @property
    def step(self) -> int:
        """How many of the plan's steps are used."""
        return self.run.step

    @property
    def _account(self) -> Account | None:
        return self.run.account

    @_account.setter
    def _account(self, account: Account | None) -> None:
        self.run.account = account

    def _named_callbacks(self) -> list[Any]:
        return []

    def save(self, path: Path) -> None:
        """Write a checkpoint, atomically, and note it in the ledger."""
        account, step = self._account, self.step
        noted = None if account is None else lambda digest: account.note_checkpoint(step, digest)
        with self._weights.inside():
            checkpoint.save(path, checkpoint.snapshot(self), noted)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same plan."""
        checkpoint.restore(self, checkpoint.load(path, self.run.engine.layout.device))
