"""The random words of a lot: AES-256 of (record, number of the draw, place within the record's part)."""

import copy
import hashlib
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fodp.errors import PrivacyError

Words = npt.NDArray[np.uint32]

_DRAW_BITS: Final = 24  # draws in one pass; the other 40 bits of a half block name the record
_WORDS_AT_ONCE: Final = 1 << 21  # 8 MiB of words and as many counters


class Unkeyable(PrivacyError):
    """What is drawn here cannot be given to records; the site must run one record at a time."""


class DerivedKeys(Protocol):
    """What is needed of `fodp.noise.Streams`: a key for each (step, name), the same whenever it is asked for."""

    def record_key(self, step: int, name: str) -> bytes:
        """32 bytes that belong to (key, step, name) alone."""


class Source:
    """The random words of one lot in one step."""

    def __init__(self, streams: DerivedKeys, step: int, name: str):
        self.step, self._name = step, name
        self._streams: DerivedKeys | None = streams
        self._parts: dict[str, Source] = {}
        self._ciphers: dict[str, Any] = {}

    @cached_property
    def _keys(self) -> dict[str, bytes]:
        """Derived when something is drawn: most models draw nothing."""
        assert self._streams is not None
        return {kind: self._streams.record_key(self.step, f"{self._name}.{kind}") for kind in ("record", "lot")}

    def __getstate__(self) -> dict[str, Any]:
        """Copies, as those for worker processes, have the keys of this lot and not what they are derived from."""
        return vars(self) | {"_keys": self._keys, "_streams": None, "_parts": {}, "_ciphers": {}}

    def of(self, site: str) -> "Source":
        """The words of one site: what an augmentation draws for a record tells nothing of what the model draws."""
        if site not in self._parts:
            part = self._parts[site] = copy.copy(self)
            part._keys = {kind: _subkey(key, site) for kind, key in self._keys.items()}
        return self._parts[site]

    def words(self, records: npt.NDArray[np.int64], draw: int, shape: Sequence[int], each: int) -> Words:
        """`each` uniform 32-bit words for every place of every record, [records, *shape, each]."""
        return self._words("record", records, draw, shape, each)

    def shared(self, draw: int, shape: Sequence[int], each: int) -> Words:
        """Words that are the same whoever is in the lot, [*shape, each]."""
        return self._words("lot", np.zeros(1, np.int64), draw, shape, each)[0]

    def seed(self, record: int, when: str) -> bytes:
        """A seed for generators that are not PyTorch's: a record's own, another one for each part of a pass."""
        place = record.to_bytes(8, "little") + when.encode()
        return hashlib.blake2b(place, digest_size=32, key=self._keys["record"]).digest()

    def _words(self, kind: str, records: npt.NDArray[np.int64], draw: int, shape: Sequence[int], each: int) -> Words:
        *outer, last = shape or (1,)
        blocks = -(-last * each // 4)  # of four words, along the last dimension
        bits = 64 // (len(outer) + 1)
        if draw >> _DRAW_BITS or max(outer, default=0) >> bits or blocks >> bits or (records >> 64 - _DRAW_BITS).any():
            raise Unkeyable(f"a draw of shape {tuple(shape)} has more places than counters")
        places = _places((*outer, blocks), bits % 64)
        owners = (records.astype(np.uint64) << np.uint64(_DRAW_BITS)) + np.uint64(draw)
        rows = max(1, _WORDS_AT_ONCE // max(1, 4 * len(places)))
        parts = [self._encrypted(kind, places, owners[at : at + rows]) for at in range(0, len(records), rows)]
        words = parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, len(places), 4), np.uint32), *parts])
        out = words.reshape(len(records), math.prod(outer), 4 * blocks)[..., : last * each]
        return out.reshape(len(records), *shape, each)

    def _encrypted(self, kind: str, places: npt.NDArray[np.uint64], owners: npt.NDArray[np.uint64]) -> Words:
        """AES of (place, owner) for every pair of them, [owners, places, 4]."""
        counters = np.empty((len(owners), len(places), 2), "<u8")
        counters[..., 0], counters[..., 1] = places, owners[:, None]
        cipher_text = np.empty(counters.nbytes + 16, np.uint8)
        if kind not in self._ciphers:
            self._ciphers[kind] = Cipher(algorithms.AES256(self._keys[kind]), modes.ECB()).encryptor()
        self._ciphers[kind].update_into(counters.reshape(-1).view(np.uint8).data, cipher_text.data)
        return cipher_text[: counters.nbytes].view("<u4").reshape(len(owners), len(places), 4)


@lru_cache(maxsize=64)
def _places(sizes: tuple[int, ...], bits: int) -> npt.NDArray[np.uint64]:
    """One number for each place: an index for each dimension, side by side in the bits of the number."""
    places = np.zeros(1, np.uint64)
    for size in sizes:
        places = np.add.outer(places << np.uint64(bits), np.arange(size, dtype=np.uint64)).ravel()
    return places


def _subkey(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32, key=key, person=b"fodp.site").digest()
