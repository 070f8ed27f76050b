"""Records that look otherwise in a lot than alone: what a `collate_fn` pads, and whether a model minds.

A `collate_fn` that pads to the longest record of a lot lets that record change how all others look. That is harmless
where padding has no effect, and not where a model takes a mean over all positions.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from fodp._checks import DataError
from fodp._forms import Ragged, leaves
from fodp.clipping.batches import Keyed
from fodp.clipping.engine import Engine
from fodp.draws import Source

LOTS_COMPARED = 4  # first lots whose records are collated alone too
_COMPARED = 3  # records of a lot
_TOLERANCE = 1e-3
_GRADIENT_TOLERANCE = 1e-2  # of a gradient's norm: far above rounding, far below what a padded mean does
ADVICE = (
    "pad to a fixed length that is public, or give the model a mask so that padding has no effect (a mean over a "
    "record's own positions only)"
)


class Collating(Protocol):
    """What is asked of `fodp.sampling.Fetcher`."""

    def alone(self, index: int, source: Source, record: int) -> Any:
        """The batch that one record makes by itself."""


def padded_records(
    fetcher: Collating, indices: Tensor, records: Tensor, source: Source, batch: Any
) -> list[tuple[int, int, Any]]:
    """Collate some records of a lot alone: those that have another shape there, as (row, number, batch of its own).

    Raises where what a record is in the lot differs from what it is alone in more than its padding.
    """
    whole, count = list(leaves(batch)), len(indices)
    found = []
    for row in torch.linspace(0, count - 1, min(count, _COMPARED)).long().tolist():
        alone = fetcher.alone(int(indices[row]), source, int(records[row]))
        own = list(leaves(alone))
        if len(own) != len(whole):
            raise DataError(f"collate_fn returns another form of batch for one record than for a lot: {ADVICE}")
        pairs = [pair for a, b in zip(whole, own, strict=True) for pair in _rows(a, b, row, count)]
        if not all(_alike(a, b) for a, b in pairs):
            raise DataError(
                "collate_fn makes another batch of a record alone than in its lot, so it mixes records (or normalises "
                "by the lot): let it treat every record by itself"
            )
        if any(isinstance(a, Tensor) and a.shape != b.shape for a, b in pairs):
            found.append((row, int(records[row]), alone))
    return found


def refuse_other_gradient(engine: Engine, in_lot: Keyed, alone: Keyed, copies: int) -> None:
    """Raise if the loss of a record has another gradient with the padding of its lot than alone."""
    with engine.exactly():
        here, there = (next(iter(engine.example_gradients(rows, copies=copies))) for rows in (in_lot, alone))
    if not (here.isfinite().all() and there.isfinite().all()):
        return  # it contributes nothing; the next record will tell
    allowed = _GRADIENT_TOLERANCE * (10 if engine.half_precision else 1)
    if (here - there).norm() > allowed * there.norm() + 1e-9:
        raise DataError(
            "the loss of a record depends on how far other records of its lot make collate_fn pad it: one long record "
            f"would change the gradients of all: {ADVICE}"
        )


def close(here: Tensor, alone: Tensor) -> bool:
    """Equal where both have entries."""
    common = tuple(slice(0, min(a, b)) for a, b in zip(here.shape, alone.shape, strict=True))
    here, alone = here[common].double(), alone[common].double()
    return torch.allclose(here, alone, rtol=_TOLERANCE, atol=_TOLERANCE * _size(alone), equal_nan=True)


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
        return here.dim() == alone.dim() and close(here, alone)
    return here == alone if isinstance(here, bool | int | float | str) else type(here) is type(alone)


def _size(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
