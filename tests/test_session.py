"""A session on real data: what release emits is what the plan promised, and nothing else gets out."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fodp
from fodp.accounting import Event, Phase
from fodp.layout import GradientBuffer
from fodp.lots import reading
from fodp.lots.poisson import PoissonSampler
from fodp.lots.reading import Fetcher
from fodp.methods import METHODS, Method, find, register
from fodp.noise import Streams
from fodp.queries import Query
from fodp.session import Session
from fodp.step import Step
from sessions_for_tests import session


def problem(size: int = 60, seed: int = 0):
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(size, 5), torch.randint(3, (size,)))
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, data


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(**changes):
    base = dict(
        sampling_rate=0.2,
        steps=20,
        lot_size=12,
        clip_norm=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
        seed=0,
        method="fo-dp-sgd",
    )
    return fodp.Plan(**{**base, **changes})


def train(model, data, the_plan, **options):
    run = session(model, losses, data, the_plan, public_score=lambda: 0.0, **options)
    optimizer = the_plan.algorithm.optimizer(model.parameters())
    buffer = GradientBuffer(run.source.layout)
    releases = []
    for _ in range(the_plan.steps):
        released = run.take_step()
        releases.append(released.clone())
        buffer.set(released, the_plan.lot_size)
        optimizer.step()
    return torch.stack(releases)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_seeded_run_repeats_bit_for_bit(method):
    first = train(*problem(), plan(method=method))
    second = train(*problem(), plan(method=method))
    assert torch.equal(first, second)
    assert not torch.equal(first, train(*problem(), plan(method=method, seed=1)))


@pytest.mark.rule(13)
def test_a_secure_run_never_repeats():
    assert not torch.equal(train(*problem(), plan(seed=None)), train(*problem(), plan(seed=None)))


def on_streams(the_plan, streams, noise_streams=None):
    model, data = problem()
    source = fodp.Trainer(model, losses, data, the_plan).source
    lots = PoissonSampler(len(data), the_plan.sampling_rate, streams)
    return Session(the_plan, source, lots, streams, noise_streams=noise_streams)


@pytest.mark.rule(13)
@pytest.mark.parametrize(
    ("seed", "streams"), [(None, Streams.seeded(0)), (1, Streams.seeded(0)), (1, Streams.secure())]
)
def test_streams_of_another_seed_than_the_plan_states_are_refused(seed, streams):
    with pytest.raises(fodp.PrivacyError, match="the plan states"):
        on_streams(plan(seed=seed), streams)
    own = Streams.secure() if seed is None else Streams.seeded(seed)
    with pytest.raises(fodp.PrivacyError, match="the plan states"):
        on_streams(plan(seed=seed), own, streams)


def test_streams_of_the_plans_own_seed_are_taken():
    model, data = problem()
    given = on_streams(plan(seed=3), Streams.seeded(3)).take_step()
    assert torch.equal(given, session(model, losses, data, plan(seed=3)).take_step())
    on_streams(plan(seed=None), Streams.secure(), Streams.secure()).take_step()


@pytest.mark.rule(9)
@pytest.mark.parametrize("options", [dict(microbatch=1), dict(microbatch=5), dict(engine="loop")])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_speed_knobs_do_not_change_the_mechanism(method, options):
    expected = train(*problem(), plan(method=method))
    assert torch.allclose(train(*problem(), plan(method=method), **options), expected, atol=1e-4)


@pytest.fixture
def fetched_in_fives(monkeypatch):
    """Lots of more than five records are fetched in parts; the list collects how many were fetched at a time."""
    counts = []
    fetch = Fetcher.fetch
    monkeypatch.setattr(reading, "_FETCHED_AT_ONCE", 5 * 6)
    monkeypatch.setattr(
        Fetcher, "fetch", lambda self, rows, *rest: counts.append(len(rows)) or fetch(self, rows, *rest)
    )
    return counts


@pytest.mark.rule(9)
@pytest.mark.parametrize("options", [dict(), dict(engine="loop"), dict(microbatch=2), dict(microbatch=100)])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_lots_fetched_in_parts_do_not_change_the_mechanism(method, options, request):
    expected = train(*problem(), plan(method=method))
    counts = request.getfixturevalue("fetched_in_fives")
    assert torch.allclose(train(*problem(), plan(method=method), **options), expected, atol=1e-4)
    assert 1 < max(counts) <= 5


def test_a_lot_is_augmented_as_a_whole(fetched_in_fives):
    """What an augmentation draws must not depend on how the lot is split."""
    sizes = []
    train(*problem(), plan(), augment=lambda batch: sizes.append(len(batch[0])) or batch, copies=2)
    assert max(sizes) > 10
    # Single records, and two and three copies of one row, are there to look at the augmentation.
    assert [size for size in sizes if size > 3] == [2 * count for count in fetched_in_fives if count > 1]


@pytest.mark.rule(2)
def test_an_empty_lot_is_a_noise_only_step():
    model, data = problem(size=3)
    the_plan = plan(sampling_rate=1e-6, steps=5, method="dp-sgd")
    released = train(model, data, the_plan)
    streams = fodp.noise.Streams.seeded(0)
    for step in range(5):
        noise = streams.normal_(torch.empty(released.shape[1]), 1.0, step, "noise")
        assert torch.equal(released[step], noise)


@pytest.mark.rule(2)
def test_an_empty_lot_counts_as_a_step():
    model, data = problem(size=2)
    the_plan = plan(sampling_rate=1e-6, steps=2)
    run = session(model, losses, data, the_plan)
    run.take_step()
    run.take_step()
    with pytest.raises(fodp.PrivacyError, match="2 steps are done"):
        run.take_step()


def test_releases_and_gradients_are_never_aliased():
    model, data = problem()
    run = session(model, losses, data, plan())
    first = run.take_step()
    GradientBuffer(run.source.layout).set(first, 12)
    before = run.states["method"].read().clone()
    for parameter in model.parameters():
        parameter.grad.zero_()  # people clip and zero gradients
    first.zero_()
    assert torch.equal(run.states["method"].read(), before)


@pytest.mark.rule(15)
def test_with_overwhelming_noise_nothing_is_learnt():
    """The end-to-end guard: the same run learns without much noise and not at all with σ=1000."""
    torch.manual_seed(0)
    inputs = torch.randn(600, 5)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long())

    def accuracy(noise: float) -> float:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        params = dict(lr=1.0)
        train(model, data, plan(noise_multiplier=noise, params=params, steps=150, lot_size=120))
        with torch.no_grad():
            return (model(inputs).argmax(1) == data.tensors[1]).float().mean().item()

    assert accuracy(0.5) > 0.75
    assert accuracy(1000.0) < 0.6


class Careless(Method):
    """A method whose step can be told to break its promise."""

    name = "careless"
    summary = reference = noise_meaning = "for tests"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Params:
        mistake: str = ""

    def events(self, plan):
        return (Phase((Event(plan.sampling_rate, plan.noise_multiplier),), plan.steps),)

    def step(self, step, state):
        mistake, std = self.params.mistake, step.plan.noise_multiplier * step.plan.clip_norm
        lot = step.draw(0.5 if mistake == "another rate" else None)
        query = step.gradients(lot).clipped_sum(step.plan.clip_norm)
        if mistake == "too little noise":
            return step.release(query, std / 2)
        if mistake == "no release":
            return query.value
        if mistake == "released twice":
            step.release(query, std)
        if mistake == "a second lot":
            second = step.draw(name="again")
            step.release(step.gradients(second).clipped_sum(1.0), std)
        if mistake == "another lot's query":
            other = step.draw(name="other")
            return step.release(step.gradients(other).clipped_sum(step.plan.clip_norm), std)
        if mistake == "a query of no lot":
            return step.release(Query(query.value, query.bound), std)
        if mistake == "too much noise":
            return step.release(query, 2 * std)
        if mistake == "nothing of the lot":
            return step.release(0 * query, std)
        if mistake == "a query of bound zero beside it":  # no mistake: nobody can change what it tells
            step.release(0 * query, std)
        return step.release(query, std)


def careless_plan(mistake=""):
    return plan(method="careless", params=dict(mistake=mistake, lr=0.1))


@pytest.fixture
def careless():
    register(Careless)
    yield
    del METHODS["careless"]


@pytest.mark.rule(6)
@pytest.mark.rule(7)
@pytest.mark.usefixtures("careless")
@pytest.mark.parametrize(
    "mistake",
    [
        "another rate",
        "too little noise",
        "too much noise",
        "no release",
        "nothing of the lot",
        "released twice",
        "a second lot",
        "another lot's query",
        "a query of no lot",
    ],
)
def test_a_step_that_breaks_its_promise_is_refused(mistake):
    run = session(*_model_loss_data(), careless_plan(mistake))
    with pytest.raises(fodp.PrivacyError):
        run.take_step()


@pytest.mark.rule(7)
@pytest.mark.usefixtures("careless")
def test_a_query_of_bound_zero_costs_nothing():
    query = 0 * Query(torch.ones(3), 1.0)
    assert query.noise_multiplier(2.0) == math.inf
    run = session(*_model_loss_data(), careless_plan("a query of bound zero beside it"))
    run.take_step()  # emits what it promised, no more


@pytest.mark.usefixtures("careless")
def test_a_method_from_outside_works_and_its_name_is_taken_once():
    run = session(*_model_loss_data(), careless_plan())
    assert run.take_step().shape == (run.source.layout.size,)
    with pytest.raises(fodp.PrivacyError, match="in the table already"):
        register(Careless)
    assert find("careless") is Careless


def _model_loss_data():
    model, data = problem()
    return model, losses, data


def test_a_lot_of_an_earlier_step_is_refused():
    steps, run = [], session(*_model_loss_data(), plan())
    run.steps_by(lambda session, number: steps.append(Step(session, number)) or steps[-1])
    run.take_step()
    run.take_step()
    first, second = steps
    with pytest.raises(fodp.PrivacyError, match="not drawn in this step"):
        second.gradients(first.lots[0])
    with pytest.raises(fodp.PrivacyError, match="not drawn in this step"):
        second.release(first.gradients(first.lots[0]).clipped_sum(1.0), 1.0)


class Records(Dataset):
    """A map-style data set that is not made of tensors."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def test_any_map_style_data_set_gives_the_same_run():
    model, data = problem()
    expected = train(model, data, plan())
    model, data = problem()
    assert torch.allclose(train(model, Records(data), plan()), expected)


@pytest.mark.rule(14)
def test_an_iterable_data_set_is_refused():
    model, _ = problem()
    with pytest.raises(fodp.PrivacyError, match=r"[Ii]terable"):
        session(model, losses, Stream(), plan())


def test_a_model_that_was_moved_gets_the_next_release():
    """`to` copies gradients as well: the tensors stay, and no longer lie where releases are written."""
    model, data = problem()
    run = session(model, losses, data, plan())
    buffer = GradientBuffer(run.source.layout)
    for divisor in (1.0, 2.0):
        release = torch.arange(run.source.layout.size, dtype=next(model.parameters()).dtype)
        buffer.set(release, divisor)
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert torch.equal(found, release / divisor)
        for parameter in model.parameters():  # what model.to(another device) does to it
            parameter.grad.data = parameter.grad.data.clone()
