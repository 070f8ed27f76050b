"""The window of a memory: the last releases, kept in a ring and read in one pass."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fodp import _checks
from fodp._checks import PrivacyError
from fodp.recall import Floats, Recall


class WindowMemory(ABC):
    """A ring of the last K-1 releases; `read()` is their average under `weights`.

    Subclasses give the weights by lag; this class keeps the ring. With `bfloat16` it rounds what it keeps to
    bfloat16: half the memory, and an average off by at most 2⁻⁸ of the weighted absolute values, entry by entry.
    """

    _scored = False  # whether a trend is followed

    def __init__(self, window: int, *, bfloat16: bool = False):
        self.window = _checks.whole("window", window, maximum=100_000)
        self.bfloat16 = bfloat16
        self._kept = self.window - 1  # rows of the ring
        self._table: Tensor | None = None  # a row of the trend if `_leading`, then the ring's; made at the first write
        self._writes = 0
        self._recall: Recall | None = None

    @property
    def _leading(self) -> int:
        """Rows before the ring's: the trend, which is read in the same pass unless the ring is rounded."""
        return int(self._scored and not self.bfloat16)

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
        return torch.from_numpy(self._by_lag())

    @abstractmethod
    def _by_lag(self) -> Floats:
        """The weights of lags 1, 2, …: what makes one memory differ from another."""

    def read(self, out: Tensor | None = None) -> Tensor | None:
        """The memory state u: the weighted average of past releases, or None when K_t = 1.

        Reading changes nothing. The result never aliases the memory. A bfloat16 memory is read in float32.
        """
        recall = self._recalled()
        if recall is None or self._table is None:
            return None
        dtype = torch.float32 if self.bfloat16 else self._table.dtype
        out = self._table.new_zeros(self._table.shape[1], dtype=dtype) if out is None else out.zero_()
        recall.add_to(out, 1.0)
        return out

    def recall(self) -> Recall | None:
        """The memory state u as a term of a query: worked out as part of the release, in one pass over the window.

        The inner products that `write` needs are taken on the way. Never use it after the next `write`.
        """
        self._recall = self._recalled(self._scored)
        return self._recall

    def _recalled(self, take_products: bool = False) -> Recall | None:
        if self._table is None or self.filled == 0:
            return None
        weights = self._by_row()
        return Recall(self._table[: len(weights)], weights, take_products)

    def _by_row(self) -> Floats:
        weights = np.zeros(self._leading + self.filled)
        weights[self._leading :][self._rows()] = self._by_lag()
        return weights

    def write(self, release: Tensor) -> None:
        """Remember a release (a copy of it) and forget the oldest beyond the window."""
        self._fit(release)
        if self.window > 1:
            self._ring()[self._writes % (self.window - 1)] = release
        self._writes += 1
        self._recall = None

    def _fit(self, release: Tensor) -> None:
        """Refuse what is not a release of this memory's size; make the table for the first one."""
        if release.dim() != 1:
            raise PrivacyError(f"a release is one flat vector, got shape {tuple(release.shape)}")
        size = release.numel()
        if self._table is None:
            dtype = torch.bfloat16 if self.bfloat16 else release.dtype
            self._table = _table(self._leading + self._kept, size, release, dtype)
        if size != self._table.shape[1]:
            raise PrivacyError(f"a release of {size} entries does not fit {self._table.shape[1]}")

    def _ring(self) -> Tensor:
        assert self._table is not None
        return self._table[self._leading :]

    def _rows(self) -> list[int]:
        """The ring rows of lags 1, 2, …: the newest release first."""
        return [(self._writes - lag) % (self.window - 1) for lag in range(1, self.filled + 1)]

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on elsewhere, bit for bit."""
        return {
            "window": self.window,
            "bfloat16": self.bfloat16,
            "writes": self._writes,
            "ring": None if self._table is None else self._ring().clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of a memory with the same settings."""
        if state["window"] != self.window:
            raise PrivacyError(f"the saved memory has window {state['window']}, this one {self.window}")
        ring = state["ring"]
        if state.get("bfloat16", False) != self.bfloat16 or (ring is not None and len(ring) != self._kept):
            raise PrivacyError("the saved memory keeps its releases in another form: load it with the same `compact`")
        self._writes, self._table, self._recall = int(state["writes"]), None, None
        if ring is not None:
            self._table = _table(self._leading + len(ring), ring.shape[1], ring, ring.dtype)
            self._ring().copy_(ring)


def _table(rows: int, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeroed rows that each begin at a cache line's multiple from the first."""
    line = 32 if dtype == torch.bfloat16 else 16
    return like.new_zeros(rows, -(-size // line) * line, dtype=dtype)[:, :size]
