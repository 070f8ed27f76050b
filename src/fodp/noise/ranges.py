"""Ranges of a vector, for processes that each hold some of it and draw the noise of those alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fodp._checks import PrivacyError

if TYPE_CHECKING:
    from fodp.noise.streams import Streams


@dataclass(frozen=True)
class Ranges:
    """Parts of a vector of `size` entries, side by side: each from its first entry to before its last, in order."""

    size: int
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        edges = [0, *(edge for span in self.spans for edge in span), self.size]
        if edges != sorted(edges):
            raise PrivacyError(f"ranges of a vector of {self.size} entries lie in it, in order, apart: {self.spans}")

    @property
    def count(self) -> int:
        """How many entries all of them have."""
        return sum(end - begin for begin, end in self.spans)


class RangedStreams:
    """A source of noise for whoever holds some ranges of a vector: for those of the draw, and whole for a number."""

    def __init__(self, streams: "Streams", ranges: Ranges):
        self._streams, self._ranges = streams, ranges

    def normal_(self, out: Tensor, std: float, step: int, name: str) -> Tensor:
        """Fill `out` with N(0, std²)."""
        if out.dim() == 0:
            return self._streams.normal_(out, std, step, name)
        return self._streams.normal_ranges_(out, std, step, name, self._ranges)
