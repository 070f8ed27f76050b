"""Batches: whatever loss_fn understands, a tensor or a tuple, list or dict of them, examples first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fodp._checks import PrivacyError
from fodp.draws import Source

Batch = Any


@dataclass(frozen=True)
class Parts:
    """A large batch that is fetched as it is worked on, best `at_once` rows at a time."""

    size: int
    at_once: int
    fetch: Callable[[slice | Tensor], Batch]


@dataclass(frozen=True)
class Keyed:
    """A batch that knows whose its rows are: what a pass draws for a row depends on its number and the source alone."""

    rows: Batch
    records: Tensor  # a number for each row, on the CPU
    source: Source


def plain(batch: Batch) -> Batch:
    """The batch as the user's code takes it."""
    return batch.rows if isinstance(batch, Keyed) else batch


def batch_size(batch: Batch) -> int:
    """How many rows a batch has: the common first dimension of its tensors."""
    if isinstance(batch, Keyed):
        return len(batch.records)
    if isinstance(batch, Parts):
        return batch.size
    if type(batch) is tuple and all(type(part) is Tensor and part.dim() for part in batch):
        usual = {part.shape[0] for part in batch}  # without the recursion
        if len(usual) == 1:
            return usual.pop()
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in _batch_tensors(batch)}
    if len(sizes) != 1 or None in sizes:
        raise PrivacyError("a batch is tensors (or a tuple, list or dict of them) with examples in the first dimension")
    return int(sizes.pop() or 0)


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """Some rows of a batch, a slice as views."""
    if isinstance(batch, Keyed):
        return Keyed(take(batch.rows, rows), batch.records[rows], batch.source)
    if isinstance(batch, Parts):
        return batch.fetch(rows)
    return _each(batch, lambda tensor: tensor[rows])


def rows_at_once(batch: Batch) -> int:
    """How many rows to take at a time: all, of a batch that is there."""
    rows = plain(batch)
    return rows.at_once if isinstance(rows, Parts) else batch_size(batch)


def repeat(batch: Batch, copies: int) -> Batch:
    """Every row `copies` times, side by side."""
    return batch if copies == 1 else _each(batch, lambda tensor: tensor.repeat_interleave(copies, 0))


def doubled(batch: Batch) -> Batch:
    """The same in float64; what is not a float stays."""
    if isinstance(batch, Keyed):
        return Keyed(doubled(batch.rows), batch.records, batch.source)
    return _each(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one form, one after another."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    return type(first)([joined(parts) for parts in zip(*batches, strict=True)])


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return list(_batch_tensors(plain(batch)))


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch of the same form, of the changed tensors."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {name: _each(part, change) for name, part in batch.items()}
    return type(batch)([_each(part, change) for part in batch])


def _batch_tensors(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for part in batch.values():
            yield from _batch_tensors(part)
    elif type(batch) in (tuple, list):
        for part in batch:
            yield from _batch_tensors(part)
    else:
        raise PrivacyError(f"a batch holds tensors, tuples, lists and dicts, not {type(batch).__name__}")
