"""The compiled loops as Python functions of tensors: the only file that knows ctypes and addresses.

Callers hold the same arithmetic in NumPy or PyTorch, and ask `fodp.kernels.library_for` before they give a tensor here:
nothing below checks a type or a place in memory.
"""

import ctypes
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.autograd.graph import increment_version  # after each writing: PyTorch has not seen it

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float, ctypes.c_int


class Library:
    """The loops of one compiled file; raises OSError or AttributeError if it is not there or lacks one."""

    def __init__(self, path: Path):
        loops = ctypes.CDLL(str(path))
        self._normals = loops.fodp_normals
        self._normals.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _FLOAT]
        self._recall = loops.fodp_recall
        vectors, trend = (_POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE), (_POINTER, _FLOAT, _SIZE)
        self._recall.argtypes = [*vectors, _FLOAT, _INT, *trend, _POINTER, _SIZE]
        self._normals.restype = self._recall.restype = None

    def normals(self, out: Tensor, start: int, count: int, words: npt.NDArray[np.uint8], std: float) -> None:
        """out[start : start + count] ~ N(0, std²), from half as many 64-bit words and then as many 32-bit words."""
        pairs = (count + 1) // 2
        first, source = out.data_ptr() + 4 * start, words.ctypes.data
        self._normals(first, first + 4 * pairs, source, source + 8 * pairs, pairs, count - pairs, std)
        increment_version(out)

    def mix(self, out: Tensor, table: Tensor, weights: list[float]) -> None:
        """out += Σ weight·row over the first rows of a table."""
        self._mixed(out, table, weights, 1.0, 0, None, 0.0, 0, None, 0)

    def mix_and_remember(
        self,
        out: Tensor,
        table: Tensor,
        weights: list[float],
        scale: float | None,
        trend: Tensor,
        gamma: float,
        row: int,
        kept: int,
    ) -> list[float]:
        """out = (scale or 1)·out + Σ weight·row; the new out, or with a scale what it was, goes to `row` and the trend.

        Returns ‖row - trend‖² of the first `kept` rows, then ‖trend‖².
        """
        squares = array("d", bytes(8 * (kept + 1)))
        scaled = (1.0, 0) if scale is None else (scale, 1)
        self._mixed(out, table, weights, *scaled, trend.data_ptr(), gamma, row, squares.buffer_info()[0], kept)
        increment_version((table, trend))
        return squares.tolist()

    def _mixed(self, out: Tensor, table: Tensor, weights: list[float], *rest: float | None) -> None:
        factors = array("f", weights)
        size = table.data_ptr(), table.stride(0), out.numel()
        self._recall(out.data_ptr(), *size, factors.buffer_info()[0], len(factors), *rest)
        increment_version(out)
