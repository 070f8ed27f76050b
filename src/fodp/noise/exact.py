"""Releases without floating-point leaks: rounded sums plus exactly rounded Gaussian noise, on one grid.

Mironov (2012) and Jin et al. (2022) read the low bits of float releases: which sums of data and float noise can
occur at all depends on the data. Here both are whole multiples of a grid g, so every release could come from
every data set. The guarantee is that of the ideal Gaussian mechanism, because

    k + round(N) = round(k + N)    for every whole number k,

so a release is the ideal Gaussian release of the rounded sum, rounded again, which is post-processing: no new
accountant is needed. Rounding a sum of d entries moves two neighbouring sums apart by at most g·√d more; the
noise is raised by as much, so the event stays the promised one.

round(N) is exact. N = √(-2 ln U)·cos(πV) is computed in float64 from 64-bit words; where the result is too near
to a half for float64 to tell, or the word is extreme, more random bits and more digits decide. This takes
PyTorch's float64 log, sqrt, sin and cos to be right to 16 units in the last place (they promise 1), and nothing else.

The clipped sum comes as a float64 sum (`Gradients.exact`), whose rounding is below 1e-10 of the bound. What is not
covered: gradients themselves are float32, and a library may round otherwise in a larger lot. `SUM_ALLOWANCE` widens the
bound for that; that this suffices is measured, not proved. Timing is not covered either.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp.errors import PrivacyError
from fodp.queries import Query
from fodp.sampling import WordStreams

CELLS: Final = 2**20  # grid cells in one standard deviation
SUM_ALLOWANCE: Final = 1e-4  # of the bound, for gradients that round by the size of the lot; measured: below 1e-6
_BLOCK: Final = 32768  # pairs at a time, so that scratch stays in a core's cache

# The error of float64 in units of the grid is below 2^-22 for words in the bulk (word = U·2⁶⁴): √(-2 ln U) turns
# an error of 2^-53 in U near 1 into 2^-43 at most, times 2²⁰ cells; all else is smaller. The margin is 8 times that.
_MARGIN: Final = 2.0**-19
_LOWEST, _HIGHEST = np.uint64(2**44), np.uint64(2**64 - 2**43)

Floats = npt.NDArray[np.float64]


def release(query: Query, std: float, noise: WordStreams, step: int, name: str) -> Tensor:
    """query + N(0, std²·I), rounded to a grid of about std·2^-20; as `fodp.release.release` but without float leaks.

    Guarantee: post-processing of an ideal Gaussian release with multiplier `query.noise_multiplier(std)`. The
    noise is larger than std by the little that rounding costs (0.06% for the paper's MLP).
    """
    value = query.add_to(query.empty(torch.float64).zero_())  # the rounding below is the only one that counts
    grid = raised(std, query.bound, value.numel()) / CELLS
    cells = value.div_(grid).round_()
    if not cells.abs().max() < 2**52:
        raise PrivacyError(
            f"the sum is too large for exact noise of std {std:g}: float64 counts to 2^53 grid cells only"
        )
    made = torch.from_numpy(rounded_normals(value.numel(), noise, step, name))
    cells += made.to(cells.device, non_blocking=True).view(cells.shape)
    return cells.mul_(grid).to(query.dtype)


@dataclass(frozen=True)
class ExactNoise:
    """Noise on a grid, without floating-point leaks, fresh for every release (`fodp.release.Noise`)."""

    source: WordStreams
    is_fresh = True

    def add(self, query: Query, std: float, step: int, name: str) -> Tensor:
        """query + N(0, std²·I), on the grid."""
        return release(query, std, self.source, step, name)

    def scale(self) -> float:
        """As asked: what rounding costs is known and small."""
        return 1.0


def raised(std: float, bound: float, size: int) -> float:
    """The noise that leaves the multiplier std/bound as it is, when rounding moves sums apart by g·√size."""
    apart = 1.001 * math.sqrt(size) / CELLS * std / bound  # of the bound; 1.001 covers the division by g
    if apart > 0.1:
        raise PrivacyError(f"a model of {size} parameters is too large for exact noise with multiplier {std / bound:g}")
    return std * (1 + SUM_ALLOWANCE) / (1 - apart)


def rounded_normals(size: int, noise: WordStreams, step: int, name: str) -> Floats:
    """`size` independent whole numbers round(2²⁰·N), N standard normal: exact, as float64."""
    pairs = (size + 1) // 2
    words = noise.words(2 * pairs, step, f"{name}.exact")
    out = np.empty((2, pairs))
    unsure: list[npt.NDArray[np.int64]] = []
    for start in range(0, pairs, _BLOCK):
        part = slice(start, min(start + _BLOCK, pairs))
        unsure.append(start + _fill(out[:, part], words[:pairs][part], words[pairs:][part]))
    for place, more in _with_more_bits(np.concatenate(unsure), noise, step, name):
        out[:, place] = decide(int(words[place]), int(words[pairs + place]), more)
    return out.reshape(-1)[:size]


def _fill(out: Floats, radius_words: npt.NDArray[np.uint64], angle_words: npt.NDArray[np.uint64]) -> Any:
    """Rounded pairs in float64; returns the places where float64 may round to the wrong side."""
    radius = torch.from_numpy(radius_words.astype(np.float64))
    radius.add_(0.5).mul_(2.0**-64).log_().mul_(-2.0).sqrt_().mul_(CELLS)
    angle = torch.from_numpy(angle_words.view(np.int64)).to(torch.float64).mul_(math.pi * 2.0**-63)
    unsure = torch.from_numpy((radius_words < _LOWEST) | (radius_words > _HIGHEST))
    for row, function in zip(out, (torch.cos, torch.sin), strict=True):
        exact = function(angle).mul_(radius)
        rounded = torch.round(exact, out=torch.from_numpy(row))
        unsure |= exact.sub_(rounded).abs_() > 0.5 - _MARGIN
    return np.flatnonzero(unsure.numpy())


def _with_more_bits(places: npt.NDArray[np.int64], noise: WordStreams, step: int, name: str) -> Any:
    """Each place with 192 further random bits for its radius and for its angle."""
    words = noise.words(6 * len(places), step, f"{name}.exact.more") if len(places) else np.empty(0, np.uint64)
    for number, place in enumerate(places):
        bits = int.from_bytes(words[6 * number : 6 * number + 6].tobytes(), "little")
        yield place, bits


def decide(radius_word: int, angle_word: int, more: int) -> tuple[int, int]:
    """The rounded pair of these words followed by 384 further random bits, computed in 100 digits.

    All bits together leave a doubt with probability below 1e-40, which no δ notices.
    """
    import mpmath  # type: ignore[import-untyped]

    uniform_bits, angle_bits = more % 2**192, more >> 192
    signed = angle_word - 2**64 if angle_word >= 2**63 else angle_word
    with mpmath.workdps(100):
        uniform = mpmath.mpf(2 * ((radius_word << 192) + uniform_bits) + 1) / 2**257
        angle = mpmath.pi * ((signed << 192) + angle_bits) / 2 ** (63 + 192)
        radius = CELLS * mpmath.sqrt(-2 * mpmath.log(uniform))
        return int(mpmath.nint(radius * mpmath.cos(angle))), int(mpmath.nint(radius * mpmath.sin(angle)))
