"""The functions of the loop program that take scalars of a type."""

from __future__ import annotations

from tensor_comprehensions.core.dtypes import FLOAT32, DType
from tensor_comprehensions.core.math_functions import FUNCTIONS, TF32, MathFunction


def functions_of(dtype: DType) -> tuple[MathFunction, ...]:
    """All but those that are defined for float32 only."""
    return tuple(f for f in FUNCTIONS.values() if f.name != TF32 or dtype == FLOAT32)
