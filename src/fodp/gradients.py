"""What a gradient source must give, how a norm becomes a weight, and how both become a query.

A source (`fodp.sources`) is the only thing that differs between ways to train: it turns a lot into chunks. A chunk has
the norms of its examples' gradients, and adds their weighted sum to a vector. No per-example gradient leaves it.

A clip rule brings every gradient within the bound C: whole gradients (`Flat`), all of them to the bound (`Normalised`),
or layer by layer (`ByLayer`). The step knows C (`fodp.step.Step.clip_norm`): a constant, a schedule, or a quantile that
a noisy count follows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fodp.errors import PrivacyError
from fodp.layout import Layout
from fodp.queries import Factor, Query
from fodp.support import checks

# The contribution of one example, as computed, may exceed its bound by this relative amount. Norms are raised by the
# worst that float32 can do (`clipping/layers/rounding.py`), so what is left is the rounding of float64 sums of squares:
# 2^16 of them and a few come one after another. `make fuzz` searches for more. Rounding in the sum over the examples is
# another matter: docs/threat-model.md.
FLOAT_TOLERANCE = 1e-9

# Where to evaluate: (coefficient, flat offset from the parameters or None) each; gradients add up.
Points = Sequence[tuple[float, Tensor | None]]
HERE: Points = ((1.0, None),)
ByNorm = Callable[[Tensor], Tensor]


class Chunk(Protocol):
    """Some examples of a lot after their backward pass. An example without a finite gradient has norm zero."""

    @property
    def norms(self) -> Tensor:
        """One number per example."""

    def finite(self, values: Tensor) -> Tensor:
        """The values, zero for every example whose gradient is not finite."""

    def layer_norms(self, places: Sequence[int]) -> Tensor:
        """The norm of each example's gradient in the parameters at these places."""

    def add_weighted(self, out: Tensor, weights: Tensor, accumulate: bool) -> None:
        """Write Σ wᵢ·gᵢ into the flat vector, or add it there."""

    def add_weighted_layer(self, out: Tensor, weights: Tensor, places: Sequence[int]) -> None:
        """Add Σ wᵢ·gᵢ in the parameters at these places to the flat vector."""


class Source(Protocol):
    """Where per-example gradients come from: `Pull` runs the loss itself, `Push` records the owner's own passes."""

    @property
    def layout(self) -> Layout:
        """Where each trainable parameter lies in the flat vector."""

    def chunks(self, lot: Any, at: Points, factors: tuple[Factor, ...] | None, exact: bool) -> Iterable[Chunk]:
        """The lot's examples, at these points, each gradient scaled by public factors (one per parameter).

        It may be gone through more than once. `exact` sums in float64.
        """

    def unchanged(self) -> Any:
        """A context around a step: `refuse_changes()` raises if the model has kept something of the examples."""

    @property
    def engine(self) -> Any:
        """The clipping engine of the model, which a scaling may ask about public records."""

    def public_records(self, scaling: Any) -> Callable[[int], Any] | None:
        """Public records for a step, as the loss takes them; None: the loss is the owner's."""

    def state_dict(self) -> dict[str, Any]:
        """What a seeded run needs to go on bit for bit."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state; None: it was left out."""


def limits(norms: Tensor, bound: float, most: float = math.inf) -> Tensor:
    """The largest weights, up to `most`, that keep every weighted norm within the bound."""
    # Squares of smaller norms run out of exponent: such a norm could be larger than it looks.
    smallest = torch.finfo(norms.dtype).tiny ** 0.25
    return norms.clamp(min=smallest).reciprocal_().mul_(bound).clamp_(max=most)


def by_norm(function: ByNorm, norms: Tensor, otherwise: float) -> Tensor:
    """A user's function of the norms, one value per example; `otherwise` where it is not finite."""
    values = function(norms.clone()).to(norms).expand_as(norms)  # a clone: the function may work in place
    return values.nan_to_num(otherwise, otherwise, otherwise)


class ClipRule(Protocol):
    """How a chunk's gradients are brought within a bound and added up: one example moves the sum by at most that."""

    @property
    def by_layer(self) -> bool:
        """Whether layers are clipped apart, so that there is no weight of a whole gradient."""

    def add(self, chunk: Chunk, out: Tensor, bound: float, accumulate: bool) -> None:
        """Write the sum of the chunk's clipped gradients into `out`, or add it there."""

    def limiting(self, chunk: Chunk) -> Tensor:
        """For every example the bound from which on nothing of it is clipped."""


@dataclass(frozen=True)
class Flat:
    """Σ gᵢ·min(1, C/‖gᵢ‖)."""

    by_layer = False

    def add(self, chunk: Chunk, out: Tensor, bound: float, accumulate: bool) -> None:
        """Shorter gradients stay as they are."""
        chunk.add_weighted(out, limits(chunk.norms, bound, most=1.0), accumulate)

    def limiting(self, chunk: Chunk) -> Tensor:
        """The norm."""
        return chunk.norms


@dataclass(frozen=True)
class Normalised(Flat):
    """Σ C·gᵢ/(‖gᵢ‖ + γ), which no more exceeds C (Bu et al., Automatic Clipping, 2023)."""

    stability: float = 0.01

    def add(self, chunk: Chunk, out: Tensor, bound: float, accumulate: bool) -> None:
        """Every gradient becomes about C long."""
        limit = limits(chunk.norms, bound)
        weights = by_norm(lambda norms: bound / (norms + self.stability), chunk.norms, 0.0)
        chunk.add_weighted(out, weights.clamp(-limit, limit), accumulate)


@dataclass(frozen=True)
class ByLayer:
    """Each layer's part to its share of the bound. The squares of the shares sum to one, so the whole stays within it.

    `layers`: the places of a layer's parameters in the model, and the layer's share.
    """

    layers: tuple[tuple[tuple[int, ...], float], ...]
    by_layer = True

    def add(self, chunk: Chunk, out: Tensor, bound: float, accumulate: bool) -> None:
        """Layer after layer."""
        if not accumulate:
            out.zero_()
        for places, share in self.layers:
            weights = limits(chunk.layer_norms(places), bound * share, most=1.0)
            chunk.add_weighted_layer(out, weights, places)

    def limiting(self, chunk: Chunk) -> Tensor:
        """The largest norm of a layer over its share."""
        return torch.stack([chunk.layer_norms(places) / share for places, share in self.layers]).amax(0)


FLAT = Flat()


@dataclass(frozen=True)
class Gradients:
    """The per-example gradients of one lot, as questions whose answers know their bound. Only queries leave it.

    Where the unit is a person, an "example" is a person with all rows of theirs in the lot.
    `total` adds the sums of other processes, if there are any: each example is in one of them.
    """

    chunks: Iterable[Chunk]
    layout: Layout
    lot: object = None
    rule: ClipRule = FLAT
    factors: tuple[Factor, ...] | None = None
    exact: bool = False
    total: Callable[[Tensor], Tensor] | None = None

    def clipped_sum(self, clip_norm: float) -> Query:
        """Σ gᵢ·min(1, C/‖gᵢ‖), or what the clip rule makes of it: sensitivity C (paper, Lemma 1)."""
        return self._sum(self.rule, checks.clip_norm("clip_norm", clip_norm))

    def sum(self, *, bound: float, weight: ByNorm | None = None) -> Query:
        """Σ wᵢ·gᵢ with wᵢ = weight(norms)ᵢ, cut so that ‖wᵢ·gᵢ‖ ≤ bound, whatever `weight` says.

        `weight` must treat every example by itself: a weight that looks at the other norms would let one example change
        the others' terms, and the bound would not hold. A weight that is not finite counts as zero.
        """
        if weight is None:
            return self._sum(self.rule if self.rule.by_layer else FLAT, bound)
        if self.rule.by_layer:
            raise PrivacyError("a weight by the norm of a whole gradient cannot be had layer by layer: use clip='flat'")
        return self._sum(_Weighted(weight), bound)

    def norm_sum(self, clip_norm: float) -> Query:
        """Σ min(‖gᵢ‖, C): sensitivity C."""
        bound = checks.clip_norm("clip_norm", clip_norm)
        # In float64: over millions of examples float32 rounds by more than one example may add.
        total = torch.zeros((), dtype=torch.float64, device=self.layout.device)
        for chunk in self.chunks:
            total = total + chunk.norms.double().clamp(max=bound).sum()
        return self._query(total, bound)

    def count(self, fraction: ByNorm) -> Query:
        """Σ (fᵢ - ½) with fᵢ = fraction(norms)ᵢ in [0, 1]: sensitivity ½, half of an uncentred count's.

        A non-finite gradient or fraction contributes zero. Where layers are clipped apart, an example's number is the
        clip norm at which the first of its layers is clipped, so that "within the clip norm" means that none is.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.layout.device)  # see norm_sum
        for chunk in self.chunks:
            fractions = by_norm(fraction, self.rule.limiting(chunk), 0.5).clamp(0, 1)
            total = total + chunk.finite(fractions - 0.5).sum(dtype=torch.float64)
        return self._query(total, 0.5)

    def _sum(self, rule: ClipRule, bound: float) -> Query:
        layout, accumulate = self.layout, False
        dtype = torch.float64 if self.exact else layout.dtype
        total = torch.empty(layout.size, dtype=dtype, device=layout.device)
        for chunk in self.chunks:
            rule.add(chunk, total, bound, accumulate)
            accumulate = True
            del chunk  # before the next one is recorded
        blocks = None
        if self.factors is not None:
            blocks = tuple(zip((p.numel() for p in layout.parameters), self.factors, strict=True))
        return self._query(total if accumulate else total.zero_(), bound, blocks)

    def _query(self, value: Tensor, bound: float, blocks: tuple[tuple[int, Factor], ...] | None = None) -> Query:
        """Of all processes: each example is in one of them, so the bound is that of its part."""
        total = value if self.total is None else self.total(value)
        return Query(total, bound, self.lot, self.layout.dtype, blocks)


@dataclass(frozen=True)
class _Weighted:
    """A method's own weights, cut to the bound."""

    weight: ByNorm
    by_layer = False

    def add(self, chunk: Chunk, out: Tensor, bound: float, accumulate: bool) -> None:
        """Add Σ wᵢ·gᵢ."""
        limit = limits(chunk.norms, bound)
        chunk.add_weighted(out, by_norm(self.weight, chunk.norms, 0.0).clamp(-limit, limit), accumulate)

    def limiting(self, chunk: Chunk) -> Tensor:
        """The norms."""
        return chunk.norms
