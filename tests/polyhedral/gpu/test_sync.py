"""Barriers: the fewest that order all conflicts, and none where threads keep to themselves."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.polyhedral.gpu import lower_gpu
from tensor_comprehensions.polyhedral.gpu.emit.lower_kernel import collective_names
from tensor_comprehensions.polyhedral.gpu.plan.mapping import KernelPlan, kernel_tree
from tensor_comprehensions.polyhedral.gpu.tree.barrier_placement import SyncLevel, Wait, kernel_barriers, place_barriers
from tensor_comprehensions.polyhedral.gpu.tree.verify_kernel import check_kernel
from tensor_comprehensions.polyhedral.scop.scop import LOCK, Scop
from tensor_comprehensions.target import parse_gpu_target
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

SOFTMAX = """
def softmax(float(N,D) X) -> (O) {
    m(n) max=! X(n,d)
    e(n,d) = exp(X(n,d) - m(n))
    s(n) +=! e(n,d)
    O(n,d) = e(n,d) / s(n)
}"""
H200 = parse_gpu_target("cuda:sm_90")


def legal(levels: tuple[SyncLevel, ...], waits: list[Wait]) -> bool:
    return all(max(levels[w.before + 1 : w.after + 1]) >= w.level for w in waits)


def cost(levels: tuple[SyncLevel, ...]) -> tuple[int, int]:
    return levels.count(SyncLevel.BLOCK), levels.count(SyncLevel.WARP)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_as_few_barriers_as_any_choice_that_orders_all_waits(count: int) -> None:
    rng = random.Random(count)
    pairs = list(itertools.combinations(range(count), 2))
    for _ in range(50):
        waits = [Wait(a, b, rng.choice(list(SyncLevel)[1:])) for a, b in pairs if rng.random() < 0.5]
        found = place_barriers(count, waits)
        assert legal(found, waits)
        every = itertools.product(SyncLevel, repeat=count)
        assert cost(found) == min(cost(levels) for levels in every if legal(levels, waits))


def kernel(source: str, options: MappingOptions, **sizes: int) -> tuple[Scop, KernelPlan]:
    (function,) = compile_source(source)
    scop = lower_gpu._scop(legalize(bind(function, sizes)), options, H200)
    (plan,) = lower_gpu._plans(scop, options, H200)
    return scop, plan


def levels_of(source: str, options: MappingOptions, **sizes: int) -> tuple[SyncLevel, ...]:
    with LOCK:
        return kernel_barriers(*kernel(source, options, **sizes))


WHOLE_ROW = MappingOptions(tile=(1,), threads=(128,), cooperative_reductions=True)
ROW_OF_A_WARP = MappingOptions(tile=(4,), threads=(32, 4), cooperative_reductions=True)
POINTWISE = "def f(float(N,D) X) -> (O) { T(n,d) = X(n,d) + 1  O(n,d) = T(n,d) * 2  O(n,d) += T(n,d) }"
APART = MappingOptions(tile=(8, 32), threads=(16, 4), intra_tile_fusion="min")


def test_the_block_waits_for_the_sums_of_a_row() -> None:
    found = levels_of(SOFTMAX, WHOLE_ROW, N=8, D=500)
    assert found[1:].count(SyncLevel.BLOCK) == len(found) - 1


def test_only_warps_wait_where_a_warp_has_the_row() -> None:
    found = levels_of(SOFTMAX, ROW_OF_A_WARP, N=8, D=500)
    assert SyncLevel.BLOCK not in found
    assert SyncLevel.WARP in found


def test_nobody_waits_where_threads_keep_to_their_elements() -> None:
    assert levels_of(POINTWISE, APART, N=64, D=50) == (SyncLevel.NONE,) * 3


@pytest.mark.parametrize("options", [WHOLE_ROW, ROW_OF_A_WARP], ids=["block", "warp"])
def test_the_checker_accepts_what_is_right_and_finds_what_is_missing(options: MappingOptions) -> None:
    with LOCK:
        scop, plan = kernel(SOFTMAX, options, N=8, D=500)
        levels = kernel_barriers(scop, plan)
        mapped = kernel_tree(plan, collective_names(levels))
        check_kernel(scop, plan, mapped, levels)
        for k, level in enumerate(levels):
            if level is not SyncLevel.NONE:
                fewer = tuple(SyncLevel.NONE if n == k else other for n, other in enumerate(levels))
                with pytest.raises(InternalError, match="barrier"):
                    check_kernel(scop, plan, kernel_tree(plan, collective_names(fewer)), fewer)


def test_the_checker_finds_leaves_in_the_wrong_order() -> None:
    with LOCK:
        scop, plan = kernel(SOFTMAX, WHOLE_ROW, N=8, D=500)
        swapped = replace(plan, leaves=tuple(reversed(plan.leaves)))
        levels = tuple(SyncLevel.BLOCK for _ in plan.leaves)
        with pytest.raises(InternalError, match="backwards"):
            check_kernel(scop, plan, kernel_tree(swapped, collective_names(levels)), levels)


def test_the_checker_finds_blocks_that_conflict() -> None:
    options = MappingOptions(tile=(4,), threads=(32,), outer_fusion="min")
    source = "def f(float(N) X) -> (O) { O(n) = X(n)  O(n) += X(n) }"
    with LOCK:
        (function,) = compile_source(source)
        scop = lower_gpu._scop(legalize(bind(function, {"N": 64})), options, H200)
        first, second = lower_gpu._plans(scop, options, H200)
        (row,) = second.group.rows
        (name, (index, _)) = row.places[0]
        shifted = replace(row, places=((name, (index, 4)), *first.group.rows[0].places))
        group = replace(first.group, nodes=(*first.group.nodes, *second.group.nodes), rows=(shifted,))
        plan = replace(first, group=group, leaves=(*first.leaves, *second.leaves))
        levels = tuple(SyncLevel.BLOCK for _ in plan.leaves)
        with pytest.raises(InternalError, match="blocks conflict"):
            check_kernel(scop, plan, kernel_tree(plan, collective_names(levels)), levels)
