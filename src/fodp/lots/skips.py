"""Poisson lots of large data, in time and memory of the lot: how many records to skip, instead of one word for each.

Records that join independently with probability p are a Bernoulli process. The numbers of records skipped between one
that joins and the next are independent and geometric, P(skip ≥ g) = (1-p)^g, and such skips, laid end to end, make
that very process: each record joins with probability p, independently of all others, wherever the data ends. So a
lot by skips has the distribution of a lot by masks, and taking one record away leaves the others' part of it as it was.
Which word decides about a record depends on the records before it; its distribution does not, and nothing else enters
the guarantee.

Skips are exact. With U uniform in (0, 1), skip = ⌊ln U / ln(1-p)⌋, computed in float64 from a 64-bit word. Where the
result is so near to a whole number that float64 and 64 bits cannot tell the side, 192 more bits and 100 digits do.
p is ⌊q·2⁶⁴⌋·2⁻⁶⁴ as it is for masks: never above the declared rate q, and below it by less than 2⁻⁶⁴. All bits together
leave a doubt with probability below 2⁻¹⁹⁰ a skip.
"""

import functools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fodp.sampling import WordStreams

# From this many records on, at rates below this, lots are drawn by skips. Below, a mask is as quick, and seeded runs
# keep the lots that they have always had. Both ways draw from one distribution, so which it was tells nothing.
LEAST_RECORDS: Final = 2**22
MOST_RATE: Final = 1 / 16

_EXTRA_WORDS: Final = 3  # 192 bits
# Relative error of float64 here: a word becomes a float64; its logarithm, ln(1-p) and their quotient are rounded. This
# is three times their sum if logarithms are right to four units in the last place, which vectorised ones promise.
_RELATIVE: Final = 2.0**-47
_SMALL: Final = np.uint64(1024)  # words whose interval is wide for a logarithm; 1 in 2⁵⁴

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]


@functools.cache
def applies(size: int, rate: float) -> bool:
    """Whether lots of this rate from so many records are drawn by skips."""
    return size >= LEAST_RECORDS and rate < MOST_RATE


def skipped_indices(streams: "WordStreams", size: int, bound: int, step: int, name: str) -> Places:
    """The records of a lot in which each joins with probability bound·2⁻⁶⁴, in increasing order."""
    expected = size * math.ldexp(bound, -64)
    found: list[Places] = []
    start, block = 0, 0  # the first record that is not decided yet
    while start < size and bound:
        left = (size - start) / size * expected
        count = int(left + 8 * math.sqrt(left)) + 16  # hardly ever short of the end; then there is another block
        stream = f"{name}.skips{block}"
        words = streams.words(count, step, stream)
        skips = gaps(words, bound, size, lambda number, at=stream: streams.words(number, step, f"{at}.more"))
        places = start + np.cumsum(skips + 1) - 1
        found.append(places[places < size])
        start, block = int(places[-1]) + 1, block + 1
    return np.concatenate(found) if found else np.empty(0, np.int64)


def gaps(words: Words, bound: int, most: int, more: Any) -> Places:
    """Geometric numbers ⌊ln U / ln(1-p)⌋, p = bound·2⁻⁶⁴, at most `most`: exact. `more(n)` gives n further words.

    A word w stands for U in [w, w+1)·2⁻⁶⁴; where that, or rounding, leaves two whole numbers, more bits are asked for.
    """
    wide = words.astype(np.float64)  # to nearest: 2⁻⁵³ relative
    slope = 1 / math.log1p(-math.ldexp(bound, -64))
    exact = np.log((wide + 0.5) * 2.0**-64) * slope
    # Of ln U, for U somewhere in the word's interval and rounded; then of the logarithm, the slope and the product.
    doubt = (0.51 / (wide + 0.5) + _RELATIVE) * -slope * 1.01 + exact * _RELATIVE
    low, high = np.floor(exact - doubt), np.floor(exact + doubt)
    skips = np.minimum(np.maximum(low, 0), most).astype(np.int64)
    unsure = np.flatnonzero(((low != high) | (words < _SMALL)) & (low < most))
    if len(unsure):
        extra = more(_EXTRA_WORDS * len(unsure)).reshape(-1, _EXTRA_WORDS)
        for place, bits in zip(unsure.tolist(), extra, strict=True):
            skips[place] = min(decide(int(words[place]), int.from_bytes(bits.tobytes(), "little"), bound), most)
    return skips


def decide(word: int, more: int, bound: int) -> int:
    """⌊ln U / ln(1-p)⌋ of U = (word, followed by 192 more bits and a half) in 100 digits."""
    import mpmath  # type: ignore[import-untyped]

    with mpmath.workdps(100):
        uniform = mpmath.mpf(2 * ((word << 192) + more) + 1) / 2**257
        return int(mpmath.floor(mpmath.log(uniform) / mpmath.log1p(-mpmath.mpf(bound) / 2**64)))
