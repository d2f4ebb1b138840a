"""Statements of the loop program as text of the C family."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...core.dtypes import INT64
from ...core.errors import CannotLower, InternalError
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.intervals import Interval
from ...loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO, ELECT, INTRINSICS, Intrinsic, is_hint
from ...loop_ir.matrix_descriptor import matrix_offset, matrix_placement, split_matrix_address
from ...loop_ir.passes.hoist_packing import hoist_packing
from ...loop_ir.rewrite import mentions, stmt_expressions, walk_expr, walk_stmts
from .dialect import CDialect
from .expressions import (
    OR,
    RELATION,
    SUM,
    PrintScope,
    Text,
    array_shape,
    is_scalar,
    print_element,
    print_expr,
)
from .int32_narrowing import int32_loop_interval
from .stores import (
    can_store_lane_by_lane,
    find_lifted,
    print_cross_lane_values,
    print_lanes,
    print_shuffle,
    print_store,
    print_update,
    stage_store,
)
from .text_lines import indent_lines, mark_part
from .vector_access import known_multiple

OUT_OF_MEMORY = -1
_WORD = re.compile(r"\w+")


def print_statement(s: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    """The lines of `s`."""
    return mark_part(s, _print(s, scope), scope)


def _print(s: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    match s:
        case ir.Block(body):
            return _print_block(body, scope)
        case ir.Store():
            return _print_store(s, scope)
        case ir.Loop():
            return _print_loop(s, scope)
        case ir.While():
            return _print_while(s, scope)
        case ir.If():
            return _print_if(s, scope)
        case ir.Let():
            return _print_let(s, scope)
        case ir.Allocate():
            return _print_allocate(s, scope)
        case ir.Window():
            return _print_window(s, scope)
        case ir.Check():
            return _print_check(s, scope)
        case ir.Invoke():
            return _print_invoke(s, scope)
    raise InternalError(f"not a statement: {s!r}")


def _print_block(body: tuple[ir.Stmt, ...], scope: PrintScope) -> Iterator[str]:
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
        case ir.Store() if not can_store_lane_by_lane(s):
            return True
    return bool(find_lifted(stmt_expressions(s), False))


def _print_if(s: ir.If, scope: PrintScope) -> Iterator[str]:
    lines, inner = print_cross_lane_values((s.condition,), scope)
    yield from lines
    yield f"if ({print_expr(s.condition, inner).text}) {{"
    yield from indent_lines(print_statement(s.then, scope))
    if s.otherwise is not None:
        yield "} else {"
        yield from indent_lines(print_statement(s.otherwise, scope))
    yield "}"


def _print_while(s: ir.While, scope: PrintScope) -> Iterator[str]:
    lines, inner = print_cross_lane_values((s.condition,), scope)
    condition = print_expr(s.condition, inner)
    yield f"while ({condition.text}) {{" if not lines else "for (;;) {"
    if lines:
        yield from indent_lines([*lines, f"if (!({condition.text})) break;"])
    yield from indent_lines(print_statement(s.body, scope))
    yield "}"


@dataclass(frozen=True, slots=True)
class _Binding:
    """A `Let` whose body is printed first, so that unused names, of which compilers warn, can be dropped.

    Attributes:
        lifted: the lines that compute the parts of its value that need their own statements.
        outer, inner: the scopes of its value and of its body.
        range: the interval of its value if it has the dialect's small type, else None.
    """

    let: ir.Let
    lifted: list[str]
    outer: PrintScope
    inner: PrintScope
    identifier: str
    range: Interval | None


def _print_let(s: ir.Let, scope: PrintScope) -> Iterator[str]:
    """The lines of a chain of directly nested `Let`s and of its body."""
    bindings: list[_Binding] = []
    inside: ir.Stmt = s
    while isinstance(inside, ir.Let):
        bindings.append(_bind(inside, scope))
        inside, scope = inside.body, bindings[-1].inner.with_values(sums=scope.sums)
    lines = deque(mark_part(bindings[-1].let, print_statement(inside, scope), scope))
    for b in reversed(bindings):
        if any(b.identifier in line and b.identifier in _WORD.findall(line) for line in lines):
            lines.extendleft(reversed([*mark_part(b.let, _define(b), scope)]))
    yield from lines


def _bind(s: ir.Let, scope: PrintScope) -> _Binding:
    lifted, outer = print_cross_lane_values((s.value,), scope, by_lane=isinstance(s.value, ir.Shuffle))
    identifier, inner = outer.bind_integer(s.name, range := _narrow_interval(s.value, scope))
    inner = inner.with_values(multiples=_with_known_multiple(s.name, known_multiple(s.value, scope), scope))
    return _Binding(s, lifted, outer, inner, identifier, range)


def _define(b: _Binding) -> Iterator[str]:
    """The definition of a bound name."""
    value, identifier, dialect = b.let.value, b.identifier, b.outer.dialect
    spelling = b.outer.integer(b.range) if value.type == ir.Type(INT64) else dialect.type(value.type.dtype)
    yield from b.lifted
    if value.type.lanes == 1:
        yield f"const {spelling} {identifier} = {print_expr(value, b.outer).text};"
    elif isinstance(value, ir.Shuffle):
        yield print_shuffle(value, identifier, b.outer)
    else:
        lane, _ = b.inner.bind("l")
        text = print_expr(value, b.outer.with_values(lane=lane)).text
        yield f"{spelling} {identifier}[{value.type.lanes}];"
        yield from print_lanes(lane, value.type.lanes, [f"{identifier}[{lane}] = {text};"], b.outer)


def _narrow_interval(e: ir.Expr, scope: PrintScope) -> Interval | None:
    return scope.fits(e) if e.type == ir.Type(INT64) else None


def _with_known_multiple(name: str, n: int, scope: PrintScope) -> Mapping[str, int]:
    """`scope.multiples` with the fact that `name` is a multiple of `n`."""
    return {**scope.multiples, name: n} if scope.multiples.get(name, 1) != n else scope.multiples


def _print_invoke(s: ir.Invoke, scope: PrintScope) -> Iterator[str]:
    spelling = scope.dialect.intrinsics.get(s.name)
    if spelling is None:
        raise CannotLower(f"{scope.dialect.name} has no spelling of the intrinsic {s.name}")
    if is_hint(s) and (scope.simd or not spelling):  # one hint per element would be too many
        return
    lines, inner = print_cross_lane_values(stmt_expressions(s), scope)
    yield from lines
    known = INTRINSICS[s.name]
    views = [_print_intrinsic_operand(s, known, number, inner) for number in range(len(s.operands))]
    if s.name in (COPY_ASYNC, COPY_ASYNC_ZERO) and s.attributes[0] > s.operands[1][0].type.dtype.size:
        scope.relying.add(s.operands[1][0].name)
    yield spelling.format(*views, *s.attributes, *(print_expr(v, inner).as_operand(OR) for v in s.values))


def _print_intrinsic_operand(s: ir.Invoke, known: Intrinsic, number: int, scope: PrintScope) -> str:
    """The argument of an intrinsic for one operand."""
    b, where = s.operands[number]
    if number == known.mapped:  # the driver's tensor maps list the fastest dimension first
        scope.relying.add(b.name)  # boxes begin at multiples of 16 bytes
        coordinates = (print_expr(i, scope).text for i in where[::-1])
        return ", ".join([f"&{scope.names[f'%map {s.attributes[0]}']}", *coordinates])
    if number in known.described:
        found = matrix_placement(b, across=number in known.across)
        if isinstance(found, str):
            raise InternalError(f"{s.name} does not find {b.name}: {found}")
        address = split_matrix_address(b, where)
        constants = f"{found.leading}, {found.stride}, {found.mode}, {address.bytes}"
        base = _print_matrix_base(b, address.base, scope)
        arguments = [scope.names.get(f"%{base}", base)]
        if build.integer(address.units) != 0:
            arguments.append(print_expr(address.units, scope).text)
        return f"matrix_descriptor<{constants}>({', '.join(arguments)})"
    place = print_element(b, where, scope).text
    return place if known.registers and not known.atom and s.name != ELECT else f"&{place}"


def _print_check(s: ir.Check, scope: PrintScope) -> Iterator[str]:
    lines, inner = print_cross_lane_values((s.condition, s.value) if scope.dialect.check else (s.condition,), scope)
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


def _print_store(s: ir.Store, scope: PrintScope) -> Iterator[str]:
    is_vector = max(s.buffer.type.lanes, *(e.type.lanes for e in stmt_expressions(s))) > 1
    is_staged = is_vector and not can_store_lane_by_lane(s)
    return print_statement(stage_store(s), scope) if is_staged else print_store(s, scope)


# --- loops -------------------------------------------------------------------------------------------------------


def _print_loop(s: ir.Loop, scope: PrintScope) -> Iterator[str]:
    filled, rest = hoist_packing(s) if s.kind is ir.LoopKind.PARALLEL else ((), s)
    if filled:  # C packs before the loop: one thread fills the memory, and all threads read it
        whole: ir.Stmt = rest
        for buffer, fill in reversed(filled):
            whole = ir.Allocate((buffer,), ir.Block((fill, whole)))
        yield from print_statement(whole, scope)
        return
    lines, outer = print_cross_lane_values((s.start, s.stop), scope)
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
        if (stages := _count_product_stages(s)) > 1:
            pragma = f"{scope.dialect.unroll} {stages}"
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
    ends = f"{variable} < {stop.as_operand(RELATION + 1)}"
    yield f"for ({scope.integer(range)} {variable} = {start.text}; {ends}; {step}) {{"
    yield from indent_lines(print_statement(s.body, inner))
    yield "}"


def _multiplies_in_some_iteration(s: ir.Loop, scope: PrintScope) -> bool:
    """Whether a loop with a bound known only at run time contains `wgmma` and runs at least once."""
    if isinstance(s.stop, ir.Const):
        return False
    trips = scope.fits(build.sub(s.stop, s.start))
    if trips is None or trips.low is None or trips.low < 1:
        return False
    rows = (INTRINSICS.get(c.name) for c in walk_stmts(s.body) if isinstance(c, ir.Invoke))
    return any(row is not None and row.described for row in rows)


def _count_product_stages(s: ir.Loop) -> int:
    """The number of stages of shared memory over which a loop of products only iterates; 1 for other loops.

    Unrolled by this number, the loop has constant addresses of stages. Without a number, NVVM unrolls short loops
    completely, and the assembler then adds a `warpgroup.arrive` for the zeros that the sums begin with.
    """
    inside = list(walk_stmts(s.body))
    if not all(isinstance(x, ir.Block | ir.If | ir.Invoke) for x in inside):
        return 1
    known = ((x, INTRINSICS.get(x.name)) for x in inside if isinstance(x, ir.Invoke))
    places = (x.operands[n][1] for x, row in known if row is not None for n in row.described)
    moduli = [
        int(e.right.value)
        for where in places for index in where for e in walk_expr(index)
        if isinstance(e, ir.Binary) and e.op == "mod" and e.left == ir.Var(s.var) and isinstance(e.right, ir.Const)
    ]  # fmt: skip
    return max(moduli, default=1)


def _power_of_two_divisor(n: int) -> int:
    """The largest power of two, up to 8, that divides `n`."""
    return next(p for p in (8, 4, 2, 1) if n % p == 0)


def _is_single_chunk(s: ir.Loop) -> bool:
    """Whether the loop is known to have no more iterations than one chunk."""
    match s.start, s.stop:
        case ir.Const(start), ir.Const(stop):
            return stop - start <= s.grain * s.step
    return False


def _openmp_if_clause(s: ir.Loop, scope: PrintScope) -> str:
    """The OpenMP `if` clause that runs a loop serially when its length, known at run time, is one chunk or less."""
    if s.grain <= 1 or (isinstance(s.start, ir.Const) and isinstance(s.stop, ir.Const)):
        return ""
    trip = ir.Binary("sub", s.stop, s.start) if s.start != ir.Const(0, ir.Type(INT64)) else s.stop
    return f" if ({print_expr(trip, scope).as_operand(SUM)} > {s.grain * s.step})"


def _match_scalar_reduction(s: ir.Loop) -> ir.Store | None:
    """The body of a vector loop if it is a single store that reduces the loop into one element, else None."""
    store = s.body
    if not isinstance(store, ir.Store) or store.op is None:
        return None
    reads = [x for e in (*store.indices, store.value) for x in walk_expr(e)]
    if store.mask is not None or store.value.type.lanes > 1 or find_lifted((*store.indices, store.value), False):
        return None
    if any(isinstance(x, ir.Load) and x.buffer.name == store.buffer.name for x in reads):
        return None
    if any(ir.Var(s.var) in walk_expr(i) for i in store.indices) or store.buffer.type.dtype.bits < 32:
        return None
    return store


def _reducing_loop(s: ir.Loop, store: ir.Store, scope: PrintScope) -> Iterator[str]:
    """The loop with its reduced element in a local variable, so that an OpenMP `reduction` clause applies."""
    dtype, dialect = store.buffer.type.dtype, scope.dialect
    total, named = scope.bind("%total")
    variable, inner = named.bind(s.var)
    place = print_element(store.buffer, store.indices, named)
    step = f"++{variable}" if s.step == 1 else f"{variable} += {s.step}"
    yield "{"
    yield f"    {dialect.type(dtype)} {total} = {place.text};"
    yield f"    {dialect.simd.format(f' reduction({store.op}:{total})')}"
    start, stop = print_expr(s.start, scope), print_expr(s.stop, scope)
    ends = f"{variable} < {stop.as_operand(RELATION + 1)}"
    yield f"    for (int64_t {variable} = {start.text}; {ends}; {step})"
    adds = f"        {print_update(Text(total), store.op, print_expr(store.value, inner), dtype, dialect)}"
    yield from mark_part(store, iter((adds,)), scope)
    yield f"    {place.text} = {total};"
    yield "}"


def _is_simd(s: ir.Loop) -> bool:
    """Whether the simd pragma is legal: the loop reduces nothing and contains no construct that OpenMP forbids."""
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


def _print_allocate(s: ir.Allocate, scope: PrintScope) -> Iterator[str]:
    for position, buffer in enumerate(s.buffers, 1):
        identifier, scope = scope.bind(f"@{buffer.name}")
        spelling = scope.dialect.type(buffer.type.dtype)
        if is_scalar(buffer, scope.dialect):
            yield f"{spelling} {identifier};"
            continue
        if s.lengths:
            yield from _allocate_dynamic(s, identifier, scope)
            return
        first, *rest = _get_array_dimensions(buffer)
        shape = "".join(f"[{n}]" for n in rest)
        if buffer.space in (ir.Space.SHARED, ir.Space.BARRIER):
            yield _declare_shared(buffer, f"{identifier}[{first}]{shape}", f"(*{{}}){shape}" if rest else "*{}", scope)
            lines, scope = _define_matrix_bases(buffer, s.body, scope)
            yield from lines
        elif on_stack(buffer, scope.dialect):
            yield f"{spelling} {identifier}[{first}]{shape};"
        else:
            pointer = f"*{scope.dialect.restrict} {identifier}"
            yield f"{spelling} {f'({pointer})' if rest else pointer}{shape} = malloc({first} * sizeof *{identifier});"
            yield from _print_if_allocated(identifier, build.allocate(s.buffers[position:], s.body), scope)
            return
    yield from print_statement(s.body, scope)


def _print_window(s: ir.Window, scope: PrintScope) -> Iterator[str]:
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
    count = print_expr(build.add(build.count_elements(buffer, s.lengths), 1), scope).text  # never 0 bytes
    declared = f"{scope.dialect.type(buffer.type.dtype)} *{scope.dialect.restrict} {identifier}"
    yield f"{declared} = malloc(({count}) * sizeof *{identifier});"
    yield from _print_if_allocated(identifier, s.body, scope)


def _print_if_allocated(identifier: str, body: ir.Stmt, scope: PrintScope) -> Iterator[str]:
    """`body` if the allocation of `identifier` succeeded, else a store of the failure to the status."""
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


def _define_matrix_bases(buffer: ir.Buffer, body: ir.Stmt, scope: PrintScope) -> tuple[list[str], PrintScope]:
    """Define the bases of matrices in a buffer that do not depend on loops inside `body`; return lines and scope."""
    lines: list[str] = []
    whole = print_element(buffer, (build.const(0),) * len(buffer.shape), scope).text
    for base in _list_matrix_bases(buffer, body):
        offset = matrix_offset(buffer, base)
        variables = {e.name for index in base for e in walk_expr(index) if isinstance(e, ir.Var)}
        if offset is None or not variables <= scope.names.keys():
            continue
        text = f"matrix_base(&{whole})"
        if build.integer(offset) != 0:
            text = f"{text} + {print_expr(offset, scope).as_operand(SUM)}"
        name, inner = scope.bind(f"%{_print_matrix_base(buffer, base, scope)}", f"base_{buffer.name}")
        lines.append(f"const unsigned int {name} = broadcast_warp({text});")
        scope = inner
    return lines, scope


def _print_matrix_base(buffer: ir.Buffer, base: tuple[ir.Expr, ...], scope: PrintScope) -> str:
    return f"matrix_base(&{print_element(buffer, base, scope).text})"


def _list_matrix_bases(buffer: ir.Buffer, body: ir.Stmt) -> list[tuple[ir.Expr, ...]]:
    """The bases of the `wgmma` operands in a buffer, as indices (`split_matrix_address`)."""
    calls = ((s, INTRINSICS[s.name]) for s in walk_stmts(body) if isinstance(s, ir.Invoke) and s.name in INTRINSICS)
    operands = (s.operands[n] for s, known in calls for n in known.described)
    return [*dict.fromkeys(split_matrix_address(b, where).base for b, where in operands if b == buffer)]


def _get_array_dimensions(buffer: ir.Buffer) -> tuple[int, ...]:
    vector = (buffer.type.lanes,) if buffer.type.lanes > 1 else ()
    if shape := array_shape(buffer):
        return (*shape, *vector)
    return (max(1, buffer.span), *vector)
