/* Norms of per-example gradients that are rows, or outer products of two rows, and the weights that clip them. */
#include "common.h"

/* A factor with a larger squared norm counts as not finite: what clipping leaves of the other may be no float. */
#define LARGEST 0x1p180

/* squares[i] = |rows[i]|^2 of rows of `width` entries. */
void fodp_square_sums(double *squares, const float *rows, size_t examples, size_t width) {
    for (size_t i = 0; i < examples; i++) squares[i] = square_sum(rows + i * width, width);
}

/* squares[i] += factors[u] |rows[2u][i]|^2 |rows[2u+1][i]|^2 for every use u; a second row may be missing. */
void fodp_add_squares(double *squares, size_t examples, const float *const *rows, const size_t *widths,
                      const double *factors, size_t uses) {
    for (size_t u = 0; u < uses; u++) {
        for (size_t i = 0; i < examples; i++) {
            double square = square_sum(rows[2 * u] + i * widths[2 * u], widths[2 * u]);
            if (rows[2 * u + 1]) {
                double other = square_sum(rows[2 * u + 1] + i * widths[2 * u + 1], widths[2 * u + 1]);
                square = square > LARGEST || other > LARGEST ? INFINITY : square * other;
            }
            squares[i] += factors[u] * square;
        }
    }
}

/* Of the Gram matrices of an example's groups, length by length each: sums[0] = the sum of products of their entries;
   sums[1] = the sum over groups of (the sum of the roots of products on the diagonals)^2; sums[2] = the largest number
   on a diagonal. Three rows of one number per example. */
void fodp_gram_sums(double *sums, const float *left, const float *right, size_t examples, size_t groups, size_t length) {
    for (size_t i = 0; i < examples; i++) {
        double square = 0, mass = 0, largest = 0;
        for (size_t g = 0; g < groups; g++, left += length * length, right += length * length) {
            double roots = 0;
            for (size_t t = 0; t < length; t++) {
                const float *l = left + t * length, *r = right + t * length;
                double row = 0;
                #pragma omp simd reduction(+ : row)
                for (size_t s = 0; s < length; s++) row += (double)l[s] * r[s];
                square += row;
                roots += sqrt((double)l[t] * r[t]);
                largest = l[t] > largest ? l[t] : largest;
                largest = r[t] > largest ? r[t] : largest;
            }
            mass += roots * roots;
        }
        sums[i] = square, sums[examples + i] = mass, sums[2 * examples + i] = largest;
    }
}

/* norms = sqrt(factor squares), in float as what they are compared with; returns whether all are finite. */
int fodp_roots(float *norms, const double *squares, size_t examples, double factor) {
    float total = 0;
    for (size_t i = 0; i < examples; i++) total += norms[i] = sqrtf((float)(factor * squares[i]));
    return isfinite(total);
}

/* out = bound / norms, but at most `most`; norms count as at least `smallest`. */
void fodp_limits(float *out, const float *norms, size_t examples, float bound, float smallest, float most) {
    for (size_t i = 0; i < examples; i++) {
        float limit = 1 / (norms[i] > smallest ? norms[i] : smallest) * bound;
        out[i] = limit < most ? limit : most;
    }
}
