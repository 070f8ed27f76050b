"""Batches: whatever loss_fn understands, tensors or nested tuples, lists and dicts of them, examples first."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fodp.draws import Source
from fodp.errors import DataError
from fodp.support.forms import Ragged, leaves, mapped, rebuilt

Batch = Any


@dataclass(frozen=True)
class Parts:
    """A large batch that is fetched as it is worked on, best `at_once` rows at a time."""

    size: int
    at_once: int
    fetch: Callable[[slice | Tensor], Batch]


@dataclass(frozen=True)
class Keyed:
    """A batch that knows whose its rows are: what a pass draws for a row depends on its number and the source alone.

    With `owners`, rows that lie side by side under one number are one person's, and are clipped as one.
    """

    rows: Batch
    records: Tensor  # a number for each row, on the CPU
    source: Source
    owners: Tensor | None = None  # a number for each row, on the CPU
    summed: bool = False  # an owner's gradient is the sum of its records', else their mean


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
    sizes = {len(leaf) if isinstance(leaf, Ragged) or leaf.dim() else None for leaf in _columns(batch)}
    if len(sizes) != 1 or None in sizes:
        raise DataError("a batch is tensors (or a tuple, list or dict of them) with examples in the first dimension")
    return int(sizes.pop() or 0)


def take(batch: Batch, rows: slice | Tensor) -> Batch:
    """Some rows of a batch, a slice as views."""
    if isinstance(batch, Keyed):
        owners = None if batch.owners is None else batch.owners[rows]
        return Keyed(take(batch.rows, rows), batch.records[rows], batch.source, owners, batch.summed)
    if isinstance(batch, Parts):
        return batch.fetch(rows)
    return _each(batch, lambda tensor: tensor[_near(rows, tensor)], lambda items: _chosen(items, rows))


def _near(rows: slice | Tensor, tensor: Tensor) -> slice | Tensor:
    """Places of rows, on the device where the rows are."""
    return rows.to(tensor.device, non_blocking=True) if isinstance(rows, Tensor) else rows


def sizes_of(batch: Batch) -> Tensor | None:
    """How many rows each owner has, in the order of the rows; None where every row is an example."""
    if not isinstance(batch, Keyed) or batch.owners is None:
        return None
    return batch.owners.unique_consecutive(return_counts=True)[1]


def examples_in(batch: Batch) -> int:
    """How many examples, or owners, a batch has."""
    sizes = sizes_of(batch)
    return batch_size(batch) if sizes is None else len(sizes)


def take_examples(batch: Batch, examples: Tensor) -> Batch:
    """The rows of some examples, or owners, in this order."""
    return take(batch, rows_of(batch, examples))


def rows_of(batch: Batch, examples: Tensor) -> Tensor:
    """Which rows some examples, or owners, have, in this order."""
    sizes = sizes_of(batch)
    if sizes is None:
        return examples
    stops = sizes.cumsum(0)
    spans = [torch.arange(int(stops[i] - sizes[i]), int(stops[i])) for i in examples.tolist()]
    return torch.cat([examples[:0], *spans])


def rows_at_once(batch: Batch) -> int:
    """How many rows to take at a time: all, of a batch that is there."""
    rows = plain(batch)
    return rows.at_once if isinstance(rows, Parts) else batch_size(batch)


def repeat(batch: Batch, copies: int) -> Batch:
    """Every row `copies` times, side by side."""
    if copies == 1:
        return batch
    return _each(
        batch,
        lambda tensor: tensor.repeat_interleave(copies, 0),
        lambda items: type(items)(item for item in items for _ in range(copies)),
    )


def doubled(batch: Batch) -> Batch:
    """The same in float64; what is not a float stays."""
    if isinstance(batch, Keyed):
        return replace(batch, rows=doubled(batch.rows))
    return _each(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches of one form, one after another."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return rebuilt(first, [(name, joined([batch[name] for batch in batches])) for name in first])
    if isinstance(first, Ragged):
        return type(first)(item for batch in batches for item in batch)
    if isinstance(first, list | tuple):
        return rebuilt(first, [joined(parts) for parts in zip(*batches, strict=True)])
    return first


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in order."""
    return list(_batch_tensors(plain(batch)))


def _each(
    batch: Batch, change: Callable[[Tensor], Tensor], of_ragged: Callable[[Ragged], Ragged] | None = None
) -> Batch:
    """A batch of the same form, of the changed tensors; constants stay as they are."""
    return mapped(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, of_ragged)


def _chosen(items: Ragged, rows: slice | Tensor) -> Ragged:
    places = range(len(items))[rows] if isinstance(rows, slice) else torch.arange(len(items))[rows].tolist()
    return type(items)(items[i] for i in places)


def _columns(batch: Batch) -> Iterator[Tensor | Ragged]:
    """What has a row or an item for each example.

    Numbers and texts by name are constants. In a list they may be one for each example, which only a list that is known
    to be such (`fodp.support.forms.Ragged`) may hold: rows of others could not be taken.
    """
    if isinstance(batch, Tensor | Ragged):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            if not isinstance(part, bool | int | float | str):
                yield from _columns(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _columns(part)
    elif batch is not None:
        raise DataError(f"a batch holds tensors, tuples, lists and dicts, not {type(batch).__name__}")


def _batch_tensors(batch: Batch) -> Iterator[Tensor]:
    for column in _columns(batch):
        if isinstance(column, Tensor):
            yield column
        else:
            yield from (leaf for leaf in leaves(list(column)) if isinstance(leaf, Tensor))
