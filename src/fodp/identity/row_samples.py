"""Marks of some rows of a data set: equal for equal rows, and nothing that anybody could keep or test.

Rows are hashed with a key of this process, which is stored nowhere: sums of their numbers times secret ones, modulo
2⁶⁴. Of data in memory up to 65,536 rows are looked at, of lists 4,096, of a table of `datasets` 1,024, and of what must
be read one by one 512. Reading leaves no trace: the generators of PyTorch, NumPy, Python and of the data set itself
stand afterwards where they stood before.
"""

import math
import random
import secrets
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from fodp.draws import generators_kept
from fodp.draws.generators import foreign_seeded
from fodp.identity.origins import columns_of, held_by

Vector = npt.NDArray[np.float32]
Row = list[tuple[str, Vector]]  # the parts of a record by their names; its single numbers are one part, ""
Words = npt.NDArray[np.uint64]

_IN_MEMORY, _IN_A_LIST, _IN_A_TABLE, _ONE_BY_ONE = 2**16, 2**12, 2**10, 2**9
_ENTRIES = 2**25  # numbers that are hashed at most
_CHUNK, _AT_ONCE = 2**9, 2**5  # rows, in columns and one by one
_LONGEST_WORD = 8
_LARGE = 8  # numbers of a part, from which on it stands for its record
_MIX = np.uint64(0x9E3779B97F4A7C15)
_secret = np.random.default_rng(secrets.randbits(128))
_keys: list[Words] = [np.empty(0, np.uint64)]


class Block(NamedTuple):
    """Rows side by side: their places, and of each part of theirs a matrix."""

    places: list[int]
    parts: Row


class Marks(NamedTuple):
    """Of one part of the rows that were looked at: a mark by the row's place."""

    share: float  # of all rows of the data set that were looked at
    marks: dict[int, int]


class Rows:
    """Some rows of a data set, at places that depend on its size alone, and at others that are named."""

    def __init__(self, dataset: Any, most: int = _IN_MEMORY, beside: Iterable[int] = ()) -> None:
        frame = getattr(dataset, "to_numpy", None)
        if callable(frame) and hasattr(dataset, "columns"):  # a DataFrame: item i of it is no row
            dataset = {str(name): np.asarray(dataset[name]) for name in dataset.columns}
        self._dataset, self._columns = dataset, columns_of(dataset)
        self.size = len(self._columns[0]) if self._columns else len(dataset)
        chosen = _places(self.size, min(most, self._at_most()))
        named = {place for place in beside if place < self.size}.difference(chosen.tolist())
        self.places = np.sort(np.concatenate([chosen, np.array([*named], np.int64)]))

    def __iter__(self) -> Iterator[Block]:
        """Each row that can be read, with its place."""
        return self._of_columns() if self._columns else self._one_by_one()

    def _at_most(self) -> int:
        if self._columns:
            entries = sum(math.prod(column.shape[1:]) for column in self._columns)
            return int(min(_IN_MEMORY, max(2, _ENTRIES // max(1, entries))))
        if isinstance(self._dataset, list | tuple):
            return _IN_A_LIST
        return _IN_A_TABLE if hasattr(self._dataset, "_fingerprint") else _ONE_BY_ONE

    def _of_columns(self) -> Iterator[Block]:
        for start in range(0, len(self.places), _CHUNK):
            chosen = self.places[start : start + _CHUNK]
            found = [_array(_at(column, chosen)) for column in self._columns]
            parts = [(str(n), part.reshape(len(chosen), -1)) for n, part in enumerate(found) if part.ndim > 1]
            single = [part[:, None] for part in found if part.ndim == 1]
            parts += [("", np.concatenate(single, axis=1))] if single else []
            yield Block(chosen.tolist(), parts)

    def _one_by_one(self) -> Iterator[Block]:
        for start in range(0, len(self.places), _AT_ONCE):
            rows: list[tuple[int, Row]] = []
            with quietly(self._dataset):
                for place in self.places[start : start + _AT_ONCE].tolist():
                    _seed_all()
                    with suppress(Exception):  # what cannot be read is a matter for training
                        rows.append((place, parts(self._dataset[place])))
            for place, row in rows:
                yield Block([place], [(name, vector[None]) for name, vector in row])


def marks_of(dataset: Any, beside: Iterable[int] = ()) -> list[Marks]:
    """The marks of the large parts of rows: of eight numbers, or of half as many as the largest part has."""
    rows = Rows(dataset, beside=beside)
    found: dict[str, dict[int, int]] = {}
    widths: Counter[str] = Counter()
    for places, row in rows:
        for name, matrix in row:
            even, odd = halves(matrix)
            found.setdefault(name, {}).update(zip(places, (even + odd).tolist(), strict=True))
            widths[name] += matrix.size
    means = {name: widths[name] / len(marks) for name, marks in found.items()}
    least = min(_LARGE, max(means.values(), default=0.0) / 2)
    return [Marks(len(rows.places) / rows.size, marks) for name, marks in found.items() if means[name] >= least]


def halves(rows: npt.NDArray[np.float32]) -> tuple[Words, Words]:
    """A mark of every second number of each row, beginning with the first, and one of the others."""
    words = np.ascontiguousarray(rows).view(np.uint32).astype(np.uint64)
    words *= _MIX
    words ^= words >> np.uint64(32)  # floats end in zeros, of which no factor rids them
    words *= _keys_for(words.shape[1])
    length = np.uint64(words.shape[1] * int(_MIX) % 2**64)
    return words[:, ::2].sum(1, dtype=np.uint64) + length, words[:, 1::2].sum(1, dtype=np.uint64)


def _keys_for(count: int) -> Words:
    if len(_keys[0]) < count:
        more = _secret.integers(0, 2**64, 2 * count - len(_keys[0]), np.uint64) | np.uint64(1)
        _keys[0] = np.concatenate([_keys[0], more])
    return _keys[0][:count]


@contextmanager
def quietly(dataset: Any) -> Iterator[None]:
    """Read as if nobody had read: all generators stand afterwards as before, and nothing is told."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(generators_kept())
        stack.enter_context(foreign_seeded(bytes(4)))
        for generator in _generators_of(dataset):
            stack.enter_context(_kept(generator))
        yield


def _seed_all() -> None:
    """Every row is read under one seed: an augmentation draws alike for equal rows."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  the generator that others use


def parts(record: Any) -> Row:
    """A record as vectors by name; single numbers together."""
    single: list[Vector] = []
    found: Row = []
    for name, vector in _leaves(record, "0"):
        if vector.size == 1:
            single.append(vector)
        else:
            found.append((name, vector))
    return [*found, ("", np.concatenate(single))] if single else found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Vector]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple) and not _is_plain(value):
        for place, part in enumerate(value):
            yield from _leaves(part, f"{name}.{place}")
    else:
        vector = _array(value).reshape(-1)
        if vector.size:
            yield name, vector


def _is_plain(value: Sequence[Any]) -> bool:
    """Whether a list holds numbers alone, as tokens are: that is one part."""
    return len(value) > 0 and type(value) is list and all(isinstance(each, int | float) for each in value)


def _array(value: Any) -> Vector:
    """Numbers as float32, so that one row is the same row in other types; words as numbers; of all else nothing."""
    if isinstance(value, str | bytes):
        return _of_words(value)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_dense() if value.layout is not torch.strided else value
        value = (torch.view_as_real(value) if value.is_complex() else value).to("cpu", torch.float32).numpy()
    try:
        found = np.asarray(value)
        if found.dtype.kind in "OUS" and found.ndim:
            return np.array([_of_words(str(each))[:1].sum() for each in found.flat], np.float32).reshape(found.shape)
        if found.dtype.kind in "mM":
            found = found.astype(np.int64)
        with np.errstate(all="ignore"):
            return found.astype(np.float32) + np.float32(0)  # minus zero is zero
    except (TypeError, ValueError):
        return np.empty(0, np.float32)


def _of_words(text: str | bytes) -> Vector:
    """A number for each word, and for each eight letters of a long one."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    pieces = [word[at : at + _LONGEST_WORD] for word in raw.split() for at in range(0, len(word), _LONGEST_WORD)]
    return np.array([zlib.crc32(piece) % 2**24 for piece in pieces], np.float32)


def _at(column: Any, places: npt.NDArray[np.int64]) -> Any:
    if not isinstance(column, torch.Tensor):
        return column[places]
    return column.detach().index_select(0, torch.from_numpy(places).to(column.device))


def _places(size: int, most: int) -> npt.NDArray[np.int64]:
    """All, or so many that nobody arranged; the same for every data set of one size."""
    if size <= most:
        return np.arange(size, dtype=np.int64)
    return np.sort(np.random.default_rng(size).choice(size, most, replace=False, shuffle=False)).astype(np.int64)


def _generators_of(dataset: Any) -> list[Any]:
    found: list[Any] = []
    level = [dataset]
    for _ in range(4):  # wrappers within each other
        inside = [value for each in level for value in getattr(each, "__dict__", {}).values()]
        kinds = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
        found += [value for value in inside if isinstance(value, kinds)]
        level = [value for value in inside if isinstance(value, Dataset)] + [h for each in level for h in held_by(each)]
    return found


@contextmanager
def _kept(generator: Any) -> Iterator[None]:
    """A generator of the data set's own afterwards stands where it stood."""
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state()
        put_back: Callable[[Any], Any] = generator.set_state
    elif isinstance(generator, random.Random):
        state, put_back = generator.getstate(), generator.setstate
    elif isinstance(generator, np.random.RandomState):
        state, put_back = generator.get_state(legacy=False), generator.set_state
    else:
        state, put_back = (
            generator.bit_generator.state,
            lambda before: setattr(generator.bit_generator, "state", before),
        )
    try:
        yield
    finally:
        put_back(state)
