"""rate_rule="transcript": releases that agree with the recent way beyond their noise raise the rate."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fodp import ConfigurationError, Plan, Trainer, testing
from fodp.clipping.maps import Kronecker, Side, share
from fodp.methods import METHODS
from fodp.options import rate_rules
from fodp.options.rate_rules import WIDEST, FollowedTranscript
from fodp.state import fitting
from fodp.step import Step
from methods_for_tests import delete_one, let_rate_rules_hear_clean_sums, network, plan, trainer, trajectory
from sessions_for_tests import private_columns

FOLLOWED = dict(rate_rule="transcript", shape="fan-in", width=4.0)
STEPS = 200
SIZES = (400, 5, 30)
DEVIATIONS = (0.1, 1.0, 0.5)  # of the noise in each parameter


def along(deviations):
    """Of noise that is the same in all numbers of a parameter."""
    return [lambda way, deviation=deviation: deviation * float(way.norm()) for deviation in deviations]


@pytest.fixture
def hears_all(monkeypatch):
    """The slightest agreement moves the rate, from the second step on: what leaks would be seen."""
    monkeypatch.setattr(rate_rules, "_UNHEARD", 0.0)
    monkeypatch.setattr(rate_rules, "_CHANCE", 0.0)


def transcript(signal=0.0, seed=0, steps=STEPS):
    """Iterates before each step, and releases, of plain steps: a steady direction in units of the noise, and noise."""
    generator = torch.Generator().manual_seed(seed)
    iterate = [torch.randn(size, generator=generator) for size in SIZES]
    for _ in range(steps):
        releases = [
            deviation * (torch.randn(size, generator=generator) + signal)
            for size, deviation in zip(SIZES, DEVIATIONS, strict=True)
        ]
        yield iterate, releases
        iterate = [x - 0.1 * release for x, release in zip(iterate, releases, strict=True)]


def factors(known, rule=None):
    rule = rule or FollowedTranscript(STEPS)
    return [rule.factor(iterate, releases, along(DEVIATIONS)) for iterate, releases in known]


def z_of(rule):
    return rule._votes / math.sqrt(rule._variance)


def test_the_same_transcript_gives_the_same_rates_also_from_a_saved_state():
    known = list(transcript(0.1))
    once = factors(known)
    assert once[:50] == [1.0] * 50
    assert len(set(once)) > 20
    assert once == factors(known)
    first, second = FollowedTranscript(STEPS), FollowedTranscript(STEPS)
    begun = factors(known[:120], first)
    second.load_state_dict(first.state_dict())
    factors(known[:7], first)  # what was saved is a copy
    assert begun + factors(known[120:], second) == once


def test_of_noise_alone_z_is_standard():
    """Mean 0 and variance 1 at any step, whatever the sizes of parameters and noises."""
    found = []
    for seed in range(150):
        factors(transcript(seed=seed, steps=60), rule := FollowedTranscript(60))
        found.append(z_of(rule))
    numbers = torch.tensor(found)
    assert abs(numbers.mean()) < 4 / math.sqrt(150)
    assert numbers.var().item() == pytest.approx(1, abs=0.5)
    # The measure is able to see a wrong deviation.
    halved = []
    for seed in range(50):
        rule = FollowedTranscript(60)
        for iterate, releases in transcript(seed=seed, steps=60):
            rule.factor(iterate, releases, along([deviation / 2 for deviation in DEVIATIONS]))
        halved.append(z_of(rule))
    assert torch.tensor(halved).var() > 1.5


def test_noise_that_a_map_has_mixed_is_known_too():
    """z is standard for the map's own deviation along each way, and is not for the mean over all ways."""
    generator = torch.Generator().manual_seed(1)
    skew = torch.diag(torch.tensor([4.0, 0.1, 0.1, 0.1, 0.1, 0.1])).double()
    basis = torch.linalg.qr(torch.randn(6, 6, generator=generator).double())[0]
    left = Side(torch.zeros((), dtype=torch.float64), basis, skew.diagonal())
    factor = Kronecker((6, 8), left, None, 0.5)
    found, mean = [], []
    for _ in range(200):
        right, wrong = FollowedTranscript(40), FollowedTranscript(40)
        x = torch.zeros(6, 8, dtype=torch.float64)
        for _ in range(40):
            release = 0.3 * factor(torch.randn(6, 8, generator=generator).double())
            right.factor([x], [release], [partial(fitting._along, 0.3, factor)])
            wrong.factor([x], [release], along([0.3 * math.sqrt(share(factor))]))
            x = x - release
        found.append(z_of(right))
        mean.append(z_of(wrong))
    assert abs(torch.tensor(found).mean()) < 4 / math.sqrt(200)
    assert torch.tensor(found).var().item() == pytest.approx(1, abs=0.45)
    assert torch.tensor(mean).var() > 2


def test_chance_and_the_first_quarter_leave_the_rate_alone():
    still = [factor == 1.0 for seed in range(20) for factor in factors(transcript(seed=seed))]
    assert sum(still) > 0.93 * len(still)
    assert factors(transcript(0.5))[: STEPS // 4] == [1.0] * (STEPS // 4)


def test_agreement_raises_the_rate_and_turning_back_lowers_it_within_bounds():
    assert factors(transcript(0.5))[-1] == WIDEST
    opposed = [(iterate, [-release for release in releases]) for iterate, releases in transcript(0.5)]
    assert factors(opposed)[-1] == 1 / WIDEST


def test_a_small_layer_is_heard_beside_a_large_one():
    """One number agrees, beside a hundred thousand of noise."""
    generator, rule = torch.Generator().manual_seed(0), FollowedTranscript(STEPS)
    iterate = [torch.zeros(100_000), torch.zeros(1)]
    for _ in range(STEPS):
        releases = [torch.randn(100_000, generator=generator), torch.randn(1, generator=generator) + 1.0]
        rule.factor(iterate, releases, along((1.0, 1.0)))
        iterate = [x - release for x, release in zip(iterate, releases, strict=True)]
    assert z_of(rule) > 3


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    "params",
    [
        {},
        dict(quantile=0.5),
        dict(update="adam"),
        dict(lr_schedule="linear", lr=0.2),
        dict(shape="kronecker", shape_sides="both", shape_every=7),
        dict(shape="transcript", shape_warmup=3, shape_memory=5.0),
        dict(shape="transcript", shape_warmup=3, shape_memory=5.0, shape_blocks="row"),
    ],
)
def test_every_rate_of_a_run_is_made_of_its_releases(params, hears_all):
    """Anybody who knows the weights, the releases and the plan can work out the rates."""
    given = {name: value for name, value in FOLLOWED.items() if "update" not in params or name == "rate_rule"}
    the_plan = plan("dp-sgd", {**given, **params}, steps=40)
    training = trainer(the_plan)
    rule, group = FollowedTranscript(40), training.optimizer.param_groups[0]
    parameters, seen = list(training.model.parameters()), []
    for step in range(40):
        before = [p.detach().clone() for p in parameters]
        training.take_step()
        std = math.sqrt(float(training.session.noise_variance()))
        deviations = [partial(through, std * matrix) for matrix in blocks(training.session)]
        # With a quantile the update gets C/C_t of the release.
        scaled = the_plan.clip_norm / float(training.session.adaptive_clip.used) if "quantile" in params else 1.0
        factor = rule.factor(before, [p.grad / scaled for p in parameters], deviations)
        seen.append(factor)
        factor *= the_plan.options.rate.at(step, 40)
        assert group["lr"] == pytest.approx(training.learning_rate * factor)
    assert len(set(seen)) > 10


CARRIED = [
    ("fo-dp-sgd", dict(window=3)),
    ("dp-sgd", dict(filter="momentum")),
    ("dp-sgd", dict(filter="doppler")),
    ("post-fm-dp-sgd", {}),
    ("disk", {}),
    ("dp-sam", {}),
    ("fo-noise", dict(bands=1)),
    ("dp-sgd", dict(quantile=0.5, filter="momentum")),
]


@pytest.mark.rule(12)
@pytest.mark.parametrize(("method", "params"), CARRIED)
def test_where_noise_of_earlier_steps_is_carried_on_what_is_fresh_is_heard(method, params, hears_all):
    """The rates are those of the releases before a memory or a filter."""
    the_plan = plan(method, {"rate_rule": "transcript", **params}, steps=30)
    training = trainer(the_plan)
    rule, released, seen = FollowedTranscript(30), [], []

    class Noted(Step):
        def release(self, query, std):
            found = super().release(query, std)
            released.append((found.clone(), std))
            return found

    training.session.steps_by(Noted)
    for _ in range(30):
        before = [p.detach().clone() for p in training.model.parameters()]
        training.take_step()
        fresh, std = released[-1]
        seen.append(rule.factor(before, training.source.layout.views(fresh), along([std] * len(before))))
        assert training.optimizer.param_groups[0]["lr"] == pytest.approx(training.learning_rate * seen[-1], rel=1e-5)
    assert len(set(seen)) > 8


@pytest.mark.parametrize(("method", "params"), CARRIED)
def test_without_a_signal_a_run_does_not_agree_with_itself(method, params, monkeypatch):
    """Losses linear in the weights, of records in pairs that cancel: the data's gradient is nothing at any weights, and
    lots differ from it by chance alone. What a lot did to the way is not heard again."""
    monkeypatch.setattr(rate_rules, "_CHANCE", math.inf)  # the rate stays, so that the votes are those of one rate
    rows = torch.randn(50, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(torch.cat([rows, -rows]))
    found = []
    for seed in range(10):
        torch.manual_seed(seed)
        the_plan = Plan(
            sampling_rate=0.2, steps=150, lot_size=20, clip_norm=1.0, noise_multiplier=0.3, delta=1e-5, seed=seed,
            method=method, params={"rate_rule": "transcript", "lr": 0.05, **params}, accountant="rdp",
        )  # fmt: skip
        training = Trainer(nn.Linear(8, 1, bias=False), lambda model, batch: model(batch[0])[:, 0], data, the_plan)
        training.fit()
        found.append(z_of(training.session.states["rate"]))
    z = torch.tensor(found)  # lots add their own chance to the variance, and nothing to the mean
    assert abs(z.mean()) < 3.5 * max(1.0, float(z.std())) / math.sqrt(len(found)), found


def through(matrix, way):
    return float((matrix @ way.flatten()).norm())


def blocks(session):
    """What noise went through on its way back, written out for each parameter."""
    for parameter in session.source.layout.parameters:
        eye = torch.eye(parameter.numel(), dtype=torch.float64).reshape(-1, *parameter.shape)
        factor = session.noise_factor(parameter)
        yield (factor(eye, 1) if isinstance(factor, Kronecker) else factor * eye).flatten(1)


@pytest.mark.rule(12)
@pytest.mark.parametrize("shape", ["fan-in", "kronecker", "transcript"])
def test_no_example_moves_the_rate_but_by_releases(shape, hears_all):
    assert delete_one(plan("dp-sgd", {**FOLLOWED, "shape": shape}, steps=8)) == []


@pytest.mark.rule(12)
@pytest.mark.parametrize(("method", "params"), [*CARRIED, *((name, {}) for name in METHODS if name != "fo-noise")])
def test_no_example_moves_the_rate_of_any_method_but_by_releases(method, params, hears_all):
    assert delete_one(plan(method, {"rate_rule": "transcript", **params}, steps=8)) == []


class TestWrongRule:
    """One that is given clean gradients in place of releases."""

    def test_it_is_caught(self, monkeypatch, hears_all):
        def clean(session, rule, fresh):
            model = network()
            model.load_state_dict(session.source.engine.model.state_dict())
            testing.problem.losses(model, private_columns(session.source)).sum().backward()
            parameters = list(model.parameters())
            return rule.factor(parameters, [p.grad for p in parameters], along([0.1] * len(parameters)))

        monkeypatch.setattr(fitting, "_followed", clean)
        found = delete_one(plan("dp-sgd", FOLLOWED, steps=8))
        assert any("optimizer after step" in fault or "parameters after step" in fault for fault in found)

    @pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
    def test_one_that_hears_the_sum_before_its_noise_is_caught(self, method, monkeypatch, hears_all):
        let_rate_rules_hear_clean_sums(monkeypatch)
        found = delete_one(plan(method, FOLLOWED, steps=8))
        assert any("optimizer after step" in fault or "parameters after step" in fault for fault in found)


@pytest.mark.parametrize(
    ("method", "params"), [("dp-sgd", {}), ("fo-dp-sgd", dict(window=3)), ("dp-sgd", dict(filter="momentum"))]
)
def test_it_goes_on_from_a_checkpoint(method, params, tmp_path, hears_all):
    the_plan = plan(method, {**FOLLOWED, **params}, steps=30)
    first = trainer(the_plan)
    trajectory(first, 15)
    assert first.optimizer.param_groups[0]["lr"] != first.learning_rate
    first.save(tmp_path / "c.pt")
    second = trainer(the_plan)
    second.resume(tmp_path / "c.pt")
    assert torch.equal(trajectory(first, 15), trajectory(second, 15))


def test_a_plan_records_it():
    assert plan("dp-sgd").params["rate_rule"] == "none"
    assert plan("dp-sgd", FOLLOWED).params["rate_rule"] == "transcript"


@pytest.mark.parametrize(
    ("method", "params", "says"),
    [
        ("dp-sgd", dict(rate_rule="up"), "rate_rule"),
        (
            "fo-noise",
            dict(rate_rule="transcript", bands=4),
            "fo-noise with 4 bands, whose noise is correlated, do not go together",
        ),
    ],
)
def test_what_it_does_not_understand_is_refused(method, params, says):
    with pytest.raises(ConfigurationError, match=says):
        plan(method, params)
