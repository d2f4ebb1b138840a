"""Lower roles, single-thread bodies and barriers to loop IR."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.dtypes import UINT32
from ...core.errors import InternalError
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import WARP, WARPGROUP
from ...loop_ir.intrinsics import (
    BARRIER,
    BARRIER_ARRIVE,
    BARRIER_ARRIVE_CLUSTER,
    BARRIER_EXPECT,
    BARRIER_INIT,
    BARRIER_PART,
    BARRIER_WAIT,
    CLUSTER_BARRIER,
    ELECT,
    FENCE_ASYNC,
    FENCE_BARRIER_INIT,
    REGISTERS_DEC,
    REGISTERS_INC,
    WGMMA_WAIT,
)
from .. import specs
from ..builder.barriers import Barrier, BarrierArray
from ..builder.tile_views import THREAD_X
from ..tensors import ThreadTensor
from .warpgroup_products import WARPGROUP_INDEX, thread_range


def make_barriers(arrays: Sequence[BarrierArray]) -> ir.Stmt:
    """One thread initializes barriers; then all threads of the block or cluster synchronize, so that they see them."""
    made = [
        ir.Invoke(BARRIER_INIT, (Barrier(a, build.const(n)).place,), (a.arrivals * (a.blocks if a.everywhere else 1),))
        for a in arrays
        for n in range(a.count)
    ]
    first = build.when(build.eq(THREAD_X, 0), build.block(*made, ir.Invoke(FENCE_BARRIER_INIT, ())))
    return build.block(first, ir.Invoke(CLUSTER_BARRIER if arrays[0].blocks > 1 else BARRIER, ()))


def role_condition(threads: ThreadTensor) -> ir.Expr:
    """The condition that the current thread is in the role `threads`."""
    first, count = _find_thread_range(threads)
    number, (start, groups) = build.var(WARPGROUP_INDEX), (first // WARPGROUP, count // WARPGROUP)
    if groups == 1:
        return build.eq(number, start)
    return build.and_masks(build.ge(number, start) if start else None, build.lt(number, start + groups)) or build.TRUE


def elect_one(threads: ThreadTensor, body: ir.Stmt) -> ir.Stmt:
    """Run `body` in one thread of the first warp of `threads`."""
    first, _ = _find_thread_range(threads)
    chosen = build.register("chosen", UINT32)
    picked = ir.If(build.ne(build.load(chosen), build.const(0, UINT32)), body)
    meet = build.block(ir.Invoke(ELECT, ((chosen, ()),)), picked)
    condition = build.lt(THREAD_X, first + WARP)
    if first:
        condition = build.logical_and(build.ge(THREAD_X, first), condition)
    return ir.If(condition, build.allocate([chosen], meet))


def barrier_statement(node: specs.Node) -> ir.Stmt:
    """The statement of a synchronization node."""
    match node:
        case specs.Expect(barrier, count):
            return ir.Invoke(BARRIER_EXPECT, (barrier.place,), (count,))
        case specs.Wait(barrier, phase):
            return ir.Invoke(BARRIER_WAIT, (barrier.place,), (), (phase,))
        case specs.Arrive(barrier, threads):
            return _arrive_once(barrier) if threads is None else _arrive_per_warpgroup(barrier)
        case specs.SyncCluster():
            return ir.Invoke(CLUSTER_BARRIER, ())
        case specs.Fence():
            return ir.Invoke(FENCE_ASYNC, ())
        case specs.WaitProducts(groups):
            return ir.Invoke(WGMMA_WAIT, (), (groups,))
        case specs.SyncPart((_, count), number):
            return ir.Invoke(BARRIER_PART, (), (number, count))
        case specs.SetRegisterCount(count, grows):
            return ir.Invoke(REGISTERS_INC if grows else REGISTERS_DEC, (), (count,))
    raise InternalError(f"{type(node).__name__} has no statement")


def _arrive_once(barrier: Barrier) -> ir.Stmt:
    """An arrival of this thread, in all blocks of the cluster if the barrier is for all."""
    if not _is_for_cluster(barrier):
        return ir.Invoke(BARRIER_ARRIVE, (barrier.place,))
    return build.block(*(_arrive_in_block(barrier, build.const(n)) for n in range(barrier.array.blocks)))


def _arrive_per_warpgroup(barrier: Barrier) -> ir.Stmt:
    """An arrival of each warpgroup, in all blocks of the cluster if the barrier is for all.

    As many threads as blocks arrive, each in one block, so that one instruction arrives in all of them.
    """
    thread = build.mod(THREAD_X, WARPGROUP)
    if not _is_for_cluster(barrier):
        return ir.If(build.eq(thread, 0), ir.Invoke(BARRIER_ARRIVE, (barrier.place,)))
    return ir.If(build.lt(thread, barrier.array.blocks), _arrive_in_block(barrier, thread))


def _arrive_in_block(barrier: Barrier, block: ir.Expr) -> ir.Stmt:
    return ir.Invoke(BARRIER_ARRIVE_CLUSTER, (barrier.place,), (), (block,))


def _is_for_cluster(barrier: Barrier) -> bool:
    return barrier.array.everywhere and barrier.array.blocks > 1


def _find_thread_range(threads: ThreadTensor) -> tuple[int, int]:
    found = thread_range(threads)
    if found is None:
        raise InternalError(f"{threads} are no neighbors")
    return found
