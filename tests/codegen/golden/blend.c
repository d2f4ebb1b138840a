/* blend
 *
 * cc -std=c99 -O3 -march=native -fopenmp -fwrapv; link with -lm.
 */
#include <stdint.h>

int blend(
    const float x[restrict 45],
    const int32_t index[restrict 45],
    float out[restrict 45],
    float *restrict total
) {
    for (int64_t i = 0; i < 32; i += 16) {
        #pragma omp simd
        for (int l = 0; l < 8; ++l)
            out[i + l] = x[i + l] > 0.0f ? x[(int64_t)index[i + l]] * 2.0f : -1.0f;
        #pragma omp simd
        for (int l = 0; l < 8; ++l)
            out[i + 8 + l] = x[i + 8 + l] > 0.0f ? x[(int64_t)index[i + 8 + l]] * 2.0f : -1.0f;
    }
    #pragma omp simd
    for (int l = 0; l < 8; ++l)
        out[32 + l] = x[32 + l] > 0.0f ? x[(int64_t)index[32 + l]] * 2.0f : -1.0f;
    #pragma omp simd
    for (int l = 0; l < 8; ++l)
        if (l < 5) out[40 + l] = x[40 + l] > 0.0f ? x[(int64_t)index[40 + l]] * 2.0f : -1.0f;
    total[0] = 0.0f;
    float total_lanes_0[2][8];
    #pragma omp simd
    for (int l = 0; l < 8; ++l)
        total_lanes_0[0][l] = 0.0f;
    #pragma omp simd
    for (int l = 0; l < 8; ++l)
        total_lanes_0[1][l] = 0.0f;
    for (int64_t i = 0; i < 32; i += 16) {
        #pragma omp simd
        for (int l = 0; l < 8; ++l)
            total_lanes_0[0][l] += x[i + l] * out[i + l];
        #pragma omp simd
        for (int l = 0; l < 8; ++l)
            total_lanes_0[1][l] += x[i + 8 + l] * out[i + 8 + l];
    }
    #pragma omp simd
    for (int l = 0; l < 8; ++l)
        total_lanes_0[0][l] += x[32 + l] * out[32 + l];
    #pragma omp simd
    for (int l = 0; l < 8; ++l)
        total_lanes_0[0][l] += l < 5 ? x[40 + l] * out[40 + l] : 0.0f;
    float reduced = total_lanes_0[0][0] + total_lanes_0[1][0];
    for (int l = 1; l < 8; ++l)
        reduced += total_lanes_0[0][l] + total_lanes_0[1][l];
    total[0] += reduced;
    return 0;
}
