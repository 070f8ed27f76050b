"""Records that look otherwise in a lot than alone: what a `collate_fn`, or a data set that reads many records at once,
pads, and whether a model minds.

What pads to the longest record of a lot lets that record change how all others look. That is harmless where padding
has no effect, and not where a model takes a mean over all positions.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from fodp.clipping import self_check
from fodp.clipping.batches import Batch, Keyed, doubled
from fodp.clipping.engine import Engine
from fodp.draws import Source
from fodp.errors import DataError
from fodp.support.forms import Ragged, leaves

LOTS_COMPARED = 4  # first lots whose records are collated alone too
_READ_ALONE = 16  # records of a lot
_TOLERANCE = 1e-5  # of what a record holds: collating alone and in a lot rounds alike, or nearly so
ADVICE = (
    "pad to a fixed length that is public, or give the model a mask so that padding has no effect (a mean over a "
    "record's own positions only)"
)


class Collating(Protocol):
    """What is asked of `fodp.lots.reading.Fetcher`."""

    batched_by: str | None

    def alone(self, index: int, source: Source, record: int) -> Any:
        """The batch that one record makes by itself."""


class Widths:
    """The largest shapes of the lots so far. A lot that is wider than all before it pads as none before it did."""

    def __init__(self) -> None:
        self._largest: list[tuple[int, ...]] = []

    def grow(self, batch: Any) -> bool:
        """Take the shapes of a batch in; whether one is larger than ever."""
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves(batch) if isinstance(leaf, Tensor)]
        known = self._largest if list(map(len, self._largest)) == list(map(len, shapes)) else [()] * len(shapes)
        self._largest = [tuple(map(max, old, new)) if old else new for old, new in zip(known, shapes, strict=True)]
        return self._largest != known


def padded_records(
    fetcher: Collating, indices: Tensor, records: Tensor, source: Source, batch: Any
) -> list[tuple[int, int, Any]]:
    """Collate records of a lot alone: of those that have another shape there the first, the last, the shortest and the
    longest, as (row, number, batch of its own).

    Raises where what a record is in the lot differs from what it is alone in more than its padding.
    """
    whole, count = list(leaves(batch)), len(indices)
    found = []
    for row in torch.linspace(0, count - 1, min(count, _READ_ALONE)).long().tolist():
        alone = fetcher.alone(int(indices[row]), source, int(records[row]))
        own = list(leaves(alone))
        if len(own) != len(whole):
            raise DataError(
                f"{fetcher.batched_by} returns another form of batch for one record than for a lot: {ADVICE}"
            )
        pairs = [pair for a, b in zip(whole, own, strict=True) for pair in _rows(a, b, row, count)]
        if not all(_alike(a, b) for a, b in pairs):
            raise DataError(
                f"{fetcher.batched_by} makes another batch of a record alone than in its lot, so it mixes records (or "
                "normalises by the lot, or sorts it): let it treat every record by itself, and keep their order"
            )
        if any(isinstance(a, Tensor) and a.shape != b.shape for a, b in pairs):
            found.append((row, int(records[row]), alone))
    if not found:
        return []
    sizes = [sum(leaf.numel() for leaf in leaves(alone) if isinstance(leaf, Tensor)) for _, _, alone in found]
    return [found[i] for i in sorted({0, len(found) - 1, sizes.index(min(sizes)), sizes.index(max(sizes))})]


def refuse_other_gradient(
    engine: Engine, in_lot: Keyed, alone: Keyed, copies: int, batched_by: str | None = "collate_fn"
) -> None:
    """Raise if the loss of a record has another gradient with the padding of its lot than alone."""

    def apart(in_lot: Batch, alone: Batch) -> float:
        return moved(*(next(iter(engine.example_gradients(rows, copies=copies))) for rows in (in_lot, alone)))

    with engine.exactly():
        found = apart(in_lot, alone)
        if not self_check.is_rounding(engine, found, lambda: apart(doubled(in_lot), doubled(alone))):
            raise DataError(
                f"the loss of a record depends on how far other records of its lot make {batched_by} pad it: one long "
                f"record would change the gradients of all: {ADVICE}"
            )


def moved(here: Tensor, alone: Tensor) -> float:
    """How far apart two versions of a record's numbers are, relative to the larger one; of their common part, where
    one is longer."""
    common = tuple(slice(0, min(a, b)) for a, b in zip(here.shape, alone.shape, strict=True))
    here, alone = here[common].detach().double(), alone[common].detach().double()
    if bool(here.isfinite().all()) != bool(alone.isfinite().all()):
        return float("inf")  # one would count, and the other not
    largest = max(float(here.norm()), float(alone.norm()))
    return float((here - alone).norm()) / largest if 0 < largest < float("inf") else 0.0


def _rows(in_lot: Any, alone: Any, row: int, count: int) -> list[tuple[Any, Any]]:
    """What a leaf holds of one record, in the lot and alone, as far as they can be compared."""
    if isinstance(in_lot, Ragged) and isinstance(alone, Ragged):
        pair = list(leaves(in_lot[row])), list(leaves(alone[0]))
        return list(zip(*pair, strict=True)) if len(pair[0]) == len(pair[1]) else [(0, 1)]
    if isinstance(in_lot, Tensor) and isinstance(alone, Tensor):
        if (in_lot.shape[:1], alone.shape[:1]) != ((count,), (1,)):
            return []
        return [(in_lot[row], alone[0])] if in_lot.dim() == alone.dim() else [(0, 1)]
    return [(in_lot, alone)]


def _alike(here: Any, alone: Any) -> bool:
    if isinstance(here, Tensor) and isinstance(alone, Tensor):
        return here.dim() == alone.dim() and _close(here, alone)
    return here == alone if isinstance(here, bool | int | float | str) else type(here) is type(alone)


def _close(here: Tensor, alone: Tensor) -> bool:
    """Equal where both have entries, but for rounding."""
    common = tuple(slice(0, min(a, b)) for a, b in zip(here.shape, alone.shape, strict=True))
    allowed = _TOLERANCE if torch.finfo(here.dtype if here.is_floating_point() else torch.float32).bits > 16 else 1e-2
    here, alone = here[common].double(), alone[common].double()
    return torch.allclose(here, alone, rtol=allowed, atol=allowed * _size(alone), equal_nan=True)


def _size(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
