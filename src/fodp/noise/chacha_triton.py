"""`fodp.noise.chacha` as one Triton kernel: keystream, Box-Muller and addition, with nothing stored in between.

Kernels have no annotations: Triton compiles those too, and knows no `Any`. A test compiles them to PTX.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fodp.noise.chacha import NORMALS_PER_BLOCK, key_words, refuse_outside

_BLOCKS = 256  # of the keystream in one program


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
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
def _store_pair(out, number, size, high, low, angle, std, to_second: tl.constexpr):  # type: ignore[no-untyped-def]
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


@triton.jit
def _block(k0, k1, k2, k3, k4, k5, k6, k7, counter):  # type: ignore[no-untyped-def]
    """The sixteen words of each counter's block (RFC 8439, nonce zero)."""
    zero = tl.zeros_like(counter)
    s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    s4, s5, s6, s7 = zero + k0.to(tl.uint32), zero + k1.to(tl.uint32), zero + k2.to(tl.uint32), zero + k3.to(tl.uint32)
    s8, s9 = zero + k4.to(tl.uint32), zero + k5.to(tl.uint32)
    s10, s11 = zero + k6.to(tl.uint32), zero + k7.to(tl.uint32)
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
    first = x0 + s0, x1 + s1, x2 + s2, x3 + s3, x4 + s4, x5 + s5, x6 + s6, x7 + s7
    return first, (x8 + s8, x9 + s9, x10 + s10, x11 + s11, x12 + counter, x13, x14, x15)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "first", "skipped", "size"])  # type: ignore[untyped-decorator]
def _add(out, std, k0, k1, k2, k3, k4, k5, k6, k7, first, skipped, size, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    low, high = _block(k0, k1, k2, k3, k4, k5, k6, k7, (row + first).to(tl.uint32))
    number = row * 10 - skipped
    # A block's words: five high halves of radii, five low ones, five angles; the sixteenth is not used.
    _store_pair(out, number, size, low[0], low[5], high[2], std, 5)
    _store_pair(out, number + 1, size, low[1], low[6], high[3], std, 5)
    _store_pair(out, number + 2, size, low[2], low[7], high[4], std, 5)
    _store_pair(out, number + 3, size, low[3], high[0], high[5], std, 5)
    _store_pair(out, number + 4, size, low[4], high[1], high[6], std, 5)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "first", "blocks"])  # type: ignore[untyped-decorator]
def _words(out, k0, k1, k2, k3, k4, k5, k6, k7, first, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    low, high = _block(k0, k1, k2, k3, k4, k5, k6, k7, (row + first).to(tl.uint32))
    for i in tl.static_range(8):
        tl.store(out + row * 16 + i, low[i].to(tl.int32, bitcast=True), mask=row < blocks)
        tl.store(out + row * 16 + 8 + i, high[i].to(tl.int32, bitcast=True), mask=row < blocks)


def keystream(key: bytes, first: int, blocks: int, device: torch.device | str) -> Tensor:
    """What `fodp.noise.chacha.keystream` makes, by the block function of the kernel: for comparisons."""
    out = torch.empty(blocks, 16, dtype=torch.int32, device=device)
    _words[(triton.cdiv(blocks, _BLOCKS),)](out, *key_words(key), first, blocks, BLOCKS=_BLOCKS)
    return out


def add_normals_(out: Tensor, std: float, key: bytes, offset: int = 0) -> None:
    """Add numbers offset, offset + 1, … of the stream of N(0, std²) under `key` to `out`, contiguous float32."""
    if out.dtype != torch.float32:
        from fodp.noise.chacha import reference_

        reference_(out, std, key, offset)
        return
    each, size = NORMALS_PER_BLOCK[torch.float32], out.numel()
    first, skipped = divmod(offset, each)
    blocks = -(-(skipped + size) // each)
    refuse_outside(key, first, blocks)
    _add[(triton.cdiv(blocks, _BLOCKS),)](out, std, *key_words(key), first, skipped, size, BLOCKS=_BLOCKS)
