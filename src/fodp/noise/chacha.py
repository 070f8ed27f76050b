"""Gaussian noise made on an accelerator: a ChaCha20 keystream and Box-Muller, on the device that adds them.

The CPU makes noise from AES (`fodp.noise.keystream`), which its processors compute by themselves; accelerators do
not, and ChaCha20 is sums, rotations and exclusive ors of 32-bit words. Each stream has a key of its own, derived from
(key, step, name) as for AES, so nonces are zero and the counter starts at zero.

A block of the keystream is 64 bytes, 16 words, and makes ten float32 normals (a pair takes 64 bits for its radius
and 32 for its angle) or eight float64 ones (64 bits for the angle). So number i of a stream needs block i // 10 and
nothing else, and any slice of a vector can be drawn by whoever holds it.

`reference_` is plain tensor operations and runs on every device. Long vectors are made by `torch.compile`'s version of
the same operations, where that works: the version is compared with them once, and if it fails or differs, the plain
operations are taken. Logarithms and cosines of
devices and compilers differ in their last bits, and so do normals; the keystream never does.
The key is handed to the device: who can read the device's memory can read the noise (docs/threat-model.md).
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Final

import torch
from torch import Tensor

from fodp.errors import PrivacyError

_WORDS: Final = 16  # of 32 bits in a block
_CONSTANTS: Final = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_COLUMNS: Final = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS: Final = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
_ROTATIONS: Final = (16, 12, 8, 7)
_MOST_BLOCKS: Final = 2**32  # the counter of RFC 8439 has 32 bits: 256 GiB of one stream
_WORTH_COMPILING: Final = 2**20  # numbers: compiling takes a while
_LAST_BITS: Final = 1e-4  # of normals, none of which is above 9.5
_AT_ONCE: Final = 2**18  # blocks: 64 bytes each, and about as much again while they are made

Make = Callable[[Tensor, Tensor, torch.dtype], Tensor]

NORMALS_PER_BLOCK: Final = {torch.float32: 10, torch.float64: 8}


def keystream(key: bytes, first: int, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """Blocks first, first + 1, … of ChaCha20 (RFC 8439, nonce zero) as signed 32-bit words, one block a row."""
    refuse_outside(key, first, blocks)
    return _blocks(*_inputs(key, first, blocks, torch.device(device)))


def _inputs(key: bytes, first: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The words that blocks begin with, and their counters, on the device.

    Tensors, and never numbers: a compiler writes the numbers that it meets into code, and code into files.
    """
    words = torch.tensor([_signed(word) for word in state(key)], dtype=torch.int32).to(device, non_blocking=True)
    # Counters wrap in 32 bits as everything here does: they are made in 64 and cut.
    return words, _cut(torch.arange(first, first + blocks, dtype=torch.int64, device=device))


def _blocks(words: Tensor, counters: Tensor) -> Tensor:
    start = list(words.unbind())
    start[12] = counters
    rows = list(start)
    for _ in range(10):
        for quarter in (*_COLUMNS, *_DIAGONALS):
            _quarter_round(rows, *quarter)
    return torch.stack([row + word for row, word in zip(rows, start, strict=True)], dim=1)


def state(key: bytes) -> tuple[int, ...]:
    """The sixteen words a block begins with: constants, key, counter and nonce, the last two zero."""
    return (*_CONSTANTS, *(int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)), 0, 0, 0, 0)


def reference_(out: Tensor, std: float, key: bytes, offset: int = 0) -> Tensor:
    """Add numbers offset, offset + 1, … of the stream of N(0, std²) under `key` to `out`, which is contiguous."""
    return _added(out, std, key, offset, _eager)


def _eager(words: Tensor, counters: Tensor, dtype: torch.dtype) -> Tensor:
    return _normals(_blocks(words, counters), dtype)


def _added(out: Tensor, std: float, key: bytes, offset: int, make: Make) -> Tensor:
    each = _normals_per_block(out.dtype)
    flat, done = out.view(-1), 0
    while done < flat.numel():
        block, skipped = divmod(offset + done, each)
        wanted = min(flat.numel() - done, _AT_ONCE * each - skipped)
        blocks = -(-(skipped + wanted) // each)
        refuse_outside(key, block, blocks)
        normals = make(*_inputs(key, block, blocks, out.device), out.dtype)
        flat[done : done + wanted].add_(normals.view(-1)[skipped : skipped + wanted], alpha=std)
        done += wanted
    return out


def add_normals_(out: Tensor, std: float, key: bytes, offset: int = 0) -> Tensor:
    """The same, for long vectors by compiled tensor operations where these work."""
    if out.numel() >= _WORTH_COMPILING and (make := _compiled(out.device, out.dtype)) is not None:
        return _added(out, std, key, offset, make)
    return reference_(out, std, key, offset)


@cache
def _compiled(device: torch.device, dtype: torch.dtype) -> Make | None:
    """`torch.compile`'s version for a device, compared once with the operations themselves; None where there is none.

    The comparison reads the device, once in a process. A wrong bit of keystream would be another normal altogether.
    """
    try:
        made = torch.compile(_eager, dynamic=True, fullgraph=True)
        sample = _inputs(bytes(range(32)), 2**31 - 1000, 4096, device)
        if torch.allclose(made(*sample, dtype), _eager(*sample, dtype), rtol=0, atol=_LAST_BITS):
            return made
    except Exception:  # a compiler may be missing, unable or broken in any way, and the run goes on without it
        return None
    return None


def _normals(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of keystream (n, 16) to normals (n, 10) or (n, 8): first all r·cos(a) of a block, then all r·sin(a)."""
    pairs = _normals_per_block(dtype) // 2
    high, low = words[:, :pairs], words[:, pairs : 2 * pairs]
    radius = _minus_log(high, low, dtype).mul_(2).sqrt_()
    angle = words[:, 2 * pairs : 3 * pairs].to(dtype)
    if dtype == torch.float64:
        angle += _unsigned(words[:, 3 * pairs : 4 * pairs], dtype) * 2.0**-32
    angle *= math.pi * 2.0**-31
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)


def _minus_log(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
    """-ln u of u = (word + ½) / 2⁶⁴, exact to a few roundings for u near 0 and near 1: radii reach 9.4.

    Near 1 a float holds u too coarsely, so 1-u is made of the complement's bits; no device needs float64 for it.
    """
    small = (_unsigned(high, dtype) * 2.0**32 + _unsigned(low, dtype) + 0.5) * 2.0**-64
    rest = (_unsigned(~high, dtype) * 2.0**32 + _unsigned(~low, dtype) + 0.5) * 2.0**-64
    return torch.where(high >= 0, -small.log(), -torch.log1p(-rest))  # the sign bit says whether u is below one half


def _unsigned(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Signed 32-bit words as the unsigned numbers their bits are; halves are exact, so there is one rounding."""
    return ((words >> 16) & 0xFFFF).to(dtype) * 65536.0 + (words & 0xFFFF).to(dtype)


def refuse_outside(key: bytes, first: int, blocks: int) -> None:
    """Raise for blocks that a stream does not have: their counters would begin again, and so would the noise."""
    if len(key) != 32:
        raise PrivacyError(f"a key has 32 bytes, got {len(key)}")
    if first < 0 or blocks < 0 or first + blocks > _MOST_BLOCKS:
        raise PrivacyError(f"blocks {first} to {first + blocks} are not within the {_MOST_BLOCKS} of one stream")


def _quarter_round(rows: list[Tensor], a: int, b: int, c: int, d: int) -> None:
    for bits, (to, by, turned) in zip(_ROTATIONS, ((a, b, d), (c, d, b), (a, b, d), (c, d, b)), strict=True):
        rows[to] = rows[to] + rows[by]  # int32 wraps, as ChaCha's words do
        mixed = rows[turned] ^ rows[to]
        rows[turned] = (mixed << bits) | ((mixed >> (32 - bits)) & ((1 << bits) - 1))  # >> copies the sign: cut it off


def _cut(counters: Tensor) -> Tensor:
    return ((counters + 2**31) % 2**32 - 2**31).to(torch.int32)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _normals_per_block(dtype: torch.dtype) -> int:
    if dtype not in NORMALS_PER_BLOCK:
        raise PrivacyError(f"noise needs a float32 or float64 tensor, got {dtype}; draw in float32 and convert")
    return NORMALS_PER_BLOCK[dtype]
