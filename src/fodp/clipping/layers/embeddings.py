"""The per-example gradients of an embedding table."""

import numpy as np
import torch
from torch import Tensor

from fodp.clipping.layers.rounding import SPARE, gamma
from fodp.clipping.layers.uses import mask, square_sums, wide


class Rows:
    """An embedding table: G_i adds back_{i,t} to row index_{i,t}. Shapes: [B, T] and [B, T, width]."""

    def __init__(self, indices: Tensor, back: Tensor, table_rows: int):
        self.indices, self.back, self.table_rows = indices, wide(back), table_rows
        self.slack: Tensor | None = None

    def squared_norms(self) -> Tensor:
        """Where a token comes twice in an example, its back-signals are summed before they are squared."""
        squares, mass = self._squares_and_mass()
        # A token's back-signals are summed twice: here and, in another order, in the sum over examples.
        self.slack = 2 * SPARE * gamma(self.back.shape[1], self.back.dtype) * mass
        return squares

    def _squares_and_mass(self) -> tuple[Tensor, Tensor]:
        """Squared norms, and Σ_t ‖back_t‖ of the examples in which a token comes twice, else 0."""
        squares = square_sums(self.back)
        mass = torch.zeros_like(squares)
        some = self._repeating()
        if some is None:
            some = torch.arange(len(squares), device=squares.device)
        if len(some):
            squares[some] = self._summed_squares(self.indices[some], self.back[some])
            mass[some] = square_sums(self.back[some].flatten(0, 1)).sqrt_().view(len(some), -1).sum(1)
        return squares, mass

    def _repeating(self) -> Tensor | None:
        """The examples in which a token comes twice; None (any may be) where asking would make a device wait."""
        if self.indices.device.type != "cpu":
            return None
        ordered = np.sort(self.indices.numpy(), axis=1)  # far faster than PyTorch's
        return torch.from_numpy(np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)))

    def _summed_squares(self, indices: Tensor, back: Tensor) -> Tensor:
        if not back.is_cpu:
            return self._sorted_squares(indices, back)
        count, _, width = back.shape
        example = torch.arange(count, device=back.device)[:, None]
        keys, place = torch.unique(example * self.table_rows + indices, return_inverse=True)
        rows = back.new_zeros(len(keys), width).index_add_(0, place.flatten(), back.flatten(0, 1))
        owner = torch.div(keys, self.table_rows, rounding_mode="floor")
        squares = torch.zeros(count, dtype=torch.float64, device=back.device)
        return squares.index_add_(0, owner, square_sums(rows))

    def _sorted_squares(self, indices: Tensor, back: Tensor) -> Tensor:
        """The same without asking a device how many different tokens there are: room for as many as positions."""
        count, length, width = back.shape
        example = torch.arange(count, device=back.device)[:, None]
        keys, order = (example * self.table_rows + indices).flatten().sort()
        place = torch.cat([keys.new_zeros(1), (keys[1:] != keys[:-1]).cumsum(0)])
        rows = back.new_zeros(count * length, width).index_add_(0, place, back.flatten(0, 1).index_select(0, order))
        owner = torch.zeros_like(keys).scatter_(0, place, order.div(length, rounding_mode="floor"))
        squares = torch.zeros(count, dtype=torch.float64, device=back.device)
        return squares.index_add_(0, owner, square_sums(rows))  # rows that were not needed are zero

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Scatter the re-weighted back-signals into the table."""
        if not accumulate:
            out.zero_()
        weighted = self.back * weights[:, None, None]
        out.index_add_(0, self.indices.flatten(), weighted.flatten(0, 1).to(out.dtype))

    def dense(self) -> Tensor:
        """[B, table rows, width]."""
        count, length, width = self.back.shape
        example = torch.arange(count, device=self.back.device)[:, None].expand(count, length)
        table = self.back.new_zeros(count, self.table_rows, width)
        return table.index_put_((example, self.indices), self.back, accumulate=True)

    def grouped(self, copies: int) -> "Rows":
        """Copies of one example lie side by side as further positions."""
        back = self.back.unflatten(0, (-1, copies)).flatten(1, 2) / copies
        return Rows(self.indices.unflatten(0, (-1, copies)).flatten(1, 2), back, self.table_rows)

    def masked(self, keep: Tensor) -> "Rows":
        """Zero what is not kept."""
        return Rows(self.indices, mask(self.back, keep), self.table_rows)
