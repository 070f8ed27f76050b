"""One pass over remembered vectors: their weighted sum goes into a vector, whose inner products come out.

A window is far larger than a core's cache, so what costs is how often it is read. Here once per release: block by
block, while the block is in cache.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fodp import kernels
from fodp._checks import PrivacyError

# Inner products run in float32 over blocks of at most this many entries and are added up in float64:
# exact enough for the scores at the speed of one pass through memory.
BLOCK = 1 << 16
# Entries of a block of rows that fit into a core's cache.
_CACHED = 1 << 17

Floats = npt.NDArray[np.float64]


class Recall:
    """Σ weight·row, not yet worked out: a term of a query.

    Adding it to a vector also takes, with `take_products`, the inner products with every row and with itself of
    that vector, or of another one; `products` gives them for that very vector, as long as nobody has changed it.
    """

    def __init__(self, rows: Tensor, weights: Floats, take_products: bool):
        self._rows, self._weights, self._take_products = rows, weights, take_products
        self._result: tuple[Tensor, int, Floats] | None = None

    def add_to(self, out: Tensor, factor: float, vector: Tensor | None = None) -> None:
        """out += factor · Σ weight·row; the products are those of `vector`, or of the new out."""
        vector = out if vector is None else vector
        found = mix(out, self._rows, factor * self._weights, vector if self._take_products else None)
        self._result = None if found is None else (vector, vector._version, found)

    def products(self, vector: Tensor) -> Floats | None:
        """⟨row, vector⟩ of every row, then ⟨vector, vector⟩; None if `add_to` did not take them."""
        if self._result is None or self._result[0] is not vector or self._result[1] != vector._version:
            return None
        return self._result[2]


def mix(out: Tensor, rows: Tensor, weights: Floats, vector: Tensor | None) -> Floats | None:
    """out += Σ weight·row; then, of a vector, which may be the new out, the inner products with rows and itself."""
    size = rows.shape[1]
    if out.shape != (size,) or (vector is not None and vector.shape != (size,)):
        raise PrivacyError(f"a memory of {size} entries cannot be mixed into a vector of shape {tuple(out.shape)}")
    narrow_rows = rows.dtype == torch.bfloat16
    plain = _plain(rows, narrow_rows) and all(_plain(t) for t in (out, vector) if t is not None)
    library = kernels.library() if plain else None
    if library is not None:
        narrow, products = weights.astype(np.float32), np.empty(len(rows) + 1)
        recall = library.fodp_recall_bfloat16 if narrow_rows else library.fodp_recall
        recall(
            out.data_ptr(),
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            out.numel(),
            narrow.ctypes.data,
            None if vector is None else vector.data_ptr(),
            None if vector is None else products.ctypes.data,
        )
        return None if vector is None else products
    by_row = torch.from_numpy(weights).to(out)
    parts: list[Floats] = []
    step = max(1, min(BLOCK, _CACHED // len(rows)))
    for start in range(0, out.numel(), step):
        cached = rows[:, start : start + step].to(out.dtype)
        out[start : start + step].addmv_(cached.t(), by_row)
        if vector is not None:
            parts.append(inner_products(cached, vector[start : start + step]))
    return np.sum(parts, axis=0) if parts else None


def inner_products(rows: Tensor, vector: Tensor) -> Floats:
    """⟨row, vector⟩ of every row, then ⟨vector, vector⟩; summed over blocks in float64."""
    parts = [
        torch.cat([torch.mv(rows[:, i : i + BLOCK].to(part.dtype), part), torch.dot(part, part).view(1)])
        for i, part in zip(range(0, len(vector), BLOCK), vector.split(BLOCK), strict=True)
    ]
    return torch.stack(parts).cpu().numpy().sum(0, dtype=np.float64)


def inner_product(left: Tensor, right: Tensor) -> float:
    """⟨left, right⟩; summed over blocks in float64."""
    parts = [torch.dot(a, b) for a, b in zip(left.split(BLOCK), right.split(BLOCK), strict=True)]
    return float(torch.stack(parts).cpu().numpy().sum(dtype=np.float64))


def squared_distances(rows: Tensor, vector: Tensor) -> Floats:
    """‖row - vector‖² of every row: subtracted first, so that nothing cancels."""
    starts = range(0, len(vector), BLOCK)
    parts = [(rows[:, i : i + BLOCK] - vector[i : i + BLOCK]).square_().sum(1) for i in starts]
    return torch.stack(parts).cpu().numpy().sum(0, dtype=np.float64)


def _plain(tensor: Tensor, narrow: bool = False) -> bool:
    """What the compiled pass reads: float32 or bfloat16 in main memory, entries of a row side by side."""
    return (
        tensor.dtype == (torch.bfloat16 if narrow else torch.float32)
        and tensor.device.type == "cpu"
        and tensor.stride(-1) == 1
    )
