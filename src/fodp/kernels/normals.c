/* Gaussian noise from random words (Box and Muller). */
#include "common.h"

/* -2 ln u with u = (|word| + 1/2) / 2^63 = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2). f is exact before it is
   rounded to float, so the result has all digits of a float near u = 1 too. Polynomial: Cephes' logf. */
static inline floats minus_two_log(longs word) {
    doubles u = (doubles)((longs)__builtin_convertvector(word, doubles) & 0x7FFFFFFFFFFFFFFFLL);
    u = (u + 0.5) * 0x1p-63;
    longs exponent = ((longs)u - 0x3FE6A09E667F3BCDLL) >> 52;
    doubles rest = (doubles)((longs)u - (exponent << 52)) - 1.0;
    floats f = __builtin_convertvector(rest, floats), k = __builtin_convertvector(exponent, floats), f2 = f * f;
    floats p = 7.0376836292E-2f * f - 1.1514610310E-1f;
    p = p * f + 1.1676998740E-1f;
    p = p * f - 1.2420140846E-1f;
    p = p * f + 1.4249322787E-1f;
    p = p * f - 1.6668057665E-1f;
    p = p * f + 2.0000714765E-1f;
    p = p * f - 2.4999993993E-1f;
    p = p * f + 3.3333331174E-1f;
    p = p * f * f2 - k * 2.12194440e-4f - 0.5f * f2;
    floats result = -2.0f * ((f + p) + k * 0.693359375f);
    return (floats)((ints)result & (result > 0));
}

/* Cosine and sine of pi * word / 2^31: quadrant by integers, Cephes' polynomials in [-pi/4, pi/4]. */
static inline void direction(ints word, floats *cosine, floats *sine) {
    ints quadrant = (word + (1 << 29)) >> 30;
    floats x = __builtin_convertvector(word - (quadrant << 30), floats) * 1.4629180792671596e-9f, x2 = x * x;
    floats s = ((-1.9515295891E-4f * x2 + 8.3321608736E-3f) * x2 - 1.6666654611E-1f) * x2 * x + x;
    floats c = ((2.443315711809948E-5f * x2 - 1.388731625493765E-3f) * x2 + 4.166664568298827E-2f) * x2 * x2;
    c = c - 0.5f * x2 + 1.0f;
    ints odd = -(quadrant & 1);
    ints swapped_c = ((ints)s & odd) | ((ints)c & ~odd), swapped_s = ((ints)c & odd) | ((ints)s & ~odd);
    *cosine = (floats)(swapped_c ^ (((quadrant + 1) & 2) << 30));
    *sine = (floats)(swapped_s ^ ((quadrant & 2) << 30));
}

/* first[i] = std r cos(a), second[i] = std r sin(a), from 64-bit words for r and 32-bit words for a.
   seconds is pairs, or pairs - 1 when the numbers are odd. */
#define CHUNK 1024
void fodp_normals(float *first, float *second, const char *radius_words, const char *angle_words,
                  size_t pairs, size_t seconds, float std) {
    float radius[CHUNK];
    for (size_t start = 0; start < pairs; start += CHUNK) {
        size_t count = least(pairs - start, CHUNK);
        for (size_t i = 0; i < count; i += LANES) {
            longs word = {0};
            if (count - i >= LANES) memcpy(&word, radius_words + 8 * (start + i), sizeof word);
            else memcpy(&word, radius_words + 8 * (start + i), 8 * (count - i));
            floats square = minus_two_log(word);
            memcpy(radius + i, &square, sizeof square);
        }
        for (size_t i = 0; i < count; i++) radius[i] = std * sqrtf(radius[i]);
        for (size_t i = 0; i < count; i += LANES) {
            size_t at = start + i, n = least(count - i, LANES);
            ints word = {0};
            floats r, c, s;
            memcpy(&r, radius + i, sizeof r);
            if (at + LANES <= seconds) {
                memcpy(&word, angle_words + 4 * at, sizeof word);
                direction(word, &c, &s);
                c *= r, s *= r;
                memcpy(first + at, &c, sizeof c);
                memcpy(second + at, &s, sizeof s);
            } else {
                memcpy(&word, angle_words + 4 * at, 4 * n);
                direction(word, &c, &s);
                c *= r, s *= r;
                memcpy(first + at, &c, 4 * n);
                memcpy(second + at, &s, 4 * least(seconds - at, n));
            }
        }
    }
}
