"""A small problem, a trainer on it, and the delete-one check, for the tests over all private optimizers."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

import fodp
from fodp.audit import tape
from fodp.audit.replay import differences
from fodp.audit.tape import Tape
from fodp.training.callbacks import Callback
from fodp.training.trainer import Trainer

SIZE = 24  # examples of the small problem


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(size: int = SIZE, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long())


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def public_loss(model: nn.Module) -> float:
    """The score on public data that sa-dpsgd asks for."""
    with torch.no_grad():
        return losses(model, data(30, seed=9, dtype=next(model.parameters()).dtype).tensors).mean().item()


def plan(method: str, params: dict[str, Any] | None = None, **changes: Any) -> fodp.Plan:
    public = dict(
        sampling_rate=0.5, steps=8, lot_size=12, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, accountant="rdp",
        seed=0,
    )  # fmt: skip
    return fodp.Plan(**{**public, **changes}, method=method, params=params or {})


def trainer(the_plan: fodp.Plan, model: nn.Module | None = None, dataset: Any = None, **options: Any) -> Trainer:
    model = network() if model is None else model
    options = {"public_score": lambda: public_loss(model), **options}
    return Trainer(model, losses, data() if dataset is None else dataset, the_plan, **options)


def trajectory(training: Trainer, steps: int | None = None) -> Tensor:
    """The parameters after each step. Never asks for ε, so that it also serves with next to no noise."""
    points = []
    for _ in range(training.plan.steps if steps is None else steps):
        training._one_step()
        points.append(flat(training.model))
    return torch.stack(points)


class StopAfter(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step(self, trainer: Trainer) -> None:
        trainer.interrupted = trainer.step == self.step


# --- the delete-one check ------------------------------------------------------------------------------------


def record(the_plan: fodp.Plan, dataset: Any = None, *, of: Tape | None = None, without: int = -1) -> Tape:
    """Train to the end of the plan and keep the tape."""
    return tape.record(trainer(the_plan, dataset=dataset), of=of, without=without)


ODD = {"huge": 3, "ordinary": 10, "zero": 15, "not finite": 20}  # rows of the adversarial data set


def adversarial_data() -> TensorDataset:
    """Examples that would break a careless method: a huge one, one without gradient in the first layer, a NaN."""
    inputs, labels = data().tensors
    inputs[ODD["huge"]] = torch.tensor([1e4, -1e3, 1e2, 1e4, -1e4])
    inputs[ODD["zero"]] = 0
    inputs[ODD["not finite"], 2] = math.nan
    labels[ODD["huge"]] = 2
    return TensorDataset(inputs, labels)


def delete_one(the_plan: fodp.Plan) -> list[str]:
    """What changes too much when one example is deleted, with masks and transcript fixed; [] if nothing does.

    Given the transcript, bounds, noise, rates and everything that leaves the run must be the same with and
    without the example; only the queries' values may differ, by at most their bound.
    """
    full = adversarial_data()
    whole = record(the_plan, full)
    faults = []
    for kind, row in ODD.items():
        keep = torch.arange(len(full)) != row
        part = record(the_plan, TensorDataset(*(t[keep] for t in full.tensors)), of=whole, without=row)
        faults += differences(whole, part, kind)
    return faults
