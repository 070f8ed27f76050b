"""Keystreams: AES-256 in counter mode, each under a key of its own, so that every counter can start at zero."""

from typing import Final

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

MARGIN: Final = 16  # bytes a buffer has to spare: `cryptography` may ask for room for one block more than it writes
_BLOCK: Final = 16  # bytes that one value of the counter makes
_ZEROS: Final = memoryview(bytes(1 << 19))  # the keystream is the encryption of zeros


def encrypted(key: bytes, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """AES-256 of each block of 16 bytes, [n, 16], under this key: a function of the block alone."""
    out = np.empty(blocks.size + MARGIN, dtype=np.uint8)
    cipher = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    cipher.update_into(np.ascontiguousarray(blocks).reshape(-1).data, out.data)
    return out[: blocks.size].reshape(blocks.shape)


class Keystream:
    """The pseudo-random bytes of a 32-byte key, one after another, made by `cryptography`."""

    def __init__(self, key: bytes):
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(_BLOCK))).encryptor()

    def fill(self, buffer: npt.NDArray[np.uint8], size: int) -> None:
        """Write the next bytes to the beginning of a buffer that is larger than `size` by the margin."""
        for start in range(0, size, len(_ZEROS)):
            part = min(len(_ZEROS), size - start)
            self._cipher.update_into(_ZEROS[:part], buffer[start : start + part + MARGIN].data)
