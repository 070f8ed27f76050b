"""Weights that are made of parameters alone, by a norm: the gradient goes back without being held example by example.

Weight norm makes W_r = g_r·v_r/‖v_r‖ of each row. With G the gradient of W, n_r = v_r/‖v_r‖ and c_r = g_r/‖v_r‖,

    ∂/∂g_r = ⟨G_r, n_r⟩     and     ∂/∂v_r = c_r·(G_r - ⟨G_r, n_r⟩·n_r).

Both are linear in G, so a weighted sum over examples is that of Σ w_i·G_i. For an outer product G = b ⊗ a the norm is
known without G: ‖∂/∂v_r‖² = c_r²·b_r²·(‖a‖² - ⟨a, n_r⟩²). What is left of a after the projection may be far smaller
than a, so all of this is computed in float64, and its rounding relative to a is the slack.
"""

import torch
from torch import Tensor

from fodp.clipping.layers.rounding import SPARE, gamma
from fodp.clipping.layers.uses import Dense, Outer, Product, Use, chunks


class Projected:
    """The gradients of v in W_r = g_r·v_r/‖v_r‖, from those of W. Directions [rows, fan_in] and factors c [rows]."""

    def __init__(self, weight: Outer, directions: Tensor, factors: Tensor):
        groups, fan_out = weight.back.shape[1], weight.back.shape[3]
        self._weight, self._directions, self._factors = weight, directions, factors
        self._by_group = directions.view(groups, fan_out, -1)
        self._factor = factors.view(groups, fan_out)
        self.slack: Tensor | None = None

    def squared_norms(self) -> Tensor:
        """In closed form at one position, else from the gradients, a few examples at a time."""
        count, groups, length, fan_out = self._weight.back.shape
        squares, masses = [], []
        entries = groups * self._weight.fan_in * (length + (0 if length == 1 else fan_out))
        for start, stop in chunks(count, entries):
            inputs, back = self._parts(start, stop)
            back = back * self._factor[:, None]
            lengths = inputs.norm(dim=3) * back.norm(dim=3)
            masses.append(lengths.sum(2).square_().sum(1))
            if length == 1:
                along = _times(inputs, self._by_group)
                across = inputs.square().sum(3, keepdim=True) - along.square_()
                squares.append((back.square() * across.clamp_(min=0)).sum((1, 2, 3)))
            else:
                gradients = torch.matmul(back.mT, inputs)
                squares.append(self._across(gradients).square_().sum((1, 2, 3)))
        found, mass = torch.cat(squares), torch.cat(masses)
        terms = 4 * self._weight.fan_in + length + fan_out + 8
        apart = SPARE * gamma(terms, torch.float64) * mass
        self.slack = (found + apart).sqrt_() - found.sqrt()
        return found

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """The weighted sum of W's gradients, projected once."""
        count, groups, length, fan_out = self._weight.back.shape
        total = self._by_group.new_zeros(groups, fan_out, self._weight.fan_in)
        for start, stop in chunks(count, groups * length * (self._weight.fan_in + fan_out)):
            inputs, back = self._parts(start, stop)
            back = back * weights[start:stop, None, None, None].double()
            for group in range(groups):
                total[group].addmm_(back[:, group].flatten(0, 1).t(), inputs[:, group].flatten(0, 1))
        found = (self._across(total) * self._factor[..., None]).view(out.shape).to(out.dtype)
        if accumulate:
            out.add_(found)
        else:
            out.copy_(found)

    def dense(self) -> Tensor:
        """[B, rows, fan_in]."""
        inputs, back = self._parts(0, len(self._weight.back))
        gradients = self._across(torch.matmul(back.mT, inputs)) * self._factor[..., None]
        return gradients.flatten(1, 2).to(self._weight.back.dtype)

    def grouped(self, copies: int) -> "Projected":
        """The same of the weight's."""
        return Projected(self._weight.grouped(copies), self._directions, self._factors)

    def masked(self, keep: Tensor) -> "Projected":
        """The same of the weight's."""
        return Projected(self._weight.masked(keep), self._directions, self._factors)

    def _parts(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self._weight.inputs(start, stop).double(), self._weight.back[start:stop].double()

    def _across(self, gradients: Tensor) -> Tensor:
        """What is orthogonal to the directions, row by row."""
        along = (gradients * self._by_group).sum(-1, keepdim=True)
        return gradients - along * self._by_group


def weight_norm(use: Use, v: Tensor, g: Tensor) -> tuple[Use, Use] | None:
    """Uses of v and of g, from the use of the weight that is normed by rows; None: this use is not known here."""
    if not isinstance(use, Product | Outer):
        return None
    weight = use.as_outer() if isinstance(use, Product) else use
    rows = v.detach().double().reshape(len(v), -1)
    lengths = rows.norm(dim=1)
    directions = rows / lengths[:, None]
    return Projected(weight, directions, g.detach().double().reshape(-1) / lengths), _along(weight, directions, g.shape)


def _along(weight: Outer, matrix: Tensor, shape: torch.Size) -> Dense:
    """⟨G_r, matrix_r⟩ of each row of each example's gradient, in a parameter of this shape."""
    return Dense(row_products(weight, matrix).reshape(len(weight.back), *shape))


def row_products(weight: Outer, matrix: Tensor) -> Tensor:
    """⟨G_r, matrix_r⟩ in float64, [examples, rows]: Σ_t b_{t,r}·⟨a_t, matrix_r⟩."""
    count, groups, length, fan_out = weight.back.shape
    by_group = matrix.double().reshape(groups, fan_out, -1)
    parts = []
    for start, stop in chunks(count, groups * length * (weight.fan_in + fan_out)):
        along = _times(weight.inputs(start, stop).double(), by_group)
        parts.append((along * weight.back[start:stop].double()).sum(2).flatten(1))
    return torch.cat(parts)


def _times(inputs: Tensor, by_group: Tensor) -> Tensor:
    """⟨a, row⟩ for all rows of a group, [b, groups, T, rows]: one product for each group, not for each example."""
    pairs = zip(inputs.unbind(1), by_group, strict=True)
    products = [(part.flatten(0, 1) @ rows.t()).unflatten(0, part.shape[:2]) for part, rows in pairs]
    return products[0].unsqueeze(1) if len(products) == 1 else torch.stack(products, 1)
