// CUDA's half-precision numbers for kernels that run on the CPU; only what the printer uses.
#pragma once

struct __half { _Float16 value; };
inline float __half2float(__half x) { return x.value; }
inline __half __float2half(float x) { return {(_Float16)x}; }
inline __half __double2half(double x) { return {(_Float16)x}; }
inline __half __int2half_rn(int x) { return {(_Float16)x}; }
inline __half __uint2half_rn(unsigned x) { return {(_Float16)x}; }
inline __half __ll2half_rn(long long x) { return {(_Float16)x}; }
inline __half __ull2half_rn(unsigned long long x) { return {(_Float16)x}; }
inline __half operator+(__half a, __half b) { return {(_Float16)((float)a.value + (float)b.value)}; }
