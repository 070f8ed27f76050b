"""Scalings: public factors or maps on the parts of every gradient, before clipping and again after the release.

Flat clipping spends the sensitivity where the gradient is large, and the first layer of a wide network holds most of
every example's norm: the others drown in the noise. Factors are public and act before clipping, so one example still
moves the sum by C at most, and what is done to the release is post-processing: bound, noise and events are those
without a scaling. Clipping aside, a factor b is a step of rate lr·b². Memories, filters and ascents see releases that
are mapped back; κ and ζ of fo-dp-sgd stay those of noise without a scaling unless they are set.

Factors are fixed, or they move from step to step: `Kronecker` looks at the present model, which is made of releases,
through made-up inputs; `Transcript` at earlier releases and at the noise that is known to be in them. None sees a
record, a lot, or a release before its noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fodp.clipping.maps import Factor
from fodp.errors import ConfigurationError
from fodp.options.option import Beginning, Option
from fodp.options.schedule import share_of
from fodp.queries import Query
from fodp.support import checks

Shapes = Sequence[Sequence[int]]
BLOCKS = ("parameter", "row")
INPUTS = ("auto", "pink", "normal")
SIDES = ("both", "inputs", "outputs")


class ScalingState(Protocol):
    """The factors of each step."""

    @property
    def current(self) -> tuple[Factor, ...]:
        """Those that were asked for last."""

    def factors(self, step: int) -> tuple[Factor, ...]:
        """One for each parameter, in this step."""

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """A release, not yet mapped back, of a query with this scaling, with its noise."""

    def state_dict(self) -> dict[str, Any] | None:
        """What another process needs to go on; None: nothing."""

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over a saved state."""


class FixedScaling:
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


class Scaling(Option):
    """Parameter l's part of every gradient times b_l, clipped as a whole; the release times b_l again."""

    in_words = "times a public factor"  # for statements of a guarantee

    def start(self, run: Beginning) -> ScalingState:
        return FixedScaling(self.weights(shapes_of(run)))

    def weights(self, shapes: Shapes) -> tuple[float, ...]:
        """b of parameters of these shapes, before anything is learned."""
        raise NotImplementedError


@dataclass(frozen=True)
class Factors(Scaling):
    """Public numbers of your own, one for each trainable parameter."""

    shape: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.shape, str) or not isinstance(self.shape, Sequence):
            raise ConfigurationError(f"shape must be a word or a list of numbers, got {checks.shown(self.shape)}")
        numbers = tuple(checks.positive("each of shape", value) for value in self.shape)
        object.__setattr__(self, "shape", numbers)

    def weights(self, shapes: Shapes) -> tuple[float, ...]:
        if len(self.shape) != len(shapes):
            raise ConfigurationError(
                f"shape has {len(self.shape)} numbers, and the model has {len(shapes)} trainable parameters: give one "
                "for each, in the order of model.parameters()"
            )
        return self.shape


@dataclass(frozen=True)
class FanIn(Scaling):
    """b = √(`width`/inputs) for a parameter with more than `width` inputs, else 1; biases and gains have one input."""

    width: float = 64.0

    def __post_init__(self) -> None:
        checks.positive("width", self.width)

    def weights(self, shapes: Shapes) -> tuple[float, ...]:
        return tuple(min(1.0, math.sqrt(self.width / max(1, math.prod(shape[1:])))) for shape in shapes)


@dataclass(frozen=True)
class Kronecker(FanIn):
    """A layer's inputs and back-signals are mapped by (A + `shape_damping`)^(-1/2), A their second moment.

    A is that of made-up records (`shape_inputs`: auto, pink or normal; or `Trainer(public_sample=...)`) in the model at
    the start and, with `shape_every` k, at every k-th step. Maps have the mean square of fan-in's factors.
    `shape_sides` is outputs (back-signals alone: made-up inputs are not the data's), inputs or both, of weights that
    lie as those of nn.Linear.
    """

    shape_damping: float = 1.0
    shape_every: int = 0
    shape_inputs: str = "auto"
    shape_sides: str = "outputs"
    in_words = "mapped by public matrices (made of made-up or public records and of earlier releases)"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive("shape_damping", self.shape_damping)
        checks.whole("shape_every", self.shape_every, minimum=0)
        checks.one_of("shape_inputs", self.shape_inputs, INPUTS)
        checks.one_of("shape_sides", self.shape_sides, SIDES)

    def start(self, run: Beginning) -> ScalingState:
        from fodp.options.kronecker import KroneckerScaling

        assert run.sample is not None  # the table of conflicts has refused a loop of your own
        return KroneckerScaling(self, run.engine, run.sample, run.same)

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        return {"shape_every": share_of(self.shape_every, steps, of)} if self.shape_every else {}


@dataclass(frozen=True)
class Transcript(FanIn):
    """Factors are learned from earlier releases' energies beyond their noise, fan-in for the first `shape_warmup`.

    They are remembered for about `shape_memory` steps. A block of D numbers has a share of D^`shape_share`, within
    `shape_floor` and `shape_ceiling`. `shape_blocks` is parameter or row, which is an output or a channel.
    """

    shape_blocks: str = "parameter"
    shape_warmup: int = 50
    shape_memory: float = 100.0
    shape_floor: float = 0.01
    shape_ceiling: float = 4.0
    shape_share: float = 0.25
    in_words = "times a factor made of earlier releases"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shape_floor", "shape_ceiling"):
            checks.positive(name, getattr(self, name))
        checks.whole("shape_warmup", self.shape_warmup)
        checks.one_of("shape_blocks", self.shape_blocks, BLOCKS)
        checks.number("shape_share", self.shape_share)
        if checks.number("shape_memory", self.shape_memory) < 1:
            raise ConfigurationError(f"shape_memory is a number of steps, at least 1; got {self.shape_memory:g}")
        if self.shape_floor > self.shape_ceiling:
            raise ConfigurationError(
                f"shape_floor {self.shape_floor:g} lies above shape_ceiling {self.shape_ceiling:g}: exchange them"
            )

    def start(self, run: Beginning) -> ScalingState:
        from fodp.options.transcript import TranscriptScaling

        return TranscriptScaling(self, shapes_of(run), run.same)

    def in_short(self, steps: int, of: int) -> dict[str, Any]:
        return {"shape_warmup": share_of(self.shape_warmup, steps, of)}


def shapes_of(run: Beginning) -> list[tuple[int, ...]]:
    """Those of the model's trainable parameters."""
    return [tuple(parameter.shape) for parameter in run.engine.layout.parameters]
