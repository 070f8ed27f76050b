"""Which rows private fits of this process were given, and which were declared public: by keyed marks, never stored."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fodp.identity.row_samples import Words, halves

_MOST_MARKS = 4096  # kept of one fit
_FEWEST_ROWS = 5  # below, equal rows may be chance
_KNOWN_SHARE = 0.5


@dataclass(frozen=True)
class _Marks:
    """One mark for each of a sample of rows: those whose mark ends in zeros, so that every part has the same ones."""

    kept: Words
    zeros: np.uint64
    telling: bool  # most rows are unlike each other, so that equal ones are no chance


@dataclass
class SeenRows:
    """The rows of earlier fits, by marks of whole tables and of single rows."""

    tables: Counter[bytes] = field(default_factory=Counter)
    parts: dict[bytes, _Marks] = field(default_factory=dict)

    def add(self, rows: NDArray[Any]) -> int:
        """Remember these rows; returns how many times this very table was given."""
        marks = _row_marks(rows)
        table = _digest(marks)
        self.tables[table] += 1
        if table not in self.parts:
            self.parts[table] = _sampled(marks)
        return self.tables[table]

    def know(self, rows: NDArray[Any]) -> bool:
        """Whether this table, or most of its rows, was in an earlier fit, or in several of them together.

        Tables of few different rows, where equal ones may be chance, are compared as wholes alone.
        """
        if not self.tables:
            return False
        asked = _row_marks(rows)
        if _digest(asked) in self.tables:
            return True
        if len(np.unique(asked)) * 2 < len(asked):
            return False
        telling = [marks for marks in self.parts.values() if marks.telling]
        return any(_are_known(asked, marks) for marks in telling) or (
            len(telling) > 1 and _are_known(asked, _together(telling))
        )


def _are_known(asked: Words, marks: _Marks) -> bool:
    looked_at = asked[asked & marks.zeros == 0]
    return len(looked_at) >= _FEWEST_ROWS and bool(np.isin(looked_at, marks.kept).mean() >= _KNOWN_SHARE)


def _together(marks: list[_Marks]) -> _Marks:
    """Folds of one table are that table."""
    return _Marks(np.concatenate([each.kept for each in marks]), max(each.zeros for each in marks), telling=True)


def _sampled(marks: Words) -> _Marks:
    different, zeros = np.unique(marks), np.uint64(0)
    while (different & zeros == 0).sum() > _MOST_MARKS:
        zeros = zeros * np.uint64(2) + np.uint64(1)
    return _Marks(different[different & zeros == 0], zeros, telling=len(different) * 2 >= len(marks))


def _digest(marks: Words) -> bytes:
    return hashlib.blake2b(marks.tobytes(), digest_size=16).digest()


def _row_marks(rows: NDArray[Any]) -> Words:
    """A mark of each row, keyed with a secret of this process: equal rows have equal marks, others by chance only."""
    with np.errstate(all="ignore"):
        even, odd = halves(np.asarray(rows, dtype=np.float32) + np.float32(0))  # minus zero is zero
    return even + odd


PRIVATE = SeenRows()
PUBLIC = SeenRows()
