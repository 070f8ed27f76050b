"""Texts as numbers without a vocabulary: n-grams of words and characters, hashed into a public number of places."""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fodp.support import checks

_WORD = re.compile(r"\w+|[^\w\s]")
_EVEN = np.uint64(0x9E3779B97F4A7C15)  # Knuth's multiplier: spreads the bits of a checksum over 64


@dataclass(frozen=True)
class HashedText:
    """N-grams of a text, hashed with a sign into `width` numbers of Euclidean norm 1 together.

    Guarantee: the numbers of a text depend on that text and on these public settings alone. Nothing is learnt, so
    nothing of it costs privacy; a vocabulary or document frequencies taken from the data would.

    Args:
        width: how many numbers, public. Different n-grams may meet in one of them; the sign keeps sums unbiased.
        words: n-grams of so many words: (1, 2) for words and pairs of words; () for none. A word is a run of letters,
            digits and underscores, in lower case; every other mark is one by itself.
        characters: n-grams of so many characters within a word, whose ends are marked; () for none.
        repeats: "once": an n-gram counts once in a text however often it occurs, "count": each time.

    Example:
        >>> rows = HashedText(width=8)(["a good film", "a bad film"])
        >>> rows.shape, round(float(rows[0].norm()), 6)
        (torch.Size([2, 8]), 1.0)
    """

    width: int = 2048
    words: tuple[int, ...] = (1, 2)
    characters: tuple[int, ...] = ()
    repeats: str = "once"

    def __post_init__(self) -> None:
        checks.whole("width", self.width)
        for size in (*self.words, *self.characters):
            checks.whole("each length of an n-gram", size)
        checks.one_of("repeats", self.repeats, ("once", "count"))

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """One row (`width` float32 numbers) for each text; of a text without any n-gram it is zeros."""
        rows = np.zeros((len(texts), self.width), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            found = [zlib.crc32(gram.encode()) for gram in self._grams(text)]
            marks = np.array(found if self.repeats == "count" else sorted(set(found)), dtype=np.uint64)
            mixed = (marks * _EVEN) >> np.uint64(20)  # wraps around, as it should
            signs = np.where(mixed & np.uint64(1), np.float64(1), np.float64(-1))
            places = ((mixed >> np.uint64(1)) % np.uint64(self.width)).astype(np.int64)
            sums = np.bincount(places, signs, self.width)
            row[:] = sums / max(float(np.linalg.norm(sums)), 1e-12)
        return torch.from_numpy(rows)

    def _grams(self, text: str) -> Iterator[str]:
        words = _WORD.findall(text.lower())
        for size in self.words:
            for place in range(len(words) - size + 1):
                yield " ".join(words[place : place + size])
        for size in self.characters:
            for word in words:
                marked = f"<{word}>"
                for place in range(len(marked) - size + 1):
                    yield f"\0{marked[place : place + size]}"  # apart from words
