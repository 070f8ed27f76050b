"""Forms of batches: nested dicts, lists and tuples, objects that are mappings, and lists with an item for each record.

Which list holds columns and which holds records cannot be seen in one batch. A `collate_fn` is therefore asked for
the batches of two and of three copies of one record: what grows is the records' (`Form`).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fodp.errors import DataError

EXAMPLES_FIRST = (
    "let collate_fn return tensors with the records along dimension 0, lists with an item for each record, or dicts, "
    "lists and tuples of them"
)
_CONSTANTS = (type(None), bool, int, float, str, bytes)
_PER_RECORD = {"rows", "array", "ragged"}  # kinds with something for each record
_TELLS = (
    "collate_fn returns a number or a text that is not the same in every batch, so it tells of the whole lot: let the "
    "model or the loss make what they need of each record by itself"
)


class RaggedList(list[Any]):
    """A list with one item for each record, which need not have the same shape."""


class RaggedTuple(tuple[Any, ...]):
    """A tuple with one item for each record, which need not have the same shape."""


Ragged = RaggedList | RaggedTuple


def ragged(items: Any) -> Ragged:
    """The same items, known to be one for each record."""
    return RaggedTuple(items) if isinstance(items, tuple) else RaggedList(items)


def rebuilt(like: Any, parts: Any) -> Any:
    """A mapping, list or tuple of the same type, with other parts: pairs of keys and values for a mapping."""
    if isinstance(like, Mapping):
        items = dict(parts)
        if type(like) is dict:
            return items
        try:
            return type(like)(items)  # type: ignore[call-arg]
        except TypeError:  # a mapping whose first argument is something else, as a defaultdict's
            other: Any = copy.copy(like)
            other.update(items)
            return other
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def mapped(batch: Any, change: Callable[[Any], Any], of_ragged: Callable[[Ragged], Any] | None = None) -> Any:
    """A batch of the same form: `change` of every leaf, `of_ragged` of every list of records (else of its items)."""
    if isinstance(batch, Mapping):
        return rebuilt(batch, [(name, mapped(part, change, of_ragged)) for name, part in batch.items()])
    if isinstance(batch, Ragged) and of_ragged is not None:
        return of_ragged(batch)
    if isinstance(batch, list | tuple):
        return rebuilt(batch, [mapped(part, change, of_ragged) for part in batch])
    return change(batch)


def leaves(batch: Any) -> Iterator[Any]:
    """What a batch holds, in order, however deeply nested. A list of records is one leaf."""
    if isinstance(batch, Mapping):
        for part in batch.values():
            yield from leaves(part)
    elif isinstance(batch, list | tuple) and not isinstance(batch, Ragged):
        for part in batch:
            yield from leaves(part)
    else:
        yield batch


@dataclass(frozen=True)
class Shared:
    """A number or a text that all records share: the same in every batch."""

    value: Any


@dataclass(frozen=True)
class Form:
    """What a `collate_fn` makes of records: for every leaf whether it has a row, or an item, for each of them."""

    kinds: Any  # nested as the batch: "rows", "array", "ragged", Shared(value); "mixed" for what cannot be taken apart

    @staticmethod
    def of(two: Any, three: Any) -> "Form":
        """The form that batches of two and of three copies of one record show."""
        form = Form(_kinds(two, three))
        if not _PER_RECORD & set(form._all()):
            raise DataError(f"a batch of two records looks as one of three does; {EXAMPLES_FIRST}")
        return form

    def marked(self, batch: Any, count: int) -> Any:
        """The batch of `count` records with its lists of records marked as such.

        One of more or fewer rows or items is refused: its rows would be other records' than they are taken for.
        """

        def mark(kind: Any, part: Any) -> Any:
            if kind in _PER_RECORD and len(part) != count:
                raise DataError(
                    "collate_fn returned a part without one row, or item, for each record, which it had for the data "
                    f"set's first record: {EXAMPLES_FIRST}"
                )
            if isinstance(kind, Shared) and not _same(part, kind.value):
                raise DataError(_TELLS)
            return ragged(part) if kind == "ragged" else part

        return _paired(self.kinds, batch, mark)

    def emptied(self, batch: Any) -> Any:
        """The batch without its records; what they share stays."""
        return _paired(self.kinds, batch, _empty)

    def refuse_what_cannot_be_divided(self) -> None:
        """Raise unless the batch of some records can be had from a larger one, by taking their rows."""
        kinds = set(self._all())
        if "mixed" in kinds:
            raise DataError(
                "collate_fn returns a tensor whose records do not lie along its first dimension, one row each: "
                f"{EXAMPLES_FIRST}"
            )
        if "array" in kinds:
            raise DataError("collate_fn returns arrays of NumPy's, which no model takes: let it return tensors")
        if "constant" in kinds:
            raise DataError(
                "collate_fn returns a tensor that is the same for two records as for three, so it holds none of them: "
                "let the model or the loss make such a constant, and leave it out of the batch"
            )

    def _all(self) -> list[Any]:
        return list(leaves(self.kinds))


def _kinds(two: Any, three: Any) -> Any:
    if isinstance(two, Mapping) and isinstance(three, Mapping) and list(two) == list(three):
        return {name: _kinds(two[name], three[name]) for name in two}
    if isinstance(two, list | tuple) and type(two) is type(three):
        if (len(two), len(three)) == (2, 3):
            return "ragged"
        return [_kinds(a, b) for a, b in zip(two, three, strict=True)] if len(two) == len(three) else "mixed"
    if isinstance(two, torch.Tensor | np.ndarray) and type(two) is type(three):
        if two.shape == three.shape:
            return "constant"
        first = (two.shape[:1], three.shape[:1]) == ((2,), (3,)) and two.shape[1:] == three.shape[1:]
        if not first:
            return "mixed"
        return "rows" if isinstance(two, torch.Tensor) else "array"
    if isinstance(two, _CONSTANTS):
        if not _same(two, three):
            raise DataError(_TELLS)
        return Shared(two)
    return "shared" if type(two) is type(three) else "mixed"


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))  # NaN is NaN


def _paired(kinds: Any, batch: Any, change: Callable[[Any, Any], Any]) -> Any:
    """change(kind, part) of every part; a batch of another form than was learned is refused."""
    if isinstance(kinds, str | Shared):
        return change(kinds, batch)
    if isinstance(kinds, dict):
        if not isinstance(batch, Mapping) or list(batch) != list(kinds):
            raise DataError("collate_fn returned other names than for its first records: let every batch have the same")
        return rebuilt(batch, [(name, _paired(kinds[name], part, change)) for name, part in batch.items()])
    if not isinstance(batch, list | tuple) or len(batch) != len(kinds):
        raise DataError("collate_fn returned another form of batch than for its first records: let all have the same")
    return rebuilt(batch, [_paired(kind, part, change) for kind, part in zip(kinds, batch, strict=True)])


def _empty(kind: Any, part: Any) -> Any:
    if kind in ("rows", "array") or (kind == "mixed" and isinstance(part, torch.Tensor | np.ndarray) and part.ndim):
        return part[:0]
    if kind == "ragged":
        return ragged(part[:0])
    if kind == "constant" or isinstance(part, _CONSTANTS):
        return part
    raise DataError(f"cannot make an empty lot of a {type(part).__name__}; {EXAMPLES_FIRST}")
