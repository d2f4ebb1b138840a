"""Mathematical functions: instructions if they exist, else inlined code or calls of vector libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...core.decisions import Decision, is_recording, note_decision
from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, UINT32
from ...core.errors import InternalError
from ...core.math_functions import TF32
from ...loop_ir.instructions import (
    BIT_AND,
    BIT_OR,
    DOT_BFLOAT16,
    PAIR_BFLOAT16,
    POPCOUNT,
    SHIFT_LEFT,
    SHIFT_RIGHT,
    TRAILING_ZEROS,
)
from ...loop_ir.nodes import Type
from .arithmetic import emit_binary, emit_compare, emit_select, emit_shuffle
from .elementary import emit_inline_function
from .hoisting_builder import HoistingBuilder
from .types import llvm_constant, mangled_suffix, register_type, scalar_type, vector_type

_INTRINSICS = {
    "sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "round", "rint": "rint",
    "nearbyint": "nearbyint", "fabs": "fabs", "copysign": "copysign", "fma": "fma",
    "fmin": "minnum", "fmax": "maxnum",
}  # fmt: skip

_BITS = {
    BIT_AND: "and {} {}, {}", BIT_OR: "or {} {}, {}", SHIFT_LEFT: "shl {} {}, {}", SHIFT_RIGHT: "lshr {} {}, {}",
}  # fmt: skip
_COUNTS = {TRAILING_ZEROS: "cttz", POPCOUNT: "ctpop"}

_NOTHING = "(mathematics)"  # no real buffer: calls that "read" it are hoisted out of loops, but not out of branches

# Functions whose float versions in C libraries have errors above 2 ulp; they are computed in double.
_THROUGH_DOUBLE = ("erfc", "lgamma", "tgamma", "sinh", "cosh", "asinh", "acosh")


def function_key(function: str, type: Type) -> str:
    """The key of a function on a type in a table of symbols: `exp.float32x16`, `exp.float32`."""
    return f"{function}.{type}"


def emit_call(
    b: HoistingBuilder, function: str, arguments: Sequence[str], type: Type, symbols: Mapping[str, str], widest: int,
    *, dots: bool = False,
) -> str:  # fmt: skip
    """`function(arguments)` lane by lane.

    symbols: maps `function_key` to C names. widest: the bits of a vector register. dots: whether the processor has
    bfloat16 dot products.
    """
    if function == PAIR_BFLOAT16:
        return _emit_packed_pair(b, arguments, type.lanes)
    if function == DOT_BFLOAT16:
        return _emit_bfloat16_dot(b, arguments, type, widest if dots else 0)
    if function in _BITS:
        return b.define(_BITS[function].format(register_type(type), *arguments), arguments)
    if function in _COUNTS:
        return _count_bits(b, _COUNTS[function], arguments, type)
    if type.dtype in (FLOAT16, BFLOAT16):
        raise InternalError(f"{function} on {type}: 16-bit floats only store")
    if function in _INTRINSICS:
        return _emit_intrinsic_call(b, _INTRINSICS[function], arguments, type)
    if function == "rsqrt":
        root = _emit_intrinsic_call(b, "sqrt", arguments, type)
        return b.define(f"fdiv {register_type(type)} {llvm_constant(1, type)}, {root}", (root,))
    if function == TF32:
        return _round_to_tf32(b, arguments[0], type)
    if function == "fdim":
        return _positive_difference(b, arguments, type)
    return _emit_library_call(b, function, arguments, type, symbols, widest)


def _emit_intrinsic_call(b: HoistingBuilder, name: str, arguments: Sequence[str], type: Type) -> str:
    text = register_type(type)
    symbol = f"@llvm.{name}.{mangled_suffix(type)}"
    b.declare(f"{text} {symbol}({', '.join([text] * len(arguments))})")
    return b.define(f"call {text} {symbol}({', '.join(f'{text} {a}' for a in arguments)})", arguments)


def _count_bits(b: HoistingBuilder, name: str, arguments: Sequence[str], type: Type) -> str:
    text, symbol, (value,) = register_type(type), f"@llvm.{name}.{mangled_suffix(type)}", arguments
    flag = ", i1 false" if name == "cttz" else ""  # the result for 0 is defined
    b.declare(f"{text} {symbol}({text}{', i1' if flag else ''})")
    return b.define(f"call {text} {symbol}({text} {value}{flag})", arguments)


def _emit_packed_pair(b: HoistingBuilder, arguments: Sequence[str], lanes: int) -> str:
    narrow, wide = vector_type("i16", lanes), vector_type("i32", lanes)
    low, high = (b.define(f"zext {narrow} {a} to {wide}", (a,)) for a in arguments)
    shifted = b.define(f"shl {wide} {high}, {llvm_constant(16, Type(UINT32, lanes))}", (high,))
    return b.define(f"or {wide} {shifted}, {low}", (shifted, low))


def _emit_bfloat16_dot(b: HoistingBuilder, arguments: Sequence[str], type: Type, widest: int) -> str:
    """A bfloat16 dot product: one instruction if the vectors fill a register, else two FMAs, the high halves first."""
    total, *factors = arguments
    wide, text = vector_type("i32", type.lanes), register_type(type)
    bits = type.lanes * type.dtype.bits
    if bits in (128, 256, 512) and bits <= widest:
        pairs = f"<{2 * type.lanes} x bfloat>"
        left, right = (b.define(f"bitcast {wide} {f} to {pairs}", (f,)) for f in factors)
        symbol = f"@llvm.x86.avx512bf16.dpbf16ps.{bits}"
        b.declare(f"{text} {symbol}({text}, {pairs}, {pairs})")
        operands = f"{text} {total}, {pairs} {left}, {pairs} {right}"
        return b.define(f"call {text} {symbol}({operands})", (total, left, right))
    for part in (f"and {wide} {{}}, {llvm_constant(0xFFFF0000, Type(UINT32, type.lanes))}",
                 f"shl {wide} {{}}, {llvm_constant(16, Type(UINT32, type.lanes))}"):  # fmt: skip
        halves = [b.define(part.format(f), (f,)) for f in factors]
        floats = [b.define(f"bitcast {wide} {h} to {text}", (h,)) for h in halves]
        total = _emit_intrinsic_call(b, "fma", [*floats, total], type)
    return total


def _round_to_tf32(b: HoistingBuilder, x: str, type: Type) -> str:
    """Round to 10 bits of mantissa, ties away from zero. Infinities and NaNs stay."""
    bits, text = Type(UINT32, type.lanes), register_type(type)
    wide = register_type(bits)
    whole = b.define(f"bitcast {text} {x} to {wide}", (x,))
    exponent = b.define(f"and {wide} {whole}, {llvm_constant(0x7F800000, bits)}", (whole,))
    special = b.define(f"icmp eq {wide} {exponent}, {llvm_constant(0x7F800000, bits)}", (exponent,))
    up = b.define(f"add {wide} {whole}, {llvm_constant(0x1000, bits)}", (whole,))
    cut = b.define(f"and {wide} {up}, {llvm_constant(0xFFFFE000, bits)}", (up,))
    rounded = b.define(f"bitcast {wide} {cut} to {text}", (cut,))
    return emit_select(b, special, x, rounded, type)


def _positive_difference(b: HoistingBuilder, arguments: Sequence[str], type: Type) -> str:
    left, right = arguments
    difference = emit_binary(b, "sub", left, right, type)
    below = emit_compare(b, "le", left, right, type)
    return emit_select(b, below, llvm_constant(0, type), difference, type)


def _emit_library_call(
    b: HoistingBuilder, function: str, arguments: Sequence[str], type: Type, symbols: Mapping[str, str], widest: int
) -> str:
    widths = [
        n
        for n in (16, 8, 4, 2)
        if n * type.dtype.bits <= widest and function_key(function, Type(type.dtype, n)) in symbols
    ]
    if is_recording():
        _record_function(function, type, widths)
    if type.lanes == 1 or not widths:
        return _per_lane(b, function, arguments, type, symbols)
    width = min((n for n in widths if n >= type.lanes), default=widths[0])
    if width == type.lanes:
        return _emit_vector_call(b, function, arguments, type, symbols, widest)
    parts = [
        _emit_call_on_lanes(b, function, arguments, type, start, min(width, type.lanes - start), symbols, widest)
        for start in range(0, type.lanes, width)
    ]
    return _emit_vector_concat(b, parts, type)


def _record_function(function: str, type: Type, widths: Sequence[int]) -> None:
    if type.lanes == 1:
        chosen, why = f"{function} of a scalar", "it is not in a vector loop"
    elif not widths:
        chosen, why = f"{function} element by element", f"no library of this process has it on vectors of {type.dtype}"
    else:
        chosen, why = f"{function} on vectors of {min(max(widths), type.lanes)}", "a vector function, or its polynomial"
    note_decision(Decision("function", (), chosen, why, (("lanes", type.lanes),)))


def _emit_call_on_lanes(
    b: HoistingBuilder, function: str, arguments: Sequence[str], type: Type, start: int, count: int,
    symbols: Mapping[str, str], widest: int,
) -> tuple[str, int, int]:  # fmt: skip
    """Lanes `start` to `start + count`, evaluated in the narrowest vector that holds them: (value, count, width)."""
    usable = [n for n in (2, 4, 8, 16) if n >= count and n * type.dtype.bits <= widest]
    width = next(n for n in usable if function_key(function, Type(type.dtype, n)) in symbols)
    lanes = [start + min(i, count - 1) for i in range(width)]
    narrow = Type(type.dtype, width)
    parts = [emit_shuffle(b, a, "poison", lanes, scalar_type(type.dtype), type.lanes) for a in arguments]
    return _emit_vector_call(b, function, parts, narrow, symbols, widest), count, width


def _emit_vector_call(
    b: HoistingBuilder, function: str, arguments: Sequence[str], type: Type, symbols: Mapping[str, str], widest: int
) -> str:
    """`function` on a vector whose width the library supports: inlined if possible, else called."""
    return emit_inline_function(b, function, arguments[0], type, widest) or _emit_pure_call(
        b, symbols[function_key(function, type)], arguments, type
    )


def _emit_vector_concat(b: HoistingBuilder, parts: Sequence[tuple[str, int, int]], type: Type) -> str:
    element, total, done = scalar_type(type.dtype), "poison", 0
    for value, count, width in parts:
        wide = emit_shuffle(b, value, "poison", [min(i, width - 1) for i in range(type.lanes)], element, width)
        lanes = [type.lanes + i - done if done <= i < done + count else i for i in range(type.lanes)]
        total = wide if not done and count == type.lanes else emit_shuffle(b, total, wide, lanes, element, type.lanes)
        done += count
    return total


def _emit_pure_call(b: HoistingBuilder, symbol: str, arguments: Sequence[str], type: Type) -> str:
    """A call that reads no memory. It is not hoisted out of branches: calls that are not needed cost too much."""
    text = register_type(type)
    b.declare(f"{text} @{symbol}({', '.join([text] * len(arguments))}) memory(none) nounwind willreturn")
    operands = ", ".join(f"{text} {a}" for a in arguments)
    return b.define(f"call {text} @{symbol}({operands})", arguments, reads=_NOTHING)


def _per_lane(
    b: HoistingBuilder, function: str, arguments: Sequence[str], type: Type, symbols: Mapping[str, str]
) -> str:
    one = Type(type.dtype)
    if type.lanes == 1:
        return _emit_scalar_call(b, function, arguments, one, symbols)
    text, result = register_type(type), "poison"
    for lane in range(type.lanes):
        scalars = [b.define(f"extractelement {text} {a}, i64 {lane}", (a,)) for a in arguments]
        value = _emit_scalar_call(b, function, scalars, one, symbols)
        result = b.define(f"insertelement {text} {result}, {register_type(one)} {value}, i64 {lane}", (result, value))
    return result


def _emit_scalar_call(
    b: HoistingBuilder, function: str, arguments: Sequence[str], type: Type, symbols: Mapping[str, str]
) -> str:
    """A call of the C library's scalar function, in double where the float version is inaccurate."""
    double = Type(FLOAT64)
    if type.dtype == FLOAT32 and function in _THROUGH_DOUBLE:
        wide = [b.define(f"fpext float {a} to double", (a,)) for a in arguments]
        value = _emit_pure_call(b, symbols.get(function_key(function, double), function), wide, double)
        return b.define(f"fptrunc double {value} to float", (value,))
    suffix = "f" if type.dtype == FLOAT32 else ""
    return _emit_pure_call(b, symbols.get(function_key(function, type), function + suffix), arguments, type)
