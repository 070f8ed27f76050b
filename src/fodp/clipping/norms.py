"""The norms of per-example gradients, over all uses of all parameters."""

from collections.abc import Sequence
from ctypes import c_double, c_size_t, c_void_p

import torch
from torch import Tensor

from fodp import kernels
from fodp.clipping.uses import Dense, Product, Use

Uses = Sequence[tuple[Use, float]]


def norms(uses: Uses, squares: Tensor) -> Tensor:
    """√Σ_l b_l²·‖G_{i,l}‖² per example, where uses come with their b; worked out in `squares`, which holds zeros."""
    for use, b in _add_compiled(uses, squares):
        squares.add_(use.squared_norms(), alpha=b**2)
    return squares.sqrt_()


def _add_compiled(uses: Uses, squares: Tensor) -> Uses:
    """Add the squares of rows and of outer products of rows in one call, instead of dozens; returns the other uses."""
    library = kernels.library() if _plain(squares) else None
    if library is None:
        return uses
    examples, others, places, widths, factors = len(squares), [], [], [], []
    for use, b in uses:
        rows = _rows(use)
        if not rows or not all(map(_plain, rows)):
            others.append((use, b))
            continue
        places += [row.data_ptr() for row in rows] + [None] * (2 - len(rows))
        widths += [row.numel() // examples for row in rows] + [0] * (2 - len(rows))
        factors.append(b**2)
    count = len(factors)
    arrays = (c_void_p * (2 * count))(*places), (c_size_t * (2 * count))(*widths), (c_double * count)(*factors)
    library.fodp_add_squares(squares.data_ptr(), examples, *arrays, count)
    return others


def _rows(use: Use) -> tuple[Tensor, ...]:
    """What an example's gradient is made of: a row, or two of which it is the outer product; () for other uses."""
    if type(use) is Product:
        return use.inputs, use.back
    return (use.gradients,) if type(use) is Dense else ()


def _plain(tensor: Tensor) -> bool:
    """What the compiled pass reads: some float32 in main memory, side by side; nothing has no address."""
    kind = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return kind and tensor.numel() > 0 and tensor.is_contiguous()
