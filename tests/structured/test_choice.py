"""Tiles, panels, loop orders and threads that the cost model chooses for contractions limited by memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, FLOAT64
from tensor_comprehensions.loop_ir.nodes import Type
from tensor_comprehensions.structured.analysis.contraction_info import analyze_contraction
from tensor_comprehensions.structured.cost.plan_cost import plan_cycles
from tensor_comprehensions.structured.cost.tile_cost import RegisterTile
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.plan import Side
from tensor_comprehensions.structured.planners.blocking import BlockingHeuristic
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget
from tests.helpers.plan_facts import MESHED, STEM, count_chunks, list_packed_sides

LARGE = {"a": 48, "b": 46, "c": 46, "d": 48, "e": 46, "f": 46}


@pytest.mark.parametrize("right", ["B:e,c,f,d", "B:e,c,d,f"])
def test_scalars_in_short_runs_from_afar_are_packed(ops: Any, right: str) -> None:
    op = ops.op(f"C:d,c,b,a = A:f,b,e,a x {right}", LARGE)
    plan = select_plan(op, AVX512, parallel=True)
    assert list_packed_sides(plan) == {Side.LEFT, Side.RIGHT}
    assert count_chunks(plan, LARGE) >= 2


def test_scalars_in_long_runs_are_read_in_place(ops: Any) -> None:
    sizes = {"m": 1024, "n": 1024, "k": 1024}
    assert list_packed_sides(select_plan(ops.op("C:m,n = A:m,k x B:n,k", sizes), AVX512, parallel=True)) == {Side.RIGHT}


@pytest.mark.parametrize("output", ["C:m,n", "C:n,m"])
@pytest.mark.parametrize(("k", "lines"), [(512, 16), (1000, 512), (1024, 8), (4096, 8)])
def test_rows_in_place_fit_the_sets_of_the_first_cache(ops: Any, output: str, k: int, lines: int) -> None:
    sizes = {"m": 16, "n": 2752, "k": k}
    plan = select_plan(ops.op(f"{output} = A:m,k x B:n,k", sizes), AVX512, parallel=False)
    assert list_packed_sides(plan) == {Side.LEFT}
    assert 8 <= plan.tile("n") <= lines


@pytest.mark.parametrize("n", [500, 777, 1000])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_squares_copy_one_factor_and_have_enough_for_threads(ops: Any, n: int, dtype: Any) -> None:
    sizes = {"m": n, "n": n, "k": n}
    plan = select_plan(ops.op("C:m,n = A:m,k x B:k,n", sizes, dtype), AVX512, parallel=True)
    assert list_packed_sides(plan) == {Side.RIGHT}
    assert all(level.iterator != "k" for level in plan.levels)
    assert count_chunks(plan, sizes) >= 7


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
def test_panels_stand_together_where_the_last_cache_is_far(ops: Any, dtype: Any) -> None:
    sizes = {"m": 2048, "n": 2048, "k": 2048}
    op = ops.op("C:m,n = A:m,k x B:k,n", sizes, dtype)
    plan = select_plan(op, MESHED, parallel=True)
    block, panel = (level.size for level in plan.levels if level.iterator == "n")
    (steps,) = (level.size for level in plan.levels if level.iterator == "k")
    assert block >= 2 * panel
    assert block * steps * dtype.size <= MESHED.cache[1] // 2
    assert count_chunks(plan, sizes) >= 4
    near = select_plan(op, AVX512, parallel=True)
    assert [level.iterator for level in near.levels] == ["n", "m"]


def test_panels_that_stand_together_are_right_at_all_edges(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:n,k", {"m": 25, "n": 50, "k": 70})
    small = replace(MESHED, vector_bits=128, vector_registers=16, cache=(1024, 8192, 1 << 20))
    plan = select_plan(op, small, parallel=False)
    assert [level.iterator for level in plan.levels] == ["n", "k", "m", "n"]
    arrays = ops.run(op, lower_contraction(op, small, parallel=False))
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"].T)


def test_panels_are_copied_from_long_runs_where_the_last_cache_is_far(ops: Any) -> None:
    sizes = {"m": 512, "n": 512, "k": 512}
    op = ops.op("C:m,n = A:m,k x B:k,n", sizes)
    plan = select_plan(op, MESHED, parallel=False)
    block, _ = (level.size for level in plan.levels if level.iterator == "n")
    assert list_packed_sides(plan) == {Side.RIGHT}
    assert 1024 <= block * 4 <= 1536 < 2 * block * 4
    assert block * 512 * 4 <= MESHED.cache[1] // 2
    assert [level.iterator for level in select_plan(op, AVX512, parallel=False).levels] == ["n", "m"]
    turned = select_plan(ops.op("C:m,n = A:m,k x B:n,k", sizes), MESHED, parallel=False)  # its runs are along k
    assert [level.iterator for level in turned.levels] == ["n", "m"]


@pytest.mark.parametrize("n", [170, 200, 255, 350])
def test_few_vectors_lie_across_lines_of_the_second_cache(ops: Any, n: int) -> None:
    def vectors(size: int) -> int:
        op = ops.op("C:m,n = A:m,k x B:k,n", {"m": size, "n": size, "k": size})
        return select_plan(op, MESHED, parallel=False).vectors

    assert vectors(n) <= 4
    assert vectors(192) == 6


@pytest.mark.parametrize("target", [AVX512, MESHED], ids=lambda t: t.name)
def test_lanes_of_a_sum_are_blocked_where_partial_sums_are_exact(ops: Any, target: CpuTarget) -> None:
    """Both factors go on along k where the lanes l end: c(i,j,l) is a part of a sum over (k,l)."""
    sizes = {"i": 18, "j": 32, "h": 16, "k": 62, "l": 16}
    op = ops.op("C:i,j,l = A:i,h,k,l x B:j,h,k,l", sizes)
    assert analyze_contraction(op).keeps_lanes_of_sum
    plan = select_plan(op, target, parallel=False)
    assert [level.iterator for level in plan.levels].count("h") == 1
    assert not plan.packs
    half = replace(op, output=replace(op.output, buffer=replace(op.output.buffer, type=Type(FLOAT16))))
    assert all(level.iterator not in "hk" for level in select_plan(half, target, parallel=False).levels)
    batched = ops.op("C:i,j,l = A:i,k,l x B:k,j,l", {"i": 18, "j": 32, "k": 62, "l": 160})
    assert not analyze_contraction(batched).keeps_lanes_of_sum


def test_what_fills_half_of_the_second_cache_is_copied_before_a_far_one(ops: Any) -> None:
    def packs(m: int, n: int, k: int, target: CpuTarget) -> set[Side]:
        return list_packed_sides(
            select_plan(ops.op("C:m,n = A:m,k x B:k,n", {"m": m, "n": n, "k": k}), target, parallel=False)
        )

    assert packs(500, 500, 500, MESHED) == {Side.RIGHT}
    assert packs(450, 450, 450, MESHED) == set()
    assert packs(480, 512, 256, MESHED) == set()  # rows 2 KiB apart, which prefetching still follows
    assert packs(480, 512, 256, AVX512) == {Side.RIGHT}


def test_blocks_of_a_sum_do_not_cut_the_lines_of_memory(ops: Any) -> None:
    sizes = {"a": 96, "b": 96, "c": 84, "d": 84, "e": 96, "f": 84}
    plan = select_plan(ops.op("C:d,c,b,a = A:c,f,a,e x B:e,d,f,b", sizes), AVX512, parallel=True)
    assert {level.iterator for level in plan.levels} & {"e", "f"} == {"f"}  # e is contiguous in A
    assert list_packed_sides(plan) == {Side.LEFT, Side.RIGHT}
    assert plan.reductions == ("f", "e")  # of a block, f has fewer


def test_panels_nearly_fill_a_second_cache_before_a_far_one(ops: Any) -> None:
    sizes = {"a": 48, "b": 48, "c": 46, "d": 46, "e": 48, "f": 46}
    op = ops.op("C:d,c,b,a = A:c,f,a,e x B:e,d,f,b", sizes)
    plan = select_plan(op, MESHED, parallel=True)
    assert list_packed_sides(plan) == {Side.LEFT, Side.RIGHT}
    assert plan.vector == "a"


def test_scalars_that_every_tile_would_fetch_again_are_packed(ops: Any) -> None:
    sizes = dict(zip("abcdefg", (16, 12, 12, 16, 12, 12, 16), strict=True))
    lines_of_many_tiles = "C:f,e,d,c,b,a = A:b,g,e,d x B:c,a,f,g"  # one row is pages apart from the next
    lines_of_one_tile = "C:f,e,d,c,b,a = A:b,e,d,g x B:c,a,f,g"
    many, one = (ops.op(text, sizes) for text in (lines_of_many_tiles, lines_of_one_tile))
    many, one = (replace(op, initial=op.output) for op in (many, one))  # else whole copies pay
    assert Side.LEFT in list_packed_sides(select_plan(many, MESHED, parallel=True))
    assert Side.LEFT not in list_packed_sides(select_plan(one, MESHED, parallel=True))


@pytest.mark.parametrize(("storage", "packed"), [(FLOAT16, {Side.LEFT, Side.RIGHT}), (FLOAT32, set())])
def test_scalars_that_few_panels_read_are_converted_once(ops: Any, storage: Any, packed: set[Side]) -> None:
    sizes = {"m": 1026, "n": 48, "k": 64}
    op = ops.op("C:m,n = A:m,k x B:k,n", sizes, storage=storage)
    blocking = BlockingHeuristic(analyze_contraction(op), AVX2, RegisterTile(8, (("m", 6), ("n", 16))), parallel=False)
    assert list_packed_sides(blocking.plan()) == packed


def test_lanes_run_across_where_the_large_factor_need_not_be_turned_then(ops: Any) -> None:
    sizes = {"a": 384, "b": 24, "c": 376, "d": 384}
    plan = select_plan(ops.op("C:c,b,a = A:a,c,d x B:d,b", sizes), AVX512, parallel=True)
    assert plan.vector == "b"
    assert list_packed_sides(plan) == {Side.RIGHT}


def test_rows_from_afar_are_read_in_place_few_vectors_at_a_time(ops: Any) -> None:
    sizes = {"a": 192, "b": 168, "c": 162, "d": 162}
    text = "C:c,b,a = A:c,d,a x B:d,b"
    near = sizes | {"c": 8}  # the second cache holds all of it
    assert select_plan(ops.op(text, sizes), MESHED, parallel=True).tile("a") == 64
    assert select_plan(ops.op(text, near), MESHED, parallel=True).tile("a") == 96


def test_panels_leave_room_for_what_they_are_filled_with_from_afar(ops: Any) -> None:
    sizes = {"a": 168, "b": 168, "c": 24, "d": 168}
    plan = select_plan(ops.op("C:c,b,a = A:a,d,b x B:c,d", sizes), MESHED, parallel=True)
    (block,) = (level.size for level in plan.levels if level.iterator == "b" and level.size > 1)
    assert block * plan.tile("a") * sizes["d"] * 4 <= MESHED.cache[1] // 3


def test_rows_of_a_tile_share_cache_lines(ops: Any) -> None:
    op = ops.op("C:c,b,a = A:d,a x B:c,d,b", {"a": 168, "b": 168, "c": 162, "d": 162})
    plan = select_plan(op, AVX512, parallel=True)
    assert plan.tile("b") > 1
    assert plan.tile("c") == 1


def test_columns_are_shared_where_rows_make_one_block(ops: Any) -> None:
    sizes = {"c": 108, "b": 60, "a": 40, "d": 72, "e": 60}
    op = ops.op("C:c,b,a = A:c,e,d,a x B:d,b,e", sizes)
    assert count_chunks(select_plan(op, AVX512, parallel=True), sizes) > 1


@pytest.mark.parametrize(
    ("rows", "steps", "packs"),
    [
        (201, 340, True),
        (201, 80, False),  # a panel stays in L1, partial lines included
        (24, 340, False),  # too few rows to pay for a copy
        (24, 5280, True),  # but a panel in place does not even stay in L2
    ],
)
def test_rows_across_lines_are_packed_where_l2_would_be_too_slow(ops: Any, rows: int, steps: int, packs: bool) -> None:
    known = analyze_contraction(ops.op("C:m,n = A:k,m x B:k,n", {"m": rows, "n": 161, "k": steps}), "n")
    tile, larger = RegisterTile(8, (("n", 24), ("m", 3))), RegisterTile(16, (("n", 48), ("m", 8)))
    assert BlockingHeuristic(known, AVX2, tile, False).packs_vector_operand() is packs
    assert not BlockingHeuristic(known, AVX512, larger, False).packs_vector_operand()  # more multiply-adds for a line


def test_reductions_that_move_the_scalars_least_are_innermost(ops: Any) -> None:
    sizes = {"a": 8, "b": 64, "c": 5, "d": 7}
    assert analyze_contraction(ops.op("C:a,b = A:d,c,a x B:b,c,d", sizes)).reductions == ("d", "c")
    assert analyze_contraction(ops.op("C:a,b = A:c,a,d x B:b,d,c", sizes)).reductions == ("c", "d")


@pytest.mark.parametrize(("columns", "order"), [(64, ("d", "c")), (512, ("c", "d"))])
def test_few_rows_leave_the_order_of_sums_to_the_larger_factor(ops: Any, columns: int, order: tuple[str, str]) -> None:
    sizes = {"a": 5, "b": columns, "c": 25, "d": 78}
    assert analyze_contraction(ops.op("C:a,b = A:a,d,c x B:c,d,b", sizes)).reductions == order


@pytest.mark.parametrize(
    ("text", "sizes", "einsum"),
    [
        ("C:d,c,b,a = A:f,b,e,a x B:e,c,d,f", {"a": 20, "b": 6, "c": 3, "d": 5, "e": 3, "f": 4}, "fbea,ecdf->dcba"),
        ("C:b,a = A:d,c,a x B:c,b,d", {"a": 104, "b": 9, "c": 6, "d": 5}, "dca,cbd->ba"),
        ("C:e,d,c,b,a = A:a,f,b,c,e x B:d,f", dict(zip("abcdef", (9, 2, 3, 7, 6, 5), strict=True)), "afbce,df->edcba"),
    ],
)
def test_what_large_operands_get_is_right_for_small_ones(
    ops: Any, text: str, sizes: dict[str, int], einsum: str
) -> None:
    op = ops.op(text, sizes)
    small = replace(AVX512, cache=(256, 512, 8192))
    arrays = ops.run(op, lower_contraction(op, small, parallel=False))
    assert np.array_equal(arrays["result"], np.einsum(einsum, arrays["A"], arrays["B"]))


@pytest.mark.parametrize(("target", "extent", "joined"), [(MESHED, 24, 2), (MESHED, 32, 1), (AVX512, 24, 1)], ids=str)
def test_rows_share_registers_where_vectors_of_one_would_have_idle_lanes(
    ops: Any, target: CpuTarget, extent: int, joined: int
) -> None:
    sizes = {"f": 20, "e": 20, "d": extent, "x": 400, "a": extent, "g": 24}
    plan = select_plan(ops.op("C:f,e,d,x,a = A:a,g,f,d x B:x,e,g", sizes), target, parallel=False)
    assert plan.vectors_per_register == joined


@pytest.mark.parametrize(
    ("target", "filters", "channels", "streams"),
    [
        (MESHED, 256, 64, True),  # half as much again as the second cache holds
        (MESHED, 128, 64, False),  # it holds nearly all of it
        (MESHED, 256, 256, False),  # the sums hide what is written
        (AVX512, 256, 64, False),  # the last cache is near
    ],
)
def test_short_sums_leave_the_second_cache_to_what_they_read(
    ops: Any, target: CpuTarget, filters: int, channels: int, streams: bool
) -> None:
    sizes = {"x": 3136, "f": filters, "c": channels}
    plan = select_plan(ops.op("C:f,x = A:f,c x B:c,x", sizes), target, parallel=True)
    assert plan.nontemporal is streams
    if streams:  # rows far apart stay where they are, for nothing takes their place
        assert list_packed_sides(plan) == set()
        assert [step.side for step in plan.prefetches] == [Side.RIGHT]


def test_panels_that_are_turned_hold_long_runs_of_memory(ops: Any) -> None:
    sizes = dict(zip("abcdef", (48, 36, 36, 24, 48, 48), strict=True))
    op = ops.op("C:e,d,c,b,a = A:a,f,b,c,e x B:d,f", sizes)
    plan = select_plan(replace(op, initial=op.output), AVX512, parallel=True)  # so that results go to no panel
    (pack,) = plan.packs
    inside = {level.iterator for level in plan.levels[pack.depth :]}
    assert plan.tile("a") == 16  # one line of the output
    assert {"c", "e"} <= inside  # where c ends in memory, e begins anew
    assert pack.side is Side.LEFT


@pytest.mark.parametrize(
    ("sizes", "target", "ahead"),
    [
        ({"f": 64, "p": 3136, "c": 256}, MESHED, True),
        ({"f": 64, "p": 3136, "c": 256}, AVX512, False),  # its last cache is near
        ({"f": 64, "p": 784, "c": 256}, MESHED, False),  # the second cache holds all of it
        ({"f": 64, "p": 4096, "c": 256}, MESHED, False),  # rows compete for lines of the first cache
        ({"f": 2048, "p": 3136, "c": 256}, MESHED, False),  # used often enough to be copied
    ],
)
def test_rows_far_apart_are_read_in_place_where_they_can_come_ahead(
    ops: Any, sizes: dict[str, int], target: CpuTarget, ahead: bool
) -> None:
    plan = select_plan(ops.op("O:f,p = W:f,c x I:c,p", sizes), target, parallel=True)
    assert [step.side for step in plan.prefetches] == [Side.RIGHT] * ahead
    assert Side.RIGHT not in list_packed_sides(plan) or not ahead


def test_rows_of_few_sets_come_ahead_where_the_first_cache_has_room_for_all(ops: Any) -> None:
    """96 rows, 8 sets of 12 lines apart from one another."""
    op = "C:d,c,b = A:c,e x B:d,e,b"
    assert select_plan(ops.op(op, {"d": 84, "c": 84, "b": 8064, "e": 96}), MESHED, parallel=True).prefetches
    assert not select_plan(ops.op(op, {"d": 84, "c": 84, "b": 8064, "e": 128}), MESHED, parallel=True).prefetches


def test_short_rows_that_follow_one_another_are_one_run(ops: Any) -> None:
    follow = select_plan(ops.op("C:r,a = A:a,e x B:r,e", {"r": 592704, "a": 96, "e": 96}), MESHED, parallel=True)
    assert list_packed_sides(follow) == {Side.LEFT}
    apart = select_plan(ops.op("C:r,a = A:a,e x B:e,r", {"r": 592704, "a": 96, "e": 96}), MESHED, parallel=True)
    assert list_packed_sides(apart) == {Side.LEFT, Side.RIGHT}


def test_as_many_steps_as_tiles_share_the_rows_that_come_ahead(ops: Any) -> None:
    for rows, steps in ((16, 2), (64, 8)):
        op = ops.op("O:f,p = W:f,c x I:c,p", {"f": rows, "p": 3136, "c": 256})
        assert select_plan(op, MESHED, parallel=False).unroll_steps == steps


def test_a_register_tile_has_two_vectors_where_a_core_is_shared(ops: Any) -> None:
    op = ops.op("O:f,h,w = W:f,c x I:c,h,2*w", {"f": 64, "h": 112, "w": 112, "c": 147})
    plan = select_plan(op, MESHED, parallel=False)
    assert (plan.vector, plan.tile("f") > 16) == ("f", True)


DEEP = {"n": 8, "f": 64, "h": 56, "w": 56, "c": 64, "kh": 3, "kw": 3}


@pytest.mark.parametrize(
    ("sizes", "stride", "target", "outer"),
    [(STEM, 2, MESHED, True), (STEM, 2, AVX512, False), (DEEP, 1, MESHED, False)],
    ids=("fits", "near", "too long"),
)
def test_panels_in_the_first_cache_meet_an_image_at_once_where_the_last_one_is_far(
    ops: Any, sizes: dict[str, int], stride: int, target: CpuTarget, outer: bool
) -> None:
    image = f"I:n,c,{stride}*h+kh,{stride}*w+kw"
    plan = select_plan(ops.op(f"O:n,f,h,w = {image} x W:f,c,kh,kw", sizes), target, parallel=True)
    assert plan.vector == "f"
    assert plan.depth("n") < plan.depth("f")
    assert (plan.depth("f") < plan.depth("h")) is outer


@pytest.mark.parametrize("target", [AVX512, MESHED], ids=lambda t: t.name)
def test_a_factor_that_few_rows_meet_is_not_turned(ops: Any, target: CpuTarget) -> None:
    """The few rows are, and threads share the long runs of the output."""
    text, sizes = "C:m,n = A:m,k x B:n,k", {"m": 64, "n": 768, "k": 768}
    plan = select_plan(ops.op(text, sizes), target, parallel=True)
    assert plan.vector == "m"
    assert [level.iterator for level in plan.levels[: plan.parallel_depth]] == ["n"]
    assert [step.side for step in plan.packs] == [Side.LEFT]
    assert select_plan(ops.op(text, {**sizes, "m": 256}), target, parallel=True).vector == "n"


def test_every_other_element_of_a_row_is_packed_by_vectors_for_long_sums(ops: Any) -> None:
    """Copying is cheap, and what is written in parts of lines comes from memory beside the sums."""
    sizes = {"n": 8, "f": 512, "h": 28, "w": 28, "c": 256}
    plan = select_plan(ops.op("O:n,f,h,w = I:n,c,2*h,2*w x W:f,c", sizes), MESHED, parallel=True)
    assert (plan.vector, list_packed_sides(plan), plan.nontemporal) == ("w", {Side.LEFT}, False)


@pytest.mark.parametrize(("target", "both"), [(MESHED, True), (AVX512, False)], ids=("far", "near"))
def test_blocks_of_a_long_sum_come_from_a_far_cache_once(ops: Any, target: CpuTarget, both: bool) -> None:
    sizes = {"a": 384, "b": 376, "c": 47, "d": 384, "p": 8}
    plan = select_plan(ops.op("C:p,b,a = A:d,p,c,a x B:p,c,b,d", sizes), target, parallel=True)
    loops = [level.iterator for level in plan.levels]
    assert (list_packed_sides(plan) == {Side.LEFT, Side.RIGHT}) is both
    assert (loops.index("c") < loops.index("a")) is both


def test_scalars_are_not_read_again_from_a_far_cache(ops: Any) -> None:
    sizes = {"a": 96, "b": 84, "c": 84, "d": 84, "e": 96}
    assert select_plan(ops.op("C:c,b,a = A:c,e,d,a x B:d,b,e", sizes), MESHED, parallel=True).vector == "a"


def test_scalars_of_short_sums_are_packed_where_tiles_would_fetch_their_lines_again(ops: Any) -> None:
    sizes = {"a": 24, "b": 20, "c": 20, "d": 24, "e": 20, "f": 20, "g": 24}
    plan = select_plan(ops.op("C:f,e,d,c,b,a = A:c,a,e,g x B:b,g,f,d", sizes), MESHED, parallel=True)
    assert plan.nontemporal
    assert list_packed_sides(plan) == {Side.LEFT, Side.RIGHT}
    assert plan.tile("b") * plan.tile("a") * 4 % 64 == 0


def test_panels_hold_pairs_of_lines_of_what_comes_from_afar(ops: Any) -> None:
    sizes = {"a": 384, "b": 384, "c": 24, "d": 384}
    op = ops.op("C:c,b,a = A:a,d,b x B:c,d", sizes)
    plan = select_plan(replace(op, initial=op.output), MESHED, parallel=True)
    (pack,) = plan.packs
    (block,) = (level.size for level in plan.levels[: pack.depth] if level.iterator == "b")
    assert (plan.vector, plan.tile("b")) == ("a", 1)
    assert block * 4 % MESHED.fetch_bytes == 0
    assert block * plan.tile("a") * 384 * 4 <= MESHED.cache[1]


def test_rows_that_follow_short_sums_come_from_afar_with_them(ops: Any) -> None:
    sizes = {"a": 96, "b": 84, "c": 24, "d": 84, "e": 96}
    op = ops.op("C:d,c,b,a = A:d,a,b,e x B:e,c", sizes)
    plan = select_plan(op, MESHED, parallel=True)
    assert [level.iterator for level in plan.levels[:3]] == ["d", "a", "b"]
    assert plan.levels[2].size * sizes["e"] * 4 >= 4096  # bytes of a run
    assert plan.tile("a") <= 48  # runs that are copied side by side
    assert plan.packs[0].depth == 3
    assert [level.size for level in select_plan(op, AVX512, parallel=True).levels if level.iterator == "b"] == [1]


def test_runs_that_follow_one_another_are_copied_one_after_the_other(ops: Any) -> None:
    sizes = {"a": 96, "b": 84, "c": 24, "d": 96, "e": 96}
    op = ops.op("C:d,c,b,a = A:a,e,b,d x B:c,e", sizes)
    plan = select_plan(replace(op, initial=op.output), MESHED, parallel=True)
    (pack,) = plan.packs
    around = [level.iterator for level in plan.levels[: pack.depth]]
    assert around.index("a") < around.index("b")
    assert "d" not in around  # memory goes on there


@pytest.mark.parametrize(
    ("text", "both"), [("C:f,e,c,a = A:a,g,e x B:c,f,g", True), ("C:f,e,c,a = A:a,g,c x B:e,g,f", False)]
)
def test_scalars_in_short_runs_from_the_second_cache_are_packed(ops: Any, text: str, both: bool) -> None:
    sizes = {"a": 24, "c": 400, "e": 480, "f": 20, "g": 24}
    plan = select_plan(ops.op(text, sizes), MESHED, parallel=True)
    assert plan.nontemporal
    assert (list_packed_sides(plan) == {Side.LEFT, Side.RIGHT}) is both


def test_panels_that_each_tile_reads_from_the_second_cache_are_narrow(ops: Any) -> None:
    op = ops.op("C:c,b,a = A:d,a x B:c,d,b", {"a": 384, "b": 384, "c": 64, "d": 376})
    plan = select_plan(op, MESHED, parallel=True)
    assert plan.nontemporal
    assert not plan.packs
    assert (plan.tile("a"), plan.tile("b")) == (64, 6)


@pytest.mark.parametrize(("extent", "shared"), [(64, False), (96, True), (160, True)])
def test_threads_share_what_they_are_expected_to_finish_sooner(ops: Any, extent: int, shared: bool) -> None:
    op = drop_unit_dims(ops.op("C:m,n = A:m,k x B:k,n", dict.fromkeys("mnk", extent)))
    assert bool(select_plan(op, MESHED, parallel=True).parallel_depth) is shared
    assert not select_plan(op, MESHED, parallel=False).parallel_depth


def test_three_shares_of_little_work_stay_with_one_thread(ops: Any) -> None:
    """Two threads would take as long as two of the three shares, and longer than that to begin."""
    sizes = {"o": 16, "h": 16, "w": 16, "c": 16, "y": 3, "x": 3}
    op = drop_unit_dims(ops.op("C:o,h,w = A:c,h+y,w+x x B:o,c,y,x", sizes))
    assert count_chunks(select_plan(op, MESHED, parallel=True), sizes) != 3


def test_what_the_second_cache_holds_is_not_read_from_memory(ops: Any) -> None:
    """Narrow outputs waste lanes, which reading what is near does not hide."""
    cycles = []
    for text in ("C:i,j = A:i,k x B:k,j", "C:j,i = A:i,k x B:k,j"):
        op = drop_unit_dims(ops.op(text, {"i": 7, "j": 2000, "k": 50}))
        cycles.append(plan_cycles(op, select_plan(op, MESHED, parallel=False), MESHED))
    assert cycles[0] < 0.8 * cycles[1]
