"""Gradients of sparse defs: at the stored places of the operands, right by finite differences, twice differentiable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sparse_cases import Case, cases
from test_sparse_kernels import argument
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tensor_comprehensions as tc

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse .* support is in beta",
    "ignore:Sparse invariant checks",
    "ignore:.*torch.jit.script.*:DeprecationWarning",  # torch's own forward mode
)
PROGRAMS = """
def spmv(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def spmm(double(N,M) A: csr, double(M,K) X) -> (Y) { Y(i,k) +=! A(i,j) * X(j,k) }
def sddmm(double(N,M) B: csr, double(N,K) C, double(M,K) D) -> (double(N,M) A: csr) {
    A(i,j) +=! B(i,j) * C(i,k) * D(j,k)
}
def multiply(double(N,M) B: csr, double(N,M) C: csr) -> (double(N,M) A: csr) { A(i,j) = B(i,j) * C(i,j) }
def gcn(double(N,N) A: csr, double(N,F) X, double(F,G) W) -> (Y) {
    H(i,g) +=! X(i,f) * W(f,g)
    Y(i,g) +=! A(i,j) * H(j,g)
    Y(i,g) = max(Y(i,g), 0)
}
def attend(double(N,N) M: csr, double(N,D) Q, double(N,D) K, double(N,D) V) -> (O) {
    s(i,j) +=! Q(i,d) * K(j,d) where exists M(i,j)
    m(i) max=! s(i,j) where exists M(i,j)
    e(i,j) = exp(s(i,j) - m(i)) where exists M(i,j)
    z(i) +=! e(i,j)
    O(i,c) +=! e(i,j) * V(j,c)
    O(i,c) = O(i,c) / z(i)
}
def window(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) where j in 1:3 }
def row(double(N,M) A: csr, double(M) x) -> (y) { y +=! A(1,j) * x(j) }
def bounded(double(N,M) A: csr, double(N,M) B: csr) -> (double(N,M) C: csr) {
    C(i,j) = A(i,j) * A(i,j) where exists B(i,j)
}
def softest(double(N,M) A: csr) -> (m) { m(i) min=! exp(A(i,j)) * 2 where exists A(i,j) }
def product(double(N,M) A: csr) -> (p) { p(i) *=! A(i,j) where exists A(i,j) }
def repeated(double(N,M) A: uc, double(M) x) -> (y) { y(i) +=! A(i,j) * A(i,j) * x(j) }
"""
OPS = tc.define(PROGRAMS)
SHAPES: dict[str, list[str | tuple[int, ...]]] = {
    "spmv": ["csr 5 4", (4,)],
    "spmm": ["csr 5 4", (4, 3)],
    "sddmm": ["csr 5 4", (5, 3), (4, 3)],
    "multiply": ["csr 5 4", "csr 5 4"],
    "gcn": ["csr 5 5", (5, 3), (3, 2)],
    "attend": ["csr 5 5", (5, 3), (5, 3), (5, 3)],
    "window": ["csr 5 4", (4,)],
    "row": ["csr 5 4", (4,)],
    "bounded": ["csr 5 4", "csr 5 4"],
    "softest": ["csr 5 5"],
    "product": ["csr 5 5"],
    "repeated": ["uc 5 4", (4,)],
}


def operands(name: str) -> list[Any]:
    """Operands of a program; square matrices have all of their diagonal."""
    generator = torch.Generator().manual_seed(len(name))

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator) + 0.2

    made: list[Any] = []
    for shape in SHAPES[name]:
        if not isinstance(shape, str):
            made.append(rand(*shape).requires_grad_())
            continue
        format, n, m = shape.split()
        x = rand(int(n), int(m))
        x[torch.rand(x.shape, generator=generator) > 0.4] = 0
        x = x + torch.eye(int(n)) if n == m else x
        t = tc.as_sparse(x, format)
        t.values.requires_grad_()
        made.append(t)
    return made


def flat(x: Any) -> Any:
    return x.values if isinstance(x, tc.SparseTensor) else x


@pytest.mark.sampled  # programs for the same rules of derivatives
@pytest.mark.parametrize("name", SHAPES)
def test_first_and_second_derivatives(name: str) -> None:
    args = operands(name)

    def call(*values: Tensor) -> Any:
        given = [a.with_values(v) if isinstance(a, tc.SparseTensor) else v for a, v in zip(args, values, strict=True)]
        return flat(OPS[name](*given))

    values = [flat(a) for a in args]
    assert gradcheck(call, values, atol=1e-4)
    assert gradgradcheck(call, values, atol=1e-4, fast_mode=True)


@pytest.mark.sampled  # programs for the same rules of derivatives
@pytest.mark.parametrize("case", [c for c in cases() if c.record.get("grad")], ids=lambda c: c.id)
def test_conformance_programs_by_finite_differences(case: Case) -> None:
    op = list(tc.define(case.record["tc"]))[-1]
    given = [argument(case, n, x) for n, x in case.operands().items()]
    leaves = [flat(x).requires_grad_() for x in given if flat(x).dtype is torch.float64]

    def call() -> list[Tensor]:
        found = op(*given)
        return [flat(x) for x in (found if isinstance(found, tuple) else (found,))]

    results = call()
    weights = [torch.rand_like(x, requires_grad=False) for x in results]

    def total() -> Tensor:
        return torch.stack([(x * w).sum() for x, w in zip(call(), weights, strict=True)]).sum()

    gradients = torch.autograd.grad(total(), leaves)
    rng, step = np.random.default_rng(0), 1e-6
    with torch.no_grad():
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert gradient.shape == leaf.shape
            elements = leaf.view(-1)
            for n in rng.choice(len(elements), min(4, len(elements)), replace=False):
                old = elements[n].item()
                elements[n] = old + step
                above = total().item()
                elements[n] = old - step
                below = total().item()
                elements[n] = old
                assert abs((above - below) / (2 * step) - gradient.reshape(-1)[n].item()) < 1e-5


def test_the_gradient_of_a_product_has_the_places_of_the_operand() -> None:
    text = OPS.spmm.backward_source()
    assert "d_A: csr" in text
    assert "d_A(i, j) +=! d_Y(i, k) * X(j, k) where exists A(i, j)" in text


def test_no_gradient_is_as_large_as_a_dense_matrix() -> None:
    n = 1_000_000
    places = torch.arange(n).repeat(2, 1)
    a = tc.SparseTensor.from_coordinates(places, torch.ones(n, dtype=torch.float64), (n, n), "csr")
    a.values.requires_grad_()
    x = torch.rand(n, 2, dtype=torch.float64, requires_grad=True)
    OPS.spmm(a, x).sum().backward()  # n x n elements would be 8 TB
    assert a.values.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(a.values.grad, x.detach().sum(1))
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
def test_gradients_flow_into_sparse_tensors_of_torch(layout: torch.layout) -> None:
    op = tc.define("def f(double(N,M) A, double(M,K) X) -> (Y) { Y(i,k) +=! A(i,j) * X(j,k) }").f
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64)
    a = dense.to_sparse(layout=layout).requires_grad_()
    x = torch.rand(3, 2, dtype=torch.float64)
    op(a, x).sum().backward()
    assert a.grad is not None
    assert a.grad.layout is layout
    torch.testing.assert_close(a.grad.to_dense(), (dense != 0) * x.sum(1))


def test_sparse_results_of_torch_keep_their_graph() -> None:
    b = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.float64).to_sparse_csr().requires_grad_()
    c, d = (torch.rand(n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 3))
    result = OPS.sddmm(b, c, d)
    assert isinstance(result, Tensor)
    (result.values() ** 2).sum().backward()
    assert b.grad is not None
    assert c.grad is not None
    torch.testing.assert_close(b.grad.values(), 2 * b.detach().values() * (c @ d.T)[b.to_dense() != 0].detach() ** 2)


@pytest.mark.parametrize("layout", [torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_layouts_by_which_torch_adds_no_gradients(layout: torch.layout) -> None:
    op = tc.define("def f(double(N,M) A, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }").f
    blocks = None if layout is torch.sparse_csc else (2, 2)
    a = torch.eye(4, dtype=torch.float64).to_sparse(layout=layout, blocksize=blocks).requires_grad_()
    with pytest.raises(tc.ArgumentError, match="requires_grad_"):
        op(a, torch.rand(4, dtype=torch.float64))
    with torch.no_grad():
        assert op(a, torch.ones(4, dtype=torch.float64)).tolist() == [1.0] * 4


def test_what_is_no_operand_of_a_gradient_gets_none() -> None:
    a, x = operands("spmv")
    a.values.requires_grad_(False)
    OPS.spmv(a, x).sum().backward()
    assert a.values.grad is None
    torch.testing.assert_close(x.grad, a.to_dense().sum(0))


def test_a_gradient_that_the_user_gives() -> None:
    op = tc.define(
        "def f(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }",
        backward={
            "f": """def g(double(N,M) A: csr, double(M) x, double(N) d_y) -> (d_A: csr, d_x) {
                d_A(i,j) = 2 * d_y(i) * x(j) where exists A(i,j)
                d_x(j) +=! 2 * A(i,j) * d_y(i)
            }"""
        },
    ).f
    a, x = operands("spmv")
    op(a, x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * a.to_dense().detach().sum(0))
    assert a.values.grad.shape == a.values.shape


def test_a_python_function_is_no_gradient_of_sparse_operands() -> None:
    op = tc.define(
        "def f(double(N,M) A: csr, double(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }",
        backward={"f": lambda inputs, outputs, gradients: (None, None)},
    ).f
    with pytest.raises(tc.ArgumentError, match="text of a def"):
        op(*operands("spmv"))


def test_forward_mode_is_refused() -> None:
    a, x = operands("spmv")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(tc.ArgumentError, match="forward mode"):
        OPS.spmv(a, torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))


def test_out_is_refused() -> None:
    a, x = operands("spmv")
    with pytest.raises(tc.ArgumentError, match="'out'"), torch.no_grad():
        OPS.spmv(a, x, out=torch.empty(5, dtype=torch.float64))
