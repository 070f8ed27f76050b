"""The one place where noise is added: s̃ = r + N(0, σ²C²·I)."""

from typing import Protocol

from torch import Tensor

from fodp.queries import Query


class Noise(Protocol):
    """A source of Gaussian noise, one independent draw per (step, name)."""

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with N(0, std²)."""


def release(query: Query, std: float, noise: Noise, step: int, name: str) -> Tensor:
    """query + N(0, std²·I): the only noise site of the package. The result is a fresh tensor.

    Satisfies the guarantee of a Gaussian mechanism with multiplier `query.noise_multiplier(std)`.
    """
    out = noise.normal_(query.empty(query.dtype), std, step, name)
    return query.add_to(out)  # a wider value is added as it is and rounded with its noise: post-processing
