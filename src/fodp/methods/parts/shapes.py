"""The shape of a query: public factors on the parts of every gradient, before clipping and again after the release."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fodp import _checks
from fodp._checks import ConfigurationError

SHAPES = ("none", "fan-in", "kronecker", "transcript")
BLOCKS = ("parameter", "row")
INPUTS = ("auto", "pink", "normal")
SIDES = ("both", "inputs", "outputs")
# Which parameters act with which shape; with others they must be left at their defaults.
ACTING = {
    "width": ("fan-in", "kronecker", "transcript"),
    "shape_damping": ("kronecker",),
    "shape_every": ("kronecker",),
    "shape_sides": ("kronecker",),
    "shape_inputs": ("kronecker",),
    "shape_blocks": ("transcript",),
    "shape_warmup": ("transcript",),
    "shape_memory": ("transcript",),
    "shape_floor": ("transcript",),
    "shape_ceiling": ("transcript",),
    "shape_share": ("transcript",),
}
ShapeChoice = str | tuple[float, ...]


def checked(given: object) -> ShapeChoice:
    """A word of `SHAPES`, or the user's own numbers."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(_checks.positive("each of shape", value) for value in given)
    if not isinstance(given, str):
        raise ConfigurationError(
            f"shape must be {', '.join(map(repr, SHAPES))} or a list of numbers, got {_checks.shown(given)}"
        )
    return _checks.one_of("shape", given, SHAPES)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Parameter l's part of every gradient times b_l, clipped as a whole; the release times b_l again.

    Flat clipping spends the sensitivity where the gradient is large, and the first layer of a wide network holds most
    of every example's norm: the others drown in the noise. Factors are public, made of shapes or given beforehand, and
    act before clipping, so one example still moves the sum by C at most, and what is done to the release is
    post-processing: bound, noise and events are those without a shape. Clipping aside, it is a step of rate lr·b_l².
    Memories, filters and ascents see releases that are mapped back; κ and ζ of fo-dp-sgd stay those of noise without a
    shape unless they are set.

    With `kronecker` b_l is a pair of matrices, and with `transcript` it moves from step to step (`fodp.shaping`): both
    are made of earlier releases and of records that are nobody's, so the same holds given what was released before.
    """

    shape: ShapeChoice
    width: float
    shape_damping: float
    shape_every: int
    shape_inputs: str
    shape_sides: str
    shape_blocks: str
    shape_warmup: int
    shape_memory: float
    shape_floor: float
    shape_ceiling: float
    shape_share: float

    def __post_init__(self) -> None:
        for name in ("width", "shape_damping", "shape_floor", "shape_ceiling"):
            _checks.positive(name, getattr(self, name))
        _checks.whole("shape_every", self.shape_every, minimum=0)
        _checks.whole("shape_warmup", self.shape_warmup)
        _checks.one_of("shape_inputs", self.shape_inputs, INPUTS)
        _checks.one_of("shape_sides", self.shape_sides, SIDES)
        _checks.one_of("shape_blocks", self.shape_blocks, BLOCKS)
        _checks.number("shape_share", self.shape_share)
        if _checks.number("shape_memory", self.shape_memory) < 1:
            raise ConfigurationError(f"shape_memory is a number of steps, at least 1; got {self.shape_memory:g}")
        if self.shape_floor > self.shape_ceiling:
            raise ConfigurationError(
                f"shape_floor {self.shape_floor:g} lies above shape_ceiling {self.shape_ceiling:g}: exchange them"
            )

    @property
    def in_words(self) -> str:
        """What is done to a parameter's part of a gradient, for statements of a guarantee."""
        if self.shape == "kronecker":
            return "mapped by public matrices (made of made-up or public records and of earlier releases)"
        return "times a factor made of earlier releases" if self.shape == "transcript" else "times a public factor"

    def weights(self, shapes: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """b of parameters of these shapes; with fan-in min(1, √(w/inputs)), biases and gains having one input each."""
        if not isinstance(self.shape, str):
            if len(self.shape) != len(shapes):
                raise ConfigurationError(
                    f"shape has {len(self.shape)} numbers, and the model has {len(shapes)} trainable parameters: give "
                    "one for each, in the order of model.parameters()"
                )
            return self.shape
        return tuple(min(1.0, math.sqrt(self.width / max(1, math.prod(shape[1:])))) for shape in shapes)
