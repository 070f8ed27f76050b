"""lr="auto": the noise of a whole run is a fixed multiple of the initial weights, and nothing private enters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fodp import ConfigurationError, testing
from fodp.methods import METHODS
from fodp.options.rate import Rate, relative_noise
from methods_for_tests import data, delete_one, flat, network, plan, trainer, trajectory
from sessions_for_tests import private_columns

AUTO = dict(lr="auto", shape="fan-in", width=4.0)
# Its controllers are held still: on empty lots they would run to the ends of their ranges.
HELD = {"dp-adam-ac": dict(band=1.0, clip_rate=1e-4)}
EVERY = [(method, HELD.get(method, {})) for method in sorted(METHODS)]
ALSO = [
    ("dp-sgd", dict(momentum=0.8)),
    ("dp-sgd", dict(filter="momentum")),
    ("dp-sgd", dict(filter="fractional")),
    ("dp-sgd", dict(filter="doppler", momentum=0.5)),
    ("dp-sgd", dict(clip="normalised")),
    ("dp-sgd", dict(clip="per-layer")),
    ("dp-sgd", dict(quantile=0.5, count_noise=1.0, clip_rate=0.01)),
    ("dp-sgd", dict(lr_schedule="linear", momentum=0.9)),
    ("dp-sgd", dict(lr_schedule="cosine", lr_warmup=30)),
    ("dp-sgd", dict(noise_schedule=((0, 2.0), (100, 0.5)), clip_schedule=((0, 1.0), (200, 3.0)))),
    ("dp-sgd", dict(shape=(3.0, 1.0, 0.2, 1.0))),
    ("dp-sgd", dict(update="adam", filter="momentum", lr_schedule="linear")),
    ("dp-sgd", dict(update="adamwbc", noise_schedule=((0, 2.0), (100, 0.5)))),
    ("fo-dp-sgd", dict(beta=0.3)),
    ("fo-dp-sgd", dict(beta=((0, 0.9), (100, 0.5)))),
    ("fo-dp-sgd", dict(beta=0.5, update="adam")),
    ("fo-uniform", dict(beta=0.6, update="adambc")),
    ("fo-noise", dict(bands=4)),
    ("fo-noise", dict(bands=3, lr_schedule="linear", update="adam")),
]
STEPS = 300


def wide(widths=(16, 40, 24)):
    """Layers of several widths, all of at least 4 inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.Tanh(), nn.Linear(widths[1], widths[2]))


def inputs(size=6):
    return TensorDataset(torch.zeros(size, 16), torch.zeros(size, dtype=torch.int64))


def disturbed(method, given):
    """How far noise alone moves each matrix, over its initial weights: lots are empty, the run is its noise."""
    the_plan = plan(method, {"auto_ratio": 0.7, **given}, steps=STEPS, sampling_rate=1e-9, noise_multiplier=1.3)
    model = wide()
    first = [p.detach().clone() for p in model.parameters()]
    training = trainer(the_plan, model, inputs(), public_score=lambda: 0.0)
    training.fit()
    pairs = zip(first, model.parameters(), strict=True)
    return [float((b - a.detach()).square().mean() / b.square().mean()) ** 0.5 for b, a in pairs if b.dim() > 1]


def whole(ratios):
    return math.sqrt(sum(ratio**2 for ratio in ratios) / len(ratios))


@pytest.mark.parametrize(("method", "given"), [*EVERY, *ALSO])
def test_noise_alone_moves_the_weights_by_the_same_multiple_of_themselves(method, given):
    """Memories, filters, momentum, schedules, correlated noise and Adam's own scale are all accounted for."""
    reached = whole(disturbed(method, given))
    if method == "dp-is":  # on empty data its normaliser is the least there is: an upper bound
        assert 0.7 / 1.6 < reached < 0.7
    else:
        # A filter's first outputs are larger than its later ones, and Adam remembers them for a thousand steps.
        assert reached == pytest.approx(0.7, rel=0.25 if {"filter", "update"} <= set(given) else 0.12)


@pytest.mark.parametrize(("method", "given"), [("dp-sgd", {}), ("fo-dp-sgd", dict(beta=0.6)), ("block-dp-sgd", {})])
def test_with_the_shape_fan_in_every_layer_is_disturbed_alike(method, given):
    for ratio in disturbed(method, {"shape": "fan-in", "width": 4.0, **given}):
        assert ratio == pytest.approx(0.7, rel=0.1)


def test_the_formula_for_ordinary_initial_weights():
    """lr = c·L/(σ·C·√T)/(√width·√3) with fan-in, whatever the widths of the layers are; √3 more if it falls to 0."""
    for widths in ((16, 40, 24), (300, 500, 100)):
        for schedule, more in (("constant", 1.0), ("linear", math.sqrt(3))):
            params = {**AUTO, "lr_schedule": schedule, "auto_ratio": 1.8}
            the_plan = plan("dp-sgd", params, steps=100, lot_size=50, clip_norm=2.0, noise_multiplier=3.0)
            rate = trainer(the_plan, wide(widths)).optimizer.param_groups[0]["lr"]
            assert rate == pytest.approx(more * 1.8 * 50 / (3.0 * 2.0 * 10) / math.sqrt(4 * 3), rel=0.05)


def test_without_noise_the_signal_bounds_the_rate():
    """c·|θ|/(|g|·√T), where the weights have the usual size and |g| is a quarter of the clip norm."""
    the_plan = plan("dp-sgd", steps=100, noise_multiplier=1e-9, clip_norm=3.0)
    rate = trainer(the_plan, one := nn.Linear(200, 300, bias=False), data(dtype=torch.float32)).learning_rate
    assert rate == pytest.approx(2.0 * one.weight.norm().item() / (0.25 * 3.0 * 10), rel=0.01)


def test_adam_knows_neither_the_noise_nor_the_lot():
    rates = [
        trainer(plan("dp-adam", steps=100, lot_size=lot, noise_multiplier=noise)).optimizer.param_groups[0]["lr"]
        for lot, noise in ((50, 1.0), (500, 7.0))
    ]
    assert rates[0] == pytest.approx(rates[1])


def test_what_starts_at_zero_is_measured_by_where_it_has_to_go_and_vectors_not_at_all():
    weight, zero = torch.randn(50, 40), torch.zeros(30, 12)  # the usual start of the second: 1/√36
    size = weight.square().mean().item()
    vectors = [(torch.ones(50), 1.0), (torch.full((7,), 1e-9), 1.0)]
    assert relative_noise([(weight, 0.25), *vectors]) == pytest.approx(math.sqrt(0.25 / size))
    assert relative_noise([(weight, 0.25), (zero, 1.0)]) == pytest.approx(math.sqrt((0.25 / size + 36) / 2))
    assert relative_noise(vectors) == relative_noise([]) == 1.0


class LowRank(nn.Module):
    """A frozen layer and two matrices beside it, the second of which starts at zero."""

    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Mean(nn.Module):
    """Over the words of a text."""

    def forward(self, x):
        return x.mean(dim=1)


def starting(name):
    """A model that does not start as PyTorch starts layers, and records of no one in its form."""
    zero = nn.Linear(40, 24)
    nn.init.zeros_(zero.weight)
    layers = {
        "zero head": lambda: [nn.Linear(16, 40), nn.Tanh(), zero],
        "low rank": lambda: [LowRank(16, 40), nn.Tanh(), zero],
        "text": lambda: [nn.Embedding(30, 16), Mean(), nn.LayerNorm(16), nn.Linear(16, 24)],
        "conv": lambda: [
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 24),
        ],
    }  # fmt: skip
    inputs = {
        "text": torch.zeros(6, 5, dtype=torch.int64),
        "conv": torch.zeros(6, 1, 4, 4),
    }.get(name, torch.zeros(6, 16))
    return nn.Sequential(*layers[name]()), TensorDataset(inputs, torch.zeros(6, dtype=torch.int64))


@pytest.mark.parametrize(
    ("method", "given"), [("dp-sgd", {}), ("dp-sgd", dict(shape="fan-in", width=4.0)), ("dp-adam", {})]
)
@pytest.mark.parametrize("name", ["zero head", "low rank", "text", "conv"])
def test_noise_moves_other_starts_by_the_ratio_too(name, method, given):
    """Lots are empty. What starts at zero is measured by 1/√(3·inputs), and the rest by itself where it is larger."""
    torch.manual_seed(0)
    model, records = starting(name)
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    first = [p.detach().clone() for p in matrices]
    the_plan = plan(method, {"auto_ratio": 0.7, **given}, steps=STEPS, sampling_rate=1e-9, noise_multiplier=1.3)
    training = trainer(the_plan, model, records, public_score=lambda: 0.0)
    assert 0 < training.learning_rate < math.inf
    training.fit()
    ratios = []
    for before, after in zip(first, matrices, strict=True):
        least = 1 / (3 * before[0].numel())
        size = max(float(before.square().mean()), least)
        ratios.append(float((after.detach() - before).square().mean() / size) ** 0.5)
    assert whole(ratios) == pytest.approx(0.7, rel=0.15)


def test_a_method_that_says_nothing_of_its_step_is_refused_by_name():
    class Louder(METHODS["dp-sgd"]):
        name = "louder"

        def step(self, step, state):
            return super().step(step, state) * 7

    class Renamed(METHODS["dp-sgd"]):
        name = "renamed"

    with testing.registered(Louder), testing.registered(Renamed):
        with pytest.raises(ConfigurationError, match="no rule for louder"):
            trainer(replace(plan("dp-sgd"), method="louder"))
        trainer(plan("louder", dict(lr=0.1)))
        assert plan("louder").params["lr"] == 0.1  # that of `fodp.testing`
        rate = trainer(plan("renamed")).optimizer.param_groups[0]["lr"]
    assert rate == trainer(plan("dp-sgd")).optimizer.param_groups[0]["lr"]


class TestSchedule:
    @pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "dp-adam-ac", "sa-dpsgd", "fo-noise"])
    def test_every_step_has_the_factor_that_was_promised(self, method):
        for params in (dict(lr=0.2), {}):
            training = trainer(plan(method, {**params, "lr_schedule": "linear", "lr_warmup": 3}, steps=8))
            largest, rates = training.optimizer.param_groups[0]["lr"], []
            for _ in range(8):
                training.take_step()
                rates.append(training.optimizer.param_groups[0]["lr"] / largest)
            expected = [(1 - t / 8) * min(1, (t + 1) / 3) for t in range(8)]
            if method != "sa-dpsgd":  # a proposal that is undone takes its rate along
                assert rates == pytest.approx(expected)
        assert Rate(lr_schedule="linear", lr_warmup=3).factors(8) == pytest.approx(expected)

    @pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "trapezoid"])
    def test_one_factor_is_that_of_all(self, schedule):
        made = Rate(lr_schedule=schedule, lr_warmup=2)
        assert [made.at(step, 9) for step in range(9)] == pytest.approx(made.factors(9).tolist())

    def test_a_trapezoid_is_level_for_three_quarters(self):
        factors = Rate(lr_schedule="trapezoid", lr_warmup=2).factors(8)
        assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.5])

    def test_it_goes_on_from_a_checkpoint(self, tmp_path):
        the_plan = plan("dp-sgd", dict(lr_schedule="cosine", quantile=0.5))
        first = trainer(the_plan)
        trajectory(first, 4)
        first.save(tmp_path / "c.pt")
        second = trainer(the_plan)
        second.resume(tmp_path / "c.pt")
        assert torch.equal(trajectory(first, 4), trajectory(second, 4))

    def test_a_plan_records_that_there_is_none(self):
        assert {"lr_schedule": "constant", "lr_warmup": 0}.items() <= plan("dp-sgd").params.items()


def test_with_a_quantile_plain_steps_follow_the_clip_norm():
    """Only where the rate is measured by the noise: elsewhere a step is the rate times what was released."""
    params = dict(quantile=0.1, clip_rate=0.5)
    for given, follows in ((params, True), ({**params, "lr": 0.3}, False)):
        training = trainer(plan("dp-sgd", given))
        rate, released = training.optimizer.param_groups[0]["lr"], []
        taken = training.session.take_step
        training.session.take_step = lambda taken=taken, released=released: (
            released.append(taken()) or released[-1].clone()
        )
        for _ in range(5):
            used, before = training.session.clip_norm, flat(training.model)
            training.take_step()
            expected = rate * released[-1] / training.plan.lot_size * (training.plan.clip_norm / used if follows else 1)
            torch.testing.assert_close(before - flat(training.model), expected)
        assert used != training.plan.clip_norm


def test_a_checkpoint_brings_its_rate_along(tmp_path):
    assert testing.faults("a learning rate of zero by schedule stops the model", METHODS["dp-sgd"], **AUTO) == []
    the_plan = plan("dp-sgd", AUTO)
    first = trainer(the_plan)
    trajectory(first, 4)
    first.save(tmp_path / "c.pt")
    other = network()
    other[0].weight.data *= 3
    second = trainer(the_plan, other)
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
        class RateOfTheData(METHODS["dp-sgd"]):
            name = "rate-of-the-data"

            def tune(self, optimizer, session, state):
                model = network()
                testing.problem.losses(model, private_columns(session.source)).sum().backward()
                size = sum(p.grad.square().sum() for p in model.parameters())
                optimizer.param_groups[0]["lr"] = 1 / (1 + float(size))

        with testing.registered(RateOfTheData):
            found = delete_one(plan("rate-of-the-data", steps=2))
        assert any("optimizer after step" in fault or "parameters after step" in fault for fault in found)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (dict(lr="fast"), "lr"),
        (dict(lr=0.1, auto_ratio=2.5), "auto_ratio does nothing without lr='auto'"),
        (dict(auto_ratio=-1.0), "auto_ratio"),
        (dict(lr_schedule="up"), "lr_schedule"),
        (dict(lr_warmup=-1), "lr_warmup"),
    ],
)
def test_wrong_rates_are_refused(params, says):
    with pytest.raises(ConfigurationError, match=says):
        plan("dp-sgd", params)


def test_noise_without_a_limit_has_no_rule():
    with pytest.raises(ConfigurationError, match="no rule for bc_floor=0"):
        trainer(plan("dp-adambc", dict(bc_floor=0.0)))
