"""One example moves the sum by at most C, whatever the model, the loss, the augmentation and the precision do.

Every test compares the clipped sums of two neighbouring data sets: all else is the same, the key of a secure run
included. `moved` says by how many C they are apart; 1 is what the guarantee allows.
"""

import copy
import itertools
import random
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fodp
from fodp import PrivacyError
from fodp.data import ImageAugmentation
from fodp.lots.poisson import PoissonSampler
from fodp.noise import keyed_from
from fodp.support.looks import is_rare
from sessions_for_tests import session

CLIP, ROWS, WIDTH = 1.0, 40, 6
ALLOWED = CLIP * (1 + 1e-4)  # rounding of whole sums


def plan(**changes):
    numbers = dict(
        sampling_rate=0.5, steps=3, lot_size=20.0, clip_norm=CLIP, noise_multiplier=1e-6, delta=1e-5,
        method="dp-sgd", accountant="rdp",
    )  # fmt: skip
    return fodp.Plan(**{**numbers, **changes})


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, WIDTH, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def network(*extra):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), *extra, nn.Linear(16, 2))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def without(dataset, row):
    keep = torch.arange(len(dataset)) != row
    return TensorDataset(*(column[keep] for column in dataset.tensors))


@pytest.fixture
def neighbours(monkeypatch):
    """Lots of all records but one; with `gone` it is missing from the data, and nobody else gets another number."""
    state = {"gone": None}
    draw = PoissonSampler.draw

    def taped(self, step, name="mask", rate=None):
        lot = draw(self, step, name, rate)
        everyone = torch.arange(ROWS)
        present = everyone if state["gone"] is None else everyone[everyone != state["gone"]]
        object.__setattr__(lot, "names", present)
        object.__setattr__(lot, "indices", torch.arange(len(present)))
        return lot

    monkeypatch.setattr(PoissonSampler, "draw", taped)
    return state


@dataclass
class Pair:
    """How far one record, taken away, moves the sums of the first step."""

    state: dict
    sums: list = None

    def moved(self, run, gone=5, dataset=None):
        """The distance over C; `run(dataset)` gives the first step's sum."""
        dataset = data() if dataset is None else dataset
        self.state["gone"] = None
        with_it = run(dataset)
        self.state["gone"] = gone
        return ((with_it - run(without(dataset, gone))).norm() / CLIP).item()


@pytest.fixture
def pair(neighbours):
    return Pair(neighbours)


def first_sum(model, loss_fn=losses, the_plan=None, **options):
    """A function of the data: the clipped sum of the first step of a secure run under one injected key."""

    def run(dataset):
        with keyed_from(bytes(32)):
            found = session(copy.deepcopy(model), loss_fn, dataset, the_plan or plan(), **options)
            return found.take_step()

    return run


# --- 1: randomness -------------------------------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(4, 2)

    def forward(self, x):
        mean, scale = self.a(x).chunk(2, 1)
        return self.b(mean + scale.exp() * torch.randn_like(mean))


class SharedMask(nn.Module):
    """DropConnect: one mask of a weight for the whole lot, whose shape has nothing to do with the lot's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, 2)

    def forward(self, x):
        return self.b(self.a(x) * torch.bernoulli(torch.full((ROWS,), 0.5)))


class RowByRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.a(torch.stack([row * torch.rand(()) for row in x]))


class ByNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, 2)

    def forward(self, x):
        scale = np.random.rand(len(x), 1) * random.random()  # noqa: NPY002  what people write
        return self.a(x * torch.from_numpy(scale).to(x))


RANDOM = {
    "dropout": lambda: network(nn.Dropout(0.5)),
    "alpha dropout": lambda: network(nn.AlphaDropout(0.5)),
    "rrelu": lambda: network(nn.RReLU()),
    "functional dropout after a transpose": lambda: network(Transposed()),
    "noise in the forward pass": Vae,
    "a mask of a weight": SharedMask,
    "a draw for each row": RowByRow,
    "numpy": ByNumpy,
}


class Transposed(nn.Module):
    def forward(self, x):
        return F.dropout(x.t(), 0.5).t()


def random_model(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RANDOM[name]()


@pytest.mark.rule(18)
@pytest.mark.filterwarnings("ignore:per-example gradients")
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("options", [dict(), dict(engine="loop"), dict(microbatch=7)], ids=str)
def test_what_a_row_draws_does_not_depend_on_the_lot(name, options, pair):
    assert 0.01 < pair.moved(first_sum(random_model(name), **options)) <= ALLOWED


@pytest.mark.rule(18)
@pytest.mark.rule(9)
@pytest.mark.filterwarnings("ignore:per-example gradients")
@pytest.mark.parametrize("name", RANDOM)
def test_a_row_draws_the_same_alone_in_parts_and_in_the_loop(name, pair):
    sums = [first_sum(random_model(name), **o)(data()) for o in (dict(), dict(engine="loop"), dict(microbatch=7))]
    assert torch.allclose(sums[0], sums[1], atol=1e-5)
    assert torch.allclose(sums[0], sums[2], atol=1e-5)


@pytest.mark.rule(18)
def test_draws_differ_by_step_record_and_key(pair):
    model = network(nn.Dropout(0.5))
    first = first_sum(model)(data())
    with keyed_from(bytes(range(32))):
        other = session(copy.deepcopy(model), losses, data(), plan()).take_step()
    assert not torch.allclose(first, other, atol=1e-3)
    with keyed_from(bytes(32)):
        run = session(copy.deepcopy(model), losses, data(), plan())
        steps = [run.take_step() for _ in range(2)]
    assert torch.allclose(steps[0], first, atol=1e-4)
    assert not torch.allclose(steps[1], first, atol=1e-3)


@pytest.mark.rule(18)
def test_an_augmentation_and_a_model_draw_different_numbers(pair):
    drawn = {"augmentation": [], "model": []}

    class Scaled(nn.Module):
        def forward(self, x):
            drawn["model"].append(torch.rand(x.shape))
            return x * drawn["model"][-1]

    def augment(batch):
        drawn["augmentation"].append(torch.rand(batch[0].shape))
        return batch[0] + drawn["augmentation"][-1], batch[1]

    first_sum(nn.Sequential(Scaled(), nn.Linear(WIDTH, 2)), augment=augment)(data())
    ones, others = ({float(x) for draw in draws for x in draw.flatten()} for draws in drawn.values())
    assert len(ones & others) < 0.01 * len(ones)  # of 2²⁴ numbers, by chance


@pytest.mark.rule(18)
def test_the_callers_generator_neither_steers_nor_moves(pair):
    model, sums = network(nn.Dropout(0.5)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        sums.append(first_sum(model)(data()))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.allclose(sums[0], sums[1], atol=1e-4)


@pytest.mark.rule(18)
def test_a_generator_of_ones_own_is_refused():
    own = np.random.default_rng(0)

    def noisy(model, batch):
        return losses(model, (batch[0] * own.random(), batch[1]))

    with pytest.raises(PrivacyError, match="draws from a generator of its own"):
        session(network(), noisy, data(), plan()).take_step()


@pytest.mark.rule(18)
def test_a_torch_generator_of_ones_own_is_not_listened_to(pair):
    def noisy(model, batch):
        scale = torch.rand(len(batch[0]), 1, generator=torch.Generator().manual_seed(1))
        return losses(model, (batch[0] * scale, batch[1]))

    assert pair.moved(first_sum(network(), noisy)) <= ALLOWED


@pytest.mark.rule(18)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_checkpointed_parts_repeat_their_draws(engine, pair):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

        def forward(self, x):
            if self.kept:
                return self.drop(self.a(x))
            return torch.utils.checkpoint.checkpoint(lambda x: self.drop(self.a(x)), x, use_reentrant=False)

    torch.manual_seed(0)
    model, sums = network(Part()), []
    for kept in (True, False):
        model[2].kept = kept
        sums.append(first_sum(model, engine=engine)(data()))
    assert torch.allclose(*sums, atol=1e-5)


@pytest.mark.rule(18)
def test_parts_that_are_checkpointed_from_a_later_step_on_repeat_their_draws(pair):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.drop, self.kept = nn.Linear(16, 16), nn.Dropout(0.5), True

        def forward(self, x):
            if self.kept:
                return self.drop(self.a(x))
            return torch.utils.checkpoint.checkpoint(lambda x: self.drop(self.a(x)), x, use_reentrant=False)

    torch.manual_seed(0)
    model, sums = network(Part()), []
    for kept in (True, False):
        with keyed_from(bytes(32)):
            run = session(copy.deepcopy(model), losses, data(), plan(steps=50))
            for _ in range(40):
                run.take_step()
            run.source.engine.model[2].kept = kept
            sums.append(run.take_step())
    assert torch.allclose(*sums, atol=1e-5)


# augmentation, data sets, collate functions


def jitter(batch):
    return batch[0] + torch.randn_like(batch[0]), batch[1]


def jitter_in_place(batch):
    return batch[0].mul_(1 + torch.rand(len(batch[0]), 1)), batch[1]


def jitter_rows(batch):
    return torch.stack([row + torch.randn(()) for row in batch[0]]), batch[1]


def jitter_by_numpy(batch):
    return batch[0] + torch.from_numpy(np.random.randn(*batch[0].shape)).float(), batch[1]  # noqa: NPY002  what people write


def mixup(batch):
    order = torch.randperm(len(batch[0]))
    return 0.5 * batch[0] + 0.5 * batch[0][order], batch[1]


@pytest.mark.rule(18)
@pytest.mark.rule(20)
@pytest.mark.filterwarnings("ignore:augment is given one record at a time")
@pytest.mark.parametrize(
    "augment",
    [jitter, jitter_in_place, jitter_rows, jitter_by_numpy, mixup, ImageAugmentation((1, 2, 3), padding=1, flip=True)],
)
@pytest.mark.parametrize("copies", [1, 3])
def test_what_an_augmentation_makes_of_a_record_does_not_depend_on_the_lot(augment, copies, pair):
    run = first_sum(network(), augment=augment, copies=copies)
    assert 0.01 < pair.moved(run) <= ALLOWED
    assert torch.allclose(
        run(data()), first_sum(network(), augment=augment, copies=copies, microbatch=5)(data()), atol=1e-5
    )


class Noisy(Dataset):
    """A data set that draws when it is read, as image transforms do."""

    def __init__(self, of, draw):
        self.of, self.draw, self.tensors = of, draw, of.tensors

    def __len__(self):
        return len(self.of)

    def __getitem__(self, index):
        x, y = self.of[index]
        return x + self.draw(), y


@pytest.mark.rule(18)
@pytest.mark.parametrize("draw", [lambda: torch.randn(()), random.random, np.random.rand])
def test_what_a_data_set_draws_for_a_record_does_not_depend_on_the_lot(draw, pair):
    run = first_sum(network())
    assert 0.01 < pair.moved(lambda d: run(Noisy(d, draw))) <= ALLOWED


class OwnGenerators:
    """Generators that go on from record to record, whoever asks."""

    def __init__(self):
        self.torch, self.numpy, self.python = (
            torch.Generator().manual_seed(0),
            np.random.default_rng(0),
            random.Random(0),
        )
        self.count = itertools.count()

    def draw(self, kind):
        if kind == "torch":
            return torch.randn((), generator=self.torch)
        return {"numpy": self.numpy.normal, "python": self.python.random, "count": self.count.__next__}[kind]()


@pytest.mark.rule(18)
@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "count"])
def test_a_data_set_with_a_generator_of_its_own_is_refused(kind):
    own = OwnGenerators()
    with pytest.raises(PrivacyError, match="the data set draws from a generator of its own"):
        session(network(), losses, Noisy(data(), lambda: own.draw(kind)), plan()).take_step()


@pytest.mark.rule(18)
@pytest.mark.parametrize("kind", ["numpy", "python", "count"])
def test_an_augmentation_with_a_generator_of_its_own_is_refused(kind):
    own = OwnGenerators()
    run = session(network(), losses, data(), plan(), augment=lambda batch: (batch[0] + own.draw(kind), batch[1]))
    with pytest.raises(PrivacyError, match="it draws from a generator of its own"):
        run.take_step()


@pytest.mark.rule(18)
def test_an_augmentations_own_torch_generator_is_not_listened_to(pair):
    own = torch.Generator().manual_seed(0)
    augment = lambda batch: (batch[0] + torch.randn(batch[0].shape, generator=own), batch[1])  # noqa: E731
    assert 0.01 < pair.moved(first_sum(network(), augment=augment)) <= ALLOWED


class DrawsBackwards(nn.Module):
    """Gradients are multiplied by random numbers, as stochastic rounding does."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        out = x.clone()
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * self.draw(gradient))
        return out


@pytest.mark.rule(18)
@pytest.mark.filterwarnings("ignore:per-example gradients")
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, lambda g: torch.from_numpy(np.random.rand(*g.shape)).float()],  # noqa: NPY002  what people write
    ids=["torch", "numpy"],
)
def test_what_a_backward_pass_draws_does_not_depend_on_the_lot(draw, engine, pair):
    assert 0.01 < pair.moved(first_sum(network(DrawsBackwards(draw)), engine=engine)) <= ALLOWED


@pytest.mark.rule(18)
def test_a_backward_pass_with_a_generator_of_its_own_is_refused():
    own = np.random.default_rng(0)
    with pytest.raises(PrivacyError, match="two losses or gradients"):
        session(network(DrawsBackwards(lambda g: own.random())), losses, data(), plan()).take_step()


# --- 2: precision --------------------------------------------------------------------------------------------


@pytest.mark.rule(19)
@pytest.mark.filterwarnings("ignore:per-example gradients")
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("layer", ["linear", "sequence", "wide sequence", "attention", "recurrent"])
def test_autocast_around_everything_belongs_to_the_loss_alone(engine, layer):
    torch.manual_seed(0)
    kinds = {
        "linear": lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 2)),
        "sequence": lambda: nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 16), nn.Flatten(), nn.Linear(128, 2)),
        "wide sequence": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 32)), nn.Linear(32, 256), nn.Flatten(), nn.Linear(512, 2)
        ),
        "attention": lambda: nn.Sequential(nn.Unflatten(1, (8, 8)), Attention(), nn.Flatten(), nn.Linear(64, 2)),
        "recurrent": lambda: nn.Sequential(nn.Unflatten(1, (8, 8)), Recurrent(), nn.Flatten(), nn.Linear(64, 2)),
    }  # fmt: skip
    model, x, y = kinds[layer](), 100 * torch.randn(12, 64), torch.randint(2, (12,))
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses(model, (x, y)).sum().backward()
    except RuntimeError as error:
        pytest.skip(f"PyTorch itself cannot do this in bfloat16 on this processor: {error}")
    clipper = fodp.Clipper(model, losses, engine=engine)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The whole lot first: the engine measures one row by itself only when it has seen that it can.
        whole, less = (clipper.clipped_sum((x[:n], y[:n]), CLIP) for n in (12, 11))
        for row in range(4):
            alone = clipper.clipped_sum((x[row : row + 1], y[row : row + 1]), CLIP)
            assert alone.dtype == torch.float32
            assert alone.norm() <= CLIP * (1 + 1e-5)
    assert (whole - less).norm() <= CLIP * (1 + 1e-2)  # bfloat16 rounds the forward pass, not the norm


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.a(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.a(x)[0]


@pytest.mark.rule(19)
@pytest.mark.parametrize("method", ["dp-sgd", "disk"])
def test_autocast_around_everything_does_not_keep_old_weights(method):
    """PyTorch's autocast holds copies of weights for as long as it lasts, also those of an earlier step."""
    sums = []
    for cast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            trainer = fodp.Trainer(
                network(), losses, data(), plan(method=method, seed=1, noise_multiplier=1e-3, steps=6)
            )
            trainer.optimizer.param_groups[0]["lr"] = 5.0
            for _ in range(6):
                trainer.take_step()
        sums.append(trainer.session.parameters())
    assert (sums[0] - sums[1]).norm() < 0.05 * (
        sums[0] - torch.cat([p.flatten() for p in network().parameters()])
    ).norm()


def matmul_mode():
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.mark.rule(19)
@pytest.mark.parametrize("rows", [1, 300])
def test_reduced_products_belong_to_the_loss_alone(rows, monkeypatch):
    """Norms and sums are computed in full precision; the caller's setting is there in the loss, and afterwards."""
    seen = []

    def watching(model, batch):
        seen.append(torch.get_float32_matmul_precision())
        return losses(model, batch)

    torch.manual_seed(0)
    x, y = torch.randn(rows, 300), torch.zeros(rows, dtype=torch.int64)
    clipper = fodp.Clipper(nn.Linear(300, 2), watching)
    exact = clipper.clipped_sum((x, y), 1e-3)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        inside = []
        product = torch.mm
        monkeypatch.setattr(
            torch, "mm", lambda *a, **k: inside.append(torch.get_float32_matmul_precision()) or product(*a, **k)
        )
        found = clipper.clipped_sum((x, y), 1e-3)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen[-1] == "medium"
    assert "bf16" not in inside
    assert torch.allclose(found, exact, rtol=2e-2, atol=1e-6)
    assert rows > 1 or found.norm() <= 1e-3 * (1 + 1e-5)


# --- 3: losses that mix examples -----------------------------------------------------------------------------


def balanced(model, batch):
    """Class weights from the lot."""
    counts = torch.bincount(batch[1], minlength=2).clamp(min=1)
    return losses(model, batch) * (len(batch[1]) / 2 / counts)[batch[1]]


def trimmed(model, batch):
    """The largest tenth does not count."""
    found = losses(model, batch)
    return found * (found <= found.detach().quantile(0.9))


def centred(model, batch):
    return losses(model, (batch[0] - batch[0].mean(0), batch[1]))


def centred_in_lots_of_three(model, batch):
    return centred(model, batch) if len(batch[0]) > 2 else losses(model, batch)


def mixed_up(model, batch):
    share, order = np.random.beta(1, 1), torch.randperm(len(batch[0]))  # noqa: NPY002  what people write
    return losses(model, (share * batch[0] + (1 - share) * batch[0][order], batch[1]))


def faintly(model, batch):
    """Mixing of one part in two thousand, below what a comparison of gradients at 0.1% can see."""
    return losses(model, (batch[0] - 5e-4 * batch[0].mean(0), batch[1]))


def ordered(model, batch):
    return losses(model, (batch[0] + 0.1 * batch[0].cumsum(0), batch[1]))


MIXING = [balanced, trimmed, centred, centred_in_lots_of_three, mixed_up, faintly, ordered]


@pytest.mark.rule(20)
@pytest.mark.parametrize("loss_fn", MIXING)
def test_losses_that_mix_examples_take_the_loop(loss_fn, pair):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert pair.moved(first_sum(network(), loss_fn)) <= ALLOWED
    assert any("one example at a time" in str(w.message) for w in said)


@pytest.mark.rule(20)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(5))
def test_losses_that_keep_examples_apart_do_not(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    run = session(model, losses, data(), plan(steps=300, noise_multiplier=1.0, seed=seed))
    for _ in range(300):
        run.take_step()
    assert run.source.engine.path != "loop"


@pytest.mark.rule(20)
def test_mixing_that_begins_later_ends_the_run():
    """At the steps that are looked at again, which anybody may know."""
    calls = {"mix": False}

    def later(model, batch):
        return centred(model, batch) if calls["mix"] else losses(model, batch)

    run = session(network(), later, data(), plan(steps=5000, noise_multiplier=1.0))
    steps = [s for s in range(3, 5000) if is_rare(s)]
    assert 5 < len(steps) < 60
    for _ in range(3):
        run.take_step()
    calls["mix"] = True
    run.go_to(steps[0])
    with pytest.raises(PrivacyError, match="not covered by the stated epsilon"):
        run.take_step()


# --- 4: rows that augment returns ----------------------------------------------------------------------------


def two_views(batch):
    return torch.cat([batch[0], batch[0].flip(1)]), torch.cat([batch[1], batch[1]])


def ten_views(batch):
    return batch[0].repeat_interleave(10, 0), batch[1].repeat_interleave(10, 0)


@pytest.mark.rule(20)
@pytest.mark.parametrize("augment", [two_views, ten_views, lambda batch: (batch[0][:-1], batch[1][:-1])])
def test_rows_that_augment_adds_or_drops_are_refused(augment):
    with pytest.raises(PrivacyError, match="as many rows as it was given") as said:
        session(network(), losses, data(), plan(), augment=augment).take_step()
    assert not any(character.isdigit() for character in str(said.value).replace("copies=K", ""))


@pytest.mark.rule(20)
def test_copies_in_another_order_are_found(pair):
    def in_blocks(batch):
        """Returns all first views, then all second ones: rows of one record no longer lie side by side."""
        first, second = (tuple(t[place::2] for t in batch) for place in (0, 1))
        return tuple(torch.cat([a, b]) for a, b in zip(first, (second[0].flip(1), second[1]), strict=True))

    with pytest.warns(UserWarning, match="one record at a time"):
        assert pair.moved(first_sum(network(), augment=in_blocks, copies=2)) <= ALLOWED


# --- 10, 11, 13: state outside, exceptions, nothing ----------------------------------------------------------


class Remembering(nn.Module):
    """A loss module that normalises by a running mean of losses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, model, batch):
        found = losses(model, batch)
        self.mean = 0.9 * self.mean + 0.1 * found.detach().mean()
        return found / self.mean


@pytest.mark.rule(24)
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.forward, lambda m: lambda model, batch: m(model, batch)])
def test_a_loss_that_remembers_is_refused(wrap):
    module = Remembering()
    with pytest.raises(PrivacyError, match=r"two losses|writes into the buffer mean"):
        session(network(), wrap(module), data(), plan()).take_step()
    assert module.mean == 1


class Counting(nn.Module):
    """A loss module whose buffer counts the examples it has seen, and changes no loss."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, model, batch):
        self.seen += len(batch[0])
        return losses(model, batch)


@pytest.mark.rule(24)
def test_a_loss_that_counts_is_refused():
    module = Counting()
    with pytest.raises(PrivacyError, match="writes into the buffer seen"):
        session(network(), module, data(), plan()).take_step()
    assert module.seen == 0


@pytest.mark.rule(24)
def test_a_trainable_part_outside_of_the_model_is_refused():
    head = nn.Linear(2, 2)
    with pytest.raises(PrivacyError, match="not the model's"):
        session(network(), lambda m, b: losses(nn.Sequential(m, head), b), data(), plan()).take_step()
    head.requires_grad_(False)
    session(network(), lambda m, b: losses(nn.Sequential(m, head), b), data(), plan()).take_step()


@pytest.mark.rule(24)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_buffers_come_back_when_a_step_breaks_off(engine):
    class Statistics(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x):
            self.seen += x.sum(0)
            if len(x) == self.fails_at:
                raise KeyError("broken record")
            return x

    layer = Statistics()
    layer.fails_at = 1 if engine == "loop" else ROWS
    model = nn.Sequential(layer, nn.Linear(WIDTH, 2))
    run = session(model, losses, data(), plan(sampling_rate=1.0), engine=engine)
    with pytest.raises(KeyError):
        run.take_step()
    assert torch.equal(layer.seen, torch.zeros(WIDTH))


@pytest.mark.rule(21)
@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_sum_of_nothing_is_refused(engine):
    """A reentrant checkpoint whose inputs need no gradient cuts all parameters off."""
    inner = network()

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.unused = inner, nn.Parameter(torch.zeros(()))

        def forward(self, x):
            with torch.no_grad():
                out = self.inner(x)
            return out.requires_grad_()

    with pytest.raises(PrivacyError, match="reaches no trainable parameter"):
        session(Cut(), losses, data(), plan(), engine=engine).take_step()


@pytest.mark.rule(12)
def test_messages_do_not_tell_the_size_of_a_lot():
    sizes = set()
    for loss_fn in (lambda m, b: losses(m, b).mean(), lambda m, b: m(b[0]), lambda m, b: losses(m, b)[1:]):
        with pytest.raises(PrivacyError) as said:
            session(network(), loss_fn, data(), plan(sampling_rate=1.0)).take_step()
        sizes |= {word for word in str(said.value).replace("(", " ").replace(",", " ").split() if word.isdigit()}
    assert not sizes & {str(ROWS), str(ROWS - 1)}
