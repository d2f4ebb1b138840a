"""The exponential of float32 lanes in place: no call, so nothing is spilled around it.

exp(x) = 2**n * exp(r) with n = x / ln 2 rounded and |r| <= ln 2 / 2; exp(r) is a polynomial of degree 6 whose relative
error is 4e-9. Altogether at most 1 ulp, subnormal results included.
"""

from __future__ import annotations

from ..dtypes import FLOAT32
from ..loop_ir.nodes import Type
from .llvm_arithmetic import binary
from .llvm_builder import Builder
from .llvm_types import constant, mangled, register, splat, vector

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06  # their sum is ln 2; n * _LN2_HIGH is exact
_LOWEST, _HIGHEST = -110.0, 100.0  # beyond, the result is 0 or infinite
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_POLYNOMIAL = (
    0.0013814539415761828, 0.00836874544620514, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552, 1.0, 1.0,
)  # fmt: skip
_ROUND_CURRENT = 4  # of AVX-512: as the control register says


def exp(b: Builder, x: str, lanes: int, avx512: bool) -> str:
    """exp of a float32 vector; `avx512`: there is an instruction that multiplies by 2**n, for 4, 8 or 16 lanes."""
    type = Type(FLOAT32, lanes)
    x = binary(b, "max", constant(_LOWEST, type), x, type, keep_nan=False)
    x = binary(b, "min", constant(_HIGHEST, type), x, type, keep_nan=False)
    shifted = _fma(b, x, constant(_LOG2_E, type), constant(_ROUND, type), type)
    n = b.define(f"fsub {register(type)} {shifted}, {constant(_ROUND, type)}", (shifted,))
    rest = _fma(b, n, constant(-_LN2_HIGH, type), x, type)
    rest = _fma(b, n, constant(-_LN2_LOW, type), rest, type)
    value = constant(_POLYNOMIAL[0], type)
    for coefficient in _POLYNOMIAL[1:]:
        value = _fma(b, value, rest, constant(coefficient, type), type)
    return _scale(b, value, n, type) if avx512 else _scale_by_bits(b, value, shifted, type)


def _fma(b: Builder, x: str, y: str, z: str, type: Type) -> str:
    text, name = register(type), f"@llvm.fma.{mangled(type)}"
    b.declare(f"{text} {name}({text}, {text}, {text})")
    return b.define(f"call {text} {name}({text} {x}, {text} {y}, {text} {z})", (x, y, z))


def _scale(b: Builder, value: str, n: str, type: Type) -> str:
    """`value * 2**n` in one instruction, correct to the last subnormal."""
    text = register(type)
    name = f"@llvm.x86.avx512.mask.scalef.ps.{32 * type.lanes}"
    mask, rounding = (("i16", ", i32"), ("i8", ""))[type.lanes < 16]
    b.declare(f"{text} {name}({text}, {text}, {text}, {mask}{rounding})")
    last = f", i32 {_ROUND_CURRENT}" if rounding else ""
    text = f"call {text} {name}({text} {value}, {text} {n}, {text} zeroinitializer, {mask} -1{last})"
    return b.define(text, (value, n))


def _scale_by_bits(b: Builder, value: str, shifted: str, type: Type) -> str:
    """`value * 2**n` in two halves, each a power of two made from its exponent; n is in the low bits of `shifted`."""
    floats, words = register(type), vector("i32", type.lanes)

    def op(name: str, left: str, right: str) -> str:
        return b.define(f"{name} {words} {left}, {right}", (left, right))

    def literal(number: int) -> str:
        return splat(str(number), "i32", type.lanes)

    bits = b.define(f"bitcast {floats} {shifted} to {words}", (shifted,))
    n = op("sub", bits, literal(0x4B400000))
    half = op("ashr", n, literal(1))
    for part in (half, op("sub", n, half)):
        exponent = op("shl", op("add", part, literal(127)), literal(23))
        power = b.define(f"bitcast {words} {exponent} to {floats}", (exponent,))
        value = b.define(f"fmul {floats} {value}, {power}", (value, power))
    return value
