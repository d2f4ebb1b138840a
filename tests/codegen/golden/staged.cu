/* stage
 * def f(...) -> (...) { ... }
 * sizes: ...
 */

#include <cuda_pipeline_primitives.h>

extern "C" __global__ void __launch_bounds__(8) stage(
    const float *__restrict__ x,
    float *__restrict__ out
) {
    const int tx = threadIdx.x;
    __shared__ __align__(16) float stage_1[32];
    __pipeline_memcpy_async(&stage_1[tx * 4], &x[tx * 4], 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    *reinterpret_cast<float4 *>(&out[tx * 4]) = *reinterpret_cast<const float4 *>(&stage_1[28 - tx * 4]);
}
