"""Programs that once took the compiler minutes, or for ever."""

from __future__ import annotations

from time import process_time

import torch

import tensor_comprehensions as tc


def test_reads_shared_through_quotients_do_not_keep_isl_busy() -> None:
    op = tc.define("""
    def f(float(N,N) x, float(N) z) -> (a, b) {
        a(k,i,l) = z(k) - x(l/4, 0) where k in 0:5, i in 1:17, l in 0:16
        b(l,k,i,j) = z(k) - x(k%4, i) where l in 2:7, k in 0:4, i in 0:4, j in 0:7
    }""").f
    x, z = torch.randn(8, 8), torch.randn(8)
    start = process_time()
    for result, expected in zip(op(x, z), op.reference(x, z), strict=True):
        torch.testing.assert_close(result, expected)
    assert process_time() - start < 20


def test_reads_shared_through_remainders_do_not_keep_isl_busy() -> None:
    op = tc.define("""
    def f(float(N) x, float(Z,N,Z) w) -> (a, b, c) {
        a(i,j) = w(j % 3, i, i % 3 + 2) + w(j % 4, N - 1 - i, i % 4) - w(i % 3, j, i % 4) + w(i % 2, j, i % 2 + 2)
            where i in 0:N, j in 0:32
        b(i,j,k) = w(j, i - 1, k) where i in 1:131, j in 0:Z, k in 0:1
        c(j) = a(j, j / 3) * b(96, j, 0) + x(j / 3) - a(j + 90, j / 2 + 7) where j in 0:4
    }""").f
    x, w = torch.randn(130), torch.randn(5, 130, 5)
    start = process_time()
    for result, expected in zip(op(x, w), op.reference(x, w), strict=True):
        torch.testing.assert_close(result, expected)
    assert process_time() - start < 30


def test_forty_updates_of_one_tensor() -> None:
    updates = " ".join(f"y(i) = y(i) * 0.5 + {k}" for k in range(40))
    op = tc.define(f"def f(float(N) x) -> (y) {{ y(i) = x(i) {updates} }}").f
    x = torch.ones(8)
    start = process_time()
    assert torch.allclose(op(x), op.reference(x))
    assert process_time() - start < 10


def test_many_temporaries_need_no_more_stack_than_few() -> None:
    """Each of them is a register of one loop: they are declared side by side, not one inside the other."""
    count = 260
    links = " ".join(f"t{k + 1}(i) = fmaxf(t{k}(i) * 0.5 + x(i), {k % 3})" for k in range(count))
    op = tc.define(f"def f(float(N) x) -> (y) {{ t0(i) = x(i) {links} y(i) = t{count}(i) }}").f
    x = torch.randn(8)
    assert torch.allclose(op(x), op.reference(x))
    assert "malloc" not in op.compile(x).source("c")
