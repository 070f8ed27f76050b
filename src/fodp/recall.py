"""One pass over remembered vectors: their weighted sum goes into a vector, which is remembered on the way.

A window is far larger than a core's cache, so what costs is how often it is read. Here once per release: block by
block, while the block is in cache.
"""

from array import array
from collections.abc import Iterator
from ctypes import CDLL
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


class Products:
    """Inner products of the rows of a table: of each one with itself, with the trend, and with the rows before it,
    the nearest first, all as they were when it was written. A square of memory, so for small windows."""

    def __init__(self, rows: int):
        self.width = rows + 1
        self.values = array("d", bytes(8 * rows * self.width))

    def of(self, row: int, count: int) -> Floats:
        """Those of a row that had `count` rows before it: `count` + 2."""
        start = row * self.width
        return self.values[start : start + 2 + count].tolist()

    def put(self, row: int, products: Floats) -> None:
        """Write those of a row."""
        start = row * self.width
        self.values[start : start + len(products)] = array("d", products)


class Recall:
    """Σ weight·row over the rows of a table that `order` names, not yet worked out: a term of a query.

    Adding it to a vector also does, with a trend, what remembering that vector takes: its inner products, and a copy
    in the row `kept`. `has_remembered` tells, as long as nobody has changed the vector.
    """

    def __init__(
        self,
        table: Tensor,
        order: list[int],
        weights: Floats,
        kept: int = 0,
        trend: Trend | None = None,
        products: Products | None = None,
    ):
        self._table, self._order, self._weights = table, order, weights
        self._kept, self._trend, self._products = kept, trend, products
        self._result: tuple[Tensor, int] | None = None

    def add_to(self, out: Tensor, factor: float, scale: float | None = None) -> None:
        """out += factor · Σ weight·row; what is remembered is the new out.

        With a scale, out = scale·out + factor · Σ weight·row, and what is remembered is out as it was.
        """
        rows = self._table, self._order, [factor * weight for weight in self._weights]
        if self._trend is None or self._products is None:
            mix(out if scale is None else out.mul_(scale), *rows)
        else:
            mix_and_remember(out, *rows, self._kept, self._trend, self._products, scale)
            self._result = (out, out._version) if self.can_remember(out) else None

    def can_remember(self, vector: Tensor) -> bool:
        """Whether it remembers at all; where versions are not counted nobody can tell if a vector is still the same."""
        return self._trend is not None and self._products is not None and not vector.is_inference()

    def has_remembered(self, vector: Tensor) -> bool:
        """Whether `add_to` was the last to change this very vector, and has remembered it."""
        return self._result is not None and self._result[0] is vector and self._result[1] == vector._version


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
    out: Tensor,
    table: Tensor,
    order: list[int],
    weights: Floats,
    row: int,
    trend: Trend,
    products: Products,
    scale: float | None = None,
) -> None:
    """The same, and for the new out a copy in a free row, and that row's inner products.

    With a scale these are of out as it was, and out is scaled before anything is added. The newest release of the
    trend is the first row in order.
    """
    _refuse_other_sizes(table, out, trend.value)
    library = _library(table, out, trend.value)
    if library is not None:
        gamma = 0.0 if trend.newest is None else trend.gamma  # a trend that has followed it already stays
        square = products.values.buffer_info()[0], products.width
        scaled = scale is not None, 1.0 if scale is None else scale
        _compiled(library, out, table, order, weights, *square, row, trend.value.data_ptr(), gamma, *scaled)
        trend.newest = None
        return
    by_row, average = _by_row(table, order, weights).to(out), trend.settle()
    vector = out.detach() if scale is None else out.detach().clone()
    products_of_parts = []
    for part in _parts(table):
        cached = table[:, part].to(out.dtype)
        out[part].addmv_(cached.t(), by_row, beta=1 if scale is None else scale)
        products_of_parts.append(_products(cached, vector[part], average[part]))
    products.put(row, _summed(products_of_parts, order))
    table[row].copy_(vector)


def _compiled(library: CDLL, out: Tensor, table: Tensor, order: list[int], weights: Floats, *remember: Any) -> None:
    recall = library.fodp_recall_bfloat16 if _is_narrow(table) else library.fodp_recall
    rows, factors = array("L", order), array("f", weights)
    recall(
        out.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        rows.buffer_info()[0],
        len(order),
        out.numel(),
        factors.buffer_info()[0],
        *(remember or (None, 0, 0, None, 0.0, False, 1.0)),
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
    """⟨vector, vector⟩ and ⟨trend, vector⟩, then ⟨row, vector⟩ of the rows in order."""
    parts = (_products(table[:, part].to(vector.dtype), vector[part], trend[part]) for part in _parts(table))
    return _summed(list(parts), order)


def _products(rows: Tensor, vector: Tensor, trend: Tensor) -> Tensor:
    vector = vector.detach()
    return torch.cat([torch.mv(torch.stack([vector, trend.to(vector.dtype)]), vector), torch.mv(rows, vector)])


def _summed(products_of_parts: list[Tensor], order: list[int]) -> Floats:
    square, along, *by_row = torch.stack(products_of_parts).cpu().double().sum(0).tolist()
    return [square, along, *(by_row[row] for row in order)]


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
