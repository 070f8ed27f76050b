"""Real mistakes in private training, each a whole pipeline that an audit can attack; and what catches each.

Run as a program it writes the table of docs/audit.md: python tests/mutants_for_tests.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import audit
from fodp.accounting import Event, Phase
from fodp.audit import Finding, MakeTrainer, plain_trainer
from fodp.mechanism import Query
from fodp.methods import METHODS, Method, register
from fodp.methods.base import Vectors
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.noise import Streams
from fodp.run import Run
from fodp.sampling import Lot
from fodp.training.trainer import Trainer

BETA = 0.5  # of the mutants of FO-DP-SGD
SEED = 0
WIDTH = 512  # inputs: in many dimensions canaries do not stand in each other's way


# --- the pipeline that is audited ----------------------------------------------------------------------------


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def problem() -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """A network, data and canaries."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, WIDTH, generator=generator)
    dataset = TensorDataset(inputs, inputs[:, :10].argmax(1))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, dataset, audit.random_canaries(dataset, 1000, classes=10, seed=5)


def plan(method: str, params: dict[str, Any] | None = None) -> fodp.Plan:
    """One that claims ε below 1, small enough for every attack to contradict it."""
    return fodp.Plan(
        sampling_rate=0.05, steps=50, lot_size=35, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5,
        method=method, params=params or {}, seed=SEED,
    )  # fmt: skip


def attacks(the_plan: fodp.Plan, make: MakeTrainer = plain_trainer) -> Iterator[Finding]:
    """(a) to (d), each at the family-wise level."""
    model, dataset, canaries = problem()
    yield audit.attack_mechanism(the_plan, make, trials=6000, seed=SEED)
    yield audit.attack_training(the_plan, model, losses, dataset, canaries, make, looks=25, seed=SEED)
    yield audit.replay_neighbours(the_plan, model, losses, dataset, make, seed=SEED)
    yield audit.check_sampling(the_plan, make, steps=250, seed=SEED)


@contextmanager
def registered(method: type[Method]) -> Iterator[None]:
    register(method)
    try:
        yield
    finally:
        del METHODS[method.name]


def std(run: Any) -> float:
    return run.plan.noise_multiplier * run.clip_norm


# --- mistakes in the noise -----------------------------------------------------------------------------------


class FaintNoise(Streams):
    """Noise that comes out smaller than was asked for."""

    def __init__(self, seed: int, factor: float):
        super().__init__(seed)
        self.factor = factor

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        return super().normal_(out, std * self.factor, step, name)


class StaleNoise(Streams):
    """The generator is seeded anew in every step."""

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        return super().normal_(out, std, 0, name)


class PartialNoise(Streams):
    """No noise on the last tensor of the model."""

    last: int

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        super().normal_(out, std, step, name)
        if out.dim():
            out[-self.last :] = 0
        return out


def with_streams(streams: Callable[[nn.Module, fodp.Plan], Streams]) -> MakeTrainer:
    def make(model: nn.Module, loss_fn: Any, dataset: Any, the_plan: fodp.Plan) -> Trainer:
        trainer = plain_trainer(model, loss_fn, dataset, the_plan)
        trainer.run = Run(model, loss_fn, dataset, the_plan, streams=streams(model, the_plan))
        return trainer

    return make


def partial(model: nn.Module, the_plan: fodp.Plan) -> Streams:
    streams = PartialNoise(the_plan.seed)
    streams.last = list(model.parameters())[-1].numel()
    return streams


class BetaTwice(FODPSGD):
    """Divides by β in the claim a second time."""

    name = "beta-twice"

    def events(self, plan: fodp.Plan) -> tuple[Phase, ...]:
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier / self.params.beta**2),), plan.steps),)

    def step(self, run: Any, memory: Any) -> Tensor:
        lot = run.draw()
        s = self.params.beta * run.gradients(lot).clipped_sum(run.clip_norm)
        u = memory.read()
        value = s.value if u is None else s.value + (1 - self.params.beta) * u
        release = run.release(lot, Query(value, self.params.beta * s.bound, lot), std(run))
        memory.write(release)
        return release


# --- mistakes in the sensitivity -----------------------------------------------------------------------------

ONLY = 1e-9  # weighs the other tensors' gradients out of a norm


class PerLayerClipping(DPSGD):
    """Clips every tensor to C by itself and adds the noise of one clip."""

    name = "per-layer-clipping"

    def step(self, run: Any, state: Any) -> Tensor:
        lot = run.draw()
        gradients, layout = run.gradients(lot), run.engine.layout
        value = layout.zeros()
        for k, view in enumerate(layout.views(value)):
            alone = [1.0 if k == other else ONLY for other in range(len(layout.names))]
            view.copy_(layout.views(gradients.scaled(alone).clipped_sum(run.clip_norm).value)[k])
        return run.release(lot, Query(value, run.clip_norm, lot), std(run))


class ClipAfterSum(DPSGD):
    """Clips the lot's sum instead of every example."""

    name = "clip-after-sum"

    def step(self, run: Any, state: Any) -> Tensor:
        lot = run.draw()
        total = run.gradients(lot).sum(bound=1e9).value
        clipped = total * min(1.0, run.clip_norm / max(total.norm().item(), 1e-12))
        return run.release(lot, Query(clipped, run.clip_norm, lot), std(run))


class UnclippedParameter(DPSGD):
    """The last tensor is left out of the norm and not clipped."""

    name = "unclipped-parameter"

    def step(self, run: Any, state: Any) -> Tensor:
        lot = run.draw()
        gradients, layout = run.gradients(lot), run.engine.layout
        others = [1.0] * (len(layout.names) - 1)
        value = gradients.scaled([*others, ONLY]).clipped_sum(run.clip_norm).value if others else layout.zeros()
        layout.views(value)[-1].copy_(layout.views(gradients.sum(bound=1e9).value)[-1])
        return run.release(lot, Query(value, run.clip_norm, lot), std(run))


class AnotherClipNorm(DPSGD):
    """C is typed twice: clips at 3, adds noise for 1."""

    name = "another-clip-norm"

    def step(self, run: Any, state: Any) -> Tensor:
        lot = run.draw()
        value = run.gradients(lot).clipped_sum(3 * run.clip_norm).value
        return run.release(lot, Query(value, run.clip_norm, lot), std(run))


class MeanOfTheLot(DPSGD):
    """Divides by the number of examples that were drawn instead of the public L."""

    name = "mean-of-the-lot"

    def step(self, run: Any, state: Any) -> Tensor:
        lot = run.draw()
        release = run.release(lot, run.gradients(lot).clipped_sum(run.clip_norm), std(run))
        return release * (run.plan.lot_size / max(1, len(lot.indices)))


class CleanMemory(FODPSGD):
    """Remembers sums before noise: the example is in every later query too."""

    name = "clean-memory"

    def step(self, run: Any, memory: Any) -> Tensor:
        beta = self.params.beta
        lot = run.draw()
        s = run.gradients(lot).clipped_sum(run.clip_norm)
        u = memory.read()
        r = beta * s if u is None else beta * s + (1 - beta) * u
        memory.write(r.value)
        return run.release(lot, r, std(run))


class CleanAverage(DPSGD):
    """Keeps an EMA of sums before noise and lets it steer the update."""

    name = "clean-average"

    def init(self, plan: fodp.Plan, size: int) -> Vectors:
        return Vectors(average=0.0)

    def step(self, run: Any, state: Any) -> Tensor:
        lot = run.draw()
        s = run.gradients(lot).clipped_sum(run.clip_norm)
        state.average = 0.9 * state.average + 0.1 * s.value
        return run.release(lot, s, std(run)) + state.average


# --- mistakes in the sampling --------------------------------------------------------------------------------


class SkipsEmptyLots(Run):
    """Goes on to the next step when nobody was drawn."""

    def take_step(self) -> Tensor:
        if len(self._sampler.draw(self.step).indices) == 0:
            self.step += 1
            return self.engine.layout.zeros()
        return super().take_step()


def drawing(choose: Callable[[Run, Lot], Tensor]) -> type[Run]:
    """A run whose lots have other records than a Poisson draw gave them."""

    class Drawing(Run):
        def draw(self, rate: float | None = None, name: str = "") -> Lot:
            lot = super().draw(rate, name)
            object.__setattr__(lot, "indices", choose(self, lot))
            return lot

    return Drawing


def shuffled(run: Run, epoch: int) -> Tensor:
    return torch.randperm(run._fetcher.size, generator=torch.Generator().manual_seed(epoch))


def lot_length(run: Run, lot: Lot) -> int:
    return max(1, round(lot.rate * run._fetcher.size))


def fixed_size(run: Run, lot: Lot) -> Tensor:
    return shuffled(run, run.step)[: lot_length(run, lot)].sort().values


def epoch_slices(run: Run, lot: Lot) -> Tensor:
    length = lot_length(run, lot)
    per_epoch = max(1, run._fetcher.size // length)
    start = run.step % per_epoch * length
    return shuffled(run, run.step // per_epoch)[start : start + length].sort().values


def every_worker(run: Run, lot: Lot) -> Tensor:
    """Each of two workers draws at q from all the data, not from its half."""
    return torch.cat([lot.indices, run._sampler.draw(run.step, "worker", lot.rate).indices]).unique()


def same_lot(run: Run, lot: Lot) -> Tensor:
    return run._sampler.draw(0, lot.name, lot.rate).indices


def with_run(kind: type[Run]) -> MakeTrainer:
    def make(model: nn.Module, loss_fn: Any, dataset: Any, the_plan: fodp.Plan) -> Trainer:
        trainer = plain_trainer(model, loss_fn, dataset, the_plan)
        trainer.run = kind(model, loss_fn, dataset, the_plan)
        return trainer

    return make


# --- the list ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A mistake: a method of its own, or a pipeline around a correct one."""

    mistake: str
    method: str | type[Method] = "dp-sgd"
    make: MakeTrainer = plain_trainer
    params: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.mistake

    def findings(self) -> list[Finding]:
        if isinstance(self.method, str):
            return list(attacks(plan(self.method, self.params), self.make))
        with registered(self.method):
            return list(attacks(plan(self.method.name, self.params), self.make))


HALF = {"beta": BETA}
MUTANTS = (
    Mutant(
        "noise multiplied by β like the sum", "fo-dp-sgd", with_streams(lambda m, p: FaintNoise(p.seed, BETA)), HALF
    ),
    Mutant("noise multiplier divided by β twice", BetaTwice, params=HALF),
    Mutant("noise scaled by C/L twice", make=with_streams(lambda m, p: FaintNoise(p.seed, p.clip_norm / p.lot_size))),
    Mutant("noise missing on one tensor", make=with_streams(partial)),
    Mutant("same noise each step", make=with_streams(lambda m, p: StaleNoise(p.seed))),
    Mutant("per-layer clipping with flat noise", PerLayerClipping),
    Mutant("clipping after summing", ClipAfterSum),
    Mutant("an unclipped parameter", UnclippedParameter),
    Mutant("noise for another clip norm", AnotherClipNorm),
    Mutant("the mean over the drawn lot", MeanOfTheLot),
    Mutant("memory of un-noised sums", CleanMemory, params=HALF),
    Mutant("EMA of clean sums", CleanAverage),
    Mutant("skipping empty lots", make=with_run(SkipsEmptyLots)),
    Mutant("fixed-size batches accounted as Poisson", make=with_run(drawing(fixed_size))),
    Mutant("shuffled epochs accounted as Poisson", make=with_run(drawing(epoch_slices))),
    Mutant("q off by the number of workers", make=with_run(drawing(every_worker))),
    Mutant("the same lot each step", make=with_run(drawing(same_lot))),
)

PAGE = Path(__file__).parent.parent / "docs" / "audit.md"
BEGIN, END = "<!-- table of mutants: begin -->", "<!-- table of mutants: end -->"
COLUMNS = ("mechanism", "one-run", "replay", "sampling")


def row(mutant: Mutant, findings: list[Finding]) -> str:
    """Its line of the table: a cross where an attack contradicts the claim."""
    caught = {f.attack for f in findings if not f.consistent}
    return f"| {mutant.mistake} | " + " | ".join("✗" if c in caught else "" for c in COLUMNS) + " |"


def table_on_page() -> list[str]:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = ["| mistake | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for each in MUTANTS:
        found = each.findings()
        lines.append(row(each, found))
        print(lines[-1])
        for f in found:
            print(f"    {f.attack}: {f.summary}")
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")
