"""The LLVM spelling of types and literals of loop programs."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ...core.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT16, FLOAT32, FLOAT64, DType
from ...core.errors import InternalError
from ...loop_ir.nodes import Type

_SCALARS = {t.name: f"i{t.bits}" for t in DTYPES.values()} | {
    BOOL.name: "i1", FLOAT16.name: "half", FLOAT32.name: "float", FLOAT64.name: "double",
}  # fmt: skip


def scalar_type(dtype: DType) -> str:
    """The type of one value in a register. bfloat16 is i16, because operations on LLVM's `bfloat` call a library."""
    return _SCALARS[dtype.name]


def memory_type(dtype: DType) -> str:
    """The type of one element in memory."""
    return "i8" if dtype.is_bool else scalar_type(dtype)


def vector_type(element: str, lanes: int) -> str:
    return element if lanes == 1 else f"<{lanes} x {element}>"


def register_type(type: Type) -> str:
    key = (type.dtype.name, type.lanes)
    known = _REGISTERS.get(key)
    if known is None:
        known = _REGISTERS[key] = vector_type(scalar_type(type.dtype), type.lanes)
    return known


_REGISTERS: dict[tuple[str, int], str] = {}
"""The cache of `register_type`, which is called for each instruction."""


def llvm_literal(value: int | float | bool, dtype: DType) -> str:
    """One scalar constant; integers wrap around, floats round to the type and print as their exact bits."""
    if dtype == BOOL:
        return "true" if value else "false"
    if dtype.is_integer:
        bits = int(value) & ((1 << dtype.bits) - 1)
        return str(bits - (1 << dtype.bits) if bits >> (dtype.bits - 1) else bits)
    if dtype == BFLOAT16:
        return str(bfloat16_bits(float(value)))
    if dtype == FLOAT16:
        return f"0xH{struct.unpack('<H', _pack_saturating_float('<e', float(value)))[0]:04X}"
    exact = struct.unpack("<f", _pack_saturating_float("<f", float(value)))[0] if dtype == FLOAT32 else float(value)
    return f"0x{struct.unpack('<Q', struct.pack('<d', exact))[0]:016X}"


def _pack_saturating_float(form: str, value: float) -> bytes:
    try:
        return struct.pack(form, value)
    except OverflowError:
        return struct.pack(form, float("inf") if value > 0 else float("-inf"))


def bfloat16_bits(value: float) -> int:
    """The nearest bfloat16, ties to even."""
    bits = int(struct.unpack("<I", _pack_saturating_float("<f", value))[0])
    if value != value:
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def llvm_constant(value: int | float | bool, type: Type) -> str:
    """A constant operand: a literal, or the same literal in every lane."""
    text = llvm_literal(value, type.dtype)
    return text if type.lanes == 1 else f"splat ({scalar_type(type.dtype)} {text})"


def splat_constant(text: str, element: str, lanes: int) -> str:
    """A literal in every lane."""
    return text if lanes == 1 else f"splat ({element} {text})"


def constant_vector(values: Sequence[int | str], element: str) -> str:
    """A constant vector: `<i32 0, i32 2>`."""
    return "<" + ", ".join(f"{element} {v}" for v in values) + ">"


def mask_literal(bits: Sequence[bool]) -> str:
    return constant_vector(["true" if b else "false" for b in bits], "i1")


def mangled_suffix(type: Type) -> str:
    """The suffix of an overloaded intrinsic: `f32`, `v16f32`, `i64`."""
    dtype = type.dtype
    if dtype == BFLOAT16:
        raise InternalError("bfloat16 only stores; arithmetic on it is a fault of lowering")
    base = f"f{dtype.bits}" if dtype.is_float else "i1" if dtype == BOOL else f"i{dtype.bits}"
    return base if type.lanes == 1 else f"v{type.lanes}{base}"
