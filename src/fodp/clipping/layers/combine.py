"""Several uses of one parameter, or one times a factor, as one use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fodp.clipping.layers import uses as held
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.rounding import SPARE, gamma
from fodp.clipping.layers.uses import Dense, Outer, Product, Use, chunks


class Tied:
    """A table whose rows are also a layer's weight: G_i = A_i + B_i, A_i of tokens and B_i an outer product.

    ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩. A adds back_t to row x_t and B = Σ_s c_s ⊗ d_s, so
    ⟨A, B⟩ = Σ_t Σ_s c_s[x_t]·⟨back_t, d_s⟩: positions times positions, and no vocabulary.

    Rounding: each part's norm is known up to its slack, so the squares of both are off by (m + slack)² - m² at most,
    and ⟨A, B⟩, in float64, by γ of its terms times Σ_t Σ_s |c_s[x_t]|·‖back_t‖·‖d_s‖. A B that is held was rounded
    before it is summed, which ⟨A, B⟩ does not see: 2·‖A‖ times that rounding more. If A and B cancel, this is much
    beside what is left, and the norm is raised by it. The sum adds both parts' entries: one rounding more of each.
    """

    def __init__(self, table: Rows, outer: Outer):
        self.table, self.outer = table, outer
        self.slack: Tensor | None = None

    def squared_norms(self) -> Tensor:
        """By the two norms and the cross terms."""
        parts = [(use.squared_norms(), use.slack) for use in (self.table, self.outer)]
        slacks = [torch.zeros_like(squares) if slack is None else slack for squares, slack in parts]
        lengths = [squares.sqrt() for squares, _ in parts]
        cross, mass = self._cross()
        squares = (parts[0][0] + parts[1][0] + 2 * cross).clamp_(min=0)
        terms = self.table.back.shape[1] * self.outer.back.shape[2] + self.table.back.shape[2] + 4
        apart = SPARE * 2 * gamma(terms, torch.float64) * (mass + parts[0][0] + parts[1][0])
        for length, slack in zip(lengths, slacks, strict=True):
            apart = apart + slack * (2 * length + slack)
        if self.outer.is_held:
            apart = apart + 2 * lengths[0] * self.outer.rounding_of_sum()
        added = SPARE * gamma(2, self.outer.back.dtype) * (lengths[0] + lengths[1])
        self.slack = (squares + apart).sqrt_() - squares.sqrt() + slacks[0] + slacks[1] + added
        return squares

    def _cross(self) -> tuple[Tensor, Tensor]:
        """⟨A, B⟩ of each example in float64, and the same of absolute values."""
        found, masses = [], []
        length, positions = self.table.back.shape[1], self.outer.back.shape[2]
        for start, stop in chunks(len(self.table.back), length * positions + (length + positions) * self.outer.fan_in):
            words, tokens = self.table.indices[start:stop], self.table.back[start:stop].double()
            inputs, back = self.outer.inputs(start, stop)[:, 0].double(), self.outer.back[start:stop, 0]
            seen = back.gather(2, words[:, None].expand(-1, positions, -1)).double()  # c_s[x_t], [b, s, t]
            found.append((seen * torch.matmul(inputs, tokens.mT)).sum((1, 2)))
            masses.append((seen.abs() * inputs.norm(dim=2)[:, :, None] * tokens.norm(dim=2)[:, None]).sum((1, 2)))
        return torch.cat(found), torch.cat(masses)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Both parts, one after the other."""
        self.outer.add_weighted(out, weights, accumulate)
        self.table.add_weighted(out, weights, True)

    def dense(self) -> Tensor:
        """[B, table rows, width]."""
        return self.table.dense() + self.outer.dense()

    def grouped(self, copies: int) -> "Tied":
        """Copies of one example lie side by side as further positions."""
        return Tied(self.table.grouped(copies), self.outer.grouped(copies))

    def masked(self, keep: Tensor) -> "Tied":
        """Zero what is not kept."""
        return Tied(self.table.masked(keep), self.outer.masked(keep))


def scaled(use: Use, factor: float) -> Use:
    """The gradients times a public factor."""
    if factor == 1:
        return use
    if isinstance(use, Tied):
        table, outer = scaled(use.table, factor), scaled(use.outer, factor)
        assert isinstance(table, Rows)
        assert isinstance(outer, Outer)
        return Tied(table, outer)
    if isinstance(use, Rows):
        return Rows(use.indices, use.back * factor, use.table_rows)
    if isinstance(use, Product):
        return Product(use.inputs, use.back * factor)
    if isinstance(use, Outer):
        return Outer(use.inputs(), use.back * factor)
    return Dense(use.dense() * factor)


def merged(uses: Sequence[Use]) -> Use:
    """Several uses of one parameter as one: their gradients add up before anything is squared."""
    uses = _joined(uses) if len(uses) > 1 else uses
    if len(uses) == 1:
        return uses[0]
    uses = [use.as_outer() if isinstance(use, Product) else use for use in uses]
    outers = [use for use in uses if isinstance(use, Outer)]
    if len(outers) == len(uses) and len({use.back.shape[1] for use in outers}) == 1:
        return Outer(torch.cat([u.inputs() for u in outers], 2), torch.cat([u.back for u in outers], 2))
    tables = [use for use in uses if isinstance(use, Rows)]
    if len(tables) == len(uses):
        indices, back = torch.cat([u.indices for u in tables], 1), torch.cat([u.back for u in tables], 1)
        return Rows(indices, back, tables[0].table_rows)
    if len(tables) + len(outers) == len(uses) and all(_is_large(outer) for outer in outers):
        table, outer = merged(tables), merged(outers)
        if isinstance(table, Rows) and isinstance(outer, Outer) and outer.back.shape[1] == 1:
            return Tied(table, outer)
    return Dense(torch.stack([use.dense().flatten(1) for use in uses]).sum(0))


def _is_large(use: Outer) -> bool:
    """Whether per-example gradients are too many to be held beside each other: cross terms then cost less."""
    count, groups, _, fan_out = use.back.shape
    return count * groups * fan_out * use.fan_in > held.HELD_ENTRIES >> 4


def _joined(uses: Sequence[Use]) -> Sequence[Use]:
    """Products of the same inputs, as of a first layer at two points, become one: their back-signals add up."""
    joined: dict[object, Use] = {}
    for use in uses:
        if not isinstance(use, Product):
            joined[use] = use
            continue
        key = use.inputs.data_ptr(), use.inputs.shape, use.inputs.stride(), use.inputs.dtype
        known = joined.get(key)
        joined[key] = Product(use.inputs, known.back + use.back) if isinstance(known, Product) else use
    return list(joined.values())
