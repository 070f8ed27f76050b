/* Written once for each kind of ENTRY that rows are kept in; LOAD and STORE go between it and vectors of float. */

/* Eight rows, from the r-th in order on: out += weights * rows if `mix`; then products += <rows, v> if `multiply`. */
static inline __attribute__((always_inline)) void OF(eight_rows)(
    float *out, const ENTRY *table, size_t stride, const size_t *order, size_t r, size_t count, size_t n,
    const float *weights, const float *v, double *products, int mix, int multiply) {
    const ENTRY *row[8];
    float weight[8];
    floats sums[8], x[8];
    EIGHT {
        row[j] = table + order[least(r + j, count - 1)] * stride;
        weight[j] = r + j < count ? weights[r + j] : 0;
        sums[j] = (floats){0};
    }
    #define DO(at, m) { \
        floats total = load(out + at, m); \
        EIGHT x[j] = LOAD(row[j] + at, m); \
        if (mix) { \
            EIGHT { total += weight[j] * x[j]; __builtin_prefetch(row[j] + at + AHEAD, 0, 2); } \
            store(out + at, total, m); \
        } \
        if (multiply) { \
            if (v != out) total = load(v + at, m); \
            EIGHT sums[j] += x[j] * total; \
        } \
    }
    COLUMNS(DO);
    #undef DO
    if (multiply) for (size_t j = 0; j < 8 && r + j < count; j++) products[r + j] += sum(sums[j]);
}

/* trend += gamma (newest - trend), if there is a newest; kept = v; products of v with itself and with the trend. */
static inline __attribute__((always_inline)) void OF(remember)(
    ENTRY *kept, const float *v, float *trend, const ENTRY *newest, float gamma, size_t n, double *products) {
    floats square = {0}, along = {0};
    #define DO(at, m) { \
        floats x = load(v + at, m), t = load(trend + at, m); \
        if (newest) store(trend + at, t = followed(t, LOAD(newest + at, m), gamma), m); \
        STORE(kept + at, x, m); \
        square += x * x; \
        along += x * t; \
    }
    COLUMNS(DO);
    #undef DO
    products[0] += sum(square);
    products[1] += sum(along);
}

/* trend += gamma (newest - trend), in the same arithmetic. */
void OF(fodp_follow)(float *trend, const ENTRY *newest, float gamma, size_t n) {
    #define DO(at, m) { \
        floats t = load(trend + at, m); \
        store(trend + at, followed(t, LOAD(newest + at, m), gamma), m); \
    }
    COLUMNS(DO);
    #undef DO
}

/* out += sum_r weights[r] rows[r], where rows[r] is table[order[r]] and there is at least one. Then, if there is a v,
   which may be the new out: kept = v, the trend follows `newest` if there is one, and products are <rows[r], v>, then
   <v, v>, then <trend, v>.
   Chunk by chunk, so that everything comes from main memory once, and eight rows at a time, since one alone would
   keep the processor waiting for memory. Sums of a chunk in float, of chunks in double. */
void OF(fodp_recall)(float *out, const ENTRY *table, size_t stride, const size_t *order, size_t count, size_t size,
                     const float *weights, const float *v, double *products, ENTRY *kept, float *trend,
                     const ENTRY *newest, float gamma) {
    for (size_t r = 0; v && r < count + 2; r++) products[r] = 0;
    for (size_t start = 0; start < size; start += CHUNK) {
        size_t n = least(size - start, CHUNK), r = 0;
        #define CHUNK_OF_ROWS out + start, table + start, stride, order, r, count, n, weights
        for (; r + 8 < count; r += 8) OF(eight_rows)(CHUNK_OF_ROWS, 0, 0, 1, 0);
        if (!v) {
            OF(eight_rows)(CHUNK_OF_ROWS, 0, 0, 1, 0);
            continue;
        }
        OF(eight_rows)(CHUNK_OF_ROWS, v + start, products, 1, 1); /* out is complete with the last eight */
        while (r) r -= 8, OF(eight_rows)(CHUNK_OF_ROWS, v + start, products, 0, 1);
        #undef CHUNK_OF_ROWS
        #define CHUNK_OF_VECTORS kept + start, v + start, trend + start, newest ? newest + start : 0, gamma, n
        OF(remember)(CHUNK_OF_VECTORS, products + count);
        #undef CHUNK_OF_VECTORS
    }
}
#undef OF
#undef ENTRY
#undef LOAD
#undef STORE
