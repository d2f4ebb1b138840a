"""Evaluate checked expressions with NumPy, directly from the definition of the language.

Arrays have exactly the type of the expression; bfloat16, which NumPy lacks, is stored as float32 values that are
already rounded. Integers wrap; an integer divided by zero gives zero, and so does its remainder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, DType
from ...core.errors import InternalError
from ...core.math_functions import FUNCTIONS
from ..ir import Access, Binary, Call, Cast, Const, Expr, Index, Select, Size, Unary

Array = Any
"""A NumPy array or scalar; NumPy's own generic types would add no information."""

Read = Callable[[Access, Sequence[Array], Array], Array]
"""Returns the elements that an access reads, given the access, its subscripts, and a mask (None: everywhere)."""


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """The NumPy type that holds values of `dtype`."""
    return np.dtype("float32" if dtype == BFLOAT16 else dtype.name)


def convert_array(x: Array, dtype: DType) -> Array:
    """`x` converted: floats to integers truncate and saturate (NaN gives 0), integers wrap."""
    x = np.asarray(x)
    if dtype.is_bool:
        return np.asarray(x != 0)
    if dtype == BFLOAT16:
        return _to_bfloat16(x.astype(np.float32))
    if dtype.is_integer and x.dtype.kind == "f":
        return _saturating_cast(x, numpy_dtype(dtype))
    return x.astype(numpy_dtype(dtype))


def _saturating_cast(x: Array, to: np.dtype[Any]) -> Array:
    """Truncate floats to integers of the type `to`, saturating at its limits; NaN gives 0."""
    limits = np.iinfo(to)
    least, past = float(limits.min), float(limits.max + 1)  # powers of two: exact
    whole = np.trunc(x.astype(np.float64))
    inside = np.where((whole >= least) & (whole < past), whole, 0).astype(to)
    outside = np.where(whole >= past, to.type(limits.max), np.where(whole < least, to.type(limits.min), to.type(0)))
    return np.where((whole >= past) | (whole < least), outside, inside)


def _to_bfloat16(x: Array) -> Array:
    """float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    up = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, up.view(np.float32))


_ARITHMETIC: dict[str, Callable[..., Array]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "<": np.less, "<=": np.less_equal, ">": np.greater,
    ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal, "min": np.minimum, "max": np.maximum,
    "%": np.remainder,
}  # fmt: skip


def combine_arrays(op: str, a: Array, b: Array) -> Array:
    """`a op b` for arrays of one type."""
    if op == "/":
        return np.floor_divide(a, b) if np.asarray(a).dtype.kind in "iu" else np.divide(a, b)
    return _ARITHMETIC[op](a, b)


@dataclass(frozen=True, slots=True)
class NumpyExpressionEvaluator:
    """Evaluates expressions over a grid: `indices` gives each index variable an int64 array that broadcasts."""

    indices: Mapping[str, Array]
    read: Read

    def __call__(self, e: Expr, where: Array = None) -> Array:
        """The values of `e`. Where the mask `where` is false, they are arbitrary, and no memory is read for them."""
        match e:
            case Const(value=value, dtype=dtype):
                return (
                    convert_array(np.asarray(value), dtype) if dtype.is_float else np.asarray(value, numpy_dtype(dtype))
                )
            case Index(name=name, dtype=dtype):
                return self.indices[name].astype(numpy_dtype(dtype))
            case Access(subscripts=subscripts):
                return self.read(e, [self(x, where) for x in subscripts], where)
            case Unary(op=op, operand=x):
                return np.negative(self(x, where)) if op == "-" else np.logical_not(self(x, where))
            case Binary(op="&&" | "||"):
                return self._evaluate_logical(e, where)
            case Binary(op=op, left=a, right=b):
                return combine_arrays(op, self(a, where), self(b, where))
            case Select():
                return self._select(e, where)
            case Cast(operand=x, dtype=dtype):
                return convert_array(self(x, where), dtype)
            case Call(function=name, arguments=arguments):
                return FUNCTIONS[name].evaluate(*(self(x, where) for x in arguments))
            case Size(name=name):
                raise InternalError(f"the size {name} is not bound")

    def _evaluate_logical(self, e: Binary, where: Array) -> Array:
        left = self(e.left, where)
        decided = left if e.op == "||" else ~left
        right = self(e.right, _and_masks(where, ~decided))
        return np.where(decided, left, right)

    def _select(self, e: Select, where: Array) -> Array:
        condition = self(e.condition, where)
        then = self(e.then, _and_masks(where, condition))
        otherwise = self(e.otherwise, _and_masks(where, ~condition))
        return np.where(condition, then, otherwise)


def _and_masks(a: Array, b: Array) -> Array:
    return b if a is None else a & b


def index_grid(bounds: Mapping[str, tuple[int, int]]) -> dict[str, Array]:
    """The values of each index in its half-open range, shaped so that together they broadcast to the whole grid."""
    arrays = {}
    for axis, (name, (lower, upper)) in enumerate(bounds.items()):
        shape = [1] * len(bounds)
        shape[axis] = -1
        arrays[name] = np.arange(lower, upper, dtype=np.int64).reshape(shape)
    return arrays
