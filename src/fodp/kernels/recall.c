/* One pass over a memory of earlier releases: it is mixed into a vector, and the vector is remembered on the way. */
#include "common.h"

#define CHUNK 2048 /* columns: what all rows have of them stays in a core's second cache while it is read twice */
#define EIGHT _Pragma("GCC unroll 8") for (size_t j = 0; j < 8; j++)

/* out += weights * rows. Eight rows at a time, since one alone would keep the processor waiting for memory; where there
   are fewer, the last one fills the places, without weight. */
static void mix(float *restrict out, const float *table, size_t stride, size_t count, const float *weights, size_t n) {
    for (size_t r = 0; r < count; r += 8) {
        const float *rows[8];
        float by[8];
        EIGHT {
            rows[j] = table + least(r + j, count - 1) * stride;
            by[j] = r + j < count ? weights[r + j] : 0;
        }
        #pragma omp simd
        for (size_t i = 0; i < n; i++) {
            float total = out[i];
            EIGHT total += by[j] * rows[j][i];
            out[i] = total;
        }
    }
}

/* trend += gamma (v - trend), from the nearer end, as PyTorch's lerp: gamma 1 gives v to the last bit. */
static void follow(float *restrict trend, const float *restrict v, float gamma, size_t n) {
    if (gamma < 0.5f) for (size_t i = 0; i < n; i++) trend[i] += gamma * (v[i] - trend[i]);
    else for (size_t i = 0; i < n; i++) trend[i] = v[i] - (1 - gamma) * (v[i] - trend[i]);
}

/* squares += |rows - trend|^2: within a chunk in float, over the chunks in double. Four rows at a time, for one sum alone
   would wait for its own last addition. */
static void add_distances(double *squares, const float *table, size_t stride, size_t count, const float *trend,
                          size_t n) {
    for (size_t r = 0; r < count; r += 4) {
        const float *rows[4];
        for (size_t j = 0; j < 4; j++) rows[j] = table + least(r + j, count - 1) * stride;
        float a = 0, b = 0, c = 0, d = 0;
        #pragma omp simd reduction(+ : a, b, c, d)
        for (size_t i = 0; i < n; i++) {
            a += (rows[0][i] - trend[i]) * (rows[0][i] - trend[i]);
            b += (rows[1][i] - trend[i]) * (rows[1][i] - trend[i]);
            c += (rows[2][i] - trend[i]) * (rows[2][i] - trend[i]);
            d += (rows[3][i] - trend[i]) * (rows[3][i] - trend[i]);
        }
        float sums[4] = {a, b, c, d};
        for (size_t j = 0; j < 4 && r + j < count; j++) squares[r + j] += sums[j];
    }
}

/* out = scale out + sum_r weights[r] table[r] over the first `count` rows. Then, if there is a trend, and v is the new
   out, or with `earlier` what out was: table[row] = v, trend += gamma (v - trend), squares[r] = |table[r] - trend|^2 of
   the first `kept` rows, and squares[kept] = |trend|^2. Chunk by chunk, so that everything comes from main memory once;
   so v may be written over the oldest row, of which the chunk has been read. */
void fodp_recall(float *out, float *table, size_t stride, size_t size, const float *weights, size_t count, float scale,
                 int earlier, float *trend, float gamma, size_t row, double *squares, size_t kept) {
    float before[CHUNK];
    for (size_t j = 0; trend && j <= kept; j++) squares[j] = 0;
    for (size_t at = 0; at < size; at += CHUNK) {
        size_t n = least(size - at, CHUNK);
        const float *v = out + at;
        if (earlier) v = memcpy(before, v, sizeof(float) * n);
        if (scale != 1) for (size_t i = 0; i < n; i++) out[at + i] *= scale;
        mix(out + at, table + at, stride, count, weights, n);
        if (!trend) continue;
        memcpy(table + row * stride + at, v, sizeof(float) * n);
        follow(trend + at, v, gamma, n);
        add_distances(squares, table + at, stride, kept, trend + at, n);
        squares[kept] += square_sum(trend + at, n);
    }
}
