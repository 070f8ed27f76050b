"""The shape of a run's queries, step by step: public factors and maps, and where they come from.

A fixed shape is made of the parameters' own shapes. The shape `kronecker` looks at the present model, which is made of
releases, through made-up inputs; `transcript` at earlier releases and at the noise that is known to be in them. None
sees a record, a lot, or a release before its noise.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fodp._checks import ConfigurationError
from fodp.clipping.batches import Batch
from fodp.clipping.engine import Engine
from fodp.clipping.maps import Factor
from fodp.methods.parts.shapes import Shape
from fodp.queries import Query
from fodp.shaping.kronecker import KroneckerShape, SameOnAllRanks
from fodp.shaping.transcript import TranscriptShape

__all__ = ["FixedShape", "KroneckerShape", "Shaping", "TranscriptShape", "start"]


class Shaping(Protocol):
    """The factors of each step."""

    @property
    def current(self) -> tuple[Factor, ...]:
        """Those that were asked for last."""

    def factors(self, step: int) -> tuple[Factor, ...]:
        """One for each parameter, in this step."""

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """A release, not yet mapped back, of a query of this shape, with its noise."""

    def state_dict(self) -> dict[str, Any] | None:
        """What another process needs to go on; None: nothing."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state."""


class FixedShape:
    """The same public numbers in every step."""

    def __init__(self, weights: Sequence[float]):
        self.current: tuple[Factor, ...] = tuple(weights)

    def factors(self, step: int) -> tuple[Factor, ...]:
        """Those numbers."""
        return self.current

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """Nothing is learned."""

    def state_dict(self) -> dict[str, Any] | None:
        """Nothing is kept."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Nothing was kept."""


def start(shape: Shape, engine: Engine, sample: Callable[[int], Batch] | None, same: SameOnAllRanks) -> Shaping:
    """The shape of a run. `sample(step)` makes public records; None: the run has no loss of its own to show them to."""
    shapes = [tuple(parameter.shape) for parameter in engine.layout.parameters]
    if shape.shape == "kronecker":
        if sample is None:
            raise ConfigurationError(
                "shape='kronecker' shows made-up records to the model and its loss, and in a loop of your own the loss "
                "is yours: use fodp.Trainer, or another shape"
            )
        return KroneckerShape(shape, engine, sample, same)
    if shape.shape == "transcript":
        return TranscriptShape(shape, shapes, same)
    return FixedShape(shape.weights(shapes))
