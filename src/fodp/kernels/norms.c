/* Norms of per-example gradients that are rows, or outer products of two rows, and the weights that clip them. */
#include "common.h"

/* squares[i] += factors[u] |rows[2u][i]|^2 |rows[2u+1][i]|^2 for every use u; a second row may be missing. */
void fodp_add_squares(float *squares, size_t examples, const float *const *rows, const size_t *widths,
                      const double *factors, size_t uses) {
    for (size_t u = 0; u < uses; u++) {
        for (size_t i = 0; i < examples; i++) {
            double square = factors[u];
            for (size_t side = 2 * u; side < 2 * u + 2 && rows[side]; side++)
                square *= square_sum(rows[side] + i * widths[side], widths[side]);
            squares[i] += (float)square;
        }
    }
}

/* norms = sqrt(norms); returns whether all are finite. */
int fodp_roots(float *norms, size_t examples) {
    float total = 0;
    for (size_t i = 0; i < examples; i++) total += norms[i] = sqrtf(norms[i]);
    return isfinite(total);
}

/* out = bound / norms, but at most `most`; norms count as at least `smallest`. */
void fodp_limits(float *out, const float *norms, size_t examples, float bound, float smallest, float most) {
    for (size_t i = 0; i < examples; i++) {
        float limit = 1 / (norms[i] > smallest ? norms[i] : smallest) * bound;
        out[i] = limit < most ? limit : most;
    }
}
