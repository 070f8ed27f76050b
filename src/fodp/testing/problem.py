"""The small problem on which `fodp.testing` tries methods: data, a network, plans and trainers for them."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

from fodp.audit import tape
from fodp.audit.replay import differences
from fodp.audit.tape import Tape
from fodp.callbacks import Callback
from fodp.errors import PrivacyError
from fodp.methods import METHODS
from fodp.plan import Plan
from fodp.trainer import Trainer

SIZE = 24  # examples


def losses(model: nn.Module, batch: Any) -> Tensor:
    """One cross-entropy per example."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(size: int = SIZE, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Inputs of five numbers, three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.5).long())


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two layers, with the same weights each time; leaves the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    """All parameters in one vector, copied."""
    return parameters_to_vector(model.parameters()).detach().clone()


def public_loss(model: nn.Module) -> float:
    """The score on public data that methods with an acceptance test ask for."""
    with torch.no_grad():
        return losses(model, data(30, seed=9, dtype=next(model.parameters()).dtype).tensors).mean().item()


def plan(method: str, params: Mapping[str, Any] | None = None, **changes: Any) -> Plan:
    """Eight steps on the small problem, seeded; `changes` are other fields of the plan.

    Where records take turns the rate is at most what then makes the drawing of one certain. A method that does not say
    what noise it accumulates has a learning rate of 0.1 here.
    """
    public: dict[str, Any] = dict(
        sampling_rate=0.5, steps=8, lot_size=12, clip_norm=1.0, noise_multiplier=1.0, delta=1e-5, accountant="rdp",
        seed=0,
    )  # fmt: skip
    public |= changes
    public["sampling_rate"] = min(public["sampling_rate"], highest_rate(method, params or {}))
    made = Plan(**public, method=method, params=params or {})
    if not made.options.rate.is_automatic or made.algorithm.knows_its_noise:
        return made
    return Plan(**public, method=method, params={**(params or {}), "lr": 0.1})


def highest_rate(method: str, params: Mapping[str, Any]) -> float:
    """The highest sampling rate that the method allows: one over its number of turns."""
    try:
        return 1 / METHODS[method].from_dict(dict(params)).turns
    except (KeyError, PrivacyError):  # the plan says what is wrong
        return 1.0


def trainer(the_plan: Plan, model: nn.Module | None = None, dataset: Any = None, **options: Any) -> Trainer:
    """A trainer of the small network, or of `model`, on the small problem, or on `dataset`."""
    model = network() if model is None else model
    options = {"public_score": lambda: public_loss(model), **options}
    return Trainer(model, losses, data() if dataset is None else dataset, the_plan, **options)


def path(training: Trainer) -> Tensor:
    """The parameters after each step of a whole fit."""
    points: list[Tensor] = []

    class Note(Callback):
        def on_step(self, trainer: Trainer) -> None:
            points.append(flat(trainer.model))

    training.callbacks.append(Note())
    training.fit()
    return torch.stack(points)


class StopAfter(Callback):
    """Interrupts a fit as Ctrl-C does, after a given step."""

    def __init__(self, step: int):
        self.step = step

    def on_step(self, trainer: Trainer) -> None:
        """Ask the trainer to stop."""
        if trainer.step == self.step:
            trainer.interrupt()


def record(the_plan: Plan, dataset: Any = None, *, of: Tape | None = None, without: int = -1) -> Tape:
    """Train to the end of the plan and keep the tape; with `of`, replay that one without a row."""
    return tape.record(trainer(the_plan, dataset=dataset, allow_non_finite=True), of=of, without=without)


ODD = {"huge": 3, "ordinary": 10, "zero": 15, "not finite": 20}  # rows of the adversarial data set


def adversarial_data() -> TensorDataset:
    """Examples that would break a careless method: a huge one, one without gradient in the first layer, a NaN."""
    inputs, labels = data().tensors
    inputs[ODD["huge"]] = torch.tensor([1e4, -1e3, 1e2, 1e4, -1e4])
    inputs[ODD["zero"]] = 0
    inputs[ODD["not finite"], 2] = math.nan
    labels[ODD["huge"]] = 2
    return TensorDataset(inputs, labels)


def delete_one(the_plan: Plan) -> list[str]:
    """What changes too much when one example is deleted, with masks and transcript fixed; [] if nothing does.

    Given the transcript, bounds, noise, rates and everything that leaves the run must be the same with and
    without the example; only the queries' values may differ, by at most their bound.
    """
    full = adversarial_data()
    whole = record(the_plan, full)
    found = []
    for kind, row in ODD.items():
        keep = torch.arange(len(full)) != row
        part = record(the_plan, TensorDataset(*(t[keep] for t in full.tensors)), of=whole, without=row)
        found += differences(whole, part, kind)
    return found
