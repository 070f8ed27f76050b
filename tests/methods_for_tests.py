"""A small problem, a trainer on it, and the delete-one check, for the tests over all private optimizers."""

import functools
import math
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

import fodp
from fodp import mechanism
from fodp.clipping.gradients import FLOAT_TOLERANCE
from fodp.run import Run
from fodp.sampling import Lot
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


@dataclass(frozen=True)
class Released:
    """One visit to the noise site."""

    step: int
    lot: Lot
    value: Tensor
    bound: float
    std: float
    result: Tensor


@dataclass
class Tape:
    """Everything a run drew and released, and what the world saw of it."""

    lots: dict[tuple[int, str], Lot] = field(default_factory=dict)
    uniforms: dict[tuple[int, str], tuple[Tensor, Lot]] = field(default_factory=dict)
    releases: list[Released] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)  # after each step: parameters, state, optimizer

    def events(self) -> list[tuple[float, float]]:
        """(rate, joint noise multiplier) of each lot that released something, in order."""
        multipliers: dict[Lot, list[float]] = {}
        for r in self.releases:
            multipliers.setdefault(r.lot, []).append(r.std / r.bound)
        return [(lot.rate, sum(z**-2 for z in each) ** -0.5) for lot, each in multipliers.items()]


class RecordedRun(Run):
    """Writes a tape; given the tape of a run on all data, replays it on the data without one example.

    Replaying takes that run's masks and random numbers (less those of the missing example) and its released
    values, so that both runs share one transcript and differ only in what they would have added noise to.
    """

    def __init__(self, *args: Any, tape: Tape, of: Tape | None = None, without: int = -1, **options: Any):
        super().__init__(*args, **options)
        self.tape, self._of, self._without = tape, of, without

    def take_step(self) -> Tensor:
        with patch("fodp.run.release", self._noise_site):
            return super().take_step()

    def _noise_site(self, query: mechanism.Query, std: float, noise: Any, step: int, name: str) -> Tensor:
        if self._of is None:
            result = mechanism.release(query, std, noise, step, name)
        else:
            result = self._of.releases[len(self.tape.releases)].result.clone()
        value = query.value.clone()
        self.tape.releases.append(Released(step, query.lot, value, query.bound, std, result.clone()))
        return result

    def draw(self, rate: float | None = None, name: str = "") -> Lot:
        lot = super().draw(rate, name)
        if self._of is not None:
            drawn = self._of.lots[self.step, lot.name].indices
            others = drawn[drawn != self._without]
            object.__setattr__(lot, "indices", others - (others > self._without).long())
        self._last = self.tape.lots[self.step, lot.name] = lot
        return lot

    def uniform(self, count: int, name: str) -> Tensor:
        if self._of is None:
            numbers = super().uniform(count, name)
            self.tape.uniforms[self.step, name] = (numbers, self._last)
            return numbers
        numbers, lot = self._of.uniforms[self.step, name]
        return numbers if len(numbers) == count else numbers[lot.indices != self._without]


def record(the_plan: fodp.Plan, dataset: Any = None, *, of: Tape | None = None, without: int = -1) -> Tape:
    """Train to the end of the plan and keep the tape."""
    tape = Tape()
    recorded = functools.partial(RecordedRun, tape=tape, of=of, without=without)
    with patch("fodp.training.trainer.Run", recorded):
        training = trainer(the_plan, dataset=dataset)
    while training.step < the_plan.steps:
        training._one_step()
        tape.seen.append(
            {
                "parameters": flat(training.model),
                "state": training.run.state_dict(),
                "optimizer": training.optimizer.state_dict(),
            }
        )
    return tape


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
        if len(part.releases) != len(whole.releases):
            faults.append(f"{kind}: {len(whole.releases)} releases become {len(part.releases)}")
        for a, b in zip(whole.releases, part.releases, strict=False):
            here = f"{kind}, step {a.step}, {a.lot.name}"
            for public in ("bound", "std"):
                if getattr(a, public) != getattr(b, public):
                    faults.append(f"{here}: {public} {getattr(a, public):g} becomes {getattr(b, public):g}")
            if a.lot.rate != b.lot.rate:
                faults.append(f"{here}: rate {a.lot.rate:g} becomes {b.lot.rate:g}")
            moved = (a.value - b.value).norm().item()
            if not moved <= a.bound * (1 + FLOAT_TOLERANCE):
                faults.append(f"{here}: moved by {moved:g}, declared bound {a.bound:g}")
        for step, (a, b) in enumerate(zip(whole.seen, part.seen, strict=True)):
            faults += [f"{kind}: {what} after step {step} differs" for what in a if not same(a[what], b[what])]
    return faults


def promised(the_plan: fodp.Plan) -> list[tuple[float, float]]:
    """Every event of the plan as (rate, noise multiplier), in order."""
    steps = [phase.events for phase in the_plan.events() for _ in range(phase.steps)]
    return [(event.sampling_rate, event.noise_multiplier) for events in steps for event in events]


def event_faults(the_plan: fodp.Plan, tape: Tape) -> list[str]:
    """Where what was released is not a prefix of what was promised; a lower rate costs less and is none."""
    emitted, plan_events = tape.events(), promised(the_plan)
    if len(emitted) > len(plan_events):
        return [f"{len(emitted)} events were emitted, {len(plan_events)} promised"]
    return [
        f"event {i} is ({rate:g}, {z:g}), promised was {plan_events[i]}"
        for i, (rate, z) in enumerate(emitted)
        if rate > plan_events[i][0] or not math.isclose(z, plan_events[i][1], rel_tol=1e-9)
    ]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, through dicts and lists."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
