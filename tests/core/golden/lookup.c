/* lookup
 * def lookup(float(V,D) table, long(B) words) -> (out) { out(b,d) = table(words(b),d) }
 *
 * cc -std=c99 -O3 -march=native -fopenmp -fwrapv; link with -lm.
 * Returns 0, or the number of the check that failed:
 *   1: dimension 0 of table, 50 elements from 0 on
 */
#include <stdint.h>

int lookup(
    const float table[restrict 50][20],
    const int64_t words[restrict 6],
    float out[restrict 6][20]
) {
    int status = 0;
    /* lookup.check0 */
    for (int64_t b = 0; b < 6; ++b) {
        if (status == 0 && !(words[b] >= 0 && words[b] < 50)) status = 1;
    }
    if (status) return status;
    /* lookup */
    for (int64_t tile = 0; tile < 6; ++tile) {
        #pragma omp simd
        for (int64_t d = 0; d < 20; ++d) {
            out[tile][d] = table[words[tile]][d];
        }
    }
    return status;
}
