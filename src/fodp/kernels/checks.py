"""Whether a compiled library does what its sources say: every loop against NumPy, in float64."""

import numpy as np
import torch
from torch import Tensor

from fodp.kernels.library import Library


def is_right(found: Library) -> bool:
    """Whether the compiled loops give what NumPy gives in float64."""
    numbers = np.random.default_rng(0)
    recalls = (_recall_right(found, numbers, scale, gamma) for scale in (None, 0.7) for gamma in (0.3, 0.7))
    return all(recalls) and _normals_right(found, numbers)


def _normals_right(found: Library, numbers: np.random.Generator) -> bool:
    """An odd number of them; words far into the tail, and the largest and smallest."""
    pairs, count = 3011, 6021
    words, turns = numbers.integers(-(2**63), 2**63, pairs), numbers.integers(-(2**31), 2**31, pairs, dtype=np.int32)
    words[:40] >>= np.arange(40)
    words[40:43], turns[:3] = (0, 2**63 - 1, -(2**63)), (-(2**31), 2**31 - 1, 0)
    normals = torch.full((count + 2,), 7.0)
    found.normals(normals, 1, count, np.concatenate([words.view(np.uint8), turns.view(np.uint8)]), 3.0)
    radius = 3 * np.sqrt(-2 * np.log((np.abs(words.astype(np.float64)) + 0.5) * 2.0**-63))
    angle = turns * (np.pi / 2**31)
    expected = np.concatenate([radius * np.cos(angle), (radius * np.sin(angle))[:-1]])
    allowed = 1e-6 * np.concatenate([radius, radius[:-1]]) + 1e-7
    inside = bool(np.all(np.abs(normals[1:-1].numpy() - expected) <= allowed))
    return inside and normals[[0, -1]].tolist() == [7.0, 7.0]


def _floats(numbers: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(numbers.standard_normal(shape, np.float32))


def _recall_right(found: Library, numbers: np.random.Generator, scale: float | None, gamma: float) -> bool:
    """More rows than one round of a loop, more columns than one chunk; the newest goes over a row that is mixed in."""
    out, trend, table = _floats(numbers, 5003), _floats(numbers, 5003), _floats(numbers, 12, 5008)[:, :5003]
    weights, row, kept = numbers.standard_normal(11).astype(np.float32).tolist(), 5, 11
    start, before, memory = (tensor.double().numpy() for tensor in (out, trend, table.clone()))
    mixed = (scale or 1) * start + weights @ memory[:11]
    release = mixed if scale is None else start
    alone = out.clone()
    found.mix(alone, table, weights)
    squares = found.mix_and_remember(out, table, weights, scale, trend, gamma, row, kept)
    followed = before + gamma * (release - before)
    memory[row] = release
    expected = [*((memory[:kept] - followed) ** 2).sum(1), (followed**2).sum()]
    return (
        np.allclose(alone.numpy(), start + mixed - (scale or 1) * start, rtol=1e-5, atol=1e-5)
        and np.allclose(out.numpy(), mixed, rtol=1e-5, atol=1e-5)
        and np.allclose(table.numpy(), memory, rtol=1e-5, atol=1e-5)
        and np.allclose(trend.numpy(), followed, rtol=1e-5, atol=1e-5)
        and np.allclose(squares, expected, rtol=1e-5)
    )
