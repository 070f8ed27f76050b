"""State outside of a model, through private passes: what one pass leaves there, and whether another one reads it.

A tensor or an array that a pass writes into is refused, in every step. A number, a list or another tensor in its place
may be a log that nobody reads: so it is moved far away, and an example's loss must stay what it was, bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fodp.clipping.reach import Holder, Reached, reached
from fodp.errors import PrivacyError
from fodp.support.torch_internals import version

_COPIED = 2**12  # entries of tensors that are compared by value in every step, larger ones by PyTorch's own count
_FAR = 10**6  # how often over a number is moved on
_LONGER = 10**4  # how long a list, a set or a dict is made
_UNCHANGED = object()
WAY_OUT = (
    "no noise protects that, and one example would reach others by it: compute it from the batch alone, or from public "
    "numbers, or move it in a callback between steps from what is released"
)

Values = list[tuple[Holder, Any]]  # places, and copies of what they held


class Outside:
    """All that some functions can reach beside the model, as it was when the walk was last taken."""

    def __init__(self, functions: Iterable[Any], model: nn.Module, parts: bool = True):
        self._functions, self._model, self._parts = list(functions), model, parts
        self.look()
        self.harmless: set[tuple[int, Any]] = set()  # marks of places that change, and that nobody reads
        # Places that have changed since without a look, with what they held: by the marks of their values.
        self.suspects: dict[tuple[int, Any], tuple[Holder, Any, Any]] = {}

    def look(self) -> None:
        """Walk again: something may hang elsewhere by now."""
        self.found: Reached = reached(self._functions, self._model, self._parts)

    def passed(self, marks: Iterable[tuple[int, Any]]) -> None:
        """Nobody reads these places, nor those that were suspects. Walks again: something may hang elsewhere now."""
        self.harmless.update(marks, self.suspects)
        self.suspects.clear()
        self.look()

    def values(self) -> Values:
        """What every place holds."""
        return [(holder, holder.copy()) for holder in self.found.holders]


class KeptOutside:
    """Tensors, arrays and places as they are now, to be compared after passes over private data."""

    def __init__(self, outside: Outside):
        self._outside = outside
        found = outside.found
        tensors = found.tensors
        self._tensors = [(name, t, version(t), _copy(t)) for name, t in tensors] if tensors else []
        arrays = found.arrays
        self._arrays = [(n, array, array.copy()) for n, array in arrays if array.size <= _COPIED] if arrays else []
        self._values = outside.values()

    def refuse_changes(self) -> None:
        """Put back what was written into, and raise if anything was; remember which places hold something else."""
        if (self._tensors or self._arrays) and (written := self._restore_written()):
            raise PrivacyError(
                f"the loss or the augmentation writes into {written[0] or 'a tensor'} when it sees examples, outside "
                f"of the model: {WAY_OUT}"
            )
        for holder, key, old, _ in changes(self._values):
            if (mark := holder.mark(key)) not in self._outside.harmless:
                self._outside.suspects.setdefault(mark, (holder, key, old))

    def restore(self) -> None:
        """Put back whatever has changed."""
        self._restore_written()
        put_back(self._values)

    def _restore_written(self) -> list[str]:
        written = []
        for name, tensor, before, copy in self._tensors:
            if version(tensor) == before and (copy is None or _same(tensor, copy)):
                continue
            written.append(name)
            if copy is not None:
                with torch.no_grad():
                    tensor.data.copy_(copy)
        for name, array, kept in self._arrays:
            if not _same(array, kept):
                written.append(name)
                array[...] = kept
        return written


def changes(before: Values) -> Iterator[tuple[Holder, Any, Any, Any]]:
    """(place, key, value before, value now) of what is another value; a missing one is `_UNCHANGED`."""
    for holder, copied in before:
        now = holder.copy()
        if copied is None or now is None or _equal(copied, now):
            continue
        old, new = holder.values(copied), holder.values(now)
        for key in [*old, *(key for key in new if key not in old)]:
            first, second = old.get(key, _UNCHANGED), new.get(key, _UNCHANGED)
            if first is not second and not _same(first, second):
                yield holder, key, first, second


def put_back(values: Values) -> None:
    """Give every place what it held."""
    for holder, copied in values:
        if copied is not None and not _equal(copied, holder.copy()):
            holder.write(holder.values(copied))


def _equal(copied: Any, now: Any) -> bool:
    """Whether two copies hold the same: at once where their parts are the same objects."""
    try:
        return bool(copied == now)
    except Exception:  # tensors and arrays do not compare as a whole
        return False


def read_by_others(
    outside: Outside,
    before: Values,
    differs: Callable[[], bool],
    begins_otherwise: Callable[[Callable[[], None]], bool],
) -> str | None:
    """The name of a place that passes have changed since `before`, and that a pass reads; None if there is none.

    `differs()` says whether an example has another loss now. `begins_otherwise(empty)` says so of what a pass fills
    that finds a place empty: with another example before it, where `empty()` empties the places.
    """
    now = outside.values()
    changed = list(changes(before))
    suspects = outside.suspects
    fresh = [(holder, key) for holder, key, old, _ in changed if old is _UNCHANGED or old is None]
    try:
        for holder, moved, name in (*_moved_far(changed), *_as_they_were(suspects.values())):
            holder.write(moved)
            if _reads(differs):
                return name
            put_back(now)

        filled = {id(holder) for holder, _ in fresh}
        as_before = [(holder, old) for holder, old in before if id(holder) in filled]
        if fresh and _reads(lambda: begins_otherwise(lambda: put_back(as_before))):
            return fresh[0][0].called(fresh[0][1])
    finally:
        put_back(now)
    outside.passed([holder.mark(key) for holder, key, _, _ in changed])
    return None


def _as_they_were(suspects: Iterable[tuple[Holder, Any, Any]]) -> Iterator[tuple[Holder, dict[Any, Any], str]]:
    """Each place with what it held before the step that has changed it: a flag cannot be moved far."""
    for holder, key, old in suspects:
        values = holder.read()
        if values is not None and old is not _UNCHANGED:
            yield holder, {**values, key: old}, holder.called(key)


def _reads(differs: Callable[[], bool]) -> bool:
    try:
        return differs()
    except Exception:  # what nobody reads breaks nothing
        return True


def _moved_far(changed: list[tuple[Holder, Any, Any, Any]]) -> Iterator[tuple[Holder, dict[Any, Any], str]]:
    """Each place with one of its values moved on by far, or, of a list, with much more in it."""
    longer: set[int] = set()
    for holder, key, old, new in changed:
        values = holder.read()
        if values is None:
            continue
        if holder.grows and old is _UNCHANGED and id(holder) not in longer:
            longer.add(id(holder))
            if holder.keyed:
                yield holder, values | {object(): new for _ in range(_LONGER)}, holder.called(key)
                continue
            many = list(values.values()) * (_LONGER // max(1, len(values)))
            yield holder, dict(enumerate(many)), holder.called(key)
        moved = _far(old, new)
        if moved is not _UNCHANGED:
            yield holder, {**values, key: moved}, holder.called(key)


def _far(old: Any, new: Any) -> Any:
    """A value far beyond the new one, on the way from the old one."""
    if isinstance(old, bool) or isinstance(new, bool):
        return _UNCHANGED
    if isinstance(old, int | float | np.number) and isinstance(new, int | float | np.number):
        return new + (new - old) * _FAR
    if isinstance(old, Tensor) and isinstance(new, Tensor) and not new.is_sparse and new.dtype != torch.bool:
        if old.shape == new.shape and old.dtype == new.dtype and old.device == new.device:
            return (new.detach() + (new - old).detach() * _FAR).to(new.dtype)
        return old
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray) and old.dtype.kind in "iuf":
        return new + (new - old) * _FAR if old.shape == new.shape else old
    return _UNCHANGED


def _copy(tensor: Tensor) -> Tensor | None:
    if tensor.numel() > _COPIED or tensor.layout != torch.strided or not tensor.is_cpu:
        return None
    return tensor.detach().clone()


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, NaN being NaN; what cannot be compared is so only with itself."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        if one.layout != torch.strided or other.layout != torch.strided:
            return False
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, bool | int | float | complex | str | bytes | np.generic):
        return bool(one == other) or (one != one and other != other)
    return False
