"""The state of PyTorch's, NumPy's and Python's generators: kept, compared, seeded for one record."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

from fodp.support.torch_internals import device_generators


class Marks:
    """Where PyTorch's generators stand. As a context it puts them back at its end, if they were moved."""

    def __init__(self) -> None:
        self.saved = torch.default_generator.get_state()
        self._devices = device_generators()
        self.offsets = [generator.get_state() for generator in self._devices] if self._devices else []
        self.were_moved = False  # known after the context

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.were_moved = self.moved()
        if self.were_moved:
            self.restore()

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        if not torch.equal(torch.default_generator.get_state(), self.saved):
            return True
        if not self._devices:
            return False
        pairs = zip(self._devices, self.offsets, strict=True)
        return not all(torch.equal(generator.get_state(), state) for generator, state in pairs)

    def advance(self) -> None:
        """Take where PyTorch's generator of the CPU stands now."""
        self.saved = torch.default_generator.get_state()

    def restore(self) -> None:
        """Put them back."""
        torch.default_generator.set_state(self.saved)
        for generator, state in zip(self._devices, self.offsets, strict=True):
            generator.set_state(state)


def generators_kept() -> Marks:
    """A context: private passes leave PyTorch's generators as they were."""
    return Marks()


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
