"""Queries that know their sensitivity, and the one place where noise is added.

Here is the paper's equation (recursive query) r = β·s + (1-β)·u as arithmetic on a `Query`, and its
release s̃ = r + N(0, σ²C²·I). Sensitivity, noise and accounting cannot disagree, because the noise
multiplier of the accounting event is computed from the query's own bound.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.accounting import Event
from fodp.noise import Streams


class Term(Protocol):
    """Something computed from earlier releases, worked out only when it is added to a release."""

    def add_to(self, out: Tensor, factor: float) -> None:
        """out += factor · its value."""


Terms = tuple[tuple[float, "Tensor | Term"], ...]


class Query:
    """A private value with a bound on what one example can change of it (ℓ2, add or remove one).

    Scaling it scales the bound; adding a tensor computed from earlier releases leaves it; adding two
    queries of one lot adds the bounds. The value is kept as a sum of terms and worked out once, at release.
    `dtype` is that of the release and its noise, where the value itself is kept in a wider one.
    """

    def __init__(self, value: Tensor, bound: float, lot: object = None, dtype: torch.dtype | None = None):
        self._terms: Terms = ((1.0, value),)
        self._like = value
        self.dtype = value.dtype if dtype is None else dtype
        self.bound = _checks.at_least_zero("the bound of a query", bound)
        self.lot = lot

    @property
    def value(self) -> Tensor:
        """The private value itself; whatever is made of it has no noise and no guarantee."""
        return self.add_to(torch.zeros_like(self._like))

    def add_to(self, out: Tensor) -> Tensor:
        """Add the value to `out` in place."""
        for factor, term in self._terms:
            if isinstance(term, Tensor):
                out.add_(term, alpha=factor)
            else:
                term.add_to(out, factor)
        return out

    def _with(self, terms: "Terms", bound: float) -> "Query":
        query = Query(self._like, bound, self.lot, self.dtype)
        query._terms = terms
        return query

    def __mul__(self, factor: float) -> "Query":
        factor = _checks.number("the factor of a query", factor)
        return self._with(tuple((factor * f, t) for f, t in self._terms), abs(factor) * self.bound)

    __rmul__ = __mul__

    def __add__(self, other: "Query | Tensor") -> "Query":
        if isinstance(other, Query):
            if other.lot is not self.lot:
                raise PrivacyError("queries of different lots cannot be added: release each lot by itself")
            return self._with(self._terms + other._terms, self.bound + other.bound)
        return self._with((*self._terms, (1.0, other)), self.bound)

    __radd__ = __add__

    def plus(self, released: Tensor | Term, factor: float) -> "Query":
        """The query + factor·released, as `query + factor * released` but without making the product first."""
        return self._with((*self._terms, (_checks.number("a factor", factor), released)), self.bound)

    def noise_multiplier(self, std: float) -> float:
        """Noise in units of sensitivity: what the accountant needs to know."""
        return std / self.bound

    def __repr__(self) -> str:
        return f"Query(bound={self.bound:g})"  # never the value


class Noise(Protocol):
    """A source of Gaussian noise, one independent draw per (step, name)."""

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with N(0, std²)."""


def release(query: Query, std: float, noise: Noise, step: int, name: str) -> Tensor:
    """query + N(0, std²·I): the only noise site of the package. The result is a fresh tensor.

    Satisfies the guarantee of a Gaussian mechanism with multiplier `query.noise_multiplier(std)`.
    """
    out = torch.empty_like(query._like, dtype=query.dtype)
    noise.normal_(out, std, step, name)
    return query.add_to(out)  # a wider value is added as it is and rounded with its noise: post-processing


class Memory(Protocol):
    """What the mechanism needs of a memory of earlier releases."""

    def read(self) -> Tensor | None:
        """The memory state, None while there is nothing to remember."""

    def write(self, release: Tensor) -> None:
        """Remember a release."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""


class GaussianMechanism:
    """The paper's mechanism alone, for people with their own loop: clipped sum in, private sum out.

    `release(s)` returns β·s + (1-β)·u + N(0, (σC)²·I), where u is the memory of earlier releases, and
    remembers what it returned. A building block: it claims nothing about ε. If s changes by at most C
    with one example and comes from a Poisson lot of rate q, a release is a Poisson-subsampled Gaussian
    event with multiplier σ/β: `event(q)`. σ = 0 is for tests only.

    `beta` and `noise_multiplier` are plain attributes: a public schedule may change them between releases.
    `generator` None draws from a fresh cryptographic stream (use this for real data); a seeded
    `torch.Generator` makes runs repeatable and is not private against whoever knows the seed.
    """

    def __init__(
        self,
        *,
        clip_norm: float,
        noise_multiplier: float,
        beta: float = 1.0,
        memory: Memory | None = None,
        generator: torch.Generator | None = None,
    ):
        self.clip_norm = _checks.clip_norm("clip_norm", clip_norm)
        self.noise_multiplier = _checks.at_least_zero("noise_multiplier", noise_multiplier)
        self.beta = _checks.fraction("beta", beta)
        if beta < 1 and memory is None:
            raise PrivacyError(f"beta={beta} mixes in a memory: pass memory=fodp.FractionalMemory(...) or beta=1")
        self.memory = memory
        self._noise: Noise = Streams.secure() if generator is None else _TorchNoise(generator)
        self._step = 0

    def release(self, clipped_sum: Tensor) -> Tensor:
        """The private sum s̃; divide it by the public lot size L for a gradient."""
        query = self.beta * Query(clipped_sum, self.clip_norm)
        u = None if self.memory is None else getattr(self.memory, "recall", self.memory.read)()
        if u is not None:
            query = query.plus(u, 1 - self.beta)
        released = release(query, self.noise_multiplier * self.clip_norm, self._noise, self._step, "noise")
        self._step += 1
        if self.memory is not None:
            self.memory.write(released)
        return released

    def event(self, sampling_rate: float) -> Event:
        """What one release costs when its lot was drawn with this Poisson rate."""
        return Event(sampling_rate, self.noise_multiplier / self.beta)

    def state_dict(self) -> dict[str, Any]:
        """Memory and step; never a key."""
        return {"step": self._step, "memory": None if self.memory is None else self.memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; secure noise gets a fresh key, so none is ever repeated."""
        self._step = int(state["step"])
        if isinstance(self._noise, Streams):
            self._noise = Streams.secure()
        if self.memory is not None and state["memory"] is not None:
            self.memory.load_state_dict(state["memory"])


class _TorchNoise:
    """PyTorch's own generator, for repeatable research runs; it draws in order, whatever the step."""

    def __init__(self, generator: torch.Generator):
        self._generator = generator

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        return out.normal_(generator=self._generator).mul_(std)
