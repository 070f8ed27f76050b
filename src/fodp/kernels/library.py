"""The compiled loops as Python functions of tensors: the only file that knows ctypes and addresses.

Callers hold the same arithmetic in NumPy or PyTorch, and ask `fodp.kernels.can_read` before they give a tensor here:
nothing below checks a type or a place in memory.
"""

import ctypes
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
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
        self._square_sums = loops.fodp_square_sums
        self._square_sums.argtypes = [_POINTER, _POINTER, _SIZE, _SIZE]
        self._table_squares = loops.fodp_table_squares
        self._table_squares.argtypes = [*[_POINTER] * 4, *[_SIZE] * 3, _POINTER, _SIZE, _POINTER]
        self._scatter = loops.fodp_scatter
        self._scatter.argtypes = [_POINTER, _SIZE, *[_POINTER] * 3, *[_SIZE] * 3]
        for loop in (self._normals, self._recall, self._square_sums, self._table_squares):
            loop.restype = None

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

    def square_sums(self, rows: Tensor) -> Tensor:
        """Squared norms of the rows of a matrix, in float64 without a copy in float64."""
        squares = torch.empty(len(rows), dtype=torch.float64)
        self._square_sums(squares.data_ptr(), rows.data_ptr(), *rows.shape)
        return squares

    def table_squares(self, indices: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Squared norms of an embedding's gradients, and Σ_t ‖back_t‖ of the examples in which a token comes twice."""
        count, length, width = back.shape
        squares, mass = torch.empty(2, count, dtype=torch.float64)
        slots = np.empty(4 << length.bit_length(), np.int32)  # a hash table, at most half full
        sums = np.empty((length, width), np.float32)
        tensors = (tensor.data_ptr() for tensor in (squares, mass, indices, back))
        self._table_squares(*tensors, count, length, width, slots.ctypes.data, len(slots) - 1, sums.ctypes.data)
        return squares, mass

    def scatter(self, out: Tensor, indices: Tensor, back: Tensor, weights: Tensor) -> bool:
        """out[index_{i,t}] += weight_i·back_{i,t}; False, and out half written, at an index beyond the table."""
        sources = (tensor.data_ptr() for tensor in (indices, back, weights))
        done = self._scatter(out.data_ptr(), len(out), *sources, *back.shape)
        increment_version(out)
        return bool(done)
