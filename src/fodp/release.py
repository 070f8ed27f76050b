"""The one place where noise is added: s̃ = r + N(0, σ²C²·I)."""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fodp.queries import Query


class Gaussian(Protocol):
    """A source of Gaussian numbers, one independent draw per (step, name)."""

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with N(0, std²)."""


class Noise(Protocol):
    """How the releases of a session get their noise; chosen once, by the session (`fodp.noise`)."""

    @property
    def is_fresh(self) -> bool:
        """Whether each draw is independent of all others, so that its scale is 1 and every process knows it."""

    def add(self, query: Query, std: float, step: int, name: str) -> Tensor:
        """The query with noise of standard deviation std, in a fresh tensor."""

    def scale(self) -> float:
        """The standard deviation of the noise that was added last, in units of the std that was asked for."""


def release(query: Query, std: float, noise: Gaussian, step: int, name: str) -> Tensor:
    """query + N(0, std²·I): the only noise site of the package. The result is a fresh tensor.

    Satisfies the guarantee of a Gaussian mechanism with multiplier `query.noise_multiplier(std)`.
    """
    room = query.empty(query.dtype)
    add_normal_: Any = getattr(noise, "add_normal_", None)
    if add_normal_ is not None and room.device.type != "cpu" and not query.is_wider:
        return add_normal_(query.add_to(room.zero_()), std, step, name)  # the noise is added as it is made
    out = noise.normal_(room, std, step, name)
    # A wider value is added as it is and rounded with its noise: post-processing. Rounded before, it could be moved by
    # more than its bound: a sum over millions of examples by 1, where float32 has no numbers in between.
    return query.add_to(out)


@dataclass(frozen=True)
class FreshNoise:
    """Independent noise for every release."""

    source: Gaussian
    is_fresh = True

    def add(self, query: Query, std: float, step: int, name: str) -> Tensor:
        """query + N(0, std²·I)."""
        return release(query, std, self.source, step, name)

    def scale(self) -> float:
        """As asked."""
        return 1.0
