"""Conversions between scalar types, lane by lane.

A float out of range saturates when it becomes an integer and NaN becomes 0, on every processor; C leaves both open.
"""

from __future__ import annotations

from ...core.dtypes import BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, DType
from ...loop_ir.nodes import Type
from .hoisting_builder import HoistingBuilder
from .types import mangled_suffix, register_type, splat_constant, vector_type


def emit_cast(b: HoistingBuilder, value: str, source: Type, to: DType, *, f16c: bool) -> str:
    """`value` converted to `to`. f16c: whether the processor has instructions that convert float16."""
    dtype, result = source.dtype, Type(to, source.lanes)
    if dtype == to:
        return value
    if dtype in (FLOAT16, BFLOAT16):
        single = Type(FLOAT32, source.lanes)
        return emit_cast(b, _to_single(b, value, source, f16c), single, to, f16c=f16c)
    if to in (FLOAT16, BFLOAT16):
        return _from_single(b, _round_to_float32(b, value, source, f16c), result, f16c)
    if to == BOOL:
        comparison = "fcmp une" if dtype.is_float else "icmp ne"
        zero = splat_constant("0.0" if dtype.is_float else "0", register_type(Type(dtype)), source.lanes)
        return b.define(f"{comparison} {register_type(source)} {value}, {zero}", (value,))
    if dtype.is_float and to.is_integer:
        return _emit_saturating_cast(b, value, source, result)
    return b.define(
        f"{_choose_cast_instruction(dtype, to)} {register_type(source)} {value} to {register_type(result)}", (value,)
    )


def _choose_cast_instruction(dtype: DType, to: DType) -> str:
    if dtype.is_float:
        return "fpext" if to.bits > dtype.bits else "fptrunc"
    if to.is_float:
        return "sitofp" if dtype.is_signed else "uitofp"
    if dtype == BOOL:
        return "zext"
    if to.bits == dtype.bits:
        return "bitcast"
    return "trunc" if to.bits < dtype.bits else "sext" if dtype.is_signed else "zext"


def _emit_saturating_cast(b: HoistingBuilder, value: str, source: Type, result: Type) -> str:
    sign = "s" if result.dtype.is_signed else "u"
    name = f"@llvm.fpto{sign}i.sat.{mangled_suffix(result)}.{mangled_suffix(source)}"
    b.declare(f"{register_type(result)} {name}({register_type(source)})")
    return b.define(f"call {register_type(result)} {name}({register_type(source)} {value})", (value,))


class _Bits:
    """32-bit integer work on the bits of float32 lanes."""

    def __init__(self, b: HoistingBuilder, lanes: int) -> None:
        self.b, self.lanes = b, lanes
        self.word, self.float = vector_type("i32", lanes), vector_type("float", lanes)

    def literal(self, value: int) -> str:
        return splat_constant(str(value), "i32", self.lanes)

    def op(self, name: str, x: str, y: str | int) -> str:
        y = self.literal(y) if isinstance(y, int) else y
        return self.b.define(f"{name} {self.word} {x}, {y}", (x, y))

    def select(self, condition: str, then: str, otherwise: str) -> str:
        mask = vector_type("i1", self.lanes)
        text = f"select {mask} {condition}, {self.word} {then}, {self.word} {otherwise}"
        return self.b.define(text, (condition, then, otherwise))

    def bits(self, x: str) -> str:
        return self.b.define(f"bitcast {self.float} {x} to {self.word}", (x,))

    def number(self, x: str) -> str:
        return self.b.define(f"bitcast {self.word} {x} to {self.float}", (x,))

    def resize(self, name: str, x: str, source: str, to: str) -> str:
        return self.b.define(f"{name} {vector_type(source, self.lanes)} {x} to {vector_type(to, self.lanes)}", (x,))


def _to_single(b: HoistingBuilder, value: str, source: Type, f16c: bool) -> str:
    w = _Bits(b, source.lanes)
    if source.dtype == BFLOAT16:
        return w.number(w.op("shl", w.resize("zext", value, "i16", "i32"), 16))
    if f16c:
        return w.resize("fpext", value, "half", "float")
    half = w.resize("zext", w.resize("bitcast", value, "half", "i16"), "i16", "i32")
    magnitude = w.op("and", half, 0x7FFF)
    scaled = w.number(w.op("shl", magnitude, 13))
    power = splat_constant(
        "0x46F0000000000000", "float", w.lanes
    )  # multiplying by 2**112 corrects the exponent's bias and normalizes subnormals
    finite = w.bits(b.define(f"fmul {w.float} {scaled}, {power}", (scaled,)))
    special = w.op("icmp uge", magnitude, 0x7C00)
    number = w.select(special, w.op("or", finite, 0x7F800000), finite)
    return w.number(w.op("or", number, w.op("shl", w.op("and", half, 0x8000), 16)))


def _from_single(b: HoistingBuilder, value: str, result: Type, f16c: bool) -> str:
    w = _Bits(b, result.lanes)
    if result.dtype == FLOAT16 and f16c:
        return w.resize("fptrunc", value, "float", "half")
    bits = w.bits(value)
    if result.dtype == FLOAT16:
        return w.resize("bitcast", w.resize("trunc", _half_bits(w, bits), "i32", "i16"), "i16", "half")
    odd = w.op("and", w.op("lshr", bits, 16), 1)
    rounded = w.op("lshr", w.op("add", w.op("add", bits, 0x7FFF), odd), 16)
    quiet = w.op("or", w.op("lshr", bits, 16), 0x40)
    nan = b.define(f"fcmp uno {w.float} {value}, {value}", (value,))
    return w.resize("trunc", w.select(nan, quiet, rounded), "i32", "i16")


def _half_bits(w: _Bits, bits: str) -> str:
    """The bits of the nearest float16, ties to even, of float32 bits, by integer arithmetic."""
    magnitude = w.op("and", bits, 0x7FFFFFFF)
    odd = w.op("and", w.op("lshr", magnitude, 13), 1)
    rebias = ((15 - 127) << 23) + 0xFFF
    normal = w.op("lshr", w.op("add", w.op("add", magnitude, rebias), odd), 13)
    magic = 0x3F000000  # 0.5: adding it shifts a subnormal's bits into place and rounds them
    shifted = w.number(magnitude)
    half = splat_constant("0.5", "float", w.lanes)
    subnormal = w.op("sub", w.bits(w.b.define(f"fadd {w.float} {shifted}, {half}", (shifted,))), magic)
    nan = w.op("or", w.op("and", w.op("lshr", magnitude, 13), 0x3FF), 0x7E00)
    number = w.select(w.op("icmp ult", magnitude, 0x38800000), subnormal, normal)
    number = w.select(w.op("icmp uge", magnitude, 0x477FF000), w.literal(0x7C00), number)
    number = w.select(w.op("icmp ugt", magnitude, 0x7F800000), nan, number)
    return w.op("or", number, w.op("and", w.op("lshr", bits, 16), 0x8000))


def _round_to_float32(b: HoistingBuilder, value: str, source: Type, f16c: bool) -> str:
    """`value` as float32. A float64 is rounded to odd, so that rounding the result to 16 bits rounds correctly."""
    near = emit_cast(b, value, source, FLOAT32, f16c=f16c)
    if source.dtype != FLOAT64:
        return near
    w = _Bits(b, source.lanes)
    wide = vector_type("double", w.lanes)
    back = w.resize("fpext", near, "float", "double")
    bits = w.bits(near)
    inexact = b.define(f"fcmp one {wide} {back}, {value}", (back, value))
    even = w.op("icmp eq", w.op("and", bits, 1), 0)
    mask = vector_type("i1", w.lanes)
    move = b.define(f"and {mask} {inexact}, {even}", (inexact, even))
    above = b.define(f"fcmp ogt {wide} {back}, {value}", (back, value))
    negative = w.op("icmp slt", bits, 0)
    shrink = b.define(f"xor {mask} {above}, {negative}", (above, negative))
    moved = w.select(shrink, w.op("sub", bits, 1), w.op("add", bits, 1))
    return w.number(w.select(move, moved, bits))
