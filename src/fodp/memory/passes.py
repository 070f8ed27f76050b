"""One pass over remembered vectors: their weighted sum goes into a vector, which is remembered on the way.

A window is far larger than a core's cache, so what costs is how often it is read. Here once per release: block by
block, and what is needed of a block twice is read while it is in cache.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fodp import kernels

# Distances are summed in float32 over blocks of at most this many entries, and over the blocks in float64.
BLOCK = 1 << 16
# Entries of a block of rows that fit into a core's cache.
_CACHED = 1 << 18

# On other devices one block, unless its temporaries would be large.
_ON_DEVICE = 1 << 26

Floats = list[float]
Weights = Floats | Tensor  # a tensor on the device of the window, where that is not the CPU: nothing of it is read


def mix(out: Tensor, table: Tensor, weights: Weights) -> None:
    """out += Σ weight·row over the first rows of a table."""
    library = kernels.library_for(out) if _is_readable(table) else None
    if library is not None and not isinstance(weights, Tensor):
        library.mix(out, table, weights)
        return
    factors = _factors(weights, out)
    for part in _parts(table):
        _add(out[part], table[: len(weights), part], factors)


def mix_and_remember(
    out: Tensor,
    table: Tensor,
    weights: Weights,
    scale: float | None,
    trend: Tensor,
    gamma: float,
    row: int,
    kept: int,
) -> Weights:
    """out = (scale or 1)·out + Σ weight·row, as `mix`; the new out, or with a scale what it was, is remembered.

    It goes to `row`, over what was there, and the trend follows it: trend += γ·(row - trend). Returns ‖row - trend‖² of
    the first `kept` rows (subtracted before they are squared, so that nothing cancels) and then ‖trend‖²; as a float64
    tensor where the window is on another device than the CPU.
    """
    library = kernels.library_for(out, trend) if _is_readable(table) else None
    if library is not None and not isinstance(weights, Tensor):
        return library.mix_and_remember(out, table, weights, scale, trend, gamma, row, kept)
    vector = out
    if scale is not None:
        vector = out.clone()
        out.mul_(scale)
    factors, squares, wide = _factors(weights, out), [], None if table.is_cpu else torch.float64
    for part in _parts(table):
        _add(out[part], table[: len(weights), part], factors)
        table[row, part] = vector[part]
        rows = table[:kept, part].to(trend.dtype)
        average = trend[part].lerp_(rows[row], gamma)
        apart, own = rows.sub(average).square_(), average.square()
        squares.append(torch.cat([apart.sum(1, dtype=wide), own.sum(0, keepdim=True, dtype=wide)]))
    summed = torch.stack(squares).double().sum(0)
    return summed.tolist() if table.is_cpu else summed


def _add(out: Tensor, rows: Tensor, factors: Tensor) -> None:
    if len(factors):
        out.addmv_(rows.to(out.dtype).t(), factors)


def _factors(weights: Weights, out: Tensor) -> Tensor:
    """In the type and on the device of `out`; a few numbers go there without a wait."""
    if not isinstance(weights, Tensor):
        weights = torch.tensor(weights, dtype=torch.float64)
    return weights.to(out.device, out.dtype, non_blocking=True)


def _parts(table: Tensor) -> Iterator[slice]:
    """Columns of all rows that fit into a core's cache."""
    step = max(1, min(BLOCK, _CACHED // len(table)) if table.is_cpu else _ON_DEVICE // len(table))
    return (slice(start, start + step) for start in range(0, table.shape[1], step))


def _is_readable(table: Tensor) -> bool:
    """Whether the compiled pass can read a table: rows of float32 in main memory, which need not be side by side."""
    return table.dtype is torch.float32 and table.is_cpu and table.stride(-1) == 1
