"""Shapes that are learned: from made-up records in the public model, or from earlier releases. Never from data."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fodp
import mutants_for_tests
from fodp import ConfigurationError, audit, testing
from fodp.audit.tape import event_faults, promised
from fodp.clipping.maps import Kronecker
from fodp.gradients import Gradients
from fodp.methods import METHODS
from fodp.options import AdamBC
from fodp.options.kronecker import KroneckerScaling
from fodp.options.transcript import TranscriptScaling
from fodp.queries import Query
from fodp.session import Session
from gradients_for_tests import scaled
from methods_for_tests import data, delete_one, flat, losses, network, plan, record, trainer, trajectory
from ranks_for_tests import in_ranks
from sessions_for_tests import measured_by

KRONECKER = dict(shape="kronecker", width=2.0, shape_every=2, shape_sides="both")
TRANSCRIPT = dict(shape="transcript", width=2.0, shape_warmup=1, shape_memory=3.0)
ROWS = dict(shape_blocks="row", **TRANSCRIPT)
SHAPES = [KRONECKER, TRANSCRIPT, ROWS]
NAMES = ["kronecker", "transcript", "rows"]


@pytest.mark.rule(6)
@pytest.mark.rule(3)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_keeps_its_bound_and_its_events(method):
    """Deleting an example moves a query by at most its bound, and given the releases nothing else at all."""
    for given in SHAPES if method in ("dp-sgd", "fo-dp-sgd", "fo-noise") else [KRONECKER, TRANSCRIPT]:
        if isinstance(METHODS[method].from_dict({}).options.update, AdamBC):
            given = {**given, "update": "adam", "bc_floor": 0.03}
        the_plan = plan(method, given, sampling_rate=0.7, steps=4)
        assert event_faults(the_plan, record(the_plan)) == []
        assert promised(the_plan) == promised(plan(method, {}, sampling_rate=0.7, steps=4))
        assert delete_one(the_plan) == []


@pytest.mark.parametrize("given", SHAPES, ids=NAMES)
@pytest.mark.parametrize("parts", [{}, dict(clip="per-layer"), dict(clip="normalised")], ids=str)
def test_the_fast_way_is_the_loop_over_single_examples(given, parts):
    fast, loop = (trainer(plan("dp-sgd", {**given, **parts}), engine=engine) for engine in ("auto", "loop"))
    assert torch.allclose(trajectory(fast), trajectory(loop), atol=1e-10)


@pytest.mark.parametrize("given", SHAPES, ids=NAMES)
@pytest.mark.parametrize("method", ["fo-dp-sgd", "disk"])
def test_the_whole_suite_of_a_method_passes(method, given):
    assert testing.check_method(METHODS[method], **given).seconds


def matrices(run):
    """The maps of a run's step as one matrix on the flat vector."""
    ones = torch.eye(sum(p.numel() for p in run.source.layout.parameters), dtype=torch.float64)
    blocks = []
    for factor, parameter in zip(run.scaling.current, run.source.layout.parameters, strict=True):
        eye = ones[: parameter.numel(), : parameter.numel()].reshape(-1, *parameter.shape)
        mapped = factor(eye, 1) if isinstance(factor, Kronecker) else factor * eye
        blocks.append(mapped.flatten(1))
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("given", SHAPES, ids=NAMES)
def test_a_step_is_what_it_is_by_hand(given):
    """Map, clip as a whole, sum, add the same noise, map again: at every step with the maps of that step."""
    batch = data().tensors
    training = trainer(plan("dp-sgd", {**given, "lr": 0.1}, sampling_rate=1.0, clip_norm=0.1, steps=4))
    for step in range(4):
        run, model = training.session, training.model
        gradients = []
        for row in range(len(batch[0])):
            loss = losses(model, tuple(column[row : row + 1] for column in batch)).sum()
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        before = flat(model)
        training.take_step()
        matrix = matrices(run)
        mapped = torch.stack(gradients) @ matrix
        total = (mapped * (0.1 / mapped.norm(dim=1).clamp(min=0.1))[:, None]).sum(0)
        noise = run.streams.normal_(torch.empty(75, dtype=torch.float64), 0.1, step, "noise")
        step_taken = (before - flat(model)) / 0.1 * run.plan.lot_size
        assert torch.allclose(step_taken, (total + noise) @ matrix, atol=1e-6)


# --- where they come from --------------------------------------------------------------------------------------------


def maps_at(training, steps):
    found = []
    for _ in range(steps):
        training.take_step()
        found.append(matrices(training.session))
    return found


def test_kronecker_is_made_at_the_steps_of_its_public_schedule():
    at_start = maps_at(trainer(plan("dp-sgd", {**KRONECKER, "shape_every": 0})), 5)
    assert all(torch.equal(at_start[0], later) for later in at_start)
    every = maps_at(trainer(plan("dp-sgd", KRONECKER)), 5)
    assert torch.equal(every[0], at_start[0])
    assert [torch.equal(a, b) for a, b in pairwise(every)] == [True, False, True, False]


def test_kronecker_whitens_what_the_layers_are_given_and_get_back():
    """Mean squares are those of fan-in; other data of the same form makes the same maps."""
    training = trainer(plan("dp-sgd", {**KRONECKER, "shape_every": 0}))
    one = maps_at(training, 1)[0]
    weights = training.plan.options.scaling.weights(
        [parameter.shape for parameter in training.source.layout.parameters]
    )
    for parameter, b in zip(training.model.parameters(), weights, strict=True):
        assert training.session.noise_share(parameter) == pytest.approx(b**2)
    other = TensorDataset(data(9, seed=5).tensors[0] * 100 + 3, torch.zeros(9, dtype=torch.int64))
    assert torch.equal(maps_at(trainer(plan("dp-sgd", {**KRONECKER, "shape_every": 0}), dataset=other), 1)[0], one)
    sample = (torch.randn(64, 5).double() * torch.tensor([9.0, 1, 1, 1, 1]), torch.zeros(64, dtype=torch.int64))
    given = trainer(plan("dp-sgd", {**KRONECKER, "shape_every": 0}), public_sample=sample)
    first = maps_at(given, 1)[0][:40, :40]
    assert first[0, 0] < 0.5 * first[1, 1]  # the input that is large in the public sample counts for less


def test_one_side_alone_is_mapped_if_that_is_asked_for():
    both, inputs, outputs = (
        trainer(plan("dp-sgd", {**KRONECKER, "shape_sides": sides})) for sides in ("both", "inputs", "outputs")
    )
    for training in (both, inputs, outputs):
        training.take_step()
    weights = [training.session.scaling.current[0] for training in (both, inputs, outputs)]
    assert [(w.left is None, w.right is None) for w in weights] == [(False, False), (True, False), (False, True)]
    assert torch.equal(weights[0].left.gains, weights[2].left.gains)
    biases = [training.session.scaling.current[1] for training in (inputs, outputs)]
    assert [isinstance(b, Kronecker) and b.left is not None for b in biases] == [False, True]


def test_kronecker_leaves_generators_and_the_run_s_own_engine_alone():
    training = trainer(plan("dp-sgd", KRONECKER, sampling_rate=1e-9))
    before = torch.get_rng_state()
    training.take_step()
    assert torch.equal(before, torch.get_rng_state())
    assert training.source.engine.path == "unknown"
    assert training.source.engine.rows_at_once is None


def test_transcript_finds_the_energies_of_the_blocks():
    """Releases of known signals: factors even them out, and a block that is all noise is not blown up."""
    shape = plan("dp-sgd", dict(shape="transcript", shape_warmup=1, shape_memory=200.0)).options.scaling
    learned = TranscriptScaling(shape, [(8, 50), (100,), (100,)], lambda make, _: make())
    generator = torch.Generator().manual_seed(0)
    signal = torch.cat([torch.full((400,), 0.5), torch.full((100,), 0.05), torch.zeros(100)]).double()
    for step in range(300):
        factors = learned.factors(step)
        scale = torch.cat([torch.full((n,), f) for n, f in zip((400, 100, 100), factors, strict=True)]).double()
        noise = 0.1 * torch.randn(600, generator=generator, dtype=torch.float64)
        learned.see(Query(signal, 1.0), signal * scale + noise, 0.1)
    a, b, c = learned.factors(300)
    power = shape.shape_share / 2
    assert b / a == pytest.approx(10 / 4 ** (power - 0.5), rel=0.1)  # energies 100 and 0.25, sizes 400 and 100
    assert b < c <= shape.shape_ceiling


@pytest.mark.parametrize("given", SHAPES, ids=NAMES)
def test_shapes_change_over_the_run_and_come_back_from_a_checkpoint(given):
    maps = maps_at(trainer(plan("dp-sgd", given)), 6)
    assert not torch.equal(maps[0], maps[5])
    resumed = "a run resumed in the middle goes on bit for bit"
    for method in ("dp-sgd", "fo-noise"):
        assert testing.faults(resumed, METHODS[method], **given) == []


@pytest.mark.parametrize("given", SHAPES, ids=NAMES)
def test_ranks_have_the_same_shape(given):
    def work(rank):
        training = trainer(plan("dp-sgd", given))
        return [matrices(training.session), trajectory(training), matrices(training.session)]

    alone = work(0)
    for found in in_ranks(2, work):
        for ours, theirs in zip(alone, found, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)


def test_a_model_without_layers_that_can_be_looked_into_takes_fan_in():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))

        def forward(self, x):
            return torch.stack([row @ self.weight for row in x]) if len(x) else x @ self.weight

    training = trainer(plan("dp-sgd", KRONECKER, steps=1), Mixed(), engine="loop")
    with pytest.warns(UserWarning, match="takes the shape fan-in"):
        training.take_step()
    assert training.session.scaling.current == training.session.method.options.scaling.weights([(5, 3)])


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (dict(shape="fan-in", shape_damping=2.0), "shape_damping does nothing without shape='kronecker'"),
        (dict(shape="kronecker", shape_memory=9.0), "shape_memory does nothing without shape='transcript'"),
        (dict(shape="kronecker", shape_damping=0.0), "shape_damping"),
        (dict(shape="kronecker", shape_every=-1), "shape_every"),
        (dict(shape="kronecker", shape_inputs="white"), "shape_inputs"),
        (dict(shape="kronecker", shape_sides="left"), "shape_sides"),
        (dict(shape="transcript", shape_sides="both"), "shape_sides does nothing without"),
        (dict(shape="transcript", shape_memory=0.5), "shape_memory"),
        (dict(shape="transcript", shape_warmup=0), "shape_warmup"),
        (dict(shape="transcript", shape_floor=2.0, shape_ceiling=1.0), "exchange them"),
        (dict(shape="transcript", shape_blocks="head"), "shape_blocks"),
        (dict(shape="kronecker", update="adambc"), "must know the noise of every number"),
        (dict(shape="transcript", update="adamwbc"), "must know the noise of every number"),
    ],
)
def test_what_would_do_nothing_or_wrong_is_refused(params, says):
    with pytest.raises(ConfigurationError, match=says):
        plan("dp-sgd", params)


def test_a_loop_of_ones_own_has_no_loss_to_show_records_to():
    model, dataset = network(torch.float32), data(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"use fodp\.Trainer"):
        fodp.make_private(model, optimizer, dataset, plan("dp-sgd", KRONECKER))


@pytest.mark.parametrize("given", [TRANSCRIPT, ROWS], ids=NAMES[1:])
def test_a_loop_of_ones_own_learns_the_same_from_its_releases(given):
    model, dataset = network(torch.float32), data(dtype=torch.float32)
    the_plan = plan("dp-sgd", given, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = fodp.make_private(model, optimizer, dataset, the_plan)
    for batch in loader:
        optimizer.zero_grad()
        losses(model, batch).mean().backward()
        optimizer.step()
    other = network(torch.float32)
    twin = trainer(the_plan, other, dataset, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    twin.fit()
    assert torch.allclose(flat(model), flat(twin.model), atol=1e-5)


def test_records_of_no_one_form_need_a_public_sample():
    records = [(x, y) for x, y in zip(*data().tensors, strict=True)]
    with pytest.raises(ConfigurationError, match="give public_sample"):
        trainer(plan("dp-sgd", KRONECKER), dataset=records).take_step()
    sample = data(40, seed=4).tensors
    assert trajectory(trainer(plan("dp-sgd", KRONECKER), dataset=records, public_sample=sample)).isfinite().all()


# --- wrong versions --------------------------------------------------------------------------------------------------


def moments_of_the_data(monkeypatch):
    """Whitening by the private inputs' own second moments."""
    measured_by(monkeypatch, lambda rows, step, public: rows)
    return KRONECKER


def moments_of_the_lot(monkeypatch):
    """The same of the lot that was drawn in this step: made when its gradients are asked for."""
    made = KroneckerScaling._made

    def gradients(session, number, lot, at):
        rows = session.source.fetcher.fetch(lot.indices)
        session.scaling._sample = lambda _: tuple(c.nan_to_num() if c.is_floating_point() else c for c in rows)
        session.scaling._factors = tuple(made(session.scaling, number))
        return original(session, number, lot, at)

    original = Session.gradients
    monkeypatch.setattr(Session, "gradients", gradients)
    return KRONECKER


def energies_before_their_noise(monkeypatch):
    """Block energies of the clean sum, which has no noise to take off."""
    see = TranscriptScaling.see
    monkeypatch.setattr(TranscriptScaling, "see", lambda self, query, _, std: see(self, query, query.value, 0.0))
    return TRANSCRIPT


def energies_of_this_lot(monkeypatch):
    """Factors of a step from the clean energies of that step's own lot, before clipping."""
    original = Session.gradients

    def gradients(session, number, lot, at):
        clean = scaled(original(session, number, lot, at), None).clipped_sum(1.0)
        session.scaling.see(clean, clean.value, 0.0)
        session.scaling._at = -1
        return original(session, number, lot, at)

    monkeypatch.setattr(Session, "gradients", gradients)
    return TRANSCRIPT


def clipped_before_they_are_mapped(monkeypatch):
    """Norms of gradients as they come, and maps on the clipped sum: one example moves it by more than C."""
    original = Gradients.clipped_sum

    def summed(self, clip_norm):
        plain = original(scaled(self, None), clip_norm)
        blocks = tuple((p.numel(), f) for p, f in zip(self.layout.parameters, self.factors, strict=True))
        mapped = Query(plain.value, plain.bound, blocks=blocks).map_back_(plain.value)
        return Query(mapped, plain.bound, self.lot, blocks=blocks)

    monkeypatch.setattr(Gradients, "clipped_sum", summed)
    return {**TRANSCRIPT, "shape_floor": 3.0}


PRIVATE = [moments_of_the_data, moments_of_the_lot, energies_before_their_noise, energies_of_this_lot]


@pytest.mark.rule(12)
@pytest.mark.parametrize("wrong", PRIVATE)
def test_a_shape_from_private_numbers_is_caught(monkeypatch, wrong):
    found = delete_one(plan("dp-sgd", wrong(monkeypatch), sampling_rate=0.7, steps=3))
    assert any("parameters after step" in fault for fault in found), found[:3]


@pytest.mark.rule(3)
def test_clipping_before_the_map_is_caught(monkeypatch):
    found = delete_one(plan("dp-sgd", clipped_before_they_are_mapped(monkeypatch), sampling_rate=0.7, steps=3))
    assert any("bound" in fault for fault in found), found[:3]


@pytest.mark.parametrize("times", [0, 2])
def test_a_release_that_is_not_mapped_back_once_is_caught(monkeypatch, times):
    original = Query.map_back_

    def wrong(self, release):
        for _ in range(times):
            original(self, release)
        return release

    monkeypatch.setattr(Query, "map_back_", wrong)
    for given in SHAPES:
        with pytest.raises(AssertionError):
            test_a_step_is_what_it_is_by_hand(given)


# --- the audits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", SHAPES, ids=NAMES)
def test_no_shape_is_accused_by_an_audit(given):
    for finding in mutants_for_tests.attacks(mutants_for_tests.plan("dp-sgd", given)):
        assert finding.consistent, finding.faults[:3]
        assert finding.epsilon_lower is None or finding.epsilon_lower <= finding.epsilon_claimed


@pytest.mark.parametrize("wrong", [moments_of_the_data, energies_before_their_noise])
def test_an_audit_finds_a_shape_from_private_numbers(monkeypatch, wrong):
    the_plan = mutants_for_tests.plan("dp-sgd", wrong(monkeypatch))
    model, dataset, _ = mutants_for_tests.problem()
    assert not audit.replay_neighbours(the_plan, model, losses, dataset).consistent


def test_the_statement_says_what_a_shape_is_made_of():
    assert "mapped by public matrices (made of made-up or public records" in plan("dp-sgd", KRONECKER).statement()
    assert "times a factor made of earlier releases, is clipped to norm 1" in plan("dp-sgd", TRANSCRIPT).statement()
