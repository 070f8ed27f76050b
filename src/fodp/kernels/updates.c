/* Updates of parameters. */
#include "common.h"

/* Adam, whose second moment v is freed of the noise in it: m and v follow the gradient g, then w = kept w - rate m /
   sqrt(max(v - noise, smallest)). */
void fodp_adambc(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, size_t size,
                 float follow, float second, float rest, float noise, float smallest, float kept, float rate) {
    #pragma omp simd
    for (size_t i = 0; i < size; i++) {
        m[i] += follow * (g[i] - m[i]);
        v[i] = second * v[i] + rest * g[i] * g[i];
        float square = v[i] - noise;
        w[i] = kept * w[i] - rate * m[i] / sqrtf(square > smallest ? square : smallest);
    }
}
