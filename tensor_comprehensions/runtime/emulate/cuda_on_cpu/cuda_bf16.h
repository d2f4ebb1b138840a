// CUDA's bfloat16 for kernels that run on the CPU; only what the printer uses.
#pragma once

struct __nv_bfloat16 { unsigned short bits; };
inline float __bfloat162float(__nv_bfloat16 x) {
    unsigned wide = (unsigned)x.bits << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return value;
}
inline __nv_bfloat16 __float2bfloat16(float x) {
    unsigned wide;
    __builtin_memcpy(&wide, &x, 4);
    if (x != x) return {0x7fff};
    return {(unsigned short)((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __double2bfloat16(double x) {
    float narrow = (float)x;
    if (narrow == narrow && (double)narrow != x && x - x == 0) {  // round to odd, so that rounding twice is safe
        unsigned bits;
        __builtin_memcpy(&bits, &narrow, 4);
        bits -= __builtin_fabs((double)narrow) > __builtin_fabs(x);
        bits |= 1;
        __builtin_memcpy(&narrow, &bits, 4);
    }
    return __float2bfloat16(narrow);
}
inline __nv_bfloat16 operator+(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16(__bfloat162float(a) + __bfloat162float(b));
}
