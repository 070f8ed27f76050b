"""A step of plain training, and of this library."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from fodp.clipping.chunks import Chunks
from fodp.data.models import cross_entropy
from fodp.gradients import HERE, Gradients, Points
from fodp.plan import Plan
from fodp.sampling import Lot
from fodp.step import Step as SessionStep
from fodp.trainer import Trainer
from fodp_lab.bench.contenders import Step
from fodp_lab.bench.workloads import Workload

LEARNING_RATE = 0.05
CLIP_NORM, NOISE_MULTIPLIER = 1.0, 1.1
_FOR_EVER = 10**5  # steps of a plan that is never asked for its ε; a schedule of noise must not run out


def size_of(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def plain(workload: Workload, device: str = "cpu") -> tuple[Step, int]:
    """What people write without privacy: gather a random batch, mean loss, backward, SGD."""
    inputs, labels = (column.to(device) for column in workload.data())
    model = workload.model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        rows = torch.randint(workload.examples, (workload.batch,), device=device)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()

    return step, size_of(model)


def private(
    workload: Workload, method: str, seed: int | None, params: dict[str, Any], device: str = "cpu"
) -> tuple[Step, int]:
    """A step of the trainer, with everything that belongs to it; on another device the data is there too."""
    trainer = _trainer(workload, method, seed, params, device)
    return trainer.take_step, size_of(trainer.model)


def unkeyed(workload: Workload) -> tuple[Step, int]:
    """DP-SGD whose dropout masks are PyTorch's, row after row: what drawing by record costs; not private."""
    trainer = _trainer(workload, "dp-sgd", 0, {})
    source, rule = trainer.source, trainer.session.rule

    class RowAfterRow(SessionStep):
        """A step whose lot is read without the keys of its records."""

        def gradients(self, lot: Lot, at: Points = HERE) -> Gradients:
            chunks = Chunks(source.engine, source.fetcher.fetch(lot.indices), at)
            return Gradients(chunks, source.layout, lot, rule)

    trainer.session.steps_by(RowAfterRow)
    return trainer.take_step, size_of(trainer.model)


def _trainer(workload: Workload, method: str, seed: int | None, params: dict[str, Any], device: str = "cpu") -> Trainer:
    model = workload.model().to(device)
    plan = Plan(
        sampling_rate=workload.batch / workload.examples,
        steps=_FOR_EVER,
        lot_size=workload.batch,
        clip_norm=CLIP_NORM,
        noise_multiplier=NOISE_MULTIPLIER,
        delta=1e-5,
        method=method,
        params={"lr": LEARNING_RATE, **params},
        seed=seed,
    )
    data = TensorDataset(*(column.to(device) for column in workload.data()))
    inputs, labels = workload.public()
    held_out = inputs.to(device), labels.to(device)

    def score() -> float:
        """For methods that ask for public data."""
        return cross_entropy(model, held_out).mean().item()

    return Trainer(model, cross_entropy, data, plan, public_score=score)
