"""The norms of per-example gradients, over all uses of all parameters, and the weights that keep them in bounds."""

import math
from collections.abc import Sequence
from ctypes import c_double, c_size_t, c_void_p

import torch
from torch import Tensor

from fodp import kernels
from fodp.clipping.uses import Dense, Product, Use

Uses = Sequence[tuple[Use, float]]


def add_squared_norms(uses: Uses, squares: Tensor) -> Tensor:
    """Add Σ_l b_l²·‖G_{i,l}‖² of every example to `squares`; uses come with their b."""
    for use, b in _add_compiled(uses, squares):
        squares.add_(use.squared_norms(), alpha=b**2)
    return squares


def roots(squares: Tensor) -> tuple[Tensor, bool]:
    """The roots, in place, and whether all are known to be finite: an accelerator would make us wait for that."""
    library = kernels.library_for(squares)
    if library is not None:
        return squares, bool(library.fodp_roots(squares.data_ptr(), len(squares)))
    squares.sqrt_()
    return squares, squares.device.type == "cpu" and math.isfinite(squares.sum().item())


def limits(norms: Tensor, bound: float, most: float = math.inf) -> Tensor:
    """The largest weights, up to `most`, that keep every weighted norm within the bound."""
    # Squares of smaller norms run out of exponent: such a norm could be larger than it looks.
    smallest = torch.finfo(norms.dtype).tiny ** 0.25
    library = kernels.library_for(norms)
    if library is None:
        return norms.clamp(min=smallest).reciprocal_().mul_(bound).clamp_(max=most)
    out = torch.empty_like(norms)
    library.fodp_limits(out.data_ptr(), norms.data_ptr(), len(norms), bound, smallest, most)
    return out


def _add_compiled(uses: Uses, squares: Tensor) -> Uses:
    """Add the squares of rows and of outer products of rows in one call, instead of dozens; returns the other uses."""
    library = kernels.library_for(squares)
    if library is None:
        return uses
    examples, others, places, widths, factors = len(squares), [], [], [], []
    for use, b in uses:
        rows = _rows(use)
        if not rows or not kernels.can_read(*rows):
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
