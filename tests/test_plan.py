"""A plan: validated, frozen, and the one place that claims differential privacy."""

import dataclasses
import math
import re

import pytest
import torch

import fodp
from fodp import accounting
from fodp.accounting import Event, Phase, described
from fodp.gradients import limits
from fodp.methods import METHODS
from fodp.support import checks

PAPER = dict(
    sampling_rate=0.04,
    steps=6250,
    lot_size=200,
    clip_norm=1.0,
    noise_multiplier=1.1,
    delta=1e-5,
    accountant="rdp",
)


def plan(**changes):
    return fodp.Plan(**{**PAPER, "method": "fo-dp-sgd", **changes})


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(sampling_rate=0.0), "sampling_rate"),
        (dict(sampling_rate=1.5), "sampling_rate"),
        (dict(sampling_rate="0.04"), "sampling_rate"),
        (dict(steps=0), "steps"),
        (dict(steps=10.5), "steps"),
        (dict(lot_size=0), "lot_size"),
        (dict(clip_norm=0.0), "clip_norm"),
        (dict(clip_norm=float("inf")), "clip_norm"),
        (dict(noise_multiplier=0.0), "noise_multiplier"),
        (dict(noise_multiplier=float("nan")), "noise_multiplier"),
        (dict(noise_multiplier=None), "noise_multiplier"),
        (dict(delta=0.0), "delta"),
        (dict(delta=1.0), "delta"),
        (dict(method="sgd"), "method must be one of"),
        (dict(accountant="moments"), "accountant must be one of"),
        (dict(params=dict(betta=0.9)), "no parameter 'betta'; it knows"),
        (dict(params=dict(beta=0.0)), "beta"),
        (dict(params=dict(beta=1.01)), "beta"),
        (dict(params=dict(window=0)), "window"),
        (dict(params=dict(lr=-1)), "lr"),
        (dict(params=[("beta", 0.9)]), "params must be a mapping"),
        (dict(seed=-1), "seed"),
    ],
)
def test_bad_numbers_are_refused_by_name(changes, message):
    with pytest.raises(fodp.PrivacyError, match=message):
        plan(**changes)


@pytest.mark.rule(14)
def test_a_missing_sigma_or_unknown_field_is_refused():
    with pytest.raises(fodp.ConfigurationError, match="noise_multiplier is missing"):
        fodp.Plan(**{k: v for k, v in PAPER.items() if k != "noise_multiplier"})
    with pytest.raises(fodp.ConfigurationError, match="a plan has no field 'sygma'; it knows"):
        plan(sygma=1.0)
    with pytest.raises(fodp.ConfigurationError, match="a plan has no field 'sigma': here it is noise_multiplier"):
        plan(sigma=1.0)


@pytest.mark.rule(14)
@pytest.mark.parametrize("make", [fodp.Plan, lambda **public: fodp.Plan.calibrated(target_epsilon=1.0, **public)])
def test_a_parameter_of_the_method_beside_the_plans_own_is_sent_to_params(make):
    public = {name: value for name, value in PAPER.items() if name != "noise_multiplier"}
    with pytest.raises(fodp.ConfigurationError, match=r"put it into params, params=dict\(lr=1\)"):
        make(lr=1, **public)


def test_a_plan_shows_what_was_chosen():
    chosen = plan(params=dict(beta=0.8), seed=3)
    assert eval(repr(chosen), {"Plan": fodp.Plan}) == chosen
    assert "alpha" not in repr(chosen)


@pytest.mark.rule(1)
def test_public_numbers_are_declared_and_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().sampling_rate = 0.1
    with pytest.raises(fodp.ConfigurationError, match="lot_size is missing"):
        fodp.Plan(**{k: v for k, v in PAPER.items() if k != "lot_size"})


def test_every_parameter_is_recorded_defaults_included():
    recorded = plan(params=dict(beta=0.8)).params
    assert recorded["beta"] == 0.8
    assert {"alpha", "window", "lam", "tau", "gamma", "kappa", "zeta", "eps", "lr"} <= set(recorded)


def test_to_dict_makes_the_same_plan():
    original = plan(params=dict(beta=0.8), seed=3)
    assert fodp.Plan(**original.to_dict()) == original


@pytest.mark.rule(6)
def test_fo_is_accounted_with_sigma_over_beta():
    assert plan(params=dict(beta=0.9)).events() == (Phase((Event(0.04, 1.1 / 0.9),), 6250),)
    assert plan(params=dict(beta=0.9)).epsilon() == pytest.approx(18.70, rel=0.004)
    assert plan(method="dp-sgd").epsilon() == pytest.approx(22.64, rel=0.004)


@pytest.mark.rule(10)
def test_reading_changes_nothing_and_is_never_negative():
    huge = plan(noise_multiplier=1e5, steps=1)
    before = huge.to_dict()
    assert huge.epsilon() >= 0
    assert huge.epsilon() == huge.epsilon()
    assert huge.to_dict() == before


def test_a_schedule_of_beta_gives_phases():
    scheduled = plan(params=dict(beta=((0, 1.0), (1000, 0.8)), window=8), steps=3000)
    assert scheduled.events() == (Phase((Event(0.04, 1.1),), 1000), Phase((Event(0.04, 1.1 / 0.8),), 2000))
    assert scheduled.events_at(999) == (Event(0.04, 1.1),)
    assert scheduled.events_at(1000) == (Event(0.04, 1.1 / 0.8),)
    by_phases = fodp.epsilon(
        noise_multiplier=1.1,
        sampling_rate=0.04,
        steps=[1000, 2000],
        delta=1e-5,
        beta=[1.0, 0.8],
        accountant="rdp",
    )
    assert scheduled.epsilon() == pytest.approx(by_phases)


@pytest.mark.parametrize("schedule", [((5, 0.9),), (), ((0, 0.9), (0, 0.8)), ((0, 2.0),), "often"])
def test_a_wrong_schedule_is_refused(schedule):
    with pytest.raises(fodp.PrivacyError, match="beta"):
        plan(params=dict(beta=schedule))


def test_epsilon_of_a_prefix():
    assert plan().epsilon(steps=100) == pytest.approx(plan(steps=100).epsilon())
    assert plan().epsilon(steps=0) == 0


@pytest.mark.rule(10)
@pytest.mark.parametrize("method", ["dp-sgd", "fo-dp-sgd"])
@pytest.mark.parametrize("target", [1.0, 8.0])
def test_calibration_is_never_above_and_hardly_below(method, target):
    public = {k: v for k, v in PAPER.items() if k != "noise_multiplier"}
    calibrated = fodp.Plan.calibrated(target_epsilon=target, method=method, **public)
    assert 0.99 * target <= calibrated.epsilon() <= target


def test_calibration_moves_only_the_noise():
    public = {k: v for k, v in PAPER.items() if k != "noise_multiplier"}
    calibrated = fodp.Plan.calibrated(target_epsilon=3.0, method="dp-sgd", **public)
    again = fodp.Plan(**{**public, "method": "dp-sgd", "noise_multiplier": calibrated.noise_multiplier})
    assert again == calibrated


def test_calibration_refuses_contradictions():
    with pytest.raises(fodp.PrivacyError, match="not both"):
        fodp.Plan.calibrated(target_epsilon=3.0, **PAPER)
    public = {k: v for k, v in PAPER.items() if k != "noise_multiplier"}
    with pytest.raises(fodp.PrivacyError, match=r"steps is 6250, and epochs / sampling_rate is 75"):
        fodp.Plan.calibrated(target_epsilon=3.0, epochs=3, **public)
    with pytest.raises(fodp.PrivacyError, match="target_epsilon"):
        fodp.Plan.calibrated(target_epsilon=0, **public)


class TestLeastClipNorm:
    """Below it float32 has no digits left for the weight C/‖g‖, and a gradient may come out larger than C."""

    LARGEST = 1.8e19  # norms, of whose squares float32 still knows

    def test_smaller_ones_would_not_bound(self):
        assert limits(torch.tensor([1e15]), 1e-30).double().item() * 1e15 > 1.3e-30

    def test_it_does_bound(self):
        norms = torch.logspace(-20, math.log10(self.LARGEST), 5000)
        least = checks.LEAST_CLIP_NORM
        assert (limits(norms, least, most=1.0).double() * norms.double()).max() <= least * (1 + 2.5e-7)

    @pytest.mark.rule(14)
    @pytest.mark.parametrize("value", [1e-24, 9e-19, 1e31])
    def test_others_are_refused(self, value):
        for refused in (
            lambda: plan(clip_norm=value),
            lambda: plan(params=dict(quantile=0.5, clip_min=value)),
            lambda: fodp.GaussianMechanism(clip_norm=value, noise_multiplier=1.0),
        ):
            with pytest.raises(fodp.PrivacyError, match="between 1e-18 and 1e"):
                refused()


class TestStatement:
    def test_says_what_is_covered_and_what_is_not(self):
        small = plan(steps=100, accountant="pld")
        text = small.statement()
        assert f"({accounting.rounded_up(small.epsilon())}, 1e-05)-differentially private" in text
        for words in (
            "add or remove one example",
            "Poisson",
            "Not covered",
            "hyper-parameters",
            "Replacing one",
        ):
            assert words in text
        pair = accounting.epsilon_for_group(small.events(), small.delta, 2)
        assert accounting.rounded_up(pair) in text
        assert pair > small.epsilon()

    @pytest.mark.parametrize("noise", [0.83, 1.0, 1.17, 2.3, 4.1])
    def test_claims_no_less_than_is_true(self, noise):
        small = plan(steps=100, noise_multiplier=noise, accountant="pld", delta=1.2345678e-6)
        text = small.statement()
        truths = (
            small.epsilon(),
            accounting.epsilon_for_group(small.events(), small.delta, 2),
            accounting.epsilon_replace_one(small.events(), small.delta),
        )
        first = re.search(r"This run is \(([^,]+), ([^)]+)\)", text)
        shown = [float(first[1]), *(float(number) for number in re.findall(r"epsilon ([0-9.e+-]+) at", text))]
        assert len(shown) == len(truths)
        assert all(true <= said <= 1.001 * true for said, true in zip(shown, truths, strict=True))
        assert small.delta <= float(first[2]) <= 1.00001 * small.delta

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_names_the_rates_that_are_accounted(self, method):
        small = plan(steps=300, method=method, params={})
        text = small.statement()
        rates = {event.sampling_rate for phase in small.events() for event in phase.events}
        assert all(f" {accounting.rounded_up(rate, 6)} (" in text for rate in rates)
        assert f"{small.sampling_rate:g} (" not in text or small.sampling_rate in rates

    def test_sums_many_rates_up(self):
        phases = [Phase((Event(rate / 100, 1.0),), 2) for rate in range(1, 8)]
        assert described.rates(phases) == "probabilities from 0.01 to 0.07 (14 lots)"

    @pytest.mark.rule(13)
    def test_names_a_seeded_run_as_research(self):
        assert "SEEDED" in plan(steps=100, seed=7).statement()
        assert "secure" in plan(steps=100).statement()
