"""One pass over remembered vectors: their weighted sum goes into a vector, which is remembered on the way.

A window is far larger than a core's cache, so what costs is how often it is read. Here once per release: block by
block, while the block is in cache.
"""

from collections.abc import Iterator
from ctypes import CDLL, c_double, c_float, c_size_t
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fodp import kernels
from fodp._checks import PrivacyError

# Inner products run in float32 over blocks of at most this many entries and are added up in float64:
# exact enough for the scores at the speed of one pass through memory.
BLOCK = 1 << 16
# Entries of a block of rows that fit into a core's cache.
_CACHED = 1 << 17

Floats = list[float]


@dataclass
class Trend:
    """A running average of releases, the newest of which may still be missing from it.

    Adding it takes a pass over both, so that is left to the next pass over the memory, where both are at hand.
    """

    value: Tensor
    newest: Tensor | None = None
    gamma: float = 0.0

    def settle(self) -> Tensor:
        """The average of all releases: value + γ·(newest - value), in the arithmetic of the compiled pass."""
        if self.newest is not None:
            library = _library(self.newest, self.value)
            if library is None:
                self.value.lerp_(self.newest.to(self.value.dtype), self.gamma)
            else:
                follow = library.fodp_follow_bfloat16 if _is_narrow(self.newest) else library.fodp_follow
                follow(self.value.data_ptr(), self.newest.data_ptr(), self.gamma, self.value.numel())
            self.newest = None
        return self.value


class Recall:
    """Σ weight·row over the rows of a table that `order` names, not yet worked out: a term of a query.

    Adding it to a vector also does, with a trend, what remembering that vector takes (or another one): its inner
    products, and a copy in the row `kept`. `remembered` tells them, as long as nobody has changed the vector.
    """

    def __init__(
        self, table: Tensor, order: list[int], weights: Floats, kept: Tensor | None = None, trend: Trend | None = None
    ):
        self._table, self._order, self._weights, self._kept, self._trend = table, order, weights, kept, trend
        self._result: tuple[Tensor, int, Floats] | None = None

    def add_to(self, out: Tensor, factor: float, vector: Tensor | None = None) -> None:
        """out += factor · Σ weight·row; what is remembered is `vector`, or the new out."""
        weights, vector = [factor * weight for weight in self._weights], out if vector is None else vector
        if self._kept is None or self._trend is None:
            mix(out, self._table, self._order, weights)
        else:
            products = mix_and_remember(out, self._table, self._order, weights, vector, self._kept, self._trend)
            # Where versions are not counted nobody can tell whether the vector is still the same.
            self._result = None if vector.is_inference() else (vector, vector._version, products)

    def remembered(self, vector: Tensor) -> Floats | None:
        """Its inner products with every row, itself and the trend, if `add_to` has remembered this very vector."""
        if self._result is None or self._result[0] is not vector or self._result[1] != vector._version:
            return None
        return self._result[2]


def mix(out: Tensor, table: Tensor, order: list[int], weights: Floats) -> None:
    """out += Σ weight·row."""
    _refuse_other_sizes(table, out)
    library = _library(table, out)
    if library is not None:
        _compiled(library, out, table, order, weights)
        return
    by_row = _by_row(table, order, weights).to(out)
    for part in _parts(table):
        out[part].addmv_(table[:, part].to(out.dtype).t(), by_row)


def mix_and_remember(
    out: Tensor, table: Tensor, order: list[int], weights: Floats, vector: Tensor, kept: Tensor, trend: Trend
) -> Floats:
    """The same, and for a vector, which may be the new out: a copy, and inner products with rows, itself and trend.

    The newest release of the trend is the first row in order.
    """
    _refuse_other_sizes(table, out, vector, kept, trend.value)
    library = _library(table, out, vector, trend.value)
    if library is not None:
        products = (c_double * (len(order) + 2))()
        gamma = 0.0 if trend.newest is None else trend.gamma  # a trend that has followed it already stays
        remember = vector.data_ptr(), products, kept.data_ptr(), trend.value.data_ptr(), gamma
        _compiled(library, out, table, order, weights, *remember)
        trend.newest = None
        return list(products)
    by_row, average = _by_row(table, order, weights).to(out), trend.settle()
    products_of_parts = []
    for part in _parts(table):
        cached = table[:, part].to(out.dtype)
        out[part].addmv_(cached.t(), by_row)
        products_of_parts.append(_products(cached, vector[part], average[part]))
    kept.copy_(vector.detach())
    return _summed(products_of_parts, order)


def _compiled(library: CDLL, out: Tensor, table: Tensor, order: list[int], weights: Floats, *remember: Any) -> None:
    recall, count = library.fodp_recall_bfloat16 if _is_narrow(table) else library.fodp_recall, len(order)
    recall(
        out.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        (c_size_t * count)(*order),
        count,
        out.numel(),
        (c_float * count)(*weights),
        *(remember or (None, None, None, None, 0.0)),
    )
    torch.autograd.graph.increment_version(out)  # PyTorch has not seen the writing


def _by_row(table: Tensor, order: list[int], weights: Floats) -> Tensor:
    """The weight of every row of the table: most have one, so reading all beats picking."""
    by_row = torch.zeros(len(table), dtype=torch.float64)
    by_row[order] = torch.tensor(weights, dtype=torch.float64)
    return by_row


def _parts(table: Tensor) -> Iterator[slice]:
    """Columns of all rows that fit into a core's cache."""
    step = max(1, min(BLOCK, _CACHED // len(table)))
    return (slice(start, start + step) for start in range(0, table.shape[1], step))


def inner_products(table: Tensor, order: list[int], vector: Tensor, trend: Tensor) -> Floats:
    """⟨row, vector⟩ of the rows in order, then ⟨vector, vector⟩ and ⟨trend, vector⟩."""
    parts = (_products(table[:, part].to(vector.dtype), vector[part], trend[part]) for part in _parts(table))
    return _summed(list(parts), order)


def _products(rows: Tensor, vector: Tensor, trend: Tensor) -> Tensor:
    vector = vector.detach()
    return torch.cat([torch.mv(rows, vector), torch.mv(torch.stack([vector, trend.to(vector.dtype)]), vector)])


def _summed(products_of_parts: list[Tensor], order: list[int]) -> Floats:
    *by_row, square, along = torch.stack(products_of_parts).cpu().double().sum(0).tolist()
    return [*(by_row[row] for row in order), square, along]


def squared_distance(left: Tensor, right: Tensor) -> float:
    """‖left - right‖²: subtracted first, so that nothing cancels."""
    parts = [(a - b).square_().sum() for a, b in zip(left.split(BLOCK), right.split(BLOCK), strict=True)]
    return float(torch.stack(parts).cpu().double().sum())


def _refuse_other_sizes(table: Tensor, *vectors: Tensor) -> None:
    size = table.shape[1]
    for vector in vectors:
        if vector.shape != (size,):
            raise PrivacyError(
                f"a memory of {size} entries cannot be mixed into a vector of shape {tuple(vector.shape)}"
            )


def _library(table: Tensor, *vectors: Tensor) -> CDLL | None:
    """The compiled pass, if it can read these: a table of float32 or bfloat16, vectors of float32, in main memory."""
    if table.dtype not in (torch.float32, torch.bfloat16) or not table.is_cpu or table.stride(-1) != 1:
        return None
    return kernels.library_for(*vectors)


def _is_narrow(table: Tensor) -> bool:
    return table.dtype == torch.bfloat16
