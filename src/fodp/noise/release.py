"""The one place where noise is added: s̃ = r + N(0, σ²C²·I)."""

from typing import Protocol

from torch import Tensor

from fodp.noise.streams import Streams
from fodp.queries import Query


class Noise(Protocol):
    """A source of Gaussian noise, one independent draw per (step, name)."""

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with N(0, std²)."""


def release(query: Query, std: float, noise: Noise, step: int, name: str) -> Tensor:
    """query + N(0, std²·I): the only noise site of the package. The result is a fresh tensor.

    Satisfies the guarantee of a Gaussian mechanism with multiplier `query.noise_multiplier(std)`.
    """
    room = query.empty(query.dtype)
    if isinstance(noise, Streams) and room.device.type != "cpu" and not query.is_wider:
        return noise.add_normal_(query.add_to(room.zero_()), std, step, name)  # the noise is added as it is made
    out = noise.normal_(room, std, step, name)
    # A wider value is added as it is and rounded with its noise: post-processing. Rounded before, it could be moved by
    # more than its bound: a sum over millions of examples by 1, where float32 has no numbers in between.
    return query.add_to(out)
