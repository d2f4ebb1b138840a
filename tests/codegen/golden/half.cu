/* stage
 * def f(...) -> (...) { ... }
 * sizes: ...
 */

#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>

struct __align__(16) packed_half8 { __half lane[8]; };

extern "C" __global__ void __launch_bounds__(8) stage(
    const __half *__restrict__ x,
    __half *__restrict__ out
) {
    const int tx = threadIdx.x;
    __shared__ __align__(16) __half stage_1[64];
    __pipeline_memcpy_async(&stage_1[tx * 8], &x[tx * 8], 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    *reinterpret_cast<packed_half8 *>(&out[tx * 8]) = *reinterpret_cast<const packed_half8 *>(&stage_1[56 - tx * 8]);
}
