/* Written once for each kind of ENTRY that rows are kept in. A vector of entries comes in PARTS, in an order that suits
   the kind (`part`); `matched` brings floats into that order, `unmatched` back. */

/* m floats, the rest zero; part by part, which keeps them in registers. */
static inline vector OF(load)(const float *entries, size_t m) {
    vector x;
    ALL_PARTS x.part[p] = part(entries + p * LANES, 0, share(m, p));
    return x;
}

static inline void OF(store)(float *entries, vector x, size_t m) {
    ALL_PARTS memcpy(entries + p * LANES, &x.part[p], sizeof(float) * share(m, p));
}

/* trend + gamma (newest - trend), from the nearer end, as PyTorch's lerp: gamma 1 gives the newest to the last bit. */
static inline vector OF(followed)(vector trend, vector newest, float gamma) {
    ALL_PARTS {
        floats apart = newest.part[p] - trend.part[p];
        trend.part[p] = gamma < 0.5f ? trend.part[p] + gamma * apart : newest.part[p] - (1 - gamma) * apart;
    }
    return trend;
}

/* Eight rows of a memory, or fewer: then the last one fills the places, without weight. */
typedef struct {
    const ENTRY *row[8];
    float weight[8];
} OF(eight);

static inline OF(eight) OF(eight_from)(size_t r, const ENTRY *table, size_t stride, const size_t *order, size_t count,
                                       const float *weights) {
    OF(eight) rows;
    EIGHT {
        rows.row[j] = table + order[least(r + j, count - 1)] * stride;
        rows.weight[j] = r + j < count ? weights[r + j] : 0;
    }
    return rows;
}

/* Entries of eight rows, as floats. */
#define FETCH(x, at, m) floats x[8]; EIGHT x[j] = OF(part)(rows.row[j] + at, p, m)

/* out += weights * rows */
APART OF(mix)(OF(eight) rows, float *out, size_t n) {
    #define DO(at, m) { \
        vector total = OF(matched)(OF(load)(out + at, m)); \
        ALL_PARTS { FETCH(x, at, m); EIGHT total.part[p] += rows.weight[j] * x[j]; } \
        EIGHT __builtin_prefetch(rows.row[j] + at + AHEAD, 0, 2); \
        OF(store)(out + at, OF(unmatched)(total), m); \
    }
    COLUMNS(DO);
    #undef DO
}

/* products += <rows, v> */
APART OF(multiply)(OF(eight) rows, const float *v, size_t n, double *products, size_t count) {
    floats sums[8] = {{0}};
    #define DO(at, m) { \
        vector other = OF(matched)(OF(load)(v + at, m)); \
        ALL_PARTS { FETCH(x, at, m); EIGHT sums[j] += x[j] * other.part[p]; } \
    }
    COLUMNS(DO);
    #undef DO
    for (size_t j = 0; j < 8 && j < count; j++) products[j] += sum(sums[j]);
}

/* Both, for the newest rows, which are mixed in last: v, which may be the new out, is complete. So kept = v, the trend
   follows the first row, and own += <v, v>, <trend, v>. */
static inline __attribute__((always_inline)) void OF(both)(
    OF(eight) rows, float *out, const float *v, size_t n, double *products, size_t count, ENTRY *kept, float *trend,
    float gamma, double *own, int same) {
    floats sums[8] = {{0}}, square = {0}, along = {0};
    #define DO(at, m) { \
        vector total = OF(matched)(OF(load)(out + at, m)), other = total, newest; \
        if (!same) other = OF(matched)(OF(load)(v + at, m)); \
        ALL_PARTS { \
            FETCH(x, at, m); \
            EIGHT total.part[p] += rows.weight[j] * x[j]; \
            if (same) other.part[p] = total.part[p]; \
            EIGHT sums[j] += x[j] * other.part[p]; \
            newest.part[p] = x[0]; \
        } \
        OF(store)(out + at, OF(unmatched)(total), m); \
        vector whole = OF(unmatched)(other); \
        vector average = OF(followed)(OF(load)(trend + at, m), OF(unmatched)(newest), gamma); \
        OF(store)(trend + at, average, m); \
        OF(keep)(kept + at, whole, m); \
        ALL_PARTS square += whole.part[p] * whole.part[p], along += whole.part[p] * average.part[p]; \
    }
    COLUMNS(DO);
    #undef DO
    for (size_t j = 0; j < 8 && j < count; j++) products[j] += sum(sums[j]);
    own[0] += sum(square);
    own[1] += sum(along);
}

#define REMEMBERED size_t n, double *products, size_t count, ENTRY *kept, float *trend, float gamma, double *own
APART OF(remember_out)(OF(eight) rows, float *out, REMEMBERED) {
    OF(both)(rows, out, out, n, products, count, kept, trend, gamma, own, 1);
}

APART OF(remember_other)(OF(eight) rows, float *out, const float *v, REMEMBERED) {
    OF(both)(rows, out, v, n, products, count, kept, trend, gamma, own, 0);
}
#undef REMEMBERED
#undef FETCH

/* trend += gamma (newest - trend), in the same arithmetic. */
void OF(fodp_follow)(float *trend, const ENTRY *newest, float gamma, size_t n) {
    #define DO(at, m) { \
        vector x; \
        ALL_PARTS x.part[p] = OF(part)(newest + at, p, m); \
        OF(store)(trend + at, OF(followed)(OF(load)(trend + at, m), OF(unmatched)(x), gamma), m); \
    }
    COLUMNS(DO);
    #undef DO
}

/* out += sum_r weights[r] rows[r], where rows[r] is table[order[r]] and there is at least one. Then, if there is a v,
   which may be the new out: kept = v, which may be v itself, trend += gamma (rows[0] - trend), and products are
   <rows[r], v>, then <v, v>, then <trend, v>.
   Chunk by chunk, so that everything comes from main memory once, and eight rows at a time, since one alone would
   keep the processor waiting for memory. Sums of a chunk in float, of chunks in double. */
void OF(fodp_recall)(float *out, const ENTRY *table, size_t stride, const size_t *order, size_t count, size_t size,
                     const float *weights, const float *v, double *products, ENTRY *kept, float *trend, float gamma) {
    for (size_t r = 0; v && r < count + 2; r++) products[r] = 0;
    for (size_t at = 0; at < size; at += CHUNK) {
        size_t n = least(size - at, CHUNK), r = (count - 1) / 8 * 8;
        #define ROWS OF(eight_from)(r, table + at, stride, order, count, weights)
        #define REMEMBERED n, products, count, kept + at, trend + at, gamma, products + count
        for (; r; r -= 8) OF(mix)(ROWS, out + at, n);
        if (!v) OF(mix)(ROWS, out + at, n);
        else if (v == out) OF(remember_out)(ROWS, out + at, REMEMBERED);
        else OF(remember_other)(ROWS, out + at, v + at, REMEMBERED);
        for (r = 8; v && r < count; r += 8) OF(multiply)(ROWS, v + at, n, products + r, count - r);
        #undef ROWS
        #undef REMEMBERED
    }
}
#undef OF
#undef ENTRY
#undef PARTS
#undef vector
