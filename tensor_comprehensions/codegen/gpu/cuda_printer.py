"""Loop programs as CUDA C++, for NVRTC and for people to read."""

from __future__ import annotations

from ...core.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64
from ...core.math_functions import FUNCTIONS, TF32
from ...loop_ir import nodes as ir
from ...loop_ir.show import LineNumbers
from ..c.dialect import C99, CDialect, VectorType, helpers
from .gpu_printer import GpuCode, GpuDialect
from .gpu_printer import emit_gpu_source as emit_gpu
from .ptx import ATOM_CALLS, CALLED, GUARD, HOPPER_CALLS, definition

_TYPES = {
    "bool": "bool", "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int",
    "uint64": "unsigned long long", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
}  # fmt: skip
_UNSIGNED = {name: _TYPES[f"u{name}"] for name in ("int8", "int16", "int32", "int64")}
_QUALIFIER = "__device__ inline"

_MATH = {
    FLOAT32.name: {name: f"{name}f" for name in FUNCTIONS} | {TF32: C99.math[FLOAT32.name][TF32]},
    FLOAT64.name: {name: name for name in FUNCTIONS},
}

_FAIL = """__device__ inline void fail(long long *status, long long check, long long value) {
    if (atomicCAS((unsigned long long *)status, 0ull, (unsigned long long)check) == 0) status[1] = value;
}"""

_BROADCAST = """__device__ inline int broadcast_warp(long long x) {
    return __shfl_sync(0xffffffff, (int)x, 0);
}"""
_MATRIX_BASE = f"""#ifndef {GUARD}
__device__ __forceinline__ unsigned int matrix_base(const void *at) {{
    return ((unsigned int)__cvta_generic_to_shared(at) & 0x3ffff) >> 4;
}}
#endif"""
"""The address that `wgmma` descriptors count from, in units of 16 bytes.

A kernel broadcasts it once, because the assembler would otherwise compute it again in each step.
"""
_DESCRIPTOR = f"""#ifndef {GUARD}
template <int leading, int stride, int mode, int bytes>
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned int base, unsigned long long units = 0) {{
    const unsigned int rest = (unsigned int)stride | (unsigned int)mode << 30;
    return ((unsigned long long)rest << 32 | base + ((unsigned int)leading << 16)) + units + bytes / 16;
}}
#endif"""
"""The `wgmma` descriptor of the matrix `bytes` plus 16 `units` after a base.

Descriptors of one base differ by one addition, and those of stages by a constant in unrolled loops.
"""
_TENSOR_MAP = "struct __align__(64) tensor_map { unsigned long long words[16]; };"


def _make_vector_types() -> dict[tuple[str, int], VectorType]:
    """The vector types of up to 16 bytes: CUDA's own, and structures for 16-bit floats."""
    stems = {
        "float32": "float", "float64": "double", "int8": "char", "uint8": "uchar", "int16": "short",
        "uint16": "ushort", "int32": "int", "uint32": "uint", "int64": "longlong", "uint64": "ulonglong",
    }  # fmt: skip
    table = {}
    for name, stem in stems.items():
        for lanes in (2, 4):
            if DTYPES[name].size * lanes <= 16:
                parts = tuple(f"{{0}}.{part}" for part in "xyzw"[:lanes])
                table[name, lanes] = VectorType(f"{stem}{lanes}", parts, f"make_{stem}{lanes}({{}})")
    for name, stem in _PACKED.items():
        for lanes in (2, 4, 8):
            parts = tuple(f"{{0}}.lane[{n}]" for n in range(lanes))
            table[name, lanes] = VectorType(f"{stem}{lanes}", parts, f"{stem}{lanes}{{{{{{}}}}}}")
    return table


_PACKED = {FLOAT16.name: "packed_half", BFLOAT16.name: "packed_bfloat16_x"}
_STRUCTURES = {
    f"{stem}{lanes}": f"struct __align__({2 * lanes}) {stem}{lanes} {{ {_TYPES[name]} lane[{lanes}]; }};"
    for name, stem in _PACKED.items()
    for lanes in (2, 4, 8)
}
_VECTORS = _make_vector_types()


def _pair_helpers() -> dict[str, str]:
    """Two half-precision numbers packed into 32 bits, as tensor cores take them."""
    made = {}
    for name in (FLOAT16.name, BFLOAT16.name):
        half = _TYPES[name]
        made[f"pair_{name}"] = (
            f"{_QUALIFIER} unsigned int pair_{name}({half} low, {half} high) {{\n"
            "    return (unsigned int)*reinterpret_cast<unsigned short *>(&low)\n"
            "        | (unsigned int)*reinterpret_cast<unsigned short *>(&high) << 16;\n}"
        )
        for part, shift in (("low", ""), ("high", " >> 16")):
            made[f"{part}_{name}"] = (
                f"{_QUALIFIER} {half} {part}_{name}(unsigned int pair) {{\n"
                f"    unsigned short bits = (unsigned short)(pair{shift});\n"
                f"    return *reinterpret_cast<{half} *>(&bits);\n}}"
            )
    return made


_HELPERS = {
    **_STRUCTURES,
    **helpers({n: t for n, t in _TYPES.items() if n not in _PACKED}, _UNSIGNED, _QUALIFIER),
    **_pair_helpers(),
    **{name: definition(name) for name in CALLED},
    "broadcast_warp": _BROADCAST,
    "matrix_base": _MATRIX_BASE,
    "matrix_descriptor": _DESCRIPTOR,
    "tensor_map": _TENSOR_MAP,
    "fail": _FAIL,
    "INFINITY": "#define INFINITY __int_as_float(0x7f800000)",
    "NAN": "#define NAN __int_as_float(0x7fffffff)",
}

_KEYWORDS = """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t class compl
const constexpr const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq
private protected public register reinterpret_cast return short signed sizeof static static_assert static_cast struct
switch template this thread_local throw true try typedef typeid typename union unsigned using virtual void volatile
wchar_t while xor xor_eq half bfloat16 dim3 threadIdx blockIdx blockDim gridDim warpSize min max INFINITY NAN
dynamic_shared clock clock64 assert printf memcpy memset malloc free linux unix"""

_ATOMIC = ("int32", "uint32", "uint64")
_ATOMICS = {
    **{("+", name): "atomicAdd({}, {});" for name in (*_ATOMIC, "float32", "float64")},
    ("+", "int64"): "atomicAdd((unsigned long long *){}, (unsigned long long)({}));",
    ("+", "float16"): "atomicAdd({}, {});",
    ("+", "bfloat16"): "atomicAdd({}, {});",
    **{(op, name): f"atomic{op.title()}({{}}, {{}});" for op in ("min", "max") for name in _ATOMIC},
    **{(op, "int64"): f"atomic{op.title()}({{}}, {{}});" for op in ("min", "max")},
}

C = CDialect(
    name="CUDA",
    types=_TYPES,
    math=_MATH,
    suffixes=C99.suffixes,
    infinity="INFINITY",
    nan="NAN",
    restrict="__restrict__",
    parallel="",
    simd="",
    critical="",
    includes=(
        ("cuda_fp16.h", ("__half",)),
        ("cuda_bf16.h", ("__nv_bfloat16",)),
        ("cuda_pipeline_primitives.h", ("__pipeline_memcpy_async", "__pipeline_commit")),
    ),
    helpers=_HELPERS,
    reserved=frozenset(
        (
            *_KEYWORDS.split(),
            *FUNCTIONS,
            *(f"{f}f" for f in FUNCTIONS),
            *_HELPERS,
            *(v.name for v in _VECTORS.values()),
        )
    ),
    library=C99.library,
    intrinsics={
        "barrier": "__syncthreads();",
        "warp_barrier": "__syncwarp();",
        "shuffle_xor": "{} = __shfl_xor_sync(0xffffffff, {}, {}, {});",
        "shuffle_down": "{} = __shfl_down_sync(0xffffffff, {}, {}, {});",
        "shuffle_index": "{0} = __shfl_sync(0xffffffff, {1}, {3}, {2});",
        "barrier_part": "barrier_part<{}, {}>();",
        "copy_async": "__pipeline_memcpy_async({}, {}, {});",
        "copy_async_zero": "copy_async_zero_{2}({0}, {1}, {3} ? {2} : 0);",
        "commit_async": "__pipeline_commit();",
        "wait_async": "__pipeline_wait_prior({});",
        "prefetch": "",
        **ATOM_CALLS,
        **HOPPER_CALLS,
    },
    widening={"float16": "__half2float({})", "bfloat16": "__bfloat162float({})"},
    narrowing={
        ("float32", "float16"): "__float2half({})",
        ("float64", "float16"): "__double2half({})",
        ("int32", "float16"): "__int2half_rn({})",
        ("uint32", "float16"): "__uint2half_rn({})",
        ("int64", "float16"): "__ll2half_rn({})",
        ("uint64", "float16"): "__ull2half_rn({})",
        ("float32", "bfloat16"): "__float2bfloat16({})",
        ("float64", "bfloat16"): "__double2bfloat16({})",
    },
    unroll="#pragma unroll",
    assume="__builtin_assume({});",
    stack=1 << 60,
    scalars=True,
    small="int",
    extrema=frozenset(("int32", "uint32", "int64", "uint64")),
    shared="__shared__ __align__(16)",
    dynamic="{} = reinterpret_cast<{}>(dynamic_shared + {});",
    check="fail({}, {}, {});",
    vectors=_VECTORS,
    vector_place="*reinterpret_cast<{} *>({})",
    atomics=_ATOMICS,
    cached="__ldg({})",
    uncached=frozenset(("bool", *(_VECTORS[n, lanes].name for n, lanes in _VECTORS if n in _PACKED))),
)

CUDA = GpuDialect(
    c=C,
    kernel='extern "C" __global__ void {cluster}__launch_bounds__({bounds}) {name}(',
    single='extern "C" __global__ void {name}(',
    pointer="",
    variables=(
        ("bx", "blockIdx.x"), ("by", "blockIdx.y"), ("bz", "blockIdx.z"),
        ("tx", "threadIdx.x"), ("ty", "threadIdx.y"), ("tz", "threadIdx.z"),
    ),
    provided="extern __shared__ __align__({}) unsigned char dynamic_shared[];",
    static=48 << 10,
    map="const __grid_constant__ tensor_map",
    cluster="__cluster_dims__({}, 1, 1) ",
)  # fmt: skip


def emit_cuda(
    module: ir.Module, *, header: str = "", aligned: bool = True, marks: LineNumbers | None = None
) -> GpuCode:
    """The CUDA C++17 of `module` with `extern "C"` kernels, and its launches; see `gpu_printer.emit_gpu_source`."""
    return emit_gpu(module, CUDA, header=header, aligned=aligned, marks=marks)
