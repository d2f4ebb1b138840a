"""The operators of expressions on NumPy values: scalars and one-dimensional arrays of lanes."""

from __future__ import annotations

import operator as operators
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, DType
from ..nodes import BITS

Value = Any
"""A NumPy scalar, or an array with one element per lane. bfloat16 is held in float32, rounded."""


def _nan_min(x: Value, y: Value) -> Value:
    return np.minimum(x, y) if isinstance(x, np.ndarray) else x if x < y or x != x else y


def _nan_max(x: Value, y: Value) -> Value:
    return np.maximum(x, y) if isinstance(x, np.ndarray) else x if x > y or x != x else y


# Python's operators dispatch to NumPy for arrays, and are twenty times faster than NumPy's functions for scalars.
ARITHMETIC: dict[str, Callable[[Value, Value], Value]] = {
    "add": operators.add, "sub": operators.sub, "mul": operators.mul, "min": _nan_min, "max": _nan_max,
    "and": operators.and_, "or": operators.or_, "eq": operators.eq, "ne": operators.ne,
    "lt": operators.lt, "le": operators.le, "gt": operators.gt, "ge": operators.ge,
}  # fmt: skip


def storage_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds values of `dtype`."""
    return np.dtype(np.float32 if dtype == BFLOAT16 else dtype.name)


def saturate_to(x: Value, to: np.dtype[Any]) -> Value:
    """Floats converted to the integer type `to`: truncated, saturated if out of range, 0 for NaN."""
    limits = np.iinfo(to)
    whole = np.trunc(x.astype(np.float64))
    low, high = whole < float(limits.min), whole >= float(limits.max + 1)
    fitting = np.where(low | high | np.isnan(whole), 0, whole).astype(to)
    return np.where(high, to.type(limits.max), np.where(low, to.type(limits.min), fitting))


def round_to(x: Value, dtype: DType) -> Value:
    """`x` converted to `dtype`: rounded to nearest even for bfloat16; floats saturate when they become integers."""
    return rounding_function(dtype)(x)


def rounding_function(dtype: DType) -> Callable[[Value], Value]:
    """`round_to` specialized to one type, for repeated use."""
    kind, integer, short = storage_dtype(dtype), dtype.is_integer, dtype == BFLOAT16

    def to_type(x: Value) -> Value:
        if not short and isinstance(x, np.generic) and x.dtype == kind:
            return x
        x = np.asarray(x)
        if integer and x.dtype.kind == "f":
            return saturate_to(x, kind)[()]
        if short and x.dtype == np.float64:
            x = _to_odd_float32(x)
        x = x.astype(kind, copy=False)
        return (_to_bfloat16(x) if short else x)[()]

    return to_type


def _to_odd_float32(x: Value) -> Value:
    """float64 rounded to odd float32: inexact values take the odd neighbor, so that rounding again is correct."""
    nearest = x.astype(np.float32)
    wide, bits = nearest.astype(np.float64), nearest.reshape(-1).view(np.uint32).reshape(x.shape)
    toward_zero = bits - (np.abs(wide) > np.abs(x)).astype(np.uint32)
    odd = (toward_zero | np.uint32(1)).reshape(-1).view(np.float32).reshape(x.shape)
    return np.where((wide == x) | np.isnan(x), nearest, odd)


def _to_bfloat16(x: Value) -> Value:
    bits = x.reshape(-1).view(np.uint32)
    even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    short = (even & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, short.reshape(x.shape))


def binary_function(op: str, dtype: DType) -> Callable[[Value, Value], Value]:
    """The function of `Binary(op, ...)` on operands of `dtype`."""
    if op == "div":
        return operators.truediv if dtype.is_float else operators.floordiv
    if op == "mod":
        return np.fmod if dtype.is_float else operators.mod
    return ARITHMETIC[op]


def negate(x: Value) -> Value:
    return -x if x.dtype.kind != "u" else np.zeros_like(x) - x


def reduce_lanes_of(op: str, x: Value) -> Value:
    """All lanes of `x` combined; `op` as in `ReduceLanes`."""
    if op == BITS:
        return np.packbits(np.resize(x, 64) & (np.arange(64) < x.size), bitorder="little").view(np.int64)[0]
    functions = {"+": np.add, "*": np.multiply, "min": np.minimum, "max": np.maximum}
    functions |= {"and": np.logical_and, "or": np.logical_or}
    return functions[op].reduce(x, dtype=np.asarray(x).dtype)
