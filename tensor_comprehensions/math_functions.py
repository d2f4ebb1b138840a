"""The mathematical functions of the language: name, arity, meaning.

One table serves the checker, the reference evaluator and the interpreter of loop programs; each emitter has its
own table of spellings with the same keys. Arguments and result of a function share one floating type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class MathFunction:
    """A function by its C name. `evaluate` works on NumPy arrays of one floating type and keeps that type."""

    name: str
    arity: int
    evaluate: Callable[..., Any]


def _elementwise(scalar: Callable[..., float]) -> Callable[..., Any]:
    vectorised = np.vectorize(scalar, otypes=[np.float64])
    return lambda *xs: vectorised(*xs).astype(np.asarray(xs[0]).dtype)


def _lgamma(x: float) -> float:
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):
        return math.inf if not math.isnan(x) else math.nan


def _tgamma(x: float) -> float:
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.copysign(math.inf, x) if x == 0 else math.nan


def _round(x: Any) -> Any:
    """C's round: halves away from zero."""
    return np.copysign(np.floor(np.abs(x) + np.asarray(0.5, np.asarray(x).dtype)), x)


def _fdim(x: Any, y: Any) -> Any:
    difference = np.where(np.less_equal(x, y), 0, x - y)  # by comparison: of two equal infinities it is 0
    return difference.astype(np.asarray(x).dtype)


def _fma(x: Any, y: Any, z: Any) -> Any:
    wide = np.asarray(x, np.longdouble) * y + z
    return wide.astype(np.asarray(x).dtype)


_TABLE: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("exp", 1, np.exp), ("exp2", 1, np.exp2), ("expm1", 1, np.expm1),
    ("log", 1, np.log), ("log2", 1, np.log2), ("log10", 1, np.log10), ("log1p", 1, np.log1p),
    ("sqrt", 1, np.sqrt), ("rsqrt", 1, lambda x: np.asarray(1, np.asarray(x).dtype) / np.sqrt(x)), ("cbrt", 1, np.cbrt),
    ("sin", 1, np.sin), ("cos", 1, np.cos), ("tan", 1, np.tan),
    ("asin", 1, np.arcsin), ("acos", 1, np.arccos), ("atan", 1, np.arctan),
    ("sinh", 1, np.sinh), ("cosh", 1, np.cosh), ("tanh", 1, np.tanh),
    ("asinh", 1, np.arcsinh), ("acosh", 1, np.arccosh), ("atanh", 1, np.arctanh),
    ("erf", 1, _elementwise(math.erf)), ("erfc", 1, _elementwise(math.erfc)),
    ("lgamma", 1, _elementwise(_lgamma)), ("tgamma", 1, _elementwise(_tgamma)),
    ("floor", 1, np.floor), ("ceil", 1, np.ceil), ("trunc", 1, np.trunc), ("round", 1, _round), ("rint", 1, np.rint),
    ("fabs", 1, np.abs),
    ("pow", 2, np.power), ("atan2", 2, np.arctan2), ("fmod", 2, np.fmod), ("hypot", 2, np.hypot),
    ("fmin", 2, np.fmin), ("fmax", 2, np.fmax), ("copysign", 2, np.copysign),
    ("fdim", 2, _fdim),
    ("fma", 3, _fma),
)  # fmt: skip

FUNCTIONS: dict[str, MathFunction] = {name: MathFunction(name, arity, f) for name, arity, f in _TABLE}
