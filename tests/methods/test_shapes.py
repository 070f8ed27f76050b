"""The shape of the query and normalised clipping: parts of every method, with the sensitivity and events of none."""

import math

import pytest
import torch

import fodp
from fodp import ConfigurationError, PrivacyError, testing
from fodp.audit.tape import event_faults, promised
from fodp.clipping.engine import Engine
from fodp.gradients import Normalised
from fodp.methods import METHODS
from fodp.methods.dp_sgd import DPSGD
from fodp.options.update import NoiseCorrectedAdam
from fodp.queries import Query
from gradients_for_tests import gradients_of, scaled
from methods_for_tests import data, delete_one, flat, losses, network, plan, record, trainer, trajectory
from sessions_for_tests import private_columns

OWN = (0.5, 1.0, 2.0, 0.3)  # of the small network's four parameters
FAN_IN = dict(shape="fan-in", width=2.0)
SHAPES = [FAN_IN, dict(shape=OWN)]
SIZES = (40, 8, 24, 3)
WEIGHTS = {"fan-in": (math.sqrt(2 / 5), 1.0, 0.5, 1.0), OWN: OWN}


# --- block-dp-sgd is dp-sgd with a shape ---------------------------------------------------------------------------


class AsBefore(DPSGD):
    """Block-DP-SGD as it was written before shapes were a part: the reference for its bits."""

    name = "block-as-before"

    def weight(self, shape):
        return min(1.0, math.sqrt(2.0 / max(1, math.prod(shape[1:]))))

    def step(self, step, state):
        weights = [self.weight(shape) for shape in step.shapes]
        lot = step.draw()
        gradients = scaled(step.gradients(lot), weights)
        clipped_sum = gradients.clipped_sum(step.clip_norm)
        std = step.adapt_clip(gradients, clipped_sum, std=step.plan.noise_multiplier * step.clip_norm)
        release = step.release(clipped_sum, std)
        for part, b in zip(release.split([math.prod(shape) for shape in step.shapes]), weights, strict=True):
            part.mul_(b)
        return release

    def tune(self, optimizer, session, state):
        super().tune(optimizer, session, state)
        if isinstance(optimizer, NoiseCorrectedAdam):
            for group in optimizer.param_groups:
                group["noise_shares"] = [self.weight(parameter.shape) ** 2 for parameter in group["params"]]


@pytest.mark.parametrize("parts", [dict(lr=0.1), dict(update="adamwbc", lr=0.02, quantile=0.5, count_noise=100.0)])
def test_block_dp_sgd_is_dp_sgd_with_the_shape_fan_in_and_what_it_was_bit_for_bit(parts):
    with testing.registered(AsBefore):
        before = trajectory(trainer(plan("block-as-before", parts)))
    block = plan("block-dp-sgd", dict(width=2.0, **parts))
    assert torch.equal(trajectory(trainer(block)), before)
    assert torch.equal(trajectory(trainer(plan("dp-sgd", {**FAN_IN, **parts}))), before)
    assert (block.params["shape"], block.params["width"]) == ("fan-in", 2.0)


def test_plans_without_a_shape_record_none():
    assert not {"shape", "width", "clip_stability"} & plan("dp-sgd").params.keys()
    assert plan("dp-sgd", FAN_IN).params["shape"] == "fan-in"


# --- every method ----------------------------------------------------------------------------------------------------


@pytest.mark.rule(6)
@pytest.mark.rule(3)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_keeps_its_bound_and_its_events_in_a_shape(method):
    """Deleting an example moves a query by at most its bound, and given the releases nothing else at all."""
    for given in SHAPES if method in ("dp-sgd", "fo-dp-sgd", "fo-noise") else [FAN_IN]:
        the_plan = plan(method, given, sampling_rate=0.7, steps=3)
        assert event_faults(the_plan, record(the_plan)) == []
        assert promised(the_plan) == promised(plan(method, {}, sampling_rate=0.7, steps=3))
        assert delete_one(the_plan) == []


@pytest.mark.rule(3)
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"dp-is", "dp-adam-ac"}))  # which refuse them, below
def test_every_method_keeps_its_bound_with_normalised_gradients(method):
    assert delete_one(plan(method, dict(clip="normalised"), sampling_rate=0.7, steps=3)) == []


@pytest.mark.parametrize(
    "given", [FAN_IN, dict(shape=OWN, clip="per-layer"), dict(clip="normalised", **FAN_IN), dict(shape=OWN)]
)
def test_the_fast_way_is_the_loop_over_single_examples(given):
    fast, loop = (trainer(plan("dp-sgd", given), engine=engine) for engine in ("auto", "loop"))
    assert torch.allclose(trajectory(fast), trajectory(loop), atol=1e-10)


@pytest.mark.parametrize("given", SHAPES)
def test_a_shape_is_what_it_is_by_hand(given):
    """Scale, clip as a whole, sum, add the same noise, scale again."""
    model, batch = network(), data().tensors
    weights = torch.cat([torch.full((n,), b) for n, b in zip(SIZES, WEIGHTS[given["shape"]], strict=True)]).double()
    total = torch.zeros(75, dtype=torch.float64)
    for row in range(len(batch[0])):
        loss = losses(model, tuple(column[row : row + 1] for column in batch)).sum()
        gradient = weights * torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        total += gradient * min(1.0, 0.1 / gradient.norm().item())
    run = trainer(plan("dp-sgd", given, sampling_rate=1.0, clip_norm=0.1)).session
    noise = run.streams.normal_(torch.empty(75, dtype=torch.float64), 0.1, 0, "noise")
    assert torch.allclose(run.take_step(), weights * (total + noise), atol=1e-7)


def test_normalised_gradients_have_the_clip_norm_but_for_the_constant():
    batch = data(4).tensors
    batch[0][3] = math.nan
    whole = gradients_of(Engine(network(), losses), batch, rule=Normalised(0.5))
    plain = gradients_of(Engine(network(), losses), batch)
    for row in range(3):
        one = tuple(column[row : row + 1] for column in batch)
        gradient = gradients_of(Engine(network(), losses), one).clipped_sum(1e9).value
        found = gradients_of(Engine(network(), losses), one, rule=Normalised(0.5)).clipped_sum(0.1)
        assert torch.allclose(found.value, gradient * 0.1 / (gradient.norm() + 0.5), rtol=1e-5)
        assert found.bound == 0.1
    assert whole.clipped_sum(0.1).value.isfinite().all()
    assert not torch.allclose(whole.clipped_sum(0.1).value, plain.clipped_sum(0.1).value)


def test_a_shape_goes_into_a_checkpoint_and_comes_back():
    resumed = "a run resumed in the middle goes on bit for bit"
    assert testing.faults(resumed, METHODS["fo-dp-sgd"], **FAN_IN) == []
    assert testing.faults(resumed, METHODS["fo-noise"], bands=3, **FAN_IN) == []


def test_a_loop_of_ones_own_has_the_same_shape():
    model, dataset = network(torch.float32), data(dtype=torch.float32)
    the_plan = plan("dp-sgd", FAN_IN, steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = fodp.make_private(model, optimizer, dataset, the_plan)
    for batch in loader:
        optimizer.zero_grad()
        losses(model, batch).mean().backward()
        optimizer.step()
    twin = trainer(plan("dp-sgd", {**FAN_IN, "lr": 0.1}, steps=4), network(torch.float32), dataset)
    twin.fit()
    assert torch.allclose(flat(model), flat(twin.model), atol=1e-6)


def test_the_statement_names_a_shape_and_normalised_gradients():
    assert "each parameter's part times a public factor, is clipped to norm 1" in plan("dp-sgd", FAN_IN).statement()
    assert "gradient is scaled to norm 1" in plan("dp-sgd", dict(clip="normalised")).statement()


# --- refusals, and wrong versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "params", "says"),
    [
        ("dp-sgd", dict(shape="wide"), "shape"),
        ("dp-sgd", dict(shape=(1.0, -1.0)), "each of shape"),
        ("dp-sgd", dict(shape=3.0), "a list of numbers"),
        ("dp-sgd", dict(width=3.0), "width does nothing without shape='fan-in'"),
        ("dp-sgd", dict(shape=OWN, width=3.0), "width does nothing without shape='fan-in'"),
        ("dp-sgd", dict(clip_stability=0.1), "clip_stability does nothing without clip='normalised'"),
        ("dp-sgd", dict(clip="normalised", quantile=0.5), "leave one of them out"),
        ("dp-adam-ac", dict(clip="normalised"), "leave one of them out"),
        ("dp-is", dict(clip="normalised"), "weighs whole gradients"),
    ],
)
def test_what_would_do_nothing_or_wrong_is_refused(method, params, says):
    with pytest.raises(ConfigurationError, match=says):
        plan(method, params)


def test_a_shape_of_another_model_is_refused_before_anything_is_drawn():
    with pytest.raises(ConfigurationError, match="2 numbers, and the model has 4 trainable parameters"):
        trainer(plan("dp-sgd", dict(shape=(1.0, 0.5))))
    with pytest.raises(ConfigurationError, match="1 numbers"):
        plan("dp-sgd", dict(shape=(1.0,))).options.scaling.weights([(2, 3), (2,)])


def test_what_is_added_to_a_query_must_have_its_shape():
    value = torch.zeros(3)
    shaped = Query(value, 1.0, blocks=((2, 0.5), (1, 2.0)))
    assert (2 * shaped + shaped).blocks == shaped.blocks
    with pytest.raises(PrivacyError, match="add to the release instead"):
        shaped + value
    with pytest.raises(PrivacyError, match="different scalings"):
        shaped + Query(value, 1.0)
    assert shaped.map_back_(torch.ones(3)).tolist() == [0.5, 0.5, 2.0]


class ShapeOfTheLot(AsBefore):
    """Factors from the clean sum of the lot itself: block energies, without noise."""

    name = "shape-of-the-lot"

    def step(self, step, state):
        lot = step.draw()
        sizes = [math.prod(shape) for shape in step.shapes]
        clean = step.gradients(lot).clipped_sum(step.clip_norm).value
        weights = [1 / (0.1 + part.norm().item()) for part in clean.split(sizes)]
        query = scaled(step.gradients(lot), weights).clipped_sum(step.clip_norm)
        release = step.release(query, step.plan.noise_multiplier * step.clip_norm)
        return torch.cat([part * b for part, b in zip(release.split(sizes), weights, strict=True)])


class ShapeOfTheInputs(AsBefore):
    """Factors from the private inputs, as whitening by the data's own statistics would have."""

    name = "shape-of-the-inputs"

    def step(self, step, state):
        lot = step.draw()
        sizes = [math.prod(shape) for shape in step.shapes]
        inputs, *_ = private_columns(step._session.source)
        weights = [1 / (1 + inputs.square().mean().item()), 1.0, 1.0, 1.0]
        query = scaled(step.gradients(lot), weights).clipped_sum(step.clip_norm)
        release = step.release(query, step.plan.noise_multiplier * step.clip_norm)
        return torch.cat([part * b for part, b in zip(release.split(sizes), weights, strict=True)])


@pytest.mark.rule(12)
@pytest.mark.parametrize("wrong", [ShapeOfTheLot, ShapeOfTheInputs])
def test_a_shape_from_private_numbers_is_caught(wrong):
    with testing.registered(wrong):
        found = delete_one(plan(wrong.name, sampling_rate=0.7, steps=2))
    assert any("parameters after step" in fault for fault in found), found[:3]
