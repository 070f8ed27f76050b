/* The keystream of AES-256 in counter mode, from a block on. Returns 0 where the processor lacks the instructions. */
#include "common.h"

#if defined(__VAES__) && defined(__AVX512BW__)
#include <immintrin.h>
#define AT_ONCE 8 /* times four blocks: the processor works on several while a round takes its time */

/* Every word of the key is xored with those before it, and with the new word (FIPS 197, key expansion). */
static inline __m128i spread(__m128i key, __m128i word) {
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, word);
}

static inline void expand(__m512i *keys, const unsigned char *key) {
    __m128i k[16];
    memcpy(k, key, 32);
    #define TURN(i, constant) \
        k[i] = spread(k[i - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(k[i - 1], constant), 0xFF)); \
        k[i + 1] = spread(k[i - 1], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(k[i], 0), 0xAA));
    TURN(2, 1) TURN(4, 2) TURN(6, 4) TURN(8, 8) TURN(10, 16) TURN(12, 32) TURN(14, 64)
    #undef TURN
    for (int i = 0; i < 15; i++) keys[i] = _mm512_broadcast_i32x4(k[i]);
}

int fodp_keystream(char *out, size_t size, const unsigned char *key, uint64_t block) {
    __m512i keys[15], x[AT_ONCE];
    expand(keys, key);
    /* The counter is the last eight bytes of a block, most significant first. */
    const __m512i reverse = _mm512_broadcast_i32x4(_mm_set_epi64x(0x08090A0B0C0D0E0F, 0x0001020304050607));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    __m512i counter = _mm512_set_epi64(block + 3, 0, block + 2, 0, block + 1, 0, block, 0);
    for (size_t at = 0; at < size; at += sizeof x) {
        for (int j = 0; j < AT_ONCE; j++) {
            x[j] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, reverse), keys[0]);
            counter = _mm512_add_epi64(counter, four);
        }
        for (int i = 1; i < 14; i++)
            for (int j = 0; j < AT_ONCE; j++) x[j] = _mm512_aesenc_epi128(x[j], keys[i]);
        for (int j = 0; j < AT_ONCE; j++) x[j] = _mm512_aesenclast_epi128(x[j], keys[14]);
        memcpy(out + at, x, least(size - at, sizeof x));
    }
    return 1;
}
#else
int fodp_keystream(char *out, size_t size, const unsigned char *key, uint64_t block) { return 0; }
#endif
