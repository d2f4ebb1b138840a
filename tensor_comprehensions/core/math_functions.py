"""The mathematical functions of the language: name, arity, meaning.

One table serves the checker, the reference evaluator and the interpreter of loop programs; each emitter has its own
table of function names with the same keys. Arguments and result of a function share one floating-point type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

TF32 = "tf32"
"""The only function of the table that is not in C's math library. It takes only float32."""


@dataclass(frozen=True, slots=True)
class MathFunction:
    """A function by its C name. `evaluate` works on NumPy arrays of one floating-point type and keeps that type."""

    name: str
    arity: int
    evaluate: Callable[..., Any]


def _make_elementwise_function(scalar: Callable[..., float]) -> Callable[..., Any]:
    vectorized = np.vectorize(scalar, otypes=[np.float64])
    return lambda *xs: vectorized(*xs).astype(np.asarray(xs[0]).dtype)


def _lgamma(x: float) -> float:
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return math.inf if not math.isnan(x) else math.nan


def _tgamma(x: float) -> float:
    try:
        return math.gamma(x)
    except OverflowError:
        return math.copysign(math.inf, x)  # next to 0, from either side, or too large
    except ValueError:
        return math.copysign(math.inf, x) if x == 0 else math.nan


def _remainder(x: float, y: float) -> float:
    try:
        return math.remainder(x, y)
    except ValueError:
        return math.nan


def _logb(x: Any) -> Any:
    exponent = np.frexp(x)[1] - 1
    special = np.where(np.equal(x, 0), -np.inf, np.abs(x))
    return np.where(np.isfinite(x) & np.not_equal(x, 0), exponent, special).astype(np.asarray(x).dtype)


def _round(x: Any) -> Any:
    """C's round: halves away from zero. The subtraction that gives the fraction is exact."""
    whole = np.trunc(x)
    up = np.greater_equal(np.abs(x - whole), 0.5)
    return np.copysign(np.where(up, np.abs(whole) + 1, np.abs(whole)), x).astype(np.asarray(x).dtype)


def _pow(x: Any, y: Any) -> Any:
    """C's pow. For an exponent of 0.5 NumPy may use sqrt, which differs from pow at -0 (not +0) and -inf (not inf)."""
    apart = np.equal(y, 0.5) & (np.equal(x, 0) | np.isneginf(x))
    return np.where(apart, np.abs(x), np.power(x, y)).astype(np.asarray(x).dtype)


def _fdim(x: Any, y: Any) -> Any:
    difference = np.where(np.less_equal(x, y), 0, x - y)  # compared because inf - inf is NaN, not 0
    return difference.astype(np.asarray(x).dtype)


def _fma(x: Any, y: Any, z: Any) -> Any:
    if np.asarray(x).dtype != np.float32:
        return _fma_float64(x, y, z)
    product = np.multiply(x, y, dtype=np.float64)  # exact
    total = product + z
    rest = total - product
    error = (product - (total - rest)) + (z - rest)  # the rounding error of `total`
    if np.any(error):  # round to odd, so that rounding to float32 afterwards adds no second error
        even = np.isfinite(total) & (error != 0) & (np.asarray(total).view(np.int64) & 1 == 0)
        total = np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return total.astype(np.float32)


def round_to_tf32(x: Any) -> Any:
    """Round float32 to 10 mantissa bits, as tensor cores do: to nearest, halves away from zero."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    up = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), up.view(np.float32), x).astype(np.float32)


def _exact_fma(x: float, y: float, z: float) -> float:
    """x * y + z in exact integer arithmetic, rounded once by the final division."""
    if not (math.isfinite(x) and math.isfinite(y) and math.isfinite(z)):
        return z if math.isfinite(x) and math.isfinite(y) else x * y + z
    (a, b), (c, d), (e, f) = (float(v).as_integer_ratio() for v in (x, y, z))
    above, below = a * c * f + e * b * d, b * d * f
    try:
        return above / below if above else x * y + z  # float arithmetic gives 0 its sign
    except OverflowError:
        return math.inf if above > 0 else -math.inf


_fma_float64 = _make_elementwise_function(_exact_fma)


_TABLE: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("exp", 1, np.exp), ("exp2", 1, np.exp2), ("expm1", 1, np.expm1),
    ("log", 1, np.log), ("log2", 1, np.log2), ("log10", 1, np.log10), ("log1p", 1, np.log1p),
    ("sqrt", 1, np.sqrt), ("rsqrt", 1, lambda x: np.asarray(1, np.asarray(x).dtype) / np.sqrt(x)), ("cbrt", 1, np.cbrt),
    ("sin", 1, np.sin), ("cos", 1, np.cos), ("tan", 1, np.tan),
    ("asin", 1, np.arcsin), ("acos", 1, np.arccos), ("atan", 1, np.arctan),
    ("sinh", 1, np.sinh), ("cosh", 1, np.cosh), ("tanh", 1, np.tanh),
    ("asinh", 1, np.arcsinh), ("acosh", 1, np.arccosh), ("atanh", 1, np.arctanh),
    ("erf", 1, _make_elementwise_function(math.erf)), ("erfc", 1, _make_elementwise_function(math.erfc)),
    ("lgamma", 1, _make_elementwise_function(_lgamma)), ("tgamma", 1, _make_elementwise_function(_tgamma)),
    ("floor", 1, np.floor), ("ceil", 1, np.ceil), ("trunc", 1, np.trunc), ("round", 1, _round), ("rint", 1, np.rint),
    ("nearbyint", 1, np.rint), ("fabs", 1, np.abs), ("logb", 1, _logb),
    ("pow", 2, _pow), ("atan2", 2, np.arctan2), ("fmod", 2, np.fmod),
    ("remainder", 2, _make_elementwise_function(_remainder)), ("hypot", 2, np.hypot), ("nextafter", 2, np.nextafter),
    ("fmin", 2, np.fmin), ("fmax", 2, np.fmax), ("copysign", 2, np.copysign),
    ("fdim", 2, _fdim),
    ("fma", 3, _fma), (TF32, 1, round_to_tf32),
)  # fmt: skip

FUNCTIONS: dict[str, MathFunction] = {name: MathFunction(name, arity, f) for name, arity, f in _TABLE}
