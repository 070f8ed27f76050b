"""Per-layer clipping and public schedules: parts that compose with every method, and bounds that hold."""

import math

import pytest
import torch
from torch import nn

import fodp
from fodp import testing
from fodp.clipping.engine import Engine
from fodp.gradients import ByLayer
from fodp.methods import METHODS
from fodp.options.clip import PerLayer
from gradients_for_tests import gradients_of
from methods_for_tests import data, flat, losses, network, plan, trajectory
from methods_for_tests import trainer as trainer_of
from models_for_tests import gradients_by_hand

NAMES = sorted(METHODS)
BY_LAYER = [name for name in NAMES if not METHODS[name].weighs_by_norm]
NOISE = ((0, 1.0), (2, 0.5), (3, 2.0))
CLIP = ((0, 1.0), (1, 0.25))


def trainer(method, *, engine="auto", **params):
    return trainer_of(plan(method, params), engine=engine)


def schedules_for(method):
    """Of the clip norm too, unless the method adapts it."""
    adapts = METHODS[method].from_dict({}).options.quantile is not None
    return dict(noise_schedule=NOISE) if adapts else dict(noise_schedule=NOISE, clip_schedule=CLIP)


def parts_by_hand(model, batch):
    """Of every example its gradient, parameter by parameter, from that example alone."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    return [gradient.split(sizes) for gradient in gradients_by_hand(model, losses, batch)]


@pytest.mark.rule(4)
@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("shares", [(), (3.0, 1.0)])
def test_each_layer_is_clipped_to_its_share_and_the_whole_to_the_clip_norm(engine, shares):
    model, batch, bound = network(), data().tensors, 0.05
    layers = PerLayer(layer_shares=shares).groups([name for name, _ in model.named_parameters()])
    assert [places for places, _ in layers] == [(0, 1), (2, 3)]  # a weight and its bias are one layer
    assert 1 - 1e-14 < math.fsum(share * share for _, share in layers) <= 1
    expected = torch.zeros_like(flat(model))
    for gradient in parts_by_hand(model, batch):
        parts = []
        for places, share in layers:
            norm = torch.cat([gradient[i].flatten() for i in places]).norm()
            parts += [gradient[i].flatten() * min(1.0, bound * share / norm) for i in places]
        clipped = torch.cat(parts)
        assert clipped.norm() <= bound * (1 + 1e-12)
        expected += clipped
    for microbatch in (None, 5):
        asked = gradients_of(Engine(model, losses, engine), batch, microbatch=microbatch, rule=ByLayer(layers))
        query = asked.clipped_sum(bound)
        assert query.bound == bound
        assert torch.allclose(query.value, expected, atol=1e-12)


@pytest.mark.rule(3)
def test_one_example_moves_a_sum_by_layers_by_at_most_the_bound():
    model, (inputs, labels) = network(torch.float32), data(dtype=torch.float32).tensors
    layers = PerLayer(layer_shares=()).groups([name for name, _ in model.named_parameters()])
    engine = Engine(model, losses)
    bound, more = 1e-3, (torch.cat([inputs, inputs[:1] + 1]), torch.cat([labels, labels[:1]]))
    here, there = (
        gradients_of(engine, b, rule=ByLayer(layers), exact=True).clipped_sum(bound) for b in ((inputs, labels), more)
    )
    moved = (here.value - there.value).norm()
    assert moved <= bound * (1 + fodp.clipping.FLOAT_TOLERANCE)
    assert moved > 0.999 * bound  # all of it is used where both layers are clipped


def test_an_example_counts_as_unclipped_if_no_layer_is_clipped():
    model, batch = network(), data().tensors
    layers = PerLayer(layer_shares=()).groups([name for name, _ in model.named_parameters()])
    largest = [
        max(torch.cat([g[i].flatten() for i in places]).norm() / share for places, share in layers)
        for g in parts_by_hand(model, batch)
    ]
    bound = float(torch.stack(largest).median())
    count = gradients_of(Engine(model, losses), batch, rule=ByLayer(layers)).count(
        lambda norms: norms <= bound * (1 + 1e-9)
    )
    assert float(count.value) == sum(value <= bound * (1 + 1e-9) for value in largest) - len(largest) / 2


def test_not_finite_examples_contribute_nothing_by_layer():
    model, (inputs, labels) = network(), data().tensors
    layers = PerLayer(layer_shares=()).groups([name for name, _ in model.named_parameters()])
    engine = Engine(model, losses)
    expected = gradients_of(engine, (inputs, labels), rule=ByLayer(layers)).clipped_sum(0.1).value
    spoilt = torch.cat([inputs, torch.full((1, 5), math.nan)]), torch.cat([labels, labels[:1]])
    assert torch.allclose(gradients_of(engine, spoilt, rule=ByLayer(layers)).clipped_sum(0.1).value, expected)


@pytest.mark.rule(4)
@pytest.mark.parametrize("method", BY_LAYER)
def test_every_method_by_layers_equals_the_one_example_loop(method):
    params = dict(clip="per-layer", layer_shares=(2.0, 1.0), quantile=0.5, count_noise=100.0)
    fast, slow = (trajectory(trainer(method, engine=engine, **params), 3) for engine in ("auto", "loop"))
    assert torch.allclose(fast, slow, atol=1e-9)
    assert not torch.allclose(fast, trajectory(trainer(method, quantile=0.5, count_noise=100.0), 3), atol=1e-9)


@pytest.mark.rule(6)
@pytest.mark.parametrize("method", NAMES)
def test_every_method_keeps_its_promises_by_layers_and_under_schedules(method):
    layers = {} if METHODS[method].weighs_by_norm else dict(clip="per-layer")
    check = "what is released is what was promised"
    assert testing.faults(check, METHODS[method], **schedules_for(method), **layers) == []


@pytest.mark.rule(3)
@pytest.mark.rule(11)
@pytest.mark.parametrize("method", ["adp-adamw", "block-dp-sgd", "fo-dp-sgd"])
@pytest.mark.parametrize("check", [name for name in testing.CHECKS if "deleting an" in name or "resumed" in name])
def test_bounds_and_resuming_by_layers_and_under_schedules(method, check):
    assert testing.faults(check, METHODS[method], clip="per-layer", noise_schedule=NOISE) == []


@pytest.mark.parametrize("method", NAMES)
def test_a_schedule_of_ones_and_flat_clipping_leave_every_bit(method):
    usual = trajectory(trainer(method), 2)
    ones = dict.fromkeys(schedules_for(method), 1.0)
    assert torch.equal(usual, trajectory(trainer(method, clip="flat", **ones), 2))


@pytest.mark.rule(6)
def test_a_scheduled_plan_promises_each_steps_noise_and_says_so():
    scheduled = fodp.Plan(
        sampling_rate=0.1, steps=10, lot_size=5, clip_norm=2.0, noise_multiplier=3.0, delta=1e-5, method="fo-dp-sgd",
        params=dict(beta=((0, 1.0), (5, 0.5)), noise_schedule=((0, 1.0), (4, 0.5)), clip_schedule=((0, 1.0), (8, 0.1))),
    )  # fmt: skip
    found = [scheduled.events_at(step)[0].noise_multiplier for step in range(10)]
    assert found == [3.0] * 4 + [1.5] + [3.0] * 5  # σ·f/β; the clip norm scales noise and bound alike
    assert "noise multiplier 3 (times a public schedule: 1 for 4 steps, 0.5 for 6 steps)" in scheduled.statement()
    assert "norm 2 (times a public schedule: 1 for 8 steps, 0.1 for 2 steps)" in scheduled.statement()
    plain = fodp.Plan(**{**scheduled.to_dict(), "params": dict(beta=((0, 1.0), (5, 0.5)))})
    assert "schedule" not in plain.statement()
    assert "noise_schedule" not in plain.params  # what was not chosen is not recorded
    assert fodp.Plan(**scheduled.to_dict()) == scheduled
    assert scheduled.epsilon() > plain.epsilon()


def test_a_calibrated_schedule_meets_its_target():
    found = fodp.Plan.calibrated(
        target_epsilon=2.0, sampling_rate=0.1, steps=50, lot_size=5, clip_norm=1.0, delta=1e-5, method="dp-sgd",
        params=dict(noise_schedule=((0, 2.0), (25, 0.7))),
    )  # fmt: skip
    assert 1.9 < found.epsilon() <= 2.0


def test_the_clip_norm_and_the_noise_of_a_step_are_the_scheduled_ones():
    run = trainer("dp-sgd", **schedules_for("dp-sgd")).session
    seen = []
    for _ in range(4):
        clip = run.clip_norm
        run.take_step()
        seen.append((clip, math.sqrt(run.noise_variance()) * run.plan.lot_size))
    norm, sigma = run.plan.clip_norm, run.plan.noise_multiplier
    expected = [(1.0, 1.0), (0.25, 1.0), (0.25, 0.5), (0.25, 2.0)]
    assert seen == [pytest.approx((norm * c, sigma * z * norm * c)) for c, z in expected]


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(clip="by-layer"), "clip must be one of"),
        (dict(layer_shares=(1.0,)), "layer_shares does nothing without clip='per-layer'"),
        (dict(clip="per-layer", layer_shares=(1.0, 0.0)), "each of layer_shares"),
        (dict(clip="per-layer", layer_shares=3.0), "layer_shares must be a sequence"),
        (
            dict(method="dp-is", clip="per-layer"),
            "dp-is, which weighs whole gradients by their norms, and clip='per-layer' .* leave clip at 'flat'",
        ),
        (dict(noise_schedule=((1, 1.0),)), "must begin at step 0"),
        (dict(noise_schedule=((0, 0.0),)), "noise_schedule"),
        (dict(noise_schedule="fast"), "noise_schedule"),
        (dict(clip_schedule=((0, -1.0),)), "clip_schedule"),
        (dict(clip_schedule=((0, 1e-300),)), "clip_norm times clip_schedule"),
        (dict(clip_schedule=2.0, quantile=0.5), "leave one of them out"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_data_is_seen(params, message):
    method = params.pop("method", "dp-sgd")
    with pytest.raises(fodp.PrivacyError, match=message):
        plan(method, params)


@pytest.mark.rule(14)
def test_shares_for_another_number_of_layers_are_refused():
    with pytest.raises(fodp.ConfigurationError, match=r"layer_shares has 3 numbers, and the model has 2 layers"):
        trainer("dp-sgd", clip="per-layer", layer_shares=(1.0, 1.0, 1.0))


def test_parameters_of_the_model_itself_are_a_layer_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    names = [name for name, _ in Scaled().named_parameters()]
    assert [places for places, _ in PerLayer(layer_shares=()).groups(names)] == [(0,), (1, 2)]
