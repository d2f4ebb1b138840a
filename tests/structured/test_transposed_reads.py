"""Operands of epilogues that lie across the lanes: they are transposed for each register tile.

The gradient of attention has one: its scores are turned, its mask is not.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc

GRADIENT = """def gradient({type}(B,H,N,D) g, {type}(B,H,N,D) q, {type}(B,H,M,D) k, {type}(B,H,M,D) v,
                          {type}(B,H,N) lse, {type}(B,H,N) inner, {mask}(B,N,M) m) -> (dq, dk, dv) {{
    s(b,h,i,j) +=! q(b,h,i,e) * k(b,h,j,e)
    p(b,h,i,j) = exp(s(b,h,i,j) * 0.25 + {term} - lse(b,h,i))
    dp(b,h,i,j) +=! g(b,h,i,e) * v(b,h,j,e)
    ds(b,h,i,j) = p(b,h,i,j) * (dp(b,h,i,j) - inner(b,h,i)) * 0.25
    dq(b,i,h,e) +=! ds(b,h,i,j) * k(b,h,j,e)
    dk(b,j,h,e) +=! ds(b,h,i,j) * q(b,h,i,e)
    dv(b,j,h,e) +=! p(b,h,i,j) * g(b,h,i,e)
}}"""
TERMS = {"same": "m(b,i,j)", "half": "m(b,i,j)", "int32": "m(b,i,j)", "bool": "(m(b,i,j) ? 0 : -1000.0)"}
SIZES = [(2, 2, 128, 96, 16), (2, 4, 131, 77, 16), (1, 8, 203, 150, 32), (2, 4, 50, 130, 16)]


def source(element: str, mask: str) -> str:
    return GRADIENT.format(type=element, mask=element if mask == "same" else mask, term=TERMS[mask])


def operands(sizes: tuple[int, ...], dtype: torch.dtype, mask: str) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The operands of `gradient`, and its results by torch."""
    b, h, n, m, d = sizes
    q, k, v, g = (torch.randn(b, h, rows, d).double().requires_grad_() for rows in (n, m, m, n))
    held = torch.randint(-2, 3, (b, n, m)) if mask != "bool" else torch.rand(b, n, m) > 0.2
    added = torch.where(held, 0.0, -1000.0) if mask == "bool" else held
    scores = q @ k.transpose(2, 3) * 0.25 + added[:, None]
    out = torch.softmax(scores, -1) @ v
    expected = torch.autograd.grad(out, (q, k, v), g)
    inner, lse = (out * g).sum(-1), torch.logsumexp(scores, -1)
    given = [x.detach().to(dtype) for x in (g, q, k, v, lse, inner)]
    kept = held.to({"same": dtype, "half": torch.half, "int32": torch.int32, "bool": torch.bool}[mask])
    return [*given, kept], tuple(x.transpose(1, 2).to(dtype) for x in expected)


@pytest.mark.sampled  # types and sizes
@pytest.mark.parametrize("element", ["float", "double"])
@pytest.mark.parametrize("mask", TERMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_gradient_of_attention_with_a_mask(element: str, mask: str, sizes: tuple[int, ...]) -> None:
    given, expected = operands(sizes, {"float": torch.float32, "double": torch.float64}[element], mask)
    op = tc.define(source(element, mask)).gradient
    torch.testing.assert_close(op(*given), expected, rtol=1e-4, atol=1e-4)


def test_the_mask_is_not_gathered() -> None:
    given, _ = operands((2, 4, 256, 256, 64), torch.float32, "same")
    text = tc.define(source("float", "same")).gradient.compile(*given).source("loops")
    epilogues = [line for line in text.splitlines() if "exp(" in line]
    assert epilogues
    assert not [line for line in epilogues if re.search(r"\bm\[[^\]]*ramp\([^)]*\), [^\]]*\]", line)]


@pytest.mark.sampled  # values and sizes
@pytest.mark.parametrize("value", ["t(n,w,o) + r(n,o,w)", "exp(t(n,w,o) - r(n,o,w)) * r(n,o,w)"])
@pytest.mark.parametrize("sizes", [(3, 40, 24, 32), (2, 6, 70, 48), (5, 4, 33, 96), (1, 130, 50, 17)], ids=str)
def test_residuals_with_channels_first(value: str, sizes: tuple[int, ...]) -> None:
    n, w, c, o = sizes
    op = tc.define(f"""def f(float(N,W,C) x, float(O,C) weight, float(N,O,W) r) -> (z) {{
        t(n,w,o) +=! x(n,w,c) * weight(o,c)
        z(n,w,o) = {value}
    }}""").f
    x, weight, r = torch.randn(n, w, c), torch.randn(o, c) * 0.1, torch.randn(n, o, w)
    t, turned = x @ weight.t(), r.transpose(1, 2)
    expected = t + turned if "exp" not in value else torch.exp(t - turned) * turned
    torch.testing.assert_close(op(x, weight, r), expected, rtol=1e-4, atol=1e-4)
