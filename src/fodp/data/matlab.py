"""Plain numeric arrays of a MATLAB 5 file.

SciPy's reader trusts what the file says: a single damaged byte can end the whole process with a
segmentation fault, and a crafted file might do worse. This one is small and checks every length.
Format: "MAT-File Format", The MathWorks, chapter 1.
"""

import struct
import zlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

MATRIX, COMPRESSED = 14, 15
STORED_TYPES = {
    1: "i1",
    2: "u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
}
NUMERIC_CLASSES = range(6, 16)  # from double to uint64; others are text, structures and objects
COMPLEX_FLAG = 0x800
LARGEST_VARIABLE = 512 * 2**20  # bytes; SVHN's larger one has 225 MB


def read_variables(content: bytes) -> dict[str, NDArray[Any]]:
    """All real numeric arrays by name, in the type they are stored as; other variables are passed over."""
    if content[124:128] != b"\x00\x01IM":
        raise ValueError("not a MATLAB 5 file")
    found = {}
    for kind, data in _elements(memoryview(content)[128:], padded=False):
        if kind == COMPRESSED:
            kind, data = next(_elements(memoryview(_decompress(data)), padded=False))
        if kind == MATRIX:
            found.update(_matrix(data))
    return found


def _elements(data: memoryview, *, padded: bool) -> Iterator[tuple[int, memoryview]]:
    """Type and content of one element after the other; inside a matrix they start at multiples of 8 bytes."""
    position = 0
    while position < len(data):
        kind, size = struct.unpack_from("<II", data, position)
        if kind >> 16:  # at most four bytes are packed into the tag itself
            start, size, kind = position + 4, min(kind >> 16, 4), kind & 0xFFFF
            position += 8
        else:
            start = position + 8
            position = start + size + (-size % 8 if padded else 0)
        if start + size > len(data):
            raise ValueError("ends in the middle of a variable")
        yield kind, data[start : start + size]


def _decompress(data: memoryview) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(data, LARGEST_VARIABLE)
    if not stream.eof:
        raise ValueError("a variable is truncated or too large")
    return content


def _matrix(data: memoryview) -> dict[str, NDArray[Any]]:
    parts = list(islice(_elements(data, padded=True), 4))
    if len(parts) < 4:
        return {}
    (_, flags), (_, sides), (_, name), (kind, values) = parts
    (description,) = struct.unpack_from("<I", flags)
    if description & 0xFF not in NUMERIC_CLASSES or description & COMPLEX_FLAG or kind not in STORED_TYPES:
        return {}
    shape = [side for (side,) in struct.iter_unpack("<I", sides)]  # a negative side becomes an impossible one
    return {str(name, "latin1"): np.frombuffer(values, dtype=STORED_TYPES[kind]).reshape(shape, order="F")}
