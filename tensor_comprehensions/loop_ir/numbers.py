"""What the operators of expressions mean on NumPy values: scalars and one-dimensional arrays of lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..dtypes import BFLOAT16, DType

Value = Any
"""A NumPy scalar, or an array with one element per lane. bfloat16 is held in float32, rounded."""

ARITHMETIC: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.logical_and, "or": np.logical_or,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def storage(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds values of `dtype`."""
    return np.dtype(np.float32 if dtype == BFLOAT16 else dtype.name)


def saturated(x: Value, to: np.dtype[Any]) -> Value:
    """Floats as integers: truncated, the nearest limit where they do not fit, 0 for NaN."""
    limits = np.iinfo(to)
    whole = np.trunc(x.astype(np.float64))
    low, high = whole < float(limits.min), whole >= float(limits.max + 1)
    fitting = np.where(low | high | np.isnan(whole), 0, whole).astype(to)
    return np.where(high, to.type(limits.max), np.where(low, to.type(limits.min), fitting))


def rounded(x: Value, dtype: DType) -> Value:
    """`x` as a value of `dtype`: rounded to nearest even for bfloat16, saturated where a float becomes an integer."""
    x = np.asarray(x)
    if dtype.is_integer and x.dtype.kind == "f":
        return saturated(x, storage(dtype))[()]
    x = x.astype(storage(dtype), copy=False)
    if dtype == BFLOAT16:
        bits = np.atleast_1d(x).view(np.uint32)
        even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        short = (even & np.uint32(0xFFFF0000)).view(np.float32)
        x = np.where(np.isnan(x), x, short.reshape(x.shape))
    return x[()]


def operator(op: str, dtype: DType) -> Callable[[Value, Value], Value]:
    """The function of `Binary(op, ...)` on operands of `dtype`."""
    if op == "div":
        return np.true_divide if dtype.is_float else np.floor_divide
    if op == "mod":
        return np.fmod if dtype.is_float else np.mod
    return ARITHMETIC[op]


def negated(x: Value) -> Value:
    return np.subtract(np.zeros_like(x), x) if np.asarray(x).dtype.kind == "u" else np.negative(x)


def reduced(op: str, x: Value) -> Value:
    """All lanes of `x` combined; `op` as in `ReduceLanes`."""
    functions = {"+": np.add, "*": np.multiply, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.logical_and, "or": np.logical_or}
    return functions[op].reduce(x, dtype=np.asarray(x).dtype)
