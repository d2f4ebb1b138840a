"""Gradients of windows that do not overlap: every element is in one window at most."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc

PROGRAMS = {
    "maximum": "y(n,i,j) max=! x(n,2*i+a,2*j+b) where a in 0:2, b in 0:2",
    "gaps": "y(n,i,j) +=! x(n,3*i+a,4*j+b) * x(n,3*i+a,4*j+b) where a in 0:2, b in 1:4",
    "one side": "y(n,i,j) +=! x(n,2*i+a,j+b) * x(n,2*i+a,j+b) where a in 0:2, b in 0:3",
    "start": "y(n,i,j) max=! x(n,2*i+a+1,2*j+b) where a in 0:2, b in 0:2, i in 1:3",
    "backwards": "y(n,i,j) +=! sin(x(n,H-1-2*i-a,2*j+b)) where i in 0:3, a in 0:2, b in 0:2",
    "diagonal": "y(n,i,a) +=! x(n,2*i+a,2*j+a) * x(n,2*i+a,j) where a in 0:2, j in 0:3",
    "other index": "y(n,i,j) +=! x(n,2*i+a,2*j+b) + double(k) where a in 0:2, b in 0:2, k in 0:5",
}


def define(name: str) -> tc.Op:
    return tc.define(f"def f(double(N,H,W) x) -> (y) {{ {PROGRAMS[name]} }}").f


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("sides", [(7, 9), (8, 8)])
def test_gradients_agree_with_finite_differences(name: str, sides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, *sides, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(define(name), (x,))
    assert torch.autograd.gradgradcheck(define(name), (x,))


def test_an_element_of_a_pooling_window_takes_one_term() -> None:
    op = define("maximum")
    assert "d_x(n, i, j) = " in op.backward_source()
    assert "%" not in op.backward_source()
    torch.manual_seed(0)
    x = torch.randn(3, 8, 10, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(3, 4, 5, dtype=torch.float64)
    (found,) = torch.autograd.grad(op(x), x, seed)
    (expected,) = torch.autograd.grad(torch.nn.functional.max_pool2d(x, 2), x, seed)
    torch.testing.assert_close(found, expected)


def test_patches_are_a_product_and_a_copy() -> None:
    op = tc.define("""
    def f(float(N,C,H,W) x, float(O,C,K,L) w) -> (y) {
        y(n,o,i,j) +=! x(n,c,4*i+a,4*j+b) * w(o,c,a,b) where a in 0:4, b in 0:4
    }""").f
    assert "windows_x(n, c, i, a, j, b) +=! d_y(n, o, i, j) * w(o, c, a, b)" in op.backward_source()
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 18, 16, requires_grad=True), torch.randn(5, 3, 4, 4, requires_grad=True)
    seed = torch.randn(2, 5, 4, 4)
    found = torch.autograd.grad(op(x, w), (x, w), seed)
    expected = torch.autograd.grad(torch.nn.functional.conv2d(x, w, stride=4), (x, w), seed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
