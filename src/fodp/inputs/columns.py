"""Columns of whole numbers in data that is in memory: labels, words, masks; found without running the user's code."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from fodp.lots.records import tensor_columns

_LEAST = -(2**62)  # stands for what is missing
_MOST = 2**25  # numbers in lists that are looked at
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
    return [torch.tensor([_whole(_part(record, name)) for record in records]) for name in wanted]


def _part(record: Any, name: Any) -> Any:
    try:
        return record[name]
    except (TypeError, LookupError):  # a record that is not like the first
        return None


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.ndim == 0 and torch.as_tensor(value).dtype in _KINDS
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: Any) -> int:
    """What is no whole number counts as less than all: it is the first to be tried."""
    return int(value) if _is_whole(value) else _LEAST


def _of_hugging_face(dataset: Any) -> list[Tensor]:
    """Of `datasets.Dataset`: columns of whole numbers; of a column of lists each row's smallest, and its largest."""
    plain: Any = dataset.with_format("arrow")[:]  # memory-mapped, in the order of the data set
    found: list[Tensor] = []
    of_lists: list[Tensor] = []
    for name in dataset.column_names:
        cells = plain[name]
        kind = str(cells.type)
        if kind.startswith(("int", "uint")):
            found.append(_filled(cells))
        elif kind.startswith(("list<", "large_list<")) and kind.partition(": ")[2].startswith(("int", "uint")):
            of_lists += _of_lists(cells)
    return [*found, *of_lists]  # labels are more often numbers than lists


def _of_lists(cells: Any) -> list[Tensor]:
    from pyarrow import compute  # type: ignore[import-not-found]  # `datasets` brings it

    values, rows = (function(cells) for function in (compute.list_flatten, compute.list_parent_indices))
    if not 0 < len(values) <= _MOST:
        return []
    numbers, of_row = _filled(values), torch.tensor(rows.to_numpy())
    least = torch.zeros(len(cells), dtype=torch.int64).scatter_reduce(0, of_row, numbers, "amin")
    return [least, torch.zeros_like(least).scatter_reduce(0, of_row, numbers, "amax")]


def _filled(cells: Any) -> Tensor:
    return torch.tensor(cells.cast("int64").fill_null(_LEAST).to_numpy())
