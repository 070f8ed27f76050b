"""Bands of correlated noise: of length 1, stable, and with less noise than those they begin from."""

import math

import numpy as np
import pytest
from scipy.optimize import check_grad

from fodp.noise.banded import accumulated_noise, fractional_coefficients
from fodp.noise.coefficients import LONGEST, _objective, best_order, is_stable, optimised_coefficients

SIZES = [(2, 40), (4, 200), (4, 6250), (16, 1000), (64, 1000), (128, 6250), (8, 8), (12, 5)]


def test_the_objective_is_the_accumulated_noise_and_has_the_right_gradient():
    c = np.array(fractional_coefficients(0.6, 7))
    assert math.exp(_objective(3 * c, 50)[0] / 2) == pytest.approx(accumulated_noise(c, 50))
    assert check_grad(lambda x: _objective(x, 50)[0], lambda x: _objective(x, 50)[1], 3 * c) < 1e-6
    assert _objective(np.array([1.0, 5.0]), 4000)[0] == 1e3  # not stable


@pytest.mark.rule(3)
@pytest.mark.parametrize(("bands", "steps"), SIZES)
def test_optimised_bands_have_length_one_are_stable_and_have_less_noise(bands, steps):
    found = optimised_coefficients(bands, steps)
    assert len(found) == bands
    assert found[0] > 0
    assert math.hypot(*found) == pytest.approx(1, abs=1e-12)
    assert np.abs(np.roots(found[::-1])).min() > 1
    orders = [accumulated_noise(fractional_coefficients(order, bands), steps) for order in (0.3, 0.5, 0.7, 0.9)]
    assert accumulated_noise(found, steps) <= min(orders) * (1 + 1e-9)
    optimised_coefficients.cache_clear()
    assert optimised_coefficients(bands, steps) == found


def test_three_bands_are_the_best_that_a_grid_finds():
    steps, best = 100, accumulated_noise(optimised_coefficients(3, 100), 100)
    tried = [(1.0, a, b) for a in np.linspace(0, 1.2, 41) for b in np.linspace(-0.2, 1.0, 41)]
    scaled = [tuple(np.array(c) / math.hypot(*c)) for c in tried]
    assert best <= min(accumulated_noise(c, steps) for c in scaled if is_stable(c)) + 1e-6


@pytest.mark.parametrize(("bands", "steps"), [(4, 200), (16, 1000), (64, 1000)])
def test_the_best_order_is_no_worse_than_others(bands, steps):
    order = best_order(bands, steps)
    tried = {o: accumulated_noise(fractional_coefficients(o, bands), steps) for o in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    assert accumulated_noise(fractional_coefficients(order, bands), steps) <= min(tried.values())
    assert best_order(bands, steps) > 0.5  # where bands are cut off


def test_one_band_and_very_long_runs():
    assert optimised_coefficients(1, 1000) == (1.0,)
    assert best_order(1, 1000) == 0.5
    assert optimised_coefficients(4, 10**7) == optimised_coefficients(4, LONGEST)


@pytest.mark.parametrize(
    ("coefficients", "stable"),
    [
        ((1.0,), True),
        ((0.8, 0.6), True),
        ((0.8, 0.6, 0.0), True),
        ((0.6, 0.8), False),
        ((-0.8, 0.6), False),
        ((1.0, 0.1), False),
        ((math.sqrt(0.5),) * 2, False),  # on the circle: it never forgets
        ((math.nan, 0.1), False),
    ],
)
def test_what_is_stable(coefficients, stable):
    assert is_stable(coefficients) is stable
