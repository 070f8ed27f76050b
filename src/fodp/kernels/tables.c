/* Norms and sums of the gradients of an embedding table. */
#include "common.h"

/* squares[i] = sum over tokens of |sum of back[i, t] over the token's places t|^2. mass[i] = sum of |back[i, t]|
   if a token comes twice in the example, else 0. slots is a hash table of last + 1 places, at most half full. */
void fodp_table_squares(double *squares, double *mass, const int64_t *indices, const float *back, size_t examples,
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
