"""What a large model needs on each rank, from formulas alone: memory, and what is sent in a step.

d trainable parameters of D in all, R ranks, a window of K releases of w bytes a number, float32 (b = 4) for all else:

    parameters   b·D           sharded: b·D/R, and b·D whole during the passes
    sum          b·d           one whole clipped sum during the passes, sharded or not
    releases     (K·w + b)·d   the window and the release under way; sharded: /R
    optimizer    2·b·d         Adam's two moments (SGD: 0); sharded: /R

Activations and the examples' part of the passes are not in it: they go with the lot and the model.
"""

from dataclasses import dataclass

FLOAT = 4
BILLION = 1_000_000_000


@dataclass(frozen=True)
class Setting:
    """A model, how it is trained, and how its state lies on the ranks."""

    what: str
    parameters: int
    trainable: int
    sharded: bool = False
    window: int = 8

    def held(self, ranks: int) -> dict[str, float]:
        """Bytes that one rank holds while it makes a step, by what they are for."""
        share = 1 / ranks if self.sharded else 1.0
        whole = FLOAT * self.parameters
        return {
            "parameters": whole * share + (whole if self.sharded else 0),
            "sum": FLOAT * self.trainable,
            "releases": FLOAT * (self.window + 1) * self.trainable * share,
            "optimizer": 2 * FLOAT * self.trainable * share,
        }

    def sent(self, ranks: int) -> float:
        """Bytes that one rank, the first, hands over in a step.

        Replicated: the sum to rank 0, and the release from it. Sharded: the sum, to be scattered, and its slice of all
        parameters, to be gathered.
        """
        if not self.sharded:
            return 2.0 * FLOAT * self.trainable
        return FLOAT * (self.trainable + self.parameters / ranks)


def settings(lora: int = 10_000_000) -> list[Setting]:
    """A model of a billion parameters in full, and with LoRA of `lora` trainable ones on a frozen float32 base."""
    return [
        Setting(what, BILLION, trainable, sharded)
        for what, trainable in (("in full", BILLION), ("LoRA", lora))
        for sharded in (False, True)
    ]
