// CUDA's extensions of C++, for a kernel that runs on the CPU: each thread is a fiber of `machine.cpp`.
// The compiler reports every access to memory to the machine (`-fsanitize=thread,bounds`), so that the kernel's source
// stays as it is.
#pragma once

#define TC_MACHINE  // the atoms have functions here
#define __builtin_assume(condition)
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__ __restrict
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ thread_local

struct Coordinates { unsigned x, y, z; };
struct Place { Coordinates thread, block, threads, blocks; };

extern "C" {
extern Place machine_place;
void machine_barrier(int line);
void machine_warp_barrier(int line);
unsigned long long machine_shuffle(int down, int lane, int width, unsigned long long value, int line);
unsigned long long machine_atomic(void *place, int bytes);
void machine_set(void *place, int bytes, unsigned long long value);
void machine_copy(void *shared, const void *global, int bytes, int given);
void machine_commit();
void machine_wait(int groups);
}

#define threadIdx machine_place.thread
#define blockIdx machine_place.block
#define blockDim machine_place.threads
#define gridDim machine_place.blocks

inline void __syncthreads(int line = __builtin_LINE()) { machine_barrier(line); }
inline void __syncwarp(unsigned = ~0u, int line = __builtin_LINE()) { machine_warp_barrier(line); }

template <class T> inline T machine_shuffled(int down, T value, int lane, int width, int line) {
    static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = machine_shuffle(down, lane, width, bits, line);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
template <class T> inline T __shfl_xor_sync(unsigned, T v, int lane, int width = 32, int line = __builtin_LINE()) {
    return machine_shuffled(0, v, lane, width, line);
}
template <class T> inline T __shfl_down_sync(unsigned, T v, int lane, int width = 32, int line = __builtin_LINE()) {
    return machine_shuffled(1, v, lane, width, line);
}

template <class T> inline T __shfl_sync(unsigned, T v, int lane, int width = 32, int line = __builtin_LINE()) {
    return machine_shuffled(2, v, lane, width, line);
}

#define __ldg(address) (*(address))

inline float __int_as_float(int bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// Apply `change` to an element, as one access for the machine.
template <class T, class F> inline T machine_updated(T *place, F change) {
    T old, changed;
    unsigned long long bits = machine_atomic(place, sizeof(T));
    __builtin_memcpy(&old, &bits, sizeof(T));
    changed = change(old);
    __builtin_memcpy(&bits, &changed, sizeof(T));
    machine_set(place, sizeof(T), bits);
    return old;
}
template <class T> inline T atomicAdd(T *place, T value) {
    return machine_updated(place, [=](T old) { return T(old + value); });
}
template <class T> inline T atomicMin(T *place, T value) {
    return machine_updated(place, [=](T old) { return value < old ? value : old; });
}
template <class T> inline T atomicMax(T *place, T value) {
    return machine_updated(place, [=](T old) { return value > old ? value : old; });
}
inline unsigned long long atomicCAS(unsigned long long *place, unsigned long long expected, unsigned long long value) {
    return machine_updated(place, [=](unsigned long long old) { return old == expected ? value : old; });
}

#define MACHINE_EXTREMA(T) \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
MACHINE_EXTREMA(int)
MACHINE_EXTREMA(unsigned)
MACHINE_EXTREMA(long long)
MACHINE_EXTREMA(unsigned long long)
#undef MACHINE_EXTREMA

#define MACHINE_VECTOR(T, name, size) \
    struct alignas(sizeof(T) * 2) name##2 { T x, y; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) name##4 { T x, y, z, w; }; \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
MACHINE_VECTOR(float, float, 4)
MACHINE_VECTOR(double, double, 8)
MACHINE_VECTOR(signed char, char, 1)
MACHINE_VECTOR(unsigned char, uchar, 1)
MACHINE_VECTOR(short, short, 2)
MACHINE_VECTOR(unsigned short, ushort, 2)
MACHINE_VECTOR(int, int, 4)
MACHINE_VECTOR(unsigned, uint, 4)
MACHINE_VECTOR(long long, longlong, 8)
MACHINE_VECTOR(unsigned long long, ulonglong, 8)
#undef MACHINE_VECTOR

#define MACHINE_1(name) extern "C" float name##f(float) noexcept; extern "C" double name(double) noexcept;
#define MACHINE_2(name) \
    extern "C" float name##f(float, float) noexcept; \
    extern "C" double name(double, double) noexcept;
MACHINE_1(exp) MACHINE_1(exp2) MACHINE_1(expm1) MACHINE_1(log) MACHINE_1(log2) MACHINE_1(log10) MACHINE_1(log1p)
MACHINE_1(sqrt) MACHINE_1(cbrt) MACHINE_1(sin) MACHINE_1(cos) MACHINE_1(tan) MACHINE_1(asin) MACHINE_1(acos)
MACHINE_1(atan) MACHINE_1(sinh) MACHINE_1(cosh) MACHINE_1(tanh) MACHINE_1(asinh) MACHINE_1(acosh) MACHINE_1(atanh)
MACHINE_1(erf) MACHINE_1(erfc) MACHINE_1(lgamma) MACHINE_1(tgamma) MACHINE_1(floor) MACHINE_1(ceil) MACHINE_1(trunc)
MACHINE_1(round) MACHINE_1(rint) MACHINE_1(nearbyint) MACHINE_1(fabs) MACHINE_1(logb)
MACHINE_2(pow) MACHINE_2(atan2) MACHINE_2(fmod) MACHINE_2(hypot) MACHINE_2(fmin) MACHINE_2(fmax) MACHINE_2(copysign)
MACHINE_2(fdim) MACHINE_2(remainder) MACHINE_2(nextafter)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
#undef MACHINE_1
#undef MACHINE_2
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// How the machine calls a kernel: the addresses of its arguments in one array.
template <class T> struct machine_argument {  // by value: a tensor map
    __attribute__((no_sanitize_thread)) static T get(void *p) { return *(T *)p; }
};
template <class T> struct machine_argument<T *> {
    static T *get(void *p) { return (T *)p; }
};
template <class T> struct machine_argument<T *__restrict> {
    static T *get(void *p) { return (T *)p; }
};
template <class F, int... I> struct MachineCall;
template <class... A, int... I> struct MachineCall<void(A...), I...> {
    __attribute__((no_sanitize_thread)) static void run(void (*kernel)(A...), void **arguments) {
        if constexpr (sizeof...(I) < sizeof...(A))
            MachineCall<void(A...), I..., int(sizeof...(I))>::run(kernel, arguments);
        else
            kernel(machine_argument<A>::get(arguments[I])...);
    }
};
template <class F> inline void machine_call(F *kernel, void **arguments) { MachineCall<F>::run(kernel, arguments); }
