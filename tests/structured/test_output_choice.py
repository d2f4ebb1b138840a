"""How contractions limited by memory store their outputs, as the cost model chooses."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.structured.analysis.contraction_info import analyze_contraction
from tensor_comprehensions.structured.cost.plan_cost import completes_pages
from tensor_comprehensions.structured.cost.tile_cost import RegisterTile
from tensor_comprehensions.structured.language.plan_to_schedule import plan_to_schedule
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.planners import transposed_output
from tensor_comprehensions.structured.planners.candidates import schedule_candidates
from tensor_comprehensions.structured.planners.plan_variants import PackBothBlocking
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX512, CpuTarget
from tests.helpers.plan_facts import MESHED, STEM, count_chunks, list_packed_sides


@pytest.mark.parametrize(("n", "streams"), [(88, True), (90, False), (96, True)])
def test_rows_that_end_within_a_vector_do_not_go_past_the_caches(ops: Any, n: int, streams: bool) -> None:
    """Four rows of 90 floats end with half a line, but each with a part of a vector that is written to the caches."""
    sizes = {"e": 32, "b": 29, "d": 12, "c": n, "a": 17}
    op = ops.op("C:e,b,d,c = A:a,e,d x B:c,a,b", sizes)
    assert select_plan(op, MESHED, parallel=False).nontemporal is streams


def test_short_sums_write_wide_rows(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:k,n", {"m": 4096, "n": 4096, "k": 16})
    long = ops.op("C:m,n = A:m,k x B:k,n", {"m": 4096, "n": 4096, "k": 4096})
    assert select_plan(op, AVX512, parallel=True).tile("n") > select_plan(long, AVX512, parallel=True).tile("n")


TRIPLES = dict(zip("abcdefg", (24, 4, 12, 20, 5, 12, 6), strict=True))


def test_large_outputs_are_written_past_the_caches_by_whole_lines(ops: Any) -> None:
    op = ops.op("C:f,e,d,c,b,a = A:b,g,e,d x B:c,a,f,g", TRIPLES)
    small = replace(AVX512, cache=(32768, 1 << 20, 1 << 22))
    plan = select_plan(op, small, parallel=False)
    assert plan.nontemporal
    assert plan.vector == "a"
    assert plan.tile("a") * plan.tile("b") * 4 % 64 == 0


@pytest.mark.parametrize(
    ("text", "sizes", "last"),
    [
        ("C:f,e,d,c,b,a = A:b,g,e,d x B:c,a,f,g", TRIPLES, 1 << 25),  # it stays in the last cache
        ("C:f,e,d,c,b,a = A:b,g,e,d x B:c,a,f,g", TRIPLES | {"a": 23}, 1 << 22),  # no rows of whole lines
        ("C:m,n = A:m,k x B:k,n", {"m": 1024, "n": 1024, "k": 4096}, 1 << 22),  # partial sums are read again
    ],
)
def test_other_outputs_go_through_the_caches(ops: Any, text: str, sizes: dict[str, int], last: int) -> None:
    target = replace(AVX512, cache=(32768, 1 << 20, last))
    assert not select_plan(ops.op(text, sizes), target, parallel=False).nontemporal


@pytest.mark.parametrize("target", [MESHED, AVX512], ids=lambda t: t.name)
def test_rows_of_a_line_and_a_half_are_written_in_pairs(ops: Any, target: CpuTarget) -> None:
    sizes = dict(zip("abcdef", (24, 22, 24, 22, 24, 22), strict=True))
    op = ops.op("C:e,d,c,b,a = A:d,a,b,f,e x B:f,c", sizes)
    small = replace(target, cache=(*target.cache[:-1], 1 << 22))
    plan = select_plan(op, small, parallel=True)
    assert plan.nontemporal
    assert (plan.vector, plan.tile("b") % 2) == ("a", 0)
    odd = select_plan(ops.op("C:e,d,c,b,a = A:d,a,b,f,e x B:f,c", sizes | {"a": 23}), small, parallel=True)
    assert not odd.nontemporal


def test_an_output_that_is_read_goes_through_the_caches(ops: Any) -> None:
    plain = ops.op("C:m,n = A:m,k x B:k,n", {"m": 1024, "n": 1024, "k": 16})
    target = replace(AVX512, cache=(32768, 1 << 20, 1 << 22))
    assert select_plan(plain, target, parallel=False).nontemporal
    assert not select_plan(replace(plain, initial=plain.output), target, parallel=False).nontemporal


def test_register_tiles_that_are_stored_across_are_not_chosen_for_lines_past_the_caches(ops: Any) -> None:
    """Their output goes through the caches in any case."""
    op = ops.op("O:n,f,h,w = I:n,c,2*h+kh,2*w+kw x W:f,c,kh,kw", STEM)
    plan = select_plan(op, MESHED, parallel=True)
    assert not plan.nontemporal
    assert (plan.tile("f"), plan.tile("w")) == (32, 14)


def test_what_short_sums_write_decides_where_it_goes_to_a_far_cache(ops: Any) -> None:
    sizes = {"a": 24, "b": 20, "c": 20, "e": 480, "f": 20, "g": 24}
    plan = select_plan(ops.op("C:f,e,c,b,a = A:b,g,e x B:c,a,f,g", sizes), MESHED, parallel=True)
    assert plan.nontemporal
    assert plan.tile("f") == 1


CROSSED = [
    ("C:c,b,a = A:a,d,b x B:c,d", {"a": 384, "b": 384, "c": 24, "d": 384}, "b", "b"),  # the next part of a run
    ("C:d,c,b,a = A:a,e,b,d x B:c,e", {"a": 96, "b": 84, "c": 24, "d": 96, "e": 96}, "d", "b"),  # the next run
]


@pytest.mark.parametrize(("text", "sizes", "vector", "following"), CROSSED)
def test_results_are_turned_where_the_larger_factor_would_come_in_short_runs(
    ops: Any, text: str, sizes: dict[str, int], vector: str, following: str
) -> None:
    op = ops.op(text, sizes)
    plan = select_plan(op, MESHED, parallel=True)
    assert (plan.vector, list_packed_sides(plan), plan.nontemporal) == (vector, set(), True)
    assert plan.output_panel_depth == plan.parallel_depth
    assert [plan.levels[step.depth - 1].iterator for step in plan.prefetches] == [following]
    kept = {level.iterator: level.size for level in plan.levels[: plan.output_panel_depth]}
    assert prod(sizes[n] for n in "cbad" if n == vector or n == "c") * prod(kept.values()) * 4 <= MESHED.cache[1]
    assert any(c.schedule == plan_to_schedule(plan, op) for c in schedule_candidates(op, MESHED, 4))
    assert select_plan(op, AVX512, parallel=True).output_panel_depth is not None
    assert select_plan(replace(op, initial=op.output), MESHED, parallel=True).output_panel_depth is None


def test_long_runs_of_the_larger_factor_are_turned_as_they_come(ops: Any) -> None:
    sizes = {"a": 96, "b": 24, "c": 84, "d": 96, "e": 84}
    op = ops.op("C:d,c,b,a = A:a,c,e,d x B:e,b", sizes)
    assert select_plan(op, MESHED, parallel=True).output_panel_depth is None
    assert any("pack_output" in str(c.schedule) for c in schedule_candidates(op, MESHED, 16))


@pytest.mark.parametrize("sizes", [{"a": 24, "b": 20, "c": 6, "d": 28}, {"a": 19, "b": 33, "c": 5, "d": 27}], ids=str)
def test_results_that_are_turned_are_right(ops: Any, sizes: dict[str, int]) -> None:
    op = ops.op("C:c,b,a = A:a,d,b x B:c,d", sizes)
    small = replace(MESHED, vector_bits=128, vector_registers=16, cache=(1024, 1 << 15, 1 << 20))
    plans = list(transposed_output.transposed_output_plans(analyze_contraction(op), small, parallel=False))
    assert {list_packed_sides(plan) == set() for plan in plans} == {True, False}
    for plan in plans:
        arrays = ops.run(op, lower_contraction(op, small, parallel=False, plan=plan))
        assert np.array_equal(arrays["result"], np.einsum("adb,cd->cba", arrays["A"], arrays["B"]))


FAR_TRIPLES = dict(zip("abcdefg", (24, 20, 20, 24, 20, 20, 24), strict=True))


@pytest.mark.parametrize(
    "text", ["C:f,e,d,c,b,a = A:b,a,f,g x B:c,g,e,d", "C:f,e,d,c,b,a = A:b,g,e,d x B:c,a,f,g"], ids=["run", "apart"]
)
def test_small_factors_of_far_outputs_are_copied_whole_and_pages_completed(ops: Any, text: str) -> None:
    op = drop_unit_dims(ops.op(text, FAR_TRIPLES))
    plan = select_plan(op, MESHED, parallel=True)
    assert [step.depth for step in plan.packs] == [0, 0]
    assert completes_pages(analyze_contraction(op, plan.vector), plan, MESHED)
    assert count_chunks(plan, {i.name: i.extent for i in op.iterators}) >= 16
    assert all(step.depth for step in select_plan(op, AVX512, parallel=True).packs)


def test_far_outputs_of_short_sums_are_written_page_by_page(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:k,n", {"m": 4096, "n": 4096, "k": 32})
    plan = select_plan(op, MESHED, parallel=True)
    assert plan.nontemporal
    assert completes_pages(analyze_contraction(op), plan, MESHED)


def test_whole_copies_are_right_at_all_edges(ops: Any) -> None:
    op = ops.op("C:d,c,b,a = A:c,a,e x B:b,e,d", {"a": 19, "b": 5, "c": 3, "d": 7, "e": 6})
    known = analyze_contraction(op)
    tile = RegisterTile(4, (("a", 8), ("b", 2), ("d", 3)))
    plan = PackBothBlocking(known, MESHED, tile, False).plan()
    assert [level.iterator for level in plan.levels] == ["d", "c", "a", "b"]
    arrays = ops.run(op, lower_contraction(op, MESHED, parallel=False, plan=plan))
    assert np.array_equal(arrays["result"], np.einsum("cae,bed->dcba", arrays["A"], arrays["B"]))
