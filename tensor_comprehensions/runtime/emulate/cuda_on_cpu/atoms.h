// Atoms for kernels that run on the CPU. `emulated_atoms.py` generates a table and a function for each atom, which
// gathers operands from the lanes by their layouts, multiplies or moves matrices, and scatters the result.
#pragma once

enum MachineFormat { HALF, BFLOAT, TENSOR_FLOAT, FLOAT, DOUBLE, BYTE, UNSIGNED_BYTE, INTEGER, BITS };
struct MachineMode { int size, stride; };
struct MachineOperand {  // (thread, value) -> row + column * rows, by modes, the fastest first
    MachineFormat format;
    int bits, rows, columns, registers;
    MachineMode threads[3], values[3];
};
struct MachineProduct { MachineOperand total, left, right; int lanes; MachineMode lane[2]; };
struct MachineMove { MachineOperand to, from; };

struct TensorMap {  // the emulator's encoding, in 128 bytes: the fastest dimension first, strides in bytes
    char *base;
    long long stride[5];
    int extent[5];
    int rank, size, swizzle;
    short box[5];
    short rounds;  // loads round float to tf32
    short unused[12];
};
static_assert(sizeof(TensorMap) <= 128, "a tensor map has 128 bytes");

extern "C" {
void machine_product(const MachineProduct *row, void *total, const void *left, const void *right, int line);
void machine_matrices(const MachineMove *row, unsigned *to, const void *from, int line);
void machine_matrix_store(const MachineMove *row, void *to, const unsigned *from, int line);
void machine_transposition(const MachineMove *row, unsigned *to, unsigned from, int line);
void machine_barrier_part(int number, int threads, int line);
void machine_barrier_init(const void *at, int arrivals, int line);
void machine_barrier_arrive(const void *at, long long bytes, int line);
void machine_barrier_arrive_cluster(const void *at, unsigned block, int line);
void machine_cluster_barrier(int line);
void machine_load_box_multicast(void *to, const void *map, const int *x, const void *done, unsigned blocks, int line);
void machine_barrier_wait(const void *at, unsigned parity, int line);
void machine_fence(int line);
void machine_fence_barriers(int line);
void machine_load_box(void *to, const void *map, const int *x, const void *done, int line);
void machine_store_box(const void *map, const int *x, const void *from, int line);
void machine_close_boxes();
void machine_wait_boxes(int left);
void machine_group_product(const MachineProduct *row, void *total, const void *left, unsigned long long a,
                           unsigned long long b, unsigned more, int across, int line);
void machine_group_fence(int line);
void machine_group_commit(int line);
void machine_group_wait(int left, int line);
unsigned machine_elect();
unsigned machine_shared_offset(const void *at);
unsigned long long machine_descriptor(unsigned long long offset, int leading, int stride, int mode);
}

template <int number, int threads> inline void barrier_part(int line = __builtin_LINE()) {
    machine_barrier_part(number, threads, line);
}
inline void copy_async_zero_16(void *to, const void *from, unsigned bytes) { machine_copy(to, from, 16, (int)bytes); }
inline void copy_async_zero_8(void *to, const void *from, unsigned bytes) { machine_copy(to, from, 8, (int)bytes); }
inline void copy_async_zero_4(void *to, const void *from, unsigned bytes) { machine_copy(to, from, 4, (int)bytes); }

#define LINE int line = __builtin_LINE()
template <int arrivals> inline void barrier_init(const void *at, LINE) { machine_barrier_init(at, arrivals, line); }
inline void barrier_arrive(const void *at, LINE) { machine_barrier_arrive(at, 0, line); }
inline void barrier_arrive_cluster(const void *at, unsigned block, LINE) {
    machine_barrier_arrive_cluster(at, block, line);
}
inline void cluster_barrier(LINE) { machine_cluster_barrier(line); }
inline void barrier_expect(const void *at, unsigned bytes, LINE) { machine_barrier_arrive(at, bytes, line); }
inline void barrier_wait(const void *at, unsigned phase, LINE) { machine_barrier_wait(at, phase, line); }
inline void fence_async(LINE) { machine_fence(line); }
inline void fence_barrier_init(LINE) { machine_fence_barriers(line); }
inline void bulk_commit() { machine_close_boxes(); }
template <int groups> inline void bulk_wait() { machine_wait_boxes(groups); }
inline void wgmma_fence(LINE) { machine_group_fence(line); }
inline void wgmma_commit(LINE) { machine_group_commit(line); }
template <int groups> inline void wgmma_wait(LINE) { machine_group_wait(groups, line); }
template <int count> inline void registers_dec() {}
template <int count> inline void registers_inc() {}
inline void elect(unsigned *d) { *d = machine_elect(); }
inline unsigned matrix_base(const void *at) { return machine_shared_offset(at) / 16; }
template <int leading, int stride, int mode, int bytes>
inline unsigned long long matrix_descriptor(unsigned base, unsigned long long units = 0) {
    return machine_descriptor(16 * (base + units) + bytes, leading, stride, mode);
}
#define BOXES(rank, X, ...) \
    inline void tma_load_##rank(void *to, const void *map, X, const void *done, LINE) { \
        const int x[5] = {__VA_ARGS__}; \
        machine_load_box(to, map, x, done, line); \
    } \
    inline void tma_load_##rank##_multicast(void *to, const void *map, X, const void *done, unsigned blocks, LINE) { \
        const int x[5] = {__VA_ARGS__}; \
        machine_load_box_multicast(to, map, x, done, blocks, line); \
    } \
    inline void tma_store_##rank(const void *map, X, const void *from, LINE) { \
        const int x[5] = {__VA_ARGS__}; \
        machine_store_box(map, x, from, line); \
    }
#define COMMA ,
BOXES(2, int a COMMA int b, a, b)
BOXES(3, int a COMMA int b COMMA int c, a, b, c)
BOXES(4, int a COMMA int b COMMA int c COMMA int d, a, b, c, d)
BOXES(5, int a COMMA int b COMMA int c COMMA int d COMMA int e, a, b, c, d, e)
#undef COMMA
#undef BOXES
#undef LINE
