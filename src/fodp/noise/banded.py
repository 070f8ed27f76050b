"""Noise that takes back some of itself: correlated over steps by a banded matrix, for sums that accumulate.

A run adds up its releases, so what matters is the noise in the sum of all so far. Let x be the sums of T steps, one
per row, c = (c_0, …, c_(b-1)) with c_0 > 0 and |c| ≤ 1, and M the lower-triangular T×T matrix with M[t, t-k] = c_k: b
bands. Step t releases x_t + s_t·w_t with w = M⁻¹z, z standard normal, which is the recursion

    w_t = (z_t - c_1·w_(t-1) - … - c_(b-1)·w_(t-b+1)) / c_0.

**What it costs.** s_t is fixed by earlier releases and at least σ times what one record can change of x_t. All
releases so far determine, and are determined by, the rows of M·(x/s) + z. A record in the lot of step t changes row t
of x/s by a vector of length at most 1/σ, and so rows t to t+b-1 of M·(x/s) by c times that vector: length |c|/σ ≤ 1/σ.
If it is in no other lot within b steps, the rows that it changes at its next one are others. Given all releases before
step t, these b rows are then one Gaussian release of multiplier σ at least, whatever the other records do in between:
what they add is the same function of what was released, with and without it. A record drawn with probability p at
every b-th step, and at no others, meets at most ⌈T/b⌉ Poisson-subsampled Gaussians (p, σ): Choquette-Choo et al.,
"(Amplified) Banded Matrix Factorization", NeurIPS 2023. Ordinary lots, in which a record may be twice within b steps,
have no such ε.

**A gap** (a step that broke off, a resumed run without its past) begins a new matrix: rows before and after it share
no noise and no columns, and columns that are cut are shorter. So what is not known of the past is left out, safely.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp.errors import ConfigurationError, PrivacyError
from fodp.queries import Query
from fodp.release import Gaussian, release
from fodp.support import checks

LONGEST = 2**14  # steps that are looked at: what is best for more is best for these, to a few in a thousand
_ORDERS = [round(0.02 * i, 2) for i in range(10, 50)]


def fractional_coefficients(order: float, bands: int) -> tuple[float, ...]:
    """The first coefficients of (1-x)^(-order), scaled to length 1.

    They fall for orders below 1, so all roots of c(x) lie outside of the unit circle (Eneström and Kakeya) and the
    recursion forgets its rounding errors. Order ½ is the best for prefix sums when no band is cut off.
    """
    values = [1.0]
    for k in range(1, checks.whole("bands", bands)):
        values.append(values[-1] * (k - 1 + order) / k)
    length = math.hypot(*values)
    return tuple(value / length for value in values)


@lru_cache(maxsize=512)
def best_order(bands: int, steps: int) -> float:
    """The order whose first coefficients accumulate the least noise, the root mean square over all steps."""
    from scipy.signal import lfilter

    if bands == 1:
        return 0.5
    impulse = np.eye(1, min(steps, LONGEST))[0]
    left = np.arange(len(impulse), 0, -1)  # steps that a sum is in

    def noise(order: float) -> float:
        sums = np.cumsum(lfilter([1.0], fractional_coefficients(order, bands), impulse))
        return float(left * sums @ sums)

    return min(_ORDERS, key=noise)


def inverse_coefficients(coefficients: Sequence[float], count: int) -> npt.NDArray[np.float64]:
    """The first `count` coefficients of 1/c(x): how much of z_(t-k) is in w_t."""
    first, rest = coefficients[0], np.asarray(coefficients[1:])
    inverse = np.zeros(count)
    inverse[:1] = 1 / first
    for t in range(1, count if len(rest) else 0):
        past = inverse[max(0, t - len(rest)) : t][::-1]
        inverse[t] = -float(rest[: len(past)] @ past) / first
        if len(past) == len(rest) and not np.abs(past).max() > 1e-30:
            break  # the others are nothing
    return inverse


def accumulated_noise(coefficients: Sequence[float], steps: int) -> float:
    """The root mean square, over all steps t, of the noise in the sum of the first t releases; 1 a step: √((T+1)/2)."""
    in_sums = np.cumsum(inverse_coefficients(coefficients, steps))  # of z_(t-k) in the sum of the first t
    return math.sqrt(float((np.arange(steps, 0, -1) * in_sums**2).sum()) / steps)


def last_noise(coefficients: Sequence[float], steps: int) -> float:
    """The standard deviation of the noise in the sum of all releases; 1 a step: √T."""
    return float(np.linalg.norm(np.cumsum(inverse_coefficients(coefficients, steps))))


class BandedNoise:
    """A source of noise w = M⁻¹z for one release a step; it remembers its last b-1 draws, which are secret.

    They are kept, not drawn again from their streams: 1/c(x) has no end, so to know w of the last b-1 steps exactly one
    must draw the z of all steps since the matrix began, T²/2 vectors in a run instead of T. Kept, they take b-1
    vectors of memory and b-1 products a step.
    """

    is_fresh = False

    def __init__(self, source: Gaussian, coefficients: Sequence[float]):
        first, *rest = coefficients
        if not first > 0 or math.hypot(*coefficients) > 1 + 1e-12:
            raise PrivacyError(
                f"coefficients of correlated noise start above 0 and have length 1, got {coefficients!r}"
            )
        self._source, self._first, self._rest = source, first, tuple(rest)
        self._past: deque[Tensor] = deque(maxlen=len(rest))  # of unit noise, the newest first
        self._next = -1  # the step that continues it
        self._responses = np.zeros(0)  # squares of the inverse, as far as they were needed
        self._age = 0  # steps since the matrix began

    def add(self, query: Query, std: float, step: int, name: str) -> Tensor:
        """query + std·w of this step. A number, such as a count, gets noise of its own, which is not correlated."""
        return release(query, std, self._source if query.is_number else self, step, name)

    def scale(self) -> float:
        """Of the last draw, in units of std."""
        return math.sqrt(self.variance())

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with std·w of this step. A step that does not follow the last one begins anew."""
        if self._age and step == self._next - 1:
            raise PrivacyError(f"step {step} has released already: correlated noise is for one release in a step")
        if step != self._next:
            self._past.clear()
            self._age = 0
        unit = self._source.normal_(torch.empty_like(out), 1.0, step, name)
        for coefficient, earlier in zip(self._rest, self._past, strict=False):
            unit.sub_(earlier, alpha=coefficient)
        unit.div_(self._first)
        self._past.appendleft(unit)
        self._next, self._age = step + 1, self._age + 1
        return torch.mul(unit, std, out=out)

    def variance(self) -> float:
        """Of the last draw, in units of std²."""
        if len(self._responses) < self._age:
            self._responses = inverse_coefficients((self._first, *self._rest), 2 * self._age) ** 2
        return math.fsum(self._responses[: self._age])

    def state_dict(self) -> dict[str, Any]:
        """What a seeded run needs to go on bit for bit. Whoever has it can take the noise off: not for secure runs."""
        return {"past": [earlier.clone() for earlier in self._past], "next": self._next, "age": self._age}

    def bytes_when_full(self, size: int) -> int:
        """How much the state will take at most, for vectors of this many entries."""
        return len(self._rest) * size * 4

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if len(state["past"]) > len(self._rest):
            raise ConfigurationError("this state is of noise with more bands")
        self._past.clear()
        self._past.extend(earlier.clone() for earlier in state["past"])
        self._next, self._age = int(state["next"]), int(state["age"])

    def forget(self) -> None:
        """Begin anew at the next draw."""
        self._past.clear()
        self._next, self._age = -1, 0
