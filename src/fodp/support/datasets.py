"""What people give for a data set that is none, and what to give instead."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fodp.errors import DataError

_COLUMNS = 8  # a list of more arrays is a list of records


def refuse_foreign(dataset: Any) -> None:
    """Raise for a table, columns that are no tensors, or the name of a file: their items are not records."""
    kind = type(dataset).__name__
    if isinstance(dataset, str | bytes) or hasattr(dataset, "__fspath__"):
        raise DataError(
            "the data set is a text, and records are needed: read the file first, fodp.data.from_table(path, schema, "
            "target) for a table, fodp.data.load(name) for a data set of fodp's"
        )
    if _is_frame(dataset):
        raise DataError(
            f"a {kind} has columns for items and no records 0 to len-1: take fodp.data.from_table(table, schema, "
            "target).train, or TensorDataset(torch.tensor(X.values, dtype=torch.float32), torch.tensor(y.values))"
        )
    if isinstance(dataset, Mapping):
        parts = [str(name) for name in list(dataset)[:2]]
        raise DataError(
            f"a {kind} is not a map-style data set: if it holds parts, take one (dataset['train']); if it holds "
            f"columns, TensorDataset({', '.join(f'd[{part!r}]' for part in parts)}), the columns as tensors"
        )
    if isinstance(dataset, list | tuple) and _are_columns(dataset):
        raise DataError(
            f"a {kind} of {len(dataset)} columns would be {len(dataset)} records: give TensorDataset(X, y), with the "
            "columns as tensors (torch.as_tensor(X)) and a row of each for every record"
        )


def _is_frame(value: Any) -> bool:
    return hasattr(value, "iloc") and hasattr(value, "to_numpy")  # of pandas and what looks like it


def _are_columns(items: Any) -> bool:
    """Whether these are the columns of many records, and not a few records."""
    if not 2 <= len(items) <= _COLUMNS:
        return False
    if isinstance(items, tuple) and all(isinstance(item, torch.Tensor) for item in items):
        return False  # which is taken as it is
    if any(map(_is_frame, items)):
        return True
    if not all(isinstance(item, torch.Tensor | np.ndarray) and item.ndim for item in items):
        return False
    shapes = [tuple(item.shape) for item in items]
    # Records would have one number of dimensions.
    return len({len(shape) for shape in shapes}) > 1 and max(shape[0] for shape in shapes) > len(items)
