"""Corners where an ε could come out too small: against 40 digits, closed forms and dp-accounting's lower bounds."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from fodp.accounting import (
    ACCOUNTANTS,
    Event,
    Phase,
    RunningEpsilon,
    calibrate,
    epsilon_for_group,
    epsilon_of,
    epsilon_replace_one,
    truncate,
)
from fodp.accounting.budget import Repetitions
from fodp.accounting.loss_distributions import LossAccountant
from fodp.accounting.renyi import ORDERS, epsilon_from_rdp, release_rdp


def phases_of(*releases):
    return tuple(Phase((Event(rate, noise),), steps) for rate, noise, steps in releases)


def gaussian_delta(epsilon, shift):
    """δ of N(shift, 1) against N(0, 1), by Balle and Wang (2018)."""
    with mpmath.workdps(40):
        return mpmath.ncdf(shift / 2 - epsilon / shift) - mpmath.exp(epsilon) * mpmath.ncdf(
            -shift / 2 - epsilon / shift
        )


def one_release_delta(epsilon, upper, lower, noise):
    """δ of one release, the larger of both directions; the mixtures give weights by mean. The loss rises with x."""
    with mpmath.workdps(40):
        noise, bound = mpmath.mpf(noise), mpmath.exp(epsilon)

        def density(mixture, x):
            return sum(weight * mpmath.exp(mean * (x - mean / 2) / noise**2) for mean, weight in mixture.items())

        def mass(mixture, x, side):
            return sum(weight * mpmath.ncdf(side * (x - mean) / noise) for mean, weight in mixture.items())

        def excess(level, side, first, second):
            low, high = -30 * noise - 30, 30 * noise + 30
            for _ in range(140):
                middle = (low + high) / 2
                below = density(upper, middle) < mpmath.exp(level) * density(lower, middle)
                low, high = (middle, high) if below else (low, middle)
            return mass(first, low, side) - bound * mass(second, low, side)

        return max(excess(epsilon, -1, upper, lower), excess(-epsilon, 1, lower, upper))


def random_release(rng):
    rate = rng.choice([10 ** rng.uniform(-8, 0), 1 - 10 ** rng.uniform(-9, -0.5)])
    return float(rate), float(10 ** rng.uniform(-1, 2)), float(10 ** rng.uniform(-13, -0.5))


class TestOneRelease:
    @pytest.mark.rule(10)
    @pytest.mark.parametrize("seed", range(12))
    def test_no_epsilon_is_below_the_exact_one(self, seed):
        rate, noise, delta = random_release(np.random.default_rng(seed))
        q = mpmath.mpf(rate)
        phases = phases_of((rate, noise, 1))
        nothing, one = {mpmath.mpf(0): mpmath.mpf(1)}, {mpmath.mpf(0): 1 - q, mpmath.mpf(1): q}
        three = {mpmath.mpf(j): mpmath.binomial(3, j) * q**j * (1 - q) ** (3 - j) for j in range(4)}
        for found, upper, lower in (
            (epsilon_of(phases, delta), one, nothing),
            (epsilon_of(phases, delta, "rdp"), one, nothing),
            (epsilon_for_group(phases, delta, 3), three, nothing),
            (epsilon_replace_one(phases, delta), one, {mpmath.mpf(0): 1 - q, mpmath.mpf(-1): q}),
        ):
            assert 0 <= found < math.inf
            assert one_release_delta(found, upper, lower, noise) <= delta * (1 + 1e-9)

    @pytest.mark.rule(10)
    @pytest.mark.parametrize(
        ("noise", "steps", "delta"),
        [(0.124, 10, 2.8e-8), (0.0651, 1, 0.3), (1e4, 10**7, 1e-5), (2.0, 1, 1e-13), (37.0, 5000, 1e-9)],
    )
    def test_full_batches_are_bounded_from_both_sides(self, noise, steps, delta):
        found = epsilon_of(phases_of((1.0, noise, steps)), delta)
        shift = mpmath.sqrt(steps) / noise
        assert gaussian_delta(found, shift) <= delta
        assert gaussian_delta(found / 1.01, shift) > delta  # 0.124 for 10 steps had 1816 instead of 463

    def test_a_rate_near_one_with_little_noise_loses_no_place_on_the_grid(self):
        for rate in (1.0, 1 - 1e-9, 0.9986):
            spent = LossAccountant({(rate, 0.137): 1})
            assert max(side.rounded[rate, 0.137].slack for side in spent.sides) < 1e-12


PLANS = {
    "small lots": ([(1e-3, 0.8, 20_000)], 1e-6),
    "tiny rate": ([(1e-4, 1.0, 10_000)], 1e-6),
    "rate near one": ([(1 - 1e-6, 8.0, 30)], 1e-6),
    "large delta": ([(0.2, 2.0, 60)], 0.3),
    "one step of little noise": ([(0.01, 0.3, 1), (0.01, 30.0, 100_000)], 1e-5),
    "full and small lots": ([(1.0, 4.0, 2), (1e-3, 1.0, 10_000)], 1e-7),
    "three kinds": ([(0.5, 20.0, 300), (0.01, 1.0, 100), (1.0, 50.0, 20)], 1e-6),
}


class TestAgainstDpAccounting:
    @pytest.mark.rule(10)
    @pytest.mark.parametrize("name", PLANS)
    def test_between_its_optimistic_and_its_pessimistic_epsilon(self, name):
        releases, delta = PLANS[name]
        variance = sum(steps * rate**2 * math.expm1(noise**-2) for rate, noise, steps in releases)
        interval = max(1e-4, min(1e-3, math.sqrt(variance) / 2000))

        def theirs(pessimistic):
            parts = [
                privacy_loss_distribution.from_gaussian_mechanism(
                    noise,
                    sampling_prob=rate,
                    value_discretization_interval=interval,
                    pessimistic_estimate=pessimistic,
                    use_connect_dots=pessimistic,
                ).self_compose(steps)
                for rate, noise, steps in releases
            ]
            whole = parts[0]
            for part in parts[1:]:
                whole = whole.compose(part)
            return whole.get_epsilon_for_delta(delta)

        found = epsilon_of(phases_of(*releases), delta)
        assert theirs(False) * (1 - 1e-6) <= found <= 1.01 * theirs(True) + 1e-6
        assert theirs(False) * (1 - 1e-6) <= epsilon_of(phases_of(*releases), delta, "rdp")


class TestRenyi:
    @pytest.mark.rule(10)
    @pytest.mark.parametrize(("rate", "noise", "order"), [(1e-87, 0.05, 2), (5e-25, 0.3, 11), (5e-12, 0.44, 11)])
    def test_rare_ratios_beyond_floats_are_not_left_out(self, rate, noise, order):
        with mpmath.workdps(40):
            q, z = mpmath.mpf(rate), mpmath.mpf(noise)
            terms = (
                mpmath.binomial(order, j) * q**j * (1 - q) ** (order - j) * mpmath.exp(j * (j - 1) / (2 * z**2))
                for j in range(order + 1)
            )
            exact = mpmath.log(sum(terms)) / (order - 1)
        found = release_rdp(rate, noise)[ORDERS.index(order)]
        assert exact <= found <= exact * (1 + 1e-8)

    def test_what_is_not_a_number_is_not_zero(self):
        with pytest.raises(ArithmeticError, match="not a number"):
            epsilon_from_rdp(np.full(len(ORDERS), np.nan), 1e-5)


class TestTakingBack:
    @pytest.mark.rule(10)
    @pytest.mark.parametrize("accountant", ACCOUNTANTS)
    def test_an_infinite_cost_can_be_taken_back(self, accountant):
        phases = phases_of((0.01, 1.0, 10), (0.5, 1e-7, 10))
        running = RunningEpsilon(phases, 1e-5, accountant)
        assert [running.after(15), running.after(12)] == [math.inf, math.inf]  # the second had been 0
        true = epsilon_of(truncate(phases, 5), 1e-5, accountant)
        assert true <= running.after(5) <= 1.02 * true

    @pytest.mark.parametrize("delta", [1e-9, 1e-12])
    def test_the_first_steps_of_ten_million_are_as_precise_as_by_themselves(self, delta):
        phases = phases_of((0.001, 0.7, 10**7))
        running = RunningEpsilon(phases, delta, "pld")
        running.after(6 * 10**6)
        true = epsilon_of(truncate(phases, 10), delta)
        assert true <= running.after(10) <= 1.02 * true


def test_many_repetitions_of_a_large_shape_can_be_drawn():
    assert Repetitions(1e5, 200.0).draw() > 0


@pytest.mark.rule(10)
@pytest.mark.parametrize(("target", "rate", "steps"), [(400, 1.0, 10), (0.01, 1e-4, 1000), (30, 1 - 1e-9, 3)])
def test_calibrated_noise_meets_extreme_targets(target, rate, steps):
    noise = calibrate(target_epsilon=target, sampling_rate=rate, steps=steps, delta=1e-6)
    assert 0.99 * target <= epsilon_of(phases_of((rate, noise, steps)), 1e-6) <= target
