/* sums
 */

__kernel void sums(
    __global const float (*restrict x)[70],
    __global float *restrict total
) {
    const int bx = get_group_id(0);
    const int tx = get_local_id(0);
    __local float exchange_float32[64];
    float acc;
    float other;
    __local float parts[2];
    acc = 0.0f;
    for (int c = tx; c < 70; c += 64) {
        acc += x[bx][c];
    }
    exchange_float32[tx] = acc;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    other = exchange_float32[tx % 32 / 16 % 2 == 0 ? tx + 16 : tx - 16];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    acc += other;
    exchange_float32[tx] = acc;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    other = exchange_float32[tx % 32 / 8 % 2 == 0 ? tx + 8 : tx - 8];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    acc += other;
    exchange_float32[tx] = acc;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    other = exchange_float32[tx % 32 / 4 % 2 == 0 ? tx + 4 : tx - 4];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    acc += other;
    exchange_float32[tx] = acc;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    other = exchange_float32[tx % 32 / 2 % 2 == 0 ? tx + 2 : tx - 2];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    acc += other;
    exchange_float32[tx] = acc;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    other = exchange_float32[tx % 32 % 2 == 0 ? tx + 1 : tx - 1];
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    acc += other;
    if (tx % 32 == 0) {
        parts[tx / 32] = acc;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (tx == 0) {
        total[bx] = parts[0] + parts[1];
    }
}
