"""Definitions over a part of an in/out tensor: the rest keeps the values that the caller passed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import RangeError
from tensor_comprehensions.tc_lang import compile_source

STENCIL = "u(i,j) * u(i,j) - p(i,j) * p(i,j) + c * (u(i-1,j) + u(i+1,j) + u(i,j-1) + u(i,j+1))"
PART = "where i in 1:H-1, j in 1:W-1"
WAVE = f"def f(float(H,W) u, float c) -> (float(H,W) p) {{ p(i,j) = {STENCIL} {PART} }}"


def wave(u: torch.Tensor, c: float, p: torch.Tensor) -> torch.Tensor:
    kernel = torch.tensor([[0, c, 0], [c, 0, c], [0, c, 0]])
    inner = (
        torch.nn.functional.conv2d(u[None, None], kernel[None, None])[0, 0]
        + u[1:-1, 1:-1].square()
        - p[1:-1, 1:-1].square()
    )
    return torch.cat([p[:1], torch.cat([p[1:-1, :1], inner, p[1:-1, -1:]], 1), p[-1:]])


@pytest.mark.parametrize("shape", [(3, 3), (8, 9), (70, 130), (2, 5), (300, 40)])
def test_the_border_stays(shape: tuple[int, int]) -> None:
    op, u, p = tc.define(WAVE).f, torch.rand(shape), torch.rand(shape)
    expected = wave(u, 0.5, p) if min(shape) > 2 else p.clone()
    before = p.clone()
    torch.testing.assert_close(op(u, 0.5, p=p), expected)
    torch.testing.assert_close(op.reference(u, 0.5, p=p), expected)
    assert torch.equal(p, before)
    assert op(u, 0.5, p=p, out=p) is p
    torch.testing.assert_close(p, expected)


def test_gradients_pass_through_what_stays() -> None:
    op = tc.define(WAVE).f
    u, p = (torch.rand(6, 7, dtype=torch.float32, requires_grad=True) for _ in range(2))
    weight = torch.rand(6, 7)

    def both(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        first = torch.autograd.grad((f(u, p) * weight).sum(), (u, p), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (u, p))]

    for ours, theirs in zip(both(lambda u, p: op(u, 0.5, p=p)), both(lambda u, p: wave(u, 0.5, p)), strict=True):
        torch.testing.assert_close(ours, theirs)
    border = torch.autograd.grad(op(u, 0.5, p=p).sum(), p)[0]
    assert border[0].eq(1).all()
    assert border[:, -1].eq(1).all()


def test_vmap_and_compile() -> None:
    op = tc.define(WAVE).f
    u, p = torch.rand(3, 6, 7), torch.rand(3, 6, 7)
    expected = torch.stack([wave(a, 0.5, b) for a, b in zip(u, p, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lambda a, b: op(a, 0.5, p=b))(u, p), expected)
    compiled = torch.compile(lambda a, b: op(a, 0.5, p=b) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(u[0], p[0]), expected[0] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_and_several_statements(dtype: torch.dtype) -> None:
    name = {torch.float32: "float", torch.float16: "half"}[dtype]
    op = tc.define(
        f"def f({name}(N,K) a, {name}(K,M) b) -> ({name}(N,M) c) {{\n"
        "  c(i,j) += a(i,k) * b(k,j) where i in 3:N-2, j in 1:M\n"
        "  c(i,j) = c(i,j) * c(i,j) where i in 0:4\n  c(i,j) max= a(i,k) where j in 2:5 }"
    ).f
    a, b, c = (torch.rand(shape).to(dtype) for shape in ((40, 30), (30, 50), (40, 50)))
    e = c.clone().float()
    e[3:-2, 1:] += a[3:-2].float() @ b[:, 1:].float()
    e[:4] = e[:4].square()
    e[:, 2:5] = torch.maximum(e[:, 2:5], a.float().amax(1, keepdim=True))
    torch.testing.assert_close(op(a, b, c=c), e.to(dtype), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(op(a, b, c=c), op.reference(a, b, c=c), rtol=1e-2, atol=1e-2)


def test_a_staged_update() -> None:
    op = tc.define("def f(float(N) x) -> (float(N) y) { y(i) = y(i-1) + x(i) * y(i+1) where i in 1:N-1 }").f
    x, y = torch.rand(50), torch.rand(50)
    torch.testing.assert_close(op(x, y=y), torch.cat([y[:1], y[:-2] + x[1:-1] * y[2:], y[-1:]]))


@pytest.mark.parametrize(
    ("body", "found", "help_"),
    [
        (f"p(i,j) = {STENCIL}", "1:H - 1", "`where i in 1:H - 1, j in 1:W - 1`"),
        (f"p(i,j) = {STENCIL} where i in 1:H-1", "1:W - 1", "`where i in 1:H - 1, j in 1:W - 1`"),
        ("p(i,j) += u(i+2,j)", "0:H - 2", "`where i in 0:H - 2`"),
        ("p(i,j) = p(i,j) where i in 0:H+1", "0:H + 1", ""),
        ("p(i,j) = p(i,j) where i in -1:H", "-1:H", ""),
    ],
)
def test_define_refuses_what_the_size_cannot_hold(body: str, found: str, help_: str) -> None:
    text = f"def f(float(H,W) u, float c) -> (float(H,W) p) {{ {body} }}"
    with pytest.raises(RangeError, match=r"\^") as error:
        compile_source(text)
    assert error.value.found == found
    assert help_ in str(error.value)
    assert "'p'" in error.value.message


def test_the_help_helps() -> None:
    text = f"def f(float(H,W) u, float c) -> (float(H,W) p) {{ p(i,j) = {STENCIL} %s }}"
    with pytest.raises(RangeError) as error:
        compile_source(text % "")
    clause = str(error.value).rpartition("`where")[2].rstrip("`")
    assert compile_source(text % f"where{clause}") == compile_source(text % PART)


def test_what_initializes_all_covers_all() -> None:
    with pytest.raises(RangeError, match="initializes all of 'y'"):
        compile_source("def f(float(N) x) -> (float(N) y) { y(i) += x(i) y(i) +=! x(i) where i in 1:N }")


def test_sizes_that_only_a_call_tells() -> None:
    op = tc.define("def f(float(N) x, float(M) z) -> (float(M) y) { y(i) += x(i) }").f
    torch.testing.assert_close(op(torch.ones(5), torch.ones(5), y=torch.ones(5)), torch.full((5,), 2.0))
    with pytest.raises(RangeError, match="`where i in 0:4`"):
        op(torch.ones(4), torch.ones(5), y=torch.ones(5))


def test_without_a_declared_size_the_output_is_what_is_written() -> None:
    op = tc.define("def f(float(N) u) -> (p) { p(i) = p(i) + u(i-1) + u(i+1) }").f
    u, p = torch.rand(9), torch.rand(7)
    torch.testing.assert_close(op(u, p=p), p + u[:-2] + u[2:])
