"""Reduce register values across the threads of a block, in an order that depends on sizes alone.

Lanes of a warp exchange values by shuffles, and warps exchange theirs in a shared array. If a group is neither whole
warps nor an aligned part of one, all its threads store to a shared array, and one thread adds the values up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..core.internal_names import internal_name
from ..machine import WARP_THREADS
from . import build
from . import nodes as ir
from .intrinsics import BARRIER, SHUFFLE_XOR
from .nodes import THREAD, Buffer, Launch, Loop, LoopKind, Space


@dataclass(frozen=True, slots=True)
class CrossThreadSum:
    """A register with each thread's partial result, to be combined by `op`; `name` prefixes new buffers."""

    register: Buffer
    op: str
    name: str


@dataclass(frozen=True, slots=True)
class CombineCode:
    """The code that combines registers, and the shared arrays that it needs."""

    body: ir.Stmt
    shared: tuple[Buffer, ...]


def block_thread_rank(launch: Launch) -> ir.Expr:
    """The linear index of a thread in its block; x runs fastest."""
    sizes = zip(THREAD, launch.block, strict=True)
    x, y, z = (build.var(name) if extent > 1 else build.const(0) for name, extent in sizes)
    return build.add(x, build.mul(build.add(y, build.mul(z, launch.block[1])), launch.block[0]))


def combine_across_threads(
    sums: Sequence[CrossThreadSum], launch: Launch, along: frozenset[int], *, again: bool
) -> CombineCode:
    """Combine each of `sums` over the thread dimensions `along`; threads with index 0 along these get the result.

    again: whether the code runs several times; then a barrier first protects the shared arrays of the previous time.
    All threads of the block must execute the code together.
    """
    group = _count_combining_threads(launch, along)
    if group is not None and group <= WARP_THREADS:
        return CombineCode(_within_warps(sums, group), ())
    if group is not None and group % WARP_THREADS == 0:
        return _across_warps(sums, launch, group // WARP_THREADS, again=again)
    return _across_threads(sums, launch, along, again=again)


def _count_combining_threads(launch: Launch, along: frozenset[int]) -> int | None:
    """The number of consecutive threads to combine, if that is a power of two or whole warps, else None."""
    inner = [count for k, count in enumerate(launch.block) if k <= max(along)]
    if any(k not in along and count > 1 for k, count in enumerate(inner)):
        return None
    size = prod(inner)
    aligned = size % WARP_THREADS == 0 or (size <= WARP_THREADS and size & (size - 1) == 0)
    return size if aligned else None


def _within_warps(sums: Sequence[CrossThreadSum], lanes: int) -> ir.Stmt:
    """A butterfly reduction over `lanes` consecutive lanes, all of which get the result."""
    steps: list[ir.Stmt] = []
    others = [Buffer(internal_name(s.name, "other"), s.register.type, (), (), Space.REGISTER) for s in sums]
    mask = lanes // 2
    while mask:
        steps += [
            ir.Invoke(SHUFFLE_XOR, ((o, ()), (s.register, ())), (mask, WARP_THREADS))
            for s, o in zip(sums, others, strict=True)
        ]
        steps += [ir.Store(s.register, (), ir.Load(o, ()), s.op) for s, o in zip(sums, others, strict=True)]
        mask //= 2
    return build.allocate(others, build.block(*steps)) if steps else build.NOTHING


def _across_warps(sums: Sequence[CrossThreadSum], launch: Launch, warps: int, *, again: bool) -> CombineCode:
    """Reduce each warp, then the results of the `warps` warps of each group."""
    threads = prod(launch.block)
    shared = [_shared_buffer(s, threads // WARP_THREADS) for s in sums]
    warp, lane = build.div(block_thread_rank(launch), WARP_THREADS), build.mod(block_thread_rank(launch), WARP_THREADS)
    if warps == 1:
        return CombineCode(_within_warps(sums, WARP_THREADS), ())
    stores = [ir.Store(b, (warp,), ir.Load(s.register, ())) for s, b in zip(sums, shared, strict=True)]
    first = build.mul(build.div(warp, warps), warps)
    if warps & (warps - 1) == 0 and warps <= WARP_THREADS:
        mine = build.add(first, build.mod(lane, warps))
        loads = [ir.Store(s.register, (), ir.Load(b, (mine,))) for s, b in zip(sums, shared, strict=True)]
        rest = build.block(*loads, _within_warps(sums, warps))
    else:
        rest = build.block(*(_sum_range(s, b, first, warps, 1) for s, b in zip(sums, shared, strict=True)))
    body = build.block(
        *_make_barrier_if_needed(again),
        _within_warps(sums, WARP_THREADS),
        build.when(build.eq(lane, 0), build.block(*stores)),
        *_make_barrier_if_needed(True),
        rest,
    )
    return CombineCode(body, tuple(shared))


def _across_threads(
    sums: Sequence[CrossThreadSum], launch: Launch, along: frozenset[int], *, again: bool
) -> CombineCode:
    """Every thread stores its part; the first thread of each group combines the parts of the group in order."""
    shared = [_shared_buffer(s, prod(launch.block)) for s in sums]
    leader: ir.Expr = build.TRUE
    position: ir.Expr = block_thread_rank(launch)
    stores = [ir.Store(b, (position,), ir.Load(s.register, ())) for s, b in zip(sums, shared, strict=True)]
    for k in along:
        leader = build.logical_and(leader, build.eq(build.var(THREAD[k]), 0))
    loops = [_sum_group(s, b, launch, sorted(along)) for s, b in zip(sums, shared, strict=True)]
    body = build.block(
        *_make_barrier_if_needed(again),
        *stores,
        *_make_barrier_if_needed(True),
        build.when(leader, build.block(*loops)),
    )
    return CombineCode(body, tuple(shared))


def _sum_group(s: CrossThreadSum, shared: Buffer, launch: Launch, along: Sequence[int]) -> ir.Stmt:
    """Combine the parts of the current thread's group in order."""
    place: ir.Expr = block_thread_rank(launch)
    steps = {k: prod(launch.block[:k]) for k in along}
    for k in along:
        place = build.add(place, build.mul(build.var(internal_name(s.name, f"part{k}")), steps[k]))
    neutral = ir.Store(s.register, (), build.neutral(s.op, s.register.type.dtype))
    body: ir.Stmt = ir.Store(s.register, (), ir.Load(shared, (place,)), s.op)
    for k in along:
        body = Loop(internal_name(s.name, f"part{k}"), build.const(0), build.const(launch.block[k]), body)
    return build.block(neutral, body)


def _sum_range(s: CrossThreadSum, shared: Buffer, first: ir.Expr, count: int, step: int) -> ir.Stmt:
    part = internal_name(s.name, "part")
    place = build.add(first, build.mul(build.var(part), step))
    neutral = ir.Store(s.register, (), build.neutral(s.op, s.register.type.dtype))
    body = ir.Store(s.register, (), ir.Load(shared, (place,)), s.op)
    return build.block(neutral, Loop(part, build.const(0), build.const(count), body, LoopKind.SERIAL))


def _shared_buffer(s: CrossThreadSum, count: int) -> Buffer:
    return build.buffer(internal_name(s.name, "parts"), s.register.type.dtype, (count,), Space.SHARED)


def _make_barrier_if_needed(needed: bool) -> tuple[ir.Stmt, ...]:
    return (ir.Invoke(BARRIER, (), ()),) if needed else ()
