/* Squared norms of rows. */
#include "common.h"

/* squares[i] = |rows[i]|^2 of rows of `width` entries. */
void fodp_square_sums(double *squares, const float *rows, size_t count, size_t width) {
    for (size_t i = 0; i < count; i++) squares[i] = square_sum(rows + i * width, width);
}
