#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* In double: squares neither vanish nor overflow. In blocks: of many numbers, rounding would add up. */
static inline double square_sum(const float *v, size_t size) {
    double total = 0;
    for (size_t at = 0; at < size; at += 1 << 16) {
        size_t end = least(size, at + (1 << 16));
        double block = 0;
        #pragma omp simd reduction(+ : block)
        for (size_t i = at; i < end; i++) block += (double)v[i] * v[i];
        total += block;
    }
    return total;
}

/* Vectors of the compiler: it cuts them to what the processor has. */
#define LANES 16
typedef double  doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs   __attribute__((vector_size(8 * LANES)));
typedef float   floats  __attribute__((vector_size(4 * LANES)));
typedef int32_t ints    __attribute__((vector_size(4 * LANES)));
