"""The per-example gradients of a lot, as questions that may be asked about them.

Each answer is a `Query`: a sum over the lot that knows how much one example can change it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.clipping.ascent import ascended_gradients
from fodp.clipping.batches import Batch, Keyed, batch_size, rows_at_once, take
from fodp.clipping.engine import HERE, Engine, LossFunction, Points
from fodp.clipping.norms import limits, norms_of
from fodp.clipping.uses import HELD_ENTRIES, Dense, Use
from fodp.draws import Source
from fodp.mechanism import Query
from fodp.noise import Streams

# The contribution of one example, as computed, may exceed its bound by this relative amount. Norms are raised by the
# worst that float32 can do (`clipping/rounding.py`), so what is left is the rounding of float64 sums of squares: 2^16
# of them and a few come one after another. `make fuzz` searches for more. Rounding in the sum over the examples is
# another matter: docs/threat-model.md.
FLOAT_TOLERANCE = 1e-9

ByNorm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Gradients:
    """The gradients of one lot at given points; private, so only queries leave it.

    `copies` consecutive rows of the batch are augmented copies of one example (its gradient is
    their mean). `microbatch` bounds how many examples are in flight and changes nothing else;
    by default the engine chooses, so that what it records stays small.
    `ascent` ρ > 0 takes each example's gradient at its own point θ + ρ·g_i/‖g_i‖.
    `exact` sums over examples in float64, whatever the model's type is.
    """

    engine: Engine
    batch: Batch
    points: Points = HERE
    copies: int = 1
    microbatch: int | None = None
    lot: object = None
    blocks: tuple[float, ...] | None = None
    ascent: float = 0.0
    exact: bool = False
    _kept: list["_Pass"] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        _checks.whole("copies", self.copies)
        if self.microbatch is not None:
            _checks.whole("microbatch", self.microbatch)
        if self.ascent and (self.copies > 1 or self.points is not HERE):
            raise PrivacyError("per-example ascent starts from the parameters themselves, with one copy per example")

    def clipped_sum(self, clip_norm: float) -> Query:
        """Σ g_i·min(1, C/‖g_i‖): sensitivity C under adding or removing one example (paper, Lemma 1)."""
        return self.sum(bound=_checks.clip_norm("clip_norm", clip_norm))

    def sum(self, *, bound: float, weight: ByNorm | None = None) -> Query:
        """Σ w_i·g_i with w_i = weight(norms)_i, cut so that ‖w_i·g_i‖ ≤ bound, whatever `weight` says.

        `weight` must treat every example by itself: a weight that looks at the other norms would let
        one example change the others' terms, and the bound would not hold. A weight that is not finite
        counts as zero.
        """
        layout = self.engine.layout
        total = torch.empty(layout.size, dtype=self._sum_dtype, device=layout.device)
        accumulate = False
        with self.engine.exactly():
            for part in self._passes():
                if weight is None:
                    weights = limits(part.norms, bound, most=1.0)
                else:
                    limit = limits(part.norms, bound)
                    weights = _by_norm(weight, part.norms, 0.0).clamp(-limit, limit)
                part.add_weighted(total, weights, accumulate)
                accumulate = True
                del part  # before the next one is recorded
        return Query(total if accumulate else total.zero_(), bound, self.lot, self.engine.layout.dtype)

    def norm_sum(self, clip_norm: float) -> Query:
        """Σ min(‖g_i‖, C): sensitivity C."""
        bound = _checks.clip_norm("clip_norm", clip_norm)
        # In float64: over millions of examples float32 rounds by more than one example may add.
        total = torch.zeros((), dtype=torch.float64, device=self.engine.layout.device)
        with self.engine.exactly():
            for part in self._passes():
                total = total + part.norms.double().clamp(max=bound).sum()
        return Query(total, bound, self.lot, self.engine.layout.dtype)

    def count(self, fraction: ByNorm) -> Query:
        """Σ (f_i - ½) with f_i = fraction(norms)_i in [0, 1]: sensitivity ½, half of an uncentred count's.

        A non-finite gradient or fraction contributes zero.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.engine.layout.device)  # see norm_sum
        with self.engine.exactly():
            for part in self._passes():
                fractions = _by_norm(fraction, part.norms, 0.5).clamp(0, 1)
                total = total + part.of_finite(fractions - 0.5).sum(dtype=torch.float64)
        return Query(total, 0.5, self.lot, self.engine.layout.dtype)

    def scaled(self, blocks: Sequence[float]) -> "Gradients":
        """The gradients with each parameter's part times a public b_l, before any clipping.

        The release of a sum of these must be multiplied by b_l again. Sensitivity stays the clip norm.
        """
        checked = tuple(_checks.positive("a block weight", b) for b in blocks)
        if len(checked) != len(self.engine.layout.names):
            raise PrivacyError(f"{len(checked)} block weights for {len(self.engine.layout.names)} parameters")
        return replace(self, blocks=checked, _kept=[])

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else self.engine.layout.dtype

    def _passes(self) -> Iterator["_Pass"]:
        """The lot in micro-batches; a lot that fits into one is kept for further questions."""
        if self._kept:
            yield from self._kept
            return
        rows = batch_size(self.batch)
        examples = rows // self.copies
        if examples * self.copies != rows:
            raise PrivacyError(f"the rows of the batch are not {self.copies} copies of each example")
        at_once = self._at_once(examples)
        for start in range(0, examples, at_once):
            stop = min(start + at_once, examples)
            whole = stop - start == examples
            batch = self.batch if whole else take(self.batch, slice(start * self.copies, stop * self.copies))
            for part in self._measure(batch, stop - start):
                if whole and part.complete:
                    self._kept.append(part)
                yield part
                del part  # before the next one is recorded

    def _at_once(self, examples: int) -> int:
        rows = rows_at_once(self.batch)  # fewer than all if they are still to be fetched, whatever the micro-batch
        if self.microbatch is not None:
            return max(1, min(self.microbatch, rows // self.copies))
        recorded = self.engine.most_rows(self.batch) if examples and not self.ascent else None
        return max(1, (rows if recorded is None else min(rows, recorded)) // self.copies)

    def _measure(self, batch: Batch, examples: int) -> Iterator["_Pass"]:
        layout = self.engine.layout
        blocks = self.blocks or (1.0,) * len(layout.names)
        uses = None if self.ascent else self.engine.uses(batch, self.points, self.copies)
        if uses is not None:
            pieces = [(use, i) for i, use in enumerate(uses) if use is not None]
            yield _Pass.of(self.engine, pieces, blocks, examples)
            return
        # One example at a time: hold as many whole gradients as the chunk limit allows.
        held: list[Tensor] = []
        rows = (
            ascended_gradients(self.engine, batch, self.ascent)
            if self.ascent
            else self.engine.example_gradients(batch, self.points, self.copies)
        )
        for gradient in rows:
            held.append(gradient)
            if len(held) * layout.size >= HELD_ENTRIES:
                yield _Pass.of_rows(self.engine, held, blocks)
                held = []
        if held:
            yield _Pass.of_rows(self.engine, held, blocks)


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
    def of_rows(engine: Engine, rows: list[Tensor], blocks: tuple[float, ...]) -> "_Pass":
        stacked = torch.stack(rows)
        for row in stacked:
            for view, b in zip(engine.layout.views(row), blocks, strict=True):
                view.mul_(b)
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
