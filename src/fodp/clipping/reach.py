"""What a function can reach beside the model: modules, tensors, arrays, and the places that hold them or numbers.

From a loss or an augmentation the walk follows names in its code (globals, modules of the user's), closures, defaults,
`self`, attributes and slots, classes, containers, partial and wrapped functions. It stays within the user's own code:
the standard library, PyTorch, NumPy and other installed packages are not looked into, but for modules of PyTorch's
kind (a metric, a loss).
"""

import array
import collections
import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from fodp.support.torch_internals import parts_of

_MOST = 4000  # things that are visited
_LONG = 1000  # containers with more items are data, and are not looked into
_LIBRARIES = {"torch", "numpy", "fodp", "fodp_lab"}
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})
_SEQUENCES = (list, collections.deque, bytearray, array.array)
_CONTAINERS = (dict, types.MappingProxyType, set, frozenset, tuple, *_SEQUENCES)
_WITH_ATTRIBUTES = (types.SimpleNamespace, collections.UserDict, collections.UserList)  # though of the library


@dataclass(frozen=True, eq=False)
class Holder:
    """A place that holds values by key and can be written to: attributes, a closure's cell, a list, some globals."""

    name: str
    place: int  # the same in every walk
    copy: Callable[[], Any]  # a shallow copy, made and compared in every step; None: too long by now
    values: Callable[[Any], dict[Any, Any]]  # of such a copy
    write: Callable[[dict[Any, Any]], None]
    names: bool = True  # its keys are names in code, which a message may show; keys of a dict may be private
    grows: bool = False  # a list, a set or a dict
    keyed: bool = False  # of these a set or a dict

    def read(self) -> dict[Any, Any] | None:
        """What it holds now."""
        copied = self.copy()
        return None if copied is None else self.values(copied)

    def mark(self, key: Any) -> tuple[int, Any]:
        """By which one of its values is known in later walks; of a list, a set or a dict all together."""
        return self.place, key if self.names else None

    def called(self, key: Any) -> str:
        """What a message calls one of its values."""
        return f"{self.name}.{key}" if self.names and self.name else str(key) if self.names else self.name


@dataclass
class Reached:
    """What a walk has found; `shells` are modules that contain the model, of which only their own buffers count."""

    modules: list[nn.Module] = field(default_factory=list)
    shells: list[nn.Module] = field(default_factory=list)
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    arrays: list[tuple[str, "np.ndarray[Any, Any]"]] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all to be watched."""
        return not (self.modules or self.shells or self.tensors or self.arrays or self.holders)


def reached(functions: Iterable[Any], model: nn.Module, parts: bool = True) -> Reached:
    """What these functions, and (`parts`) the user's own modules in the model, can reach beside the model's tensors."""
    walk = _Walk(model, [function for function in functions if function is not None], parts)
    walk.go()
    return walk.found


def modules_of(function: Any, model: nn.Module) -> list[nn.Module]:
    """The modules, beside the model and its parts, that a loss or an augmentation is or reaches."""
    return reached([function], model, parts=False).modules


class _Walk:
    def __init__(self, model: nn.Module, roots: Sequence[Any], parts: bool):
        self.found = Reached()
        self._inside = set(model.modules())
        self._known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._kept: list[Any] = []  # whose ids are known: they must not be given to others
        self._own = {top for root in roots if (top := _top(_module_name(root))) not in _LIBRARIES}
        self._roots = {id(root) for root in roots}
        self._waiting: collections.deque[tuple[str, Any]] = collections.deque(("", root) for root in roots)
        self._waiting.extend((type(part).__name__, part) for part in (model.modules() if parts else ()))

    def go(self) -> None:
        """Visit everything, the nearest first."""
        while self._waiting and len(self._kept) < _MOST:
            name, thing = self._waiting.popleft()
            if id(thing) in self._known or isinstance(thing, str | bytes | int | float | complex | None):
                continue
            self._known.add(id(thing))
            self._kept.append(thing)
            self._visit(name, thing)

    def _visit(self, name: str, thing: Any) -> None:
        if isinstance(thing, Tensor):
            self.found.tensors.append((name, thing))
        elif isinstance(thing, np.ndarray):
            self.found.arrays.append((name, thing))
        elif isinstance(thing, nn.Module):
            self._module(name, thing)
        elif isinstance(thing, types.FunctionType):
            self._function(thing)
        elif isinstance(thing, types.MethodType):
            self._follow([(name, thing.__self__), (name, thing.__func__)])
        elif isinstance(thing, functools.partial):
            self._follow((name, part) for part in (thing.func, *thing.args, *thing.keywords.values()))
        elif isinstance(thing, weakref.ref):
            self._follow([(name, thing())])
        elif isinstance(thing, types.GeneratorType):
            self._follow((name, value) for value in (thing.gi_frame.f_locals.values() if thing.gi_frame else ()))
        elif isinstance(thing, _CONTAINERS):
            self._container(name, thing)
        elif isinstance(thing, type):
            self._class(thing)
        elif isinstance(thing, classmethod | staticmethod | property | functools.cached_property):
            parts = [getattr(thing, part, None) for part in ("__func__", "func", "fget", "fset")]
            self._follow((name, part) for part in parts)
        elif hasattr(thing, "__wrapped__"):  # an lru_cache
            self._follow([(name, thing.__wrapped__)])
        elif self._is_users(type(thing).__module__) or id(thing) in self._roots or isinstance(thing, _WITH_ATTRIBUTES):
            self._object(name or type(thing).__name__, thing)

    def _follow(self, things: Iterable[tuple[str, Any]]) -> None:
        self._waiting.extend(things)

    def _function(self, function: types.FunctionType) -> None:
        """Its closure and what it wraps; of the user's own functions also what their code names."""
        is_users = self._is_users(function.__module__)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if is_users:
                self._hold(_of_cell(name, cell))
            self._follow([(name, content) for content in _content(cell)])
        self._follow((key, value) for key, value in vars(function).items() if is_users or callable(value))
        if not is_users:
            return
        self._hold(_of_dict(function.__name__, vars(function)))
        self._follow((function.__name__, value) for value in function.__defaults__ or ())
        self._follow((function.__kwdefaults__ or {}).items())
        self._globals("", function.__globals__, set(_names(function.__code__)))

    def _globals(self, name: str, places: dict[str, Any], names: set[str]) -> None:
        """Those that code names, also as attributes of the user's modules."""
        mine = sorted(key for key in names if key in places)
        if not mine:
            return
        self._hold(_of_globals(name, places, tuple(mine)))
        for key in mine:
            value = places[key]
            if isinstance(value, types.ModuleType):
                if self._is_users(value.__name__) and vars(value) is not places and id(value) not in self._known:
                    self._known.add(id(value))
                    self._globals(key, vars(value), names)
                    self._known.discard(id(value))  # another function may name other things of it
            else:
                self._follow([(key, value)])

    def _module(self, name: str, module: nn.Module) -> None:
        name = name or type(module).__name__
        if module not in self._inside:
            contains = any(part in self._inside for part in module.modules())
            (self.found.shells if contains else self.found.modules).append(module)
            own = module.parameters(recurse=False) if contains else module.parameters()
            self.found.tensors.extend((f"a parameter of {name}", p) for p in own if id(p) not in self._known)
            parts = parts_of(module) if contains else list(module.modules())[1:]
            for part in parts:  # of one that is watched whole, the parts are too: only their attributes are left
                if part is not None and not contains:
                    self._attributes(type(part).__name__, part)
                    self._known.add(id(part))
                    self._kept.append(part)
                elif part is not None:
                    self._follow([(type(part).__name__, part)])
        self._attributes(name, module)

    def _attributes(self, name: str, module: nn.Module) -> None:
        """Of a module: what it holds beside tensors and parts that PyTorch knows of."""
        if _top(type(module).__module__) == "torch" or (
            module in self._inside and not self._is_users(type(module).__module__)
        ):
            return
        places = vars(module)
        self._hold(_of_dict(name, places, leaving_out=_OF_MODULES))
        self._follow((f"{name}.{key}", value) for key, value in list(places.items()) if key not in _OF_MODULES)
        if self._is_users(type(module).__module__):
            self._follow([(name, type(module))])

    def _object(self, name: str, thing: Any) -> None:
        places = getattr(thing, "__dict__", None)
        if isinstance(places, dict):
            self._hold(_of_dict(name, places))
            self._follow((f"{name}.{key}", value) for key, value in list(places.items()))
        slots = [slot for kind in type(thing).__mro__ for slot in _slots(kind)]
        if slots:
            self._hold(_of_slots(name, thing, slots))
            self._follow((f"{name}.{slot}", getattr(thing, slot, None)) for slot in slots)
        self._follow([(name, type(thing))])

    def _class(self, kind: type) -> None:
        """Its methods, and values that all of its objects share."""
        for base in kind.__mro__:
            if self._is_users(base.__module__):
                self._hold(_of_class(base))
                self._follow((f"{base.__name__}.{key}", value) for key, value in list(vars(base).items()))

    def _container(self, name: str, things: Any) -> None:
        if len(things) > _LONG:
            return
        if isinstance(things, dict):
            self._hold(_of_dict(name, things, names=False))
        elif isinstance(things, set):
            self._hold(_of_set(name, things))
        elif isinstance(things, _SEQUENCES):
            self._hold(_of_sequence(name, things))
        parts = things.values() if isinstance(things, dict | types.MappingProxyType) else things
        self._follow((name, part) for part in list(parts))

    def _hold(self, holder: Holder) -> None:
        self.found.holders.append(holder)

    def _is_users(self, module: str | None) -> bool:
        return _top(module) in self._own or not _is_installed(module)


def _module_name(thing: Any) -> str | None:
    thing = getattr(thing, "__func__", getattr(thing, "func", thing))
    return getattr(thing, "__module__", None) or type(thing).__module__


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether a module is Python's or an installed package's; one without a file (a notebook's) is not."""
    top = _top(module)
    if top in sys.stdlib_module_names or top in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    places = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return file is not None and any(file.startswith(place + "/") for place in places)


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that code names, that of functions inside of it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slot for slot in ([slots] if isinstance(slots, str) else slots) if slot not in ("__dict__", "__weakref__")]


# --- places that can be written to -----------------------------------------------------------------------------


def _of_dict(
    name: str, places: dict[Any, Any], names: bool = True, leaving_out: frozenset[str] = frozenset()
) -> Holder:
    def values(copied: dict[Any, Any]) -> dict[Any, Any]:
        return {key: value for key, value in copied.items() if key not in leaving_out} if leaving_out else copied

    def write(given: dict[Any, Any]) -> None:
        for key in [key for key in places if key not in given and key not in leaving_out]:
            del places[key]
        dict.update(places, given)  # a Counter's own would add

    return Holder(name, id(places), places.copy, values, write, names, grows=not names, keyed=not names)


def _of_globals(name: str, places: dict[str, Any], keys: tuple[str, ...]) -> Holder:
    missing = object()
    absent = [missing] * len(keys)

    def copied() -> list[Any]:
        return list(map(places.get, keys, absent))  # in every step

    def values(found: list[Any]) -> dict[Any, Any]:
        return {key: value for key, value in zip(keys, found, strict=True) if value is not missing}

    def write(given: dict[Any, Any]) -> None:
        for key in keys:
            if key not in given:
                places.pop(key, None)
        places.update(given)

    return Holder(name, id(places), copied, values, write)


def _of_cell(name: str, cell: types.CellType) -> Holder:
    def write(given: dict[Any, Any]) -> None:
        if name in given:
            cell.cell_contents = given[name]
        elif _content(cell):
            del cell.cell_contents

    return Holder(
        "", id(cell), lambda: _content(cell), lambda found: dict.fromkeys([name], *found) if found else {}, write
    )


def _of_sequence(name: str, things: Any) -> Holder:
    def write(given: dict[Any, Any]) -> None:
        while len(things):
            things.pop()
        things.extend(given.values())

    def copied() -> list[Any] | None:
        return list(things) if len(things) <= _LONG else None

    return Holder(name, id(things), copied, lambda found: dict(enumerate(found)), write, names=False, grows=True)


def _of_set(name: str, things: set[Any]) -> Holder:
    def write(given: dict[Any, Any]) -> None:
        things.clear()
        things.update(given)

    def copied() -> set[Any] | None:
        return things.copy() if len(things) <= _LONG else None

    return Holder(name, id(things), copied, dict.fromkeys, write, names=False, grows=True, keyed=True)


def _of_slots(name: str, thing: Any, slots: list[str]) -> Holder:
    def read() -> dict[Any, Any]:
        return {slot: getattr(thing, slot) for slot in slots if hasattr(thing, slot)}

    def write(given: dict[Any, Any]) -> None:
        for slot in read():
            if slot not in given:
                object.__delattr__(thing, slot)
        for slot, value in given.items():
            object.__setattr__(thing, slot, value)

    return Holder(name, id(thing), read, lambda found: found, write)


def _of_class(kind: type) -> Holder:
    def values(copied: dict[str, Any]) -> dict[Any, Any]:
        return {key: value for key, value in copied.items() if _is_value(key, value)}

    def write(given: dict[Any, Any]) -> None:
        for key in values(dict(vars(kind))):
            if key not in given:
                delattr(kind, key)
        for key, value in given.items():
            if vars(kind).get(key) is not value:
                setattr(kind, key, value)

    return Holder(kind.__name__, id(kind), vars(kind).copy, values, write)


def _is_value(key: str, value: Any) -> bool:
    return not key.startswith("__") and not hasattr(type(value), "__get__")
