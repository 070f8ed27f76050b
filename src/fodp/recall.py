"""One pass over remembered vectors: their weighted sum goes into a vector, whose inner products come out.

A window is far larger than a core's cache, so what costs is how often it is read. Here once per release: block by
block, while the block is in cache.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp import kernels

# Inner products run in float32 over blocks of at most this many entries and are added up in float64:
# exact enough for the scores at the speed of one pass through memory.
BLOCK = 1 << 16
# Entries of a block of rows that fit into a core's cache.
_CACHED = 1 << 17

Floats = npt.NDArray[np.float64]


class Recall:
    """Σ weight·row, not yet worked out: a term of a query.

    Adding it to a vector also takes, with `take_products`, the inner products of the result with every row and
    with itself; `products` gives them for that very vector, as long as nobody has changed it.
    """

    def __init__(self, rows: Tensor, weights: Floats, take_products: bool):
        self._rows, self._weights, self._take_products = rows, weights, take_products
        self._result: tuple[Tensor, int, Floats] | None = None

    def add_to(self, out: Tensor, factor: float) -> None:
        """out += factor · Σ weight·row."""
        found = mix(out, self._rows, factor * self._weights, self._take_products)
        self._result = None if found is None else (out, out._version, found)

    def products(self, vector: Tensor) -> Floats | None:
        """⟨row, vector⟩ of every row, then ⟨vector, vector⟩; None if this is not what `add_to` made."""
        if self._result is None or self._result[0] is not vector or self._result[1] != vector._version:
            return None
        return self._result[2]


def mix(out: Tensor, rows: Tensor, weights: Floats, take_products: bool) -> Floats | None:
    """out += Σ weight·row; then the inner products of the result with every row and with itself, if asked for."""
    library = kernels.library() if _plain(out) and _plain(rows) else None
    if library is not None:
        narrow, products = weights.astype(np.float32), np.empty(len(rows) + 1)
        library.fodp_recall(
            out.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            out.numel(),
            narrow.ctypes.data,
            products.ctypes.data if take_products else None,
        )
        return products if take_products else None
    by_row = torch.from_numpy(weights).to(out)
    parts = []
    step = max(1, min(BLOCK, _CACHED // len(rows)))
    for start in range(0, out.numel(), step):
        block, part = out[start : start + step], rows[:, start : start + step]
        block.addmv_(part.t(), by_row)
        if take_products:
            parts.append(torch.cat([torch.mv(part, block), torch.dot(block, block).view(1)]))
    return torch.stack(parts).cpu().numpy().sum(0, dtype=np.float64) if take_products else None


def squared_distances(rows: Tensor, vector: Tensor) -> Floats:
    """‖row - vector‖² of every row: subtracted first, so that nothing cancels."""
    starts = range(0, len(vector), BLOCK)
    parts = [(rows[:, i : i + BLOCK] - vector[i : i + BLOCK]).square_().sum(1) for i in starts]
    return torch.stack(parts).cpu().numpy().sum(0, dtype=np.float64)


def _plain(tensor: Tensor) -> bool:
    """What the compiled pass reads: float32 in main memory, entries of a row side by side."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.stride(-1) == 1
