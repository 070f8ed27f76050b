/* The pass over a memory, for rows of float and rows of bfloat16. */
#include "common.h"

#define CHUNK 4096 /* columns: forty rows of them stay in a core's second cache */
#define AHEAD 1024 /* columns: far enough to have arrived when they are asked for */
#define EIGHT _Pragma("GCC unroll 8") for (size_t j = 0; j < 8; j++)

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words  __attribute__((vector_size(4 * LANES)));

/* Vectors of m entries, the rest zero. */
static inline floats load(const float *entries, size_t m) {
    floats x = {0};
    memcpy(&x, entries, sizeof(float) * m);
    return x;
}

static inline void store(float *entries, floats x, size_t m) { memcpy(entries, &x, sizeof(float) * m); }

static inline floats load_bfloat16(const uint16_t *entries, size_t m) {
    halves x = {0};
    memcpy(&x, entries, sizeof(uint16_t) * m);
    return (floats)(__builtin_convertvector(x, words) << 16);
}

/* To the nearest, ties to even, as PyTorch rounds. */
static inline void store_bfloat16(uint16_t *entries, floats x, size_t m) {
    words bits = (words)x, number = (words)(x == x);
    words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    halves half = __builtin_convertvector((rounded & number) | (0x7FC0 & ~number), halves);
    memcpy(entries, &half, sizeof(uint16_t) * m);
}

static inline double sum(floats x) {
    double total = 0;
    for (size_t i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* From the nearer end, as PyTorch's lerp: gamma 1 gives the newest to the last bit. */
static inline floats followed(floats trend, floats newest, float gamma) {
    floats apart = newest - trend;
    return gamma < 0.5f ? trend + gamma * apart : newest - (1 - gamma) * apart;
}

/* All columns of a chunk, a vector at a time; the last one may be shorter. */
#define COLUMNS(DO) do { \
    size_t at = 0; \
    for (; at + LANES <= n; at += LANES) DO(at, LANES); \
    if (at < n) DO(at, n - at); \
} while (0)

#define OF(name) name
#define ENTRY float
#define LOAD load
#define STORE store
#include "recall.h"

#define OF(name) name##_bfloat16
#define ENTRY uint16_t
#define LOAD load_bfloat16
#define STORE store_bfloat16
#include "recall.h"
