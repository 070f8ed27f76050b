"""Real mistakes in private training, and what catches each: an attack on the whole pipeline, or a test by its name.

Run as a program it writes the table of docs/audit.md: python tests/mutants_for_tests.py
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fodp
from fodp import audit
from fodp.accounting import Event, Phase
from fodp.audit import Finding, MakeTrainer, plain_trainer
from fodp.callbacks import Callbacks
from fodp.clipping import chunks, engine, self_check
from fodp.clipping.batches import Keyed, plain
from fodp.clipping.chunks import Chunks
from fodp.clipping.padding import Widths
from fodp.clipping.reach import Reached
from fodp.data import packing
from fodp.gradients import ByLayer
from fodp.identity.private_data import PrivateData
from fodp.lots import people
from fodp.lots.poisson import PoissonSampler
from fodp.lots.reading import Fetcher
from fodp.methods import METHODS, Method, register
from fodp.methods.base import DataclassState
from fodp.methods.dp_sgd import DPSGD
from fodp.methods.fo_dp_sgd import FODPSGD
from fodp.noise import Streams
from fodp.queries import Query
from fodp.release import FreshNoise
from fodp.sampling import Lot
from fodp.step import Step
from fodp.support.looks import Looks
from fodp.trainer import Trainer

BETA = 0.5  # of the mutants of FO-DP-SGD
SEED = 0
WIDTH = 512  # inputs: in many dimensions canaries do not stand in each other's way


# --- the pipeline that is audited ----------------------------------------------------------------------------


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def problem(*extra: nn.Module) -> tuple[nn.Module, TensorDataset, TensorDataset]:
    """A network, with extra layers in its middle, data and canaries."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, WIDTH, generator=generator)
    dataset = TensorDataset(inputs, inputs[:, :10].argmax(1))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), *extra, nn.Linear(32, 10))
    return model, dataset, audit.random_canaries(dataset, 1000, classes=10, seed=5)


def plan(method: str, params: dict[str, Any] | None = None) -> fodp.Plan:
    """One that claims ε below 1, small enough for every attack to contradict it."""
    return fodp.Plan(
        sampling_rate=0.05, steps=50, lot_size=35, clip_norm=1.0, noise_multiplier=2.0, delta=1e-5,
        method=method, params={"lr": 0.1, **(params or {})}, seed=SEED,
    )  # fmt: skip


def jitter(batch: Any) -> Any:
    """An augmentation for (inputs, labels) that draws."""
    return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


def attacks(
    the_plan: fodp.Plan, make: MakeTrainer = plain_trainer, *extra: nn.Module, replay: bool = True
) -> Iterator[Finding]:
    """(a) to (d), each at the family-wise level, on a network with these extra layers."""
    model, dataset, canaries = problem(*extra)
    yield audit.attack_mechanism(the_plan, make, trials=6000, seed=SEED)
    yield audit.attack_training(the_plan, model, losses, dataset, canaries, make, looks=25, seed=SEED)
    if replay:
        yield audit.replay_neighbours(the_plan, model, losses, dataset, make, seed=SEED)
    yield audit.check_sampling(the_plan, make, steps=250, seed=SEED)


@contextmanager
def registered(method: type[Method]) -> Iterator[None]:
    register(method)
    try:
        yield
    finally:
        del METHODS[method.name]


def std(step: Step) -> float:
    return step.plan.noise_multiplier * step.clip_norm


# --- mistakes in the noise -----------------------------------------------------------------------------------


class FaintNoise(Streams):
    """Noise that comes out smaller than was asked for."""

    def __init__(self, seed: int | None, factor: float):
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
        trainer.session.noise = FreshNoise(streams(model, the_plan))
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

    def step(self, step: Step, memory: Any) -> Tensor:
        lot = step.draw()
        s = self.params.beta * step.gradients(lot).clipped_sum(step.clip_norm)
        u = memory.read()
        value = s.value if u is None else s.value + (1 - self.params.beta) * u
        release = step.release(Query(value, self.params.beta * s.bound, lot), std(step))
        memory.write(release)
        return release


# --- mistakes in the sensitivity -----------------------------------------------------------------------------


class PerLayerClipping(DPSGD):
    """Clips every tensor to C by itself and adds the noise of one clip."""

    name = "per-layer-clipping"

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        gradients = step.gradients(lot)
        alone = ByLayer(tuple(((place,), 1.0) for place in range(len(step.shapes))))
        value = replace(gradients, rule=alone).clipped_sum(step.clip_norm).value
        return step.release(Query(value, step.clip_norm, lot), std(step))


class ClipAfterSum(DPSGD):
    """Clips the lot's sum instead of every example."""

    name = "clip-after-sum"

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        total = step.gradients(lot).sum(bound=1e9).value
        clipped = total * min(1.0, step.clip_norm / max(total.norm().item(), 1e-12))
        return step.release(Query(clipped, step.clip_norm, lot), std(step))


class UnclippedParameter(DPSGD):
    """The last tensor is left out of the norm and not clipped."""

    name = "unclipped-parameter"

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        *others, last = range(len(step.shapes))
        apart = ByLayer((*(((tuple(others), 1.0),) if others else ()), ((last,), 1e9)))
        value = replace(step.gradients(lot), rule=apart).clipped_sum(step.clip_norm).value
        return step.release(Query(value, step.clip_norm, lot), std(step))


class AnotherClipNorm(DPSGD):
    """C is typed twice: clips at 3, adds noise for 1."""

    name = "another-clip-norm"

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        value = step.gradients(lot).clipped_sum(3 * step.clip_norm).value
        return step.release(Query(value, step.clip_norm, lot), std(step))


class MeanOfTheLot(DPSGD):
    """Divides by the number of examples that were drawn instead of the public L."""

    name = "mean-of-the-lot"

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        release = step.release(step.gradients(lot).clipped_sum(step.clip_norm), std(step))
        return release * (step.plan.lot_size / max(1, len(lot.indices)))


class CleanMemory(FODPSGD):
    """Remembers sums before noise: the example is in every later query too."""

    name = "clean-memory"

    def step(self, step: Step, memory: Any) -> Tensor:
        beta = self.params.beta
        lot = step.draw()
        s = step.gradients(lot).clipped_sum(step.clip_norm)
        u = memory.read()
        r = beta * s if u is None else beta * s + (1 - beta) * u
        memory.write(r.value)
        return step.release(r, std(step))


@dataclass
class Average(DataclassState):
    average: float | Tensor = 0.0


class CleanAverage(DPSGD):
    """Keeps an EMA of sums before noise and lets it steer the update."""

    name = "clean-average"

    def init(self, plan: fodp.Plan, size: int) -> Average:
        return Average()

    def step(self, step: Step, state: Any) -> Tensor:
        lot = step.draw()
        s = step.gradients(lot).clipped_sum(step.clip_norm)
        state.average = 0.9 * state.average + 0.1 * s.value
        return step.release(s, std(step)) + state.average


# --- mistakes in the sampling --------------------------------------------------------------------------------


def changed(change: Callable[[Trainer], None], **options: Any) -> MakeTrainer:
    """A trainer with a mistake in it."""

    def make(model: nn.Module, loss_fn: Any, dataset: Any, the_plan: fodp.Plan) -> Trainer:
        trainer = Trainer(model, loss_fn, dataset, the_plan, **options)
        change(trainer)
        return trainer

    return make


def skips_empty_lots(trainer: Trainer) -> None:
    """Goes on to the next step when nobody was drawn."""
    session, take_step = trainer.session, trainer.session.take_step

    def skipping() -> Tensor:
        if len(session.lots.draw(session.number).indices) == 0:
            session.go_to(session.number + 1)
            return torch.zeros_like(session.parameters())
        return take_step()

    session.take_step = skipping


Choose = Callable[[PoissonSampler, Lot], Tensor]


class Drawing:
    """Lots with other records than a Poisson draw gave them."""

    def __init__(self, sampler: PoissonSampler, choose: Choose):
        self.sampler, self.choose = sampler, choose

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def draw(self, step: int, name: str = "mask", rate: float | None = None) -> Lot:
        lot = self.sampler.draw(step, name, rate)
        object.__setattr__(lot, "indices", self.choose(self.sampler, lot))
        return lot


def drawing(choose: Choose) -> MakeTrainer:
    def change(trainer: Trainer) -> None:
        sampler = trainer.session.lots
        assert isinstance(sampler, PoissonSampler)
        trainer.session.lots = Drawing(sampler, choose)

    return changed(change)


def shuffled(sampler: PoissonSampler, epoch: int) -> Tensor:
    return torch.randperm(sampler.size, generator=torch.Generator().manual_seed(epoch))


def lot_length(sampler: PoissonSampler, lot: Lot) -> int:
    return max(1, round(lot.rate * sampler.size))


def fixed_size(sampler: PoissonSampler, lot: Lot) -> Tensor:
    return shuffled(sampler, lot.step)[: lot_length(sampler, lot)].sort().values


def epoch_slices(sampler: PoissonSampler, lot: Lot) -> Tensor:
    length = lot_length(sampler, lot)
    per_epoch = max(1, sampler.size // length)
    start = lot.step % per_epoch * length
    return shuffled(sampler, lot.step // per_epoch)[start : start + length].sort().values


def every_worker(sampler: PoissonSampler, lot: Lot) -> Tensor:
    """Each of two workers draws at q from all the data, not from its half."""
    return torch.cat([lot.indices, sampler.draw(lot.step, "worker", lot.rate).indices]).unique()


def same_lot(sampler: PoissonSampler, lot: Lot) -> Tensor:
    return sampler.draw(0, lot.name, lot.rate).indices


# --- mistakes that let one example reach the others ----------------------------------------------------------


def in_row_order(trainer: Trainer) -> None:
    """What is drawn by PyTorch's own generator is drawn row after row: who is missing shifts all later rows."""
    session, take_step = trainer.session, trainer.session.take_step

    def seeded() -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(session.number)
            return take_step()

    session.take_step = seeded


def of_another_batch(trainer: Trainer, batch_of: Callable[[Callable[[], Keyed], Lot], Any]) -> None:
    """`batch_of(right, lot)` is worked on where the right batch should be."""
    source, made = trainer.source, trainer.source.chunks

    def chunks_of(lot: Lot, *asked: Any) -> Chunks:
        found: list[Chunks] = []

        def right() -> Keyed:
            found.append(made(lot, *asked))
            return found[0].batch

        other = batch_of(right, lot)
        return replace(found[0], batch=other)

    source.chunks = chunks_of


def dropout_in_row_order(trainer: Trainer) -> None:
    """The lot is not told whose its rows are."""
    in_row_order(trainer)
    of_another_batch(trainer, lambda right, lot: plain(right()))


def secure_dropout_by_step(trainer: Trainer) -> None:
    """The same in secure mode only, where nobody looked."""
    in_row_order(trainer)
    if trainer.plan.seed is None:
        of_another_batch(trainer, lambda right, lot: plain(right()))


def augment_in_row_order(trainer: Trainer) -> None:
    """The augmentation is simply called."""
    source = trainer.source

    def batch_of(right: Callable[[], Keyed], lot: Lot) -> Keyed:
        augmentation, source.augmentation = source.augmentation, None
        batch = right()
        source.augmentation = augmentation
        if augmentation is None or not len(lot.indices):
            return batch
        rows = augmentation.augment(plain(batch))
        views = len(rows[0]) // len(batch.records)
        return Keyed(rows, batch.records.repeat(views), batch.source)

    in_row_order(trainer)
    of_another_batch(trainer, batch_of)


def two_views(batch: Any) -> Any:
    """An augmentation that returns each record twice."""
    return torch.cat([batch[0], batch[0].flip(1)]), torch.cat([batch[1], batch[1]])


def unlooked_at(model: nn.Module, loss_fn: Any, dataset: Any, the_plan: fodp.Plan) -> Trainer:
    """Trusts a loss with class weights from the lot, for it was right on two examples."""
    trainer = plain_trainer(model, balanced if loss_fn is losses else loss_fn, dataset, the_plan)
    engine = trainer.source.engine
    engine._checked = True
    engine._examine = lambda *_: None
    return trainer


def balanced(model: nn.Module, batch: Any) -> Tensor:
    """Weights by how often the two groups of classes are in the lot; so small that clipping does not hide them."""
    group = batch[1] // 5
    counts = torch.bincount(group, minlength=2).clamp(min=1)
    return 0.1 * losses(model, batch) * (len(group) / 2 / counts)[group]


# --- mistakes that no attack sees, planted for the test that does --------------------------------------------


def keys_from_a_counter(patch: pytest.MonkeyPatch) -> None:
    """A secret of the process and a counter, instead of the system's entropy: a fork has both."""
    secret, counter = b"drawn once when the program begins", itertools.count()
    patch.setattr("fodp.noise.streams.secrets.token_bytes", lambda size: _hashed(secret + b"%d" % next(counter), size))


def _hashed(words: bytes, size: int) -> bytes:
    return hashlib.blake2b(words, digest_size=size).digest()


def records_keyed_by_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "record_key", lambda self, step, name: _hashed(b"%d %s" % (step, name.encode()), 32))


def norms_under_autocast(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.clipping.engine.Engine.exactly", lambda self: nullcontext())


def padding_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.push.compare_alone", lambda *_: None)


def loss_modules_not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.clipping.remembered.reached", lambda *_: Reached())


def other_modules_not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.beside.Beside._returned", lambda *_: None)


def joint_losses_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.examiner.Examiner._look_at_losses", lambda *_: None)


def nothing_summed(patch: pytest.MonkeyPatch) -> None:
    """The refusal asks whether all gradients are None; it is told that not."""
    patch.setattr("fodp.clipping.engine.all", lambda _: False, raising=False)


# --- the lists -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """A mistake: a method of its own, or a pipeline around a correct one, on a network with extra layers."""

    mistake: str
    method: str | type[Method] = "dp-sgd"
    make: MakeTrainer = plain_trainer
    params: dict[str, Any] = field(default_factory=dict)
    extra: tuple[nn.Module, ...] = ()

    def __str__(self) -> str:
        return self.mistake

    def findings(self) -> list[Finding]:
        if isinstance(self.method, str):
            return list(attacks(plan(self.method, self.params), self.make, *self.extra))
        with registered(self.method):
            return list(attacks(plan(self.method.name, self.params), self.make, *self.extra))


HALF = {"beta": BETA}
DROPOUT = (nn.Dropout(0.5),)
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
    Mutant("skipping empty lots", make=changed(skips_empty_lots)),
    Mutant("fixed-size batches accounted as Poisson", make=drawing(fixed_size)),
    Mutant("shuffled epochs accounted as Poisson", make=drawing(epoch_slices)),
    Mutant("q off by the number of workers", make=drawing(every_worker)),
    Mutant("the same lot each step", make=drawing(same_lot)),
    Mutant("dropout drawn in the order of the rows", make=changed(dropout_in_row_order), extra=DROPOUT),
    Mutant("the same, seeded by the step, in secure runs only", make=changed(secure_dropout_by_step), extra=DROPOUT),
    Mutant("augmentation drawn in the order of the rows", make=changed(augment_in_row_order, augment=jitter)),
    Mutant("rows that an augmentation adds are examples", make=changed(augment_in_row_order, augment=two_views)),
    Mutant("class weights from the lot, whole lots not looked at", make=unlooked_at),
)


def records_drawn_by_their_place_in_the_lot(patch: pytest.MonkeyPatch) -> None:
    def by_place(blocks: Any, places: Any) -> Any:
        return np.arange(2 * len(places), dtype="<u8").reshape(-1, 2).view(np.uint8)

    patch.setattr(people, "_places", by_place)


def records_clipped_before_they_are_summed(patch: pytest.MonkeyPatch) -> None:
    for module in (engine, chunks):
        patch.setattr(module, "sizes_of", lambda batch: None)


def all_records_used(patch: pytest.MonkeyPatch) -> None:
    init = people.PeopleSampler.__init__

    def greedy(self: Any, owners: Any, rate: float, most: int, *rest: Any) -> None:
        init(self, owners, rate, 10**6, *rest)

    patch.setattr(people.PeopleSampler, "__init__", greedy)


@dataclass(frozen=True)
class Unseen:
    """A mistake that no attack sees, and the test that fails for it.

    `plant` makes it and `given` are the test's arguments, where the test is quick; otherwise it is only named.
    """

    mistake: str
    test: str  # file::test, or file::Class.test
    plant: Callable[[pytest.MonkeyPatch], None] | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.mistake


def steps_of_whole_columns_taken_for_public(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sklearn.company._unlike", lambda *_: None)


def functions_of_the_target_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sklearn.habits.TransformedTargetRegressor", Unseen)


def fitted_steps_let_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sklearn.habits.refuse_private_steps", lambda *_: None)


def memory_by_the_old_look(patch: pytest.MonkeyPatch) -> None:
    """Only what hangs on the loss itself is watched, and what moves by less than 0.1% is taken for rounding."""
    loss_modules_not_watched(patch)
    apart = self_check._apart
    patch.setattr(self_check, "_is_drift", lambda e, one, others, seen, later: apart(seen[0], seen[later]) > 1e-3)


def looks_counted_by_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Looks, "due", lambda self, step, again=False: again or len(self.steps) < 2)


def batching_data_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before `Fetcher.batched_by`: padding was looked for where a collate function was given, and nowhere else."""
    made = Fetcher.__init__

    def by_collate_alone(self: Fetcher, dataset: Any, collate_fn: Any = None, *rest: Any) -> None:
        made(self, dataset, collate_fn, *rest)
        self.batched_by = self.batched_by if collate_fn is not None else None

    monkeypatch.setattr(Fetcher, "__init__", by_collate_alone)


def padding_compared_to_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "_MOVED", 1e-2)


def wider_lots_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Widths, "grow", lambda self, batch: False)


def texts_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The width of unpacked records, and so what a model's mean divides by, from the longest text of anybody."""
    unpack = packing.unpack

    def to_the_longest(*given: Any, **named: Any) -> Any:
        data, owners = unpack(*given, **named)
        longest = int(data.tensors[1].sum(1).max())
        return TensorDataset(*(column[:, :longest] for column in data.tensors)), owners

    monkeypatch.setattr(packing, "unpack", to_the_longest)


def releases_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A step that is repeated is granted, whatever it releases now."""
    patch.setattr("fodp.ledger.account.Account.witness", lambda self, step, tags: None)


def forks_go_on(patch: pytest.MonkeyPatch) -> None:
    """A forked process is taken for the one that made the run, its account and its ledger."""
    patch.setattr("fodp.support.forks.Owner.is_here", property(lambda self: True))


def ledgers_known_by_their_path(patch: pytest.MonkeyPatch) -> None:
    """What was carried to one file is believed to be in whatever lies there now."""
    patch.setattr("fodp.ledger.book.Ledger.identity", property(lambda self: str(self.path)))
    patch.setattr("fodp.ledger.book.Ledger.has_charged", lambda self, run, phases: True)


def a_card_with_words_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """The ledger's card says of all runs that each example joins each step independently."""
    own = "Sampling: Poisson, each example joins each step independently with the step's rate."
    patch.setattr("fodp.ledger.card._how", lambda record: [own])


def doors_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Callbacks, "refuse_private_scores", lambda self, dataset: None)


def rows_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateData, "_share", lambda self, public: 0.0)


def public_data_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateData, "refuse", lambda self, door, public: None)


def repeats_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.lots.records.refuse_repeated", lambda dataset, owners=None: None)


def equal_rows_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.opening.warn_of_equal_rows", lambda dataset, owners=None: None)


def own_losses_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.coupling.Coupling.refuse", lambda *_: None)


def own_inputs_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.coupling.Coupling.refuse_inputs", lambda *_: None)


def means_by_counts_of_the_lot_taken(patch: pytest.MonkeyPatch) -> None:
    own_losses_not_looked_at(patch)
    patch.setattr("fodp.sources.between._WITH_COUNTS", ())


def losses_over_padding_let_through(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.coupling.Coupling._effect_of_padding", lambda *_: "")


def earlier_lots_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.coupling.Coupling.over", lambda *_: None)


def criteria_not_watched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fodp.sources.beside.Beside.refuse_changes", lambda _: None)


UNSEEN = (
    Unseen(
        "secure keys from a counter in the process",
        "noise/test_noise.py::test_streams_made_in_forked_workers_differ",
        keys_from_a_counter,
    ),
    Unseen(
        "draws of records keyed by the step's number alone",
        "draws/test_premise.py::test_draws_differ_by_step_record_and_key",
        records_keyed_by_the_step,
    ),
    Unseen(
        "norms in bfloat16 under autocast",
        "draws/test_premise.py::test_autocast_around_everything_belongs_to_the_loss_alone",
        norms_under_autocast,
        dict(engine="auto", layer="wide sequence"),
    ),
    Unseen(
        "padding to the longest record not compared",
        "draws/test_premise_loop.py::test_a_mean_over_padded_positions_is_refused",
        padding_not_compared,
    ),
    Unseen(
        "a loss module's buffers not watched",
        "draws/test_premise.py::test_a_loss_that_counts_is_refused",
        loss_modules_not_watched,
    ),
    Unseen(
        "a second module trained without noise",
        "draws/test_premise_loop.py::test_a_second_module_that_learns_from_the_same_loss_is_refused",
        other_modules_not_watched,
    ),
    Unseen(
        "a mean over the tokens of all examples",
        "draws/test_premise_loop.py::test_a_mean_over_the_tokens_of_the_whole_lot_is_refused",
        joint_losses_not_compared,
    ),
    Unseen(
        "a sum that no parameter contributes to",
        "draws/test_premise.py::test_a_sum_of_nothing_is_refused",
        nothing_summed,
        dict(engine="loop"),
    ),
    Unseen(
        "a person's records drawn by their place in the lot",
        "test_people.py::test_what_is_drawn_for_a_person_does_not_depend_on_the_others",
        records_drawn_by_their_place_in_the_lot,
        dict(gone="person 3"),
    ),
    Unseen(
        "a person's records clipped one by one and then summed",
        "test_people.py::test_a_person_moves_the_sum_by_at_most_c",
        records_clipped_before_they_are_summed,
        dict(gone="person 3", person_gradient="sum", options={}),
    ),
    Unseen(
        "all of a person's records used, however many",
        "test_people.py::test_a_lot_has_at_most_so_many_records_of_each_of_its_people",
        all_records_used,
        dict(most=3),
    ),
    Unseen("`len(dataset)` written into the ledger", "training/test_closed_lists.py::test_files_of_a_trainer"),
    Unseen("one seed for two runs of a budget", "ledger/test_one_seed.py::TestRefused.test_a_second_run_with_the_seed"),
    Unseen(
        "a normaliser summed in float32",
        "noise/test_large_sums.py::TestSumsOverMillions.test_one_record_moves_the_normaliser_by_its_own_norm",
    ),
    Unseen(
        "norms without the rounding of long products",
        "clipping/test_fuzz.py::test_positions_that_lose_their_difference_in_products",
    ),
    Unseen(
        "ε of the steps taken after a stop that was not planned",
        "training/test_optional_stopping.py::TestResult.test_a_stopped_run_has_the_plans_epsilon",
    ),
    Unseen(
        "a step of whole columns in front of an estimator taken for public, since it is not fitted",
        "integrations/test_sklearn_company.py::test_a_standardised_column_is_refused_before_anything_is_charged",
        steps_of_whole_columns_taken_for_public,
    ),
    Unseen(
        "a function of the whole target around a regressor not seen",
        "integrations/test_sklearn_company.py::test_a_function_of_the_whole_target_is_refused",
        functions_of_the_target_not_seen,
    ),
    Unseen(
        "a scaler that is fitted on the private rows let through",
        "integrations/test_sklearn_company.py::test_a_pipeline_that_keeps_its_steps_in_files_is_looked_at_too",
        fitted_steps_let_through,
    ),
    Unseen(
        "a loss that remembers outside of the model",
        "clipping/test_outside_state.py::test_a_loss_that_remembers_outside_of_the_model_is_refused",
        memory_by_the_old_look,
        dict(engine="loop"),
    ),
    Unseen(
        "a module that contains the model not watched",
        "clipping/test_outside_state.py::test_buffers_of_a_module_that_contains_the_model_are_watched",
        loss_modules_not_watched,
        dict(engine="auto"),
    ),
    Unseen(
        "looks counted by call, the second lot not looked at",
        "test_looks.py::test_the_second_step_is_looked_at_by_the_trainer",
        looks_counted_by_call,
    ),
    Unseen(
        "padding of a data set that batches by itself not compared",
        "training/test_padding.py::test_longest_first_is_refused_as_longest_last",
        batching_data_not_looked_at,
    ),
    Unseen(
        "effects of padding below a percent let through",
        "training/test_padding.py::test_an_effect_of_padding_below_a_percent_is_refused",
        padding_compared_to_a_percent,
        dict(door="Trainer"),
    ),
    Unseen(
        "a long record that comes late not compared",
        "training/test_padding.py::test_a_long_record_that_comes_late_is_looked_at_in_a_loop_of_ones_own",
        wider_lots_not_looked_at,
    ),
    Unseen(
        "a loss of one's own over padded positions",
        "training/test_padding.py::test_a_loss_of_ones_own_that_minds_padding_is_refused",
        losses_over_padding_let_through,
        dict(kind="a mean over all positions", one_by_one=False),
    ),
    Unseen(
        "unpacked texts as wide as the longest of anybody",
        "data/test_packing_width.py::test_one_person_more_changes_no_record_of_the_others",
        texts_padded_to_the_longest,
    ),
    Unseen(
        "a seeded step repeated on another sum",
        "ledger/test_replays.py::test_another_loss_repeats_no_noise",
        releases_not_compared,
    ),
    Unseen(
        "a run that goes on in a fork and in its parent",
        "training/test_forks.py::test_only_the_parent_goes_on_after_a_fork_in_a_fit",
        forks_go_on,
    ),
    Unseen(
        "Opacus's history believed to be in a ledger for its path",
        "integrations/test_opacus_history.py::test_a_new_file_under_the_path_is_charged",
        ledgers_known_by_their_path,
    ),
    Unseen(
        "a paper of a run with words of its own about sampling",
        "training/test_papers.py::test_all_papers_of_a_run_say_the_same",
        a_card_with_words_of_its_own,
        dict(kind="recipe"),
    ),
    Unseen(
        "scores on the data that is trained on",
        "test_private_data.py::test_a_callback_of_ones_own_and_a_metric_are_looked_at",
        doors_not_asked,
    ),
    Unseen(
        "a copy of the private rows taken for public data",
        "test_private_data.py::test_the_private_data_in_any_form_is_refused",
        rows_not_compared,
        dict(form="a clone"),
    ),
    Unseen(
        "un-noised moments of a public sample that is private",
        "test_private_data.py::test_a_public_sample_of_private_rows_is_refused",
        public_data_not_compared,
    ),
    Unseen(
        "a list that holds a record ten times",
        "test_repeats.py::test_the_doors_look_before_anything_is_charged",
        repeats_not_looked_for,
    ),
    Unseen(
        "a data set that indexes i % n",
        "test_repeats.py::test_repeats_of_one_owners_rows_are_that_persons",
        equal_rows_not_looked_for,
    ),
    Unseen(
        "a mean with class weights in a loop of one's own",
        "training/test_own_loss.py::test_a_mean_by_weights_or_counts_of_the_lot_is_refused",
        means_by_counts_of_the_lot_taken,
        dict(case="cross_entropy"),
    ),
    Unseen(
        "a weighted mean made by hand in a loop of one's own",
        "training/test_own_loss.py::test_a_hand_made_weighted_mean_is_refused",
        own_losses_not_looked_at,
    ),
    Unseen(
        "mixup between the loader and the model of a loop of one's own",
        "training/test_own_loss.py::test_rows_that_are_mixed_before_the_model_are_refused",
        own_inputs_not_looked_at,
        dict(case="mixup"),
    ),
    Unseen(
        "a running mean of earlier lots in the loss",
        "training/test_own_state.py::test_so_is_one_that_is_brought_up_to_date_after_the_step",
        earlier_lots_forgotten,
    ),
    Unseen(
        "the buffers of a criterion in a loop of one's own not watched",
        "training/test_own_state.py::test_a_criterion_that_keeps_something_of_the_lot_is_refused_and_put_back",
        criteria_not_watched,
        dict(kind="buffer"),
    ),
)

PAGE = Path(__file__).parent.parent / "docs" / "audit.md"
BEGIN, END = "<!-- table of mutants: begin -->", "<!-- table of mutants: end -->"
COLUMNS = ("mechanism", "one-run", "replay", "sampling")


def row(mutant: Mutant, findings: list[Finding]) -> str:
    """Its line of the table: a cross where an attack contradicts the claim."""
    caught = {f.attack for f in findings if not f.consistent}
    return f"| {mutant.mistake} | " + " | ".join("✗" if c in caught else "" for c in COLUMNS) + " |  |"


def named_row(mutant: Unseen) -> str:
    """The line of a mistake that a test finds, and no attack."""
    file, _, name = mutant.test.partition("::")
    return f"| {mutant.mistake} | " + " | ".join("" for _ in COLUMNS) + f" | {_words(name)} (`{file}`) |"


def _words(test: str) -> str:
    return test.rpartition(".")[2].removeprefix("test_").replace("_", " ")


def table_on_page() -> list[str]:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = ["| mistake | " + " | ".join((*COLUMNS, "tests")) + " |", "| --- |" + " --- |" * (len(COLUMNS) + 1)]
    for each in MUTANTS:
        found = each.findings()
        lines.append(row(each, found))
        print(lines[-1])
        for f in found:
            print(f"    {f.attack}: {f.summary}")
    lines += [named_row(each) for each in UNSEEN]
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")
