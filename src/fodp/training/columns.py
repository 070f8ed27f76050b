"""Columns of whole numbers in data that is in memory: labels, words, masks; found without running the user's code."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from fodp.sampling import tensor_columns

_KINDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def whole_numbers(dataset: Any) -> list[Tensor]:
    """Columns with a row for each record, as far as they can be had at once; vectors, which may be labels, first."""
    with suppress(Exception):  # a data set of another kind than it looks like: nothing is known of it
        found = [column for column in _columns(dataset) if column.numel() and len(column) == _size(dataset)]
        return sorted(found, key=lambda column: column.dim() > 1)
    return []


def _size(dataset: Any) -> int:
    columns = tensor_columns(dataset)
    return len(dataset) if columns is None else len(columns[0])


def _columns(dataset: Any) -> list[Tensor]:
    return [column for column in _any_columns(dataset) if column.dtype in _KINDS]


def _any_columns(dataset: Any) -> list[Tensor]:
    columns = tensor_columns(dataset)
    if columns is not None:
        return list(columns)
    if isinstance(dataset, Subset):
        chosen = torch.as_tensor(np.asarray(dataset.indices).astype(np.int64))
        return [column[chosen.to(column.device)] for column in _columns(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        parts = [_columns(part) for part in dataset.datasets]
        if len({tuple((c.dtype, c.shape[1:]) for c in part) for part in parts}) > 1:
            return []
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]
    if type(dataset) in (list, tuple):
        return _of_records(dataset)
    if isinstance(getattr(dataset, "column_names", None), list) and hasattr(dataset, "with_format"):
        return _of_hugging_face(dataset)
    targets = getattr(dataset, "targets", None)  # as torchvision's data sets have them
    return [] if targets is None else [torch.as_tensor(targets)]


def _of_records(records: Any) -> list[Tensor]:
    """Of a list of records: each part that is a whole number in all of them."""
    first = records[0]
    if isinstance(first, Mapping):
        names: list[Any] = list(first)
    elif isinstance(first, list | tuple):
        names = list(range(len(first)))
    else:
        return []
    wanted = [name for name in names if _is_whole(first[name])]
    return [torch.tensor([int(record[name]) for record in records]) for name in wanted]


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.ndim == 0 and torch.as_tensor(value).dtype in _KINDS
    return isinstance(value, int) and not isinstance(value, bool)


def _of_hugging_face(dataset: Any) -> list[Tensor]:
    """Of `datasets.Dataset`: the columns of whole numbers; lists of them are not read."""
    plain = dataset.with_format("numpy")
    found = []
    for name, feature in dataset.features.items():
        if str(getattr(feature, "dtype", "")).startswith(("int", "uint")) and not isinstance(feature, list):
            found.append(torch.as_tensor(np.asarray(plain[name])))
    return found
