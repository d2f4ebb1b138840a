// Atoms for kernels that run on the CPU. The tables of the atoms, and a function for each, are generated from the rows
// that the printer has: gather from the lanes by their layouts, multiply or move matrices, scatter.
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

extern "C" {
void machine_product(const MachineProduct *row, void *total, const void *left, const void *right, int line);
void machine_matrices(const MachineMove *row, unsigned *to, const void *from, int line);
void machine_transposition(const MachineMove *row, unsigned *to, unsigned from, int line);
void machine_barrier_part(int number, int threads, int line);
}

template <int number, int threads> inline void barrier_part(int line = __builtin_LINE()) {
    machine_barrier_part(number, threads, line);
}
inline void copy_async_zero_16(void *to, const void *from, unsigned bytes) { machine_copy(to, from, 16, (int)bytes); }
inline void copy_async_zero_8(void *to, const void *from, unsigned bytes) { machine_copy(to, from, 8, (int)bytes); }
inline void copy_async_zero_4(void *to, const void *from, unsigned bytes) { machine_copy(to, from, 4, (int)bytes); }
