"""Long sums of products into few elements run in parts, with the same result on any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.polyhedral.scop import reorder_contractions
from tensor_comprehensions.schedules import gett
from tensor_comprehensions.target import AVX512, CpuTarget

MATMUL = "def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }"
TURNED = "def f(float(A,C,D) X, float(D,B,C) Y) -> (Z) { Z(a,b) +=! X(a,c,d) * Y(d,b,c) }"
LAYER = """def f(float(M,K) A, float(N,K) B, float(N) c) -> (C) {
    C(m,n) +=! A(m,k) * B(n,k)
    C(m,n) = fmax(C(m,n) + c(n), 0)
}"""
CASES = [
    (MATMUL, (24, 9000), (9000, 40)),
    (TURNED, (12, 90, 104), (104, 20, 90)),
    (LAYER, (5, 8192), (16, 8192), (16,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0][:20])
def test_parts(case: tuple[str, ...]) -> None:
    source, *shapes = case
    op, inputs = tc.define(source).f, [torch.randn(shape) for shape in shapes]
    assert "_combined" in op.compile(*inputs).source("schedule")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = op(*inputs)
        torch.set_num_threads(2)
        assert torch.equal(op(*inputs), alone)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(alone, op.reference(*inputs), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("target", "whole"),
    [(AVX512, "c in 0:96"), (replace(AVX512, name="sapphirerapids"), "d in 0:104")],
    ids=["near", "far"],
)
def test_a_far_cache_brings_whole_rows_of_what_is_read_in_place(
    target: CpuTarget, whole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reorder_contractions, "_ways_along_sum", lambda found: ())  # lanes along a sum read otherwise
    inputs = torch.empty(12, 96, 104), torch.empty(104, 20, 96)
    parts = tc.define(TURNED).f.compile(*inputs, target=target).source("schedule").split("Z.part")[0]
    assert f"{whole} reduction" in parts


def test_sums_into_memory_that_is_added_to() -> None:
    op = tc.define(
        "def f(float(M,K) A, float(K,N) B, float(M,N) C) -> (D) { D(m,n) = C(m,n)\n D(m,n) += A(m,k) * B(k,n) }"
    ).f
    inputs = torch.randn(8, 8192), torch.randn(8192, 8), torch.randn(8, 8)
    assert "D.part" in op.compile(*inputs).source("schedule")
    torch.testing.assert_close(op(*inputs), op.reference(*inputs), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("source", "shapes", "options"),
    [
        pytest.param(MATMUL, ((24, 1024), (1024, 40)), {}, id="few terms"),
        pytest.param(MATMUL, ((128, 8192), (8192, 128)), {}, id="many results"),
        pytest.param(MATMUL, ((1, 8192), (8192, 40)), {}, id="one row"),
        pytest.param(MATMUL, ((24, 8209), (8209, 40)), {}, id="a prime number of terms"),
        pytest.param(MATMUL, ((24, 9000), (9000, 40)), {"schedule": gett}, id="somebody else decides"),
        pytest.param(MATMUL, ((24, 9000), (9000, 40)), {"options": tc.CpuOptions(grain_size=0)}, id="one thread"),
        pytest.param(
            "def f(float(S,M,K) A, float(S,K,N) B) -> (C) { C(s,m,n) +=! A(s,m,k) * B(s,k,n) }",
            ((8, 8, 8192), (8, 8192, 8)), {}, id="batches",
        ),
    ],
)  # fmt: skip
def test_one_piece(source: str, shapes: tuple[tuple[int, ...], ...], options: dict[str, object]) -> None:
    kernel = tc.define(source).f.compile(*(torch.empty(shape) for shape in shapes), **options)
    assert ".part" not in kernel.source("schedule")
