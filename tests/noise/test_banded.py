"""Noise that is correlated over steps: its law, what one record can change, and ε by brute force on tiny cases."""

import itertools
import math

import numpy as np
import pytest
import torch

from fodp import PrivacyError
from fodp.accounting import Event, Phase, epsilon_of
from fodp.noise import Streams
from fodp.noise.banded import (
    BandedNoise,
    accumulated_noise,
    fractional_coefficients,
    inverse_coefficients,
)


def matrix(coefficients, steps):
    """M, written out."""
    found = np.zeros((steps, steps))
    for k, c in enumerate(coefficients):
        found += c * np.eye(steps, k=-k)
    return found


def drawn(noise, steps, size, std=1.0):
    return torch.stack([noise.normal_(torch.empty(size, dtype=torch.float64), std, t, "noise") for t in steps]).numpy()


def test_order_one_half_is_the_square_root_of_the_prefix_sum():
    values = np.array(fractional_coefficients(0.5, 40))
    values /= values[0]
    np.testing.assert_allclose(np.convolve(values, values)[:40], 1.0, rtol=1e-12)


@pytest.mark.parametrize(("order", "bands"), [(0.5, 2), (0.5, 5), (0.9, 7), (0.1, 3)])
def test_the_coefficients_have_length_one_and_their_inverse_forgets(order, bands):
    coefficients = fractional_coefficients(order, bands)
    assert math.hypot(*coefficients) == pytest.approx(1, abs=1e-15)
    assert np.abs(np.roots(coefficients[::-1])).min() > 1  # of c_0 + c_1·x + …
    inverse = inverse_coefficients(coefficients, 30)
    np.testing.assert_allclose(inverse, np.linalg.inv(matrix(coefficients, 30))[:, 0], atol=1e-12)


def test_the_noise_solves_the_system_for_the_fresh_noise_of_its_stream():
    coefficients = fractional_coefficients(0.5, 4)
    w = drawn(BandedNoise(Streams.seeded(3), coefficients), range(9), 50, std=2.0)
    z = drawn(Streams.seeded(3), range(9), 50)
    np.testing.assert_allclose(matrix(coefficients, 9) @ w, 2 * z, atol=1e-12)


def test_the_covariance_over_steps_is_that_of_the_inverse():
    coefficients, size = fractional_coefficients(0.5, 3), 40_000
    noise = BandedNoise(Streams.seeded(0), coefficients)
    w = drawn(noise, range(6), size)
    inverse = np.linalg.inv(matrix(coefficients, 6))
    found, law = w @ w.T / size, inverse @ inverse.T
    assert np.abs(found - law).max() < 6 * law.max() * math.sqrt(2 / size)
    assert np.abs(found - np.diag(np.diag(law))).max() > 20 * math.sqrt(2 / size)  # which fresh noise would not pass
    assert noise.variance() == pytest.approx(law[-1, -1])


def test_a_gap_begins_anew():
    """Rows on both sides of it share no noise: the covariance is that of two matrices, side by side."""
    coefficients, size = fractional_coefficients(0.5, 4), 20_000
    noise = BandedNoise(Streams.seeded(0), coefficients)
    w = drawn(noise, (0, 1, 3, 4), size)
    two = np.kron(np.eye(2), matrix(coefficients, 2))
    inverse = np.linalg.inv(two)
    law = inverse @ inverse.T
    assert np.abs(w @ w.T / size - law).max() < 6 * law.max() * math.sqrt(2 / size)


def test_a_saved_state_goes_on_bit_for_bit_and_a_forgotten_one_does_not():
    coefficients = fractional_coefficients(0.5, 4)
    straight, first, second, third = (BandedNoise(Streams.seeded(1), coefficients) for _ in range(4))
    whole = drawn(straight, range(8), 10)
    drawn(first, range(5), 10)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(drawn(second, range(5, 8), 10), whole[5:])
    third.load_state_dict(first.state_dict())
    third.forget()
    assert not np.allclose(drawn(third, range(5, 8), 10), whole[5:])


@pytest.mark.parametrize("coefficients", [(1.0, 0.1), (0.0, 1.0), (-1.0,)])
def test_columns_that_are_too_long_are_refused(coefficients):
    with pytest.raises(PrivacyError, match="length 1"):
        BandedNoise(Streams.seeded(0), coefficients)


def test_accumulated_noise_is_that_of_all_prefix_sums():
    assert accumulated_noise((1.0,), 99) == pytest.approx(math.sqrt(50))
    coefficients = fractional_coefficients(0.5, 4)
    sums = np.tri(20) @ np.linalg.inv(matrix(coefficients, 20))
    assert accumulated_noise(coefficients, 20) == pytest.approx(math.sqrt((sums**2).sum() / 20))


# --- what one record can change, and ε --------------------------------------------------------------------------


@pytest.mark.rule(3)
@pytest.mark.parametrize(("steps", "bands"), [(6, 2), (7, 3), (9, 4), (5, 5), (3, 4)])
def test_rounds_of_a_record_move_other_rows_each_and_none_by_more_than_the_bound(steps, bands):
    """Over all groups and all subsets of a group's steps: as many orthogonal moves of length 1 at most."""
    m = matrix(fractional_coefficients(0.5, bands), steps)
    for group in range(min(bands, steps)):
        own = range(group, steps, bands)
        assert len(own) <= math.ceil(steps / bands)
        gram = m[:, own].T @ m[:, own]
        assert np.diag(gram).max() <= 1 + 1e-12
        assert np.abs(gram - np.diag(np.diag(gram))).max() == 0
        for count in range(len(own) + 1):
            for taken in itertools.combinations(own, count):
                assert np.square(m[:, list(taken)].sum(1)).sum() <= count + 1e-12
    if bands <= steps:  # in ordinary lots, two steps in a row move the same rows, and further than two rounds may
        assert np.square(m[:, :2].sum(1)).sum() > 2 + 0.1


def delta_of(m, masks, sigma, epsilon, seed, count=60_000):
    """δ at ε of a mixture over participations against nobody, by sampling: the larger of both directions."""
    rng = np.random.default_rng(seed)
    shifts = np.array([m @ np.array(mask, dtype=float) for mask, _ in masks])
    chances = np.array([chance for _, chance in masks])

    def log_ratio(y):
        exponents = (y @ shifts.T - np.square(shifts).sum(1) / 2) / sigma**2 + np.log(chances)
        return np.logaddexp.reduce(exponents, axis=1)

    empty = sigma * rng.standard_normal((count, len(m)))
    there = shifts[rng.choice(len(masks), count, p=chances)] + sigma * rng.standard_normal((count, len(m)))
    removed = np.maximum(0, 1 - np.exp(epsilon - log_ratio(there))).mean()
    added = np.maximum(0, 1 - np.exp(epsilon + log_ratio(empty))).mean()
    return max(removed, added)


def participations(steps, drawn_at, rate):
    """Every subset of the steps at which a record may be drawn, with its probability."""
    for taken in itertools.product((0, 1), repeat=len(drawn_at)):
        mask = np.zeros(steps)
        mask[list(drawn_at)] = taken
        yield mask, math.prod(rate if t else 1 - rate for t in taken)


@pytest.mark.rule(6)
@pytest.mark.parametrize(("steps", "bands", "rate"), [(4, 2, 0.3), (5, 2, 0.3), (3, 3, 0.5)])
def test_the_stated_epsilon_is_that_of_the_mechanism_by_brute_force(steps, bands, rate):
    """The worst case in one dimension, every participation written out; the last round may be cut short."""
    m, sigma, delta = matrix(fractional_coefficients(0.5, bands), steps), 1.0, 0.02
    epsilon = epsilon_of((Phase((Event(rate, sigma),), steps, bands),), delta)
    found = [
        delta_of(m, list(participations(steps, range(group, steps, bands), rate)), sigma, epsilon, seed=group)
        for group in range(bands)
    ]
    assert max(found) <= 1.06 * delta  # the sampling error is about 1.5%
    if steps % bands == 0:
        assert max(found) >= 0.94 * delta  # and it is tight
    # It does not cover a record that may be drawn at every step.
    ordinary = delta_of(m, list(participations(steps, range(steps), rate)), sigma, epsilon, seed=0)
    assert ordinary > 1.5 * delta


@pytest.mark.rule(6)
@pytest.mark.parametrize("sigmas", [(1.0, 1.0, 0.7, 0.7), (1.0, 0.7, 0.7, 0.7), (0.7, 1.0, 1.0, 1.0)])
def test_a_schedule_of_the_noise_is_covered_also_where_it_changes_within_a_round(sigmas):
    """Noise is scaled by the σ of its own step, and a round that the schedule cuts counts on both sides."""
    steps, bands, rate, delta = 4, 2, 0.4, 0.02
    lengths = [(sigma, len(list(each))) for sigma, each in itertools.groupby(sigmas)]
    epsilon = epsilon_of([Phase((Event(rate, sigma),), length, bands) for sigma, length in lengths], delta)
    scaled = matrix(fractional_coefficients(0.5, bands), steps) / np.array(sigmas)  # M·(x/s) = (M/s)·x, by columns
    masks = [list(participations(steps, range(group, steps, bands), rate)) for group in range(bands)]
    assert max(delta_of(scaled, each, 1.0, epsilon, seed=1) for each in masks) <= 1.06 * delta
    cheaper = epsilon_of((Phase((Event(rate, max(sigmas)),), steps, bands),), delta)  # as if all were the larger noise
    assert max(delta_of(scaled, each, 1.0, cheaper, seed=1) for each in masks) > 1.06 * delta
