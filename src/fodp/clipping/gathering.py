"""Lots that come in parts: what was asked about each part, summed before its passes are forgotten.

Held are clipped sums and norms, never unclipped gradients: memory does not grow with the number of parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from fodp._checks import ConfigurationError
from fodp.clipping.gradients import ByNorm, Gradients, as_fractions
from fodp.clipping.maps import Factor
from fodp.queries import Query


@dataclass(frozen=True)
class Gathered(Gradients):
    """The gradients of a lot whose parts were added one after another, each clipped to `bound`.

    Answers what its parts were asked: the sum at that bound, and questions about norms.
    """

    bound: float = 0.0
    _sums: list[Query] = field(default_factory=list, repr=False)  # one, once there is a part
    _norms: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list, repr=False)

    @torch.no_grad()
    def add(self, part: Gradients) -> None:
        """Clip and sum another part, whose passes may then be forgotten."""
        query = part.clipped_sum(self.bound)
        total = query.value if not self._sums else query.add_to(self._sums[0].value)
        self._sums[:] = [Query(total, self.bound, self.lot, query.dtype, query.shape)]
        self._norms.extend(part.norms())

    def clipped_sum(self, clip_norm: float) -> Query:
        """The sum of the parts' clipped sums, if that is the clip norm that they were clipped to."""
        if clip_norm != self.bound or not self._sums:
            self._refuse()
        return self._sums[0]

    def sum(self, *, bound: float, weight: ByNorm | None = None) -> Query:
        """Refused: weights other than those of clipping were not applied to the parts."""
        self._refuse()

    def scaled(self, blocks: Sequence[float]) -> "Gathered":
        """Refused: parts were summed as they came."""
        self._refuse()

    def shaped(self, factors: Sequence[Factor]) -> "Gathered":
        """Refused: parts were summed as they came."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            f"a lot in parts is clipped to {self.bound:g} as it comes, and this method asks for another sum of it: "
            "leave microbatch out, or use fodp.Trainer"
        )

    def norm_sum(self, clip_norm: float) -> Query:
        """Σ min(‖g_i‖, C): sensitivity C."""
        sums = [norms.double().clamp(max=clip_norm).sum() for norms, _, _ in self._norms]
        return Query(self._added(sums), clip_norm, self.lot, self.engine.layout.dtype)

    def count(self, fraction: ByNorm) -> Query:
        """Σ (f_i - ½): sensitivity ½; see `Gradients.count`."""
        sums = [((as_fractions(fraction, first) - 0.5) * finite).sum() for _, first, finite in self._norms]
        return Query(self._added(sums), 0.5, self.lot, self.engine.layout.dtype)

    def _added(self, sums: list[Tensor]) -> Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.engine.layout.device)
        return torch.stack([zero, *(value.double() for value in sums)]).sum()
