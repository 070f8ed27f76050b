/* The weighted sum of outer products: what clipping leaves of a linear layer's gradients. */
#include "common.h"

#define ROWS 8 /* of the result at a time, by */
#define VECTORS 3 /* of its columns: their 24 sums, and what they are made of, fill the registers of AVX-512 */
#define WIDTH (VECTORS * LANES)
#define EACH_ROW _Pragma("GCC unroll 8") for (size_t r = 0; r < ROWS; r++)
#define EACH_VECTOR _Pragma("GCC unroll 3") for (size_t v = 0; v < VECTORS; v++)

#ifdef __AVX512F__
/* sums = back^T panel over n examples: ROWS columns of back (of which a row has `stride`), WIDTH columns of a panel. With
   `inputs` (of which a row has `width`) the panel is first filled from there, from the rows `used`, on the way. */
static inline __attribute__((always_inline)) void tile(floats sums[ROWS][VECTORS], float *panel, const float *back,
                                                       size_t stride, size_t n, const float *inputs, size_t width,
                                                       const size_t *used) {
    floats total[ROWS][VECTORS];
    EACH_ROW EACH_VECTOR total[r][v] = (floats){0};
    for (size_t i = 0; i < n; i++) {
        floats x[VECTORS];
        EACH_VECTOR {
            if (inputs) {
                memcpy(&x[v], inputs + used[i] * width + v * LANES, sizeof(floats));
                memcpy(panel + i * WIDTH + v * LANES, &x[v], sizeof(floats));
            } else memcpy(&x[v], panel + i * WIDTH + v * LANES, sizeof(floats));
        }
        EACH_ROW EACH_VECTOR total[r][v] += back[i * stride + r] * x[v];
    }
    EACH_ROW EACH_VECTOR sums[r][v] = total[r][v];
}

static __attribute__((noinline)) void next_tile(floats sums[ROWS][VECTORS], float *panel, const float *back,
                                                size_t stride, size_t n) {
    tile(sums, panel, back, stride, n, 0, 0, 0);
}

static __attribute__((noinline)) void first_tile(floats sums[ROWS][VECTORS], float *panel, const float *back,
                                                 size_t stride, size_t n, const float *inputs, size_t width,
                                                 const size_t *used) {
    tile(sums, panel, back, stride, n, inputs, width, used);
}
#endif

/* out = sum_i weights[i] back[i] inputs[i]^T over n examples, with fan_out rows of fan_in entries; added to out if
   `accumulate`. Examples without weight cost nothing. Returns 0 where the processor lacks the registers. scratch:
   n (fan_out + ROWS + WIDTH + 2) floats. */
int fodp_product(float *out, const float *inputs, const float *back, const float *weights, size_t n, size_t fan_in,
                 size_t fan_out, int accumulate, float *scratch) {
#ifdef __AVX512F__
    size_t stride = (fan_out + ROWS - 1) / ROWS * ROWS;
    float *weighted = scratch, *panel = scratch + n * stride;
    size_t *used = (size_t *)(panel + n * WIDTH), all = n;
    n = 0;
    for (size_t i = 0; i < all; i++) {
        if (weights[i] == 0) continue;
        for (size_t o = 0; o < fan_out; o++) weighted[n * stride + o] = weights[i] * back[i * fan_out + o];
        for (size_t o = fan_out; o < stride; o++) weighted[n * stride + o] = 0;
        used[n++] = i;
    }
    for (size_t at = 0; at < fan_in; at += WIDTH) {
        size_t width = least(fan_in - at, WIDTH);
        if (width < WIDTH)
            for (size_t i = 0; i < n; i++) {
                memset(panel + i * WIDTH, 0, sizeof(float) * WIDTH);
                memcpy(panel + i * WIDTH, inputs + used[i] * fan_in + at, sizeof(float) * width);
            }
        for (size_t o = 0; o < fan_out; o += ROWS) {
            floats sums[ROWS][VECTORS];
            if (o || width < WIDTH) next_tile(sums, panel, weighted + o, stride, n);
            else first_tile(sums, panel, weighted, stride, n, inputs + at, fan_in, used);
            for (size_t r = 0; r < least(fan_out - o, ROWS); r++) {
                float *row = out + (o + r) * fan_in + at;
                const float *sum = (const float *)sums[r];
                if (accumulate) for (size_t c = 0; c < width; c++) row[c] += sum[c];
                else memcpy(row, sum, sizeof(float) * width);
            }
        }
    }
    return 1;
#else
    return 0;
#endif
}
