/* softmax
 * def softmax(float(N,D) x) -> (out) {
 *     peak(n) max=! x(n,d)
 *     out(n,d) = exp(x(n,d) - peak(n))
 *     total(n) +=! out(n,d)
 *     out(n,d) = out(n,d) / total(n)
 * }
 *
 * cc -std=c99 -O3 -march=native -fopenmp -fwrapv; link with -lm.
 */
#include <math.h>
#include <stdint.h>

static inline float max_float32(float a, float b) {
    return a > b || a != a ? a : b;
}

int softmax(
    const float x[restrict 64][100],
    float out[restrict 64][100]
) {
    #pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < 64; ++tile) {
        float peak[1];
        float total[1];
        peak[0] = -INFINITY;
        {
            float total_1 = peak[0];
            #pragma omp simd reduction(max:total_1)
            for (int64_t d = 0; d < 100; ++d)
                total_1 = max_float32(total_1, x[tile][d]);
            peak[0] = total_1;
        }
        total[0] = 0.0f;
        for (int64_t d = 0; d < 100; ++d) {
            out[tile][d] = expf(x[tile][d] - peak[0]);
            total[0] += out[tile][d];
        }
        #pragma omp simd
        for (int64_t d = 0; d < 100; ++d) {
            out[tile][d] = out[tile][d] / total[0];
        }
    }
    return 0;
}
