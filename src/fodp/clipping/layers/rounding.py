"""How far float arithmetic can be off, at worst, and Gram matrices that are not off by much.

A sum of n products, in whatever order, is off by at most γ_n = n·u / (1 - n·u) times the sum of their absolute values,
with u half the distance from 1 to the next float (Higham, Accuracy and Stability of Numerical Algorithms, ch. 3).
"""

import torch
from torch import Tensor

# Bounds are made of numbers that are rounded themselves, and products of small errors are left out.
SPARE = 1.01
# The longest sum of a float32 Gram matrix; longer ones are added up from these. Shorter ones cost more time.
_TERMS = 128


def gamma(terms: int, dtype: torch.dtype) -> float:
    """γ_n of a type: the largest error of a sum of so many products, relative to the sum of their absolute values."""
    share = terms * torch.finfo(dtype).eps / 2
    return share / (1 - share) if share < 1 else float("inf")


def gram(rows: Tensor) -> tuple[Tensor, int]:
    """⟨row_t, row_s⟩ of [..., T, width], and n: its sums are off by no more than γ_n.

    In float32, parts of the width have sums of their own, so that fewer roundings come one after another.
    """
    width = rows.shape[-1]
    part = _TERMS if rows.dtype == torch.float32 else max(1, width)
    total = torch.matmul(rows[..., :part], rows[..., :part].mT)
    for start in range(part, width, part):
        some = rows[..., start : start + part]
        total.add_(torch.matmul(some, some.mT))
    return total, min(width, part) + max(0, width - 1) // part


def gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of two Gram matrices per example and group, [b, groups, T, T], in float64 and per example:

    Σ of products of entries; Σ_groups (Σ of roots of products on the diagonals)²; the largest number on a diagonal.
    """
    left, right = left.double(), right.double()
    diagonals = [matrix.diagonal(dim1=2, dim2=3) for matrix in (left, right)]
    mass = (diagonals[0].sqrt() * diagonals[1].sqrt()).sum(2).square_().sum(1)
    largest = torch.maximum(*(diagonal.amax((1, 2)) for diagonal in diagonals))
    return (left * right).sum((1, 2, 3)), mass, largest
