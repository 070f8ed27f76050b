"""Data that is not finite is refused before anything is charged for it."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from fodp.errors import DataError
from fodp.lots.records import tensor_columns

_AT_ONCE = 2**20  # numbers; what is looked at needs memory of its own


def refuse_non_finite(dataset: Any) -> None:
    """Raise if a record of a data set made of tensors, or a `Subset` or `ConcatDataset` of such, is not finite.

    Any other data set is read when its records are drawn, and may draw itself: it is not looked at here. Whatever gets
    through, an example without a finite gradient counts as zero, and the step goes on. The refusal says that there is
    such a record and nothing else about it: not which, not how many.
    """
    finite = _finite_records(dataset)
    if finite is not None and not finite.all():
        raise DataError(
            "the data set has records that are not finite (NaN or infinite), on which nothing can be learnt: repair or "
            "drop them, torch.isfinite(tensor) finds them. If they mean something, as where a loss leaves out what is "
            "missing, say allow_non_finite=True. Nothing was released or charged"
        )


def _finite_records(dataset: Any) -> torch.Tensor | None:
    """One truth value per record, None where they cannot be had without reading records one by one."""
    if isinstance(dataset, Subset):
        inner = _finite_records(dataset.dataset)
        return None if inner is None else inner[torch.from_numpy(np.asarray(dataset.indices).astype(np.int64))]
    if isinstance(dataset, ConcatDataset):
        parts = [(_finite_records(part), len(part)) for part in dataset.datasets]  # type: ignore[arg-type]
        return torch.cat([torch.ones(size, dtype=torch.bool) if part is None else part for part, size in parts])
    columns = tensor_columns(dataset)
    if columns is None:
        return None
    finite = torch.ones(len(columns[0]), dtype=torch.bool)
    for column in columns:
        if column.is_floating_point() or column.is_complex():
            finite &= _finite_rows(column)
    return finite


def _finite_rows(column: torch.Tensor) -> torch.Tensor:
    if column.layout is not torch.strided:
        column = column.detach().to_dense()
    rows = max(1, _AT_ONCE // max(1, column[:1].numel()))
    return torch.cat([part.isfinite().flatten(1).all(1).cpu() for part in column.detach()[:, None].split(rows)])
