/* The pass over a memory, for rows of float and rows of bfloat16. */
#include "common.h"

#define CHUNK 4096 /* columns: forty rows of them stay in a core's second cache */
#define AHEAD 1024 /* columns: far enough to have arrived when they are asked for */
#define APART static __attribute__((noinline)) void /* loops that share a function also share its registers */
#define EIGHT _Pragma("GCC unroll 8") for (size_t j = 0; j < 8; j++)
#define ALL_PARTS _Pragma("GCC unroll 2") for (size_t p = 0; p < PARTS; p++)

typedef struct { floats part[1]; } one;
typedef struct { floats part[2]; } two;
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* How many of m entries the p-th part has. */
static inline size_t share(size_t m, size_t p) { return m > p * LANES ? least(m - p * LANES, LANES) : 0; }

static inline floats part(const float *entries, size_t p, size_t m) {
    floats x = {0};
    memcpy(&x, entries, sizeof(float) * m);
    return x;
}

static inline void keep(float *entries, one x, size_t m) { memcpy(entries, &x, sizeof(float) * m); }
static inline one matched(one x) { return x; }
static inline one unmatched(one x) { return x; }

/* Two entries of bfloat16 share a word: the first part has the lower ones, the second the upper ones. */
static inline floats part_bfloat16(const uint16_t *entries, size_t p, size_t m) {
    words x = {0};
    memcpy(&x, entries, sizeof(uint16_t) * m);
    return (floats)(p ? x & 0xFFFF0000 : x << 16);
}

#ifdef __clang__
#define PICK(x, ...) __builtin_shufflevector(x.part[0], x.part[1], __VA_ARGS__)
#else
#define PICK(x, ...) __builtin_shuffle(x.part[0], x.part[1], (ints){__VA_ARGS__})
#endif

static inline two matched_bfloat16(two x) {
    return (two){{PICK(x, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  PICK(x, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)}};
}

static inline two unmatched_bfloat16(two x) {
    return (two){{PICK(x, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                  PICK(x, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)}};
}

/* To the nearest, ties to even, as PyTorch rounds; in the upper half of each word. */
static inline words rounded(floats x) {
    words bits = (words)x, number = (words)(x == x);
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & number) | (0x7FC00000 & ~number);
}

static inline void keep_bfloat16(uint16_t *entries, two x, size_t m) {
    two y = matched_bfloat16(x);
    words both = rounded(y.part[0]) >> 16 | (rounded(y.part[1]) & 0xFFFF0000);
    memcpy(entries, &both, sizeof(uint16_t) * m);
}

static inline double sum(floats x) {
    double total = 0;
    for (size_t i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* All columns of a chunk, a vector at a time; the last one may be shorter. */
#define COLUMNS(DO) do { \
    size_t at = 0; \
    for (; at + PARTS * LANES <= n; at += PARTS * LANES) DO(at, PARTS * LANES); \
    if (at < n) DO(at, n - at); \
} while (0)

#define OF(name) name
#define ENTRY float
#define PARTS 1
#define vector one
#include "recall.h"

#define OF(name) name##_bfloat16
#define ENTRY uint16_t
#define PARTS 2
#define vector two
#include "recall.h"
