"""Images whose rows are interleaved in memory are written and read in whole vectors."""

from __future__ import annotations

import torch

import tensor_comprehensions as tc


def test_parts_of_a_row_are_written_along_the_row() -> None:
    """Vectors along the parts had two lanes of eight."""
    op = tc.define("def f(float(240) a, float(240) b) -> (y) { y(i,k) = (k == 0 ? a(i) : b(i)) where k in 0:2 }").f
    a, b = torch.randn(240), torch.randn(240)
    torch.testing.assert_close(op(a, b), torch.stack([a, b], -1), rtol=0, atol=0)
    assert "vector for i " in op.compile(a, b).source("loops")


def test_a_quotient_and_a_remainder_of_one_index_read_neighbors() -> None:
    op = tc.define("""def f(float(6,20,2) x) -> (y) {
        y(i,j) = (j >= 1 && j < 41 ? x(i, (j - 1) / 2, (j - 1) % 2) : 0.0) where j in 0:43
    }""").f
    x = torch.randn(6, 20, 2)
    torch.testing.assert_close(op(x), torch.nn.functional.pad(x.flatten(1), (1, 2)), rtol=0, atol=0)
    code = op.compile(x).source("llvm")
    assert "x float>" in code
    assert "insertelement" not in code
    assert "gather" not in code


def test_other_quotients_and_remainders_are_not_joined() -> None:
    """Of the second one, the extent of the last dimension is not the divisor."""
    x, y = torch.randn(6, 20, 2), torch.randn(6, 20, 3)
    for text, value in (
        ("x(i, j / 2, (j + 1) % 2)", x.flip(-1).flatten(1)),
        ("y(i, j / 2, j % 2)", y[..., :2].flatten(1)),
        ("x(i, j % 20, j / 20)", x.transpose(1, 2).flatten(1)),
    ):
        text = f"{text} + 0 * y(0,0,0) + 0 * x(0,0,0) where i in 0:6, j in 0:40"
        op = tc.define(f"def f(float(6,20,2) x, float(6,20,3) y) -> (z) {{ z(i,j) = {text} }}").f
        torch.testing.assert_close(op(x, y), value, rtol=0, atol=0)
