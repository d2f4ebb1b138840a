"""Check data-dependent subscripts before anything is accessed through them.

For many subscripts, a vectorized, perhaps parallel nest first tests whether all are in bounds. Only if one is not, a
second, ordered nest searches for the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from ...core.dtypes import BOOL
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.nodes import Buffer, CheckSite, LoopKind, Space, Type
from ...loop_ir.origins import with_origin
from ...loop_ir.passes.vectorize import vectorize_loops
from ...lower_expr import LoweringScope, lower_expr, lower_subscript
from ...options import CpuOptions
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundsCheck, BoundStatement
from ...thresholds import CHECKED_VECTORS, FEW_SUBSCRIPTS, MAX_CHECK_CHUNKS, SUBSCRIPTS_PER_OPERATION
from ..schedule.access_cost import access_stride

CHUNK = internal_name("chunk")


@dataclass(frozen=True, slots=True)
class BoundsCheckLoops:
    """Loops that verify subscripts, their check sites, and the memory that they need."""

    loops: tuple[ir.Stmt, ...] = ()
    sites: tuple[CheckSite, ...] = ()
    temporaries: tuple[Buffer, ...] = ()

    def __add__(self, other: BoundsCheckLoops) -> BoundsCheckLoops:
        return BoundsCheckLoops(
            self.loops + other.loops, self.sites + other.sites, self.temporaries + other.temporaries
        )


BOUNDS_CHECK = "bounds check"
"""The role of stores that verify subscripts."""


def build_check_loops(
    function: BoundFunction,
    s: BoundStatement,
    buffers: Mapping[str, Buffer],
    first_site: int,
    options: CpuOptions,
    target: CpuTarget,
) -> BoundsCheckLoops:
    """For each check of `s`, loops that verify it for all instances of `s`; sites are numbered from `first_site`."""
    found = BoundsCheckLoops()
    if all(i.extent for i in s.indices):
        for check in dict.fromkeys(s.checks):
            site = first_site + len(found.sites)
            found += _Check(function, s, check, buffers, site, options, target).to_loops()
    return replace(found, loops=tuple(with_origin(loop, (s.name,), BOUNDS_CHECK) for loop in found.loops))


def _list_check_exprs(check: BoundsCheck) -> list[tc.Expr]:
    return [e for e in (check.subscript, check.guard) if e is not None]


def _collect_check_accesses(check: BoundsCheck) -> list[tc.Access]:
    return [x for e in _list_check_exprs(check) for x in tc.walk_expr(e) if isinstance(x, tc.Access)]


@dataclass(frozen=True, slots=True)
class _Check:
    """One check of a statement, and the facts that decide its implementation."""

    function: BoundFunction
    statement: BoundStatement
    check: BoundsCheck
    buffers: Mapping[str, Buffer]
    site: int
    options: CpuOptions
    target: CpuTarget

    @property
    def indices(self) -> tuple[BoundIndex, ...]:
        """The indices on which the check depends, in the order of the statement."""
        used = {x.name for e in _list_check_exprs(self.check) for x in tc.walk_expr(e) if isinstance(x, tc.Index)}
        return tuple(i for i in self.statement.indices if i.name in used)

    @property
    def points(self) -> int:
        return prod(i.extent for i in self.indices)

    def to_loops(self) -> BoundsCheckLoops:
        c = self.check
        sites = (CheckSite(c.tensor, c.dimension, c.extent, c.origin),)
        everywhere, temporaries = self._guard_search(self._one_by_one())
        return BoundsCheckLoops((everywhere,), sites, temporaries)

    def _one_by_one(self) -> ir.Stmt:
        """The serial nest that finds the first subscript out of bounds."""
        value, condition = self._lower_condition()
        body: ir.Stmt = ir.Check(condition, self.site, value)
        for i in reversed(self.indices):
            body = ir.Loop(i.name, build.const(i.lower), build.const(i.upper), body)
        return body

    def _guard_search(self, search: ir.Stmt) -> tuple[ir.Stmt, tuple[Buffer, ...]]:
        """`search` behind a fast test whether it would find anything, and the buffers that the test needs."""
        if self.points < FEW_SUBSCRIPTS:
            return search, ()
        outer = max(self.indices, key=lambda i: i.extent)
        grain = self.options.grain_size * SUBSCRIPTS_PER_OPERATION
        chunks = min(outer.extent, MAX_CHECK_CHUNKS, self.points // grain) if grain else 1
        inside = Buffer(internal_name("inside", self.site), Type(BOOL), (), (), Space.REGISTER)
        flags = build.buffer(internal_name("chunks", self.site), BOOL, (chunks,))
        try:
            if chunks > 1:
                first, nest = self._in_chunks(inside, outer, flags), _make_flag_conjunction(inside, flags)
            else:
                first, nest = build.NOTHING, self._vector_nest(inside, {})
        except CannotLower:
            return search, ()
        found = ir.If(build.logical_not(ir.Load(inside, ())), search)
        then = build.allocate([inside], build.block(_initialize_and_run(inside, nest), found))
        return build.block(first, then), (flags,) if chunks > 1 else ()

    def _in_chunks(self, inside: Buffer, outer: BoundIndex, flags: Buffer) -> ir.Stmt:
        """The parallel loop that computes `flags`, one for each chunk of `outer`."""
        (chunks,) = flags.shape
        size = -(-outer.extent // chunks)
        chunk = build.var(CHUNK)
        start = build.add(build.mul(chunk, size), outer.lower)
        nest = self._vector_nest(inside, {outer.name: (start, build.minimum(build.add(start, size), outer.upper))})
        store = ir.Store(flags, (chunk,), ir.Load(inside, ()))
        body = build.allocate([inside], build.block(_initialize_and_run(inside, nest), store))
        return ir.Loop(CHUNK, build.const(0), build.const(chunks), body, LoopKind.PARALLEL)

    def _vector_nest(self, inside: Buffer, parts: Mapping[str, tuple[ir.Expr, ir.Expr]]) -> ir.Stmt:
        """The nest that combines the conditions of instances in `parts` into `inside`, with the best index in lanes.

        parts: (start, stop) of indices that are not iterated in full.
        """
        value, condition = self._lower_condition()
        bits = value.operand.type.dtype.bits if isinstance(value, ir.Cast) else value.type.dtype.bits
        lanes = self.target.lanes(bits)
        along = min(self.indices, key=lambda i: self._cost(i, lanes))
        body: ir.Stmt = ir.Store(inside, (), condition, "and")
        for i in (along, *(i for i in reversed(self.indices) if i is not along)):
            start, stop = parts.get(i.name, (build.const(i.lower), build.const(i.upper)))
            if i is along:
                factor = (lanes, max(1, min(CHECKED_VECTORS, i.extent // lanes)))
                body = ir.Loop(i.name, start, stop, body, LoopKind.VECTOR, vector_factors=factor)
            else:
                body = ir.Loop(i.name, start, stop, body)
        vectorize_loops(_initialize_and_run(inside, body))  # raises CannotLower if the check has no vector form
        return body

    def _cost(self, i: BoundIndex, lanes: int) -> float:
        """The cost per subscript of vectors along `i`."""
        steps = [access_stride(self.function, a, i.name) for a in _collect_check_accesses(self.check)]
        costs = [1.0 if s in (0, 1) else 4.0 if s is not None and abs(s) <= 4 else 10.0 for s in steps]
        return sum(costs) * -(-i.extent // lanes) / i.extent

    def _lower_condition(self) -> tuple[ir.Expr, ir.Expr]:
        """The subscript in int64, and the condition that it is in bounds wherever its guard holds."""
        guard = self.check.guard
        scope = LoweringScope({i.name: build.var(i.name) for i in self.statement.indices}, self.buffers)
        value = lower_subscript(self.check.subscript, scope.with_guard(guard) if guard is not None else scope)
        condition = is_inside(value, self.check.extent)
        if guard is not None:
            condition = build.logical_or(build.logical_not(lower_expr(guard, scope)), condition)
        return value, condition


def is_inside(value: ir.Expr, extent: int) -> ir.Expr:
    """`0 <= value < extent`, in the type of `value` before it was widened."""
    narrow = value.operand if isinstance(value, ir.Cast) and value.operand.type.dtype.is_integer else value
    dtype = narrow.type.dtype
    above = build.ge(narrow, 0) if dtype.is_signed else build.TRUE
    largest = (1 << (dtype.bits - dtype.is_signed)) - 1
    return build.logical_and(above, build.lt(narrow, extent) if extent <= largest else build.TRUE)


def _initialize_and_run(inside: Buffer, nest: ir.Stmt) -> ir.Stmt:
    """Set `inside` to true, then run `nest`, which combines conditions into it."""
    return build.block(ir.Store(inside, (), build.TRUE), nest)


def _make_flag_conjunction(inside: Buffer, flags: Buffer) -> ir.Stmt:
    """The loop that combines all `flags` into `inside`."""
    update = ir.Store(inside, (), ir.Load(flags, (build.var(CHUNK),)), "and")
    return ir.Loop(CHUNK, build.const(0), build.const(flags.shape[0]), update)
