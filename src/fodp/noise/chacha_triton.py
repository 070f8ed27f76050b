"""`fodp.noise.chacha` as one Triton kernel: keystream, Box-Muller and addition, with nothing stored in between."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fodp.noise.chacha import NORMALS_PER_BLOCK, state

_BLOCKS = 256  # of the keystream in one program


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x: Any, bits: tl.constexpr) -> Any:
    return (x << bits) | (x >> (32 - bits))


@triton.jit  # type: ignore[untyped-decorator]
def _quarter(a: Any, b: Any, c: Any, d: Any) -> Any:
    a += b
    d = _turn(d ^ a, 16)
    c += d
    b = _turn(b ^ c, 12)
    a += b
    d = _turn(d ^ a, 8)
    c += d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator]
def _store_pair(
    out: Any, number: Any, size: Any, high: Any, low: Any, angle: Any, std: Any, to_second: tl.constexpr
) -> None:
    # The same arithmetic as `fodp.noise.chacha._minus_log`: u near 1 by the bits of 1-u.
    small = (high.to(tl.float32) * 4294967296.0 + low.to(tl.float32) + 0.5) * 5.421010862427522e-20
    rest = ((~high).to(tl.float32) * 4294967296.0 + (~low).to(tl.float32) + 0.5) * 5.421010862427522e-20
    # log1p(-x) for x in (0, ½]: (1-x) rounds to y, and log(y)·x/(1-y) mends that rounding (Kahan).
    y = 1.0 - rest
    near_one = tl.where(y == 1.0, rest, -tl.log(y) * (rest / tl.where(y == 1.0, 1.0, 1.0 - y)))
    radius = tl.sqrt(2.0 * tl.where((high >> 31) == 0, -tl.log(small), near_one)) * std
    turn = angle.to(tl.int32, bitcast=True).to(tl.float32) * 1.4629180792671596e-09  # π / 2³¹
    first = (number >= 0) & (number < size)
    second = (number + to_second >= 0) & (number + to_second < size)
    tl.store(out + number, tl.load(out + number, mask=first) + radius * tl.cos(turn), mask=first)
    place = out + number + to_second
    tl.store(place, tl.load(place, mask=second) + radius * tl.sin(turn), mask=second)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "first", "skipped", "size"])  # type: ignore[untyped-decorator]
def _add(out: Any, std: Any, k0: Any, k1: Any, k2: Any, k3: Any, k4: Any, k5: Any, k6: Any, k7: Any, first: Any, skipped: Any, size: Any, BLOCKS: tl.constexpr) -> None:  # fmt: skip  # noqa: E501
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    counter = (row + first).to(tl.uint32)
    zero = tl.zeros((BLOCKS,), tl.uint32)
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5, s6, s7 = zero + k0.to(tl.uint32), zero + k1.to(tl.uint32), zero + k2.to(tl.uint32), zero + k3.to(tl.uint32)
    s8, s9, s10, s11 = (
        zero + k4.to(tl.uint32),
        zero + k5.to(tl.uint32),
        zero + k6.to(tl.uint32),
        zero + k7.to(tl.uint32),
    )
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, counter, zero, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    number = row * 10 - skipped
    # A block's words: five high halves of radii, five low ones, five angles; the sixteenth is not used.
    _store_pair(out, number, size, x0 + s0, x5 + s5, x10 + s10, std, 5)
    _store_pair(out, number + 1, size, x1 + s1, x6 + s6, x11 + s11, std, 5)
    _store_pair(out, number + 2, size, x2 + s2, x7 + s7, x12 + counter, std, 5)
    _store_pair(out, number + 3, size, x3 + s3, x8 + s8, x13, std, 5)
    _store_pair(out, number + 4, size, x4 + s4, x9 + s9, x14, std, 5)


def add_normals_(out: Tensor, std: float, key: bytes, offset: int = 0) -> None:
    """Add numbers offset, offset + 1, … of the stream of N(0, std²) under `key` to `out`, contiguous float32."""
    if out.dtype != torch.float32:
        from fodp.noise.chacha import reference_

        reference_(out, std, key, offset)
        return
    each, size = NORMALS_PER_BLOCK[torch.float32], out.numel()
    first, skipped = divmod(offset, each)
    blocks = -(-(skipped + size) // each)
    words = state(key)[4:12]
    _add[(triton.cdiv(blocks, _BLOCKS),)](out, std, *words, first, skipped, size, BLOCKS=_BLOCKS)
