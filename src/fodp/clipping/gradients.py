"""The per-example gradients of a lot, as questions that may be asked about them.

Each answer is a `Query`: a sum over the lot that knows how much one example can change it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.clipping.batches import Batch, Keyed, batch_size, rows_at_once, sizes_of, take
from fodp.clipping.engine import HERE, Engine, LossFunction, Points
from fodp.clipping.layers.segments import Ragged
from fodp.clipping.layers.uses import HELD_ENTRIES, Dense, Outer, Use
from fodp.clipping.maps import Factor, Kronecker
from fodp.clipping.norms import limits, norms_of
from fodp.draws import Source
from fodp.noise import Streams
from fodp.queries import Query

# The contribution of one example, as computed, may exceed its bound by this relative amount. Norms are raised by the
# worst that float32 can do (`clipping/rounding.py`), so what is left is the rounding of float64 sums of squares: 2^16
# of them and a few come one after another. `make fuzz` searches for more. Rounding in the sum over the examples is
# another matter: docs/threat-model.md.
FLOAT_TOLERANCE = 1e-9

ByNorm = Callable[[Tensor], Tensor]
Layers = tuple[tuple[tuple[int, ...], float], ...]
FactorT = TypeVar("FactorT", float, Factor)


def _as_it_is(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Gradients:
    """The gradients of one lot at given points; private, so only queries leave it.

    `copies` consecutive rows of the batch are augmented copies of one example (its gradient is
    their mean). `microbatch` bounds how many examples are in flight and changes nothing else;
    by default the engine chooses, so that what it records stays small. Where the batch has owners, an example is an
    owner with all of their rows, whose gradients are averaged (or summed) before anything is clipped; nobody is split.
    `exact` sums over examples in float64, whatever the model's type is.
    `total` adds the sums of other processes to one of this process's examples, if there are any (`fodp.ranks`).
    `shape` holds public factors or maps, one per parameter, that scale its part of every gradient before clipping and
    that of the release after it. `stability` γ brings every gradient to the clip norm: C·g/(‖g‖ + γ).
    `layers` clips by layer: places of its parameters and its share of the bound, squared shares summing to one.
    """

    engine: Engine
    batch: Batch
    points: Points = HERE
    copies: int = 1
    microbatch: int | None = None
    lot: object = None
    blocks: tuple[float, ...] | None = None
    exact: bool = False
    layers: Layers | None = None
    shape: tuple[Factor, ...] | None = None
    stability: float | None = None
    total: Callable[[Tensor], Tensor] = _as_it_is
    _kept: list["_Pass"] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        _checks.whole("copies", self.copies)
        if self.microbatch is not None:
            _checks.whole("microbatch", self.microbatch)

    def clipped_sum(self, clip_norm: float) -> Query:
        """Σ g_i·min(1, C/‖g_i‖): sensitivity C under adding or removing one example (paper, Lemma 1).

        With a `stability` γ it is Σ C·g_i/(‖g_i‖ + γ), which no more exceeds C.
        """
        bound, stability = _checks.clip_norm("clip_norm", clip_norm), self.stability
        if stability is None:
            return self.sum(bound=bound)
        return self.sum(bound=bound, weight=lambda norms: bound / (norms + stability))

    def sum(self, *, bound: float, weight: ByNorm | None = None) -> Query:
        """Σ w_i·g_i with w_i = weight(norms)_i, cut so that ‖w_i·g_i‖ ≤ bound, whatever `weight` says.

        `weight` must treat every example by itself: a weight that looks at the other norms would let
        one example change the others' terms, and the bound would not hold. A weight that is not finite
        counts as zero.
        """
        layout = self.engine.layout
        if self.layers is not None and weight is not None:
            raise PrivacyError("a weight by the norm of a whole gradient cannot be had layer by layer: use clip='flat'")
        total = torch.empty(layout.size, dtype=self._sum_dtype, device=layout.device)
        accumulate = False
        with self.engine.exactly():
            for part in self._passes():
                if self.layers is not None:
                    part.add_clipped_layers(total, bound, self.layers, accumulate)
                    accumulate = True
                    del part
                    continue
                if weight is None:
                    weights = limits(part.norms, bound, most=1.0)
                else:
                    limit = limits(part.norms, bound)
                    weights = _by_norm(weight, part.norms, 0.0).clamp(-limit, limit)
                part.add_weighted(total, weights, accumulate)
                accumulate = True
                del part  # before the next one is recorded
        blocks = None
        if self.shape is not None:
            blocks = tuple((p.numel(), factor) for p, factor in zip(layout.parameters, self.shape, strict=True))
        return self._query(total if accumulate else total.zero_(), bound, blocks)

    def norm_sum(self, clip_norm: float) -> Query:
        """Σ min(‖g_i‖, C): sensitivity C."""
        bound = _checks.clip_norm("clip_norm", clip_norm)
        # In float64: over millions of examples float32 rounds by more than one example may add.
        total = torch.zeros((), dtype=torch.float64, device=self.engine.layout.device)
        with self.engine.exactly():
            for part in self._passes():
                total = total + part.norms.double().clamp(max=bound).sum()
        return self._query(total, bound)

    def count(self, fraction: ByNorm) -> Query:
        """Σ (f_i - ½) with f_i = fraction(norms)_i in [0, 1]: sensitivity ½, half of an uncentred count's.

        A non-finite gradient or fraction contributes zero. With `layers` an example's number is the clip norm at which
        the first of its layers is clipped, so that "within the clip norm" means that none is.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.engine.layout.device)  # see norm_sum
        with self.engine.exactly():
            for part in self._passes():
                norms = part.norms if self.layers is None else part.largest(self.layers)
                fractions = as_fractions(fraction, norms)
                total = total + part.of_finite(fractions - 0.5).sum(dtype=torch.float64)
        return self._query(total, 0.5)

    def _query(self, value: Tensor, bound: float, blocks: tuple[tuple[int, Factor], ...] | None = None) -> Query:
        """Of all processes: each example is in one of them, so the bound is that of its part."""
        return Query(self.total(value), bound, self.lot, self.engine.layout.dtype, blocks)

    def scaled(self, blocks: Sequence[float]) -> "Gradients":
        """The gradients with each parameter's part times a public b_l, before any clipping.

        The release of a sum of these must be multiplied by b_l again. Sensitivity stays the clip norm.
        """
        return replace(self, blocks=self._one_each(blocks), _kept=[])

    def shaped(self, factors: Sequence[Factor]) -> "Gradients":
        """The gradients with each parameter's part times a public factor, or mapped (`fodp.clipping.maps`); the release
        of a sum of these is scaled again where it is made (`Run.release`). Sensitivity stays the clip norm."""
        return replace(self, shape=self._one_each(factors), _kept=[])

    def _one_each(self, factors: Sequence[FactorT]) -> tuple[FactorT, ...]:
        checked = tuple(b if isinstance(b, Kronecker) else _checks.positive("a block weight", b) for b in factors)
        if len(checked) != len(self.engine.layout.names):
            raise PrivacyError(f"{len(checked)} block weights for {len(self.engine.layout.names)} parameters")
        return checked

    def norms(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Private: of every pass the norms, what `count` is asked about, and which examples are finite."""
        with self.engine.exactly():
            for part in self._passes():
                first = part.norms if self.layers is None else part.largest(self.layers)
                finite = torch.ones_like(part.norms) if part.finite is None else part.finite.to(part.norms)
                yield part.norms, first, finite

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else self.engine.layout.dtype

    def _passes(self) -> Iterator["_Pass"]:
        """The lot in micro-batches; a lot that fits into one is kept for further questions."""
        if self._kept:
            yield from self._kept
            return
        rows = batch_size(self.batch)
        if rows % self.copies:
            raise PrivacyError(f"the rows of the batch are not {self.copies} copies of each example")
        for start, stop, examples in self._spans(rows):
            whole = stop - start == rows
            batch = self.batch if whole else take(self.batch, slice(start, stop))
            for part in self._measure(batch, examples):
                if whole and part.complete:
                    self._kept.append(part)
                yield part
                del part  # before the next one is recorded

    def _spans(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """The rows in parts: where each begins and ends, and how many examples it has."""
        at_once = self._at_once(rows // self.copies) * self.copies
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

    def _at_once(self, examples: int) -> int:
        rows = rows_at_once(self.batch)  # fewer than all if they are still to be fetched, whatever the micro-batch
        if self.microbatch is not None:
            return max(1, min(self.microbatch, rows // self.copies))
        recorded = self.engine.most_rows(self.batch) if examples else None
        return max(1, (rows if recorded is None else min(rows, recorded)) // self.copies)

    def _measure(self, batch: Batch, examples: int) -> Iterator["_Pass"]:
        layout = self.engine.layout
        blocks = self.blocks or (1.0,) * len(layout.names)
        maps: list[Kronecker | None] = [None] * len(blocks)
        if self.shape:
            maps = [s if isinstance(s, Kronecker) else None for s in self.shape]
            blocks = tuple(b if isinstance(s, Kronecker) else b * s for b, s in zip(blocks, self.shape, strict=True))
        uses = self.engine.uses(batch, self.points, self.copies)
        if uses is not None:
            if self.shape:
                pairs = zip(uses, maps, strict=True)
                uses = [use if use is None or by is None else by.of(use, self.exact) for use, by in pairs]
            for use in uses:
                if isinstance(use, Outer | Ragged):
                    use.exact = self.exact
            pieces = [(use, i) for i, use in enumerate(uses) if use is not None]
            yield _Pass.of(self.engine, pieces, blocks, examples)
            return
        # One example at a time: hold as many whole gradients as the chunk limit allows.
        held: list[Tensor] = []
        for gradient in self.engine.example_gradients(batch, self.points, self.copies):
            held.append(gradient)
            if len(held) * layout.size >= HELD_ENTRIES:
                yield _Pass.of_rows(self.engine, held, blocks, maps)
                held = []
        if held:
            yield _Pass.of_rows(self.engine, held, blocks, maps)


@dataclass(frozen=True)
class _Pass:
    """Norms and uses of some examples; a non-finite example has norm and contribution zero."""

    engine: Engine
    norms: Tensor
    pieces: list[tuple[Use, int | None]]  # a use and its parameter's place; None: the whole flat vector
    blocks: tuple[float, ...]
    finite: Tensor | None  # which examples are, None if all
    complete: bool

    @staticmethod
    def of(engine: Engine, pieces: list[tuple[Use, int]], blocks: tuple[float, ...], examples: int) -> "_Pass":
        uses = [(use, blocks[i]) for use, i in pieces]
        return _Pass._checked(engine, uses, examples, list(pieces), blocks, complete=True)

    @staticmethod
    def of_rows(
        engine: Engine, rows: list[Tensor], blocks: tuple[float, ...], maps: Sequence[Kronecker | None]
    ) -> "_Pass":
        stacked = torch.stack(rows)
        for row in stacked:
            for view, b, by in zip(engine.layout.views(row), blocks, maps, strict=True):
                view.mul_(b)
                if by is not None:
                    by.map_(view)
        use = Dense(stacked)
        return _Pass._checked(engine, [(use, 1.0)], len(rows), [(use, None)], blocks, complete=False)

    @staticmethod
    def _checked(
        engine: Engine,
        uses: list[tuple[Use, float]],
        examples: int,
        pieces: list[tuple[Use, int | None]],
        blocks: tuple[float, ...],
        complete: bool,
    ) -> "_Pass":
        norms, all_finite = norms_of(uses, examples, engine.layout.dtype, engine.layout.device)
        if all_finite:
            return _Pass(engine, norms, pieces, blocks, None, complete)
        finite = norms.isfinite()
        pieces = [(use.masked(finite), i) for use, i in pieces]
        norms = norms.where(finite, norms.new_zeros(()))
        return _Pass(engine, norms, pieces, blocks, finite, complete)

    def of_finite(self, values: Tensor) -> Tensor:
        """Zero for every example whose gradient is not finite."""
        return values if self.finite is None else values.where(self.finite, values.new_zeros(()))

    def add_weighted(self, flat: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Write Σ w_i·b·g_i into the flat vector, or add it there."""
        weights = self.of_finite(weights)
        views = self.engine.layout.views(flat)
        if not accumulate and len(self.pieces) < len(views) and not (self.pieces and self.pieces[0][1] is None):
            flat.zero_()  # a parameter that was not used has a gradient of zero
        for use, i in self.pieces:
            if i is None:
                use.add_weighted(flat, weights, accumulate)
            else:
                use.add_weighted(views[i], weights if self.blocks[i] == 1 else weights * self.blocks[i], accumulate)

    def add_clipped_layers(self, flat: Tensor, bound: float, layers: Layers, accumulate: bool) -> None:
        """Write Σ_i of the gradients with each layer's part clipped to its share of the bound, or add it there."""
        if not accumulate:
            flat.zero_()
        views = self.engine.layout.views(flat)
        for (_, share), mine in zip(layers, self._by_layer(layers), strict=True):
            weights = self.of_finite(limits(self._norms_of(mine), bound * share, most=1.0))
            for use, b, place in mine:
                use.add_weighted(views[place], weights if b == 1 else weights * b, True)

    def largest(self, layers: Layers) -> Tensor:
        """Of every example the largest norm of a layer over its share: the bound from which on none is clipped."""
        norms = [self._norms_of(mine) / share for (_, share), mine in zip(layers, self._by_layer(layers), strict=True)]
        return torch.stack(norms).amax(0)

    def _norms_of(self, mine: list[tuple[Use, float, int]]) -> Tensor:
        uses, layout = [(use, b) for use, b, _ in mine], self.engine.layout
        return norms_of(uses, len(self.norms), layout.dtype, layout.device)[0]

    def _by_layer(self, layers: Layers) -> list[list[tuple[Use, float, int]]]:
        """Uses by layer, each with its factor and its parameter's place."""
        found: dict[int, tuple[Use, float, int]] = {}
        for use, place in self.pieces:
            if place is not None:
                found[place] = (use, self.blocks[place], place)
                continue
            sizes = [parameter.numel() for parameter in self.engine.layout.parameters]
            for i, rows in enumerate(use.dense().split(sizes, 1)):  # scaled already
                found[i] = (Dense(rows), 1.0, i)
        return [[found[place] for place in places if place in found] for places, _ in layers]


def as_fractions(fraction: ByNorm, norms: Tensor) -> Tensor:
    """A user's fractions, in [0, 1]; a half, which counts as nothing, where one is not finite."""
    return _by_norm(fraction, norms, 0.5).clamp(0, 1)


def _by_norm(function: ByNorm, norms: Tensor, otherwise: float) -> Tensor:
    """A user's function of the norms, one value per example; `otherwise` where it is not finite."""
    values = function(norms.clone()).to(norms).expand_as(norms)  # a clone: the function may work in place
    return values.nan_to_num(otherwise, otherwise, otherwise)


class Clipper:
    """Clipped sums of one model under one loss, for a training loop of your own: as fast as the Trainer's.

    A building block: the sums are private and carry no noise. The engine is kept from call to call, so the model is
    looked at on the first lots and not on every one. `loss_fn(model, batch)` returns one loss per example.

    What the model draws in a call (dropout) belongs to a row: to its number in `records`, and to its place in the
    batch where none are given. Give the records' numbers if the same record comes in other places. `seed` None draws
    from operating-system entropy.

    Guarantee: adding or removing one example (with `records`, or at the end of the batch) moves a sum by at most
    clip_norm, times 1 + FLOAT_TOLERANCE in float32.

    Example:
        >>> import torch, fodp
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> clipper = fodp.Clipper(model, lambda model, batch: model(batch[0]).squeeze(1))
        >>> x = torch.tensor([[3.0, 0.0, 4.0]])  # the gradient is x itself, of norm 5
        >>> clipper.clipped_sum((x,), clip_norm=1.0)
        tensor([0.6000, 0.0000, 0.8000])
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, engine: str = "auto", seed: int | None = None):
        self._engine = Engine(model, loss_fn, engine)
        self._streams = Streams(seed)
        self._calls = 0

    @property
    def path(self) -> str:
        """How gradients are computed: rules for "layers" or "functions", the "loop", "unknown" before a lot."""
        return self._engine.path

    def clipped_sum(
        self,
        batch: Batch,
        clip_norm: float,
        *,
        records: Tensor | Sequence[int] | None = None,
        microbatch: int | None = None,
    ) -> Tensor:
        """The sum of the batch's per-example gradients, each clipped to `clip_norm`, as one flat tensor."""
        rows = batch_size(batch)
        numbers = torch.arange(rows) if records is None else torch.as_tensor(records, dtype=torch.int64, device="cpu")
        if numbers.shape != (rows,) or (numbers < 0).any():
            raise PrivacyError("records must give one number of zero or more for each row of the batch")
        keyed = Keyed(batch, numbers, Source(self._streams, self._calls, "clipper"))
        self._calls += 1
        return Gradients(self._engine, keyed, microbatch=microbatch).clipped_sum(clip_norm).value


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    clip_norm: float,
    *,
    microbatch: int | None = None,
    engine: str = "auto",
) -> Tensor:
    """The sum of the batch's per-example gradients, each clipped to `clip_norm`, as one flat tensor.

    A building block: the result is private and carries no noise. Every call looks at the model anew; a loop of
    calls is several times faster with `Clipper`. `loss_fn(model, batch)` returns one loss per example. Adding or
    removing one example moves the result by at most clip_norm (times 1 + FLOAT_TOLERANCE in float32); with a model that
    draws (dropout), one at the end of the batch, for rows draw under their places.

    Example:
        >>> import torch, fodp
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> loss_fn = lambda model, batch: model(batch[0]).squeeze(1)
        >>> x = torch.tensor([[3.0, 0.0, 4.0]])  # the gradient is x itself, of norm 5
        >>> fodp.clipped_sum(model, loss_fn, (x,), clip_norm=1.0)
        tensor([0.6000, 0.0000, 0.8000])
    """
    return Clipper(model, loss_fn, engine=engine).clipped_sum(batch, clip_norm, microbatch=microbatch)
