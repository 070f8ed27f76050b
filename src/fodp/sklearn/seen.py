"""Which rows private fits of this process were given, and which were declared public: by keyed marks, never stored."""

import hashlib
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KEY = os.urandom(32)  # of this process: nobody else can compute a mark
_MOST_MARKS = 4096  # kept of one fit
_FEWEST_ROWS = 5  # below, equal rows may be chance
_KNOWN_SHARE = 0.5


@dataclass(frozen=True)
class _Marks:
    """One mark for each of a sample of rows: those whose mark ends in zeros, so that every part has the same ones."""

    kept: NDArray[np.uint64]
    zeros: np.uint64
    telling: bool  # most rows are unlike each other, so that equal ones are no chance


@dataclass
class SeenRows:
    """The rows of earlier fits, by marks of whole tables and of single rows."""

    tables: Counter[bytes] = field(default_factory=Counter)
    parts: dict[bytes, _Marks] = field(default_factory=dict)

    def add(self, rows: NDArray[Any]) -> int:
        """Remember these rows; returns how many times this very table was given."""
        mark = _of_table(rows)
        self.tables[mark] += 1
        if mark not in self.parts:
            self.parts[mark] = _of_rows(rows)
        return self.tables[mark]

    def know(self, rows: NDArray[Any]) -> bool:
        """Whether this table, or most of its rows, was in an earlier fit, or in several of them together.

        Tables of few different rows, where equal ones may be chance, are compared as wholes alone.
        """
        if not self.tables or _of_table(rows) in self.tables:
            return bool(self.tables)
        asked = _row_marks(rows)
        if len(np.unique(asked)) * 2 < len(asked):
            return False
        telling = [marks for marks in self.parts.values() if marks.telling]
        return any(_are_known(asked, marks) for marks in telling) or (
            len(telling) > 1 and _are_known(asked, _together(telling))
        )


def _are_known(asked: NDArray[np.uint64], marks: _Marks) -> bool:
    looked_at = asked[asked & marks.zeros == 0]
    return len(looked_at) >= _FEWEST_ROWS and bool(np.isin(looked_at, marks.kept).mean() >= _KNOWN_SHARE)


def _together(marks: list[_Marks]) -> _Marks:
    """Folds of one table are that table."""
    return _Marks(np.concatenate([each.kept for each in marks]), max(each.zeros for each in marks), telling=True)


def _of_rows(rows: NDArray[Any]) -> _Marks:
    marks = _row_marks(rows)
    different, zeros = np.unique(marks), np.uint64(0)
    while (different & zeros == 0).sum() > _MOST_MARKS:
        zeros = zeros * np.uint64(2) + np.uint64(1)
    return _Marks(different[different & zeros == 0], zeros, telling=len(different) * 2 >= len(marks))


def _row_marks(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """A keyed sum over the bits of each row, mixed: equal for equal rows, unlike for others but by chance."""
    bits = np.ascontiguousarray(rows, dtype=np.float64).view(np.uint64).reshape(len(rows), -1)
    keys = np.random.default_rng(list(_KEY)).integers(0, 2**64, (2, bits.shape[1]), dtype=np.uint64)
    low, high = bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)
    marks: NDArray[np.uint64] = low @ (keys[0] | np.uint64(1)) + high @ (keys[1] | np.uint64(1))
    marks ^= marks >> np.uint64(32)
    marks *= np.uint64(0x9E3779B97F4A7C15)
    return marks ^ (marks >> np.uint64(29))


def _of_table(rows: NDArray[Any]) -> bytes:
    found = np.ascontiguousarray(rows, dtype=np.float64)
    return hashlib.blake2b(found.reshape(-1).view(np.uint8).data, key=_KEY, digest_size=16).digest()


PRIVATE = SeenRows()
PUBLIC = SeenRows()
