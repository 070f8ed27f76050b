"""Keystreams: AES-256 in counter mode, each under a key of its own, so that every counter can start at zero."""

from ctypes import CDLL
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fodp import kernels

Bytes = npt.NDArray[np.uint8]

MARGIN: Final = 16  # bytes a buffer has to spare: `cryptography` may ask for room for one block more than it writes
_ZEROS: Final = memoryview(bytes(1 << 19))  # the keystream is the encryption of zeros


class Keystream(Protocol):
    """Pseudo-random bytes, one after another."""

    def fill(self, buffer: Bytes, size: int) -> None:
        """Write the next bytes to the beginning of a buffer that is larger than `size` by the margin.

        A size that is no multiple of 16 is the last one.
        """


def keystream(key: bytes, *, secret: bool) -> Keystream:
    """The keystream of a 32-byte key. A secret key is given to no code but the library's."""
    library = None if secret else kernels.library()
    if library is None or not library.fodp_keystream(None, 0, key, 0):  # a processor without the instructions
        return _OfLibrary(key)
    return _Compiled(library, key)


class _OfLibrary:
    """By `cryptography`."""

    def __init__(self, key: bytes):
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, buffer: Bytes, size: int) -> None:
        for start in range(0, size, len(_ZEROS)):
            part = min(len(_ZEROS), size - start)
            self._cipher.update_into(_ZEROS[:part], buffer[start : start + part + MARGIN].data)


class _Compiled:
    """The same bytes for keys that are no secret: the library takes longer to begin a stream than for a short one."""

    def __init__(self, library: CDLL, key: bytes):
        self._library, self._key, self._block = library, key, 0

    def fill(self, buffer: Bytes, size: int) -> None:
        self._library.fodp_keystream(buffer.ctypes.data, size, self._key, self._block)
        self._block += size // 16
