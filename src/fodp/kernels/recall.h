/* out += sum_r weights[r] rows[r]; then dots[r] = <rows[r], v> and dots[count] = <v, v>. v may be the new out.
   Block by block, so that rows come from main memory once, and eight rows at a time: one alone would keep the
   processor waiting for memory. Sums of a block in float, of blocks in double. Written once for each kind of
   ENTRY that rows are kept in; WIDE makes a float of one. */
#define COLUMNS 4096
#define EIGHT(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7)
#define ROW(j) const ENTRY *restrict row##j = rows + least(r + j, count - 1) * stride + start;
#define WEIGHT(j) float weight##j = r + j < count ? weights[r + j] : 0;
#define MIX(j) + weight##j * WIDE(row##j[i])
#define ZERO(j) float sum##j = 0;
#define SUM(j) sum##j += WIDE(row##j[i]) * part[i];
#define KEEP(j) if (r + j < count) dots[r + j] += sum##j;
void RECALL(float *out, const ENTRY *rows, size_t stride, size_t count, size_t size,
            const float *weights, const float *v, double *dots) {
    for (size_t r = 0; dots && r <= count; r++) dots[r] = 0;
    for (size_t start = 0; start < size; start += COLUMNS) {
        size_t n = least(size - start, COLUMNS);
        float *block = out + start;
        for (size_t r = 0; r < count; r += 8) {
            EIGHT(ROW) EIGHT(WEIGHT)
            for (size_t i = 0; i < n; i++) block[i] = block[i] EIGHT(MIX);
        }
        if (!dots) continue;
        const float *part = v + start;
        for (size_t r = 0; r < count; r += 8) {
            EIGHT(ROW) EIGHT(ZERO)
            #pragma omp simd reduction(+ : sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7)
            for (size_t i = 0; i < n; i++) { EIGHT(SUM) }
            EIGHT(KEEP)
        }
        float square = 0;
        #pragma omp simd reduction(+ : square)
        for (size_t i = 0; i < n; i++) square += part[i] * part[i];
        dots[count] += square;
    }
}
#undef RECALL
#undef ENTRY
#undef WIDE
