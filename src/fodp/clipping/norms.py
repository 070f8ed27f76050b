"""The norms of per-example gradients, over all uses of all parameters, and the weights that keep them in bounds."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fodp.clipping.layers.uses import Use

Uses = Sequence[tuple[Use, float]]

# Units in the last place by which norms are raised. From a sum of squares to a weighted gradient every number is
# rounded at most nine times by half a unit: square, root, reciprocal, bound, their product; block weight, its product;
# and the products with the two factors of a gradient.
_RAISED = 6


def norms_of(uses: Uses, examples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, bool]:
    """Norms of Σ_l b_l·G_{i,l}, and whether all are known to be finite; uses come with their b.

    Never so small that a clipped gradient, as float arithmetic makes it, exceeds its bound (`FLOAT_TOLERANCE`):
    raised by what rounding may add to sums over positions, and by `_RAISED` for the few roundings that every number
    goes through.
    """
    squares = torch.zeros(examples, dtype=torch.float64, device=device)
    slacks = []  # Σ_l b_l²·slack_{i,l}²: what rounding adds to one parameter's gradient is orthogonal to another's
    for use, b in uses:
        squares.add_(use.squared_norms(), alpha=b**2)
        if use.slack is not None:
            slacks.append(use.slack.square() * b**2)
    if slacks:
        squares = squares.sqrt_().add_(torch.stack(slacks).sum(0).sqrt_()).square_()
    return roots(squares, dtype)


def roots(squares: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """The roots, raised and in this type, and whether all are known to be finite: an accelerator would make us wait."""
    factor = (1 + _RAISED * torch.finfo(dtype).eps) ** 2
    norms = squares.mul(factor).to(dtype).sqrt_()
    return norms, norms.device.type == "cpu" and math.isfinite(norms.sum().item())
