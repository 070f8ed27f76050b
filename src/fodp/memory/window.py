"""The window of a memory: the last releases, kept in a ring and read in one pass."""

import copy
import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fodp.errors import PrivacyError
from fodp.memory.passes import Floats, Weights, mix
from fodp.support import checks

_HUGE_PAGE = 1 << 21
_LINE = 16  # numbers of four bytes in a cache line


class WindowMemory(ABC):
    """A ring of the last K-1 releases; `read()` is their average under `weights`.

    Subclasses give the weights by lag; this class keeps the ring.
    """

    def __init__(self, window: int):
        self.window = checks.whole("window", window, maximum=100_000)
        self._slots = self.window - 1  # rows of the table
        self._table: Tensor | None = None  # the ring, made at the first write
        self._writes = 0

    @property
    def written(self) -> int:
        """How many releases it has seen."""
        return self._writes

    @property
    def filled(self) -> int:
        """How many lags can be looked back at now: K_t - 1."""
        return min(self.window - 1, self._writes)

    @property
    def weights(self) -> Tensor:
        """Normalised weights of lags 1, 2, … (float64, they sum to one; empty when K_t = 1)."""
        return torch.as_tensor(self.by_lag(), dtype=torch.float64)

    def weights_when_full(self) -> Floats:
        """The weights of a memory like this one whose window is full and that has no trend yet."""
        full = copy.copy(self)
        full._writes = max(self.window, self._writes)
        return [float(weight) for weight in full.by_lag()]

    @abstractmethod
    def by_lag(self) -> Weights:
        """The weights of lags 1, 2, …: what makes one memory differ from another.

        Floats; a tensor where they are made of releases on another device than the CPU, which are not read.
        """

    def read(self, out: Tensor | None = None) -> Tensor | None:
        """The memory state u: the weighted average of past releases, or None when K_t = 1.

        Reading changes nothing. The result never aliases the memory.
        """
        if self._table is None or self.filled == 0:
            return None
        if out is None:
            out = self._table.new_empty(self._table.shape[1])
        self._refuse_other_sizes(out)
        return self.add_to_(out.zero_(), 1.0)

    def add_to_(self, vector: Tensor, share: float) -> Tensor:
        """vector + share·u, in place; the memory stays as it is."""
        weights = self._shares(share)
        if self._table is not None and len(weights):
            self._refuse_other_sizes(vector)
            mix(vector, self._table, weights)
        return vector

    def write(self, release: Tensor) -> None:
        """Remember a release (a copy of it) and forget the oldest beyond the window."""
        self._advance(release.detach(), [])

    def mix_in_(self, vector: Tensor, share: float) -> Tensor:
        """vector + share·u, in place, and remembered: `add_to_` and then `write`, in one pass over the window."""
        self._advance(vector, self._shares(share))
        return vector

    def remember_then_mix_(self, vector: Tensor, scale: float, share: float) -> Tensor:
        """Remember the vector as it is; then scale·vector + share·u, in place, of a u that does not know it yet."""
        self._advance(vector, self._shares(share), scale)
        return vector

    def _advance(self, vector: Tensor, weights: Weights, scale: float | None = None) -> None:
        if self._table is None:
            if vector.dim() != 1:
                raise PrivacyError(f"a release is one flat vector, got shape {tuple(vector.shape)}")
            self._table = _table(self._slots, vector.numel(), vector)
        self._refuse_other_sizes(vector)
        if self.window > 1:
            self._mix_and_remember(vector, weights, scale)
        elif scale is not None:
            vector.mul_(scale)
        self._writes += 1

    def _mix_and_remember(self, vector: Tensor, weights: Weights, scale: float | None) -> None:
        """vector = (scale or 1)·vector + Σ weight·row; remember the result, or with a scale what the vector was."""
        assert self._table is not None
        release = vector
        if scale is not None:
            release = vector.clone()
            vector.mul_(scale)
        if len(weights):
            mix(vector, self._table, weights)
        self._keep(release, self._table)

    def _keep(self, release: Tensor, table: Tensor) -> None:
        table[self._writes % self._slots] = release

    def _order(self) -> list[int]:
        """The rows of lags 1, 2, …: the newest release first."""
        return [(self._writes - lag) % self._slots for lag in range(1, self.filled + 1)]

    def _by_row(self) -> Weights:
        """The weights of the rows that are filled, the first row first."""
        weights = self.by_lag()
        if isinstance(weights, Tensor):
            return turned(weights, (self._writes - 1) % self._slots)
        return [weights[(self._writes - 1 - row) % self._slots] for row in range(self.filled)]

    def _shares(self, share: float) -> Weights:
        """What each row gets of a share; nothing while there is nothing to remember."""
        if not self.filled:
            return []
        weights = self._by_row()
        return share * weights if isinstance(weights, Tensor) else [share * weight for weight in weights]

    def _refuse_other_sizes(self, vector: Tensor) -> None:
        size = self._table.shape[1] if self._table is not None else 0
        if vector.shape != (size,):
            raise PrivacyError(f"a vector of shape {tuple(vector.shape)} does not fit a memory of {size} entries")

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        state = {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.state_views().items()}
        return state | {"releases": None if self._table is None else self._table[self._order()]}

    def state_views(self) -> dict[str, Any]:
        """The same as `state_dict()` without copies, to be written to a file before the next `write`."""
        return {
            "window": self.window,
            "writes": self._writes,
            "releases": None if self._table is None else [self._table[row] for row in self._order()],  # newest first
        }

    def bytes_when_full(self, size: int) -> int:
        """How much its state will take, for releases of this many entries in float32."""
        return (self._slots + 1) * size * 4

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        if state["window"] != self.window:
            raise PrivacyError(f"the saved memory has window {state['window']}, this one {self.window}")
        self._writes, self._table, releases = int(state["writes"]), None, state["releases"]
        rows = self._order()
        if releases is not None and len(releases) != len(rows):
            raise PrivacyError("the saved memory keeps its releases in another form: load it with the same `compact`")
        if releases is not None and len(releases):
            self._table = _table(self._slots, releases[0].numel(), releases[0])
            for row, release in zip(rows, releases, strict=True):
                self._table[row] = release


def turned(values: Tensor, newest: int) -> Tensor:
    """Values by row as values by lag, where `newest` is the row of lag 1; and values by lag as values by row."""
    return values.flip(0).roll(newest + 1)


def normalised(kernel: Floats) -> Floats:
    """Divided by their sum."""
    total = math.fsum(kernel)
    return [value / total for value in kernel]


def _table(rows: int, size: int, like: Tensor) -> Tensor:
    """Zeroed rows that each begin at a cache line, of the type and on the device of a vector."""
    shape = rows, -(-size // _LINE) * _LINE
    if like.device.type != "cpu":
        return like.new_zeros(shape)[:, :size]
    # NumPy asks for huge pages where the system has them: a large window is read up to twice as fast.
    wanted = math.prod(shape) * like.dtype.itemsize
    memory = np.zeros(wanted + _HUGE_PAGE, np.uint8)
    start = -memory.ctypes.data % (_HUGE_PAGE if wanted > 2 * _HUGE_PAGE else 64)
    return torch.from_numpy(memory[start : start + wanted]).view(like.dtype).view(shape)[:, :size]
