"""Queries: private values that know their sensitivity.

A query is a value before its noise, as the paper's β·s. Scaling it scales the bound, so sensitivity, noise and
accounting cannot disagree: the noise multiplier of an accounting event is computed from the query's own bound.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fodp.errors import PrivacyError
from fodp.support import checks

Terms = tuple[tuple[float, Tensor], ...]


class LinearMap(Protocol):
    """A public linear map of a block."""

    def map_(self, part: Tensor) -> Tensor:
        """Apply it in place."""


Factor = float | LinearMap  # of a parameter's part
Blocks = Sequence[tuple[int, Factor]]


class Query:
    """A private value with a bound on what one example can change of it (ℓ2, add or remove one).

    Scaling it scales the bound; adding a tensor computed from earlier releases leaves it; adding two
    queries of one lot adds the bounds. The value is kept as a sum of terms and worked out once, at release.
    `dtype` is that of the release and its noise, where the value itself is kept in a wider one. `blocks` say how the
    value was scaled before it was bounded, by the length of each block and its factor or symmetric map; `map_back_`
    does the same to the release.
    """

    def __init__(
        self,
        value: Tensor,
        bound: float,
        lot: object = None,
        dtype: torch.dtype | None = None,
        blocks: Blocks | None = None,
    ):
        self._terms: Terms = ((1.0, value),)
        self._like = value
        self.dtype = value.dtype if dtype is None else dtype
        self.bound = checks.at_least_zero("the bound of a query", bound)
        self.lot, self.blocks = lot, blocks

    @property
    def value(self) -> Tensor:
        """The private value itself; whatever is made of it has no noise and no guarantee."""
        return self.add_to(torch.zeros_like(self._like))

    def add_to(self, out: Tensor) -> Tensor:
        """Add the value to `out` in place."""
        for factor, term in self._terms:
            out.add_(term, alpha=factor)
        return out

    @property
    def is_wider(self) -> bool:
        """Whether the value, or a part of it, is kept in another type than its release has."""
        return any(term.dtype != self.dtype for _, term in self._terms)

    @property
    def is_number(self) -> bool:
        """Whether the value is a single number, not a vector."""
        return self._like.dim() == 0

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Room for a release, not yet filled."""
        return torch.empty_like(self._like, dtype=dtype)

    def _with(self, terms: Terms, bound: float) -> "Query":
        query = Query(self._like, bound, self.lot, self.dtype, self.blocks)
        query._terms = terms
        return query

    def __mul__(self, factor: float) -> "Query":
        factor = checks.number("the factor of a query", factor)
        return self._with(tuple((factor * f, t) for f, t in self._terms), abs(factor) * self.bound)

    __rmul__ = __mul__

    def __add__(self, other: "Query | Tensor") -> "Query":
        if isinstance(other, Query):
            if other.lot is not self.lot:
                raise PrivacyError("queries of different lots cannot be added: release each lot by itself")
            if other.blocks != self.blocks:
                raise PrivacyError("queries of different scalings cannot be added: release each by itself")
            return self._with(self._terms + other._terms, self.bound + other.bound)
        if self.blocks is not None:
            raise PrivacyError("this query is scaled, and its release is scaled back: add to the release instead")
        return self._with((*self._terms, (1.0, other)), self.bound)

    __radd__ = __add__

    def map_back_(self, release: Tensor) -> Tensor:
        """The release of this query with each block scaled or mapped again, in place: post-processing."""
        if self.blocks is not None:
            for part, (_, factor) in zip(release.split([size for size, _ in self.blocks]), self.blocks, strict=True):
                if isinstance(factor, float | int):
                    part.mul_(factor)
                else:
                    factor.map_(part)
        return release

    def noise_multiplier(self, std: float) -> float:
        """Noise in units of sensitivity: what the accountant needs to know. Infinite where no example counts."""
        return std / self.bound if self.bound else math.inf

    def __repr__(self) -> str:
        return f"Query(bound={self.bound:g})"  # never the value
