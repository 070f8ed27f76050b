"""Bands of correlated noise: of length 1, stable, and of the order that accumulates the least noise."""

import math

import numpy as np
import pytest

from fodp.noise.banded import LONGEST, accumulated_noise, best_order, fractional_coefficients

SIZES = [(2, 40), (4, 200), (4, 6250), (16, 1000), (64, 1000), (128, 6250), (8, 8), (12, 5)]


@pytest.mark.rule(3)
@pytest.mark.parametrize(("bands", "steps"), SIZES)
def test_bands_of_the_best_order_have_length_one_are_stable_and_have_less_noise(bands, steps):
    found = fractional_coefficients(best_order(bands, steps), bands)
    assert len(found) == bands
    assert found[0] > 0
    assert math.hypot(*found) == pytest.approx(1, abs=1e-12)
    assert np.abs(np.roots(found[::-1])).min() > 1
    orders = [accumulated_noise(fractional_coefficients(order, bands), steps) for order in (0.3, 0.5, 0.7, 0.9)]
    assert accumulated_noise(found, steps) <= min(orders) * (1 + 1e-9)


@pytest.mark.parametrize(("bands", "steps"), [(4, 200), (16, 1000), (64, 1000)])
def test_the_best_order_is_no_worse_than_others(bands, steps):
    order = best_order(bands, steps)
    tried = {o: accumulated_noise(fractional_coefficients(o, bands), steps) for o in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)}
    assert accumulated_noise(fractional_coefficients(order, bands), steps) <= min(tried.values())
    assert order > 0.5  # where bands are cut off


def test_one_band_and_very_long_runs():
    assert best_order(1, 1000) == 0.5
    assert best_order(4, 10**7) == best_order(4, LONGEST)
