"""Map the loops of a nest to the threads of a GPU: teams of lanes take instances of the outer loops in grid strides.

A team is 1 to 32 adjacent threads, or a whole block. Its lanes share the positions of a row, or the terms of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import BLOCK, THREAD, Block, Expr, Launch, Let, Loop, LoopKind, Stmt
from ..loop_ir.rewrite import mentions
from ..target import GpuTarget
from ..thresholds import GPU_SPARSE_BLOCK_THREADS

TASK, ROUND, WORKERS = internal_name("task"), internal_name("round"), internal_name("tasks")


@dataclass(frozen=True, slots=True)
class Teams:
    """The threads of a launch: `blocks` blocks of `GPU_SPARSE_BLOCK_THREADS`; `lanes` adjacent threads form a team."""

    blocks: int
    lanes: int

    @property
    def launch(self) -> Launch:
        """The launch configuration: lanes along x, the teams of a block along y."""
        return Launch((self.blocks, 1, 1), (self.lanes, GPU_SPARSE_BLOCK_THREADS // self.lanes, 1))

    @property
    def count(self) -> int:
        return self.blocks * (GPU_SPARSE_BLOCK_THREADS // self.lanes)

    @property
    def number(self) -> Expr:
        """The index of the thread's team."""
        return build.add(build.mul(build.var(BLOCK[0]), GPU_SPARSE_BLOCK_THREADS // self.lanes), build.var(THREAD[1]))

    @property
    def next(self) -> Expr:
        """The index of the next team."""
        return build.add(self.number, 1)

    @property
    def lane(self) -> Expr:
        return build.var(THREAD[0])


def count_blocks(target: GpuTarget) -> int:
    """Number of blocks that fill the target once."""
    return target.num_sms * (target.threads_per_sm // GPU_SPARSE_BLOCK_THREADS)


@dataclass(frozen=True, slots=True)
class OuterLoops:
    """The outer loops of a nest, split off from the rest.

    before: names bound outside of the loops. loops: the outer loops; their bounds do not depend on each other.
    names: names that depend on their variables. rest: the inner part.
    """

    before: tuple[tuple[str, Expr], ...]
    loops: tuple[Loop, ...]
    names: tuple[tuple[str, Expr], ...]
    rest: Stmt

    @property
    def is_row(self) -> bool:
        """Whether the inner part is a loop whose bounds depend on the outer ones, as over the positions of a row."""
        return isinstance(self.rest, Loop)


def split_outer_loops(body: Stmt) -> OuterLoops:
    """Split off the perfectly nested outer loops of a nest whose bounds do not depend on each other."""
    before: list[tuple[str, Expr]] = []
    names: list[tuple[str, Expr]] = []
    loops: list[Loop] = []
    varying: set[str] = set()
    while True:
        match body:
            case Let(name, value, inner):
                if mentions(value, varying):
                    varying.add(name)
                (names if name in varying else before).append((name, value))
                body = inner
            case Loop(var, start, stop, inner, LoopKind.SERIAL, 1) if not _has_varying_bounds((start, stop), varying):
                loops.append(body)
                varying.add(var)
                body = inner
            case _:
                return OuterLoops(tuple(before), tuple(loops), tuple(names), body)


def _has_varying_bounds(bounds: Sequence[Expr], varying: set[str]) -> bool:
    return any(mentions(e, varying) for e in bounds)


def distribute_over_teams(outer: OuterLoops, teams: Teams, names: Names) -> Stmt:
    """Loop over the instances of the outer loops in strides of the team count. The lanes of a team share a row."""
    rest = outer.rest
    if isinstance(rest, Loop) and teams.lanes > 1:
        rest = distribute_loops_over_lanes(rest, teams)
    task = names.fresh(TASK)
    body = _bind_loop_variables(outer, build.var(task), rest)
    return _wrap_in_lets(outer.before, Loop(task, teams.number, _count_tasks(outer), body, step=teams.count))


def distribute_in_order(outer: OuterLoops, teams: Teams, names: Names) -> Stmt:
    """Give each thread a block of consecutive instances of the outer loops, in the order of the threads."""
    task, tasks = names.fresh(TASK), names.fresh(WORKERS)
    first, last = (build.div(build.mul(n, build.var(tasks)), teams.count) for n in (teams.number, teams.next))
    loop = Loop(task, first, last, _bind_loop_variables(outer, build.var(task), outer.rest))
    return _wrap_in_lets(outer.before, Let(tasks, _count_tasks(outer), loop))


def distribute_in_uniform_rounds(outer: OuterLoops, teams: Teams, names: Names, leads: str) -> Stmt:
    """As `distribute_over_teams`, but with the same number of rounds for all threads, so that they can synchronize.

    A team without an instance left computes the last one again. leads: the name to bind to whether a thread stores.
    """
    tasks, number, task = names.fresh(WORKERS), names.fresh(ROUND), names.fresh(TASK)
    mine = build.add(build.mul(build.var(number), teams.count), teams.number)
    first = build.logical_and(build.eq(teams.lane, 0), build.lt(mine, build.var(tasks)))
    last = build.sub(build.var(tasks), 1)
    body = Let(
        leads, first, Let(task, build.minimum(mine, last), _bind_loop_variables(outer, build.var(task), outer.rest))
    )
    rounds = build.div(build.add(build.var(tasks), teams.count - 1), teams.count)
    loop = Loop(number, build.const(0), rounds, body)
    return _wrap_in_lets(outer.before, Let(tasks, _count_tasks(outer), loop))


def distribute_loops_over_lanes(body: Stmt, teams: Teams) -> Stmt:
    """Share one or more loops among the lanes of a team: a lane starts at its index and steps by the lane count.

    Raises:
        CannotLower: there are other statements besides the loops, or the loops merge operands.
    """
    match body:
        case Let(name, value, inner):
            return Let(name, value, distribute_loops_over_lanes(inner, teams))
        case Block(parts) if parts:
            return build.block(*(distribute_loops_over_lanes(s, teams) for s in parts))
        case Loop(start=start, kind=LoopKind.SERIAL, step=1):
            return replace(body, start=build.add(start, teams.lane), step=teams.lanes)
    raise CannotLower("its sums are no loops over stored positions or all coordinates")


def _count_tasks(outer: OuterLoops) -> Expr:
    total: Expr = build.const(1)
    for extent in map(_make_loop_extent, outer.loops):
        total = build.mul(total, extent)
    return total


def _make_loop_extent(loop: Loop) -> Expr:
    extent = build.sub(loop.stop, loop.start)
    return extent if loop.start == build.const(0) else build.maximum(extent, 0)


def _bind_loop_variables(outer: OuterLoops, task: Expr, rest: Stmt) -> Stmt:
    """`rest` with the variables of the outer loops bound from the linear index `task`, the innermost loop fastest."""
    bound: list[tuple[str, Expr]] = []
    for loop in reversed(outer.loops[1:]):
        extent = _make_loop_extent(loop)
        bound.append((loop.var, build.add(loop.start, build.mod(task, extent))))
        task = build.div(task, extent)
    bound += [(loop.var, build.add(loop.start, task)) for loop in outer.loops[:1]]
    return _wrap_in_lets((*reversed(bound), *outer.names), rest)


def _wrap_in_lets(names: Sequence[tuple[str, Expr]], body: Stmt) -> Stmt:
    for name, value in reversed(names):
        body = Let(name, value, body)
    return body
