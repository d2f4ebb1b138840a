/* matmul
 * def matmul(float(M,K) a, float(K,N) w) -> (out) { out(m,n) +=! a(m,k) * w(k,n) }
 * M=6 K=5 N=33
 *
 * cc -std=c99 -O3 -march=native -fopenmp -fwrapv; link with -lm.
 */
#include <stdint.h>

int matmul(
    const float a[restrict 6][5],
    const float w[restrict 5][33],
    float out[restrict 6][33]
) {
    #pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < 6; ++i) {
        #pragma omp simd
        for (int64_t j = 0; j < 33; ++j) {
            out[i][j] = 0.0f;
        }
        for (int64_t k = 0; k < 5; ++k) {
            #pragma omp simd
            for (int64_t j = 0; j < 33; ++j) {
                out[i][j] += a[i][k] * w[k][j];
            }
        }
    }
    return 0;
}
