"""From a norm to a weight: how each example's gradient is brought within the bound.

Whole gradients (`Flat`), all of them to the bound (`Normalised`), or layer by layer (`ByLayer`). The step knows the
bound C (`fodp.step.Step.clip_norm`): a constant, a schedule, or a quantile that a noisy count follows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fodp.gradients import Chunk

ByNorm = Callable[[Tensor], Tensor]


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

    def add(self, chunk: "Chunk", out: Tensor, bound: float, accumulate: bool) -> None:
        """Write the sum of the chunk's clipped gradients into `out`, or add it there."""

    def limiting(self, chunk: "Chunk") -> Tensor:
        """For every example the bound from which on nothing of it is clipped."""


@dataclass(frozen=True)
class Flat:
    """Σ gᵢ·min(1, C/‖gᵢ‖)."""

    by_layer = False

    def add(self, chunk: "Chunk", out: Tensor, bound: float, accumulate: bool) -> None:
        """Shorter gradients stay as they are."""
        chunk.add_weighted(out, limits(chunk.norms, bound, most=1.0), accumulate)

    def limiting(self, chunk: "Chunk") -> Tensor:
        """The norm."""
        return chunk.norms


@dataclass(frozen=True)
class Normalised(Flat):
    """Σ C·gᵢ/(‖gᵢ‖ + γ), which no more exceeds C (Bu et al., Automatic Clipping, 2023)."""

    stability: float = 0.01

    def add(self, chunk: "Chunk", out: Tensor, bound: float, accumulate: bool) -> None:
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

    def add(self, chunk: "Chunk", out: Tensor, bound: float, accumulate: bool) -> None:
        """Layer after layer."""
        if not accumulate:
            out.zero_()
        for places, share in self.layers:
            weights = limits(chunk.layer_norms(places), bound * share, most=1.0)
            chunk.add_weighted_layer(out, weights, places)

    def limiting(self, chunk: "Chunk") -> Tensor:
        """The largest norm of a layer over its share."""
        return torch.stack([chunk.layer_norms(places) / share for places, share in self.layers]).amax(0)


FLAT = Flat()
