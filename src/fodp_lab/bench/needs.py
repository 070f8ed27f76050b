"""What a large model needs on each rank, from formulas alone: memory, and what is sent in a step.

d trainable parameters of D in all, a window of K releases of w bytes a number, float32 (b = 4) for all else:

    parameters   b·D
    sum          b·d           the clipped sum
    releases     (K·w + b)·d   the window and the release under way
    optimizer    2·b·d         Adam's two moments (SGD: 0)

Activations and the examples' part of the passes are not in it: they go with the lot and the model.
"""

from dataclasses import dataclass

FLOAT = 4
BILLION = 1_000_000_000


@dataclass(frozen=True)
class Setting:
    """A model, and how it is trained."""

    what: str
    parameters: int
    trainable: int
    window: int = 8

    def held(self) -> dict[str, float]:
        """Bytes that each rank holds while it makes a step, by what they are for."""
        return {
            "parameters": FLOAT * self.parameters,
            "sum": FLOAT * self.trainable,
            "releases": FLOAT * (self.window + 1) * self.trainable,
            "optimizer": 2 * FLOAT * self.trainable,
        }

    def sent(self) -> float:
        """Bytes that the first rank sends and receives in a step: the sum to it, and the release from it."""
        return 2.0 * FLOAT * self.trainable


def settings(lora: int = 10_000_000) -> list[Setting]:
    """A model of a billion parameters in full, and with LoRA of `lora` trainable ones on a frozen float32 base."""
    return [Setting("in full", BILLION, BILLION), Setting("LoRA", BILLION, lora)]
