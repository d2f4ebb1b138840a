"""Loads and stores of whole vectors in one access, for dialects with vector types."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.dtypes import INT64
from ...loop_ir import linear_forms
from ...loop_ir import nodes as ir
from ...loop_ir.rewrite import walk_expr
from ...loop_ir.swizzled_buffer import contiguous_elements
from .dialect import VectorType
from .expressions import PrintScope, Text, print_element, print_read

ALIGNMENT = 16
"""Bytes to which the memory of every buffer is aligned by default."""


def whole_vector_type(buffer: ir.Buffer, indices: tuple[ir.Expr, ...], scope: PrintScope) -> VectorType | None:
    """The type with which one access reaches all lanes of `buffer[indices]`; None unless contiguous and aligned."""
    if not indices or not isinstance(last := indices[-1], ir.Ramp) or buffer.type.lanes > 1:
        return None
    type = scope.dialect.vectors.get((buffer.type.dtype.name, last.lanes))
    together = last.stride == 1 and buffer.strides[-1] == 1 and all(i.type.lanes == 1 for i in indices[:-1])
    if type is None or not together or buffer.space in (ir.Space.REGISTER, ir.Space.SCRATCH):
        return None
    if buffer.space is ir.Space.GLOBAL and not scope.aligned:
        return None
    if (kept := contiguous_elements(buffer)) is not None and kept < last.lanes:
        return None
    firsts = zip((*indices[:-1], last.base), buffer.strides, strict=True)
    return (
        type
        if all(_is_multiple(i, last.lanes // _common_power_of_two(s, last.lanes), scope) for i, s in firsts)
        else None
    )


def vector_lvalue(
    buffer: ir.Buffer, indices: tuple[ir.Expr, ...], type: VectorType, scope: PrintScope, *, written: bool
) -> str:
    """The expression of type `type` for all lanes of `buffer[indices]`: an lvalue if `written`, else its value."""
    last = indices[-1]
    assert isinstance(last, ir.Ramp)
    if buffer.space is ir.Space.GLOBAL:
        scope.relying.add(buffer.name)
    first = print_element(buffer, (*indices[:-1], last.base), scope)
    space = scope.dialect.spaces.get(buffer.space.value, "")
    constant = "" if written else "const "
    found = scope.dialect.vector_place.format(f"{space}{constant}{type.name}", f"&{first.text}")
    return found if written else print_read(buffer, Text(found), scope, type.name).text


def lane_members(name: str, type: VectorType) -> tuple[str, ...]:
    """The text of each lane of the vector variable `name`."""
    return tuple(lane.format(name) for lane in type.lanes)


def whole_loads(parts: Iterable[ir.Expr], scope: PrintScope) -> dict[ir.Load, VectorType]:
    """The loads in `parts` that a single access can make, in order, with their vector types."""
    found: dict[ir.Load, VectorType] = {}
    for part in parts:
        for e in walk_expr(part):
            if isinstance(e, ir.Load) and e.mask is None and e not in scope.wholes:
                type = whole_vector_type(e.buffer, e.indices, scope)
                if type is not None:
                    found[e] = type
    return found


def _common_power_of_two(stride: int, lanes: int) -> int:
    """The largest power of two that divides `stride` and `lanes`, which is a power of two itself."""
    while stride % lanes:
        lanes //= 2
    return lanes


def _is_multiple(e: ir.Expr, n: int, scope: PrintScope) -> bool:
    """Whether the int64 expression `e` is certainly a multiple of the power of two `n`."""
    if n == 1:
        return True
    if e.type.dtype != INT64:
        return False
    terms, constant = linear_forms.linear_terms(e)
    return constant % n == 0 and all(
        _is_multiple_atom(a, n // _common_power_of_two(c, n), scope) for a, c in terms.items()
    )


def _is_multiple_atom(e: ir.Expr, n: int, scope: PrintScope) -> bool:
    if n == 1:
        return True
    match e:
        case ir.Var(name):
            return scope.multiples.get(name, 1) % n == 0
        case ir.Binary("min" | "max", a, b):
            return _is_multiple(a, n, scope) and _is_multiple(b, n, scope)
        case ir.Binary("mod", a, ir.Const(int(d))):
            return d % n == 0 and _is_multiple(a, n, scope)
        case ir.Binary("mul", a, b):
            return _is_multiple(a, n, scope) or _is_multiple(b, n, scope)
    return False


def known_multiple(e: ir.Expr, scope: PrintScope) -> int:
    """A power of two, up to 8, of which `e` is certainly a multiple."""
    return next(n for n in (8, 4, 2, 1) if _is_multiple(e, n, scope))
