"""Whether a compiled library does what its sources say: every loop against NumPy, in float64."""

import ctypes
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


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
    others = (
        _keystream_right(found),
        _recalls_right(found, numbers),
        _squares_right(found, numbers),
        _product_right(found, numbers),
        _tables_right(found, numbers),
        _update_right(found, numbers),
    )
    return normals_right and all(others)


def _keystream_right(found: ctypes.CDLL) -> bool:
    """The last blocks before and after a counter of 256, and a part of one, as the library has them."""
    key, first, size = bytes(range(32)), 3, 16 * 300 + 5
    expected = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(16 * first + size))
    written = ctypes.create_string_buffer(size + 1)
    made = found.fodp_keystream(ctypes.addressof(written), size, key, first)
    return not made or written.raw == expected[16 * first :] + b"\0"


def _recalls_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    table = numbers.standard_normal((12, 5003), np.float32)
    halves = (table.view(np.uint32) >> 16).astype(np.uint16)
    cut = (halves.astype(np.uint32) << 16).view(np.float32)
    whole = found.fodp_recall, found.fodp_follow, table.copy(), table, 1e-5, 0.3
    rounded = found.fodp_recall_bfloat16, found.fodp_follow_bfloat16, halves, cut, 2.0**-8, 0.7
    return all(_recall_right(loops, scale, numbers) for loops in (whole, rounded) for scale in (None, 0.7))


def _recall_right(loops: tuple[Any, ...], scale: float | None, numbers: np.random.Generator) -> bool:
    """What is remembered is the result itself, or with a scale what it began as."""
    recall, follow, kept, values, rounding, gamma = loops
    out, trend = numbers.standard_normal((2, 5003), np.float32)
    weights, order = numbers.standard_normal(11, np.float32), np.array([4, 3, 2, 1, 0, 11, 10, 9, 8, 7, 6], np.uintp)
    mixed = (scale or 1) * out.astype(np.float64) + weights.astype(np.float64) @ values[order]
    followed = trend + gamma * (values[4].astype(np.float64) - trend)
    result, moved, alone, products = out.copy(), trend.copy(), trend.copy(), np.zeros((12, 13))
    for place, row in enumerate(order):  # the first one was written last
        before = values[[row, row, *order[place + 1 :]]]
        products[row, : len(before)] = before.astype(np.float64) @ values[row]
    vector, about = (result, mixed) if scale is None else (out, out.astype(np.float64))
    rows = kept.ctypes.data, 5003, order.ctypes.data, 11, 5003, weights.ctypes.data
    remembered = products.ctypes.data, 13, 5, moved.ctypes.data, gamma, scale is not None, scale or 1
    recall(result.ctypes.data, *rows, *remembered)
    follow(alone.ctypes.data, kept[4].ctypes.data, gamma, 5003)
    written = kept[5] if kept.dtype == np.float32 else (kept[5].astype(np.uint32) << 16).view(np.float32)
    return (
        np.allclose(result, mixed, rtol=1e-5, atol=1e-5)
        and np.allclose(products[5], [about @ about, followed @ about, *(values[order] @ about)], rtol=1e-4, atol=1e-1)
        and np.allclose(written, vector, rtol=rounding, atol=0)
        and np.allclose(moved, followed, rtol=1e-5, atol=1e-5)
        and np.array_equal(moved, alone)
    )


def _squares_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    left, right = numbers.standard_normal((5, 103), np.float32), numbers.standard_normal((5, 7), np.float32)
    left[0], right[0] = 1e-25, 1e25  # whose squares are no float32
    squares, widths = np.ones(5), np.array([103, 7, 103, 0], np.uintp)
    rows, factors = np.array([left.ctypes.data, right.ctypes.data, left.ctypes.data, 0], np.uintp), np.array([0.25, 2])
    found.fodp_add_squares(squares.ctypes.data, 5, *(a.ctypes.data for a in (rows, widths, factors)), 2)
    lefts, rights = ((values.astype(np.float64) ** 2).sum(1) for values in (left, right))
    expected = 1 + 0.25 * lefts * rights + 2 * lefts
    alone = np.empty(5)
    found.fodp_square_sums(alone.ctypes.data, left.ctypes.data, 5, 103)
    norms, spoilt = np.empty((2, 5), np.float32), np.array([1, np.inf])
    finite = [found.fodp_roots(norms.ctypes.data, of.ctypes.data, len(of), 4.0) for of in (spoilt, squares)]
    limits, roots = np.empty(5, np.float32), 2 * np.sqrt(expected)
    found.fodp_limits(limits.ctypes.data, norms.ctypes.data, 5, 40.0, 30.0, 1.2)
    return (
        np.allclose(squares, expected, rtol=1e-12)
        and np.allclose(alone, lefts, rtol=1e-12, atol=0)
        and finite == [0, 1]
        and np.allclose(norms[0], roots, rtol=1e-6)
        and np.allclose(limits, np.minimum(40 / np.maximum(roots, 30), 1.2), rtol=1e-6)
        and _grams_right(found, numbers)
    )


def _grams_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    rows = numbers.standard_normal((2, 3, 2, 19, 4), np.float32)  # two factors of three examples with two groups
    left, right = grams = rows @ rows.swapaxes(3, 4)
    sums = np.empty((3, 3))
    found.fodp_gram_sums(sums.ctypes.data, left.ctypes.data, right.ctypes.data, 3, 2, 19)
    diagonals = np.diagonal(grams.astype(np.float64), axis1=3, axis2=4)
    mass = (np.sqrt(diagonals.prod(0)).sum(2) ** 2).sum(1)
    expected = grams.astype(np.float64).prod(0).sum((1, 2, 3)), mass, diagonals.max((0, 2, 3))
    return np.allclose(sums, expected, rtol=1e-12)


def _product_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    """Two tiles and a part of one in both directions, written and then added."""
    inputs, back = numbers.standard_normal((9, 107), np.float32), numbers.standard_normal((9, 19), np.float32)
    weights, out, scratch = numbers.standard_normal(9, np.float32), np.empty((19, 107), np.float32), np.empty(9 * 77)
    weights[[0, 4]] = 0  # these are left out
    expected = back.T.astype(np.float64) * weights @ inputs
    for times in (1, 2):
        vectors = (a.ctypes.data for a in (out, inputs, back, weights))
        made = found.fodp_product(*vectors, 9, 107, 19, times - 1, scratch.ctypes.data)
        if made and not np.allclose(out, times * expected, rtol=1e-5, atol=1e-5):
            return False
    return True


def _tables_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    back, weights = numbers.standard_normal((5, 4, 19), np.float32), numbers.standard_normal(5, np.float32)
    index, table = numbers.integers(0, 9, (5, 4)), np.zeros((9, 19), np.float32)
    index[0] = 3, 3, 1, 3
    source = index.ctypes.data, back.ctypes.data
    found.fodp_scatter(table.ctypes.data, 9, *source, weights.ctypes.data, 5, 4, 19)
    squares, mass = np.empty(5), np.empty(5)
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


def _update_right(found: ctypes.CDLL, numbers: np.random.Generator) -> bool:
    """Where the second moment is above the noise, and where it is below."""
    w, m, v, g = numbers.standard_normal((4, 103), np.float32)
    v *= v
    averages = m + 0.1 * (g.astype(np.float64) - m), 0.99 * v.astype(np.float64) + 0.01 * g.astype(np.float64) ** 2
    expected = 0.9 * w - 0.5 * averages[0] / np.sqrt(np.maximum(averages[1] - 0.2, 0.1))
    found.fodp_adambc(*(a.ctypes.data for a in (w, m, v, g)), 103, 0.1, 0.99, 0.01, 0.2, 0.1, 0.9, 0.5)
    pairs = zip((w, m, v), (expected, *averages), strict=True)
    return all(np.allclose(result, exact, rtol=1e-5, atol=1e-5) for result, exact in pairs)
