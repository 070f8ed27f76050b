"""Which bands a matrix of correlated noise has (`fodp.noise.banded`): by a fractional order, the best one, or the best.

All of them are public: they are made of the number of bands and of steps alone. What makes them private is their
length, at most 1; c_0 > 0 and roots of c(x) outside of the unit circle make the recursion forget its rounding errors.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fodp.noise.banded import fractional_coefficients

LONGEST = 2**14  # steps that are looked at: what is best for more is best for these, to a few in a thousand
_ORDERS = [round(0.02 * i, 2) for i in range(10, 50)]
_DIGITS = 12  # so that libraries that round otherwise find the same numbers
_SLACK = 1e-12  # of the length, for rounding


@lru_cache(maxsize=512)
def best_order(bands: int, steps: int) -> float:
    """The order whose first coefficients accumulate the least noise, the root mean square over all steps."""
    if bands == 1:
        return 0.5
    horizon = min(steps, LONGEST)

    def noise(order: float) -> float:
        return _objective(np.array(fractional_coefficients(order, bands)), horizon, with_slope=False)[0]

    return min(_ORDERS, key=noise)


@lru_cache(maxsize=512)
def optimised_coefficients(bands: int, steps: int) -> tuple[float, ...]:
    """Of length 1, with the least accumulated noise that descent finds from the best fractional ones.

    The same numbers for the same arguments. Where descent finds nothing better or nothing stable, the fractional ones.
    """
    from scipy.optimize import minimize

    start, horizon = fractional_coefficients(best_order(bands, steps), bands), min(steps, LONGEST)
    if bands == 1:
        return start

    def of_the_rest(rest: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        value, slope = _objective(np.concatenate(([1.0], rest)), horizon)  # its scale does not matter
        return value, slope[1:]

    first = np.array(start) / start[0]
    found = minimize(of_the_rest, first[1:], jac=True, method="L-BFGS-B", options=dict(maxiter=500, ftol=1e-13))
    values = [1.0, *(float(f"{value:.{_DIGITS}g}") for value in found.x)]
    length = math.hypot(*values)
    scaled = tuple(value / length for value in values)
    better = _objective(np.array(scaled), horizon)[0] < _objective(first, horizon)[0]
    return scaled if better and is_stable(scaled) else start


def is_stable(coefficients: Sequence[float]) -> bool:
    """Whether these may be a strategy: c_0 > 0, length 1 at most, all roots of c(x) outside of the unit circle."""
    if not coefficients[0] > 0 or not math.hypot(*coefficients) <= 1 + _SLACK:
        return False
    roots = np.roots(np.trim_zeros(np.asarray(coefficients), "b")[::-1])
    return not len(roots) or bool(np.abs(roots).min() > 1 + 1e-9)


def _objective(
    c: npt.NDArray[np.float64], steps: int, *, with_slope: bool = True
) -> tuple[float, npt.NDArray[np.float64]]:
    """log of (|c|·accumulated noise)², which does not depend on the scale of c, and its gradient, or zeros without.

    Of z_(t-k) there is s_k in the sum of the first t releases, s(x) = 1/((1-x)·c(x)); so ∂s/∂c_j = -x^j·s(x)/c(x).
    """
    from scipy.signal import fftconvolve, lfilter

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    with np.errstate(over="ignore", invalid="ignore"):  # descent may try what is not stable, and must turn back
        response = lfilter([1.0], c, impulse)
        sums = np.cumsum(response)
        weighted = np.arange(steps, 0, -1) / steps * sums
        total, length = float(weighted @ sums), float(c @ c)
    if not total < 1e100:
        return 1e3, np.zeros_like(c)
    value = math.log(total) + math.log(length)
    if not with_slope:
        return value, np.zeros_like(c)
    both = fftconvolve(sums, response)[:steps]
    slope = np.array([-2 * float(weighted[j:] @ both[: max(0, steps - j)]) for j in range(len(c))])
    return value, slope / total + 2 * c / length
