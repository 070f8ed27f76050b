/* Two loops: Gaussian noise (fodp_normals), and one pass over a memory of earlier releases (fodp_recall). */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16 /* of the compiler's vectors, which it cuts to what the processor has */
#define VECTOR(bytes) __attribute__((vector_size(bytes * LANES)))
typedef double doubles VECTOR(8); typedef int64_t longs VECTOR(8);
typedef float floats VECTOR(4); typedef int32_t ints VECTOR(4);
static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* -2 ln u with u = (|word| + 1/2) / 2^63 = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2). f is exact before it is
   rounded to float, so the result has all digits of a float near u = 1 too. Polynomial: Cephes' logf. */
static inline floats minus_two_log(longs word) {
    static const float by[] = {7.0376836292E-2f, -1.1514610310E-1f, 1.1676998740E-1f, -1.2420140846E-1f,
        1.4249322787E-1f, -1.6668057665E-1f, 2.0000714765E-1f, -2.4999993993E-1f, 3.3333331174E-1f};
    doubles u = ((doubles)((longs)__builtin_convertvector(word, doubles) & 0x7FFFFFFFFFFFFFFFLL) + 0.5) * 0x1p-63;
    longs exponent = ((longs)u - 0x3FE6A09E667F3BCDLL) >> 52;
    doubles rest = (doubles)((longs)u - (exponent << 52)) - 1.0;
    floats f = __builtin_convertvector(rest, floats), k = __builtin_convertvector(exponent, floats), f2 = f * f;
    floats p = by[0] * f + by[1];
    for (size_t j = 2; j < 9; j++) p = p * f + by[j];
    p = p * f * f2 - k * 2.12194440e-4f - 0.5f * f2;
    floats result = -2.0f * ((f + p) + k * 0.693359375f);
    return (floats)((ints)result & (result > 0));
}

/* n numbers radius * cosine and m of radius * sine, of the angles pi * word / 2^31: quadrant by integers, Cephes'
   polynomials in [-pi/4, pi/4]. */
static inline void turn(float *first, float *second, const float *radius, const char *words, size_t n, size_t m) {
    ints word = {0};
    floats r;
    memcpy(&word, words, 4 * n), memcpy(&r, radius, sizeof r);
    ints quadrant = (word + (1 << 29)) >> 30;
    floats x = __builtin_convertvector(word - (quadrant << 30), floats) * 1.4629180792671596e-9f, x2 = x * x;
    floats s = ((-1.9515295891E-4f * x2 + 8.3321608736E-3f) * x2 - 1.6666654611E-1f) * x2 * x + x;
    floats c = ((2.443315711809948E-5f * x2 - 1.388731625493765E-3f) * x2 + 4.166664568298827E-2f) * x2 * x2;
    c = c - 0.5f * x2 + 1.0f;
    ints odd = -(quadrant & 1), cosine = ((ints)s & odd) | ((ints)c & ~odd), sine = ((ints)c & odd) | ((ints)s & ~odd);
    c = r * (floats)(cosine ^ (((quadrant + 1) & 2) << 30));
    s = r * (floats)(sine ^ ((quadrant & 2) << 30));
    memcpy(first, &c, 4 * n), memcpy(second, &s, 4 * m);
}

/* Box and Muller: first[i] = std r cos(a), second[i] = std r sin(a), from 64-bit words for r and 32-bit words for a.
   `seconds` is pairs, or pairs - 1 when the numbers are odd. */
void fodp_normals(float *first, float *second, const char *radii, const char *angles, size_t pairs, size_t seconds,
                  float std) {
    float radius[1024];
    for (size_t start = 0; start < pairs; start += 1024) {
        size_t count = least(pairs - start, 1024);
        for (size_t i = 0; i < count; i += LANES) {
            longs word = {0};
            if (count - i >= LANES) memcpy(&word, radii + 8 * (start + i), sizeof word);
            else memcpy(&word, radii + 8 * (start + i), 8 * (count - i));
            floats square = minus_two_log(word);
            memcpy(radius + i, &square, sizeof square);
        }
        for (size_t i = 0; i < count; i++) radius[i] = std * sqrtf(radius[i]);
        for (size_t i = 0, at = start; i < count; i += LANES, at += LANES) {
            if (at + LANES <= seconds) turn(first + at, second + at, radius + i, angles + 4 * at, LANES, LANES);
            else turn(first + at, second + at, radius + i, angles + 4 * at, count - i, seconds - at);
        }
    }
}

/* out += weights * rows. Eight rows at a time hide the wait for memory; the last one fills empty places, weight 0. */
#define EIGHT _Pragma("GCC unroll 8") for (size_t j = 0; j < 8; j++)
static void mix(float *restrict out, const float *table, size_t stride, size_t count, const float *weights, size_t n) {
    for (size_t r = 0; r < count; r += 8) {
        const float *rows[8]; float by[8];
        EIGHT rows[j] = table + least(r + j, count - 1) * stride, by[j] = r + j < count ? weights[r + j] : 0;
        #pragma omp simd
        for (size_t i = 0; i < n; i++) {
            float total = out[i];
            EIGHT total += by[j] * rows[j][i];
            out[i] = total;
        }
    }
}

/* squares[r] += |table[r] - trend|^2. Four rows at a time: one sum alone would wait for its own last addition. */
#define SQUARE(j) (rows[j][i] - trend[i]) * (rows[j][i] - trend[i])
static void distances(double *squares, const float *table, size_t stride, size_t count, const float *trend, size_t n) {
    for (size_t r = 0; r < count; r += 4) {
        const float *rows[4];
        for (size_t j = 0; j < 4; j++) rows[j] = table + least(r + j, count - 1) * stride;
        float a = 0, b = 0, c = 0, d = 0;
        #pragma omp simd reduction(+ : a, b, c, d)
        for (size_t i = 0; i < n; i++)
            a += SQUARE(0), b += SQUARE(1), c += SQUARE(2), d += SQUARE(3);
        float sums[4] = {a, b, c, d};
        for (size_t j = 0; j < 4 && r + j < count; j++) squares[r + j] += sums[j];
    }
}

/* out = scale out + sum_r weights[r] table[r] over the first `count` rows. With a trend, and v the new out, or with
   `earlier` the old one: table[row] = v, trend += gamma (v - trend) as PyTorch's lerp (gamma 1 gives v exactly), and
   squares[r] = |table[r] - trend|^2 of the first `kept` rows, squares[kept] = |trend|^2. Chunk by chunk, so that all
   rows come from main memory once; v may take the place of a row of which the chunk has been read. */
void fodp_recall(float *out, float *table, size_t stride, size_t size, const float *weights, size_t count, float scale,
                 int earlier, float *restrict trend, float gamma, size_t row, double *squares, size_t kept) {
    float before[2048];
    for (size_t j = 0; trend && j <= kept; j++) squares[j] = 0;
    for (size_t at = 0; at < size; at += 2048, out += 2048, table += 2048) {
        size_t n = least(size - at, 2048);
        const float *v = earlier ? memcpy(before, out, sizeof(float) * n) : out;
        if (scale != 1) for (size_t i = 0; i < n; i++) out[i] *= scale;
        mix(out, table, stride, count, weights, n);
        if (!trend) continue;
        memcpy(table + row * stride, v, sizeof(float) * n);
        for (size_t i = 0; i < n; i++)
            trend[i] = gamma < 0.5f ? trend[i] + gamma * (v[i] - trend[i]) : v[i] - (1 - gamma) * (v[i] - trend[i]);
        distances(squares, table, stride, kept, trend, n);
        double square = 0; /* in double: squares neither vanish nor overflow */
        #pragma omp simd reduction(+ : square)
        for (size_t i = 0; i < n; i++) square += (double)trend[i] * trend[i];
        squares[kept] += square, trend += 2048;
    }
}
