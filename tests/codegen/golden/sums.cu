/* sums
 * def f(...) -> (...) { ... }
 * sizes: ...
 */

extern "C" __global__ void __launch_bounds__(64) sums(
    const float (*__restrict__ x)[70],
    float *__restrict__ total
) {
    const int bx = blockIdx.x;
    const int tx = threadIdx.x;
    float acc;
    float other;
    __shared__ __align__(16) float parts[2];
    acc = 0.0f;
    for (int c = tx; c < 70; c += 64) {
        acc += x[bx][c];
    }
    other = __shfl_xor_sync(0xffffffff, acc, 16, 32);
    acc += other;
    other = __shfl_xor_sync(0xffffffff, acc, 8, 32);
    acc += other;
    other = __shfl_xor_sync(0xffffffff, acc, 4, 32);
    acc += other;
    other = __shfl_xor_sync(0xffffffff, acc, 2, 32);
    acc += other;
    other = __shfl_xor_sync(0xffffffff, acc, 1, 32);
    acc += other;
    if (tx % 32 == 0) {
        parts[tx / 32] = acc;
    }
    __syncthreads();
    if (tx == 0) {
        total[bx] = parts[0] + parts[1];
    }
}
