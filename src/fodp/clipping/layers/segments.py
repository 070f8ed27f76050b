"""Rows of one owner as one example: ragged groups of rows, whose gradients are summed before anything is squared.

An owner's rows become positions of one example, as augmented copies do. Owners of about as many rows are taken together
and padded with zeros to the longest of them, so padding at most doubles what is held.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fodp.clipping.layers.convolutions import Convolution
from fodp.clipping.layers.embeddings import Rows
from fodp.clipping.layers.uses import Dense, Outer, Product, Use


@dataclass(frozen=True)
class Segments:
    """Which rows of a pass are whose. Rows of an owner lie side by side, owners one after another."""

    sizes: Tensor  # rows of each owner, on the CPU
    divisors: Tensor  # by which the sum over an owner's rows is divided

    def classes(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Owners of 1, 2, 3-4, 5-8, … rows: (their places, their rows [owners, longest], which of those there are)."""
        starts = self.sizes.cumsum(0) - self.sizes
        kinds = self.sizes.double().log2().ceil().long()
        for kind in kinds.unique().tolist():
            owners = (kinds == kind).nonzero().flatten()
            sizes = self.sizes[owners]
            steps = torch.arange(int(sizes.max()))
            there = steps < sizes[:, None]
            yield owners, starts[owners, None] + steps * there, there


def by_owner(use: Use, segments: Segments) -> Use:
    """The gradients of owners, each the sum over its rows, divided."""
    parts: list[tuple[Tensor, Use]] = []
    for owners, rows, there in segments.classes():
        longest = rows.shape[1]
        # `grouped` takes the mean of its rows: that many times as much makes it the sum.
        factors = longest / segments.divisors[owners].double()
        if len(owners) == len(segments.sizes) and there.all() and (factors == 1).all():
            return use if longest == 1 else use.grouped(longest)
        chosen = picked(use, rows.flatten(), factors.repeat_interleave(longest))
        if not there.all():
            chosen = chosen.masked(there.flatten().to(_device(chosen), non_blocking=True))
        parts.append((owners, chosen if longest == 1 else chosen.grouped(longest)))
    return parts[0][1] if len(parts) == 1 else Ragged(parts, len(segments.sizes))


def picked(use: Use, rows: Tensor, factors: Tensor) -> Use:
    """Some rows' gradients, each times a factor. Kinds that are not known here are held."""
    if type(use) is Product:
        return Product(_rows(use.inputs, rows), _times(use.back, rows, factors))
    if type(use) is Convolution:
        return use.with_rows(lambda images: _rows(images, rows), lambda back: _times(back, rows, factors))
    if type(use) is Outer:
        return Outer(_rows(use.inputs(), rows), _times(use.back, rows, factors))
    if type(use) is Rows:
        return Rows(_rows(use.indices, rows), _times(use.back, rows, factors), use.table_rows)
    return Dense(_times(use.dense(), rows, factors))


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.index_select(0, rows.to(tensor.device, non_blocking=True))


def _times(back: Tensor, rows: Tensor, factors: Tensor) -> Tensor:
    return _rows(back, rows).mul_(factors.to(back, non_blocking=True).view(-1, *[1] * (back.dim() - 1)))


def _device(use: Use) -> torch.device:
    return use.gradients.device if isinstance(use, Dense) else use.back.device  # type: ignore[attr-defined]


class Ragged:
    """The gradients of all owners, those with about as many rows in one use each."""

    def __init__(self, parts: list[tuple[Tensor, Use]], count: int):
        device = _device(parts[0][1])
        self.parts, self.count = [(owners.to(device, non_blocking=True), use) for owners, use in parts], count
        self.slack: Tensor | None = None

    def hold_exactly(self) -> None:
        """Hold gradients in float64, see `Outer`."""
        for _, use in self.parts:
            if isinstance(use, Outer):
                use.hold_exactly()

    def squared_norms(self) -> Tensor:
        """‖G_i‖² per owner."""
        squares = self._spread([use.squared_norms() for _, use in self.parts])
        slacks = [use.slack for _, use in self.parts]
        if any(slack is not None for slack in slacks):
            zeros = [squares.new_zeros(len(owners)) for owners, _ in self.parts]
            self.slack = self._spread([z if s is None else s for s, z in zip(slacks, zeros, strict=True)])
        return squares

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Σ w_i·G_i, part by part."""
        for owners, use in self.parts:
            use.add_weighted(out, weights[owners], accumulate)
            accumulate = True

    def dense(self) -> Tensor:
        """All G_i."""
        return self._spread([use.dense() for _, use in self.parts])

    def grouped(self, copies: int) -> Use:
        """Owners are not grouped again; the Protocol asks for it."""
        return Dense(self.dense()).grouped(copies)

    def masked(self, keep: Tensor) -> "Ragged":
        """Zero what is not kept."""
        return Ragged([(owners, use.masked(keep[owners])) for owners, use in self.parts], self.count)

    def _spread(self, values: list[Tensor]) -> Tensor:
        """The parts' values, each at its owner's place."""
        whole = values[0].new_zeros(self.count, *values[0].shape[1:])
        for (owners, _), part in zip(self.parts, values, strict=True):
            whole[owners] = part
        return whole
