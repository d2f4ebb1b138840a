"""Addresses: the indices of an access flattened to one offset in elements, and how it changes from lane to lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...core.dtypes import INT64
from ...loop_ir.nodes import Binary, Broadcast, Buffer, Cast, Const, Expr, Ramp, Unary, Var
from .hoisting_builder import HoistingBuilder
from .types import memory_type, register_type, splat_constant


class ValueContext(Protocol):
    """The part of `expr.Printer` that memory accesses use."""

    b: HoistingBuilder

    @property
    def has_fast_gather(self) -> bool: ...
    @property
    def has_mask_registers(self) -> bool: ...
    def value(self, e: Expr) -> str: ...
    def known_mask(self, e: Expr) -> tuple[bool, ...] | None: ...
    def base(self, buffer: Buffer) -> str: ...
    def version(self, name: str) -> int: ...
    def record_write(self, name: str) -> None: ...


@dataclass(slots=True)
class FlatAddress:
    """An offset in elements: `constant`, plus `terms`, plus `lane` times the lane number, plus `vectors`.

    terms, vectors: scalar and vector values with their factors. lane_strides: values by which the lane number is
    multiplied in addition to `lane`, with their factors. sources: the expression of each value in `vectors`.
    """

    constant: int = 0
    lane: int = 0
    terms: dict[str, int] = field(default_factory=dict)
    vectors: dict[str, int] = field(default_factory=dict)
    sources: dict[str, Expr] = field(default_factory=dict)
    lane_strides: dict[str, int] = field(default_factory=dict)

    @property
    def has_open_lanes(self) -> bool:
        """Whether the distance between lanes is known only at run time."""
        return bool(self.vectors or self.lane_strides)

    def add(self, value: str, scale: int) -> None:
        """Add `scale` times a scalar value, which may be a number."""
        if value.startswith("%"):
            self.terms[value] = self.terms.get(value, 0) + scale
        else:
            self.constant += scale * int(value)


def flatten_access(values: ValueContext, buffer: Buffer, indices: Sequence[Expr]) -> FlatAddress:
    """The offset of `buffer[indices]` from the buffer's first element."""
    if buffer.stride_variables:
        return _flatten_open_access(values, buffer, indices)
    place = FlatAddress()
    for index, stride in _join_quotients(list(zip(indices, buffer.strides, strict=True))):
        _accumulate_index_expr(values, place, index, stride)
    return place


def _join_quotients(terms: list[tuple[Expr, int]]) -> list[tuple[Expr, int]]:
    """`terms`, (index, stride) by dimension, with `(e // n + c, n * s), (e % n, s)` joined to `(e + c * n, s)`."""
    for k in range(len(terms) - 1):
        (outer, step), (inner, stride) = terms[k : k + 2]
        if not (isinstance(inner, Binary) and inner.op == "mod") or not isinstance(inner.right, Const):
            continue
        n, quotient, added = int(inner.right.value), outer, 0
        if isinstance(outer, Binary) and outer.op == "add" and isinstance(outer.right, Const):
            quotient, added = outer.left, int(outer.right.value)
        if quotient == Binary("div", inner.left, inner.right) and step == n * stride:
            whole = Binary("add", inner.left, replace(inner.right, value=added * n)) if added else inner.left
            return [*terms[:k], *_join_quotients([(whole, stride), *terms[k + 2 :]])]
    return terms


def _flatten_open_access(values: ValueContext, buffer: Buffer, indices: Sequence[Expr]) -> FlatAddress:
    """`flatten_access` for a buffer with strides in variables."""
    place = FlatAddress()
    for index, stride, held in zip(indices, buffer.strides, buffer.stride_variables, strict=True):
        if held is None:
            _accumulate_index_expr(values, place, index, stride)
        else:
            _accumulate_index_expr(values, place, index, 1, Var(held))
    return place


def _accumulate_index_expr(
    values: ValueContext, place: FlatAddress, e: Expr, scale: int, step: Var | None = None
) -> None:
    """Add `e` times `scale` to `place`, also times the stride variable `step` if given."""
    if scale == 0:
        return
    if type(e) is Const:
        if step is None:
            place.constant += scale * int(e.value)
        else:
            place.add(values.value(step), scale * int(e.value))
        return
    if type(e) is Var:
        accumulate_value(values, place, e, scale, step)
        return
    match e:
        case Binary(op="add", left=left, right=right):
            _accumulate_index_expr(values, place, left, scale, step)
            _accumulate_index_expr(values, place, right, scale, step)
        case Binary(op="sub", left=left, right=right):
            _accumulate_index_expr(values, place, left, scale, step)
            _accumulate_index_expr(values, place, right, -scale, step)
        case Binary(op="mul", left=left, right=Const(value=number)):
            _accumulate_index_expr(values, place, left, scale * int(number), step)
        case Binary(op="mul", left=Const(value=number), right=right):
            _accumulate_index_expr(values, place, right, scale * int(number), step)
        case Unary(op="neg", operand=operand):
            _accumulate_index_expr(values, place, operand, -scale, step)
        case Broadcast(operand=operand):
            _accumulate_index_expr(values, place, operand, scale, step)
        case Ramp(base=base, stride=stride):
            _accumulate_index_expr(values, place, base, scale, step)
            _accumulate_lanes(values, place, scale * stride, step)
        case Cast(operand=operand, dtype=dtype) if dtype == INT64 and operand.type.dtype == INT64:
            _accumulate_index_expr(values, place, operand, scale, step)
        case _:
            accumulate_value(values, place, e, scale, step)


def _accumulate_lanes(values: ValueContext, place: FlatAddress, scale: int, step: Var | None) -> None:
    """Add the lane number times `scale` to `place`, also times the stride variable `step` if given."""
    value = "" if step is None else values.value(step)
    if value.startswith("%"):
        place.lane_strides[value] = place.lane_strides.get(value, 0) + scale
    else:
        place.lane += scale * int(value or 1)


def accumulate_value(values: ValueContext, place: FlatAddress, e: Expr, scale: int, step: Var | None = None) -> None:
    """Add the value of `e`, a scalar or a vector, times `scale` to `place`, also times `step` if given."""
    if step is not None:
        e = Binary("mul", e, Broadcast(step, e.type.lanes) if e.type.lanes > 1 else step)
    value = values.value(e)
    if e.type.lanes > 1:
        place.vectors[value] = place.vectors.get(value, 0) + scale
        place.sources[value] = e
    else:
        place.add(value, scale)


def emit_linear_sum(b: HoistingBuilder, terms: Mapping[str, int], type: str, lanes: int) -> str:
    """The sum of `coefficient * value` over `terms`, scalars or vectors of int64; "" if there are none."""
    total = ""
    for value, coefficient in terms.items():
        term = value
        if coefficient != 1:
            term = b.define(f"mul {type} {value}, {splat_constant(str(coefficient), 'i64', lanes)}", (value,))
        total = b.define(f"add {type} {total}, {term}", (total, term)) if total else term
    return total


def memory_element(buffer: Buffer) -> str:
    """The type of one element of a buffer in memory."""
    return memory_type(buffer.type.dtype) if buffer.type.lanes == 1 else register_type(buffer.type)


def emit_pointer(values: ValueContext, buffer: Buffer, place: FlatAddress, extra: int = 0) -> str:
    """The address of the first lane plus `extra` elements. Terms of outer loops are added first, to be hoisted."""
    b, element = values.b, memory_element(buffer)
    address = values.base(buffer)
    levels: dict[int, dict[str, int]] = {}
    for value, scale in place.terms.items():
        if scale:
            levels.setdefault(b.level(value), {})[value] = scale
    for level in sorted(levels):
        terms = levels[level]
        offset = emit_linear_sum(b, terms, "i64", 1)
        address = b.define(f"getelementptr {element}, ptr {address}, i64 {offset}", (address, offset))
        if not all(map(b.counts, terms)):
            # `freeze` stops LLVM's strength reduction, which would keep one pointer per constant that is added later.
            address = b.define(f"freeze ptr {address}", (address,))
    if place.constant + extra:
        address = b.define(f"getelementptr {element}, ptr {address}, i64 {place.constant + extra}", (address,))
    return address
