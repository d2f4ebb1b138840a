"""Experts give pipelines that keep what an op computes, or say why not; candidates are ranked and distinct."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.errors import ArgumentError, CannotLower
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.structured.cost.plan_cost import plan_cycles
from tensor_comprehensions.structured.language.apply_primitives import plan_of_schedule
from tensor_comprehensions.structured.language.plan_to_schedule import plan_to_schedule
from tensor_comprehensions.structured.language.primitives import Schedule, pack, tile, unroll
from tensor_comprehensions.structured.language.schedule_types import freeze_schedule
from tensor_comprehensions.structured.language.select_schedule import resolve_schedule
from tensor_comprehensions.structured.lower.contraction import generate_contraction, lower_contraction
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.planners import experts
from tensor_comprehensions.structured.planners.candidates import schedule_candidates
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX2, AVX512

OPS = {
    "matmul": ("C:i,j = A:i,k x B:k,j", {"i": 17, "j": 40, "k": 9}),
    "turned": ("C:a,b,c = A:b,d,a x B:d,c", {"a": 5, "b": 6, "c": 19, "d": 12}),
    "batched": ("C:b,i,j = A:b,i,k x B:b,k,j", {"b": 3, "i": 10, "j": 17, "k": 9}),
    "nchw": ("C:n,o,h,w = A:n,c,h+y,w+x x B:o,c,y,x", {"n": 1, "o": 6, "h": 4, "w": 18, "c": 3, "y": 3, "x": 3}),
    "nhwc": ("C:n,h,w,o = A:n,h+y,w+x,c x B:y,x,c,o", {"n": 1, "h": 4, "w": 9, "o": 20, "c": 3, "y": 3, "x": 3}),
}
REASONS = {
    ("schedule_convolution", "matmul"): "no subscript is the sum",
    ("schedule_convolution", "turned"): "no subscript is the sum",
    ("schedule_convolution", "batched"): "no subscript is the sum",
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "expert", [experts.by_cost_model, experts.gett, experts.ttgt, experts.loop_over_gemm, experts.schedule_convolution]
)
def test_experts_keep_the_result(ops: Any, expert: Any, name: str) -> None:
    text, sizes = OPS[name]
    op = ops.op(text, sizes)
    if reason := REASONS.get((expert.__name__, name)):
        with pytest.raises(CannotLower, match=reason):
            expert(op, AVX512)
        return
    pipeline = resolve_schedule(expert, op, AVX512)
    assert pipeline in list(expert(op, AVX512).alternatives())
    result = ops.run(op, generate_contraction(drop_unit_dims(op), plan_of_schedule(pipeline, op, AVX512)))["result"]
    assert np.array_equal(result, ops.run(op, lower_contraction(op, AVX512, parallel=False))["result"])


SLIDING = {
    "channels last": ("C:n,h,w,c = A:n,h+y,w+x,c x B:y,x,c", {"n": 2, "h": 3, "w": 11, "c": 37, "y": 3, "x": 3}),
    "channels first": ("C:n,c,h,w = A:n,c,h+y,w+x x B:c,y,x", {"n": 1, "c": 2, "h": 9, "w": 19, "y": 5, "x": 2}),
    "strided": ("C:w,c = A:2*w+x,c x B:x,c", {"w": 13, "c": 20, "x": 5}),
    "dilated": ("C:w,c = A:w+2*x,c x B:x,c", {"w": 9, "c": 16, "x": 3}),
    "many taps": ("C:w,c = A:w+x,c x B:x,c", {"w": 30, "c": 4, "x": 7}),
}


@pytest.mark.parametrize("target", [AVX512, AVX2], ids=lambda t: t.name)
@pytest.mark.parametrize("name", SLIDING)
def test_windows_that_slide_read_each_vector_once(ops: Any, name: str, target: Any) -> None:
    op = ops.op(*SLIDING[name])
    pipeline = experts.schedule_depthwise(op, target)
    plan = plan_of_schedule(pipeline, op, target)
    assert plan == select_plan(drop_unit_dims(op), target, parallel=True)
    assert plan.unrolled
    body = generate_contraction(drop_unit_dims(op), plan)
    plain = generate_contraction(drop_unit_dims(op), replace(plan, unrolled=0))
    assert np.array_equal(ops.run(op, body)["result"], ops.run(op, plain)["result"])
    lines = format_program(body).splitlines()
    reads = [line for line in lines if "= A[" in line]
    taps = [line for line in lines if "fma(" in line]
    assert len(reads) < len(taps)


def test_depthwise_taps_are_those_along_the_row(ops: Any) -> None:
    """Neighbors share what the taps next to one another read, in either order of the axes: those go innermost."""
    for name, order in (("channels last", ("y", "x")), ("channels first", ("x", "y"))):
        assert select_plan(drop_unit_dims(ops.op(*SLIDING[name])), AVX512, parallel=True).reductions == order


def test_the_depthwise_expert_needs_a_window(ops: Any) -> None:
    for name in ("matmul", "nchw"):
        with pytest.raises(CannotLower, match="no window slides"):
            experts.schedule_depthwise(ops.op(*OPS[name]), AVX512)


def test_loops_over_products_need_a_contiguous_factor(ops: Any) -> None:
    op = ops.op("C:i,j = A:i,k x B:j,k", {"i": 9, "j": 20, "k": 8})
    with pytest.raises(CannotLower, match="no factor is contiguous"):
        experts.loop_over_gemm(op, AVX512)


def test_tilings_by_size() -> None:
    inner, outer = {"m": 12, "n": 32}, {"m": 288, "k": 512, "n": 128}
    double = experts.double_tiling(outer, inner, packs={"A": "m1"}, unrolls={"k": 4})
    assert repr(double).startswith("tile(m=288, k=512, n=128) >> tile(m=12, n=32) >> pack(A='m1')")
    assert experts.triple_tiling({"n": 999}, outer, inner).primitives[:1] == tile(n=999).primitives
    assert experts.single_tiling(inner).primitives[:1] == tile(**inner).primitives


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("target", [AVX512, AVX2], ids=lambda t: t.name)
def test_the_first_candidate_is_what_an_untuned_call_runs(ops: Any, name: str, target: Any) -> None:
    op = ops.op(*OPS[name])
    found = schedule_candidates(op, target, 12)
    plan = select_plan(drop_unit_dims(op), target, parallel=True)
    assert found[0].schedule == plan_to_schedule(plan, drop_unit_dims(op))
    assert len({c.schedule for c in found}) == len(found) > 1
    assert schedule_candidates(op, target, 12) == found
    assert schedule_candidates(op, target, 3) == found[:3]
    for candidate in found:
        plan = plan_of_schedule(candidate.schedule, op, target)
        assert candidate.cycles == plan_cycles(drop_unit_dims(op), plan, target) > 0


def test_copies_of_whole_factors_and_none_at_all_are_among_the_candidates(ops: Any) -> None:
    op = drop_unit_dims(ops.op("C:m,n = A:m,k x B:k,n", {"m": 400, "n": 400, "k": 400}))
    depths = [
        {s.depth for s in plan_of_schedule(c.schedule, op, AVX512).packs} for c in schedule_candidates(op, AVX512, 16)
    ]
    assert {0} in depths
    assert set() in depths


def test_copies_of_whole_factors_have_a_limit(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:k,n", {"m": 16384, "n": 64, "k": 16385})
    with pytest.raises(CannotLower, match="1028 MiB"):
        experts.ttgt(op, AVX512)


@pytest.mark.parametrize("name", ["matmul", "turned"])
def test_candidates_keep_the_result(ops: Any, name: str) -> None:
    op = ops.op(*OPS[name])
    first, *others = schedule_candidates(op, AVX512, 6)
    expected = ops.run(op, generate_contraction(drop_unit_dims(op), plan_of_schedule(first.schedule, op, AVX512)))[
        "result"
    ]
    for candidate in others:
        result = ops.run(
            op, generate_contraction(drop_unit_dims(op), plan_of_schedule(candidate.schedule, op, AVX512))
        )["result"]
        assert np.array_equal(result, expected), candidate.schedule


def test_the_model_prefers_reuse(ops: Any) -> None:
    op = ops.op("C:m,n = A:m,k x B:k,n", {"m": 512, "n": 512, "k": 512})
    costs = [
        plan_cycles(op, plan_of_schedule(p, op, AVX512), AVX512)
        for p in (tile(n=48, m=8), tile(n=16, m=2), tile(n=16, m=1))
    ]
    assert costs == sorted(costs)
    turned = ops.op("C:m,n = A:m,k x B:n,k", {"m": 512, "n": 512, "k": 512})
    whole = tile(n=48, m=8)
    assert plan_cycles(turned, plan_of_schedule(whole >> pack(B="n1"), turned, AVX512), AVX512) < plan_cycles(
        turned, plan_of_schedule(whole, turned, AVX512), AVX512
    )


def test_a_choice_is_settled_by_the_model_among_what_applies(ops: Any) -> None:
    op = ops.op(*OPS["matmul"])
    impossible, slow, fast = tile(i=17, j=999) >> tile(i=17, j=400), tile(j=16), tile(i=4, j=48)
    assert resolve_schedule(impossible | slow | fast, op, AVX512) == fast
    with pytest.raises(CannotLower, match="vectors"):
        resolve_schedule(impossible | (impossible >> unroll(k=2)), op, AVX512)


@pytest.mark.parametrize("wrong", [3, "tile(m=4)", Schedule, {"C": 3}])
def test_what_is_no_schedule(wrong: object) -> None:
    with pytest.raises(ArgumentError, match="schedule"):
        freeze_schedule(wrong)


@pytest.mark.parametrize(
    ("expert", "says"),
    [
        (lambda op, target: {}["m"], "the schedule heuristic raises KeyError: 'm'"),
        (lambda op: tile(i=4), "the schedule heuristic raises TypeError"),
        (lambda op, target: 3, "the schedule heuristic returns 3"),
    ],
)
def test_experts_that_go_wrong(ops: Any, expert: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        resolve_schedule(expert, ops.op(*OPS["matmul"]), AVX2)


def test_schedules_are_keys() -> None:
    assert hash(freeze_schedule({"C": tile(m=4), "D": experts.gett})) == hash(
        freeze_schedule({"C": tile(m=4), "D": experts.gett})
    )
    assert freeze_schedule(None) is None
