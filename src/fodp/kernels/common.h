#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }
