"""How a parameter was used, and what its per-example gradients are, without materialising them.

Every use knows two things about the gradients G_i of one parameter, one per example:
the squared norms ‖G_i‖², and the weighted sum Σ w_i·G_i. Tied weights, modules called twice and
combinations of gradients at two points are several uses of one parameter, merged into one.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

# Temporaries are cut into chunks of examples with at most this many entries (32 MiB of float32).
CHUNK_ENTRIES = 1 << 23
# Rounding of norms and sums, relative to Σ_t ‖back_t‖·‖input_t‖: positions may cancel, rounding does not.
_ROUNDING = 4.0
# A ghost norm whose rounding allowance is above this share of itself is computed directly instead.
_ILL_CONDITIONED = 1e-3
_BLOCK = 1 << 13


class Use(Protocol):
    """The per-example gradients of one parameter."""

    def squared_norms(self) -> Tensor:
        """‖G_i‖² per example, in at least float32."""

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
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def square_sums(rows: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, without a temporary of squares.

    Long rows block by block: one running float32 sum of ten million squares is off by 1e-4.
    """
    flat = rows if rows.dim() == 2 else rows.flatten(1)
    whole = flat.shape[1] // _BLOCK * _BLOCK
    if whole > _BLOCK:
        blocks = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
        flat = torch.cat([blocks, rest], 1)
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1)
    return norms.square_()


class Dense:
    """Gradients that are small enough to be held: biases, norm layers, fallbacks.

    `squares` are their squared norms, where somebody has computed them already.
    """

    def __init__(self, gradients: Tensor, squares: Tensor | None = None):
        self.gradients = wide(gradients if gradients.dim() > 1 else gradients.unsqueeze(1))  # a single number
        self._squares = squares

    def squared_norms(self) -> Tensor:
        """‖G_i‖² per example."""
        return square_sums(self.gradients) if self._squares is None else self._squares

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """One vector-matrix product."""
        flat, target = self.gradients.flatten(1), out.view(-1)
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
        return Dense(_mask(self.gradients, keep))


class Product:
    """The weight of a Linear layer at one position: G_i = back_i ⊗ input_i. Shapes: [B, fan_in], [B, fan_out]."""

    def __init__(self, inputs: Tensor, back: Tensor):
        self.inputs, self.back = wide(inputs), wide(back)
        self.back_squares = square_sums(self.back)

    def squared_norms(self) -> Tensor:
        """‖back_i‖²·‖input_i‖²."""
        return square_sums(self.inputs).mul_(self.back_squares)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """One product of inputs with re-weighted back-signals, written straight into the flat vector."""
        back, inputs = self.back * weights.unsqueeze(1), self.inputs
        if inputs.dtype != out.dtype or back.dtype != out.dtype:
            back, inputs = back.to(out.dtype), inputs.to(out.dtype)
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
        return Product(_mask(self.inputs, keep), _mask(self.back, keep))


class Outer:
    """A weight of a Linear-like layer: G_i = Σ_t back_{i,t} ⊗ input_{i,t}, per group of channels.

    Shapes: inputs [B, groups, T, fan_in], back [B, groups, T, fan_out]; the parameter holds
    groups·fan_out rows of fan_in entries.
    """

    def __init__(self, inputs: Tensor, back: Tensor):
        self._inputs = wide(inputs)
        self.back = wide(back)
        self._held: Tensor | None = None  # small per-example gradients, kept from the norms to the sum

    def inputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The layer's inputs of some examples, [b, groups, T, fan_in]."""
        return self._inputs[start:stop]

    @property
    def fan_in(self) -> int:
        """Entries per row of the parameter."""
        return self._inputs.shape[-1]

    def squared_norms(self) -> Tensor:
        """By product of norms (one position), Gram matrices ("ghost") or directly: the cheapest by shape."""
        count, groups, length, fan_out = self.back.shape
        if length == 1 and groups == 1:
            return square_sums(self.inputs()).mul_(square_sums(self.back))
        if length == 1:
            by_group = square_sums(self.inputs().flatten(0, 1)) * square_sums(self.back.flatten(0, 1))
            return by_group.view(count, groups).sum(1)
        if length * (self.fan_in + fan_out) <= self.fan_in * fan_out:
            return self._ghost_norms(groups * length * (length + self.fan_in))
        return self._direct_norms(groups * self.fan_in * (fan_out + length))

    def _ghost_norms(self, entries: int) -> Tensor:
        """‖Σ_t b_t⊗a_t‖² = Σ_{t,s} ⟨a_t,a_s⟩⟨b_t,b_s⟩, never below the truth.

        Where positions cancel, the terms are far larger than their sum and rounding could hide a norm
        altogether. So the rounding is added, and where it matters the norm is computed directly.
        """
        parts = []
        for start, stop in _chunks(len(self.back), entries):
            inputs, back = self.inputs(start, stop), self.back[start:stop]
            gram = torch.matmul(inputs, inputs.mT).mul_(torch.matmul(back, back.mT))
            mass = gram.diagonal(dim1=2, dim2=3).sqrt().sum(2).square().sum(1)  # (Σ_t ‖b_t‖·‖a_t‖)²
            squares, slack = gram.sum((1, 2, 3)).clamp_(min=0), _ROUNDING * torch.finfo(gram.dtype).eps * mass
            doubtful = slack > _ILL_CONDITIONED * squares
            for i in doubtful.nonzero().flatten().tolist():
                squares[i] = square_sums(torch.matmul(back[i].mT, inputs[i]).unsqueeze(0))[0]
                slack[i] = _allowance(squares[i : i + 1], inputs[i : i + 1], back[i : i + 1])[0] - squares[i]
            parts.append(squares + slack)
        return torch.cat(parts)

    def _direct_norms(self, entries: int) -> Tensor:
        parts, held = [], []
        hold = self.back.shape[0] * self.back.shape[1] * self.back.shape[3] * self.fan_in <= CHUNK_ENTRIES
        for start, stop in _chunks(len(self.back), entries):
            inputs, back = self.inputs(start, stop), self.back[start:stop]
            gradients = torch.matmul(back.mT, inputs)
            squares = square_sums(gradients)
            # What is held is summed as it was measured; otherwise the sum takes, and rounds, its own way.
            parts.append(squares if hold else _allowance(squares, inputs, back))
            if hold:
                held.append(gradients)
        if hold:
            self._held = torch.cat(held) if len(held) > 1 else held[0]
        return torch.cat(parts)

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """One product of inputs with re-weighted back-signals, written straight into the flat vector."""
        if self._held is not None:
            Dense(self._held).add_weighted(out, weights, accumulate)
            return
        groups, fan_out = self.back.shape[1], self.back.shape[3]
        target = out.view(groups, fan_out, self.fan_in)
        for start, stop in _chunks(len(self.back), groups * self.back.shape[2] * self.fan_in):
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
        return Outer(_side_by_side(self.inputs(), copies), _side_by_side(self.back, copies) / copies)

    def masked(self, keep: Tensor) -> "Outer":
        """Zero both factors."""
        return Outer(_mask(self.inputs(), keep), _mask(self.back, keep))


class Convolution(Outer):
    """A convolution's weight: an outer product over unfolded patches, unfolded chunk by chunk.

    `images` is padded already, [B, channels, height, width]; `back` is the gradient of the output.
    """

    def __init__(
        self,
        images: Tensor,
        back: Tensor,
        groups: int,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        dilation: tuple[int, int],
    ):
        self._images = wide(images)
        self._back_image = wide(back)
        self._groups, self._kernel, self._stride, self._dilation = groups, kernel, stride, dilation
        self.back = self._back_image.flatten(2).unflatten(1, (groups, -1)).mT
        self._held = None

    def inputs(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Unfolded patches, [b, groups, positions, fan_in]."""
        patches: Tensor = F.unfold(self._images[start:stop], self._kernel, self._dilation, 0, self._stride)
        by_group: Tensor = patches.unflatten(1, (self._groups, -1))
        return by_group.mT

    @property
    def fan_in(self) -> int:
        """Channels of a group times kernel size."""
        return self._images.shape[1] // self._groups * self._kernel[0] * self._kernel[1]

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """The library's own weight gradient, of re-weighted back-signals: no unfolding."""
        if self._held is not None:
            Dense(self._held).add_weighted(out, weights, accumulate)
            return
        shape = (
            self.back.shape[1] * self.back.shape[3],
            self._images.shape[1] // self._groups,
            *self._kernel,
        )
        total = conv2d_weight(
            self._images,
            shape,
            self._back_image * weights[:, None, None, None].to(self._back_image.dtype),
            self._stride,
            0,
            self._dilation,
            self._groups,
        ).reshape(out.shape)
        if accumulate:
            out.add_(total)
        else:
            out.copy_(total)

    def masked(self, keep: Tensor) -> "Convolution":
        """Zero both factors."""
        images, back = _mask(self._images, keep), _mask(self._back_image, keep)
        return Convolution(images, back, self._groups, self._kernel, self._stride, self._dilation)


class Rows:
    """An embedding table: G_i adds back_{i,t} to row index_{i,t}. Shapes: [B, T] and [B, T, width]."""

    def __init__(self, indices: Tensor, back: Tensor, table_rows: int):
        self.indices, self.back, self.table_rows = indices, wide(back), table_rows

    def squared_norms(self) -> Tensor:
        """Where a token comes twice in an example, its back-signals are summed before they are squared."""
        squares = square_sums(self.back)
        some = self._repeating()
        if some is None:
            return self._summed_squares(self.indices, self.back)
        if len(some):
            squares[some] = self._summed_squares(self.indices[some], self.back[some])
        return squares

    def _repeating(self) -> Tensor | None:
        """The examples in which a token comes twice; None (any may be) where asking would make a device wait."""
        if self.indices.device.type != "cpu":
            return None
        ordered = np.sort(self.indices.numpy(), axis=1)  # far faster than PyTorch's
        return torch.from_numpy(np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)))

    def _summed_squares(self, indices: Tensor, back: Tensor) -> Tensor:
        count, length, width = back.shape
        example = torch.arange(count, device=back.device)[:, None]
        keys, place = torch.unique(example * self.table_rows + indices, return_inverse=True)
        rows = back.new_zeros(len(keys), width).index_add_(0, place.flatten(), back.flatten(0, 1))
        owner = torch.div(keys, self.table_rows, rounding_mode="floor")
        squares = back.new_zeros(count).index_add_(0, owner, square_sums(rows))
        return _allowance(squares, None, back)

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
        return Rows(self.indices, _mask(self.back, keep), self.table_rows)


def scaled(use: Use, factor: float) -> Use:
    """The gradients times a public factor."""
    if factor == 1:
        return use
    if isinstance(use, Rows):
        return Rows(use.indices, use.back * factor, use.table_rows)
    if isinstance(use, Product):
        return Product(use.inputs, use.back * factor)
    if isinstance(use, Outer):
        return Outer(use.inputs(), use.back * factor)
    return Dense(use.dense() * factor)


def merged(uses: Sequence[Use]) -> Use:
    """Several uses of one parameter as one: their gradients add up before anything is squared."""
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
    return Dense(torch.stack([use.dense().flatten(1) for use in uses]).sum(0))


def _allowance(squares: Tensor, inputs: Tensor | None, back: Tensor) -> Tensor:
    """Squared norms that a sum along another road of roundings cannot exceed."""
    mass: Tensor = torch.linalg.vector_norm(back, dim=-1)
    if inputs is not None:
        mass = mass * torch.linalg.vector_norm(inputs, dim=-1)
    return (squares.sqrt() + _ROUNDING * torch.finfo(mass.dtype).eps * mass.flatten(1).sum(1)).square()


def _mask(rows: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.view(-1, *[1] * (rows.dim() - 1)), rows, rows.new_zeros(()))


def _side_by_side(rows: Tensor, copies: int) -> Tensor:
    """[B·copies, groups, T, width] as [B, groups, copies·T, width]."""
    by_example: Tensor = rows.unflatten(0, (-1, copies))
    return by_example.transpose(1, 2).flatten(2, 3)


def _chunks(count: int, entries_each: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_ENTRIES // max(1, entries_each))
    return [(start, min(start + size, count)) for start in range(0, count, size)]
