"""The formulas of torch's operations: a table from an operation to a function that builds its value.

An operation that is missing here, or refuses with `Unsupported`, stays with torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..core.dtypes import BOOL, FLOAT32, INT32, INT64, DType
from ..dispatch.arguments import TORCH_TYPES, TYPES
from .def_builder import DefBuilder, reads_own_type
from .index_views import (
    Value,
    align_values,
    broadcast_value,
    drop_dim,
    guard_value,
    merge_loops,
    of_shape,
    offset_dim,
    permute_value,
    reshape_value,
    shift_dim,
)
from .literals import Unsupported, cast_text, compute_dtype, format_literal

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True, slots=True)
class TranslationContext:
    """The context in which a node is translated: the def so far, and the shape and type of the node's result.

    order: the dimensions of the result, outermost in memory first; () if that is not known.
    """

    body: DefBuilder
    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] = ()


Operation = Callable[..., Value]
Parts = Sequence[Callable[[], Value] | None]
TABLE: dict[Any, Operation] = {}
VIEWS: set[Any] = set()
"""Operations that cost nothing; if torch computes their argument, they stay with torch, too."""
MULTI_OUTPUT_OPS: dict[Any, Callable[..., Parts]] = {}
"""Operations with several results: the function returns, for each result, one that makes it, or None."""
FLOPS: dict[Any, Callable[[torch.fx.Node], int]] = {}
"""The floating-point operations of operations with more than one per element, such as products."""


def operation(*targets: Any, view: bool = False) -> Callable[[Operation], Operation]:
    """Register a function in `TABLE` as the formula of `targets`, and these in `VIEWS` if `view`."""

    def register(function: Operation) -> Operation:
        for target in targets:
            TABLE[target] = function
        VIEWS.update(targets if view else ())
        return function

    return register


def size_of(node: torch.fx.Node, argument: int, dimension: int) -> int:
    """The size of a dimension of an argument of `node`."""
    return int(node.args[argument].meta["val"].shape[dimension])  # type: ignore[union-attr]


def num_elements(node: torch.fx.Node) -> int:
    """The number of elements of the result of `node`, or of its first result."""
    value = node.meta["val"]
    return math.prod((value if isinstance(value, torch.Tensor) else next(x for x in value if x is not None)).shape)


NAN_PASSING = {
    aten.convolution.default, aten.mm.default, aten.bmm.default, aten.addmm.default, aten.add.Tensor, aten.sub.Tensor,
    aten.mul.Tensor, aten.div.Tensor, prims.div.default, aten.neg.default, aten.exp.default, aten.log.default,
    aten.sqrt.default, aten.rsqrt.default, aten.sigmoid.default, aten.tanh.default, aten.relu.default, aten.erf.default,
    aten._to_copy.default, aten.reciprocal.default, aten.abs.default, aten.sum.dim_IntList, prims.sum.default,
    aten.mean.dim, prims.var.default, aten.var.correction,
}  # fmt: skip
"""Operations whose floating-point results are NaN if an element that they depend on is NaN."""

# --- pointwise operations ----------------------------------------------------------------------------------------

UNARY = {
    aten.neg.default: "(-{0})", aten.exp.default: "exp({0})", aten.log.default: "log({0})",
    aten.abs.default: "abs({0})", aten.sqrt.default: "sqrt({0})", aten.rsqrt.default: "rsqrt({0})",
    aten.reciprocal.default: "(1.0 / {0})",
    aten.sigmoid.default: "sigmoid({0})", aten.tanh.default: "tanh({0})", aten.relu.default: "relu({0})",
    aten.erf.default: "erf({0})", aten.sin.default: "sin({0})", aten.cos.default: "cos({0})",
    aten.log1p.default: "log1p({0})", aten.expm1.default: "expm1({0})", aten.floor.default: "floor({0})",
    aten.ceil.default: "ceil({0})", aten.exp2.default: "exp2({0})", aten.log2.default: "log2({0})",
    aten.logical_not.default: "(!{0})", aten.bitwise_not.default: "(!{0})",
}  # fmt: skip
BINARY = {
    aten.mul.Tensor: "({0} * {1})", aten.mul.Scalar: "({0} * {1})", aten.div.Tensor: "({0} / {1})",
    prims.div.default: "({0} / {1})", aten.div.Scalar: "({0} / {1})",
    aten.maximum.default: "max({0}, {1})", aten.minimum.default: "min({0}, {1})",
    aten.logical_and.default: "({0} && {1})", aten.logical_or.default: "({0} || {1})",
    aten.bitwise_and.Tensor: "({0} && {1})", aten.bitwise_or.Tensor: "({0} || {1})",
}  # fmt: skip
LOGICAL = {aten.logical_not.default, aten.bitwise_not.default, aten.logical_and.default, aten.logical_or.default,
           aten.bitwise_and.Tensor, aten.bitwise_or.Tensor}  # fmt: skip
SIGNED = frozenset(("(-{0})", "abs({0})", "max({0}, {1})", "min({0}, {1})"))
"""Formulas that hold for signed integers, too."""
SHORT_RUN = 4
"""The number of neighbors below which a loop over them alone is too short for vectors."""
MOST_PARTS = 32
"""The maximum operands of a concatenation in a kernel: every element selects one of them."""
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def scalar_value(value: float | int | bool, dtype: DType) -> Value:
    text = format_literal(value, dtype)
    return Value((), lambda i: text, dtype, constant=True)


def pointwise(c: TranslationContext, template: str, operands: Sequence[Value], dtype: DType | None = None) -> Value:
    """`template` filled with the operands' elements, all in the type of the result or in `dtype`."""
    kind = compute_dtype(dtype or c.dtype)
    held = [x if x.constant or x.access or x.shape == c.shape else c.body.materialize(x) for x in operands]
    values = align_values([broadcast_value(x, c.shape) for x in held])

    def element_text(i: Sequence[str]) -> str:
        return template.format(*(cast_text(x.at(i), compute_dtype(x.dtype), kind) for x in values))

    return Value(values[0].groups, element_text, c.dtype, constant=all(x.constant for x in values))


def to_values(c: TranslationContext, *arguments: Any, dtype: DType | None = None) -> list[Value]:
    """Arguments as values; numbers take the type of the operation."""
    return [x if isinstance(x, Value) else scalar_value(_check_number(x), dtype or c.dtype) for x in arguments]


def _check_number(x: Any) -> float | int | bool:
    if not isinstance(x, bool | int | float):
        raise Unsupported(f"{type(x).__name__} is no number")
    return x


def _register_tables() -> None:
    for target, template in (*UNARY.items(), *BINARY.items()):
        TABLE[target] = _make_operation(template, target in LOGICAL)
    for name, sign in COMPARISONS.items():
        packet = getattr(aten, name)
        TABLE[packet.Tensor] = TABLE[packet.Scalar] = _make_comparison(sign)


def _make_operation(template: str, logical: bool) -> Operation:
    def make(c: TranslationContext, *arguments: Any) -> Value:
        if logical != (c.dtype == BOOL):
            raise Unsupported(f"not in {c.dtype}")
        exact = "*" in template or (template in SIGNED and c.dtype.is_signed)
        if not (logical or c.dtype.is_float or exact):
            raise Unsupported(f"not in {c.dtype}")
        return pointwise(c, template, to_values(c, *arguments))

    return make


def _make_comparison(sign: str) -> Operation:
    def make(c: TranslationContext, x: Value, y: Any) -> Value:
        kind = common_dtype(x, y)
        wide = FLOAT32 if compute_dtype(kind) == FLOAT32 else kind  # numbers, too, are rounded to 16-bit types before
        both = [cast_to_result(replace(c, shape=v.shape, dtype=kind), v) for v in to_values(c, x, y, dtype=wide)]
        if isinstance(y, Value) or y != 0:  # no rounding changes a sign
            both = [_round_computed(v) for v in both]
        return pointwise(c, f"({{0}} {sign} {{1}})", both, kind)

    return make


def _round_computed(x: Value) -> Value:
    """`x` with computed elements of 16 bits rounded to their type, as torch compares them."""
    wide = compute_dtype(x.dtype)
    if wide == x.dtype or x.constant or reads_own_type(x):
        return x
    return replace(x, at=lambda i: cast_text(cast_text(x.at(i), wide, x.dtype), x.dtype, wide), access=False, tensor="")


def common_dtype(x: Value, y: Any) -> DType:
    """The type in which torch compares `x` with another tensor or with a number."""
    return TYPES[
        torch.result_type(
            _make_promotion_example(x), _make_promotion_example(y) if isinstance(y, Value) else _check_number(y)
        )
    ]


def _make_promotion_example(x: Value) -> torch.Tensor:
    """A tensor that promotes types as `x` does: tensors without dimensions have a lower priority."""
    return torch.empty([0] * len(x.groups), dtype=TORCH_TYPES[x.dtype])


@operation(aten.add.Tensor, aten.add.Scalar)
def add(c: TranslationContext, x: Any, y: Any, alpha: Any = 1) -> Value:
    return add_scaled(c, "+", x, y, alpha)


@operation(aten.sub.Tensor, aten.sub.Scalar)
def sub(c: TranslationContext, x: Any, y: Any, alpha: Any = 1) -> Value:
    return add_scaled(c, "-", x, y, alpha)


def add_scaled(c: TranslationContext, sign: str, x: Any, y: Any, alpha: Any) -> Value:
    if c.dtype == BOOL:
        raise Unsupported("not in bool")
    if alpha == 1:
        return pointwise(c, f"({{0}} {sign} {{1}})", to_values(c, x, y))
    return pointwise(c, f"({{0}} {sign} {{2}} * {{1}})", to_values(c, x, y, alpha))


@operation(aten.pow.Tensor_Scalar)
def power(c: TranslationContext, x: Value, exponent: Any) -> Value:
    if not c.dtype.is_float:
        raise Unsupported(f"not in {c.dtype}")
    if exponent == 1:
        return x
    if exponent == 2:
        return pointwise(c, "({0} * {0})", [x if x.access else c.body.materialize(x)])
    if exponent in (0.5, -0.5):
        return pointwise(c, "sqrt({0})" if exponent > 0 else "rsqrt({0})", [x])
    return pointwise(c, "pow({0}, {1})", to_values(c, x, exponent))


@operation(aten.where.self)
def select_where(c: TranslationContext, condition: Value, x: Any, y: Any) -> Value:
    both = to_values(c, x, y)
    mask = pointwise(replace(c, dtype=BOOL), "{0}", [condition])
    values = [pointwise(c, "{0}", [v]) for v in both]
    a, b, m = align_values([broadcast_value(v, c.shape) for v in (*values, mask)])
    return Value(a.groups, lambda i: f"({m.at(i)} ? {a.at(i)} : {b.at(i)})", c.dtype)


@operation(aten.clamp.default)
def clamp(c: TranslationContext, x: Value, low: Any = None, high: Any = None) -> Value:
    if low is not None:
        x = pointwise(c, "max({0}, {1})", to_values(c, x, low))
    return x if high is None else pointwise(c, "min({0}, {1})", to_values(c, x, high))


@operation(aten._to_copy.default, prims.convert_element_type.default)
def to_copy(c: TranslationContext, x: Value, *_: Any, **__: Any) -> Value:
    return cast_to_result(c, x)


def cast_to_result(c: TranslationContext, x: Value) -> Value:
    """`x` in the type of the result; 16-bit results are rounded."""
    if x.dtype == c.dtype:
        return x
    source, target = compute_dtype(x.dtype), compute_dtype(c.dtype)
    rounded = c.dtype != target and x.dtype != c.dtype
    narrows = source.is_float and not target.is_float and target != BOOL and target.bits < 32

    def element_text(i: Sequence[str]) -> str:
        if narrows:  # torch takes the low bits; the conversion of a def saturates
            return cast_text(cast_text(x.at(i), source, INT32), INT32, target)
        text = cast_text(x.at(i), source, c.dtype) if rounded else cast_text(x.at(i), source, target)
        return cast_text(text, c.dtype, target) if rounded else text

    return Value(x.groups, element_text, c.dtype, constant=x.constant)


@operation(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, view=True)
def full(c: TranslationContext, first: Any, value: Any = None, **_: Any) -> Value:
    return broadcast_value(scalar_value(_check_number(first if value is None else value), c.dtype), c.shape)


@operation(aten.arange.start_step, view=True)
def arange(c: TranslationContext, start: Any, end: Any = None, step: Any = 1, **_: Any) -> Value:
    if c.dtype != INT64 or not all(isinstance(n, int) for n in (start, step)):
        raise Unsupported("not of int64")
    first, distance = format_literal(start, INT64), format_literal(step, INT64)
    return of_shape(c.shape, lambda i: f"({first} + {distance} * int64({i[0] if i else 0}))", c.dtype, constant=True)


# --- views -------------------------------------------------------------------------------------------------------


@operation(aten.alias.default, aten.clone.default, view=True)
def clone(c: TranslationContext, x: Value, **_: Any) -> Value:
    return x


@operation(aten.view.default, view=True)
def view(c: TranslationContext, x: Value, _: Any) -> Value:
    return reshape_value(x, c.shape)


@operation(aten.unsqueeze.default, aten.squeeze.dims, view=True)
def squeeze(c: TranslationContext, x: Value, _: Any = None) -> Value:
    return reshape_value(x, c.shape)


@operation(aten.permute.default, view=True)
def permute(c: TranslationContext, x: Value, order: Sequence[int]) -> Value:
    return permute_value(x, [d % len(order) for d in order])


@operation(aten.expand.default, view=True)
def expand(c: TranslationContext, x: Value, _: Any, **__: Any) -> Value:
    return broadcast_value(x if x.access or x.constant or x.shape == c.shape else c.body.materialize(x), c.shape)


@operation(prims.broadcast_in_dim.default, view=True)
def broadcast_in_dim(c: TranslationContext, x: Value, shape: Sequence[int], dimensions: Sequence[int]) -> Value:
    inner = dict(zip(dimensions, x.shape, strict=True))
    return expand(c, reshape_value(x, [inner.get(d, 1) for d in range(len(shape))]), shape)


@operation(aten.select.int, view=True)
def select(c: TranslationContext, x: Value, dimension: int, index: int) -> Value:
    dimension %= len(x.groups)
    index %= x.shape[dimension]
    return drop_dim(shift_dim(x, dimension, 1, lambda _: str(index)), dimension)


@operation(aten.slice.Tensor, view=True)
def slice_(
    c: TranslationContext, x: Value, dimension: int = 0, start: Any = None, _: Any = None, step: int = 1
) -> Value:
    dimension %= len(x.groups)
    size = x.shape[dimension]
    first = 0 if start is None else max(0, min(start + size if start < 0 else start, size))
    if first == 0 and c.shape[dimension] == size:
        return x
    return shift_dim(x, dimension, c.shape[dimension], lambda i: f"({first} + {step} * {i})")


@operation(aten.slice_backward.default)
def slice_backward(c: TranslationContext, g: Value, _: Any, dimension: int, start: int, __: int, step: int) -> Value:
    """`g` at the places of a slice, and 0 elsewhere."""
    dimension %= len(g.groups)
    size, count = c.shape[dimension], g.shape[dimension]
    first = max(0, min(start + size if start < 0 else start, size))
    if step != 1:
        raise Unsupported("a slice with a step")
    return _place_part(c, g, dimension, first, count)


@operation(aten.select_backward.default)
def select_backward(c: TranslationContext, g: Value, _: Any, dimension: int, index: int) -> Value:
    """`g` at one index of a dimension, and 0 elsewhere."""
    dimension %= len(c.shape)
    one = reshape_value(g, [*g.shape[:dimension], 1, *g.shape[dimension:]])
    return _place_part(c, one, dimension, index % c.shape[dimension], 1)


def _place_part(c: TranslationContext, x: Value, dimension: int, first: int, count: int) -> Value:
    """The `count` elements of `x` in a dimension, from index `first` of the result on, and 0 elsewhere."""
    moved = offset_dim(x, dimension, c.shape[dimension], first)
    return guard_value(moved, [(dimension, first, first + count)], format_literal(0, x.dtype))


@operation(aten.roll.default)
def roll(c: TranslationContext, x: Value, shifts: Sequence[int], dimensions: Sequence[int] = ()) -> Value:
    if not dimensions:
        raise Unsupported("of a flattened tensor")
    for shift, d in zip(shifts, dimensions, strict=True):
        d %= len(x.groups)
        size = x.shape[d]
        first = shift % size
        if first:
            x = x if x.access else c.body.materialize(x)
            x = _choose_by_index(offset_dim(x, d, size, first - size), offset_dim(x, d, size, first), d, first)
    return x


def _choose_by_index(before: Value, after: Value, dimension: int, first: int) -> Value:
    """The elements of `before` at indices of a dimension below `first`, and those of `after` elsewhere."""
    position = sum(len(g) for g in before.groups[:dimension])
    return replace(
        before, at=lambda i: f"({i[position]} < {first} ? {before.at(i)} : {after.at(i)})", access=False, tensor=""
    )


@operation(aten.constant_pad_nd.default)
def constant_pad(c: TranslationContext, x: Value, widths: Sequence[int], value: Any = 0) -> Value:
    bounds: list[tuple[int, int, int]] = []
    for k, before in enumerate(widths[::2]):
        d = len(x.groups) - 1 - k
        size, behind = x.shape[d], widths[2 * k + 1]
        if before or behind:
            x = offset_dim(x, d, c.shape[d], before)
            bounds.append((d, before, before + size))
    return guard_value(x, bounds, format_literal(value, x.dtype)) if bounds else x


def split_part(c: TranslationContext, x: Value, sizes: Sequence[int], dimension: int, position: int) -> Value:
    """The piece at `position` of `split_with_sizes`."""
    first = sum(sizes[:position])
    return shift_dim(x, dimension % len(x.groups), sizes[position], lambda i: f"({first} + {i})")


@operation(aten.cat.default)
def cat(c: TranslationContext, parts: Sequence[Value], dimension: int = 0) -> Value:
    if len(parts) > MOST_PARTS:
        raise Unsupported(f"of more than {MOST_PARTS} parts")
    dimension %= len(c.shape)
    ends = list(accumulate(x.shape[dimension] for x in parts))
    held = [cast_to_result(replace(c, shape=x.shape), x if x.access else c.body.materialize(x)) for x in parts]

    shifted = [offset_dim(x, dimension, ends[-1], end - x.shape[dimension]) for x, end in zip(held, ends, strict=True)]
    whole = align_values(shifted)
    if len(whole[0].groups[-1]) > 1 and whole[0].groups[-1][-1] < SHORT_RUN:
        whole = align_values([merge_loops(x, len(x.groups) - 1) for x in shifted])
    position = sum(len(g) for g in whole[0].groups[:dimension])

    def choose(i: Sequence[str], first: int, last: int) -> str:
        """The element at `i` from one of the parts in `first:last`, selected by bisection."""
        if last - first == 1:
            return whole[first].at(i)
        middle = (first + last) // 2
        return f"({i[position]} < {ends[middle - 1]} ? {choose(i, first, middle)} : {choose(i, middle, last)})"

    return c.body.materialize(Value(whole[0].groups, lambda i: choose(i, 0, len(whole)), c.dtype))


# --- reductions --------------------------------------------------------------------------------------------------


def reduce_dims(c: TranslationContext, x: Value, dimensions: Any, keep: bool, op: str) -> Value:
    """Reduce `x` by `op` over `dimensions` (all if empty), in the result's type."""
    over = normalize_dims(dimensions, len(x.groups))
    wide = pointwise(TranslationContext(c.body, x.shape, c.dtype), "{0}", [x])
    result = c.body.add_reduction(wide, over, op)
    return result if keep else _drop_dimensions(result, over)


def normalize_dims(dimensions: Any, rank: int) -> list[int]:
    """The sorted dimensions, none negative; all if none are given; none for a scalar, which accepts 0 and -1."""
    if rank == 0:
        return []
    return sorted({d % rank for d in dimensions} if dimensions else range(rank))


def _drop_dimensions(x: Value, dimensions: Sequence[int]) -> Value:
    for d in reversed(dimensions):
        x = drop_dim(x, d)
    return x


def _require_floating(c: TranslationContext) -> None:
    if not c.dtype.is_float:
        raise Unsupported(f"not in {c.dtype}")


@operation(aten.sum.dim_IntList)
def sum_dims(c: TranslationContext, x: Value, dimensions: Any = None, keep: bool = False, **_: Any) -> Value:
    _require_floating(c)
    return reduce_dims(c, x, dimensions, keep, "+")


@operation(prims.sum.default)
def sum_all(c: TranslationContext, x: Value, dimensions: Any = None, **_: Any) -> Value:
    return sum_dims(c, x, dimensions)


@operation(aten.mean.default, aten.mean.dim)
def mean(c: TranslationContext, x: Value, dimensions: Any = None, keep: bool = False, **_: Any) -> Value:
    _require_floating(c)
    total = reduce_dims(c, x, dimensions, keep, "+")
    return divide_by_count(c, total, math.prod(x.shape) / max(1, math.prod(c.shape)))


def divide_by_count(c: TranslationContext, x: Value, count: float) -> Value:
    number = format_literal(count, c.dtype)
    return Value(x.groups, lambda i: f"({x.at(i)} / {number})", c.dtype)


@operation(aten.amax.default)
def amax(c: TranslationContext, x: Value, dimensions: Any = (), keep: bool = False) -> Value:
    _require_floating(c)
    return reduce_dims(c, x, dimensions, keep, "max")


@operation(aten.amin.default)
def amin(c: TranslationContext, x: Value, dimensions: Any = (), keep: bool = False) -> Value:
    _require_floating(c)
    return reduce_dims(c, x, dimensions, keep, "min")


@operation(prims.var.default, aten.var.correction)
def variance(
    c: TranslationContext, x: Value, dimensions: Any = None, correction: Any = 1, keepdim: bool = False, **_: Any
) -> Value:
    _require_floating(c)
    x = x if x.access else c.body.materialize(x)
    over = normalize_dims(dimensions, len(x.groups))
    count = math.prod(x.shape[d] for d in over)
    inner = TranslationContext(c.body, x.shape, c.dtype)
    center = c.body.materialize(divide_by_count(inner, reduce_dims(inner, x, over, True, "+"), count))
    difference = pointwise(inner, "({0} - {1})", [x, center])
    square = pointwise(inner, "({0} * {0})", [difference])
    divisor = max(0, count - (1 if correction is None else correction))
    total = divide_by_count(c, reduce_dims(c, square, over, True, "+"), divisor)
    return total if keepdim else _drop_dimensions(total, over)


_register_tables()
