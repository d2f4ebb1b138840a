"""Loop programs as OpenCL C 1.2, which runs the GPU kernels on other devices and so tests their mapping."""

from __future__ import annotations

from dataclasses import replace

from ...core.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64
from ...core.math_functions import FUNCTIONS, TF32
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.intrinsics import is_collective
from ...loop_ir.passes.lower_warp_ops import emulate_shuffles
from ...loop_ir.rewrite import map_stmt, walk_expr, walk_stmts
from ..c.dialect import C99, CDialect, VectorType, helpers
from .gpu_printer import GpuCode, GpuDialect
from .gpu_printer import emit_gpu_source as emit_gpu

_TYPES = {
    "bool": "uchar", "uint8": "uchar", "uint16": "ushort", "uint32": "uint", "uint64": "ulong",
    "int8": "char", "int16": "short", "int32": "int", "int64": "long",
    "float16": "ushort", "bfloat16": "ushort", "float32": "float", "float64": "double",
}  # fmt: skip
_UNSIGNED = {name: _TYPES[f"u{name}"] for name in ("int8", "int16", "int32", "int64")}

_SMALL_FLOATS = {
    "half_to_float": """inline float half_to_float(ushort bits) {
    return vload_half(0, (const half *)&bits);
}""",
    "half_from_float": """inline ushort half_from_float(float value) {
    ushort bits;
    vstore_half_rte(value, 0, (half *)&bits);
    return bits;
}""",
    "half_from_double": """inline ushort half_from_double(double value) {
    ushort bits;
    vstore_half_rte(value, 0, (half *)&bits);
    return bits;
}""",
    "bfloat16_to_float": """inline float bfloat16_to_float(ushort bits) {
    return as_float((uint)bits << 16);
}""",
    "bfloat16_from_float": """inline ushort bfloat16_from_float(float value) {
    const uint bits = as_uint(value);
    if (value != value) return (ushort)(bits >> 16 | 0x40);
    return (ushort)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  /* to nearest, ties to even */
}""",
}

_FAIL = """inline void fail(__global long *status, long check, long value) {
    if (atom_cmpxchg((volatile __global long *)status, 0L, check) == 0) status[1] = value;
}"""

_HELPERS = {
    **_SMALL_FLOATS,
    **helpers({n: t for n, t in _TYPES.items() if n not in ("bool", FLOAT16.name, BFLOAT16.name)}, _UNSIGNED, "inline"),
    "fail": _FAIL,
}
_STEMS = {n: t for n, t in _TYPES.items() if n not in ("bool", FLOAT16.name, BFLOAT16.name)}
_VECTORS = {
    (name, lanes): VectorType(f"{stem}{lanes}", tuple(f"{{0}}.s{n}" for n in range(lanes)), f"({stem}{lanes})({{}})")
    for name, stem in _STEMS.items()
    for lanes in (2, 4)
    if DTYPES[name].size * lanes <= 16
}

_KEYWORDS = """auto bool break case char complex const continue default do double else enum event_t extern false float
for global goto half if image2d_t image3d_t imaginary inline int kernel local long ptrdiff_t private quad register
restrict return sampler_t short signed sizeof size_t static struct switch true typedef uchar uint ulong union unsigned
ushort void volatile while constant intptr_t uintptr_t barrier min max clamp select dot cross length distance normalize
step sign mix degrees radians any all shuffle prefetch printf mad INFINITY NAN MAXFLOAT as_float as_uint isnan isinf"""

C = CDialect(
    name="OpenCL",
    types=_TYPES,
    math={
        t.name: {name: name for name in FUNCTIONS} | {"nearbyint": "rint", TF32: C99.math[FLOAT32.name][TF32]}
        for t in (FLOAT32, FLOAT64)
    },
    suffixes={"float16": "f", "bfloat16": "f", "float32": "f", "uint32": "u", "uint64": "ul"},
    infinity="INFINITY",
    nan="NAN",
    restrict="restrict",
    parallel="",
    simd="",
    critical="",
    includes=(),
    helpers=_HELPERS,
    reserved=frozenset((*_KEYWORDS.split(), *FUNCTIONS, *_HELPERS, *(v.name for v in _VECTORS.values()))),
    library=C99.library,
    intrinsics={"barrier": "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);", "prefetch": ""}
    | {"warp_barrier": "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);"},
    widening={"float16": "half_to_float({})", "bfloat16": "bfloat16_to_float({})"},
    narrowing={
        ("float32", "float16"): "half_from_float({})",
        ("float64", "float16"): "half_from_double({})",
        ("int32", "float16"): "half_from_double({})",
        ("uint32", "float16"): "half_from_double({})",
        ("float32", "bfloat16"): "bfloat16_from_float({})",
    },
    wide="L",
    unroll="#pragma unroll",
    stack=1 << 60,
    scalars=True,
    small="int",
    extrema=frozenset(("int32", "uint32", "int64", "uint64")),
    shared="__local",
    check="fail({}, {}, {});",
    spaces={"global": "__global ", "shared": "__local "},
    vectors=_VECTORS,
    vector_place="*({} *)({})",
    atomics={("+", "int32"): "atomic_add({}, {});", ("+", "uint32"): "atomic_add({}, {});"},
)

OPENCL = GpuDialect(
    c=C,
    kernel="__kernel void {name}(",
    single="__kernel void {name}(",
    pointer="__global ",
    variables=tuple(
        (f"{letter}{axis}", f"get_{what}_id({n})")
        for letter, what in (("b", "group"), ("t", "local"))
        for n, axis in enumerate("xyz")
    ),
    provided="",
    static=1 << 60,
)


def emit_opencl(module: ir.Module, *, header: str = "", aligned: bool = True) -> GpuCode:
    """The OpenCL C of `module` and its launches; see `gpu_printer.emit_gpu_source`. Shuffles are emulated in shared
    memory."""
    portable = replace(module, kernels=tuple(_bound_loops(emulate_shuffles(k)) for k in module.kernels))
    code = emit_gpu(portable, OPENCL, header=header, aligned=aligned)
    pragmas = ["cl_khr_fp64"] * ("double" in code.source) + ["cl_khr_int64_base_atomics"] * ("atom_" in code.source)
    lines = "".join(f"#pragma OPENCL EXTENSION {name} : enable\n" for name in pragmas)
    return GpuCode(lines + code.source, code.kernels, code.aligned)


def _bound_loops(kernel: ir.Kernel) -> ir.Kernel:
    """Turn `if i < n` around the body of a loop over `i` with barriers into the loop's bound.

    A barrier under a condition is legal if the whole block agrees on it, but PoCL miscompiles it in loops.
    """

    def visit(s: ir.Stmt) -> ir.Stmt:
        s = map_stmt(s, lambda e: e, visit)
        match s:
            case ir.Loop(var=var, body=ir.If(ir.Binary("lt", ir.Var(name=name), stop), then, None)) if name == var:
                meets = any(isinstance(x, ir.Invoke) and is_collective(x) for x in walk_stmts(then))
                if meets and not any(isinstance(e, ir.Var) and e.name == var for e in walk_expr(stop)):
                    kind = ir.LoopKind.SERIAL
                    return replace(s, stop=build.minimum(s.stop, stop), body=then, kind=kind)
        return s

    return replace(kernel, body=visit(kernel.body))
