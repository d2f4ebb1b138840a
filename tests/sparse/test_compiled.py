"""Calls with sparse operands inside `torch.compile`: they break the graph, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo, where it breaks
]
OPS = tc.define("""
def declared(float(N,M) A: csr, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def undeclared(float(N,M) A, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
""")
KINDS: dict[str, Callable[[Tensor], Any]] = {"torch": Tensor.to_sparse_csr, "ours": lambda a: tc.as_sparse(a, "csr")}


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(op: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda A, x: op(A, x * 2) + 1


def dense_matrix() -> Tensor:
    return torch.rand(20, 30).where(torch.rand(20, 30) < 0.3, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["declared", "undeclared"])
def test_a_call_breaks_the_graph(name: str, kind: str) -> None:
    a, run = dense_matrix(), torch.compile(layer(OPS[name]), backend="aot_eager")
    for x in torch.rand(3, 30):
        torch.testing.assert_close(run(KINDS[kind](a), x), a @ (x * 2) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_the_break(kind: str) -> None:
    a, x = dense_matrix(), torch.rand(30, requires_grad=True)
    run = torch.compile(layer(OPS.declared), backend="aot_eager")
    (gradient,) = torch.autograd.grad(run(KINDS[kind](a), x).sum(), x)
    torch.testing.assert_close(gradient, 2 * a.sum(0))


def test_a_whole_graph_is_refused_with_the_reason() -> None:
    run = torch.compile(layer(OPS.declared), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sparse operands run outside of graphs"):
        run(tc.as_sparse(dense_matrix(), "csr"), torch.rand(30))
