"""Ops in compiled and exported graphs: whole, differentiable, dynamic, and with the mistakes of eager calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._inductor import codecache
from torch.compiler import config

import tensor_comprehensions as tc
from tensor_comprehensions.torch_ext import registration
from tests.helpers import differentiable as defs

pytestmark = [  # Inductor's own
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

OPS = tc.define("\n".join((defs.MATMUL, defs.SOFTMAX, defs.GEMM, defs.GATHER, defs.POOL)))
A, B = torch.randn(4, 5), torch.randn(5, 3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(torch.nn.Module):
    """A layer with two ops and something of torch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = OPS.softmax(2 * OPS.matmul(x, self.weight))
        return y + 1


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return torch.softmax(2 * (x @ weight), 1) + 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_and_backward_in_one_graph(backend: str) -> None:
    block, x = Block(), A.clone().requires_grad_()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    y = compiled(x)
    torch.testing.assert_close(y, plain(x, block.weight))
    found = torch.autograd.grad(y.square().sum(), (x, block.weight))
    wanted = torch.autograd.grad(plain(x, block.weight).square().sum(), (x, block.weight))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x, block.weight))


def test_inductor_calls_the_operators() -> None:
    """Nothing but ops, so that Inductor has nothing to compile."""
    x, w = A.clone().requires_grad_(), B.clone().requires_grad_()
    compiled = torch.compile(lambda x, w: OPS.softmax(OPS.matmul(x, w)), fullgraph=True)
    y = compiled(x, w)
    torch.testing.assert_close(y, torch.softmax(x @ w, 1))
    found = torch.autograd.grad(y, (x, w), grad_outputs=torch.arange(12.0).view(4, 3))
    wanted = torch.autograd.grad(torch.softmax(x @ w, 1), (x, w), grad_outputs=torch.arange(12.0).view(4, 3))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_numbers_initial_values_and_destinations() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(a: Tensor, b: Tensor, c: Tensor, out: Tensor, alpha: float) -> Any:
        OPS.gemm(a, b, alpha, 0.5, C=c, out=out)
        return OPS.gemm(a, b, 2, 0.5, C=c), OPS.pool(a[0], 2, 2)

    c, out = torch.randn(4, 3), torch.empty(4, 3)
    gemm, pool = call(A, B, c, out, 3.0)
    torch.testing.assert_close(gemm, 2 * (A @ B) + c / 2)
    torch.testing.assert_close(out, 3 * (A @ B) + c / 2)
    torch.testing.assert_close(pool, OPS.pool(A[0], 2, 2))


def test_a_changing_batch_compiles_at_most_two_graphs() -> None:
    counter = CompileCounter()
    compiled = torch.compile(lambda x: OPS.softmax(OPS.matmul(x, B)), fullgraph=True, backend=counter)
    for n in (4, 5, 6, 9, 17):
        x = torch.randn(n, 5)
        torch.testing.assert_close(compiled(x), torch.softmax(x @ B, 1))
    assert counter.frame_count <= 2


def test_torch_finds_no_graph_of_another_text_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward may name operators that are derived otherwise now."""
    graph = torch.fx.symbolic_trace(lambda x: OPS.matmul.overload(x, B))
    keys = []
    for text in ("1" * 64, "1" * 64, "2" * 64):
        monkeypatch.setattr(registration, "package_digest", lambda _, text=text: text)
        with config.patch(cache_key_tag="mine;"):  # type: ignore[attr-defined]
            registration._add_digest_to_graph_cache_key()
            assert config.cache_key_tag.startswith("mine;")
            keys.append(codecache.compiled_fx_graph_hash(graph, [], {}, [])[0])
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_mistakes_in_compiled_graphs(backend: str) -> None:
    """Wrong sizes and types, and data that leads out of a tensor: what eager says, from inside the graph."""
    matmul = torch.compile(lambda a, b: OPS.matmul(a, b), fullgraph=True, backend=backend)
    gather = torch.compile(lambda t, i: OPS.gather(t, i), fullgraph=True, backend=backend)
    torch.testing.assert_close(gather(A, torch.tensor([3, 0])), A[[3, 0]])
    for compiled, op, arguments in (
        (matmul, OPS.matmul, (A, A)),
        (matmul, OPS.matmul, (A.double(), B)),
        (gather, OPS.gather, (A, torch.tensor([1, 4]))),
    ):
        with pytest.raises(tc.TCError) as eager:
            op(*arguments)
        with pytest.raises(tc.TCError) as caught:
            compiled(*arguments)
        assert (type(caught.value), str(caught.value)) == (type(eager.value), str(eager.value))
    torch.testing.assert_close(gather(A, torch.tensor([3, 1])), A[[3, 1]])


WRONG_CALLS: dict[str, Callable[..., Any]] = {
    "too few": lambda a, b: OPS.matmul(a),
    "too many": lambda a, b: OPS.matmul(a, b, b),
    "no tensor": lambda a, b: OPS.matmul(a, None),
    "unknown keyword": lambda a, b: OPS.matmul(a, b, z=a),
    "no initial value": lambda a, b: OPS.gemm(a, b, 1.0, 2.0),
    "a number for a tensor": lambda a, b: OPS.matmul(a, 2.0),
    "too many destinations": lambda a, b: OPS.matmul(a, b, out=(a, b)),
    "too few, whose result nobody wants": lambda a, b: (OPS.matmul(a, out=b), a)[1],
    "einsum": lambda a, b: tc.einsum("ij,jk->ik", a, a) + b.sum(),
    "no equation": lambda a, b: tc.einsum(3, a),  # type: ignore[arg-type]
    "no operand": lambda a, b: tc.einsum("ij,jk->ik", a, [b]),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls_in_one_graph_are_reported_as_in_eager(call: Callable[..., Any], backend: str) -> None:
    with pytest.raises(tc.ArgumentError) as eager:
        call(A, B)
    with pytest.raises(tc.ArgumentError) as caught:
        torch.compile(call, fullgraph=True, backend=backend)(A, B)
    assert (caught.value.message, caught.value.span) == (eager.value.message, eager.value.span)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_arrays_in_compiled_graphs(fullgraph: bool) -> None:
    """Dynamo takes arrays of NumPy for tensors: they come back as arrays where no argument is a tensor."""
    both = lambda a, b: (OPS.matmul(a, b), tc.einsum("ij,jk", a, b))  # noqa: E731
    for found in torch.compile(both, fullgraph=fullgraph, backend="eager")(A.numpy(), B.numpy()):
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, (A @ B).numpy(), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()  # its guards do not tell arrays from tensors
    for mixed in torch.compile(both, fullgraph=fullgraph, backend="eager")(A.numpy(), B):
        torch.testing.assert_close(mixed, A @ B)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_einsum_in_one_graph(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def call(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        tc.einsum("mk,kn->mn", a.detach(), b, out=out)
        return tc.einsum("mk,kn,nj->mj", a, b, b.t()).sin()

    for n in (4, 6, 9):
        a, out = torch.randn(n, 5, requires_grad=True), torch.empty(n, 3)
        y = call(a, B, out)
        torch.testing.assert_close(y, (a @ B @ B.t()).sin(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out, a.detach() @ B)
        found, wanted = (torch.autograd.grad(x.sum(), a) for x in (y, (a @ B @ B.t()).sin()))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 2


def test_einsum_under_transforms_in_one_graph() -> None:
    one = lambda a: tc.einsum("i,ij->j", a, B)  # noqa: E731
    compiled = torch.compile(torch.func.vmap(one), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(A), A @ B)
    slope = torch.compile(torch.func.grad(lambda a: one(a).sum()), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(slope(A[0]), B.sum(1))


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_einsum_keeps_a_symbolic_batch(strict: bool) -> None:
    class Product(torch.nn.Module):
        def forward(self, a: Tensor) -> Any:
            return tc.einsum("...mk,kn->...mn", a, B)

    program = torch.export.export(Product(), (A,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
    x = torch.randn(9, 5)
    torch.testing.assert_close(program.module()(x), x @ B)


def test_a_number_of_another_kind_in_a_compiled_graph() -> None:
    compiled = torch.compile(lambda a, k: OPS.pool(a, k, 1), backend="eager")
    assert compiled(torch.ones(9), 2).shape == (8,)
    with pytest.raises(tc.ArgumentError, match="argument 'k' of pool is a float"):
        compiled(torch.ones(9), 2.5)


def test_export_keeps_a_symbolic_batch() -> None:
    batch = torch.export.Dim("batch")
    block = Block().requires_grad_(False)
    program = torch.export.export(block, (A,), dynamic_shapes=({0: batch},))
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert {str(OPS.matmul.overload), str(OPS.softmax.overload)} <= targets
    for n in (1, 7):
        x = torch.randn(n, 5)
        torch.testing.assert_close(program.module()(x), plain(x, block.weight))


def test_thirty_batches_of_a_program_with_a_dimension_need_one_kernel(tmp_path: Path) -> None:
    """As it was exported, packed ahead of time, and compiled by Inductor for all sizes."""
    (product,) = tc.define("def pairs(float(N,K) a, float(K,M) b) -> (c) { c(n,m) +=! a(n,k) * b(k,m) }", dynamic={"N"})

    class Product(torch.nn.Module):
        def forward(self, a: Tensor) -> Any:
            return product(a * 2, B) + 1

    batch = torch.export.Dim("batch", max=1000)
    program = torch.export.export(Product(), (A,), dynamic_shapes=({0: batch},))
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=os.fspath(tmp_path / "product.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    before = tc.statistics()
    inductor = torch.compile(Product(), dynamic=True, fullgraph=True)
    for run in (program.module(), torch._inductor.aoti_load_package(package), inductor):
        for n in range(2, 32):
            x = torch.randn(n, 5)
            torch.testing.assert_close(run(x), 2 * x @ B + 1)
    assert tc.statistics().compiled <= before.compiled + 1


def test_a_package_of_aot_inductor(tmp_path: Path) -> None:
    """Compiled ahead of time, loaded in this process, where the operators are."""

    class Product(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return OPS.matmul(a, b)

    program = torch.export.export(Product(), (A, B))
    package = torch._inductor.aoti_compile_and_package(
        program,
        package_path=os.fspath(tmp_path / "product.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(A, B), A @ B)


def test_a_window_longer_than_its_input() -> None:
    """The size of the result is negative while torch traces; the call then reports the mistake."""
    op = tc.define("def fir(float(N) x, float(K) h) -> (y) { y(n) +=! x(n+k) * h(k) }").fir
    compiled = torch.compile(lambda x, h: op(x, h) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    with pytest.raises(tc.RangeError, match="negative extent"):
        compiled(torch.randn(15), torch.randn(32))
    x, h = torch.randn(32), torch.randn(15)
    torch.testing.assert_close(compiled(x, h), op(x, h) + 1)
