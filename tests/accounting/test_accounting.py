"""Accounting against numerical integration, closed forms and dp-accounting itself; calibration never overshoots."""

import math
import subprocess
import sys
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize
from scipy.special import comb, log_ndtr, ndtr

from fodp.accounting import (
    ACCOUNTANTS,
    Event,
    Phase,
    calibrate,
    calibrate_scale,
    epsilon,
    epsilon_curve,
    epsilon_for_group,
    epsilon_of,
    epsilon_replace_one,
    joint,
    loss_distributions,
    rdp_curve,
    rounded_up,
    truncate,
)
from fodp.accounting import releases as release_rounding
from fodp.errors import PrivacyError

PAPER = {"sampling_rate": 0.04, "steps": 6250, "delta": 1e-5}
BETAS = (1.0, 0.95, 0.9, 0.8, 0.65)
PAPER_PHASES = (Phase((Event(0.04, 1.1),), 6250),)


def one_phase(rate: float, noise: float, steps: int = 1) -> tuple[Phase, ...]:
    return (Phase((Event(rate, noise),), steps),)


def plain_delta(upper, lower, epsilon, low=-40.0, high=40.0):
    """∫ (upper - e^ε lower)₊ on a fine grid: slow, simple, and nobody else's code."""
    x = np.linspace(low, high, 400_001)
    return float(np.trapezoid(np.maximum(upper(x) - np.exp(epsilon) * lower(x), 0.0), x))


def normal(mean, noise):
    return lambda x: np.exp(-(((x - mean) / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi))


def mixture(weights, means, noise):
    return lambda x: sum(w * normal(m, noise)(x) for w, m in zip(weights, means, strict=True))


def plain_epsilon(upper, lower, delta):
    return optimize.brentq(lambda e: plain_delta(upper, lower, e) - delta, 0.0, 60.0, xtol=1e-9)


class TestReferenceValues:
    @pytest.mark.parametrize(
        ("accountant", "values", "above"),
        [
            ("rdp", (22.64, 20.59, 18.70, 15.35, 11.16), 0.003),
            ("rdp-classic", (23.90, 21.80, 19.86, 16.39, 12.06), 0.003),
            ("pld", (21.14, 19.22, 17.45, 14.30, 10.39), 0.001),
        ],
    )
    def test_the_papers_run_at_every_beta(self, accountant, values, above):
        below = 0.001 if accountant != "pld" else 0.002
        for beta, value in zip(BETAS, values, strict=True):
            found = epsilon(noise_multiplier=1.1, beta=beta, accountant=accountant, **PAPER)
            assert value * (1 - below) <= found <= value * (1 + above)

    def test_accountants_rank_from_tight_to_loose(self):
        pld, rdp, classic = (epsilon_of(PAPER_PHASES, 1e-5, name) for name in ACCOUNTANTS)
        assert pld < rdp < classic

    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_the_twin_costs_the_same_at_sigma_over_beta(self, accountant):
        fractional = epsilon(noise_multiplier=1.1, beta=0.8, accountant=accountant, **PAPER)
        plain = epsilon(noise_multiplier=1.1 / 0.8, accountant=accountant, **PAPER)
        assert fractional == plain

    @pytest.mark.rule(6)
    def test_accounting_the_wrong_noise_would_show(self):
        right = epsilon(noise_multiplier=1.1, beta=0.9, **PAPER)
        assert epsilon(noise_multiplier=1.1, **PAPER) > 1.15 * right  # σ: forgets β
        assert epsilon(noise_multiplier=1.1 / 0.9, beta=0.9, **PAPER) < 0.9 * right  # σ/β²: counts β twice
        assert epsilon(noise_multiplier=1.1 * 0.9, **PAPER) > 1.3 * right  # σβ: upside down


class TestAgainstIntegration:
    @pytest.mark.parametrize(("rate", "noise"), [(0.04, 1.1), (0.5, 3.0), (0.001, 0.7)])
    def test_renyi_divergence_at_whole_orders_is_the_binomial_sum(self, rate, noise):
        orders, rdp = rdp_curve(one_phase(rate, noise))
        for order in (2, 3, 7, 20):
            terms = [
                comb(order, i) * rate**i * (1 - rate) ** (order - i) * math.exp((i * i - i) / (2 * noise**2))
                for i in range(order + 1)
            ]
            expected = math.log(math.fsum(terms)) / (order - 1)
            found = rdp[orders == order][0]
            assert found == pytest.approx(expected, rel=1e-7)
            assert found >= expected * (1 - 1e-12)

    @pytest.mark.parametrize(("rate", "noise"), [(0.04, 1.1), (0.3, 2.0)])
    def test_renyi_divergence_at_fractional_orders_is_the_integral(self, rate, noise):
        orders, rdp = rdp_curve(one_phase(rate, noise))
        for order in (1.1, 1.5, 2.2, 2.5, 4.5, 8.3):

            def integrand(x, order=order):
                ratio = math.log1p(rate * math.expm1((x - 0.5) / noise**2))
                return math.exp(order * ratio - (x / noise) ** 2 / 2) / (noise * math.sqrt(2 * math.pi))

            moment, _ = integrate.quad(integrand, -15 * noise, 15 * noise + order, points=[0, order], limit=500)
            expected = math.log(moment) / (order - 1)
            found = rdp[np.isclose(orders, order)][0]
            assert expected * (1 - 1e-9) <= found <= expected * (1 + 1e-8)

    @pytest.mark.parametrize(("rate", "noise"), [(0.3, 1.0), (0.05, 0.6), (0.9, 2.0)])
    def test_one_release_by_privacy_loss(self, rate, noise):
        lot, empty = mixture((1 - rate, rate), (0, 1), noise), normal(0, noise)
        exact = max(plain_epsilon(lot, empty, 1e-3), plain_epsilon(empty, lot, 1e-3))
        found = epsilon_of(one_phase(rate, noise), 1e-3)
        assert exact * (1 - 1e-6) <= found <= exact * (1 + 1e-3)

    def test_two_different_releases_by_privacy_loss(self):
        # δ(ε) of a composition is the mean over the first outcome of the second's δ at what is left of ε.
        (q1, z1), (q2, z2) = (0.3, 1.0), (0.2, 1.4)

        def second(e):  # (1-q)N(0)+qN(1) against N(0), in closed form for every real ε
            inside = (math.exp(e) - 1 + q2) / q2
            if inside <= 0:
                return 1 - math.exp(e)
            x = z2**2 * math.log(inside) + 0.5
            upper = (1 - q2) * ndtr(-x / z2) + q2 * ndtr((1 - x) / z2)
            return upper - math.exp(e + log_ndtr(-x / z2))

        def delta(e):
            def over(x):
                loss = math.log1p(q1 * math.expm1((x - 0.5) / z1**2))
                return mixture((1 - q1, q1), (0, 1), z1)(x) * second(e - loss)

            return integrate.quad(over, -12, 13, limit=400)[0]

        exact = optimize.brentq(lambda e: delta(e) - 1e-4, 0.0, 20.0, xtol=1e-7)
        found = epsilon_of((*one_phase(q1, z1), *one_phase(q2, z2)), 1e-4)
        assert exact * (1 - 1e-5) <= found <= exact * (1 + 1e-3)

    @pytest.mark.parametrize(("noise", "steps", "delta"), [(1.0, 1, 1e-5), (30.0, 500, 1e-5), (50.0, 20, 1e-2)])
    def test_full_batches_are_the_gaussian_mechanism(self, noise, steps, delta):
        exact = dp_accounting.get_epsilon_gaussian(noise / math.sqrt(steps), delta)
        found = epsilon_of(one_phase(1.0, noise, steps), delta)
        assert exact * (1 - 1e-9) <= found <= exact * 1.001 + 1e-6
        assert epsilon_of(one_phase(1.0, noise, steps), delta, "rdp") >= exact

    def test_the_grid_is_as_good_as_a_much_finer_one(self):
        for rate, noise, steps in ((0.01, 0.8, 1000), (0.2, 5.0, 300)):
            fine = privacy_loss_distribution.from_gaussian_mechanism(
                noise, sampling_prob=rate, value_discretization_interval=1e-4
            )
            exact = fine.self_compose(steps).get_epsilon_for_delta(1e-5)
            assert epsilon_of(one_phase(rate, noise, steps), 1e-5) == pytest.approx(exact, rel=1e-3)


class TestNeverTooLow:
    @pytest.mark.rule(10)
    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_epsilon_is_never_negative_and_zero_without_steps(self, accountant):
        assert epsilon_of((), 1e-5, accountant) == 0.0
        assert epsilon_of(one_phase(0.04, 1.1, 0), 1e-5, accountant) == 0.0
        for noise in (1e4, 1e12, 1e300):
            for delta in (1e-5, 0.5, 0.999):
                assert 0 <= epsilon_of(one_phase(0.04, noise, 10), delta, accountant) < 0.01

    @pytest.mark.rule(10)
    def test_tiny_delta_is_not_lost_in_the_noise_of_the_fourier_transform(self):
        # Nearly full batches, so the closed form is (almost) exact, but sent through the transform.
        almost = one_phase(1 - 1e-13, 100.0, 10_000)
        library = privacy_loss_distribution.from_gaussian_mechanism(100.0, value_discretization_interval=1.5e-4)
        library = library.self_compose(10_000)
        understated = 0
        for delta in (1e-5, 1e-9, 5e-11, 1e-12, 1e-13, 2e-15, 1e-300):
            exact = dp_accounting.get_epsilon_gaussian(1.0, delta)
            assert exact * (1 - 1e-9) <= epsilon_of(almost, delta) <= 1.1 * exact
            understated += library.get_epsilon_for_delta(delta) < exact * (1 - 1e-4)
        assert understated > 0  # the fault is real: without our margin this test would fail

    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_hopelessly_little_noise_costs_infinitely_or_enormously_much(self, accountant):
        assert epsilon_of(one_phase(0.04, 1e-5), 1e-5, accountant) > 1e6
        assert epsilon_of(one_phase(0.04, 1e-200), 1e-5, accountant) == math.inf
        assert epsilon_of(one_phase(1.0, 1e-200), 1e-5, accountant) == math.inf

    def test_many_steps_stay_quick_and_no_looser_than_renyi(self):
        many = one_phase(0.04, 300.0, 2 * 10**6 + 1)
        start = time.process_time()
        assert 0 < epsilon_of(many, 1e-5) <= epsilon_of(many, 1e-5, "rdp")
        assert epsilon_of(one_phase(0.04, 1.0, 10**8), 1e-5) <= epsilon_of(one_phase(0.04, 1.0, 10**8), 1e-5, "rdp")
        assert time.process_time() - start < 60


class TestMonotonicity:
    NOISE = st.floats(0.4, 50).map(lambda x: round(x, 2))
    RATE = st.floats(0.001, 0.5).map(lambda x: round(x, 3))
    STEPS = st.integers(1, 5000)

    @pytest.mark.rule(10)
    @settings(max_examples=8)
    @given(noise=NOISE, rate=RATE, steps=STEPS, factor=st.floats(1.05, 3), name=st.sampled_from(ACCOUNTANTS[1:]))
    def test_more_noise_fewer_steps_lower_rate_or_smaller_beta_never_cost_more(self, noise, rate, steps, factor, name):
        def cost(**changed):
            arguments = {"noise_multiplier": noise, "sampling_rate": rate, "steps": steps, **changed}
            return epsilon(**arguments, delta=1e-5, accountant=name)

        here = cost()
        assert cost(noise_multiplier=noise * factor) <= here
        assert cost(steps=math.ceil(steps * factor)) >= here
        assert cost(sampling_rate=min(1.0, rate * factor)) >= here
        assert cost(beta=1 / factor) <= here

    def test_the_same_by_privacy_loss(self):
        base = {"noise_multiplier": 2.0, "sampling_rate": 0.05, "steps": 500, "delta": 1e-5}
        here = epsilon(**base)
        assert epsilon(**base | {"noise_multiplier": 2.05}) < here
        assert epsilon(**base | {"steps": 505}) > here
        assert epsilon(**base | {"sampling_rate": 0.051}) > here
        assert epsilon(**base, beta=0.98) < here
        assert epsilon(**base | {"delta": 2e-5}) < here


class TestPhases:
    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_a_split_run_costs_what_the_whole_costs(self, accountant):
        whole = epsilon_of(one_phase(0.04, 2.0, 600), 1e-5, accountant)
        parts = (*one_phase(0.04, 2.0, 100), *one_phase(0.04, 2.0, 0), *one_phase(0.04, 2.0, 500))
        assert epsilon_of(parts, 1e-5, accountant) == whole
        two_lots = (Phase((Event(0.04, 2.0), Event(0.04, 2.0)), 300),)
        assert epsilon_of(two_lots, 1e-5, accountant) == whole

    def test_sequences_are_phases_and_numbers_are_repeated(self):
        found = epsilon(
            noise_multiplier=(1.2, 2.0),
            sampling_rate=0.02,
            steps=[300, 100],
            beta=(0.8, 1),
            delta=1e-5,
            accountant="rdp",
        )
        phases = (*one_phase(0.02, 1.2 / 0.8, 300), *one_phase(0.02, 2.0, 100))
        assert found == epsilon_of(phases, 1e-5, "rdp")

    def test_renyi_values_of_runs_add_up(self):
        first, second = one_phase(0.02, 1.5, 300), one_phase(0.1, 4.0, 50)
        orders, both = rdp_curve((*first, *second))
        assert both == pytest.approx(rdp_curve(first)[1] + rdp_curve(second)[1], rel=1e-12)
        assert np.all(np.diff(orders) > 0)
        assert np.all(np.diff(both) >= 0)
        both[:] = 0  # the caller's own copy
        assert rdp_curve((*first, *second))[1].min() > 0

    def test_truncate_gives_the_prefix(self):
        phases = (*one_phase(0.1, 1.0, 3), *one_phase(0.2, 2.0, 4))
        assert truncate(phases, 0) == ()
        assert truncate(phases, 2) == one_phase(0.1, 1.0, 2)
        assert truncate(phases, 5) == (*one_phase(0.1, 1.0, 3), *one_phase(0.2, 2.0, 2))
        assert truncate(phases, 7) == phases
        with pytest.raises(PrivacyError, match="more than the 7 steps"):
            truncate(phases, 8)

    @pytest.mark.rule(7)
    def test_joint_releases_of_one_lot(self):
        assert joint(1.5) == pytest.approx(1.5)
        assert joint(2.0, 2.0) == pytest.approx(math.sqrt(2))
        assert joint(1.0, 1e9) == pytest.approx(1.0)
        assert joint(1.5, math.inf) == pytest.approx(1.5)  # a query that no record can change costs nothing
        assert joint(math.inf) == math.inf
        as_one = epsilon_of(one_phase(0.05, joint(2.0, 2.0), 200), 1e-5)
        as_two = epsilon_of((Phase((Event(0.05, 2.0), Event(0.05, 2.0)), 200),), 1e-5)
        assert as_one > 1.05 * as_two  # counting two releases of one lot as two events under-counts

    def test_a_schedule_with_a_different_event_every_step(self, monkeypatch):
        schedule = [Phase((Event(0.04, 1.5 + step / 100),), 10) for step in range(40)]
        exact = epsilon_of(schedule, 1e-5, "rdp")
        monkeypatch.setattr(release_rounding, "MAX_DISTINCT", 16)
        rounded = epsilon_of(schedule, 1e-5, "rdp")
        assert exact < rounded < 1.05 * exact
        curve = epsilon_curve(schedule, 1e-5, "rdp", (205, 400))
        assert curve[0] >= epsilon_of(truncate(schedule, 205), 1e-5, "rdp")
        assert curve[1] == pytest.approx(rounded)

    def test_rounding_only_ever_raises_the_cost(self):
        releases = [(0.01 + step / 3000, 1.0 + step / 700) for step in range(700)]
        rounded = release_rounding.rounding(releases)
        assert len(set(rounded.values())) <= release_rounding.MAX_DISTINCT
        assert all(q <= to_q <= q * 1.1 and z / 1.1 <= to_z <= z for (q, z), (to_q, to_z) in rounded.items())
        few = release_rounding.rounding(releases[:50])
        assert all(few[release] == release for release in releases[:50])


class TestCurve:
    POINTS = (0, 1, 10, 10, 500, 625, 1250)

    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_each_point_is_the_epsilon_of_that_prefix(self, accountant):
        two = Phase((Event(0.04, 2.0), Event(0.02, 1.5)), 250)
        phases = (*one_phase(0.04, 1.1, 600), two, *one_phase(1.0, 90.0, 400))
        curve = epsilon_curve(phases, 1e-5, accountant, self.POINTS)
        assert len(curve) == len(self.POINTS)
        for point, value in zip(self.POINTS, curve, strict=True):
            alone = epsilon_of(truncate(phases, point), 1e-5, accountant)
            assert value == pytest.approx(alone, rel=1e-3)
            assert value >= alone * (1 - 1e-4)  # two grids, both upper bounds
        assert curve[-1] == pytest.approx(epsilon_of(phases, 1e-5, accountant), rel=1e-8)
        assert curve == sorted(curve)

    @pytest.mark.rule(10)
    def test_one_phase_is_the_same_to_float_noise(self):
        points = range(250, 6251, 500)
        curve = epsilon_curve(PAPER_PHASES, 1e-5, "pld", points)
        for point, value in zip(points, curve, strict=True):
            assert value == pytest.approx(epsilon_of(truncate(PAPER_PHASES, point), 1e-5), rel=1e-6)

    def test_refusals(self):
        assert epsilon_curve(PAPER_PHASES, 1e-5, "rdp", ()) == []
        with pytest.raises(PrivacyError, match="must not decrease, got 5 after 9"):
            epsilon_curve(PAPER_PHASES, 1e-5, "rdp", (9, 5))
        with pytest.raises(PrivacyError, match="more than the 6250 steps"):
            epsilon_curve(PAPER_PHASES, 1e-5, "rdp", (6251,))
        with pytest.raises(PrivacyError, match="whole number"):
            epsilon_curve(PAPER_PHASES, 1e-5, "rdp", (1.5,))


class TestCalibrate:
    @pytest.mark.rule(10)
    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    @pytest.mark.parametrize(
        ("target", "rate", "steps", "delta", "beta"),
        [
            (8, 0.04, 6250, 1e-5, 0.9),
            (0.5, 0.01, 1000, 1e-6, 1.0),
            (3, 1.0, 50, 1e-5, 0.65),
            (60, 0.04, 100, 1e-5, 1.0),
            (2.0, (0.1, 0.02), (10, 500), 1e-5, (1.0, 0.8)),
        ],
    )
    def test_meets_the_target_from_below_within_a_percent(self, accountant, target, rate, steps, delta, beta):
        public = {"sampling_rate": rate, "steps": steps, "delta": delta, "beta": beta, "accountant": accountant}
        noise = calibrate(target_epsilon=target, **public)
        assert 0.99 * target <= epsilon(noise_multiplier=noise, **public) <= target

    @pytest.mark.rule(10)
    @settings(max_examples=5)
    @given(target=st.floats(0.05, 50), steps=st.integers(1, 3000), beta=st.floats(0.3, 1))
    def test_meets_any_target(self, target, steps, beta):
        public = {"sampling_rate": 0.05, "steps": steps, "delta": 1e-5, "beta": beta, "accountant": "rdp"}
        noise = calibrate(target_epsilon=target, **public)
        assert 0.99 * target <= epsilon(noise_multiplier=noise, **public) <= target

    def test_beta_scales_the_noise(self):
        plain = calibrate(target_epsilon=4, sampling_rate=0.04, steps=500, delta=1e-5)
        fractional = calibrate(target_epsilon=4, sampling_rate=0.04, steps=500, delta=1e-5, beta=0.5)
        assert fractional == pytest.approx(plain / 2, rel=0.01)

    def test_fixed_releases_beside_the_calibrated_one(self):
        def phases_at(noise):
            return (Phase((Event(0.05, noise), Event(0.05, 3.0)), 300),)

        fixed = epsilon_of(one_phase(0.05, 3.0, 300), 1e-5)
        noise = calibrate_scale(phases_at, 2 * fixed, 1e-5)
        assert 0.99 * 2 * fixed <= epsilon_of(phases_at(noise), 1e-5) <= 2 * fixed
        with pytest.raises(PrivacyError, match="cannot be met: at noise 1e"):
            calibrate_scale(phases_at, 0.99 * fixed, 1e-5)

    def test_refuses_what_needs_no_noise(self):
        with pytest.raises(PrivacyError, match="nothing to calibrate"):
            calibrate(target_epsilon=1, sampling_rate=0.04, steps=0, delta=1e-5)
        with pytest.raises(PrivacyError, match="target_epsilon must be above 0"):
            calibrate(target_epsilon=0, sampling_rate=0.04, steps=10, delta=1e-5)
        with pytest.raises(PrivacyError, match="rdp-classic"):  # its orders end, so it cannot go this low
            calibrate(target_epsilon=1e-3, sampling_rate=0.04, steps=10, delta=1e-5, accountant="rdp-classic")

    @pytest.mark.rule(10)
    def test_reading_changes_nothing(self):
        before = [epsilon_of(PAPER_PHASES, 1e-5, name) for name in ACCOUNTANTS]
        epsilon_curve(PAPER_PHASES, 1e-5, "pld", (10, 100))
        epsilon_for_group(PAPER_PHASES, 1e-5, 2)
        assert before == [epsilon_of(PAPER_PHASES, 1e-5, name) for name in ACCOUNTANTS]


class TestGroups:
    def test_one_record_is_add_or_remove(self):
        assert epsilon_for_group(PAPER_PHASES, 1e-5, 1) == epsilon_of(PAPER_PHASES, 1e-5)
        library = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            1.1, [0, 1], [0.96, 0.04], value_discretization_interval=2e-3
        )
        single = library.self_compose(6250).get_epsilon_for_delta(1e-5)
        assert single == pytest.approx(epsilon_of(PAPER_PHASES, 1e-5), rel=1e-3)

    def test_epsilon_grows_with_the_number_of_records(self):
        phases = one_phase(0.02, 4.0, 500)
        values = [epsilon_for_group(phases, 1e-5, k) for k in (1, 2, 3, 6)]
        assert values == sorted(values)
        assert 2 * values[0] < values[1] < 2.5 * values[0]

    def test_full_batches_scale_the_sensitivity(self):
        phases = one_phase(1.0, 10.0, 9)
        assert epsilon_for_group(phases, 1e-5, 3) == pytest.approx(epsilon_of(one_phase(1.0, 10.0, 81), 1e-5), rel=1e-3)

    @pytest.mark.parametrize(("rate", "noise", "k"), [(0.3, 1.0, 2), (0.1, 1.5, 4)])
    def test_one_release_is_the_binomial_mixture(self, rate, noise, k):
        weights = [comb(k, j) * rate**j * (1 - rate) ** (k - j) for j in range(k + 1)]
        present, absent = mixture(weights, range(k + 1), noise), normal(0, noise)
        exact = max(plain_epsilon(present, absent, 1e-3), plain_epsilon(absent, present, 1e-3))
        assert exact * (1 - 1e-6) <= epsilon_for_group(one_phase(rate, noise), 1e-3, k) <= exact * (1 + 1e-3)

    def test_agrees_with_dp_accounting(self):
        weights = [0.9**3, 3 * 0.1 * 0.81, 3 * 0.01 * 0.9, 0.001]
        library = privacy_loss_distribution.from_mixture_gaussian_mechanism(
            2.0, range(4), weights, value_discretization_interval=5e-3
        )
        found = epsilon_for_group(one_phase(0.1, 2.0, 100), 1e-5, 3)
        assert found == pytest.approx(library.self_compose(100).get_epsilon_for_delta(1e-5), rel=1e-3)

    def test_the_bound_for_tiny_delta_is_an_upper_bound(self):
        tight = loss_distributions.LossAccountant({(0.02, 4.0): 500}, records=2)
        tight.add(0.02, 4.0, 500)
        assert tight._fallback(1e-5) > tight.epsilon(1e-5)
        assert epsilon_for_group(one_phase(0.02, 4.0, 500), 1e-100, 2) > tight._fallback(1e-5)


def plane_delta(upper, lower, epsilon, noise):
    """∫∫ (upper - e^ε lower)₊ for mixtures of normals in the plane, each a list of (weight, mean)."""
    side = np.linspace(-8 * noise - 3, 8 * noise + 3, 501)
    x, y = np.meshgrid(side, side)

    def density(parts):
        return sum(w * normal(mean[0], noise)(x) * normal(mean[1], noise)(y) for w, mean in parts)

    cell = (side[1] - side[0]) ** 2
    return float(np.maximum(density(upper) - math.exp(epsilon) * density(lower), 0.0).sum() * cell)


def short_vector(rng):
    direction = rng.normal(size=2)
    return direction / np.linalg.norm(direction) * rng.choice([1.0, rng.uniform()])


class TestWorstCase:
    """The pair behind each adjacency dominates every other choice of records, for positive and negative ε."""

    @pytest.mark.parametrize("seed", range(4))
    def test_replace_one(self, seed):
        rng = np.random.default_rng(seed)
        rate, noise = rng.uniform(0.05, 0.95), rng.uniform(0.5, 2)
        a, b = short_vector(rng), short_vector(rng)
        worst = mixture((1 - rate, rate), (0, -1), noise), mixture((1 - rate, rate), (0, 1), noise)
        for level in (-1.0, -0.1, 0.0, 0.2, 1.0):
            upper, lower = [(1 - rate, (0, 0)), (rate, a)], [(1 - rate, (0, 0)), (rate, b)]
            assert plane_delta(upper, lower, level, noise) <= plain_delta(*worst, level) + 1e-9

    @pytest.mark.parametrize("seed", range(4))
    def test_three_records_of_one_person(self, seed):
        rng = np.random.default_rng(100 + seed)
        rate, noise = rng.uniform(0.05, 0.95), rng.uniform(0.5, 2)
        records = [short_vector(rng) for _ in range(3)]
        subsets = [[records[i] for i in range(3) if mask >> i & 1] for mask in range(8)]
        present = [(rate ** len(s) * (1 - rate) ** (3 - len(s)), np.sum([(0, 0), *s], axis=0)) for s in subsets]
        worst = mixture([comb(3, j) * rate**j * (1 - rate) ** (3 - j) for j in range(4)], range(4), noise)
        for level in (-1.0, 0.0, 0.2, 1.0):
            leaves = plane_delta(present, [(1.0, (0, 0))], level, noise)
            joins = plane_delta([(1.0, (0, 0))], present, level, noise)
            assert leaves <= plain_delta(worst, normal(0, noise), level) + 1e-9
            assert joins <= plain_delta(normal(0, noise), worst, level) + 1e-9


class TestReplaceOne:
    @pytest.mark.parametrize(("rate", "noise"), [(0.3, 1.0), (0.05, 0.6), (1.0, 2.0)])
    def test_one_release(self, rate, noise):
        old, new = mixture((1 - rate, rate), (0, -1), noise), mixture((1 - rate, rate), (0, 1), noise)
        exact = plain_epsilon(old, new, 1e-3)
        assert exact * (1 - 1e-6) <= epsilon_replace_one(one_phase(rate, noise), 1e-3) <= exact * (1 + 1e-3)

    @pytest.mark.parametrize(("rate", "noise", "steps"), [(0.04, 1.1, 6250), (0.01, 0.6, 100), (1.0, 5.0, 10)])
    def test_costs_more_than_add_or_remove_and_less_than_both_in_turn(self, rate, noise, steps):
        phases = one_phase(rate, noise, steps)
        single, replace = epsilon_of(phases, 1e-5), epsilon_replace_one(phases, 1e-5)
        assert single <= replace
        in_turn = optimize.brentq(lambda e: epsilon_of(phases, 1e-5 / (1 + math.exp(e)), "rdp") - e, 0.1, 500)
        assert replace <= 2 * in_turn

    def test_the_bound_for_tiny_delta_is_an_upper_bound(self):
        tight = loss_distributions.LossAccountant({(0.02, 4.0): 500}, replace=True)
        tight.add(0.02, 4.0, 500)
        assert tight._fallback(1e-5) > tight.epsilon(1e-5)
        assert math.isfinite(epsilon_replace_one(one_phase(0.02, 4.0, 500), 1e-100))


class TestRefusals:
    @pytest.mark.rule(14)
    @pytest.mark.parametrize("rate", [0, -0.1, 1.1, math.nan, "0.1", True])
    def test_event_rate(self, rate):
        with pytest.raises(PrivacyError, match="sampling_rate"):
            Event(rate, 1.0)

    @pytest.mark.rule(14)
    @pytest.mark.parametrize("noise", [0, -1, math.nan, math.inf, None, "1"])
    def test_event_noise(self, noise):
        with pytest.raises(PrivacyError, match="noise_multiplier"):
            Event(0.1, noise)

    @pytest.mark.rule(14)
    def test_phase(self):
        with pytest.raises(PrivacyError, match="tuple of Event"):
            Phase([Event(0.1, 1.0)], 1)
        with pytest.raises(PrivacyError, match="tuple of Event"):
            Phase((0.1, 1.0), 1)
        with pytest.raises(PrivacyError, match="events is empty"):
            Phase((), 1)
        for steps in (-1, 1.5, True):
            with pytest.raises(PrivacyError, match="steps must be a whole number"):
                Phase((Event(0.1, 1.0),), steps)

    @pytest.mark.rule(14)
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"delta": 0}, "delta must lie strictly between 0 and 1"),
            ({"delta": 1}, "delta must lie"),
            ({"accountant": "gdp"}, "accountant must be one of pld, rdp, rdp-classic"),
            ({"beta": 0}, "beta must lie in"),
            ({"beta": 1.5}, "beta must lie in"),
            ({"noise_multiplier": 0}, "noise_multiplier must be above 0"),
            ({"noise_multiplier": "1.1"}, "noise_multiplier must be a finite number"),
            ({"steps": 2.5}, "steps must be a whole number"),
            ({"steps": (1, 2), "beta": (1.0, 0.9, 0.8)}, "steps has 2, beta has 3"),
            ({"steps": ()}, "at least one: steps has 0"),
        ],
    )
    def test_epsilon(self, changed, message):
        arguments = {"noise_multiplier": 1.1, "sampling_rate": 0.04, "steps": 10, "delta": 1e-5}
        with pytest.raises(PrivacyError, match=message):
            epsilon(**arguments | changed)

    @pytest.mark.rule(14)
    def test_groups_and_joints(self):
        with pytest.raises(PrivacyError, match="k must be a whole number of at least 1"):
            epsilon_for_group(PAPER_PHASES, 1e-5, 0)
        with pytest.raises(PrivacyError, match="delta"):
            epsilon_replace_one(PAPER_PHASES, 0.0)
        with pytest.raises(PrivacyError, match="at least one"):
            joint()
        with pytest.raises(PrivacyError, match="above 0"):
            joint(1.0, 0.0)

    def test_events_are_values(self):
        assert Event(0.1, 2.0) == Event(0.1, 2)
        assert len({Event(0.1, 2.0), Event(0.1, 2.0), Event(0.1, 3.0)}) == 2
        with pytest.raises(AttributeError):
            Event(0.1, 2.0).noise_multiplier = 1.0


def test_importing_stays_quick():
    """The command line imports this for its help page: neither torch nor dp-accounting may come along."""
    code = "import sys, fodp.accounting; sys.exit(any(m in sys.modules for m in ('torch', 'dp_accounting', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestRoundingUp:
    @given(st.floats(1e-12, 1e12), st.integers(1, 8))
    def test_never_shows_less_than_the_value(self, value, digits):
        shown = float(rounded_up(value, digits))
        assert value <= shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)

    @pytest.mark.parametrize(
        ("value", "shown"),
        [(0.0, "0"), (0.1, "0.1"), (3.0, "3"), (1e-5, "1e-05"), (17.38001, "17.39"), (0.99991, "1"), (math.inf, "inf")],
    )
    def test_keeps_what_needs_no_rounding(self, value, shown):
        assert rounded_up(value) == shown
