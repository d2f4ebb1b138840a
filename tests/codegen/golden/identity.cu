/* matmul
 */

extern "C" __global__ void matmul(
    const float (*__restrict__ A)[5],
    const float (*__restrict__ B)[7],
    float (*__restrict__ C)[7]
) {
    for (int i = 0; i < 6; ++i) {
        for (int j = 0; j < 7; ++j) {
            C[i][j] = 0.0f;
            for (int k = 0; k < 5; ++k) {
                C[i][j] += A[i][k] * B[k][j];
            }
        }
    }
}
