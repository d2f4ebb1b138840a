"""The types of operands that each kind of expression takes."""

from __future__ import annotations

from collections.abc import Callable

from ..core.dtypes import BOOL, FLOAT32
from ..core.math_functions import FUNCTIONS, TF32
from .instructions import INSTRUCTIONS
from .nodes import (
    ARITHMETIC,
    BITS,
    COMPARISONS,
    Binary,
    Broadcast,
    Call,
    Cast,
    Expr,
    Ramp,
    ReduceLanes,
    Select,
    Shuffle,
    Type,
    Unary,
)


def operands_fit(e: Expr, types: list[Type]) -> bool:
    """Whether an expression that has operands may have operands of these types."""
    return _KINDS[type(e)](e, types)


def _fits_binary(e: Binary, types: list[Type]) -> bool:
    left, right = types
    if e.op in ("and", "or"):
        return left == right and left.dtype.is_bool
    return left == right and (e.op in COMPARISONS or (e.op in ARITHMETIC and not left.dtype.is_bool))


def _fits_unary(e: Unary, types: list[Type]) -> bool:
    return e.op == "not" if types[0].dtype.is_bool else e.op == "neg"


def _fits_select(_: Select, types: list[Type]) -> bool:
    return types[1] == types[2] and types[0] == Type(BOOL, types[1].lanes)


def _fits_call(e: Call, types: list[Type]) -> bool:
    if instruction := INSTRUCTIONS.get(e.function):
        return types == [Type(dtype, types[0].lanes) for dtype in instruction.operands]
    known = FUNCTIONS.get(e.function)
    same = all(t == types[0] for t in types)
    narrow = e.function != TF32 or types[0].dtype == FLOAT32
    return known is not None and known.arity == len(types) and same and types[0].dtype.is_float and narrow


def _fits_ramp(e: Ramp, types: list[Type]) -> bool:
    return types[0].lanes == 1 and types[0].dtype.is_integer and e.lanes > 1


def _fits_broadcast(e: Broadcast, types: list[Type]) -> bool:
    return types[0].lanes == 1 and e.lanes > 1


def _fits_shuffle(e: Shuffle, types: list[Type]) -> bool:
    left, right = types
    inside = all(0 <= lane < 2 * left.lanes for lane in e.lanes)
    return left == right and left.lanes > 1 and len(e.lanes) > 1 and inside


def _fits_reduction(e: ReduceLanes, types: list[Type]) -> bool:
    ops = ("and", "or") if types[0].dtype.is_bool else ("+", "*", "min", "max")
    packs = e.op == BITS and types[0].dtype.is_bool and types[0].lanes <= 64
    return types[0].lanes > 1 and (e.op in ops or packs)


_KINDS: dict[type, Callable[..., bool]] = {
    Binary: _fits_binary,
    Unary: _fits_unary,
    Select: _fits_select,
    Call: _fits_call,
    Ramp: _fits_ramp,
    Broadcast: _fits_broadcast,
    ReduceLanes: _fits_reduction,
    Shuffle: _fits_shuffle,
    Cast: lambda _, types: True,
}
