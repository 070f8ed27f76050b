"""Hot loops in C, compiled once per machine where a C compiler exists: normals, the pass over a memory, and
the norms and sums of an embedding's gradients.

Each does in one reading of memory what NumPy or PyTorch do in several. Their callers hold the same arithmetic
in NumPy or PyTorch, which is the reference and the fallback; results agree to float rounding. The library is
compiled at its first use (under a second) into the user's cache folder and is used only if it reproduces the
reference. `FODP_KERNELS=0` in the environment does without it.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

_LOOPS = r"""
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Vectors of the compiler: it cuts them to what the processor has. */
#define LANES 16
typedef double  doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs   __attribute__((vector_size(8 * LANES)));
typedef float   floats  __attribute__((vector_size(4 * LANES)));
typedef int32_t ints    __attribute__((vector_size(4 * LANES)));

/* -2 ln u with u = (|word| + 1/2) / 2^63 = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2). f is exact before it is
   rounded to float, so the result has all digits of a float near u = 1 too. Polynomial: Cephes' logf. */
static inline floats minus_two_log(longs word) {
    doubles u = (doubles)((longs)__builtin_convertvector(word, doubles) & 0x7FFFFFFFFFFFFFFFLL);
    u = (u + 0.5) * 0x1p-63;
    longs exponent = ((longs)u - 0x3FE6A09E667F3BCDLL) >> 52;
    doubles rest = (doubles)((longs)u - (exponent << 52)) - 1.0;
    floats f = __builtin_convertvector(rest, floats), k = __builtin_convertvector(exponent, floats), f2 = f * f;
    floats p = 7.0376836292E-2f * f - 1.1514610310E-1f;
    p = p * f + 1.1676998740E-1f;
    p = p * f - 1.2420140846E-1f;
    p = p * f + 1.4249322787E-1f;
    p = p * f - 1.6668057665E-1f;
    p = p * f + 2.0000714765E-1f;
    p = p * f - 2.4999993993E-1f;
    p = p * f + 3.3333331174E-1f;
    p = p * f * f2 - k * 2.12194440e-4f - 0.5f * f2;
    floats result = -2.0f * ((f + p) + k * 0.693359375f);
    return (floats)((ints)result & (result > 0));
}

/* Cosine and sine of pi * word / 2^31: quadrant by integers, Cephes' polynomials in [-pi/4, pi/4]. */
static inline void direction(ints word, floats *cosine, floats *sine) {
    ints quadrant = (word + (1 << 29)) >> 30;
    floats x = __builtin_convertvector(word - (quadrant << 30), floats) * 1.4629180792671596e-9f, x2 = x * x;
    floats s = ((-1.9515295891E-4f * x2 + 8.3321608736E-3f) * x2 - 1.6666654611E-1f) * x2 * x + x;
    floats c = ((2.443315711809948E-5f * x2 - 1.388731625493765E-3f) * x2 + 4.166664568298827E-2f) * x2 * x2;
    c = c - 0.5f * x2 + 1.0f;
    ints odd = -(quadrant & 1);
    ints swapped_c = ((ints)s & odd) | ((ints)c & ~odd), swapped_s = ((ints)c & odd) | ((ints)s & ~odd);
    *cosine = (floats)(swapped_c ^ (((quadrant + 1) & 2) << 30));
    *sine = (floats)(swapped_s ^ ((quadrant & 2) << 30));
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* first[i] = std r cos(a), second[i] = std r sin(a), from 64-bit words for r and 32-bit words for a.
   seconds is pairs, or pairs - 1 when the numbers are odd. */
#define CHUNK 1024
void fodp_normals(float *first, float *second, const char *radius_words, const char *angle_words,
                  size_t pairs, size_t seconds, float std) {
    float radius[CHUNK];
    for (size_t start = 0; start < pairs; start += CHUNK) {
        size_t count = least(pairs - start, CHUNK);
        for (size_t i = 0; i < count; i += LANES) {
            longs word = {0};
            if (count - i >= LANES) memcpy(&word, radius_words + 8 * (start + i), sizeof word);
            else memcpy(&word, radius_words + 8 * (start + i), 8 * (count - i));
            floats square = minus_two_log(word);
            memcpy(radius + i, &square, sizeof square);
        }
        for (size_t i = 0; i < count; i++) radius[i] = std * sqrtf(radius[i]);
        for (size_t i = 0; i < count; i += LANES) {
            size_t at = start + i, n = least(count - i, LANES);
            ints word = {0};
            floats r, c, s;
            memcpy(&r, radius + i, sizeof r);
            if (at + LANES <= seconds) {
                memcpy(&word, angle_words + 4 * at, sizeof word);
                direction(word, &c, &s);
                c *= r, s *= r;
                memcpy(first + at, &c, sizeof c);
                memcpy(second + at, &s, sizeof s);
            } else {
                memcpy(&word, angle_words + 4 * at, 4 * n);
                direction(word, &c, &s);
                c *= r, s *= r;
                memcpy(first + at, &c, 4 * n);
                memcpy(second + at, &s, 4 * least(seconds - at, n));
            }
        }
    }
}

/* out += sum_r weights[r] rows[r]; then dots[r] = <rows[r], v> and dots[count] = <v, v>. v may be the new out.
   Block by block, so that rows come from main memory once, and eight rows at a time: one alone would keep the
   processor waiting for memory. Sums of a block in float, of blocks in double. Written once for each kind of
   ENTRY that rows are kept in; WIDE makes a float of one. */
#define COLUMNS 4096
#define EIGHT(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)
#define ROW(j) const ENTRY *restrict row##j = rows + least(r + j, count - 1) * stride + start;
#define WEIGHT(j) float weight##j = r + j < count ? weights[r + j] : 0;
#define MIX(j) + weight##j * WIDE(row##j[i])
#define ZERO(j) float sum##j = 0;
#define SUM(j) sum##j += WIDE(row##j[i]) * part[i];
#define KEEP(j) if (r + j < count) dots[r + j] += sum##j;
static inline float widened(uint16_t bfloat16) {
    uint32_t bits = (uint32_t)bfloat16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
"""

_RECALL = r"""
void RECALL(float *out, const ENTRY *rows, size_t stride, size_t count, size_t size,
            const float *weights, const float *v, double *dots) {
    for (size_t r = 0; dots && r <= count; r++) dots[r] = 0;
    for (size_t start = 0; start < size; start += COLUMNS) {
        size_t n = least(size - start, COLUMNS);
        float *restrict block = out + start;
        for (size_t r = 0; r < count; r += 8) {
            EIGHT(ROW) EIGHT(WEIGHT)
            for (size_t i = 0; i < n; i++) block[i] = block[i] EIGHT(MIX);
        }
        if (!dots) continue;
        const float *part = v + start;
        for (size_t r = 0; r < count; r += 8) {
            EIGHT(ROW) EIGHT(ZERO)
            #pragma omp simd reduction(+ : sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7)
            for (size_t i = 0; i < n; i++) { EIGHT(SUM) }
            EIGHT(KEEP)
        }
        float square = 0;
        #pragma omp simd reduction(+ : square)
        for (size_t i = 0; i < n; i++) square += part[i] * part[i];
        dots[count] += square;
    }
}
#undef RECALL
#undef ENTRY
#undef WIDE
"""

_TABLES = r"""
static inline double square_sum(const float *v, size_t size) {
    double total = 0;
    for (size_t start = 0; start < size; start += COLUMNS) {
        size_t n = least(size - start, COLUMNS);
        float square = 0;
        #pragma omp simd reduction(+ : square)
        for (size_t i = 0; i < n; i++) square += v[start + i] * v[start + i];
        total += square;
    }
    return total;
}

/* squares[i] = sum over tokens of |sum of back[i, t] over the token's places t|^2. mass[i] = sum of |back[i, t]|
   if a token comes twice in the example, else 0. slots is a hash table of last + 1 places, at most half full. */
void fodp_table_squares(float *squares, float *mass, const int64_t *indices, const float *back, size_t examples,
                        size_t length, size_t width, int32_t *slots, size_t last, float *sums) {
    for (size_t i = 0; i < examples; i++, indices += length, back += length * width) {
        int repeated = 0;
        memset(slots, 0xFF, (last + 1) * sizeof *slots);
        for (size_t t = 0; t < length; t++) {
            size_t at = ((uint64_t)indices[t] * 0x9E3779B97F4A7C15u >> 32) & last;
            while (slots[at] >= 0 && indices[slots[at]] != indices[t]) at = (at + 1) & last;
            if (slots[at] < 0) { slots[at] = (int32_t)t; continue; }
            if (!repeated) memcpy(sums, back, length * width * sizeof *sums);
            repeated = 1;
            float *first = sums + slots[at] * width, *again = sums + t * width;
            for (size_t c = 0; c < width; c++) first[c] += again[c], again[c] = 0;
        }
        squares[i] = square_sum(repeated ? sums : back, length * width);
        double lengths = 0;
        for (size_t t = 0; repeated && t < length; t++) lengths += sqrt(square_sum(back + t * width, width));
        mass[i] = lengths;
    }
}

/* out[indices[i, t]] += weights[i] back[i, t], rows of `width` entries. Stops with 0 at an index beyond the rows. */
int fodp_scatter(float *out, size_t rows, const int64_t *indices, const float *back, const float *weights,
                 size_t examples, size_t length, size_t width) {
    for (size_t i = 0; i < examples; i++) {
        float weight = weights[i];
        for (size_t t = 0; t < length; t++, back += width) {
            uint64_t index = (uint64_t)*indices++;
            if (index >= rows) return 0;
            float *restrict row = out + index * width;
            for (size_t c = 0; c < width; c++) row[c] += weight * back[c];
        }
    }
    return 1;
}
"""

SOURCE = "".join(
    [
        _LOOPS,
        "#define RECALL fodp_recall\n#define ENTRY float\n#define WIDE(entry) (entry)",
        _RECALL,
        "#define RECALL fodp_recall_bfloat16\n#define ENTRY uint16_t\n#define WIDE(entry) widened(entry)",
        _RECALL,
        _TABLES,
    ]
)

_FLAGS = "-O3 -march=native -fwrapv -fno-math-errno -fno-trapping-math -fopenmp-simd -shared -fPIC -Wno-psabi"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, None where there is none or it does not reproduce the reference."""
    if os.environ.get("FODP_KERNELS") == "0" or sys.platform != "linux" or sys.byteorder != "little":
        return None
    try:
        found = ctypes.CDLL(str(_compiled()))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        found.fodp_normals.argtypes = [pointer, pointer, pointer, pointer, size, size, ctypes.c_float]
        found.fodp_normals.restype = None
        for recall in (found.fodp_recall, found.fodp_recall_bfloat16):
            recall.argtypes, recall.restype = [pointer, pointer, size, size, size, pointer, pointer, pointer], None
        found.fodp_scatter.argtypes = [pointer, size, pointer, pointer, pointer, size, size, size]
        found.fodp_table_squares.argtypes = [pointer] * 4 + [size] * 3 + [pointer, size, pointer]
        found.fodp_table_squares.restype = None
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    return found if _right(found) else None


def _compiled() -> Path:
    """The library's file in the cache folder of this user, for this source, compiler and processor."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("no C compiler")
    cpu = "".join(sorted({line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line}))
    identity = "\n".join([SOURCE, _FLAGS, os.path.realpath(compiler), platform.machine(), cpu])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fodp"
    path = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, result = Path(scratch, "kernels.c"), Path(scratch, "kernels.so")
            source.write_text(SOURCE)
            command = [compiler, *_FLAGS.split(), str(source), "-o", str(result), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            os.replace(result, path)  # at once: other processes may be doing the same
    for owned in (folder, path):  # nobody else may have put it there
        about = owned.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError(f"{owned} can be written by others")
    return path


def _right(found: ctypes.CDLL) -> bool:
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
