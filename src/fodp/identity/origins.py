"""Which record is which: numbers for the places of a data set, the same only for one and the same record.

Nothing is read here. Views are followed (`Subset`, `ConcatDataset`, whatever has `dataset` and `indices`), tables of
Hugging Face's `datasets` and their `_indices`, and wrappers that hold as many records as they give. Rows of tensors and
arrays are known by where they lie in memory, items of lists by what they hold.
"""

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fodp.errors import DataError
from fodp.support import checks

Numbers = npt.NDArray[np.int64]

# Attributes in which wrappers hold their data, with or without a leading underscore.
HELD = (
    *("dataset", "datasets", "base", "base_dataset", "data", "inner", "wrapped", "source"),
    *("samples", "records", "rows", "examples", "items"),
)
_DEEPEST = 8  # wrappers within each other
_VALUES = (int, float, complex, str, bytes, type(None), np.generic, Enum)
_ROWS_OF_A_TABLE = 2**40


def origins(dataset: Any, *, memory: bool = True) -> Numbers:
    """A number for each record of a data set; without `memory` the numbers are the same in all processes."""
    return Origins(memory=memory).of(dataset)


def held_by(dataset: Any) -> list[Any]:
    """What a wrapper holds its data in, as far as the name of the attribute tells."""
    inside = getattr(dataset, "__dict__", {})
    return [inside[name] for name in (f"{line}{held}" for held in HELD for line in ("", "_")) if name in inside]


class Origins:
    """Numbers of records, comparable among all data sets that one of these was asked about."""

    def __init__(self, *, memory: bool = True) -> None:
        # Rows in memory have their address, which is positive; all else is counted, downwards from -1.
        self._memory = memory
        self._begins: dict[Hashable, int] = {}
        self._counted = 0
        self._kept: list[Any] = []  # an object that is alive keeps its id

    def of(self, dataset: Any, depth: int = 0) -> Numbers:
        """A number for each record."""
        if depth < _DEEPEST:
            found = self._of_view(dataset, depth)
            if found is not None:
                return found
        self._kept.append(dataset)
        return self._block(("object", id(dataset)), _length(dataset))

    def _of_view(self, dataset: Any, depth: int) -> Numbers | None:
        """The numbers of what a data set shows; None: it is a source of its own."""
        derived = isinstance(dataset, TensorDataset) and _length(dataset) == len(dataset.tensors[0])
        rows = widest(columns_of(dataset.tensors if derived else dataset))
        if rows is not None:
            return self._of_memory(rows) if self._memory else None
        if _is_table(dataset):
            return self._of_table(dataset)
        if isinstance(dataset, list | tuple):
            return self._of_items(dataset)
        indices, parts = getattr(dataset, "indices", None), getattr(dataset, "datasets", None)
        if isinstance(dataset, Subset) or (_has_length(indices, dataset) and hasattr(dataset, "dataset")):
            return _taken(self.of(dataset.dataset, depth + 1), indices)
        if isinstance(dataset, ConcatDataset) or _add_up(parts, dataset):
            return np.concatenate([self.of(part, depth + 1) for part in parts])  # type: ignore[union-attr]
        held = [*held_by(dataset), *(v for v in getattr(dataset, "__dict__", {}).values() if isinstance(v, Dataset))]
        inner = next((each for each in held if _has_length(each, dataset) and _is_data(each)), None)
        return None if inner is None else self.of(inner, depth + 1)

    def _of_memory(self, rows: torch.Tensor | npt.NDArray[Any]) -> Numbers | None:
        found = address(rows)
        if found is None or not found[1][0]:  # of rows that are one row in memory, each counts for itself
            return None
        return found[0] + np.arange(len(rows), dtype=np.int64) * found[1][0]

    def _of_table(self, table: Any) -> Numbers:
        column = max(table.data.columns, key=lambda column: column.nbytes, default=None)
        chunks = [] if column is None else column.chunks
        found = [self._of_chunk(chunk) for chunk in chunks if len(chunk)] or [np.empty(0, np.int64)]
        numbers = np.concatenate(found)
        chosen = table._indices
        return numbers if chosen is None else _taken(numbers, chosen.column(0).to_numpy())

    def _of_chunk(self, chunk: Any) -> Numbers:
        self._kept.append(chunk)
        buffer = next((buffer.address for buffer in chunk.buffers() if buffer is not None), id(chunk))
        begin = self._begin(("table", buffer), _ROWS_OF_A_TABLE)
        return -1 - (begin + chunk.offset + np.arange(len(chunk), dtype=np.int64))

    def _of_items(self, items: Sequence[Any]) -> Numbers:
        self._kept.append(items)
        alone = self._block(("object", id(items)), len(items))
        keys = (_identity(item) for item in items)
        return np.fromiter(
            (here if key is None else -1 - self._begin(key, 1) for key, here in zip(keys, alone.tolist(), strict=True)),
            np.int64,
            len(items),
        )

    def _block(self, key: Hashable, size: int) -> Numbers:
        return -1 - (self._begin(key, size) + np.arange(size, dtype=np.int64))

    def _begin(self, key: Hashable, size: int) -> int:
        if key not in self._begins:
            self._begins[key] = self._counted
            self._counted += size
        return self._begins[key]


def columns_of(data: Any) -> tuple[torch.Tensor | npt.NDArray[Any], ...]:
    """The columns of data in tensors or arrays, one, several or by name; () if it is anything else."""
    if isinstance(data, torch.Tensor | np.ndarray):
        data = (data,)
    elif type(data) is TensorDataset:  # what is derived from it may show other records, or one of them again
        data = data.tensors
    columns = tuple(data.values()) if isinstance(data, Mapping) else data if isinstance(data, tuple) else ()
    fits = all(isinstance(column, torch.Tensor | np.ndarray) and column.ndim for column in columns)
    return columns if fits and len({len(column) for column in columns}) == 1 else ()


def widest(columns: Sequence[Any]) -> Any:
    """The column with the largest rows; None of none."""
    return max(columns, key=lambda column: np.prod(column.shape[1:]), default=None)


def address(array: torch.Tensor | npt.NDArray[Any]) -> tuple[int, tuple[int, ...]] | None:
    """Where an array begins in memory, and its strides in bytes; None where that says nothing."""
    if isinstance(array, torch.Tensor):
        if array.layout is not torch.strided or array.device.type not in ("cpu", "cuda") or not array.numel():
            return None
        return array.data_ptr(), tuple(stride * array.element_size() for stride in array.stride())
    return (array.__array_interface__["data"][0], array.strides) if array.size else None


def _identity(item: Any) -> Hashable | None:
    """What a record in a list is known by; None where it holds values alone, which say nothing of whose they are."""
    key = _key(item)
    return key if _holds_objects(item) else None


def _key(item: Any) -> Hashable:
    if isinstance(item, _VALUES):
        return type(item), item
    if isinstance(item, list | tuple):
        return tuple(map(_key, item))
    if isinstance(item, Mapping):
        return tuple((name, _key(value)) for name, value in item.items())
    place = address(item) if isinstance(item, torch.Tensor | np.ndarray) else None
    return ("object", id(item)) if place is None else (*place, tuple(item.shape), str(item.dtype))


def _holds_objects(item: Any) -> bool:
    if isinstance(item, list | tuple):
        return any(map(_holds_objects, item))
    if isinstance(item, Mapping):
        return any(map(_holds_objects, item.values()))
    return not isinstance(item, _VALUES) and getattr(item, "shape", None) != ()  # a label is shared by many


def _taken(inner: Numbers, chosen: Any) -> Numbers:
    chosen = np.asarray(chosen)
    if chosen.size and chosen.dtype.kind not in "iub":
        raise DataError(f"the indices of a Subset must be whole numbers, got {checks.shown(chosen.flat[0])}")
    try:
        return inner[chosen.astype(np.int64).reshape(-1)]  # a negative index counts from the end, as in data sets
    except IndexError as error:
        raise DataError(f"a Subset names a record that its data set does not have ({error})") from None


def _is_table(dataset: Any) -> bool:
    """Whether this is a data set of Hugging Face's `datasets`."""
    names = ("data", "_data", "_indices", "_fingerprint")
    return all(hasattr(dataset, name) for name in names) and hasattr(dataset.data, "columns")


def _is_data(held: Any) -> bool:
    return not isinstance(held, str | bytes | Mapping) and hasattr(held, "__getitem__")


def _has_length(held: Any, dataset: Any) -> bool:
    return hasattr(held, "__len__") and hasattr(dataset, "__len__") and _length(held) == _length(dataset)


def _add_up(parts: Any, dataset: Any) -> bool:
    return isinstance(parts, list | tuple) and len(parts) > 0 and sum(map(_length, parts)) == _length(dataset)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:  # it has none
        return 0
