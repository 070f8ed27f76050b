"""lr="auto": the noise of a whole run is a fixed multiple of the initial weights, and nothing private enters."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fodp import ConfigurationError, testing
from fodp.methods.parts.rates import shaped_scale
from methods_for_tests import data, delete_one, network, plan, trainer, trajectory

AUTO = dict(lr="auto", shape="fan-in", width=4.0)
RULED = [
    ("dp-sgd", {}),
    ("dp-sgd", dict(momentum=0.8)),
    ("dp-sgd", dict(filter="momentum")),
    ("dp-sgd", dict(filter="doppler", momentum=0.5)),
    ("dp-sgd", dict(clip="normalised")),
    ("block-dp-sgd", {}),
    ("doppler", {}),
    ("disk", {}),
    ("fo-dp-sgd", dict(beta=0.6)),
    ("fo-uniform", dict(beta=0.6)),
    ("fo-exponential", dict(beta=0.6)),
    ("post-fm-dp-sgd", dict(beta=0.6)),
    ("fo-noise", dict(bands=4)),
]
STEPS = 300


def wide(widths=(16, 40, 24)):
    """Layers of several widths, all of at least 4 inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[2]))


def inputs(size=6):
    return TensorDataset(torch.zeros(size, 16), torch.zeros(size, dtype=torch.int64))


@pytest.mark.parametrize(("method", "given"), RULED)
def test_noise_alone_moves_every_layer_by_the_same_multiple_of_its_weights(method, given):
    """Empty lots: the run is its noise. Momentum, filters, memories and correlated noise are all accounted for."""
    the_plan = plan(method, {**AUTO, "auto_ratio": 0.7, **given}, steps=STEPS, sampling_rate=1e-9, noise_multiplier=1.3)
    model = wide()
    first = [p.detach().clone() for p in model.parameters()]
    trainer(the_plan, model, inputs()).fit()
    for before, after in zip(first, model.parameters(), strict=True):
        if before.dim() > 1:
            ratio = (after.detach() - before).square().mean().sqrt() / before.square().mean().sqrt()
            assert ratio == pytest.approx(0.7, rel=0.1)


def test_the_formula_for_ordinary_initial_weights():
    """lr = c·L/(σ·C·√T)/(√width·√3), whatever the widths of the layers are."""
    for widths in ((16, 40, 24), (300, 500, 100)):
        the_plan = plan("dp-sgd", AUTO, steps=100, lot_size=50, clip_norm=2.0, noise_multiplier=3.0)
        rate = trainer(the_plan, wide(widths)).optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(1.8 * 50 / (3.0 * 2.0 * 10) / math.sqrt(4 * 3), rel=0.05)


def test_vectors_and_matrices_that_start_at_zero_have_no_scale():
    weight = torch.randn(50, 50)
    others = [(torch.ones(50), 1.0), (torch.zeros(50, 50), 1.0), (torch.full((7,), 1e9), 1.0)]
    assert shaped_scale([(weight, 0.5), *others]) == pytest.approx(weight.square().mean().sqrt().item() / 0.5)
    with pytest.raises(ConfigurationError, match="starts at anything but zero"):
        shaped_scale(others)


def test_a_checkpoint_brings_its_rate_along(tmp_path):
    assert (
        testing.faults("a learning rate of zero by schedule stops the model", testing.METHODS["dp-sgd"], **AUTO) == []
    )
    the_plan = plan("dp-sgd", AUTO)
    first = trainer(the_plan)
    trajectory(first, 4)
    first.save(tmp_path / "c.pt")
    second = trainer(the_plan, nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double())
    assert second.optimizer.param_groups[0]["lr"] != first.optimizer.param_groups[0]["lr"]  # of other weights
    second.resume(tmp_path / "c.pt")
    assert torch.equal(trajectory(first, 4), trajectory(second, 4))


@pytest.mark.rule(1)
@pytest.mark.rule(12)
@pytest.mark.parametrize(("method", "given"), [("dp-sgd", {}), ("fo-dp-sgd", {}), ("fo-noise", dict(bands=2))])
def test_the_rate_does_not_know_the_data(method, given):
    """Deleting an example changes no rate: all that leaves the run is the same, given the releases."""
    the_plan = plan(method, {**AUTO, **given}, steps=3)
    assert delete_one(the_plan) == []
    few = trainer(the_plan, dataset=data(5, seed=8)).optimizer.param_groups[0]["lr"]
    assert few == trainer(the_plan).optimizer.param_groups[0]["lr"]


class TestWrongRate:
    """A rate that is measured on the data: the size of the clean gradient at the start."""

    def test_it_is_caught(self):
        class RateOfTheData(testing.METHODS["dp-sgd"]):
            name = "rate-of-the-data"

            def tune(self, optimizer, run, state):
                columns = run._fetcher._columns
                model = network()
                testing.losses(
                    model, tuple(c.nan_to_num() if c.is_floating_point() else c for c in columns)
                ).sum().backward()
                size = sum(p.grad.square().sum() for p in model.parameters())
                optimizer.param_groups[0]["lr"] = 1 / (1 + float(size))

        with testing.registered(RateOfTheData):
            found = delete_one(plan("rate-of-the-data", steps=2))
        assert any("optimizer after step" in fault or "parameters after step" in fault for fault in found)


@pytest.mark.parametrize(
    ("method", "params", "says"),
    [
        ("dp-sgd", dict(lr="auto"), "no rule for shape='none'"),
        ("dp-sgd", {**AUTO, "update": "adam"}, "no rule for update='adam'"),
        ("dp-sgd", {**AUTO, "quantile": 0.5}, "no rule for a quantile"),
        ("dp-sgd", {**AUTO, "noise_schedule": ((0, 1.0), (3, 0.5))}, "no rule for noise_schedule"),
        ("dp-sgd", dict(lr="fast"), "lr"),
        ("dp-sgd", dict(auto_ratio=2.0), "auto_ratio does nothing without lr='auto'"),
        ("dp-sgd", {**AUTO, "auto_ratio": -1.0}, "auto_ratio"),
        ("dp-adam", dict(lr="auto", shape="fan-in"), "no rule for update"),
    ],
)
def test_where_there_is_no_rule_the_plan_is_refused(method, params, says):
    with pytest.raises(ConfigurationError, match=says):
        plan(method, params)


@pytest.mark.parametrize("method", ["dp-sam", "dp-sat", "dp-is", "sa-dpsgd"])
def test_methods_that_do_not_know_their_noise_are_refused(method):
    with pytest.raises(ConfigurationError, match=f"no rule for {method}"):
        trainer(plan(method, AUTO))


def test_an_optimizer_of_ones_own_has_a_rate_of_its_own():
    model = network()
    with pytest.raises(ConfigurationError, match="does nothing beside an optimizer of your own"):
        trainer(plan("dp-sgd", AUTO), model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
