"""Is this the private data? The one answer, for every door that takes data as public.

What is computed from public data gets no noise. So data that a score, a search or a shape is to be made of is compared
with the data that is trained on: as objects, by the memory and the files they lie in, and by their rows.
"""

import dis
import filecmp
import functools
import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fodp.errors import ConfigurationError
from fodp.identity.origins import Origins, columns_of, held_by
from fodp.identity.row_samples import Marks, marks_of
from fodp.support import checks
from fodp.support.forms import leaves

HOLD_OUT = "hold rows out before training (torch.utils.data.random_split, train_test_split) and give those"
_WHY = f"what is computed from public data gets no noise: {HOLD_OUT}"
_SAY_SO = (
    "If these rows are public all the same, say so: fodp.identity.private_data.declare_public(data), or "
    "--shared-rows-are-public"
)

_COPY, _SOME = 0.5, 0.02  # of the public rows are private ones: it is a copy; it is worth a warning
_CANNOT_TELL = 0.5  # of the private rows have an equal one among themselves
_FEW = 8
_DEVIATIONS = 5.0  # beyond which a number of equal rows is no chance
_PARTS_OF_A_BATCH = 8
_DEEPEST = 3  # functions that functions name

_declared: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()  # by id
_declared_lists: list[Any] = []  # which no weak reference can be made to


def declare_public(data: Any) -> Any:
    """Say that data is public although rows of it are equal to private ones; returns it.

    That holds if nobody had to look at the private data to choose these rows. The private data itself, its memory and
    its files stay refused.
    """
    try:
        _declared[id(data)] = data
    except TypeError:
        _declared_lists.append(data)
    return data


def refuse_private(door: str, public: Any, private: Any) -> None:
    """Raise if what was given as public is the private data or a copy of it; see `PrivateData.refuse`."""
    PrivateData(private).refuse(door, public)


def refuse_private_file(option: str, path: str | Path, private: str | Path) -> None:
    """Raise if a file that was named as public is the private one: the same file, or one with the same bytes."""
    here, there = Path(path), Path(private)
    if not (here.is_file() and there.is_file()):
        return
    if here.samefile(there) or filecmp.cmp(here, there, shallow=False):
        raise ConfigurationError(
            f"{option} {path} is the private data itself, and what is computed from public data gets no noise: give a "
            "file of other rows, held out before training, or leave it out"
        )


class PrivateData:
    """The data that is trained on, to be compared with what doors are given as public. It has as many rows as that."""

    def __init__(self, data: Any) -> None:
        self._data, self._known = data, Origins()
        self._compared: list[Any] = []
        self._numbers: npt.NDArray[np.int64] | None = None

    def refuse(self, door: str, public: Any) -> None:
        """Raise if what was given as public is the private data or a copy of it; warn if some of its rows are private.

        `door` names what it was given to. Where private rows repeat among themselves, equal rows say nothing.
        """
        for part in _parts(public):
            self._compared.append(part)
            if part is self._data or self._are_private(part).any():
                raise ConfigurationError(
                    f"{door}: this is the training data itself (its records, or memory shared with them), which is "
                    f"private, and {_WHY}"
                )
            share = 0.0 if _is_declared(public) or _is_declared(part) else self._share(part)
            many = "most" if share >= _COPY else "some"
            told = f"{door}: {many} of these rows are in the training data too, and {_WHY}. {_SAY_SO}"
            if share >= _COPY:
                raise ConfigurationError(told)
            if share >= _SOME:
                checks.warn(told)

    def refuse_reaching(self, door: str, thing: Any) -> None:
        """Raise if a function, or an object by its attributes, has data in its hands all of which is private.

        Followed are closures, defaults, partial arguments, an object's own attributes, globals that the code names (of
        an object: its methods' code), attributes of all these that it names, and functions among them. A data set among
        them may be a copy, too.
        """
        for value in _reached(thing, _DEEPEST):
            if value is self._data or (_is_data(value) and (self._holds_all_of(value) or self._is_copy(value))):
                raise ConfigurationError(
                    f"{door} has the training data in its hands, which is private, and {_WHY}. {_SAY_SO}"
                )

    def _are_private(self, public: Any) -> npt.NDArray[np.bool_]:
        """For each record whether it is a private one: the same object, or the same memory."""
        if self._numbers is None:
            self._numbers = np.sort(self._known.of(self._data))
        found = self._known.of(public)
        places = np.searchsorted(self._numbers, found).clip(max=len(self._numbers) - 1)
        return self._numbers[places] == found if len(self._numbers) else np.zeros(len(found), np.bool_)

    def _holds_all_of(self, value: Any) -> bool:
        found = self._are_private(value)
        return found.size > 0 and bool(found.all())

    def _is_copy(self, value: Any) -> bool:
        """Whether a data set, which a function may do much with, is made of private rows; tensors are not compared."""
        known = _is_declared(value) or any(value is each for each in self._compared)
        return isinstance(value, Dataset) and not known and self._share(value) >= _COPY

    def _share(self, public: Any) -> float:
        """About which share of the rows is private, beyond what private rows have in common by themselves."""
        if not (_has_rows(public) and _has_rows(self._data)):
            return 0.0
        ours = marks_of(public)
        places = {place for marks in ours for place in marks.marks}
        theirs = marks_of(self._data, beside=places)
        return max((_share_of(here, there) for here in ours for there in theirs), default=0.0)


def _parts(public: Any) -> Iterator[Any]:
    """The data sets in what was given: loaders, data sets by name, chained ones, and what wrappers hold."""
    if isinstance(public, Mapping) and not columns_of(public):
        for part in public.values():
            yield from _parts(part)
    elif isinstance(public, DataLoader):
        yield from _parts(public.dataset)
    elif isinstance(public, IterableDataset):
        yield public
        for held in held_by(public):
            for part in held if isinstance(held, list | tuple) and not columns_of(held) else [held]:
                yield from _parts(part)
    elif isinstance(public, list | tuple) and public and all(isinstance(p, Dataset | DataLoader) for p in public):
        for part in public:
            yield from _parts(part)
    elif isinstance(public, list | tuple) and len(public) <= _PARTS_OF_A_BATCH and columns_of(tuple(leaves(public))):
        yield tuple(leaves(public))  # a batch
        yield public  # or a few records
    elif public is not None and not isinstance(public, str | bytes):
        yield public


def _has_rows(data: Any) -> bool:
    """Whether rows can be read by their number."""
    return bool(columns_of(data)) or (hasattr(data, "__getitem__") and _has_length(data))


def _has_length(data: Any) -> bool:
    try:
        return len(data) > 0
    except TypeError:
        return False


def _is_declared(part: Any) -> bool:
    return (part is not None and _declared.get(id(part)) is part) or any(part is known for known in _declared_lists)


def _share_of(public: Marks, private: Marks) -> float:
    known = Counter(private.marks.values())
    rows, found = len(public.marks), sum(each in known for each in public.marks.values())
    by_itself = sum(count for count in known.values() if count > 1) / len(private.marks)
    natural, expected = by_itself / private.share, rows * by_itself
    if natural > _CANNOT_TELL or found < min(3, rows):
        return 0.0
    if found - expected < _DEVIATIONS * math.sqrt(expected * (1 - by_itself)):
        return 0.0
    share = (min(1.0, found / rows / private.share) - natural) / (1 - natural)
    if private.share < 1 and found < _FEW:  # by chance more of them may have been looked at than there are
        share = min(share, _SOME)
    in_place = sum(private.marks.get(place) == each for place, each in public.marks.items()) / rows
    return max(share, in_place)


def _is_data(value: Any) -> bool:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim > 0 and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, list | tuple):
        return len(value) > 0 and (bool(columns_of(value)) or type(value) is list)
    return isinstance(value, Dataset | DataLoader) or hasattr(value, "_fingerprint")


def _reached(thing: Any, depth: int) -> Iterator[Any]:
    """What a function or an object has in its hands, functions among them followed."""
    for value in _hands(thing):
        if isinstance(value, DataLoader):
            value = value.dataset
        yield value
        if depth and (isinstance(value, FunctionType | MethodType | functools.partial)):
            yield from _reached(value, depth - 1)


def _hands(thing: Any) -> Iterator[Any]:
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, MethodType):
        held = [*getattr(thing.__self__, "__dict__", {}).values()]
        yield from (thing.__func__, *held, *_asked_of(held, thing.__func__))
    elif isinstance(thing, FunctionType):
        yield from _of_function(thing)
    elif not isinstance(thing, type):
        held = [*getattr(thing, "__dict__", {}).values()]
        yield from held
        for method in _methods(type(thing)):
            yield from (*_of_function(method), *_asked_of(held, method))


def _asked_of(held: list[Any], function: Any) -> Iterator[Any]:
    """Attributes of what an object holds that a method of its names, as in self.splits.train."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return (vars(value)[name] for value in held for name in names if name in getattr(value, "__dict__", {}))


def _methods(kind: type) -> Iterator[FunctionType]:
    """Functions of a class and of those that it comes from, as far as its owner has written them."""
    for owner in kind.__mro__:
        if not owner.__module__.startswith("fodp."):
            yield from (each for each in vars(owner).values() if isinstance(each, FunctionType))


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for name, attribute in _named_in(function.__code__):
        try:
            value = cells[name].cell_contents if name in cells else function.__globals__[name]
        except (KeyError, ValueError):  # a builtin, or a cell that is not filled yet
            continue
        yield value
        if attribute is not None and not isinstance(value, ModuleType | type):
            yield getattr(value, "__dict__", {}).get(attribute)


def _named_in(code: CodeType) -> Iterator[tuple[str, str | None]]:
    """Names from outside that the code loads, each with the attribute that is asked of it at once."""
    instructions = [*dis.get_instructions(code)]
    for here, after in zip(instructions, [*instructions[1:], None], strict=True):
        if here.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            asks = after is not None and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield str(here.argval), str(after.argval) if asks and after is not None else None
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named_in(inner)
