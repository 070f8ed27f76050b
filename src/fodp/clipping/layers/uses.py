"""How a parameter was used, and what its per-example gradients are, without materialising them.

Every use knows two things about the gradients G_i of one parameter, one per example:
the squared norms ‖G_i‖², and the weighted sum Σ w_i·G_i. Tied weights, modules called twice and
combinations of gradients at two points are several uses of one parameter, merged into one.

Squares are summed in float64: those of float32 numbers are exact there, and neither vanish nor overflow. Where a
gradient is a sum over positions, float32 rounds on the way; `slack` bounds what that may do (docs/threat-model.md).
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from fodp.clipping.layers.rounding import SPARE, gamma, gram, gram_sums

# Temporaries are cut into chunks of examples with at most this many entries (8 MiB of float32): they stay in the
# processor's last cache, and the memory of one is used again for the next.
CHUNK_ENTRIES = 1 << 21
# Per-example gradients with at most this many entries in all are held.
HELD_ENTRIES = 1 << 23
# A ghost norm that rounding may move by more than this share of its square is measured again in float64.
_ILL_CONDITIONED = 0.02
_TINY = torch.finfo(torch.float64).tiny
# A factor with a larger squared norm counts as not finite: what clipping leaves of the other may be no float32.
_LARGEST = 2.0**180
_BLOCK = 1 << 13
_WIDE = (torch.float32, torch.float64)


class Use(Protocol):
    """The per-example gradients of one parameter."""

    @property
    def slack(self) -> Tensor | None:
        """What rounding may add to ‖G_i‖, in its measurement and in a sum; after `squared_norms`. None: nothing."""

    def squared_norms(self) -> Tensor:
        """‖G_i‖² per example, in float64."""

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Write Σ w_i·G_i to `out` (shaped like the parameter), or add it there."""

    def dense(self) -> Tensor:
        """All G_i, materialised: [examples, *parameter shape]."""

    def grouped(self, copies: int) -> "Use":
        """Treat each `copies` consecutive rows as one example: its gradient is their mean."""

    def masked(self, keep: Tensor) -> "Use":
        """Zero the examples that are not kept. Both factors: zero times NaN is NaN."""


def wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor if tensor.dtype in _WIDE else tensor.float()


def square_sums(rows: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, in float64: the rounding of float32 sums would hide many small entries."""
    flat = rows if rows.dim() == 2 else rows.flatten(1)
    if flat.numel() <= CHUNK_ENTRIES and flat.shape[1] < 2 * _BLOCK:  # in one piece, one block
        norms: Tensor = torch.linalg.vector_norm(flat.double(), dim=1)
        return norms.square_()
    squares = torch.empty(len(flat), dtype=torch.float64, device=flat.device)
    for start, stop in chunks(*flat.shape):
        squares[start:stop] = _norms(flat[start:stop].double()).square_()
    return squares


def _norms(flat: Tensor) -> Tensor:
    """Of rows in float64, long ones block by block, without a temporary of squares."""
    in_blocks = flat.shape[1] // _BLOCK * _BLOCK
    if in_blocks > _BLOCK:
        blocks = torch.linalg.vector_norm(flat[:, :in_blocks].unflatten(1, (-1, _BLOCK)), dim=2)
        rest = torch.linalg.vector_norm(flat[:, in_blocks:], dim=1, keepdim=True)
        flat = torch.cat([blocks, rest], 1)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms


class Dense:
    """Gradients that are small enough to be held: biases, norm layers, fallbacks."""

    slack: Tensor | None = None  # summed as they were measured

    def __init__(self, gradients: Tensor):
        gradients = gradients if gradients.dim() > 1 else gradients.unsqueeze(1)  # of a single number
        self.gradients = gradients if gradients.dtype in _WIDE else gradients.float()

    def squared_norms(self) -> Tensor:
        """‖G_i‖² per example."""
        return square_sums(self.gradients)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """One vector-matrix product."""
        flat = self.gradients if self.gradients.dim() == 2 else self.gradients.flatten(1)
        target = out if out.dim() == 1 else out.view(-1)
        if flat.dtype != out.dtype or weights.dtype != out.dtype:
            flat, weights = flat.to(out.dtype), weights.to(out.dtype)
        if accumulate:
            target.addmv_(flat.t(), weights)
        else:
            torch.mv(flat.t(), weights, out=target)

    def dense(self) -> Tensor:
        """The gradients themselves."""
        return self.gradients

    def grouped(self, copies: int) -> "Dense":
        """Mean over each group of rows."""
        return Dense(self.gradients.unflatten(0, (-1, copies)).mean(1))

    def masked(self, keep: Tensor) -> "Dense":
        """Zero what is not kept."""
        return Dense(mask(self.gradients, keep))


class Product:
    """The weight of a Linear layer at one position: G_i = back_i ⊗ input_i. Shapes: [B, fan_in], [B, fan_out]."""

    slack: Tensor | None = None  # no sums within an example

    def __init__(self, inputs: Tensor, back: Tensor):
        self.inputs = inputs if inputs.dtype in _WIDE else inputs.float()
        self.back = back if back.dtype in _WIDE else back.float()

    def squared_norms(self) -> Tensor:
        """‖back_i‖²·‖input_i‖²."""
        return product_of_squares(self.inputs, self.back)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """One product of inputs with re-weighted back-signals, written straight into the flat vector."""
        inputs, back = self.inputs, self.back * weights.unsqueeze(1)
        if inputs.dtype != out.dtype or back.dtype != out.dtype:
            inputs, back = inputs.to(out.dtype), back.to(out.dtype)
        if accumulate:
            out.addmm_(back.t(), inputs)
        else:
            torch.mm(back.t(), inputs, out=out)

    def dense(self) -> Tensor:
        """[B, fan_out, fan_in]."""
        return self.back.unsqueeze(2) * self.inputs.unsqueeze(1)

    def as_outer(self) -> "Outer":
        """The same with dimensions for groups and positions."""
        return Outer(self.inputs[:, None, None], self.back[:, None, None])

    def grouped(self, copies: int) -> "Use":
        """Copies of one example become positions."""
        return self.as_outer().grouped(copies)

    def masked(self, keep: Tensor) -> "Product":
        """Zero both factors."""
        return Product(mask(self.inputs, keep), mask(self.back, keep))


class Outer:
    """A weight of a Linear-like layer: G_i = Σ_t back_{i,t} ⊗ input_{i,t}, per group of channels.

    Shapes: inputs [B, groups, T, fan_in], back [B, groups, T, fan_out]; the parameter holds
    groups·fan_out rows of fan_in entries.
    """

    _exact = False  # whether gradients that are held are float64

    def __init__(self, inputs: Tensor, back: Tensor):
        self._inputs = wide(inputs)
        self.back = wide(back)
        self._held: Tensor | None = None  # small per-example gradients, kept from the norms to the sum
        self.slack: Tensor | None = None

    def hold_exactly(self) -> None:
        """Hold gradients in float64.

        In float32 a library rounds them by where their factors lie in memory (MKL), so by the other examples, and a
        sum over examples in float64 would not be exact.
        """
        self._exact = True

    def inputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The layer's inputs of some examples, [b, groups, T, fan_in]."""
        return self._inputs[start:stop]

    @property
    def fan_in(self) -> int:
        """Entries per row of the parameter."""
        return self._inputs.shape[-1]

    def gram(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """⟨input_t, input_s⟩ for all positions of some examples, [b, groups, T, T], and the terms of its sums."""
        return gram(self.inputs(start, stop).to(dtype))

    def squared_norms(self) -> Tensor:
        """By product of norms (one position), Gram matrices ("ghost") or directly: the cheapest by shape."""
        count, groups, length, fan_out = self.back.shape
        if length == 1 and groups == 1:
            return product_of_squares(self.inputs(), self.back)
        if length == 1:
            by_group = product_of_squares(self.inputs().flatten(0, 1), self.back.flatten(0, 1))
            return by_group.view(count, groups).sum(1)
        if length * (self.fan_in + fan_out) <= self.fan_in * fan_out:
            return self._ghost_norms(groups * length * (length + self.fan_in))
        return self._direct_norms(groups * self.fan_in * (fan_out + length))

    def _ghost_norms(self, entries: int) -> Tensor:
        """‖Σ_t b_t⊗a_t‖² = Σ_{t,s} ⟨a_t,a_s⟩⟨b_t,b_s⟩.

        Where positions cancel, the terms are far larger than their sum, and rounding could hide a norm
        altogether. So its bound goes into the slack, and where that is much, float64 measures again.
        """
        parts, slacks = [], []
        for start, stop in chunks(len(self.back), entries):
            squares, apart, mass = self._ghost_squares(start, stop, self.back.dtype)
            # Norms below that last root count as that much anyway (`limits`). What is not finite is in doubt, too.
            doubtful = ~(apart <= _ILL_CONDITIONED * squares + torch.finfo(self.back.dtype).tiny ** 0.5)
            # Another device would have to be asked which they are, so there the whole bound stays in the slack: such an
            # example is clipped harder. (The few most doubtful ones must not be picked instead: one example's norm
            # would depend on the others'.)
            again_here = self.back.is_cpu and self.back.dtype != torch.float64
            for i in doubtful.nonzero().flatten().tolist() if again_here else ():
                again = self._ghost_squares(start + i, start + i + 1, torch.float64)
                squares[i], apart[i], mass[i] = (value[0] for value in again)
            parts.append(squares)
            slacks.append((squares + apart).sqrt_() - squares.sqrt() + self._sum_rounding(mass))
        self.slack = torch.cat(slacks)
        return torch.cat(parts)

    def _ghost_squares(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Squared norms, how far rounding in this type may have moved them, and Σ_t ‖b_t‖·‖a_t‖; all in float64."""
        groups, length = self.back.shape[1:3]
        inputs, in_terms = self.gram(start, stop, dtype)
        back, out_terms = gram(self.back[start:stop].to(dtype))
        squares, squared_mass, largest = gram_sums(inputs, back)
        squares.clamp_(min=0)
        squares.masked_fill_(largest > _LARGEST, math.inf)
        share = gamma(in_terms, dtype) + gamma(out_terms, dtype) + gamma(groups * length**2, torch.float64)
        # Products too small for this type, times the largest number they may meet.
        vanished = 2 * groups * length**2 * (in_terms + out_terms) * torch.finfo(dtype).tiny * largest
        return squares, SPARE * (share * squared_mass + vanished), (squared_mass + vanished).sqrt_()

    def _sum_rounding(self, mass: Tensor) -> Tensor:
        """Of a sum over positions whose gradients' norms add up to `mass`: positions may cancel, rounding does not."""
        return SPARE * gamma(self.back.shape[2], self.back.dtype) * mass

    @property
    def is_held(self) -> bool:
        """Whether gradients were held by `squared_norms`."""
        return self._held is not None

    def rounding_of_sum(self) -> Tensor:
        """At most what float sums over positions are off by, for each example."""
        lengths = _lengths(self.inputs()) * _lengths(self.back)
        return self._sum_rounding(lengths.sum(2).square_().sum(1).sqrt_())

    def _direct_norms(self, entries: int) -> Tensor:
        count, groups, _, fan_out = self.back.shape
        if count * groups * fan_out * self.fan_in <= HELD_ENTRIES:
            return self._held_norms(entries)
        parts, masses = [], []
        for start, stop in chunks(count, entries):
            inputs, back = self.inputs(start, stop), self.back[start:stop]
            parts.append(square_sums(torch.matmul(back.mT, inputs)))
            masses.append((_lengths(inputs) * _lengths(back)).sum(2).square_().sum(1).sqrt_())
        self.slack = 2 * self._sum_rounding(torch.cat(masses))  # the sum takes, and rounds, its own way
        return torch.cat(parts)

    def _held_norms(self, entries: int) -> Tensor:
        """Of gradients that are held: what is held is summed as it was measured."""
        count, groups, _, fan_out = self.back.shape
        self._held = held = self._to_hold(count, groups, fan_out, self.fan_in)
        for start, stop in chunks(count, entries):
            inputs, back = self.inputs(start, stop).to(held.dtype), self.back[start:stop].to(held.dtype)
            torch.bmm(back.flatten(0, 1).mT, inputs.flatten(0, 1), out=held[start:stop].flatten(0, 1))
        return square_sums(held)

    def _to_hold(self, *shape: int) -> Tensor:
        return self.back.new_empty(shape, dtype=torch.float64 if self._exact else None)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """One product of inputs with re-weighted back-signals, written straight into the flat vector."""
        if self._held is not None:
            Dense(self._held).add_weighted(out, weights, accumulate)
            return
        groups, fan_out = self.back.shape[1], self.back.shape[3]
        target = out.view(groups, fan_out, self.fan_in)
        for start, stop in chunks(len(self.back), groups * self.back.shape[2] * self.fan_in):
            back = (self.back[start:stop] * weights[start:stop, None, None, None]).to(out.dtype)
            inputs = self.inputs(start, stop).to(out.dtype)
            for group in range(groups):
                view = target[group]
                torch.addmm(
                    view,
                    back[:, group].reshape(-1, fan_out).t(),
                    inputs[:, group].reshape(-1, self.fan_in),
                    beta=float(accumulate or start > 0),
                    out=view,
                )

    def dense(self) -> Tensor:
        """[B, groups·fan_out, fan_in]."""
        return torch.matmul(self.back.mT, self.inputs()).flatten(1, 2)

    def grouped(self, copies: int) -> "Outer":
        """Copies of one example lie side by side as further positions."""
        return Outer(side_by_side(self.inputs(), copies), side_by_side(self.back, copies) / copies)

    def masked(self, keep: Tensor) -> "Outer":
        """Zero both factors, and what is held of them: it is summed as it was measured."""
        zeroed = Outer(mask(self.inputs(), keep), mask(self.back, keep))
        zeroed._held = None if self._held is None else mask(self._held, keep)
        return zeroed


def product_of_squares(left: Tensor, right: Tensor) -> Tensor:
    """‖left_i‖²·‖right_i‖². A factor too small for its square must not hide what the other one makes of it."""
    first, second = square_sums(left).clamp_(min=_TINY), square_sums(right).clamp_(min=_TINY)
    if left.dtype == torch.float32:
        return (first * second).masked_fill_(torch.maximum(first, second) > _LARGEST, math.inf)
    return first * second


def _lengths(rows: Tensor) -> Tensor:
    """At least the Euclidean norms along the last dimension, in float64: what was too small to be squared counts."""
    vanished = math.sqrt(rows.shape[-1] * torch.finfo(rows.dtype).tiny)
    return torch.linalg.vector_norm(rows, dim=-1).double().add_(vanished)


def mask(rows: Tensor, keep: Tensor) -> Tensor:
    """Zero the examples that are not kept."""
    return torch.where(keep.view(-1, *[1] * (rows.dim() - 1)), rows, rows.new_zeros(()))


def side_by_side(rows: Tensor, copies: int) -> Tensor:
    """[B·copies, groups, T, width] as [B, groups, copies·T, width]."""
    by_example: Tensor = rows.unflatten(0, (-1, copies))
    return by_example.transpose(1, 2).flatten(2, 3)


def chunks(count: int, entries_each: int) -> list[tuple[int, int]]:
    """The examples in parts whose temporaries are small: where each begins and ends."""
    size = max(1, CHUNK_ENTRIES // max(1, entries_each))
    return [(start, min(start + size, count)) for start in range(0, count, size)]
