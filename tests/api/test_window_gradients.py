"""Gradients of windows: disjoint ones, where an element is in one window at most, and ones longer than their stride."""

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
    "overlap": "y(n,i,j) max=! x(n,2*i+a,2*j+b) where a in 0:3, b in 0:3",
    "overlap of five": "y(n,i,j) max=! x(n,3*i+a,2*j+b) where a in 0:5, b in 0:5",
    "overlap on one side": "y(n,i,j) +=! x(n,j+b,2*i+a) * x(n,j+b,2*i+a) where a in 0:3, b in 0:2",
    "overlap in rows": "y(n,i,j) +=! sin(x(n,2*i+a,j)) where a in 1:4",
    "overlap from a start": "y(n,i,j) max=! x(n,2*i+a+1,3*j+b-2) where a in 0:3, b in 0:4, i in 0:2, j in 1:2",
    "overlap with padding": """
        y(n,i,j) max=! 2*i+a >= 1 && 2*i+a < H+1 && 2*j+b >= 1 && 2*j+b < W+1 ? x(n,2*i+a-1,2*j+b-1) : -100.0
        where a in 0:3, b in 0:3, i in 0:(H+1)/2, j in 0:(W+1)/2""",
    "choice": "y(n,i) max=! (j % 2 == 0 ? x(n,2*i+a,j) : x(n,i,j+a)) where a in 0:3, j in 0:5",
    "patches": "y(n,i,a,j) = x(n,2*i+a,j) * x(n,0,j) where a in 0:3",
    "sum of windows": "y(n,i) +=! x(n,2*i+a,2*k+b) * x(n,k,a) where a in 0:3, b in 0:3, k in 0:2",
}


def define(name: str) -> tc.Op:
    return tc.define(f"def f(double(N,H,W) x) -> (y) {{ {PROGRAMS[name]} }}").f


@pytest.mark.sampled  # sides for each program
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("sides", [(7, 9), (8, 8)])
def test_gradients_agree_with_finite_differences(name: str, sides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, *sides, dtype=torch.float64, requires_grad=True)
    op = define(name)
    assert torch.autograd.gradcheck(op, (x,))
    if sides == (7, 9):
        assert torch.autograd.gradgradcheck(op, (x,), fast_mode=True)


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


CONVOLUTION = """
def f(double(N,C,H,W) x, double(O,C,K,L) w) -> (y) { y(n,o,i,j) +=! x(n,c,S*i+a,T*j+b) * w(o,c,a,b) }"""


@pytest.mark.sampled  # strides and sides
@pytest.mark.parametrize(("strides", "sides"), [((2, 2), (3, 3)), ((2, 2), (4, 2)), ((3, 1), (5, 3)), ((2, 3), (1, 7))])
def test_phases_of_strided_convolutions(strides: tuple[int, int], sides: tuple[int, int]) -> None:
    op = tc.define(CONVOLUTION.replace("S", str(strides[0])).replace("T", str(strides[1]))).f
    sums = [line for line in op.backward_source().splitlines() if line.strip().startswith("phase_x")]
    assert len(sums) == strides[0] * strides[1]
    assert not any("%" in line or "?" in line for line in sums)
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 9, 10, dtype=torch.float64), torch.randn(2, 3, *sides, dtype=torch.float64)
    inputs = (x.requires_grad_(), w.requires_grad_())
    y = torch.nn.functional.conv2d(x, w, stride=strides)
    seed = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(op(x, w), inputs, seed), torch.autograd.grad(y, inputs, seed), check_stride=False
    )
    assert torch.autograd.gradgradcheck(op, inputs, fast_mode=True)


def test_padded_windows_need_no_tensor_of_terms() -> None:
    source = define("overlap with padding").backward_source()
    assert "term" not in source
    padded = tc.define("""
    def f(double(N,C,H,W) x, double(O,C,3,3) w) -> (y) {
        y(n,o,i,j) +=! (2*i+a >= 1 && 2*i+a < H+1 && 2*j+b >= 1 && 2*j+b < W+1 ? x(n,c,2*i+a-1,2*j+b-1) : 0.0)
            * w(o,c,a,b) where a in 0:3, b in 0:3, i in 0:(H+1)/2, j in 0:(W+1)/2
    }""").f
    assert "phase_x_3(n, c, i, j) +=! padded_y(" in padded.backward_source()
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 7, 8, dtype=torch.float64), torch.randn(2, 3, 3, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(padded, (x.requires_grad_(), w.requires_grad_()))


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
