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

/* The same, and products += <rows, v> of the first count. */
APART OF(mix_and_multiply)(OF(eight) rows, float *out, const float *v, size_t n, double *products, size_t count) {
    floats sums[8] = {{0}};
    #define DO(at, m) { \
        vector total = OF(matched)(OF(load)(out + at, m)), other = OF(matched)(OF(load)(v + at, m)); \
        ALL_PARTS { \
            FETCH(x, at, m); \
            EIGHT total.part[p] += rows.weight[j] * x[j]; \
            EIGHT sums[j] += x[j] * other.part[p]; \
        } \
        EIGHT __builtin_prefetch(rows.row[j] + at + AHEAD, 0, 2); \
        OF(store)(out + at, OF(unmatched)(total), m); \
    }
    COLUMNS(DO);
    #undef DO
    for (size_t j = 0; j < 8 && j < count; j++) products[j] += sum(sums[j]);
}

/* The same for the newest rows, which come last: out is scaled first, kept = v or the complete out, the trend follows
   the first row, and own += <kept, kept>, <trend, kept>. */
static inline __attribute__((always_inline)) void OF(remember)(
    OF(eight) rows, float *out, float scale, const float *v, size_t n, double *products, size_t count, ENTRY *kept,
    float *trend, float gamma, double *own, int earlier) {
    floats sums[8] = {{0}}, square = {0}, along = {0};
    #define DO(at, m) { \
        vector total = OF(matched)(OF(load)(out + at, m)), other = OF(matched)(OF(load)(v + at, m)), newest; \
        ALL_PARTS { \
            FETCH(x, at, m); \
            if (earlier) total.part[p] *= scale; \
            EIGHT total.part[p] += rows.weight[j] * x[j]; \
            EIGHT sums[j] += x[j] * other.part[p]; \
            newest.part[p] = x[0]; \
        } \
        total = OF(unmatched)(total); \
        OF(store)(out + at, total, m); \
        vector whole = earlier ? OF(unmatched)(other) : total; \
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

#define REMEMBERED OF(eight) rows, float *out, float scale, const float *v, size_t n, double *products, size_t count, \
                   ENTRY *kept, float *trend, float gamma, double *own
APART OF(remember_out)(REMEMBERED) {
    OF(remember)(rows, out, scale, v, n, products, count, kept, trend, gamma, own, 0);
}

APART OF(remember_earlier)(REMEMBERED) {
    OF(remember)(rows, out, scale, v, n, products, count, kept, trend, gamma, own, 1);
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

/* out += sum_r weights[r] rows[r], where rows[r] is table[order[r]] and there is at least one. Then, if there are
   products, and v is the new out: table[row] = v, trend += gamma (rows[0] - trend), and the row's products are <v, v>,
   <trend, v>, and <rows[r], v> for every r; those of the new out are complete only when all rows have been read, so
   they come from <rows[r], out before> and the rows' own products. With `earlier`, v is what out was, and out is
   scaled before anything is added.
   Chunk by chunk, so that everything comes from main memory once, and eight rows at a time, since one alone would
   keep the processor waiting for memory. Sums of a chunk in float, of chunks in double. */
void OF(fodp_recall)(float *out, ENTRY *table, size_t stride, const size_t *order, size_t count, size_t size,
                     const float *weights, double *products, size_t width, size_t row, float *trend, float gamma,
                     int earlier, float scale) {
    float before[CHUNK];
    double *own = products ? products + row * width : 0, *past = products ? own + 2 : 0;
    for (size_t r = 0; products && r < count + 2; r++) own[r] = 0;
    for (size_t at = 0; at < size; at += CHUNK) {
        size_t n = least(size - at, CHUNK), r = (count - 1) / 8 * 8;
        const float *other = out + at;
        float last_scale = r ? 1 : scale; /* a mix of older rows comes after it */
        if (products && r) other = memcpy(before, out + at, sizeof(float) * n); /* the mix would change it */
        for (size_t i = 0; earlier && r && i < n; i++) out[at + i] *= scale;
        #define ROWS OF(eight_from)(r, table + at, stride, order, count, weights)
        for (; products && r; r -= 8) OF(mix_and_multiply)(ROWS, out + at, other, n, past + r, count - r);
        for (; !products && r; r -= 8) OF(mix)(ROWS, out + at, n);
        #define NEWEST out + at, last_scale, other, n, past, count, table + row * stride + at, trend + at, gamma, own
        if (!products) OF(mix)(ROWS, out + at, n);
        else if (earlier) OF(remember_earlier)(ROWS, NEWEST);
        else OF(remember_out)(ROWS, NEWEST);
        #undef ROWS
        #undef NEWEST
    }
    for (size_t r = 0; products && !earlier && r < count; r++) {
        past[r] += weights[r] * products[order[r] * width];
        for (size_t i = 0; i < r; i++) past[r] += weights[i] * products[order[i] * width + 1 + r - i];
        for (size_t i = r + 1; i < count; i++) past[r] += weights[i] * products[order[r] * width + 1 + i - r];
    }
}
#undef OF
#undef ENTRY
#undef PARTS
#undef vector
