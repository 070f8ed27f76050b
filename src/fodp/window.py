"""The window of a memory: the last releases, kept in a ring and read in one pass."""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.recall import Floats, Recall

_HUGE_PAGE = 1 << 21


class WindowMemory(ABC):
    """A ring of the last K-1 releases; `read()` is their average under `weights`.

    Subclasses give the weights by lag; this class keeps the ring. With `bfloat16` it rounds what it keeps to
    bfloat16: half the memory, and an average off by at most 2⁻⁸ of the weighted absolute values, entry by entry.
    """

    def __init__(self, window: int, *, bfloat16: bool = False):
        self.window = _checks.whole("window", window, maximum=100_000)
        self.bfloat16 = bfloat16
        self._slots = self.window - 1  # rows of the table
        self._table: Tensor | None = None  # the ring, made at the first write
        self._rows: tuple[Tensor, ...] = ()  # its rows
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
        return torch.tensor(self.by_lag(), dtype=torch.float64)

    @abstractmethod
    def by_lag(self) -> Floats:
        """The weights of lags 1, 2, …: what makes one memory differ from another."""

    def read(self, out: Tensor | None = None) -> Tensor | None:
        """The memory state u: the weighted average of past releases, or None when K_t = 1.

        Reading changes nothing. The result never aliases the memory. A bfloat16 memory is read in float32.
        """
        if self._table is None or self.filled == 0:
            return None
        dtype = torch.float32 if self.bfloat16 else self._table.dtype
        out = self._table.new_zeros(self._table.shape[1], dtype=dtype) if out is None else out.zero_()
        Recall(self._table, self._order(), self._by_row()).add_to(out, 1.0)
        return out

    def recall(self) -> Recall | None:
        """The memory state u as a term of a query: worked out as part of the release, in one pass over the window.

        Never use it after the next `write`.
        """
        if self._table is None or self.filled == 0:
            return None
        return Recall(self._table, self._order(), self._by_row())

    def write(self, release: Tensor) -> None:
        """Remember a release (a copy of it) and forget the oldest beyond the window."""
        self._fit(release)
        if self.window > 1:
            self._keep(release)
        self._writes += 1

    def _keep(self, release: Tensor) -> None:
        self._rows[self._writes % self._slots].copy_(release.detach())

    def _order(self) -> list[int]:
        """The rows of lags 1, 2, …: the newest release first."""
        return [(self._writes - lag) % self._slots for lag in range(1, self.filled + 1)]

    def _by_row(self) -> Floats:
        """The weights of the rows in `_order`."""
        return self.by_lag()

    def _fit(self, release: Tensor) -> None:
        """Refuse what is not a release of this memory's size; make the table for the first one."""
        if release.dim() != 1:
            raise PrivacyError(f"a release is one flat vector, got shape {tuple(release.shape)}")
        size = release.numel()
        if self._table is None:
            self._make_table(size, release, torch.bfloat16 if self.bfloat16 else release.dtype)
            assert self._table is not None
        if size != self._table.shape[1]:
            raise PrivacyError(f"a release of {size} entries does not fit {self._table.shape[1]}")

    def _make_table(self, size: int, like: Tensor, dtype: torch.dtype) -> None:
        self._table = _table(self._slots, size, like, dtype)
        self._rows = tuple(self._table[row] for row in range(self._slots))

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        return {
            "window": self.window,
            "bfloat16": self.bfloat16,
            "writes": self._writes,
            "releases": None if self._table is None else self._table[self._order()],  # newest first
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        if state["window"] != self.window:
            raise PrivacyError(f"the saved memory has window {state['window']}, this one {self.window}")
        self._writes, self._table, releases = int(state["writes"]), None, state["releases"]
        rows = self._order()
        if bool(state["bfloat16"]) != self.bfloat16 or (releases is not None and len(releases) != len(rows)):
            raise PrivacyError("the saved memory keeps its releases in another form: load it with the same `compact`")
        if releases is not None:
            self._make_table(releases.shape[1], releases, releases.dtype)
            assert self._table is not None
            self._table[rows] = releases


def normalised(kernel: Floats) -> Floats:
    """Divided by their sum."""
    total = math.fsum(kernel)
    return [value / total for value in kernel]


def _table(rows: int, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeroed rows that each begin at a cache line."""
    line = 32 if dtype == torch.bfloat16 else 16
    shape = rows, -(-size // line) * line
    if like.device.type != "cpu":
        return like.new_zeros(shape, dtype=dtype)[:, :size]
    # NumPy asks for huge pages where the system has them: a large window is read up to twice as fast.
    wanted = math.prod(shape) * dtype.itemsize
    memory = np.zeros(wanted + _HUGE_PAGE, np.uint8)
    start = -memory.ctypes.data % (_HUGE_PAGE if wanted > 2 * _HUGE_PAGE else 64)
    return torch.from_numpy(memory[start : start + wanted]).view(dtype).view(shape)[:, :size]
