"""Statements of the loop program as text of the C family.

Explicit vectors print as short loops over their lanes, unless the dialect has a type for vectors in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ...core.dtypes import BOOL, INT64, UINT64, DType
from ...core.errors import CannotLower, InternalError
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.intervals import Interval
from ...loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO, ELECT, INTRINSICS, Intrinsic, is_hint
from ...loop_ir.matrix_descriptor import matrix_placement
from ...loop_ir.passes.hoist_packing import hoist_packing
from ...loop_ir.rewrite import children, mentions, stmt_expressions, walk_expr, walk_stmts
from .dialect import CDialect
from .expressions import (
    OR,
    RELATION,
    SUM,
    UNARY,
    PrintScope,
    Text,
    array_shape,
    is_scalar,
    print_binary,
    print_element,
    print_expr,
)
from .int32_narrowing import int32_loop_interval
from .vector_access import known_multiple, lane_members, vector_lvalue, whole_loads, whole_vector_type

OUT_OF_MEMORY = -1


def print_statement(s: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    """The lines of `s`."""
    lines = _print(s, scope)
    return lines if scope.marks is None else mark_lines(lines, scope.marks.statements.get(id(s), 0))


def _print(s: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    match s:
        case ir.Block(body):
            return _block(body, scope)
        case ir.Store():
            return _store(s, scope)
        case ir.Loop():
            return _loop(s, scope)
        case ir.While():
            return _while(s, scope)
        case ir.If():
            return _if(s, scope)
        case ir.Let():
            return _let(s, scope)
        case ir.Allocate():
            return _allocate(s, scope)
        case ir.Window():
            return _window(s, scope)
        case ir.Check():
            return _check(s, scope)
        case ir.Invoke():
            return _invoke(s, scope)
    raise InternalError(f"not a statement: {s!r}")


_MARK = "\x01"
"""Between a line and the number of its line of the loops. No text of a program has it."""


def mark_lines(lines: Iterator[str], number: int) -> Iterator[str]:
    """`lines` with the mark `number`, but those that have a mark already; as they are if the number is 0."""
    return (line if _MARK in line else f"{line}{_MARK}{number}" for line in lines) if number else lines


def split_marks(text: str) -> Iterator[tuple[str, int]]:
    """The lines of a text that was printed with marks, as without them, each with the line of the loops that it is
    part of, from 1 on; 0 if it is part of none."""
    for line in text.split("\n"):
        plain, _, number = line.partition(_MARK)
        yield plain, int(number or 0)


def _block(body: tuple[ir.Stmt, ...], scope: PrintScope) -> Iterator[str]:
    for position, child in enumerate(body):
        yield from print_braced(child, scope) if position + 1 < len(body) else print_statement(child, scope)


def print_braced(s: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    """The lines of `s`, in braces if they declare a name that later statements might declare again."""
    if not _declares_c_name(s):
        yield from print_statement(s, scope)
        return
    yield "{"
    yield from indent_lines(print_statement(s, scope))
    yield "}"


def _declares_c_name(s: ir.Stmt) -> bool:
    match s:
        case ir.Let() | ir.Allocate() | ir.Window():
            return True
        case ir.Block(body):
            return bool(body) and _declares_c_name(body[-1])
        case ir.Store() if not _can_store_lane_by_lane(s):
            return True
    return bool(_find_lifted(stmt_expressions(s), False))


def _if(s: ir.If, scope: PrintScope) -> Iterator[str]:
    lines, inner = _print_cross_lane_values((s.condition,), scope)
    yield from lines
    yield f"if ({print_expr(s.condition, inner).text}) {{"
    yield from indent_lines(print_statement(s.then, scope))
    if s.otherwise is not None:
        yield "} else {"
        yield from indent_lines(print_statement(s.otherwise, scope))
    yield "}"


def _while(s: ir.While, scope: PrintScope) -> Iterator[str]:
    lines, inner = _print_cross_lane_values((s.condition,), scope)
    condition = print_expr(s.condition, inner)
    yield f"while ({condition.text}) {{" if not lines else "for (;;) {"
    if lines:
        yield from indent_lines([*lines, f"if (!({condition.text})) break;"])
    yield from indent_lines(print_statement(s.body, scope))
    yield "}"


def _let(s: ir.Let, scope: PrintScope) -> Iterator[str]:
    lines, around = _print_cross_lane_values((s.value,), scope, by_lane=isinstance(s.value, ir.Shuffle))
    identifier, inner = around.bind_integer(s.name, range := _narrow_interval(s.value, scope))
    inner = inner.with_values(multiples=_with_known_multiple(s.name, known_multiple(s.value, scope), scope))
    body = list(print_statement(s.body, inner.with_values(sums=scope.sums)))
    used = re.compile(rf"\b{identifier}\b")
    if any(used.search(line) for line in body):  # compilers warn of unused names
        spelling, lanes = scope.dialect.type(s.value.type.dtype), s.value.type.lanes
        if s.value.type == ir.Type(INT64):
            spelling = scope.integer(range)
        yield from lines
        if lanes == 1:
            yield f"const {spelling} {identifier} = {print_expr(s.value, around).text};"
        elif isinstance(s.value, ir.Shuffle):
            yield _print_shuffle(s.value, identifier, around)
        else:
            lane, _ = inner.bind("l")
            value = print_expr(s.value, around.with_values(lane=lane)).text
            yield f"{spelling} {identifier}[{lanes}];"
            yield from _lanes(lane, lanes, [f"{identifier}[{lane}] = {value};"], scope)
    yield from body


def _narrow_interval(e: ir.Expr, scope: PrintScope) -> Interval | None:
    return scope.fits(e) if e.type == ir.Type(INT64) else None


def _with_known_multiple(name: str, n: int, scope: PrintScope) -> dict[str, int]:
    """The known multiples if `name` is a multiple of `n`."""
    return {**scope.multiples, name: n}


def _invoke(s: ir.Invoke, scope: PrintScope) -> Iterator[str]:
    spelling = scope.dialect.intrinsics.get(s.name)
    if spelling is None:
        raise CannotLower(f"{scope.dialect.name} has no spelling of the intrinsic {s.name}")
    if is_hint(s) and (scope.simd or not spelling):  # once for every element would be too often
        return
    lines, inner = _print_cross_lane_values(stmt_expressions(s), scope)
    yield from lines
    known = INTRINSICS[s.name]
    views = [_print_intrinsic_operand(s, known, number, inner) for number in range(len(s.operands))]
    if s.name in (COPY_ASYNC, COPY_ASYNC_ZERO) and s.attributes[0] > s.operands[1][0].type.dtype.size:
        scope.relying.add(s.operands[1][0].name)
    yield spelling.format(*views, *s.attributes, *(print_expr(v, inner).as_operand(OR) for v in s.values))


def _print_intrinsic_operand(s: ir.Invoke, known: Intrinsic, number: int, scope: PrintScope) -> str:
    """The argument of an intrinsic for one operand."""
    b, where = s.operands[number]
    if number == known.mapped:  # a tensor map has the fastest dimension first
        scope.relying.add(b.name)  # boxes begin at multiples of 16 bytes
        coordinates = (print_expr(i, scope).text for i in where[::-1])
        return ", ".join([f"&{scope.names[f'%map {s.attributes[0]}']}", *coordinates])
    place = print_element(b, where, scope).text
    if number in known.described:
        found = matrix_placement(b, across=number in known.across)
        if isinstance(found, str):
            raise InternalError(f"{s.name} does not find {b.name}: {found}")
        return f"matrix_descriptor<{found.leading}, {found.stride}, {found.mode}>(&{place})"
    return place if known.registers and not known.atom and s.name != ELECT else f"&{place}"


def _check(s: ir.Check, scope: PrintScope) -> Iterator[str]:
    lines, inner = _print_cross_lane_values((s.condition, s.value) if scope.dialect.check else (s.condition,), scope)
    yield from lines
    if scope.dialect.check:
        failed = scope.dialect.check.format(scope.names["%status"], s.site + 1, print_expr(s.value, inner).text)
        yield f"if (!({print_expr(s.condition, inner).text})) {failed}"
        return
    if not scope.parallel:
        yield f"if (status == 0 && !({print_expr(s.condition, inner).text})) status = {s.site + 1};"
        return
    yield f"if (!({print_expr(s.condition, inner).text})) {{"
    yield f"    {scope.dialect.critical}"
    yield f"    status = {s.site + 1};"
    yield "}"


# --- stores and vectors ------------------------------------------------------------------------------------------


def _store(s: ir.Store, scope: PrintScope) -> Iterator[str]:
    parts = stmt_expressions(s)
    lanes = max(s.buffer.type.lanes, *(e.type.lanes for e in parts))
    if lanes > 1 and not _can_store_lane_by_lane(s):
        yield from print_statement(_stage_store(s), scope)
        return
    lines, scope = _print_cross_lane_values(parts, scope)
    yield from lines
    if lanes == 1:
        yield from _assignment(s, scope)
        return
    if scope.dialect.vectors and (text := _store_whole_vectors(s, lanes, scope)) is not None:
        yield from text
        return
    lane, laned = _with_lane(scope)
    injective = _is_injective(s)
    yield from _lanes(lane, lanes, _assignment(s, laned), scope if injective else scope.with_values(simd=True))


def _assignment(s: ir.Store, scope: PrintScope) -> Iterator[str]:
    inner = scope if s.mask is None else scope.with_guard(s.mask)
    target, value = print_element(s.buffer, s.indices, inner), print_expr(s.value, inner)
    if s.atomic and s.op is not None:
        line = _atomic(target, s.op, value, s.buffer.type.dtype, scope.dialect)
    else:
        line = _update(target, s.op, value, s.buffer.type.dtype, scope.dialect)
    yield line if s.mask is None else f"if ({print_expr(s.mask, scope).text}) {line}"


def _store_whole_vectors(s: ir.Store, lanes: int, scope: PrintScope) -> list[str] | None:
    """The store of a vector with one access to memory for all lanes, where that is possible anywhere in it."""
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


def _update(place: Text, op: str | None, value: Text, dtype: DType, dialect: CDialect) -> str:
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


def _can_store_lane_by_lane(s: ir.Store) -> bool:
    """Whether writing one lane does not change the values that later lanes read."""
    loads = [
        x
        for e in stmt_expressions(s)
        for x in walk_expr(e)
        if isinstance(x, ir.Load) and x.buffer.name == s.buffer.name
    ]
    return not loads or (_is_injective(s) and all(x.indices == s.indices for x in loads))


def _is_injective(s: ir.Store) -> bool:
    """Whether the lanes certainly write different elements."""
    if s.buffer.type.lanes > 1:
        return True
    vectors = [i for i in s.indices if i.type.lanes > 1]
    return len(vectors) == 1 and isinstance(vectors[0], ir.Ramp) and vectors[0].stride != 0


def _stage_store(s: ir.Store) -> ir.Stmt:
    """The same store of a value (and through a mask and indices) computed in all lanes before the first is written."""
    names = [internal_name(f"index{n}") for n in range(len(s.indices))]
    indices = tuple(ir.Var(n, i.type) for n, i in zip(names, s.indices, strict=True))
    mask = None if s.mask is None else ir.Var(internal_name("mask"), s.mask.type)
    staged: ir.Stmt = replace(s, indices=indices, value=ir.Var(internal_name("value"), s.value.type), mask=mask)
    bindings = [*zip(names, s.indices, strict=True), (internal_name("value"), s.value)]
    if s.mask is not None:
        bindings.append((internal_name("mask"), s.mask))
    outer = [(internal_name(name, "staged"), value) for name, value in bindings]
    for name, value in bindings:  # from the outer names, so that no value sees a name bound here
        staged = ir.Let(name, ir.Var(internal_name(name, "staged"), value.type), staged)
    for name, value in outer:
        staged = ir.Let(name, value, staged)
    return staged


def _with_lane(scope: PrintScope) -> tuple[str, PrintScope]:
    lane, inner = scope.bind("l")
    return lane, inner.with_values(lane=lane)


def _lanes(lane: str, count: int, body: Iterable[str], scope: PrintScope, clauses: str = "") -> Iterator[str]:
    """A loop over the lanes; with the pragma only outside of loops that carry one already."""
    if scope.dialect.unroll:
        yield scope.dialect.unroll
    elif not scope.simd:
        yield scope.dialect.simd.format(clauses)
    yield f"for (int {lane} = 0; {lane} < {count}; ++{lane})"
    yield from indent_lines(body)


def _print_cross_lane_values(
    parts: tuple[ir.Expr, ...], scope: PrintScope, *, by_lane: bool = False
) -> tuple[list[str], PrintScope]:
    """Statements that compute the reductions over lanes and shuffles in `parts`, and the scope that has their names."""
    lines: list[str] = []
    for e in _find_lifted(parts, by_lane):
        identifier, named = scope.bind_sum(e)
        if isinstance(e, ir.ReduceLanes):
            lines += _reduction(e, identifier, scope)
        else:
            lines.append(_print_shuffle(e, identifier, scope))
        scope = named
    return lines, scope


def _find_lifted(parts: Iterable[ir.Expr], by_lane: bool) -> list[ir.ReduceLanes | ir.Shuffle]:
    """Subexpressions that need their own statements, inner ones first. A shuffle in a shuffle prints lane by lane."""
    found: dict[ir.ReduceLanes | ir.Shuffle, None] = {}

    def visit(e: ir.Expr, by_lane: bool) -> None:
        shuffles = isinstance(e, ir.Shuffle)
        for child in children(e):
            visit(child, shuffles or (by_lane and not isinstance(e, ir.ReduceLanes)))
        if isinstance(e, ir.ReduceLanes) or (isinstance(e, ir.Shuffle) and not by_lane):
            found[e] = None

    for part in parts:
        visit(part, by_lane)
    return list(found)


def _print_shuffle(e: ir.Shuffle, identifier: str, scope: PrintScope) -> str:
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
    yield f"    {_update(Text(identifier), e.op, print_expr(e.operand, laned), dtype, dialect)}"


# --- loops -------------------------------------------------------------------------------------------------------


def _loop(s: ir.Loop, scope: PrintScope) -> Iterator[str]:
    filled, rest = hoist_packing(s) if s.kind is ir.LoopKind.PARALLEL else ((), s)
    if filled:  # before the loop: the thread that reaches it fills the memory, and all threads read it
        whole: ir.Stmt = rest
        for buffer, fill in reversed(filled):
            whole = ir.Allocate((buffer,), ir.Block((fill, whole)))
        yield from print_statement(whole, scope)
        return
    lines, outer = _print_cross_lane_values((s.start, s.stop), scope)
    yield from lines
    range = int32_loop_interval(s, scope.small)
    variable, inner = outer.bind_integer(s.var, range)
    inner = inner.with_values(
        multiples=_with_known_multiple(s.var, min(_power_of_two_divisor(s.step), known_multiple(s.start, scope)), scope)
    )
    start, stop = print_expr(s.start, outer), print_expr(s.stop, outer)
    step = f"++{variable}" if s.step == 1 else f"{variable} += {s.step}"
    pragma: str | None = None
    if scope.dialect.unroll:
        pragma = scope.dialect.unroll if s.kind is ir.LoopKind.UNROLLED else None
    elif s.kind is ir.LoopKind.PARALLEL and not (scope.parallel or scope.simd or _is_single_chunk(s)):
        inner = inner.with_values(parallel=True)
        pragma = scope.dialect.parallel.format(_openmp_if_clause(s, outer))
    elif s.kind is ir.LoopKind.VECTOR and not scope.simd:
        if (reduction := _match_scalar_reduction(s)) is not None:
            yield from _reducing_loop(s, reduction, outer)
            return
        if _is_simd(s):
            inner = inner.with_values(simd=True)
            pragma = scope.dialect.simd.format("")
    if pragma is not None:
        yield pragma
    if scope.dialect.assume and _multiplies_in_some_iteration(s, scope):
        yield scope.dialect.assume.format(f"{stop.as_operand(RELATION)} > {start.as_operand(RELATION)}")
    yield f"for ({scope.integer(range)} {variable} = {start.text}; {variable} < {stop.text}; {step}) {{"
    yield from indent_lines(print_statement(s.body, inner))
    yield "}"


def _multiplies_in_some_iteration(s: ir.Loop, scope: PrintScope) -> bool:
    """Whether warpgroups certainly multiply in a loop whose end only the run knows."""
    if isinstance(s.stop, ir.Const):
        return False
    trips = scope.fits(build.sub(s.stop, s.start))
    if trips is None or trips.low is None or trips.low < 1:
        return False
    rows = (INTRINSICS.get(c.name) for c in walk_stmts(s.body) if isinstance(c, ir.Invoke))
    return any(row is not None and row.described for row in rows)


def _power_of_two_divisor(n: int) -> int:
    """The largest power of two, up to 8, that divides `n`."""
    return next(p for p in (8, 4, 2, 1) if n % p == 0)


def _is_single_chunk(s: ir.Loop) -> bool:
    """Whether the loop is known to be too short to be shared."""
    match s.start, s.stop:
        case ir.Const(start), ir.Const(stop):
            return stop - start <= s.grain * s.step
    return False


def _openmp_if_clause(s: ir.Loop, scope: PrintScope) -> str:
    """The clause that keeps a loop of unknown length on the thread it is on when it is one chunk."""
    if s.grain <= 1 or (isinstance(s.start, ir.Const) and isinstance(s.stop, ir.Const)):
        return ""
    trip = ir.Binary("sub", s.stop, s.start) if s.start != ir.Const(0, ir.Type(INT64)) else s.stop
    return f" if ({print_expr(trip, scope).as_operand(SUM)} > {s.grain * s.step})"


def _match_scalar_reduction(s: ir.Loop) -> ir.Store | None:
    """The only statement of a vector loop, where it reduces the whole loop into one element."""
    store = s.body
    if not isinstance(store, ir.Store) or store.op is None:
        return None
    reads = [x for e in (*store.indices, store.value) for x in walk_expr(e)]
    if store.mask is not None or store.value.type.lanes > 1 or _find_lifted((*store.indices, store.value), False):
        return None
    if any(isinstance(x, ir.Load) and x.buffer.name == store.buffer.name for x in reads):
        return None
    if any(ir.Var(s.var) in walk_expr(i) for i in store.indices) or store.buffer.type.dtype.bits < 32:
        return None
    return store


def _reducing_loop(s: ir.Loop, store: ir.Store, scope: PrintScope) -> Iterator[str]:
    """The loop with its element in a local variable, so that lanes may hold partial results of it."""
    dtype, dialect = store.buffer.type.dtype, scope.dialect
    total, named = scope.bind("%total")
    variable, inner = named.bind(s.var)
    place = print_element(store.buffer, store.indices, named)
    step = f"++{variable}" if s.step == 1 else f"{variable} += {s.step}"
    yield "{"
    yield f"    {dialect.type(dtype)} {total} = {place.text};"
    yield f"    {dialect.simd.format(f' reduction({store.op}:{total})')}"
    start, stop = print_expr(s.start, scope), print_expr(s.stop, scope)
    yield f"    for (int64_t {variable} = {start.text}; {variable} < {stop.text}; {step})"
    adds = f"        {_update(Text(total), store.op, print_expr(store.value, inner), dtype, dialect)}"
    yield from (adds,) if scope.marks is None else mark_lines(iter((adds,)), scope.marks.statements.get(id(store), 0))
    yield f"    {place.text} = {total};"
    yield "}"


def _is_simd(s: ir.Loop) -> bool:
    """Whether the simd pragma is legal: not for a reduction, nor around constructs that it must not enclose."""
    tainted = {s.var}
    own: set[str] = set()
    for x in walk_stmts(s.body):
        match x:
            case ir.Check():
                return False
            case ir.Invoke() if not is_hint(x):
                return False
            case ir.Loop(kind=ir.LoopKind.PARALLEL):
                return False
            case ir.Allocate(buffers):
                own.update(b.name for b in buffers)
            case ir.Let(name, value) if mentions(value, tainted):
                tainted.add(name)
            case ir.Store(buffer, indices) if buffer.name not in own:
                if not any(mentions(i, tainted) for i in indices):
                    return False
    return True


# --- memory ------------------------------------------------------------------------------------------------------


def on_stack(buffer: ir.Buffer, dialect: CDialect) -> bool:
    return buffer.space is ir.Space.REGISTER or (not buffer.dynamic and buffer.bytes <= dialect.stack)


def _allocate(s: ir.Allocate, scope: PrintScope) -> Iterator[str]:
    for position, buffer in enumerate(s.buffers, 1):
        identifier, scope = scope.bind(f"@{buffer.name}")
        spelling = scope.dialect.type(buffer.type.dtype)
        if is_scalar(buffer, scope.dialect):
            yield f"{spelling} {identifier};"
            continue
        if s.lengths:
            yield from _allocate_dynamic(s, identifier, scope)
            return
        first, *rest = _dimensions(buffer)
        shape = "".join(f"[{n}]" for n in rest)
        if buffer.space in (ir.Space.SHARED, ir.Space.BARRIER):
            yield _declare_shared(buffer, f"{identifier}[{first}]{shape}", f"(*{{}}){shape}" if rest else "*{}", scope)
        elif on_stack(buffer, scope.dialect):
            yield f"{spelling} {identifier}[{first}]{shape};"
        else:
            pointer = f"*{scope.dialect.restrict} {identifier}"
            yield f"{spelling} {f'({pointer})' if rest else pointer}{shape} = malloc({first} * sizeof *{identifier});"
            yield from _print_if_allocated(identifier, build.allocate(s.buffers[position:], s.body), scope)
            return
    yield from print_statement(s.body, scope)


def _window(s: ir.Window, scope: PrintScope) -> Iterator[str]:
    start = print_expr(build.mul(s.start, build.stride(s.source, s.dimension)), scope).text
    first = f"(void *)(&{scope.names[f'@{s.source.name}']}[{start}])"
    identifier, scope = scope.bind(f"@{s.buffer.name}")
    pointer, rest = f"*{scope.dialect.restrict} {identifier}", (array_shape(s.buffer) or ())[1:]
    declared = f"({pointer}){''.join(f'[{n}]' for n in rest)}" if rest else pointer
    yield f"{scope.dialect.type(s.buffer.type.dtype)} {declared} = {first};"
    yield from print_statement(s.body, scope)


def _allocate_dynamic(s: ir.Allocate, identifier: str, scope: PrintScope) -> Iterator[str]:
    if not scope.dialect.has_heap:
        raise CannotLower(f"{scope.dialect.name} allocates no memory whose size only the run decides")
    (buffer,) = s.buffers
    count = print_expr(build.add(build.elements(buffer, s.lengths), 1), scope).text  # never 0 bytes
    declared = f"{scope.dialect.type(buffer.type.dtype)} *{scope.dialect.restrict} {identifier}"
    yield f"{declared} = malloc(({count}) * sizeof *{identifier});"
    yield from _print_if_allocated(identifier, s.body, scope)


def _print_if_allocated(identifier: str, body: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    """`body` where there was memory for `identifier`."""
    yield f"if ({identifier} != NULL) {{"
    yield from indent_lines(print_statement(body, scope))
    yield f"    free({identifier});"
    yield "} else {"
    if scope.parallel:
        yield f"    {scope.dialect.critical}"
    yield f"    status = {OUT_OF_MEMORY};"
    yield "}"


def _declare_shared(buffer: ir.Buffer, array: str, pointer: str, scope: PrintScope) -> str:
    """The declaration of shared memory: an array, or a pointer into dynamic shared memory."""
    spelling = scope.dialect.type(buffer.type.dtype)
    if buffer.name not in scope.dynamic:
        return f"{scope.dialect.shared} {spelling} {array};"
    declared = f"{spelling} {pointer.format(scope.names[f'@{buffer.name}'])}"
    return scope.dialect.dynamic.format(declared, f"{spelling} {pointer.format('')}", scope.dynamic[buffer.name])


def _dimensions(buffer: ir.Buffer) -> tuple[int, ...]:
    vector = (buffer.type.lanes,) if buffer.type.lanes > 1 else ()
    if shape := array_shape(buffer):
        return (*shape, *vector)
    return (max(1, buffer.span), *vector)


def indent_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines one level deeper."""
    return (f"    {line}" if line else line for line in lines)
