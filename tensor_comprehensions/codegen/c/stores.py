"""Stores of the loop program as text of the C family, and values that combine lanes (reductions and shuffles).

Explicit vectors print as short loops over their lanes, unless the dialect has a type for vectors in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...core.dtypes import BOOL, INT64, UINT64, DType
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.rewrite import children, stmt_expressions
from .dialect import CDialect
from .expressions import UNARY, PrintScope, Text, print_binary, print_element, print_expr
from .text_lines import indent_lines
from .vector_access import lane_members, vector_lvalue, whole_loads, whole_vector_type


def print_store(s: ir.Store, scope: PrintScope) -> Iterator[str]:
    """The lines of a store. A vector store must satisfy `can_store_lane_by_lane`."""
    parts = stmt_expressions(s)
    lanes = max(s.buffer.type.lanes, *(e.type.lanes for e in parts))
    lines, scope = print_cross_lane_values(parts, scope)
    yield from lines
    if lanes == 1:
        yield from _assignment(s, scope)
        return
    if scope.dialect.vectors and (text := _store_whole_vectors(s, lanes, scope)) is not None:
        yield from text
        return
    lane, laned = _with_lane(scope)
    injective = _is_injective(s)
    yield from print_lanes(lane, lanes, _assignment(s, laned), scope if injective else scope.with_values(simd=True))


def _assignment(s: ir.Store, scope: PrintScope) -> Iterator[str]:
    inner = scope if s.mask is None else scope.with_guard(s.mask)
    target, value = print_element(s.buffer, s.indices, inner), print_expr(s.value, inner)
    if s.atomic and s.op is not None:
        line = _atomic(target, s.op, value, s.buffer.type.dtype, scope.dialect)
    else:
        line = print_update(target, s.op, value, s.buffer.type.dtype, scope.dialect)
    yield line if s.mask is None else f"if ({print_expr(s.mask, scope).text}) {line}"


def _store_whole_vectors(s: ir.Store, lanes: int, scope: PrintScope) -> list[str] | None:
    """The lines of a vector store that loads or stores at least one whole vector at once, or None."""
    if s.mask is not None:
        return None
    target = whole_vector_type(s.buffer, s.indices, scope) if s.op is None else None
    loads = whole_loads((*s.indices, s.value), scope)
    if target is not None and isinstance(s.value, ir.Load) and loads.get(s.value) == target:
        source = vector_lvalue(s.value.buffer, s.value.indices, target, scope, written=False)
        return [f"{vector_lvalue(s.buffer, s.indices, target, scope, written=True)} = {source};"]
    if target is None and not loads:
        return None
    lines = []
    for load, type in loads.items():
        name, scope = scope.bind("%" + load.buffer.name)
        lines.append(
            f"const {type.name} {name} = {vector_lvalue(load.buffer, load.indices, type, scope, written=False)};"
        )
        scope = scope.with_values(wholes={**scope.wholes, load: lane_members(name, type)})
    each = [scope.with_values(lane=str(lane)) for lane in range(lanes)]
    if target is not None:
        parts = ", ".join(print_expr(s.value, laned).text for laned in each)
        lines.append(
            f"{vector_lvalue(s.buffer, s.indices, target, scope, written=True)} = {target.make.format(parts)};"
        )
    else:
        lines += [line for laned in each for line in _assignment(s, laned)]
    return ["{", *indent_lines(lines), "}"] if loads else lines


def print_update(place: Text, op: str | None, value: Text, dtype: DType, dialect: CDialect) -> str:
    """The statement `place = value`, or `place op= value`."""
    if op in ("+", "*") and not dialect.is_storage_only(dtype) and dtype != BOOL:
        return f"{place.text} {op}= {value.text};"
    if op in ("min", "max") and dialect.small and dtype == INT64:  # the value may have the small type
        value = Text(f"({dialect.type(dtype)}){value.as_operand(UNARY)}", UNARY)
    if op is not None:
        value = print_binary(build.combiner(op, dtype), place, value, dtype, dialect)
    return f"{place.text} = {value.text};"


def _atomic(place: Text, op: str, value: Text, dtype: DType, dialect: CDialect) -> str:
    spelling = dialect.atomics.get((op, dtype.name))
    if spelling is None:
        raise CannotLower(f"{dialect.name} has no atomic '{op}=' on {dtype}")
    return spelling.format(f"&{place.text}", value.text)


def can_store_lane_by_lane(s: ir.Store) -> bool:
    """Whether writing one lane does not change the values that later lanes read."""
    loads = _find_loads(stmt_expressions(s), s.buffer.name)
    return not loads or (_is_injective(s) and all(x.indices == s.indices for x in loads))


def _find_loads(parts: Iterable[ir.Expr], buffer: str) -> list[ir.Load]:
    """The loads from `buffer` in `parts`. It avoids generators, because it runs for each store."""
    found = []
    stack = list(parts)
    while stack:
        e = stack.pop()
        if type(e) is ir.Load and e.buffer.name == buffer:
            found.append(e)
        stack += children(e)
    return found


def _is_injective(s: ir.Store) -> bool:
    """Whether the lanes certainly write different elements."""
    if s.buffer.type.lanes > 1:
        return True
    vectors = [i for i in s.indices if i.type.lanes > 1]
    return len(vectors) == 1 and isinstance(vectors[0], ir.Ramp) and vectors[0].stride != 0


def stage_store(s: ir.Store) -> ir.Stmt:
    """`s` with value, mask and indices bound to names first, so that all lanes are computed before one is written."""
    names = [internal_name(f"index{n}") for n in range(len(s.indices))]
    indices = tuple(ir.Var(n, i.type) for n, i in zip(names, s.indices, strict=True))
    mask = None if s.mask is None else ir.Var(internal_name("mask"), s.mask.type)
    staged: ir.Stmt = replace(s, indices=indices, value=ir.Var(internal_name("value"), s.value.type), mask=mask)
    bindings = [*zip(names, s.indices, strict=True), (internal_name("value"), s.value)]
    if s.mask is not None:
        bindings.append((internal_name("mask"), s.mask))
    outer = [(internal_name(name, "staged"), value) for name, value in bindings]
    for name, value in bindings:  # two levels of names, so that no value sees a name bound here
        staged = ir.Let(name, ir.Var(internal_name(name, "staged"), value.type), staged)
    for name, value in outer:
        staged = ir.Let(name, value, staged)
    return staged


def _with_lane(scope: PrintScope) -> tuple[str, PrintScope]:
    lane, inner = scope.bind("l")
    return lane, inner.with_values(lane=lane)


def print_lanes(lane: str, count: int, body: Iterable[str], scope: PrintScope, clauses: str = "") -> Iterator[str]:
    """A loop over the lanes, with a simd or unroll pragma unless an enclosing loop has the simd pragma."""
    if scope.dialect.unroll:
        yield scope.dialect.unroll
    elif not scope.simd:
        yield scope.dialect.simd.format(clauses)
    yield f"for (int {lane} = 0; {lane} < {count}; ++{lane})"
    yield from indent_lines(body)


def print_cross_lane_values(
    parts: tuple[ir.Expr, ...], scope: PrintScope, *, by_lane: bool = False
) -> tuple[list[str], PrintScope]:
    """Lines that compute the lane reductions and shuffles in `parts`, and the scope in which they print as names."""
    lines: list[str] = []
    for e in find_lifted(parts, by_lane):
        identifier, named = scope.bind_sum(e)
        if isinstance(e, ir.ReduceLanes):
            lines += _reduction(e, identifier, scope)
        else:
            lines.append(print_shuffle(e, identifier, scope))
        scope = named
    return lines, scope


def find_lifted(parts: Iterable[ir.Expr], by_lane: bool) -> list[ir.ReduceLanes | ir.Shuffle]:
    """Subexpressions that need their own statements, inner ones first.

    A shuffle inside a shuffle, or with `by_lane`, is not listed: it prints lane by lane.
    """
    parts = list(parts)
    if not _cross_lanes(parts):
        return []
    found: dict[ir.ReduceLanes | ir.Shuffle, None] = {}

    def visit(e: ir.Expr, by_lane: bool) -> None:
        inner = children(e)
        if not inner:
            return
        shuffles = isinstance(e, ir.Shuffle)
        for child in inner:
            visit(child, shuffles or (by_lane and not isinstance(e, ir.ReduceLanes)))
        if isinstance(e, ir.ReduceLanes) or (isinstance(e, ir.Shuffle) and not by_lane):
            found[e] = None

    for part in parts:
        visit(part, by_lane)
    return list(found)


def _cross_lanes(parts: list[ir.Expr]) -> bool:
    """Whether `parts` contain a lane reduction or a shuffle: a fast test, because most contain none."""
    stack = list(parts)
    while stack:
        e = stack.pop()
        if type(e) is ir.ReduceLanes or type(e) is ir.Shuffle:
            return True
        stack += children(e)
    return False


def print_shuffle(e: ir.Shuffle, identifier: str, scope: PrintScope) -> str:
    """The declaration of an array with the lanes of a shuffled vector."""
    values = ", ".join(print_expr(e, scope.with_values(lane=str(lane))).text for lane in range(len(e.lanes)))
    return f"const {scope.dialect.type(e.type.dtype)} {identifier}[{len(e.lanes)}] = {{{values}}};"


def _reduction(e: ir.ReduceLanes, identifier: str, scope: PrintScope) -> Iterator[str]:
    dtype, dialect = e.type.dtype, scope.dialect
    lane, laned = _with_lane(scope)
    if e.op == ir.BITS:
        wide = dialect.type(INT64)
        bit = f"({wide})(({dialect.type(UINT64)})({print_expr(e.operand, laned).text}) << {lane})"
        yield f"{wide} {identifier} = 0;"
        yield f"for (int {lane} = 0; {lane} < {e.operand.type.lanes}; ++{lane})"
        yield f"    {identifier} |= {bit};"
        return
    first = print_expr(e.operand, scope.with_values(lane="0"))
    yield f"{dialect.type(dtype)} {identifier} = {first.text};"
    yield f"for (int {lane} = 1; {lane} < {e.operand.type.lanes}; ++{lane})"
    yield f"    {print_update(Text(identifier), e.op, print_expr(e.operand, laned), dtype, dialect)}"
