/* matmul
 * def f(...) -> (...) { ... }
 * sizes: ...
 */

extern "C" __global__ void __launch_bounds__(64) matmul(
    const float (*__restrict__ A)[40],
    const float (*__restrict__ B)[40],
    float (*__restrict__ C)[40]
) {
    const int bx = blockIdx.x;
    const int by = blockIdx.y;
    const int tx = threadIdx.x;
    const int ty = threadIdx.y;
    float acc[4];
    __shared__ __align__(16) float A_shared[16][17];
    __shared__ __align__(16) float B_shared[16][17];
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        acc[u] = 0.0f;
    }
    for (int k0 = 0; k0 < 40; k0 += 16) {
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            A_shared[ty + u * 4][tx] = by * 16 + (ty + u * 4) < 40 && k0 + tx < 40 ? A[by * 16 + (ty + u * 4)][k0 + tx] : 0;
        }
        #pragma unroll
        for (int u = 0; u < 4; ++u) {
            B_shared[ty + u * 4][tx] = k0 + (ty + u * 4) < 40 && bx * 16 + tx < 40 ? B[k0 + (ty + u * 4)][bx * 16 + tx] : 0;
        }
        __syncthreads();
        for (int k = 0; k < 16; ++k) {
            #pragma unroll
            for (int u = 0; u < 4; ++u) {
                acc[u] += A_shared[ty + u * 4][k] * B_shared[k][tx];
            }
        }
        __syncthreads();
    }
    #pragma unroll
    for (int u = 0; u < 4; ++u) {
        if (by * 16 + (ty + u * 4) < 40 && bx * 16 + tx < 40) {
            C[by * 16 + (ty + u * 4)][bx * 16 + tx] = acc[u];
        }
    }
}
