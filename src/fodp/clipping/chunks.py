"""A batch in chunks that fit into memory: norms of per-example gradients, and their weighted sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fodp.clipping.batches import Batch, Keyed, Parts, batch_size, sizes_of, take
from fodp.clipping.engine import Engine
from fodp.clipping.layers.segments import Ragged
from fodp.clipping.layers.uses import HELD_ENTRIES, Dense, Outer, Use
from fodp.clipping.maps import Kronecker
from fodp.clipping.norms import norms_of
from fodp.errors import PrivacyError
from fodp.gradients import HERE, Points
from fodp.layout import Layout
from fodp.queries import Factor
from fodp.support import checks


@dataclass(frozen=True)
class Chunks:
    """The per-example gradients of a batch at given points, chunk by chunk; a batch of one chunk is kept.

    `copies` consecutive rows of the batch are augmented copies of one example, whose gradient is their mean.
    `microbatch` bounds how many examples are in flight and changes nothing else; by default the engine chooses, so that
    what it records stays small. Where the batch has owners, an example is an owner with all of their rows, whose
    gradients are averaged (or summed) before anything is clipped; nobody is split.
    `factors` are public numbers or maps, one per parameter, that scale its part of every gradient.
    """

    engine: Engine
    batch: Batch
    points: Points = HERE
    copies: int = 1
    microbatch: int | None = None
    factors: Sequence[Factor] | None = None
    exact: bool = False
    _kept: list["UsesChunk"] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.copies != 1 or self.copies is True:
            checks.whole("copies", self.copies)
        if self.microbatch is not None:
            checks.whole("microbatch", self.microbatch)
        if self.factors is not None and len(self.factors) != len(self.engine.layout.names):
            raise PrivacyError(f"{len(self.factors)} factors for {len(self.engine.layout.names)} parameters")

    def __iter__(self) -> Iterator["UsesChunk"]:
        """Norms and sums are in full precision while this is gone through."""
        with self.engine.exactly():
            if self._kept:
                yield from self._kept
                return
            rows = batch_size(self.batch)
            if rows % self.copies:
                raise PrivacyError(f"the rows of the batch are not {self.copies} copies of each example")
            at_once = self._at_once(rows) * self.copies
            if rows <= at_once:  # the usual case; a batch without rows has no chunk
                sizes = sizes_of(self.batch)
                spans = [(0, rows, rows // self.copies if sizes is None else len(sizes))] if rows else []
            else:
                spans = list(self._spans(rows, at_once))
            for start, stop, examples in spans:
                all_rows = stop - start == rows
                batch = self.batch if all_rows else take(self.batch, slice(start, stop))
                uses = self.engine.uses(batch, self.points, self.copies)
                for chunk in self._one_by_one(batch) if uses is None else (self._measured(uses, examples),):
                    if all_rows and chunk.complete:
                        self._kept.append(chunk)
                    yield chunk
                    del chunk  # before the next one is recorded
                del uses

    def _spans(self, rows: int, at_once: int) -> Iterator[tuple[int, int, int]]:
        """The rows in parts: where each begins and ends, and how many examples it has."""
        sizes = sizes_of(self.batch)
        if sizes is None:
            for start in range(0, rows, at_once):
                stop = min(start + at_once, rows)
                yield start, stop, (stop - start) // self.copies
            return
        start = stop = owners = 0
        for size in sizes.tolist():
            if owners and stop + size - start > at_once:
                yield start, stop, owners
                start, owners = stop, 0
            stop, owners = stop + size, owners + 1
        if owners:
            yield start, stop, owners

    def _at_once(self, rows: int) -> int:
        """How many examples at once, given that there are so many rows."""
        is_empty = not rows
        if isinstance(self.batch, Keyed) and isinstance(self.batch.rows, Parts):
            rows = self.batch.rows.at_once  # of rows that are still to be fetched, whatever the micro-batch
        if self.microbatch is not None:
            return max(1, min(self.microbatch, rows // self.copies))
        recorded = None if is_empty else self.engine.most_rows(self.batch)
        return max(1, (rows if recorded is None else min(rows, recorded)) // self.copies)

    def _measured(self, uses: list[Use | None], examples: int) -> "UsesChunk":
        """The chunk that follows from the use of each parameter."""
        numbers = [1.0] * len(uses)
        for place, factor in enumerate(self._factors if self.factors is not None else ()):
            use = uses[place]
            if not isinstance(factor, Kronecker):
                numbers[place] = factor
            elif use is not None:
                uses[place] = factor.of(use, self.exact)
        if self.exact:
            for use in uses:
                if isinstance(use, Outer | Ragged):
                    use.hold_exactly()
        return UsesChunk.of(self.engine.layout, uses, numbers, examples)

    def _one_by_one(self, batch: Batch) -> Iterator["UsesChunk"]:
        """Chunks of as many whole gradients as the chunk limit allows to be held."""
        layout, factors = self.engine.layout, self._factors
        held: list[Tensor] = []
        for gradient in self.engine.example_gradients(batch, self.points, self.copies):
            held.append(gradient)
            if len(held) * layout.size >= HELD_ENTRIES:
                yield UsesChunk.of_rows(layout, held, factors)
                held = []
        if held:
            yield UsesChunk.of_rows(layout, held, factors)

    @property
    def _factors(self) -> list[float | Kronecker]:
        if self.factors is None:
            return [1.0] * len(self.engine.layout.names)
        return [f if isinstance(f, Kronecker) else checks.positive("a factor", f) for f in self.factors]


@dataclass(frozen=True)
class UsesChunk:
    """Norms of some examples, and the uses of parameters that their gradients follow from (`fodp.gradients.Chunk`)."""

    layout: Layout
    norms: Tensor
    pieces: list[tuple[Use, int | None]]  # a use and its parameter's place; None: the whole flat vector
    numbers: tuple[float, ...]  # by which each parameter's part is multiplied
    is_finite: Tensor | None  # which examples are, None if all
    complete: bool

    @staticmethod
    def of(layout: Layout, uses: Sequence[Use | None], numbers: Sequence[float], examples: int) -> "UsesChunk":
        """Of the merged use of each parameter; None: it was not used."""
        pieces: list[tuple[Use, int | None]] = [(use, place) for place, use in enumerate(uses) if use is not None]
        found = [(use, number) for use, number in zip(uses, numbers, strict=True) if use is not None]
        return UsesChunk._checked(layout, found, examples, pieces, tuple(numbers), complete=True)

    @staticmethod
    def of_rows(layout: Layout, rows: list[Tensor], factors: Sequence[float | Kronecker]) -> "UsesChunk":
        """Of whole gradients, one by one."""
        stacked = torch.stack(rows)
        for row in stacked:
            for view, factor in zip(layout.views(row), factors, strict=True):
                if isinstance(factor, Kronecker):
                    factor.map_(view)
                else:
                    view.mul_(factor)
        use = Dense(stacked)
        numbers = (1.0,) * len(factors)  # the rows are scaled already
        return UsesChunk._checked(layout, [(use, 1.0)], len(rows), [(use, None)], numbers, complete=False)

    @staticmethod
    def _checked(
        layout: Layout,
        uses: list[tuple[Use, float]],
        examples: int,
        pieces: list[tuple[Use, int | None]],
        numbers: tuple[float, ...],
        complete: bool,
    ) -> "UsesChunk":
        norms, all_finite = norms_of(uses, examples, layout.dtype, layout.device)
        if all_finite:
            return UsesChunk(layout, norms, pieces, numbers, None, complete)
        finite = norms.isfinite()
        pieces = [(use.masked(finite), i) for use, i in pieces]
        norms = norms.where(finite, norms.new_zeros(()))
        return UsesChunk(layout, norms, pieces, numbers, finite, complete)

    def finite(self, values: Tensor) -> Tensor:
        """Zero for every example whose gradient is not finite."""
        return values if self.is_finite is None else values.where(self.is_finite, values.new_zeros(()))

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Write Σ w_i·g_i into the flat vector, or add it there."""
        weights = self.finite(weights)
        views = self.layout.views(out)
        if not accumulate and len(self.pieces) < len(views) and not (self.pieces and self.pieces[0][1] is None):
            out.zero_()  # a parameter that was not used has a gradient of zero
        for use, i in self.pieces:
            if i is None:
                use.add_weighted(out, weights, accumulate)
            else:
                number = self.numbers[i]
                use.add_weighted(views[i], weights if number == 1 else weights * number, accumulate)

    def layer_norms(self, places: Sequence[int]) -> Tensor:
        """The norms of the gradients' parts at these places."""
        uses = [self._by_place[place] for place in places if place in self._by_place]
        return norms_of(uses, len(self.norms), self.layout.dtype, self.layout.device)[0]

    def add_weighted_layer(self, out: Tensor, weights: Tensor, places: Sequence[int]) -> None:
        """Add Σ w_i·g_i at these places."""
        weights, views = self.finite(weights), self.layout.views(out)
        for place in places:
            if place in self._by_place:
                use, number = self._by_place[place]
                use.add_weighted(views[place], weights if number == 1 else weights * number, True)

    @cached_property
    def _by_place(self) -> dict[int, tuple[Use, float]]:
        """The use of each parameter, with its number."""
        found: dict[int, tuple[Use, float]] = {}
        for use, place in self.pieces:
            if place is not None:
                found[place] = (use, self.numbers[place])
                continue
            sizes = [parameter.numel() for parameter in self.layout.parameters]
            found |= {i: (Dense(rows), 1.0) for i, rows in enumerate(use.dense().split(sizes, 1))}
        return found
