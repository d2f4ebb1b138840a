"""Check that a module obeys the rules of `nodes`. A violation is a bug of a pass, so the error shows the node."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from typing_extensions import assert_never

from ..core.dtypes import BOOL, INT64, UINT64
from ..core.errors import InternalError
from . import build, intervals
from .async_operand_checks import (
    box_fault,
    cluster_size_fault,
    described_fault,
    in_cluster_fault,
    tensor_map_fault,
)
from .atoms import ATOMS, ROW_BYTES, WARP
from .bounds import BoundsContext, Fact, condition_facts, lane_bounds, lower_bound, upper_bound
from .intrinsics import (
    ALL_THREADS,
    BARRIER_INIT,
    BARRIER_PART,
    FRAGMENT_LOAD,
    FRAGMENT_STORE,
    INTRINSICS,
    REGISTER_MOVES,
    Intrinsic,
)
from .nodes import (
    Allocate,
    Binary,
    Block,
    Buffer,
    Check,
    Const,
    Expr,
    If,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Ramp,
    Space,
    Stmt,
    Store,
    TensorMap,
    Type,
    Var,
    While,
    Window,
)
from .operand_types import operands_fit
from .rewrite import allocated_buffers, children, walk_expr, walk_stmt_exprs, walk_stmts, written_buffers
from .show import format_program
from .swizzled_buffer import contiguous_elements, swizzle_fault
from .uniformity import Uniformity

_INDEX = Type(INT64)
_UPDATES = (None, "+", "*", "min", "max", "and", "or")


class UnprovenBoundsError(InternalError):
    """An index is not proved to be in bounds; if the user wrote the index, it is the user's error, not a bug."""


def verify(module: Module) -> None:
    """Check types, lanes, ranks, scopes, registers, parallelism and the bounds of affine accesses.

    In kernels with a launch, also check that threads execute collective intrinsics together, and that names of shared
    buffers are unique.

    Raises:
        InternalError: naming the first node that breaks a rule.
    """
    buffers = (*module.arguments, *module.temporaries)
    _require_unique([b.name for b in buffers], "buffers")
    _require_unique([k.name for k in module.kernels], "kernels")
    parameters = {p.name for p in module.parameters}
    for b in buffers:
        _require(b.space is Space.GLOBAL and b.type.lanes == 1, f"{b} is no argument or temporary")
        _require_shape(b)
        known = len(b.dynamic) == sum(v is not None for v in b.extent_variables)
        _require(known or b not in module.temporaries, f"the temporary {b.name} is dynamic")
        for held in filter(None, (*b.extent_variables, *b.stride_variables)):
            _require(held in parameters or b not in module.temporaries, f"{held} of {b.name} is no parameter")
    for name in module.written:
        _require(any(b.name == name for b in module.arguments), f"{name} is written but no argument")
    for kernel in module.kernels:
        lowered = not any(
            isinstance(s, Loop) and s.kind in (LoopKind.UNROLLED, LoopKind.VECTOR) for s in walk_stmts(kernel.body)
        )
        place = _Place({b.name: b for b in buffers}, {}, BoundsContext.empty(), len(module.sites), lowered)
        for m in kernel.maps:
            _require((fault := tensor_map_fault(m, buffers)) is None, f"the tensor map {m.name}: {fault}")
        place = replace(_bind_parameters(module, place), maps=kernel.maps)
        _require_one_name(kernel)
        _verify_stmt(kernel.body, place if kernel.launch is None else _enter_launch(kernel, place))


def _require_one_name(kernel: Kernel) -> None:
    """Require that a buffer with windows is accessed through windows of one name only."""
    windows = [s for s in walk_stmts(kernel.body) if isinstance(s, Window)]
    if not windows:
        return
    names = {w.source.name: w.buffer.name for w in windows}
    for w in windows:
        _require(names[w.source.name] == w.buffer.name, f"{w.source.name} has windows of several names", w)
    used = {e.buffer.name for e in walk_stmt_exprs(kernel.body) if isinstance(e, Load)}
    for s in walk_stmts(kernel.body):
        if isinstance(s, Store):
            used.add(s.buffer.name)
        elif isinstance(s, Invoke):
            used.update(b.name for b, _ in s.operands)
    for name in sorted(used & names.keys()):
        raise InternalError(f"{name} has windows, and is reached without them")


def _bind_parameters(module: Module, place: _Place) -> _Place:
    """The scope of all kernels of a module, with its parameters and their ranges."""
    for p in module.parameters:
        scope = place.scope
        if p.most is not None:
            scope = scope.in_loop(Loop(p.name, build.const(0), build.const(p.most + 1), Block(())))
        place = place.bind(p.name, _INDEX, scope)
    return place


def _enter_launch(kernel: Kernel, place: _Place) -> _Place:
    """The scope of a kernel with a launch; checks the launch and the names of shared buffers."""
    assert kernel.launch is not None
    for count in filter(None, kernel.launch.counts):
        _require(count.parameter in place.variables, f"{kernel.name} counts blocks by {count.parameter}")
    place = replace(place, cluster=kernel.launch.cluster)
    for name, extent in kernel.launch.ranges():
        _require(extent >= 1, f"{kernel.name} has {extent} along {name}")
        place = place.bind(
            name, _INDEX, place.scope.in_loop(Loop(name, build.const(0), build.const(extent), Block(())))
        )
    _require((fault := cluster_size_fault(kernel.launch)) is None, f"{kernel.name} has {fault}")
    shared = [b.name for b in allocated_buffers(kernel.body) if b.space in (Space.SHARED, Space.BARRIER)]
    _require_unique(shared, f"shared buffers of {kernel.name}")
    constant = frozenset(place.buffers) - {b.name for b in written_buffers((kernel.body,))}
    return replace(place, threads=Uniformity.of(kernel.launch, constant))


def _require(condition: bool, message: str, node: Stmt | Expr | None = None) -> None:
    if not condition:
        raise InternalError(message if node is None else f"{message}: {_format_node_excerpt(node)}")


def _require_unique(names: list[str], what: str) -> None:
    twice = [n for n in dict.fromkeys(names) if names.count(n) > 1]
    _require(not twice, f"several {what} are named {twice}")


@dataclass(frozen=True, slots=True)
class _Place:
    """The facts at a point of the program.

    lowered: whether no UNROLLED or VECTOR loops are left. guarded: whether it is inside a condition.
    data: variables that depend on memory, also through bounds of loops.
    threads: facts about variables in the threads of a block; None without a launch.
    together: how many consecutive threads reach this point if one of them does.
    """

    buffers: dict[str, Buffer]
    variables: dict[str, Type]
    scope: BoundsContext
    sites: int
    lowered: bool
    parallel: bool = False
    guarded: bool = False
    hidden: frozenset[str] = frozenset()  # registers outside of the parallel loop, which its threads cannot access
    data: frozenset[str] = frozenset()
    threads: Uniformity | None = None
    together: int = ALL_THREADS
    maps: tuple[TensorMap, ...] = ()
    cluster: int = 1
    types: dict[int, Type] = field(default_factory=dict, init=False)
    """Types of expressions that were verified in this scope, by identity, because many occur repeatedly."""

    def with_conditions(self, *parts: Expr) -> _Place:
        """The scope of statements that run under the conditions `parts`."""
        return (
            self if self.threads is None else replace(self, together=min(self.together, self.threads.agreement(*parts)))
        )

    def is_data(self, *parts: Expr) -> bool:
        """Whether one of `parts` depends on values in memory."""
        every = (e for part in parts for e in walk_expr(part))
        return any(isinstance(e, Load) or (isinstance(e, Var) and e.name in self.data) for e in every)

    def bind(self, name: str, t: Type, scope: BoundsContext, *values: Expr) -> _Place:
        """The scope in which `name` of type `t` is bound to a value that depends on `values`."""
        if name in self.variables:
            raise InternalError(f"{name} is bound twice, one inside the other")
        data = self.data | {name} if self.is_data(*values) else self.data
        return replace(self, variables={**self.variables, name: t}, scope=scope, data=data)


# --- statements --------------------------------------------------------------------------------------------------


def _verify_stmt(s: Stmt, place: _Place) -> None:
    match s:
        case Block(body):
            for c in body:
                _verify_stmt(c, place)
        case Store():
            _verify_store(s, place)
        case Loop():
            _verify_loop(s, place)
        case If(condition, then, otherwise):
            _require_type(condition, Type(BOOL), place, s)
            guarded = replace(place.with_conditions(condition), guarded=True)
            _verify_stmt(then, guarded)
            if otherwise is not None:
                _verify_stmt(otherwise, guarded)
        case While(condition, body):
            _require_type(condition, Type(BOOL), place, s)
            _verify_stmt(body, replace(place.with_conditions(condition), guarded=True))
        case Let(name, value, body):
            t = _verify_expr_once(value, place)
            inner = place.bind(name, t, place.scope.in_let(name, value), value)
            if inner.threads is not None:
                inner = replace(inner, threads=inner.threads.bind(name, value))
            _verify_stmt(body, inner)
        case Allocate(buffers, body, lengths):
            for buffer in buffers:
                _verify_allocation(buffer, place)
                _require(len(buffer.dynamic) == len(lengths), f"{buffer.name} is dynamic without a length, or not")
            for length in lengths:
                _require_type(length, _INDEX, place, s)
                _require([b.space for b in buffers] == [Space.SCRATCH], "a length is for one scratch buffer", s)
            _require_unique([b.name for b in buffers], "buffers of one allocation")
            _verify_stmt(body, replace(place, buffers=place.buffers | {b.name: b for b in buffers}))
        case Window():
            _verify_window(s, place)
        case Check(condition, site, value):
            _require_type(condition, Type(BOOL), place, s)
            _require_type(value, _INDEX, place, s)
            _require(0 <= site < place.sites, f"there is no site {site}")
        case Invoke():
            _verify_invoke(s, place)
        case _:
            assert_never(s)


def _verify_window(s: Window, place: _Place) -> None:
    """Verify a window: its scope, kind and form, and that its rows are inside of the source."""
    known, buffer = place.buffers.get(s.source.name), s.buffer
    _require(known == s.source, f"{s.source.name} is not in scope")
    _require(buffer.name not in place.buffers, f"{buffer.name} is there already")
    _require(buffer.type == s.source.type and buffer.space is s.source.space, f"{buffer.name} is of another kind")
    _require_shape(buffer)
    _require_window_form(s)
    for part in (s.start, s.length):
        _require_type(part, _INDEX, place, s)
    low = lower_bound(s.start, place.scope)
    high = upper_bound(build.sub(build.add(s.start, s.rows), s.length), place.scope)
    _require(low is not None and low >= 0, f"{buffer.name} may start before {s.source.name}", s.start)
    _require(high is not None and high <= 0, f"{buffer.name} may end behind {s.source.name}", s.start)
    _verify_stmt(s.body, replace(place, buffers=place.buffers | {buffer.name: buffer}))


def _require_window_form(s: Window) -> None:
    """Require that a window has the elements and the strides of its source, except for what a reshape may change."""
    buffer, source = s.buffer, s.source
    _require(0 <= s.dimension < len(source.shape), f"{source.name} has no dimension {s.dimension}")
    rest = tuple(d for d in source.dynamic if d != s.dimension)
    _require(buffer.dynamic == rest, f"the window {buffer.name} has other dynamic dimensions than {source.name}")
    shape = tuple(s.rows if d == s.dimension else n for d, n in enumerate(source.shape))
    _require(not rest or buffer.shape == shape, f"the dynamic window {buffer.name} has a shape of its own")
    elements = prod(shape)
    _require(prod(buffer.shape) == elements, f"{buffer.name} has {prod(buffer.shape)} elements, not {elements}")
    if source.stride_variables and elements:
        steps = iter([build.stride(source, d) for d in range(len(source.shape))])
        known = all(build.stride(buffer, d) in steps for d in range(len(buffer.shape)) if buffer.shape[d] != 1)
        _require(known, f"{buffer.name} has strides that {source.name} has not")


def _verify_loop(s: Loop, place: _Place) -> None:
    _require_type(s.start, _INDEX, place, s)
    _require_type(s.stop, _INDEX, place, s)
    _require(
        s.step > 0 and s.grain > 0 and s.vector_factors[0] > 0 and s.vector_factors[1] >= 0,
        f"bad step, grain or factor of loop {s.var}",
    )
    known = replace(s, start=_start_where_body_runs(s))
    inner = place.bind(s.var, _INDEX, place.scope.in_loop(known), s.start, s.stop)
    if inner.threads is not None:
        _require(s.kind in (LoopKind.SERIAL, LoopKind.UNROLLED), f"loop {s.var} of a launch is {s.kind.value}")
        threads = inner.threads.bind_loop(s.var, s.start, s.stop)
        inner = replace(inner.with_conditions(s.start, s.stop), threads=threads)
    if s.kind is LoopKind.PARALLEL:
        _require(not place.parallel, f"parallel loop {s.var} is inside a parallel loop")
        private = frozenset(b.name for b in place.buffers.values() if b.space in (Space.REGISTER, Space.FRAGMENT))
        inner = replace(inner, parallel=True, hidden=private)
    _verify_stmt(s.body, inner)


def _start_where_body_runs(s: Loop) -> Expr:
    """A lower bound of the variable where the body runs: `start` for a loop over min(start, stop) .. stop."""
    match s.start:
        case Binary("min", start, stop) if stop == s.stop:
            return start
    return s.start


def _verify_allocation(buffer: Buffer, place: _Place) -> None:
    _require(buffer.name not in place.buffers, f"buffer {buffer.name} is allocated twice, one inside the other")
    _require(buffer.space is not Space.GLOBAL, f"{buffer.name} is allocated but global")
    _require(
        buffer.space is not Space.BARRIER or buffer.type == Type(UINT64), f"{buffer.name} has no 64 bits a barrier"
    )
    if buffer.space in (Space.SHARED, Space.BARRIER):
        _require(place.threads is not None, f"{buffer.name} is shared, but there is no launch")
        _require(place.together == ALL_THREADS, f"{buffer.name} is shared, but not all threads of a block allocate it")
    _require(buffer.type.lanes == 1 or buffer.space is Space.REGISTER, f"{buffer.name} holds vectors in memory")
    _require_shape(buffer)


def _require_shape(buffer: Buffer) -> None:
    _require(len(buffer.shape) == len(buffer.strides), f"{buffer} has other ranks of shape and strides")
    _require(not any(buffer.shape[d] for d in buffer.dynamic), f"{buffer} is dynamic, but has an extent")
    held = buffer.extent_variables
    _require(held == () or len(held) == len(buffer.shape), f"{buffer} has other ranks of shape and extent variables")
    _require(all(d in buffer.dynamic for d, v in enumerate(held) if v), f"{buffer} has an extent that is a variable")
    held = buffer.stride_variables
    _require(held == () or len(held) == len(buffer.shape), f"{buffer} has other ranks of shape and stride variables")
    fault = swizzle_fault(buffer)
    _require(fault is None, f"the swizzle of {buffer.name}: {fault}")


def _verify_store(s: Store, place: _Place) -> None:
    t = _verify_access(s.buffer, s.indices, s.mask, place, s)
    _require_type(s.value, t, place, s)
    _require(s.op in _UPDATES, f"{s.op} is no update of a store", s)
    _require(not s.atomic or s.op is not None, "an atomic store updates nothing", s)


def _verify_invoke(s: Invoke, place: _Place) -> None:
    known = INTRINSICS.get(s.name)
    _require(known is not None, f"there is no intrinsic {s.name}", s)
    if known is not None:
        given = (len(s.operands), len(s.attributes))
        _require(given == (known.operands, known.attributes), f"{s.name} takes other operands", s)
        _require(len(s.values) == len(known.values), f"{s.name} takes other values", s)
        for value, dtype in zip(s.values, known.values, strict=True):
            _require_type(value, Type(dtype), place, s)
        _require(place.threads is not None or known.group == 1, f"{s.name} without a launch", s)
        group = "threads of a block" if known.group == ALL_THREADS else f"of {known.group} threads"
        _require(place.together >= known.group, f"not all {group} come to {s.name}", s)
    for number, (buffer, where) in enumerate(s.operands):
        mapped = known is not None and number == known.mapped
        lanes = _verify_indices(buffer, where, place, s, mapped=mapped)
        _require(lanes == 1, f"an operand of {s.name} is a vector of places", s)
        inside = buffer.space is Space.REGISTER
        expected = known is not None and number in known.registers
        _require(inside is expected, f"an operand of {s.name} is {'' if inside else 'not '}in registers", s)
        inside = buffer.space is Space.FRAGMENT
        expected = known is not None and number in known.fragments
        _require(inside is expected, f"an operand of {s.name} is {'' if inside else 'no '}fragment", s)
        inside = buffer.space is Space.BARRIER
        expected = known is not None and number in known.barriers
        _require(inside is expected, f"an operand of {s.name} is {'a' if inside else 'no'} barrier", s)
    if s.name in (FRAGMENT_LOAD, FRAGMENT_STORE):
        _fragment_in_memory(s, place)
    if s.name == BARRIER_PART:
        number, threads = s.attributes
        _require(0 < number < 16 and threads > 0 and threads % WARP == 0, "no barrier of a part has this form", s)
    _require((fault := in_cluster_fault(s, place.cluster)) is None, str(fault), s)
    if known is not None and known.mapped is not None:
        _require((fault := box_fault(s, known.mapped, place.maps)) is None, str(fault), s)
    if known is not None and known.atom:
        _atom_operands(s, known, place)
    if s.name in REGISTER_MOVES:
        _require(24 <= s.attributes[0] <= 256 and s.attributes[0] % 8 == 0, "no thread has so many registers", s)
    if s.name == BARRIER_INIT:
        _require(0 < s.attributes[0] < 1 << 20, "no barrier waits for so many arrivals", s)


def _atom_operands(s: Invoke, known: Intrinsic, place: _Place) -> None:
    """Check the operands against the atom: their spaces, types and sizes."""
    atom = ATOMS[known.atom]
    facts, understood = condition_facts(None, place.scope)
    for number, ((buffer, where), operand) in enumerate(zip(s.operands, atom.operands, strict=True)):
        if number in known.described:
            _require((fault := described_fault(s, number, known)) is None, str(fault), s)
            continue
        count = operand.registers or ROW_BYTES // buffer.type.dtype.size
        together = contiguous_elements(buffer)
        if operand.space is Space.REGISTER:
            expected = Type(operand.register)
            _require(buffer.type == expected, f"{atom.name} takes registers of {expected}, not {buffer.type}", s)
        else:
            _require(buffer.space is operand.space, f"{atom.name} takes {operand.space.value} memory", s)
            _require(together is None or together >= count, f"the swizzle of {buffer.name} divides rows", s)
        _require(buffer.shape != () and buffer.strides[-1] == 1, f"{buffer.name} has no rows", s)
        if understood and not place.guarded:
            last = len(buffer.shape) - 1
            _require_inside(buffer, last, where[-1], place, facts, s)
            _require_inside(buffer, last, build.add(where[-1], count - 1), place, facts, s)


def _fragment_in_memory(s: Invoke, place: _Place) -> None:
    """Check the memory operand of a fragment load or store: its rows must be contiguous and in bounds."""
    fragment, (memory, first) = s.operands if s.name == FRAGMENT_LOAD else s.operands[::-1]
    (shape, dtype), (dimension,) = (fragment[0].shape[1:], fragment[0].type.dtype), s.attributes
    _require(len(shape) == 2 and 0 <= dimension < len(memory.shape) - 1, f"{s.name} of other ranks", s)
    wide = dtype.size // memory.type.dtype.size
    _require(memory.strides[-1] == 1 and wide * memory.type.dtype.size == dtype.size, f"{s.name} of parts", s)
    facts, understood = condition_facts(None, place.scope)
    if understood and not place.guarded:
        for d, extent in ((dimension, shape[0]), (len(memory.shape) - 1, wide * shape[1])):
            for index in (first[d], build.add(first[d], extent - 1)):
                _require_inside(memory, d, index, place, facts, s)


# --- accesses ----------------------------------------------------------------------------------------------------


def _verify_access(b: Buffer, where: tuple[Expr, ...], mask: Expr | None, place: _Place, node: Stmt | Expr) -> Type:
    """Verify an access; returns the type of the loaded or stored value."""
    lanes = max(_verify_indices(b, where, place, node), b.type.lanes)
    _require(b.space is not Space.FRAGMENT, f"{b.name} has fragments: only intrinsics reach them", node)
    _require(b.space is not Space.BARRIER, f"{b.name} has barriers: only intrinsics reach them", node)
    if mask is not None:
        _require_type(mask, Type(BOOL, lanes), place, node)
    facts, understood = condition_facts(mask, place.scope)
    if understood and not place.guarded:
        for dimension, i in enumerate(where):
            _require_inside(b, dimension, i, place, facts, node)
    return Type(b.type.dtype, lanes)


def _verify_indices(
    b: Buffer, where: tuple[Expr, ...], place: _Place, node: Stmt | Expr, *, mapped: bool = False
) -> int:
    """Verify indices; returns their lanes. mapped: they are coordinates of a tensor map, whose rank may differ."""
    known = place.buffers.get(b.name)
    if known is not b and known != b:
        raise InternalError(f"{b.name} is not in scope, or not as declared: {_format_node_excerpt(node)}")
    for held in b.stride_variables:
        _require(held is None or place.variables.get(held) == _INDEX, f"{held} is no stride in scope", node)
    if b.name in place.hidden:
        raise InternalError(f"{b.name} is in registers of another thread: {_format_node_excerpt(node)}")
    if not mapped and len(where) != len(b.shape):
        raise InternalError(f"{len(where)} indices on {b.name} of rank {len(b.shape)}: {_format_node_excerpt(node)}")
    lanes = 1
    for i in where:
        t = _verify_expr_once(i, place)
        if t.dtype != INT64:
            raise InternalError(f"an index of {b.name} is {t}: {_format_node_excerpt(node)}")
        if t.lanes > 1:
            _require(lanes in (1, t.lanes), "indices of different lanes", node)
            lanes = t.lanes
        if b.space is Space.REGISTER and place.lowered:
            _require(isinstance(i, Const), "the index of a register is not constant", node)
    _require(lanes == 1 or b.type.lanes == 1, "vector indices on a buffer of vectors", node)
    return lanes


def _require_inside(
    b: Buffer, dimension: int, index: Expr, place: _Place, facts: list[Fact], node: Stmt | Expr
) -> None:
    """Prove that an affine index is in bounds. Indices that depend on data, or are dynamic, are not checked."""
    base = index.base if isinstance(index, Ramp) else index
    if base.type.lanes > 1 or not _is_affine(base) or place.is_data(base) or dimension in b.dynamic:
        return
    plain, last = intervals.index_interval(index, place.scope.ranges), b.shape[dimension] - 1
    if plain.low is not None and plain.high is not None and plain.low >= 0 and plain.high <= last:
        return
    low, high = lane_bounds(index, place.scope, facts)
    inside = low is not None and low >= 0 and high is not None and high <= last
    if not inside:
        what = f"dimension {dimension} of {b.name}{list(b.shape)} is not proved inside ({low} .. {high})"
        raise UnprovenBoundsError(f"{what}: {_format_node_excerpt(node)}")


def _is_affine(e: Expr) -> bool:
    match e:
        case Const() | Var():
            return True
        case Binary("add" | "sub", a, b):
            return _is_affine(a) and _is_affine(b)
        case Binary("mul", a, Const()) | Binary("mul", Const(), a):
            return _is_affine(a)
    return False


# --- expressions -------------------------------------------------------------------------------------------------


def _require_type(e: Expr, t: Type, place: _Place, node: Stmt | Expr) -> None:
    found = _verify_expr_once(e, place)
    if found != t:
        raise InternalError(f"{_format_node_excerpt(e)} is {found}, not {t}, in {_format_node_excerpt(node)}")


def _verify_expr_once(e: Expr, place: _Place) -> Type:
    """Verify `e` unless that was done in this scope; returns its type. Ids stay unique while the module is alive."""
    known = place.types.get(id(e))
    if known is None:
        known = place.types[id(e)] = _verify_expr(e, place)
    return known


def _verify_expr(e: Expr, place: _Place) -> Type:
    match e:
        case Const(value, t):
            python = bool if t.dtype.is_bool else float if t.dtype.is_float else int
            if type(value) is not python:
                raise InternalError(f"constant {value!r} of type {t}")
            return t
        case Var(name, t):
            bound = place.variables.get(name)
            if bound is None:
                raise InternalError(f"variable {name} is not bound")
            if bound != t:
                raise InternalError(f"variable {name} is {bound}, used as {t}")
            return t
        case Load(buffer, indices, mask):
            return _verify_access(buffer, indices, mask, place, e)
    types = [_verify_expr_once(c, place) for c in children(e)]
    if not operands_fit(e, types):
        raise InternalError(f"operands of types {', '.join(map(str, types))} do not fit: {_format_node_excerpt(e)}")
    return e.type


def _format_node_excerpt(node: Stmt | Expr) -> str:
    text = format_program(node).strip()
    return text if len(text) <= 300 else text[:300] + " ..."
