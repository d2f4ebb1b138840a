"""Schedules and searches change how a contraction is lowered, never what a call gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.cpu_passes import kernel_digest
from tensor_comprehensions.structured.language import primitives
from tensor_comprehensions.structured.language.primitives import Schedule, pack, pad, parallel, tile, unroll, vectorize
from tensor_comprehensions.structured.planners import experts

SOURCE = """
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def layer(float(M,K) A, float(K,N) W, float(N) b) -> (C) {
    C(m,n) +=! A(m,k) * W(k,n)
    C(m,n) = fmax(C(m,n) + b(n), 0)
}
def mlp(float(M,K) A, float(K,N) V, float(N,P) W) -> (H, O) {
    H(m,n) +=! A(m,k) * V(k,n)
    H(m,n) = fmax(H(m,n), 0)
    O(m,p) +=! H(m,n) * W(n,p)
}
def accumulate(float(M,K) A, float(K,N) B) -> (float(M,N) C) { C(m,n) += A(m,k) * B(k,n) }
def batched(float(B,S,K) X, float(K,N) Y) -> (Z) { Z(b,s,n) +=! X(b,s,k) * Y(k,n) }
def double_it(float(N) x) -> (y) { y(i) = 2 * x(i) }
"""
OPS = tc.define(SOURCE)
ISSUE = tile(m=24, n=64, k=16) >> tile(m=4, n=32) >> pad("A", "B") >> pack(A="m1", B="n1") >> vectorize() >> unroll(k=4)


def whole(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


A, B = whole(37, 50), whole(50, 70, seed=1)


def schedule(kernel: tc.Kernel) -> str:
    return kernel.source("schedule").splitlines()[-1].partition(": ")[2]


@pytest.mark.parametrize(
    "schedule",
    [ISSUE, tile(m=4, n=32), tile(m=4, n=16) >> parallel("m1"), experts.gett, experts.ttgt, experts.loop_over_gemm],
    ids=lambda s: getattr(s, "__name__", "pipeline"),
)
def test_a_schedule_keeps_the_result(schedule: Any) -> None:
    kernel = OPS.matmul.compile(A, B, schedule=schedule)
    assert torch.equal(kernel(A, B), A @ B)
    assert torch.equal(OPS.matmul(A, B), A @ B)
    other = whole(9, 50, seed=2)
    assert torch.equal(kernel(other, B), other @ B)


def test_the_schedule_prints_the_pipeline_that_makes_it_again() -> None:
    for given in (ISSUE, None):
        kernel = OPS.matmul.compile(A, B, schedule=given)
        printed = eval(schedule(kernel), vars(primitives))
        again = OPS.matmul.compile(A, B, schedule=printed)
        assert schedule(again) == schedule(kernel)
        assert again.source("llvm") == kernel.source("llvm")


def test_equal_pipelines_are_one_kernel() -> None:
    first = OPS.matmul.compile(A, B, schedule=tile(m=5, n=16))
    assert OPS.matmul.compile(A, B, schedule=tile(m=5, n=16)).compiled is first.compiled
    assert OPS.matmul.compile(A, B, options=tc.CpuOptions(schedule=tile(m=5, n=16))).compiled is first.compiled
    other = OPS.matmul.compile(A, B, schedule=tile(m=5, n=32))
    assert other.compiled is not first.compiled
    digests = [kernel_digest(k.compiled.bound, k.compiled.options, k.compiled.target) for k in (first, other)]
    assert digests[0] != digests[1]
    gett = OPS.matmul.compile(A, B, schedule=experts.gett)
    assert "0x" not in repr(gett.compiled.options)


def test_what_surrounds_the_contraction_stays() -> None:
    bias = whole(70, seed=3)
    kernel = OPS.layer.compile(A, B, bias, schedule=tile(m=8, n=32) >> tile(k=8, m=4) >> pack(W="n1"))
    assert torch.equal(kernel(A, B, bias), torch.relu(A @ B + bias))
    start = whole(37, 70, seed=4)
    added = OPS.accumulate.compile(A, B, C=start, schedule=tile(k=8, m=4, n=32))
    assert torch.equal(added(A, B, C=start), start + A @ B)


def test_each_contraction_may_have_its_own_schedule() -> None:
    W = whole(70, 33, seed=5)
    for options in (tc.CpuOptions(), tc.CpuOptions(fusion="min")):
        kernel = OPS.mlp.compile(A, B, W, options=options, schedule={"H": tile(m=3, n=32), "O": experts.gett})
        hidden, out = kernel(A, B, W)
        assert torch.equal(hidden, torch.relu(A @ B))
        assert torch.equal(out, hidden @ W)
        same = OPS.mlp.compile(A, B, W, options=replace(options, schedule={"H": tile(m=3, n=32), "O": experts.gett}))
        assert same.compiled is kernel.compiled
        assert "tile(m=3, n=32)" in kernel.source("schedule")
    with pytest.raises(tc.ArgumentError, match="defines 'Q'") as caught:
        OPS.mlp.compile(A, B, W, schedule={"Q": tile(m=3)})
    assert "H, O" in str(caught.value)


def test_indices_walked_together_have_one_name() -> None:
    x, y = whole(3, 5, 50), B
    kernel = OPS.batched.compile(x, y, schedule=tile(b_s=4, n=32))
    assert torch.equal(kernel(x, y), x @ y)
    with pytest.raises(tc.ArgumentError, match="one iterator: b_s"):
        OPS.batched.compile(x, y, schedule=tile(b=1, n=32))


def test_a_schedule_is_taken_where_the_model_would_object() -> None:
    narrow = whole(50, 3)
    kernel = OPS.matmul.compile(A, narrow, schedule=tile(m=6, n=3))
    assert schedule(kernel).startswith("tile(m=6, n=3)")
    assert torch.equal(kernel(A, narrow), A @ narrow)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (tile(q=4), ["'q'", "m, n, k"]),
        (pack(X="m"), ["'X'", "A, B"]),
        (tile(m=37, n=70), ["does not apply", "registers"]),
        (tile(m=4, n=16) >> parallel("n1"), ["does not apply", "outermost"]),
        (experts.schedule_convolution, ["does not apply", "window"]),
        ("tile(m=4)", ["schedule", "a schedule"]),
        (lambda op, target: None, ["schedule heuristic", "a schedule"]),
    ],
)
def test_mistakes(schedule: Any, words: list[str]) -> None:
    with pytest.raises(tc.ArgumentError) as caught:
        OPS.matmul.compile(A, B, schedule=schedule)
    for word in words:
        assert word in str(caught.value)


def test_a_def_of_several_statements_without_a_contraction_takes_no_schedule() -> None:
    twice = tc.define("def twice(float(N) x) -> (y, z) { y(i) = 2 * x(i) z(i) = 3 * x(i) }").twice
    with pytest.raises(tc.ArgumentError, match="twice has no contraction"):
        twice.compile(whole(9), schedule=tile(i=4))
    with pytest.raises(tc.ArgumentError, match="twice has no contraction"):
        twice.autotune(whole(9), search="schedules")


def test_the_log_tells_what_every_piece_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="tensor_comprehensions.schedule"):
        OPS.matmul.compile(A, B, schedule=ISSUE >> Schedule())
        OPS.matmul.compile(A, B, schedule=tile(m=7, n=32) >> pack(A="m1"))
    for part in ("C:\n", "pack(A='m1'): A is copied in every iteration of m1", "register tile: m 7 x n 32"):
        assert part in caplog.text


# --- searches ----------------------------------------------------------------------------------------------------


def test_a_search_keeps_the_best_for_later_calls() -> None:
    op = tc.define(SOURCE.splitlines()[1]).matmul
    before = op(A, B)
    found = op.autotune(A, B, search="schedules", population=5, budget=600)
    assert 1 < len(found.outcomes) <= 5
    assert all(o.kind in ("ok", "slow") for o in found.outcomes)
    assert found.seconds <= found.default_seconds
    assert torch.equal(op(A, B), before)
    out = torch.empty(37, 70)
    op(A, B, out=out)
    assert torch.equal(out, before)
    kernel = op.compile(A, B)
    assert kernel.compiled.options == found.options
    assert found.options in [o.options for o in found.outcomes]
    assert op(whole(3, 50), B).shape == (3, 70)


def test_a_search_begins_with_what_an_untuned_call_does() -> None:
    """Which sums in parts where there are few results, as no pipeline says."""
    op = tc.define(SOURCE.splitlines()[1]).matmul
    a, b = torch.randn(32, 16384), torch.randn(16384, 64)
    assert "part" in op.compile(a, b).source("schedule")
    found = op.autotune(a, b, search="schedules", population=3, budget=600)
    assert found.default.schedule is None
    assert found.outcomes[0].options.schedule is None
    assert {o.options.schedule is None for o in found.outcomes} == {True, False}


def test_a_search_tries_register_tiles_for_a_product_that_has_none_untuned() -> None:
    """Lanes along the 11 of a sum, and 2 uses of each element: untuned, it is lowered as a row sum."""
    op = tc.define("def f(float(H,E,B) A, float(F,G,B,E) W) -> (O) { O(g,h,f) +=! A(h,e,b) * W(f,g,b,e) }").f
    a, w = whole(2, 11, 4), whole(8, 12, 4, 11, seed=2)
    found = op.autotune(a, w, search="schedules", population=4, budget=60)
    assert found.outcomes[0].options.schedule is None
    assert len([o for o in found.outcomes if o.options.schedule is not None]) >= 2
    assert {o.kind for o in found.outcomes} <= {"ok", "slow"}
    assert torch.equal(op(a, w), torch.einsum("heb,fgbe->ghf", a, w))


def test_a_search_among_the_alternatives_of_a_schedule() -> None:
    choice = tile(m=4, n=32) | tile(m=37, n=70) | tile(m=8, n=16)
    op = tc.define(SOURCE.splitlines()[1]).matmul
    found = op.autotune(A, B, search="schedules", population=8, budget=10, options=tc.CpuOptions(schedule=choice))
    assert found.options.schedule == op.compile(A, B).compiled.options.schedule
    assert schedule(op.compile(A, B)).startswith(("tile(m=4, n=32)", "tile(m=8, n=16)"))
    assert torch.equal(op(A, B), A @ B)


def test_a_search_of_two_contractions_and_of_an_accumulation() -> None:
    W, start = whole(70, 33, seed=5), whole(37, 70, seed=4)
    quick: dict[str, Any] = {"search": "schedules", "population": 3, "budget": 8}
    ops = tc.define(SOURCE)
    ops.mlp.autotune(A, B, W, **quick)
    assert torch.equal(ops.mlp(A, B, W)[1], torch.relu(A @ B) @ W)
    kept = start.clone()
    ops.accumulate.autotune(A, B, C=start, **quick)
    assert torch.equal(start, kept)
    assert torch.equal(ops.accumulate(A, B, C=start), start + A @ B)


def test_a_search_without_time_takes_the_first() -> None:
    found = tc.define(SOURCE.splitlines()[1]).matmul.autotune(A, B, search="schedules", population=16, budget=1e-9)
    assert len(found.outcomes) == 1


@pytest.mark.parametrize(
    "wrong", [{"population": 0}, {"budget": -1}, {"search": "all"}, {"devices": ["cpu:0"]}, {"devices": 5}]
)
def test_searches_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(tc.ArgumentError, match=r"population|budget|search|devices"):
        OPS.matmul.autotune(A, B, **{"search": "schedules", **wrong})
