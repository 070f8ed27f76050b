/* Written once for each kind of ENTRY that rows are kept in. A vector of entries comes in PARTS, in an order that suits
   the kind (`part`); `matched` brings floats into that order, `unmatched` back. */

/* m floats, the rest zero. */
static inline vector OF(load)(const float *entries, size_t m) {
    vector x = {{{0}}};
    memcpy(&x, entries, sizeof(float) * m);
    return x;
}

static inline void OF(store)(float *entries, vector x, size_t m) { memcpy(entries, &x, sizeof(float) * m); }

/* trend + gamma (newest - trend), from the nearer end, as PyTorch's lerp: gamma 1 gives the newest to the last bit. */
static inline vector OF(followed)(vector trend, const ENTRY *newest, float gamma, size_t m) {
    vector fetched, x;
    ALL_PARTS fetched.part[p] = OF(part)(newest, p, m);
    fetched = OF(unmatched)(fetched);
    ALL_PARTS {
        floats apart = fetched.part[p] - trend.part[p];
        x.part[p] = gamma < 0.5f ? trend.part[p] + gamma * apart : fetched.part[p] - (1 - gamma) * apart;
    }
    return x;
}

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
        vector total = OF(matched)(OF(load)(out + at, m)), other = total; \
        if (multiply && v != out) other = OF(matched)(OF(load)(v + at, m)); \
        ALL_PARTS { \
            EIGHT x[j] = OF(part)(row[j] + at, p, m); \
            if (mix) EIGHT total.part[p] += weight[j] * x[j]; \
            if (v == out) other.part[p] = total.part[p]; \
            if (multiply) EIGHT sums[j] += x[j] * other.part[p]; \
        } \
        if (mix) { \
            EIGHT __builtin_prefetch(row[j] + at + AHEAD, 0, 2); \
            OF(store)(out + at, OF(unmatched)(total), m); \
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
        vector x = OF(load)(v + at, m), t = OF(load)(trend + at, m); \
        if (newest) OF(store)(trend + at, t = OF(followed)(t, newest + at, gamma, m), m); \
        OF(keep)(kept + at, x, m); \
        ALL_PARTS square += x.part[p] * x.part[p], along += x.part[p] * t.part[p]; \
    }
    COLUMNS(DO);
    #undef DO
    products[0] += sum(square);
    products[1] += sum(along);
}

/* trend += gamma (newest - trend), in the same arithmetic. */
void OF(fodp_follow)(float *trend, const ENTRY *newest, float gamma, size_t n) {
    #define DO(at, m) { \
        OF(store)(trend + at, OF(followed)(OF(load)(trend + at, m), newest + at, gamma, m), m); \
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
#undef PARTS
#undef vector
