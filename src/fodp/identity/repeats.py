"""One example that is in the data many times is one example: where records repeat, ε would hold for one copy only.

That places hold one record is seen and refused for views, tables of `datasets`, lists and wrappers of them. Rows that
are equal are a sign, no proof: a warning names what to do.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np

from fodp.errors import DataError
from fodp.identity.origins import columns_of, origins
from fodp.identity.row_samples import Rows, Vector, halves
from fodp.support import checks

_ROWS = 2**14
_COMPARED, _COLUMNS = 512, 64  # rows and columns whose values are counted
_ROOM = 4.0  # bits: where the columns' values have room for 16 times as many rows, repeats are no matter of course
_FEWEST_ROWS = 6  # distinct ones, among which equal halves would show
_OFTEN = 5  # places of one row
_COPIES = 0.05  # of a row on average
_BY_CHANCE = 0.1  # of distinct rows

EQUAL_ROWS = "rows of the data are equal in every number and occur again and again"
REMEDY = (
    "take each example once, and let a weight be a factor of its loss; if copies are the records of one person, plan "
    "with unit='person' and name the owners"
)


def refuse_repeated(dataset: Any, owners: Any = None) -> None:
    """Raise if the data shows one record at two places, unless both are one owner's."""
    if columns_of(dataset):
        return  # a row of memory is at one place
    found = origins(dataset)
    order = np.argsort(found, kind="stable")
    again = found[order][1:] == found[order][:-1]
    names = _names(owners, len(found))
    if names is not None:
        again &= names[order][1:] != names[order][:-1]
    if again.any():
        raise DataError(
            f"the {type(dataset).__name__} holds {int(again.sum())} records a second time, and one example must be one "
            "record: take each index once (Subset(data, sorted(set(indices)))), each item of a list and each data set "
            f"once. Oversampling: {REMEDY}"
        )


def warn_of_equal_rows(dataset: Any, owners: Any = None) -> None:
    """Warn if rows occur again and again that are not likely to do so by chance."""
    if _looks_copied(dataset, owners):
        checks.warn(
            f"{EQUAL_ROWS}: if they are copies of one example, "
            f"it moves a sum by more than C, and epsilon holds for one of the copies only. In that case {REMEDY}"
        )


def _looks_copied(dataset: Any, owners: Any) -> bool:
    rows = Rows(dataset, _ROWS)
    names = _names(owners, rows.size)
    places: dict[tuple[int, int], list[int]] = defaultdict(list)  # of each distinct row, by the marks of its halves
    kept: list[Vector] = []
    read = 0
    for here, row in rows:
        matrix = np.concatenate([part for _, part in row], axis=1) if row else np.empty((len(here), 0), np.float32)
        if matrix.shape[1] < 2:
            continue
        read += len(here)
        kept += [vector[:: max(1, vector.size // _COLUMNS)] for vector in matrix[: max(0, _COMPARED - len(kept))]]
        even, odd = halves(matrix)
        for place, *half, blank in zip(here, even.tolist(), odd.tolist(), _are_blank(matrix), strict=True):
            if not blank:
                places[half[0], half[1]].append(place)
    groups = list(places.values())
    if len(groups) < _FEWEST_ROWS or all(len(group) == 1 for group in groups):
        return False
    by_chance = _room(kept) < math.log2(read) + _ROOM or _share_halves(places)
    return not by_chance and _occur_often(groups, names, read, rows.size)


def _share_halves(rows: Iterable[tuple[int, int]]) -> bool:
    """Whether distinct rows often have a half in common: then they are made of few values, and repeat by themselves."""
    counts = [Counter(half) for half in zip(*rows, strict=True)]
    return min(1 - sum(n == 1 for n in count.values()) / count.total() for count in counts) > _BY_CHANCE


def _are_blank(rows: Vector) -> list[bool]:
    """Which rows are one number again and again, but for one, which may be a label: of those there may be many."""
    width = rows.shape[1]
    same = np.maximum(*((rows == rows[:, [place]]).sum(1) for place in (0, 1)))
    found: list[bool] = ((same >= width - 1) & (width > 2)).tolist()
    return found


def _room(rows: list[Vector]) -> float:
    """For how many distinct rows the values of the columns have room, in bits."""
    columns = zip_longest(*(row.tolist() for row in rows))
    return math.fsum(math.log2(len({value for value in column if value == value}) or 1) for column in columns)


def _occur_often(groups: list[list[int]], names: Any, read: int, size: int) -> bool:
    """Whether equal rows, of different owners where there are owners, are many, or one of them is there very often."""
    counts = [len(set(names[group])) if names is not None else len(group) for group in groups]
    pairs = sum(count * (count - 1) / 2 for count in counts)
    copies = 2 * pairs / (read * max(1, read - 1)) * (size - 1)
    return max(counts) >= _OFTEN or (pairs >= 3 and copies >= _COPIES)


def _names(owners: Any, records: int) -> Any:
    """Numbers that tell owners apart; None where there are none, or not one for each record, which others refuse."""
    if owners is None or not hasattr(owners, "__len__") or len(owners) != records:
        return None
    return np.unique(np.asarray(owners), return_inverse=True)[1]
