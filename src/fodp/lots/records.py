"""How many records a data set has, and how they are reached: by columns, or one by one."""

import math
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
)

from fodp.errors import ConfigurationError, DataError
from fodp.identity.repeats import refuse_repeated
from fodp.support.datasets import refuse_foreign


def record_count(dataset: Any, owners: Any = None) -> int:
    """How many records a map-style data set has; refuses what cannot be sampled record by record.

    A tuple of tensors counts as columns: record i is row i of each. Data that holds a record twice is refused
    (`fodp.identity.repeats`), unless `owners` say that both places are one person's.
    """
    count = size_of(dataset)
    refuse_repeated(dataset, owners)
    return count


def size_of(dataset: Any) -> int:
    """The same, without a look for repeats."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "a DataLoader draws batches of its own, which are not the Poisson lots that the plan accounts for: pass "
            "its data set, loader.dataset (and collate_fn=loader.collate_fn, if it has one of its own)"
        )
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{kind} is an iterable data set, which cannot be Poisson sampled; load its records into a "
            "map-style Dataset (__len__ and __getitem__), for example a TensorDataset or list(dataset)"
        )
    refuse_foreign(dataset)
    columns = tensor_columns(dataset)
    if columns is not None:
        count = _common_length(columns)
    elif not all(hasattr(dataset, m) for m in ("__len__", "__getitem__")):
        raise DataError(
            f"{kind} is not a map-style data set: it needs __len__, and __getitem__ for records 0 to len-1; "
            "wrap it in a torch.utils.data.Dataset or TensorDataset"
        )
    else:
        count = len(dataset)
    if count == 0:
        raise DataError("the data set has no records; private training needs at least one")
    return count


def _common_length(columns: tuple[torch.Tensor, ...]) -> int:
    lengths = {column.shape[:1] for column in columns}
    if len(lengths) != 1 or lengths == {()}:
        raise DataError(
            "the tensors of a data set must share their leading dimension, the records: give each a row for every "
            "record"
        )
    return lengths.pop()[0]


def rows_of(columns: tuple[torch.Tensor, ...], entries: int) -> int:
    """How many records have so many entries."""
    return max(1, entries // max(1, sum(math.prod(column.shape[1:]) for column in columns)))


def tensor_columns(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The columns of a data set that is made of tensors, else None."""
    if isinstance(dataset, TensorDataset):
        # a subclass may change records on the way out, so only the class itself is taken apart
        return dataset.tensors if type(dataset) is TensorDataset else None
    is_columns = isinstance(dataset, tuple) and dataset and all(isinstance(c, torch.Tensor) for c in dataset)
    return dataset if is_columns else None


def records_in(dataset: Any) -> Any:
    """The data set as something whose item i is record i."""
    size_of(dataset)
    return TensorDataset(*dataset) if isinstance(dataset, tuple) and tensor_columns(dataset) else dataset
