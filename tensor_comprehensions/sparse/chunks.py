"""Split the outermost loop of a nest into chunks for threads, of equal work if stored positions predict the work.

Chunks depend only on sizes and stored positions, so that results are the same for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..core.dtypes import INT64
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.names import Names, is_fresh
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Loop, LoopKind, Stmt, Store, While
from ..thresholds import CHUNK_END_SEARCH_PART, MAX_SPARSE_CHUNKS, SPARSE_CHUNK_ITERATIONS
from .graph import Nest
from .levels import name_of_position
from .operand_buffers import SparseOperand

CHUNK, CHUNKS, WORK = internal_name("chunk"), internal_name("chunks"), internal_name("work")


def parallelize_outer_loop(
    body: Stmt, nest: Nest, order: tuple[str, ...], operands: Mapping[str, SparseOperand], names: Names, size: int
) -> Stmt:
    """Split the outermost loop of `body`, the loops of a nest, among threads. Its iterations must be independent.

    Args:
        size: number of stored positions plus parents in a chunk.
    """
    match body:
        case Let(name, value, inner):
            shared = parallelize_outer_loop(inner, nest, order, operands, names, size)
            return body if shared is inner else Let(name, value, shared)
        case Loop(kind=LoopKind.SERIAL):
            pos = _find_chunk_positions(body, nest, order, operands)
            return _by_iterations(body) if pos is None else _by_positions(body, pos, names, size)
    return body


def _find_chunk_positions(
    loop: Loop, nest: Nest, order: tuple[str, ...], operands: Mapping[str, SparseOperand]
) -> Buffer | None:  # fmt: skip
    """The array with the start of the children of each iteration of the outermost loop; None if no operand has one.

    That loop runs over the coordinates of an index, which are positions of dense levels, or over stored positions.
    """
    for a, path in nest.paths.items():
        first = path.steps[0]
        runs_over = order[0] if first.level.is_dense else name_of_position(a)
        if len(path.steps) > 1 and first.loop == order[0] and first.level.unique and is_fresh(loop.var, runs_over):
            return operands[a.tensor].pos[1]
    return None


def _by_iterations(loop: Loop) -> Stmt:
    extent, chunk, count = build.sub(loop.stop, loop.start), build.var(CHUNK), build.var(CHUNKS)
    chunks = build.minimum(build.maximum(build.div(extent, SPARSE_CHUNK_ITERATIONS), 1), MAX_SPARSE_CHUNKS)
    first = build.add(loop.start, build.div(build.mul(chunk, extent), count))
    last = build.add(loop.start, build.div(build.mul(build.add(chunk, 1), extent), count))
    inner = replace(loop, start=first, stop=last)
    return Let(CHUNKS, chunks, Loop(CHUNK, build.const(0), count, inner, LoopKind.PARALLEL))


@dataclass(frozen=True, slots=True)
class Chunks:
    """The iterations of a loop in chunks of about the same work. Each chunk has whole iterations, or none.

    work_before: the work before an iteration. total: the work of all of them. count: the number of chunks.
    """

    loop: Loop
    work_before: Callable[[Expr], Expr]
    total: Expr
    count: Expr
    names: Names

    def bind_start(self, chunk: Expr, then: Callable[[Expr], Stmt]) -> Stmt:
        """Emit `then` with the first iteration of a chunk."""
        start, stop = self.loop.start, self.loop.stop
        wanted = build.add(self.work_before(start), build.div(build.mul(chunk, self.total), self.count))
        extent = build.sub(stop, start)
        guess = build.add(start, build.div(build.mul(chunk, extent), self.count))
        around = build.add(build.div(extent, build.mul(self.count, CHUNK_END_SEARCH_PART)), 1)
        return _first_with(self.work_before, wanted, start, stop, (guess, around), self.names, then)

    def bind_range(self, chunk: Expr, then: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """Emit `then` with the first iteration of a chunk and the first one after it."""
        return self.bind_start(
            chunk, lambda first: self.bind_start(build.add(chunk, 1), lambda last: then(first, last))
        )


def _by_positions(loop: Loop, pos: Buffer, names: Names, size: int) -> Stmt:
    """Chunks with equal numbers of positions plus parents."""

    def work_before(i: Expr) -> Expr:
        return build.add(build.cast(build.load(pos, i), INT64), i)

    chunk, total = build.var(CHUNK), build.var(WORK)
    before = build.sub(work_before(loop.stop), work_before(loop.start))
    count = build.minimum(build.maximum(build.div(total, size), 1), MAX_SPARSE_CHUNKS)
    chunks = Chunks(loop, work_before, total, build.var(CHUNKS), names)
    inner = chunks.bind_range(chunk, lambda first, last: replace(loop, start=first, stop=last))
    shared = Loop(CHUNK, build.const(0), chunks.count, inner, LoopKind.PARALLEL)
    return Let(WORK, before, Let(CHUNKS, count, shared))


def _first_with(
    work: Callable[[Expr], Expr],
    wanted: Expr,
    start: Expr,
    stop: Expr,
    near: tuple[Expr, Expr],
    names: Names,
    then: Callable[[Expr], Stmt],
) -> Stmt:
    """Emit `then` with the first iteration before which there is at least `wanted` work, found by binary search.

    near: a guess, which is exact if all iterations have the same work, and the distance from it to search first.
    """
    low, high = (build.register(names.fresh(internal_name(end))) for end in ("low", "high"))
    middle, goal, found = (names.fresh(internal_name(what)) for what in ("middle", "wanted", "first"))
    at = build.var(middle)
    is_less = build.lt(work(at), build.var(goal))
    half = build.div(build.add(Load(low, ()), Load(high, ())), 2)
    step = Let(middle, half, If(is_less, Store(low, (), build.add(at, 1)), Store(high, (), at)))
    search = While(build.lt(Load(low, ()), Load(high, ())), step)
    result = Let(found, Load(low, ()), then(build.var(found)))
    guess, around = near
    before, behind = (names.fresh(internal_name(what)) for what in ("before", "behind"))
    least, most = build.var(before), build.var(behind)
    is_behind = build.lt(work(least), build.var(goal))
    first = Store(low, (), build.select(is_behind, build.add(least, 1), start))
    last = Store(high, (), build.select(build.lt(work(most), build.var(goal)), stop, most))
    body: Stmt = Allocate((low, high), build.block(first, last, search, result))
    body = Let(behind, build.minimum(build.add(guess, around), stop), body)
    body = Let(before, build.maximum(build.sub(guess, around), start), body)
    return Let(goal, wanted, body)
