"""Whether a compiled library does what its sources say: every loop against NumPy, in float64."""

import ctypes

import numpy as np


def is_right(found: ctypes.CDLL) -> bool:
    """Whether the compiled loops give what NumPy gives in float64."""
    numbers = np.random.default_rng(0)
    pairs, seconds = 3011, 3010
    words, turns = numbers.integers(-(2**63), 2**63, pairs), numbers.integers(-(2**31), 2**31, pairs, dtype=np.int32)
    words[:40] >>= np.arange(40)  # far into the tail
    words[40:43], turns[:3] = (0, 2**63 - 1, -(2**63)), (-(2**31), 2**31 - 1, 0)
    normals = np.empty(pairs + seconds, np.float32)
    second = normals[pairs:].ctypes.data
    found.fodp_normals(normals.ctypes.data, second, words.ctypes.data, turns.ctypes.data, pairs, seconds, 3.0)
    radius = 3 * np.sqrt(-2 * np.log((np.abs(words.astype(np.float64)) + 0.5) * 2.0**-63))
    angle = turns * (np.pi / 2**31)
    expected = np.concatenate([radius * np.cos(angle), (radius * np.sin(angle))[:seconds]])
    allowed = 1e-6 * np.concatenate([radius, radius[:seconds]]) + 1e-7
    normals_right = bool(np.all(np.abs(normals - expected) <= allowed))
    return normals_right and _recalls_right(found, numbers) and _tables_right(found, numbers)


def _recalls_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    rows, out = numbers.standard_normal((11, 5003), np.float32), numbers.standard_normal(5003, np.float32)
    weights = numbers.standard_normal(11, np.float32)
    halves = (rows.view(np.uint32) >> 16).astype(np.uint16)
    cut = (halves.astype(np.uint32) << 16).view(np.float32)
    for recall, kept, values in ((found.fodp_recall, rows, rows), (found.fodp_recall_bfloat16, halves, cut)):
        result, dots = out.copy(), np.empty(12)
        mixed = out + weights.astype(np.float64) @ values
        address = result.ctypes.data
        recall(address, kept.ctypes.data, 5003, 11, 5003, weights.ctypes.data, address, dots.ctypes.data)
        expected = [*(values @ mixed), mixed @ mixed]
        if not (np.allclose(result, mixed, rtol=1e-5, atol=1e-5) and np.allclose(dots, expected, rtol=1e-4, atol=1e-1)):
            return False
    return True


def _tables_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    back, weights = numbers.standard_normal((5, 4, 19), np.float32), numbers.standard_normal(5, np.float32)
    index, table = numbers.integers(0, 9, (5, 4)), np.zeros((9, 19), np.float32)
    index[0] = 3, 3, 1, 3
    source = index.ctypes.data, back.ctypes.data
    found.fodp_scatter(table.ctypes.data, 9, *source, weights.ctypes.data, 5, 4, 19)
    squares, mass = np.empty(5, np.float32), np.empty(5, np.float32)
    slots, sums = np.empty(16, np.int32), np.empty(4 * 19, np.float32)
    results, scratch = (squares.ctypes.data, mass.ctypes.data), (slots.ctypes.data, 15, sums.ctypes.data)
    found.fodp_table_squares(*results, *source, 5, 4, 19, *scratch)
    by_example = np.zeros((5, 9, 19))
    np.add.at(by_example, (np.arange(5)[:, None], index), back)
    again = np.array([len(set(tokens)) < 4 for tokens in index.tolist()])
    return (
        np.allclose(table, np.tensordot(weights, by_example, 1), rtol=1e-5, atol=1e-5)
        and np.allclose(squares, (by_example**2).sum((1, 2)), rtol=1e-5)
        and np.allclose(mass, again * np.linalg.norm(back, axis=2).sum(1), rtol=1e-5)
    )
