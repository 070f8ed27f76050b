"""The gradients of a batch, as the Trainer asks for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fodp.clipping import Engine, Gradients
from fodp.clipping.chunks import Chunks
from fodp.gradients import FLAT, HERE, ClipRule, Points
from fodp.queries import Factor


def gradients_of(
    engine: Engine,
    batch: Any,
    points: Points = HERE,
    *,
    copies: int = 1,
    microbatch: int | None = None,
    factors: Sequence[Factor] | None = None,
    rule: ClipRule = FLAT,
    lot: object = None,
    exact: bool = False,
) -> Gradients:
    """What may be asked about the examples of a batch, without a session around it."""
    scaled = None if factors is None else tuple(factors)
    chunks = Chunks(engine, batch, points, copies, microbatch, scaled, exact)
    return Gradients(chunks, engine.layout, lot, rule, scaled, exact)


def scaled(gradients: Gradients, factors: Sequence[Factor] | None) -> Gradients:
    """The same gradients scaled by these factors before they are clipped; their release is not scaled back."""
    return replace(gradients, chunks=replace(gradients.chunks, factors=factors), factors=None)
