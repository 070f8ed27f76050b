"""The state of PyTorch's, NumPy's and Python's generators: kept, compared, seeded for one record."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch


class Marks:
    """Where PyTorch's generators stand."""

    def __init__(self) -> None:
        self.saved = torch.default_generator.get_state()
        self._devices = _device_generators()
        self.offsets = [generator.get_state() for generator in self._devices]

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        return not torch.equal(torch.default_generator.get_state(), self.saved) or not all(
            torch.equal(g.get_state(), s) for g, s in zip(self._devices, self.offsets, strict=True)
        )

    def restore(self) -> None:
        """Put them back."""
        torch.default_generator.set_state(self.saved)
        for generator, state in zip(self._devices, self.offsets, strict=True):
            generator.set_state(state)


def _device_generators() -> list[torch.Generator]:
    if torch.cuda.is_initialized():
        return list(torch.cuda.default_generators)
    return [torch.mps._get_default_mps_generator()] if _has_mps() else []


@cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()


@contextmanager
def generators_kept() -> Iterator[Marks]:
    """Private passes leave PyTorch's generators as they were."""
    marks = Marks()
    try:
        yield marks
    finally:
        if marks.moved():
            marks.restore()


def foreign_state() -> tuple[Any, ...]:
    """Where NumPy's and Python's own generators stand."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002  the generator that others use
    return random.getstate(), (kind, np.asarray(keys).tobytes(), *rest)


def restore_foreign(state: tuple[Any, ...]) -> None:
    """Put NumPy's and Python's own generators back."""
    own, (kind, keys, *rest) = state
    random.setstate(own)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002  the generator that others use


@contextmanager
def foreign_seeded(seed: bytes) -> Iterator[None]:
    """NumPy's and Python's generators from this seed, afterwards as before."""
    before = foreign_state()
    try:
        random.seed(seed)
        np.random.seed(np.frombuffer(seed, np.uint32))  # noqa: NPY002  the generator that others use
        yield
    finally:
        restore_foreign(before)
