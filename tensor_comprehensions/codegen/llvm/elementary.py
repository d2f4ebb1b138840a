"""exp, tanh and erf of float32 vectors, inlined: faster than library calls, around which registers would be spilled.

exp(x) = 2**n * exp(r) with n = x / ln 2 rounded and |r| <= ln 2 / 2; exp(r) is a polynomial of degree 6 whose relative
error is 4e-9. Errors, subnormal results included: exp below 1 ulp, tanh and erf below 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.dtypes import FLOAT32
from ...loop_ir.nodes import Type
from .arithmetic import emit_binary, emit_compare, emit_select
from .hoisting_builder import HoistingBuilder
from .types import (
    constant_vector,
    llvm_constant,
    llvm_literal,
    mangled_suffix,
    register_type,
    splat_constant,
    vector_type,
)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.428606765330187e-06  # their sum is ln 2; n * _LN2_HIGH is exact
_LOWEST, _HIGHEST = -104.0, 100.0  # below, exp is 0; above, infinite
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_ROUND_BIASED = _ROUND + 2 * 127  # the integer then includes the biases of the exponents of two floats
_EXP = (0.0013814539415761828, 0.00836874544620514, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552)
_TANH = (-0.05025111511349678, 0.1331360936164856, -0.33333033323287964)
_SMALL = 0.3  # below, tanh is x + x**3 * _TANH(x**2), with a relative error of 2e-8
_SATURATED = 9.5  # beyond, tanh is 1
_ERF_NEAR = (
    -0.0005953774671070278,
    0.00498594855889678,
    -0.026761727407574654,
    0.11281682550907135,
    -0.3761247992515564,
    0.12837915122509003,
)
_ERF_FAR = (
    -0.001229571527801454,
    0.015406482852995396,
    -0.09058129787445068,
    -0.651542603969574,
    -1.1196178197860718,
    -0.0020405715331435204,
)
_ERF_EDGE = 0.93  # below, erf is x + x * _ERF_NEAR(x**2); above, 1 - exp(_ERF_FAR(x)); relative errors of 2e-8
_ERF_SATURATED = 4.0  # beyond, erf is 1
_ERF_PARTS, _ERF_LAST = 3.9, 3.97  # erf near k / 3.9 is y + t * p(t) with t = x - k / 3.9; beyond 3.97 it is 1
# fmt: off
_ERF_POWERS = (  # for each power of t in p, the highest first, and then y: for k = 0 to 15; for 0 it is t + t * p(t)
    (
        0.11099832, 0.07930253, 0.004376295, -0.055410802, -0.06783485, -0.04298607,
        -0.010752751, 0.008594632, 0.012966846, 0.0096072275, 0.005112119, 0.0021393588,
        7.313351e-4, 2.0835597e-4, 5.007495e-5, 1.0233889e-5,
    ),
    (
        2.7791047e-4, 0.12851678, 0.1822113, 0.1448234, 0.06054493, -0.012849545,
        -0.046596665, -0.046188485, -0.031100648, -0.016233563, -0.0068912287, -0.0024357706,
        -7.266324e-4, -1.8453471e-4, -4.0131366e-5, -7.505317e-6,
    ),
    (
        -0.37614092, -0.30590466, -0.13708098, 0.038169906, 0.14500801, 0.16627574,
        0.13169438, 0.08167415, 0.041502845, 0.01766412, 0.0063759782, 0.0019671936,
        5.2153744e-4, 1.1925777e-4, 2.3585637e-5, 4.042755e-6,
    ),
    (
        2.5339807e-7, -0.2709115, -0.44483638, -0.48031858, -0.40420347, -0.27959862,
        -0.16279195, -0.080795355, -0.034440786, -0.012670854, -0.004036703, -0.0011162538,
        -2.6839328e-4, -5.618584e-5, -1.0251173e-5, -1.63141e-6,
    ),
    (
        0.12837917, 1.0565788, 0.86744547, 0.6244189, 0.39409733, 0.21808434,
        0.10581299, 0.04501394, 0.016789922, 0.005490905, 0.0015744644, 3.9583622e-4,
        8.7255365e-5, 1.6864089e-5, 2.8577751e-6, 4.246078e-7,
    ),
    (
        0.0, 0.28311038, 0.5316938, 0.7233416, 0.853074, 0.93018275,
        0.9704233, 0.9888618, 0.99627966, 0.9988998, 0.99971235, 0.9999336,
        0.99998647, 0.99999756, 0.99999964, 0.99999994,
    ),
)
# fmt: on
_ROUND_CURRENT = 4  # AVX-512 operand: the rounding mode of the control register


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Arithmetic on vectors of one width. scales: whether an instruction multiplies by 2**n (AVX-512)."""

    b: HoistingBuilder
    type: Type
    scales: bool

    def number(self, value: float) -> str:
        return llvm_constant(value, self.type)

    def op(self, name: str, x: str, y: str) -> str:
        return self.b.define(f"{name} {register_type(self.type)} {x}, {y}", (x, y))

    def call(self, name: str, *operands: str) -> str:
        text, symbol = register_type(self.type), f"@llvm.{name}.{mangled_suffix(self.type)}"
        self.b.declare(f"{text} {symbol}({', '.join([text] * len(operands))})")
        return self.b.define(f"call {text} {symbol}({', '.join(f'{text} {o}' for o in operands)})", operands)

    def fma(self, x: str, y: str | float, z: str | float) -> str:
        y, z = (self.number(v) if isinstance(v, float) else v for v in (y, z))
        return self.call("fma", x, y, z)

    def horner(self, x: str, coefficients: tuple[float, ...]) -> str:
        """The polynomial in `x` with these coefficients, the highest power first."""
        value = self.number(coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.fma(value, x, coefficient)
        return value

    def bound(self, op: str, x: str, limit: float) -> str:
        """The `min` or `max` of `x` and `limit`; NaN where `x` is NaN."""
        return emit_binary(self.b, op, self.number(limit), x, self.type, keep_nan=False)

    def reduce(self, x: str, times: float) -> tuple[str, str, str]:
        """(n, shifted, rest): n is `times` * x / ln 2 rounded, as a float; the low bits of `shifted` hold n + 254 as an
        integer; rest is `times` * x - n * ln 2."""
        shifted = self.fma(x, times * _LOG2_E, _ROUND_BIASED)
        n = self.op("fsub", shifted, self.number(_ROUND_BIASED))
        whole = x if times == 1 else self.op("fmul", x, self.number(times))
        rest = self.fma(n, -_LN2_LOW, self.fma(n, -_LN2_HIGH, whole))
        return n, shifted, rest

    @property
    def looks_up(self) -> bool:
        """Whether `entry` works: one instruction looks up each lane in a table of 16 floats."""
        return self.scales and self.type.lanes == 16

    def entry(self, numbers: tuple[float, ...], shifted: str) -> str:
        """The entry of the table of 16 `numbers` at the index in the low bits of `shifted`."""
        floats, words = register_type(self.type), vector_type("i32", 16)
        index = self.b.define(f"bitcast {floats} {shifted} to {words}", (shifted,))
        table = constant_vector([llvm_literal(n, FLOAT32) for n in numbers], "float")
        name = "@llvm.x86.avx512.permvar.sf.512"
        self.b.declare(f"{floats} {name}({floats}, {words})")
        return self.b.define(f"call {floats} {name}({floats} {table}, {words} {index})", (index,))

    def scale(self, value: str, n: str, shifted: str) -> str:
        """`value * 2**n`, correctly rounded where it is subnormal."""
        if self.scales:
            return self.scale_exponent(value, n)
        first, second = self.powers(shifted)
        return self.op("fmul", self.op("fmul", value, first), second)

    def scale_exponent(self, value: str, n: str, kept: str = "") -> str:
        """`value * 2**n` in one instruction. kept: if given, a mask; the other lanes become 0."""
        text, lanes = register_type(self.type), self.type.lanes
        name = f"@llvm.x86.avx512.mask.scalef.ps.{32 * lanes}"
        mask, kind, rounding = ("i16", ", i32", f", i32 {_ROUND_CURRENT}") if lanes == 16 else ("i8", "", "")
        self.b.declare(f"{text} {name}({text}, {text}, {text}, {mask}{kind})")
        bits = self._mask_bits(kept) if kept else "-1"
        arguments = f"{text} {value}, {text} {n}, {text} zeroinitializer, {mask} {bits}{rounding}"
        return self.b.define(f"call {text} {name}({arguments})", (value, n, bits))

    def _mask_bits(self, mask: str) -> str:
        """The bits of a mask as an integer of 8 bits or more, which intrinsics expect."""
        bits = max(8, self.type.lanes)
        if bits > self.type.lanes:
            own = vector_type("i1", self.type.lanes)
            order = ", ".join(f"i32 {k}" for k in range(bits))
            mask = self.b.define(
                f"shufflevector {own} {mask}, {own} zeroinitializer, <{bits} x i32> <{order}>", (mask,)
            )
        return self.b.define(f"bitcast {vector_type('i1', bits)} {mask} to i{bits}", (mask,))

    def powers(self, shifted: str) -> tuple[str, str]:
        """Two powers of two whose product is 2**n, which may not be a normal float itself.

        `shifted` holds n + 254, which falls into two biased exponents. Its bits above these are shifted out.
        """
        floats, words = register_type(self.type), vector_type("i32", self.type.lanes)

        def op(name: str, left: str, right: str | int) -> str:
            right = splat_constant(str(right), "i32", self.type.lanes) if isinstance(right, int) else right
            return self.b.define(f"{name} {words} {left}, {right}", (left, right))

        def power(exponent: str) -> str:
            bits = op("shl", exponent, 23)
            return self.b.define(f"bitcast {words} {bits} to {floats}", (bits,))

        both = self.b.define(f"bitcast {floats} {shifted} to {words}", (shifted,))
        half = op("lshr", both, 1)
        return power(half), power(op("sub", both, half))


def _exp(v: _Lanes, x: str) -> str:
    """exp; results that underflow are masked to 0, because arithmetic on subnormals is a hundred times slower."""
    kept = v.b.define(f"fcmp uge {register_type(v.type)} {x}, {v.number(_LOWEST)}", (x,))
    if v.scales:
        n, _, rest = v.reduce(v.bound("min", x, _HIGHEST), 1.0)
        return v.scale_exponent(v.horner(rest, (*_EXP, 1.0, 1.0)), n, kept)
    x = emit_select(v.b, kept, x, v.number(0.0), v.type)
    _, shifted, rest = v.reduce(v.bound("min", x, _HIGHEST), 1.0)
    first, second = v.powers(shifted)
    scaled = v.op("fmul", v.fma(_exp_less_one(v, rest), first, first), second)
    return emit_select(v.b, kept, scaled, v.number(0.0), v.type)


def _exp_less_one(v: _Lanes, rest: str) -> str:
    """exp(rest) - 1 in few steps that wait for each other: while one vector waits, few others fit into a scheduler."""
    square = v.op("fmul", rest, rest)
    a, b, c, d, e = _EXP
    upper = v.fma(square, a, v.fma(rest, b, c))
    return v.fma(v.fma(upper, square, v.fma(rest, d, e)), square, rest)


def _tanh(v: _Lanes, x: str) -> str:
    """tanh |x| = e / (e + 2) with e = exp(2|x|) - 1; near 0, where that is too inexact, a polynomial."""
    size = v.bound("min", v.call("fabs", x), _SATURATED)
    n, shifted, rest = v.reduce(size, 2.0)
    square = v.op("fmul", rest, rest)
    small = v.fma(v.horner(rest, _EXP), square, rest)  # exp(rest) - 1
    one = v.number(1.0)
    power = v.scale(one, n, shifted)
    e = v.fma(power, small, v.op("fsub", power, one))
    ratio = v.op("fdiv", e, v.op("fadd", e, v.number(2.0)))
    square = v.op("fmul", size, size)
    near = v.fma(v.horner(square, _TANH), v.op("fmul", square, size), size)
    is_near = emit_compare(v.b, "lt", size, v.number(_SMALL), v.type)
    return v.call("copysign", emit_select(v.b, is_near, near, ratio, v.type), x)


def _erf(v: _Lanes, x: str) -> str:
    return _erf_by_parts(v, x) if v.looks_up else _erf_in_two(v, x)


def _erf_by_parts(v: _Lanes, x: str) -> str:
    """erf by one polynomial per sixteenth of the range; coefficients are looked up in a register. It takes half the
    instructions of `_erf_in_two`."""
    size = v.bound("min", v.call("fabs", x), _ERF_LAST)
    shifted = v.fma(size, _ERF_PARTS, _ROUND)
    k = v.op("fsub", shifted, v.number(_ROUND))
    t = v.fma(k, -1 / _ERF_PARTS, size)
    total, *powers, middle = (v.entry(numbers, shifted) for numbers in _ERF_POWERS)
    for power in powers:
        total = v.fma(total, t, power)
    is_first = emit_compare(v.b, "lt", k, v.number(0.5), v.type)
    return v.call("copysign", v.fma(total, t, emit_select(v.b, is_first, t, middle, v.type)), x)


def _erf_in_two(v: _Lanes, x: str) -> str:
    size = v.bound("min", v.call("fabs", x), _ERF_SATURATED)
    near = v.fma(v.horner(v.op("fmul", size, size), _ERF_NEAR), size, size)
    n, shifted, rest = v.reduce(v.horner(size, _ERF_FAR), 1.0)
    complement = v.scale(v.horner(rest, (*_EXP, 1.0, 1.0)), n, shifted)
    far = v.op("fsub", v.number(1.0), complement)
    is_near = emit_compare(v.b, "lt", size, v.number(_ERF_EDGE), v.type)
    return v.call("copysign", emit_select(v.b, is_near, near, far, v.type), x)


_FUNCTIONS: Mapping[str, Callable[[_Lanes, str], str]] = {"exp": _exp, "tanh": _tanh, "erf": _erf}


def emit_inline_function(b: HoistingBuilder, function: str, x: str, type: Type, widest: int) -> str | None:
    """`function(x)` on 4, 8 or 16 lanes, or None if it is not inlined; `widest` as in `vector_math.emit_call`."""
    if type.dtype != FLOAT32 or function not in _FUNCTIONS:
        return None
    return _FUNCTIONS[function](_Lanes(b, type, widest >= 512), x)
