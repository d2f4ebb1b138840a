"""Statements that finish a sum run in the kernel of the sum, even if independent statements separate them."""

from __future__ import annotations

import torch

import tensor_comprehensions as tc

NORMALIZED = """def f(float(2,8,12,12) x, float(16,8,3,3) w, float(16) mean, float(16) variance, float(16) bias)
        -> (y) {
    a(n,o,i,j) +=! x(n,c,i+p,j+q) * w(o,c,p,q)
    scale(o) = 1.0 / sqrt(variance(o) + 0.001)
    b(n,o,i,j) = (a(n,o,i,j) - mean(o)) * scale(o) where n in 0:2, i in 0:10, j in 0:10
    shift(o) = bias(o) * 2.0
    y(n,o,i,j) = max(b(n,o,i,j) + shift(o), 0.0) where n in 0:2, i in 0:10, j in 0:10
}"""


def test_a_scale_made_after_a_convolution_does_not_separate_it_from_its_normalization() -> None:
    x, w = torch.randn(2, 8, 12, 12), torch.randn(16, 8, 3, 3)
    mean, variance, bias = torch.randn(16), torch.rand(16) + 0.1, torch.randn(16)
    op = tc.define(NORMALIZED).f
    sums = torch.nn.functional.conv2d(x.double(), w.double())
    columns = [v.double()[:, None, None] for v in (mean, variance, bias)]
    expected = ((sums - columns[0]) / (columns[1] + 0.001).sqrt() + 2 * columns[2]).relu()
    torch.testing.assert_close(op(x, w, mean, variance, bias).double(), expected, rtol=1e-4, atol=1e-4)
    per_channel = 16 * 4
    assert op.compile(x, w, mean, variance, bias).resources["temporary_bytes"] <= 2 * per_channel


def test_statements_keep_their_order_if_they_depend_on_one_another() -> None:
    text = """def f(float(6,5) x, float(5,7) w) -> (y, last) {
        a(i,j) +=! x(i,k) * w(k,j)
        total(i) +=! a(i,j)
        b(i) = total(i) * 2.0
        c(i,j) = a(i,j) + b(i)
        a(i,j) = c(i,j) * 3.0
        last(i) = b(i) + 1.0
        y(i,j) = a(i,j) + last(i)
    }"""
    x, w = torch.randn(6, 5), torch.randn(5, 7)
    a = x.double() @ w.double()
    b = a.sum(1) * 2
    y, last = tc.define(text).f(x, w)
    torch.testing.assert_close(y.double(), (a + b[:, None]) * 3 + b[:, None] + 1, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last.double(), b + 1, rtol=1e-4, atol=1e-4)
