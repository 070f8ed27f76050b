"""Factors from earlier releases: how much of each block is signal, beyond the noise that is known to be in it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fodp.clipping import maps
from fodp.clipping.layers.uses import square_sums
from fodp.clipping.maps import Factor, Side
from fodp.options.kronecker import SameOnAllRanks
from fodp.options.scaling import Transcript
from fodp.queries import Query


class TranscriptScaling:
    """Factors that give every block its share of a gradient, from what earlier releases say of the blocks' energies.

    A release y of a query with bound C has ‖y_l‖² = ‖signal_l‖² + D_l·σ²C² on the average, and σ²C² is known. Divided
    by C² and by the squared factor of its step, the difference estimates the energy of block l; a geometric memory of
    about `shape_memory` steps averages it. What lies within two standard deviations of nothing counts as those two.
    Until `shape_warmup` releases were seen the factors are those of fan-in, and their geometric mean stays that of
    fan-in.
    """

    def __init__(self, shape: Transcript, shapes: Sequence[tuple[int, ...]], same: SameOnAllRanks):
        self._shape, self._shapes, self._same = shape, [tuple(s) for s in shapes], same
        self._plain = shape.weights(self._shapes)
        # Rows of matrices are blocks of their own if that is asked for.
        self._rows = [s[0] if shape.shape_blocks == "row" and len(s) > 1 else 1 for s in self._shapes]
        sizes = [math.prod(s) // rows for s, rows in zip(self._shapes, self._rows, strict=True)]
        self._sizes = torch.cat([torch.full((r,), float(n)) for n, r in zip(sizes, self._rows, strict=True)]).double()
        self._energy = torch.zeros_like(self._sizes)
        self._variance = torch.zeros_like(self._sizes)
        self._weight, self._seen, self._at = 0.0, 0, -1
        self._current = self._fan_in()

    @property
    def current(self) -> tuple[Factor, ...]:
        """The factors of this step."""
        found: list[Factor] = []
        for part, rows, shape in zip(self._current.split(self._rows), self._rows, self._shapes, strict=True):
            found.append(maps.Kronecker(shape, Side(part), None) if rows > 1 else float(part[0]))
        return tuple(found)

    def _fan_in(self) -> Tensor:
        """The factors to begin with, one for each block."""
        pairs = zip(self._plain, self._rows, strict=True)
        return torch.cat([torch.full((rows,), b, dtype=torch.float64) for b, rows in pairs])

    def factors(self, step: int) -> tuple[Factor, ...]:
        """From what was released before this step."""
        if step != self._at:
            self._at = step
            self._current = self._estimated()
        return self.current

    def _estimated(self) -> Tensor:
        fan_in, shape = self._fan_in(), self._shape
        if self._seen < shape.shape_warmup:
            return fan_in
        noise = self._variance.sqrt() / self._weight
        energy = torch.maximum(self._energy / self._weight, 2 * noise).clamp(min=1e-30)
        wanted = (self._sizes**shape.shape_share / energy).sqrt()
        scale = (fan_in.log().mean() - wanted.log().mean()).exp()
        return (wanted * scale).clamp(shape.shape_floor, shape.shape_ceiling)

    def see(self, query: Query, release: Tensor, std: float) -> None:
        """Remember the energies of a release beyond its noise."""
        if not query.bound or release.numel() != int((self._sizes).sum()):
            return
        parts = release.split([math.prod(shape) for shape in self._shapes])
        squares = [square_sums(p.view(rows, -1)) for p, rows in zip(parts, self._rows, strict=True)]
        variance, bound = query.noise_multiplier(std) ** 2, query.bound
        # The first rank's sums, for all: another processor rounds otherwise, and ranks must not drift apart.
        energies = self._same(lambda: torch.cat(squares).cpu(), lambda: torch.empty_like(self._sizes))
        found = energies / bound**2 - self._sizes * variance
        spread = 2 * self._sizes * variance**2
        keep = 1 - 1 / self._shape.shape_memory
        self._energy = keep * self._energy + found / self._current**2
        self._variance = keep**2 * self._variance + spread / self._current**4
        self._weight = keep * self._weight + 1
        self._seen += 1

    def state_dict(self) -> dict[str, Any] | None:
        """Made of releases and public numbers."""
        return {
            "energy": self._energy,
            "variance": self._variance,
            "weight": self._weight,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Take over what was remembered; the next step's factors follow from it."""
        assert state is not None
        self._energy, self._variance = state["energy"].clone(), state["variance"].clone()
        self._weight, self._seen, self._at = float(state["weight"]), int(state["seen"]), -1
