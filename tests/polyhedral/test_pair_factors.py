"""Sums of products of several factors run in steps of two, with the values of the sum at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tensor_comprehensions.polyhedral.scop.pair_factors import pair_factors
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.ir import BoundFunction
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

TUCKER = """
def f(float(A,B,C) g, float(I,A) u, float(J,B) v, float(K,C) w) -> (x) {
    x(i,j,k) +=! g(a,b,c) * u(i,a) * v(j,b) * w(k,c)
}"""
CHAIN = "def f(float(M,K) a, float(K,L) b, float(L,N) c) -> (d) { d(i,j) +=! a(i,k) * b(k,l) * c(l,j) }"


def pair_def(source: str, **sizes: int) -> BoundFunction:
    (function,) = compile_source(source)
    return pair_factors(legalize(bind(function, sizes)))


def test_a_step_for_each_factor_but_one() -> None:
    steps = pair_def(TUCKER, A=8, B=9, C=10, I=30, J=31, K=32).statements
    assert [s.target for s in steps] == ["S0.product.0", "S0.product.1", "x"]
    assert steps[-1].name == "S0"
    assert all(len(s.reduction_indices) == 1 for s in steps)


@pytest.mark.parametrize(
    "source",
    [
        "def f(float(N,K) a, float(K) s, float(K,M) b) -> (c) { c(i,j) +=! a(i,k) * s(k) * b(k,j) }",  # a product
        "def f(float(N,M) a, float(N,M) b, float(N,M) c) -> (s) { s(i) +=! a(i,j) * b(i,j) * c(i,j) }",  # no fewer
        "def f(float(N,K) a, float(K,L) b, float(L,M) c) -> (d) { d(i,j) max=! a(i,k) * b(k,l) * c(l,j) }",
        "def f(int32(N,K) a, int32(K,L) b, int32(L,M) c) -> (d) { d(i,j) +=! a(i,k) * b(k,l) * c(l,j) }",
        "def f(float(N,K) a, float(K,L) b, float(L,M) c) -> (d) { d(i,j) +=! a(i,k) * b(k,l) * c(l,j) where k in 1:K }",
    ],
)
def test_what_stays_as_it_is(source: str) -> None:
    assert len(pair_def(source, N=40, M=50, K=60, L=70).statements) == 1


def test_small_sums_stay_as_they_are() -> None:
    assert len(pair_def(CHAIN, M=4, K=5, L=6, N=7).statements) == 1
    assert len(pair_def(CHAIN, M=40, K=50, L=60, N=70).statements) == 2


def test_sums_into_what_is_there_and_constant_factors() -> None:
    source = CHAIN.replace("+=!", "+=").replace("(d) {", "(float(M,N) d) {").replace("a(i,k)", "-0.5 * a(i,k)")
    op = tc.define(source).f
    a, b, c, d = torch.randn(40, 30), torch.randn(30, 50), torch.randn(50, 20), torch.randn(40, 20)
    torch.testing.assert_close(op(a, b, c, d=d), d - 0.5 * (a @ b @ c), rtol=1e-4, atol=1e-3)


def test_nothing_left_to_sum_in_the_last_step() -> None:
    op = tc.define("def f(float(N,K) a, float(K,L) b, float(L) c, float(M) e) -> (d) "
                   "{ d(i,j) +=! a(i,k) * b(k,l) * c(l) * e(j) }").f  # fmt: skip
    a, b, c, e = torch.randn(40, 30), torch.randn(30, 50), torch.randn(50), torch.randn(60)
    torch.testing.assert_close(op(a, b, c, e), torch.outer(a @ b @ c, e), rtol=1e-4, atol=1e-3)


def test_gradients() -> None:
    op = tc.define(TUCKER.replace("float", "double")).f
    operands = [
        torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in ((4, 3, 5), (9, 4), (8, 3), (7, 5))
    ]
    made, expected = op(*operands), torch.einsum("abc,ia,jb,kc->ijk", *operands)
    weights = torch.randn_like(made)
    for ours, torchs in zip(
        torch.autograd.grad((made * weights).sum(), operands),
        torch.autograd.grad((expected * weights).sum(), operands),
        strict=True,
    ):
        torch.testing.assert_close(ours, torchs)


@st.composite
def products(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    """A sum of three to five factors over up to six indices, in any order, and the shapes of its factors."""
    names = "ijklmn"[: draw(st.integers(3, 6))]
    factors = ["".join(draw(st.permutations(names)))[: draw(st.integers(1, 3))] for _ in range(draw(st.integers(3, 5)))]
    used = sorted(set("".join(factors)))
    output = draw(st.lists(st.sampled_from(used), unique=True, max_size=len(used) - 1))
    sizes = {x: draw(st.integers(1, 12)) for x in used}
    parameters = ", ".join(f"double({','.join(f'N{x}' for x in f)}) t{n}" for n, f in enumerate(factors))
    value = " * ".join(f"t{n}({','.join(f)})" for n, f in enumerate(factors))
    target = f"y({','.join(output)})" if output else "y"
    return f"def f({parameters}) -> (y) {{ {target} +=! {value} }}", [[sizes[x] for x in f] for f in factors]


@settings(max_examples=40)
@given(products())
def test_any_product(case: tuple[str, list[list[int]]]) -> None:
    source, shapes = case
    op = tc.define(source).f
    operands = [torch.randn(shape, dtype=torch.double) for shape in shapes]
    torch.testing.assert_close(op(*operands), op.reference(*operands))
