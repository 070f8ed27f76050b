#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Vectors of the compiler: it cuts them to what the processor has. */
#define LANES 16
typedef double  doubles __attribute__((vector_size(8 * LANES)));
typedef int64_t longs   __attribute__((vector_size(8 * LANES)));
typedef float   floats  __attribute__((vector_size(4 * LANES)));
typedef int32_t ints    __attribute__((vector_size(4 * LANES)));
