"""Calls with sparse operands in graphs of torch: compiled, exported, with gradients, mistakes and new sizes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import tensor_comprehensions as tc
from tensor_comprehensions.torch_ext.sparse_fixed import fixed_operator

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo, where it breaks
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),  # Inductor's own
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
OPS = tc.define("""
def declared(float(N,M) A: csr, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def undeclared(float(N,M) A, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def product(float(N,K) A: csr, float(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }
def scaled(float(N,M) A: csr, float(N) s) -> (B: csr) { B(i,j) = A(i,j) * s(i) }
def stored(float(N,M) X) -> (B: csr) { B(i,j) = X(i,j) }
def outer(float(N) a: s, float(N) b: s) -> (C: dcsr) { C(i,j) = a(i) * b(j) where i in 0:N-1 }
""")
KINDS: dict[str, Callable[[Tensor], Any]] = {"torch": Tensor.to_sparse_csr, "ours": lambda a: tc.as_sparse(a, "csr")}
WHOLE = {"fullgraph": True, "backend": "aot_eager"}


@pytest.fixture(autouse=True)
def fresh_graphs() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(op: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda A, x: op(A, x * 2) + 1


def dense_matrix(rows: int = 20, columns: int = 30) -> Tensor:
    return torch.rand(rows, columns).where(torch.rand(rows, columns) < 0.3, 0)


def matrix(rows: int = 20, columns: int = 30, format: str = "csr") -> tc.SparseTensor:
    return tc.as_sparse(dense_matrix(rows, columns), format)


def leaves(x: Any) -> list[Any]:
    return pytree.tree_leaves(x)


# --- whole graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["declared", "undeclared"])
def test_calls(name: str, kind: str) -> None:
    """With torch's own sparse tensors the graph breaks, as torch traces none."""
    a, run = dense_matrix(), torch.compile(layer(OPS[name]), backend="aot_eager", fullgraph=kind == "ours")
    for x in torch.rand(3, 30):
        torch.testing.assert_close(run(KINDS[kind](a), x), a @ (x * 2) + 1)


def test_every_format_has_a_graph_of_its_own() -> None:
    run, x = torch.compile(layer(OPS.undeclared), **WHOLE), torch.rand(30)
    for format in ("csr", "uc", "bsr(5,3)", "dense", "csr"):
        a = matrix(format=format)
        torch.testing.assert_close(run(a, x), a.to_dense() @ (x * 2) + 1)
    a = dense_matrix()
    torch.testing.assert_close(run(a, x), a @ (x * 2) + 1)


def test_new_patterns_and_sizes_compile_at_most_two_graphs() -> None:
    counter = CompileCounter()
    run, x = torch.compile(layer(OPS.declared), fullgraph=True, backend=counter), torch.rand(30)
    for rows in (20, 21, 22, 40):
        a = matrix(rows)
        torch.testing.assert_close(run(a, x), a.to_dense() @ (x * 2) + 1)
    assert counter.frame_count <= 2


def network(a: tc.SparseTensor, b: tc.SparseTensor, s: Tensor) -> Any:
    """Takes, makes and returns sparse tensors, of which nobody knows beforehand what they store."""
    c = OPS.product(a, b)
    d = OPS.scaled(c, s)
    e = OPS.product(d.with_values(d.values.sin()), a)
    return OPS.declared(e, s), d, c.values.sum(), OPS.stored(e.to_dense().relu())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_through_sparse_results(backend: str) -> None:
    a, b = matrix(20, 20), matrix(20, 20)
    a.values.requires_grad_()
    s = torch.rand(20, requires_grad=True)
    found, wanted = torch.compile(network, fullgraph=True, backend=backend)(a, b, s), network(a, b, s)
    torch.testing.assert_close(leaves(found), leaves(wanted))
    assert isinstance(found[1].check(), tc.SparseTensor)
    totals = [(y[0].sum() + y[1].values.sum() + y[2] + y[3].values.square().sum()) for y in (found, wanted)]
    first, second = (torch.autograd.grad(total, (a.values, s)) for total in totals)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-3)  # graphs add gradients up in another order


def test_inductor_calls_the_operators() -> None:
    """Nothing but ops, so that Inductor has nothing to compile."""
    a, x = matrix(20, 20), torch.rand(20, requires_grad=True)
    a.values.requires_grad_()
    run = torch.compile(lambda a, x: OPS.declared(OPS.product(a, a), x), fullgraph=True)
    found, wanted = run(a, x), OPS.declared(OPS.product(a, a), x)
    torch.testing.assert_close(found, wanted)
    weights = torch.rand(20)
    first, second = (torch.autograd.grad(y, (a.values, x), grad_outputs=weights) for y in (found, wanted))
    torch.testing.assert_close(first, second)


def equations(a: tc.SparseTensor, b: tc.SparseTensor, x: Tensor) -> Any:
    c = tc.einsum("ij,jk->ik", a, b, format="csr")
    y = tc.einsum("ij,j->i", a, x * 2)
    return c, y, tc.einsum("ij,jk,k->i", c, c, y), tc.einsum("i,j->ij", y, y, format="csr").values.sum()


def test_equations() -> None:
    counter = CompileCounter()
    run = torch.compile(equations, fullgraph=True, backend=counter)
    for rows, columns in ((20, 30), (21, 31), (22, 33)):
        a, b = matrix(rows, columns), matrix(columns, rows)
        x = torch.rand(columns)
        torch.testing.assert_close(leaves(run(a, b, x)), leaves(equations(a, b, x)), rtol=1e-4, atol=1e-3)
    assert counter.frame_count <= 2
    a, x = matrix(), torch.rand(30, requires_grad=True)
    torch.compile(lambda a, x: tc.einsum("ij,j->i", a, x), **WHOLE)(a, x).sum().backward()
    torch.testing.assert_close(x.grad, a.to_dense().sum(0))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, x: tc.einsum("ij,j->i", a, x, format=3), "the format is an int"),
        (lambda a, x: tc.einsum("ij,j->i", a, x, format="crs"), "crs"),
        (lambda a, x: tc.einsum("ij,j->i", a, x, out=x), "'out' is for dense operands"),
        (lambda a, x: tc.einsum("ij,jk->i", a, x), "operand 1"),
        (lambda a, x: tc.einsum("ij,j->i", a, [x]), "operand 1 is a list"),
        (lambda a, x: tc.einsum("ij,i->j", a, x), "size"),
        (lambda a, x: tc.einsum("ij,j->i", a, x.to(torch.complex64)), "elements of type complex64"),
    ],
)
def test_mistakes_in_equations(call: Callable[..., Any], words: str) -> None:
    """The same, in a graph and without one; in a graph when it runs."""
    a, x = matrix(), torch.rand(30)
    for run in (call, torch.compile(call, **WHOLE)):
        with pytest.raises(tc.TCError, match=words):
            run(a, x)


def test_results_of_several_levels() -> None:
    a, b = (tc.as_sparse(torch.rand(9).where(torch.rand(9) < 0.6, 0), "s") for _ in range(2))
    found, wanted = torch.compile(OPS.outer, **WHOLE)(a, b), OPS.outer(a, b)
    torch.testing.assert_close(leaves(found), leaves(wanted))
    assert (found.format, found.shape) == (wanted.format, wanted.shape) == (wanted.format, (8, 9))


@pytest.mark.parametrize("given", ["torch", "torch with gradient", "ours"])
def test_tensors_of_torch_are_wrapped_before_the_graph(given: str) -> None:
    a, x = dense_matrix(), torch.rand(30, requires_grad=True)
    operand = KINDS[given.split()[0]](a)
    if given.endswith("gradient"):
        operand.requires_grad_()
    run = torch.compile(layer(OPS.declared), **WHOLE)
    run(tc.as_sparse(operand), x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * a.sum(0))
    if given.endswith("gradient"):
        torch.testing.assert_close(operand.grad.to_dense(), (a != 0) * 2 * x.detach())


def test_gradients_flow_through_a_break() -> None:
    a, x = dense_matrix(), torch.rand(30, requires_grad=True)
    run = torch.compile(layer(OPS.declared), backend="aot_eager")
    (gradient,) = torch.autograd.grad(run(a.to_sparse_csr(), x).sum(), x)
    torch.testing.assert_close(gradient, 2 * a.sum(0))


def test_autocast_inside_a_graph() -> None:
    a, x, eye = matrix(), torch.rand(30), torch.eye(30)

    def run(a: tc.SparseTensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            y: Tensor = OPS.declared(a, (x[None] @ eye)[0])  # a product in bfloat16
        return y

    for call in (run, torch.compile(run, **WHOLE)):
        torch.testing.assert_close(call(a, x), a.to_dense() @ x.bfloat16().float())


def test_mistakes_are_reported_by_the_graph() -> None:
    run, a, x = torch.compile(layer(OPS.declared), **WHOLE), matrix(), torch.rand(30)
    wrong = tc.SparseTensor(a.format, a.shape, ((None, a.levels[1][1]), None), a.values)  # type: ignore[index]
    broken = a.levels[1][1].clone()  # type: ignore[index]
    broken[3] = 77
    malformed = tc.SparseTensor(a.format, a.shape, (None, (a.levels[1][0], broken)), a.values)  # type: ignore[index]
    for arguments, words in (
        ((a.to("csc"), x), "another format"),
        ((a.to_dense(), x), "as_sparse"),
        ((a, x[:20]), "another size"),
        ((a, x.double()), "float64"),
        ((a, [1, 2]), "is a list"),
        ((wrong, x), "other arrays than the format 'csr'"),
        ((malformed, x), "77"),
    ):
        torch._dynamo.reset()
        with pytest.raises(tc.ArgumentError, match=words):
            run(*arguments)
    with pytest.raises(tc.ArgumentError, match="'out'"):
        torch.compile(lambda a, x: OPS.declared(a, x, out=torch.empty(20)) + 1, **WHOLE)(a, x)
    with pytest.raises(tc.ArgumentError, match="another format"):
        torch.compile(lambda a, b: OPS.product(a, b).values * 2, **WHOLE)(a, a.to("csc"))


# --- assembled ---------------------------------------------------------------------------------------------------

ASSEMBLED = tc.define("""
def product(float(N,K) A: csr, float(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }
def levels(float(N,K) A: dcsr, float(K,M) B: csr) -> (C: dcsr, d) {
    C(i,j) +=! A(i,k) * B(k,j)
    d(i) +=! A(i,k)
}
def shared(float(N,M) A: csr, float(N,M) B: csr, float(N) s) -> (C: csr, D: csr) {
    C(i,j) = A(i,j) * s(i)
    D(i,j) = A(i,j) + B(i,j)
}
""")
OPERANDS: dict[str, Callable[[], list[Any]]] = {
    "product": lambda: [matrix(20, 30), matrix(30, 10)],
    "levels": lambda: [matrix(20, 30, "dcsr"), matrix(30, 10)],
    "shared": lambda: [matrix(20, 30), matrix(20, 30), torch.rand(20)],
}


@pytest.mark.sampled  # backends for each program
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", OPERANDS)
def test_assembled_functions(name: str, backend: str) -> None:
    """They return the bits and the gradients of plain calls, at the stored places that they computed before."""
    op, given = ASSEMBLED[name], OPERANDS[name]()
    fixed = op.assemble(*given)
    counter = CompileCounter()
    values = [x.values.requires_grad_() for x in given if isinstance(x, tc.SparseTensor)]

    def run(call: Any, scale: float, *given: Any) -> list[Any]:
        first, *others = given
        return [x for x in leaves(call(first.with_values(first.values * scale), *others)) if x is not None]

    traced = torch.compile(lambda *x: run(fixed, *x), fullgraph=True, backend=backend)
    counted = torch.compile(lambda *x: run(fixed, *x), fullgraph=True, backend=counter)
    for scale in (1.0, -2.0, 3.0):
        found, wanted = traced(torch.tensor(scale), *given), run(op, torch.tensor(scale), *given)
        assert all(map(torch.equal, found, wanted))
        totals = [sum(x.square().sum() for x in y if x.requires_grad) for y in (found, wanted)]
        first, second = (torch.autograd.grad(total, values) for total in totals)
        torch.testing.assert_close(first, second)
        counted(torch.tensor(scale), *given)
    assert counter.frame_count == 1


def test_operators_of_assembled_functions_obey_torch() -> None:
    a, b = OPERANDS["product"]()
    fixed = ASSEMBLED.product.assemble(a, b)
    operator = fixed_operator(ASSEMBLED.product.sparse_op.operator({"A": a.format, "B": b.format}))
    parts = [*a.levels[1], a.values, list(a.shape), *b.levels[1], b.values, list(b.shape)]
    parts = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in parts]
    torch.library.opcheck(operator.overload, (*parts, *fixed.levels["C"][1], fixed.number))


def test_two_assembled_functions_in_one_graph() -> None:
    a, b = matrix(20, 20), matrix(20, 20)
    square, product = ASSEMBLED.product.assemble(a, a), ASSEMBLED.product.assemble(a, b)
    run = torch.compile(lambda a, b: (square(a, a).values.sum(), product(a, b)), **WHOLE)
    found, wanted = run(a, b), (ASSEMBLED.product(a, a).values.sum(), ASSEMBLED.product(a, b))
    torch.testing.assert_close(leaves(found), leaves(wanted))


def test_mistakes_in_calls_of_assembled_functions() -> None:
    a, b = OPERANDS["product"]()
    fixed = ASSEMBLED.product.assemble(a, b)
    for arguments, words in (
        ((matrix(20, 30), b), "'A' has other stored places"),
        ((matrix(21, 30), b), "N is 21"),
        ((a, b.to("csc")), "another format"),
        ((a, b.to_dense()), "as_sparse"),
    ):
        torch._dynamo.reset()
        with pytest.raises(tc.ArgumentError, match=words):
            torch.compile(lambda a, b: fixed(a, b).values * 2, **WHOLE)(*arguments)
    with pytest.raises(tc.ArgumentError, match="takes no batch of vmap"):
        torch.vmap(lambda v: fixed(a.with_values(v), b).values)(torch.stack([a.values] * 2))


def test_autocast_of_assembled_functions() -> None:
    a, b = OPERANDS["product"]()
    fixed = ASSEMBLED.product.assemble(a, b)

    def run(a: tc.SparseTensor, b: tc.SparseTensor) -> Tensor:
        with torch.autocast("cpu"):
            values: Tensor = fixed(a.with_values(a.values.bfloat16()), b).values
        return values

    rounded = a.with_values(a.values.bfloat16().float())
    for call in (run, torch.compile(run, **WHOLE)):
        torch.testing.assert_close(call(a, b), ASSEMBLED.product(rounded, b).values)


def test_transforms_and_traces_of_assembled_functions() -> None:
    a, b = OPERANDS["product"]()
    fixed = ASSEMBLED.product.assemble(a, b)

    def total(values: Tensor) -> Tensor:
        found: Tensor = fixed(a.with_values(values), b).values.square().sum()
        return found

    wanted = torch.func.grad(lambda v: ASSEMBLED.product(a.with_values(v), b).values.square().sum())(a.values)
    torch.testing.assert_close(torch.func.grad(total)(a.values), wanted)
    traced = make_fx(total)(a.values)
    torch.testing.assert_close(traced(2 * a.values), total(2 * a.values))


# --- exported ----------------------------------------------------------------------------------------------------


class Network(torch.nn.Module):
    def forward(self, a: tc.SparseTensor, x: Tensor) -> Any:
        c = OPS.product(a, a)
        return c, OPS.declared(c, x)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs(strict: bool) -> None:
    a, x = matrix(20, 20), torch.rand(20)
    exported, file = torch.export.export(Network(), (a, x), strict=strict), io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file)):
        torch.testing.assert_close(leaves(program.module()(a, x)), leaves(Network()(a, x)))


def test_saved_tensors_are_loaded_as_data() -> None:
    a, file = matrix(format="dcsc"), io.BytesIO()
    torch.save({"a": a}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)["a"]
    assert (found.format, found.shape) == (a.format, a.shape)
    assert torch.equal(found.check().to_dense(), a.to_dense())


# --- transforms --------------------------------------------------------------------------------------------------


def test_transforms_of_dense_operands() -> None:
    a, x = matrix(), torch.rand(30)
    dense, batch = a.to_dense(), torch.rand(4, 30)
    torch.testing.assert_close(torch.vmap(lambda x: OPS.declared(a, x))(batch), batch @ dense.T)
    torch.testing.assert_close(torch.vmap(lambda x: OPS.undeclared(dense.to_sparse_csr(), x))(batch), batch @ dense.T)
    torch.testing.assert_close(torch.vmap(lambda x: OPS.declared(a, x))(batch[:0]), batch[:0] @ dense.T)
    gradient = torch.func.grad(lambda x: OPS.declared(a, x).square().sum())(x)
    torch.testing.assert_close(gradient, 2 * dense.T @ (dense @ x))
    torch.testing.assert_close(torch.func.jacrev(lambda x: OPS.declared(a, x))(x), dense)


def test_transforms_of_stored_values() -> None:
    a, batch = matrix(), torch.rand(4, 30)

    def loss(values: Tensor, x: Tensor) -> Tensor:
        return OPS.declared(a.with_values(values), x).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(a.values, batch)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(loss)(a.values, x) for x in batch]))
    scales = torch.rand(3, 20)
    found = torch.vmap(lambda s: OPS.scaled(a, s).values)(scales)
    torch.testing.assert_close(found, torch.stack([OPS.scaled(a, s).values for s in scales]))
    values = torch.rand(3, a.nnz)
    found = torch.vmap(lambda v: OPS.declared(a.with_values(v), batch[0]))(values)
    torch.testing.assert_close(found, torch.stack([OPS.declared(a.with_values(v), batch[0]) for v in values]))


def test_patterns_that_differ_within_a_batch_are_refused() -> None:
    with pytest.raises(tc.ArgumentError, match="'B' of stored follow the values"):
        torch.vmap(lambda x: OPS.stored(x).values)(torch.rand(3, 4, 4))
    a, x = matrix(), torch.rand(30)
    pos, crd = a.levels[1]  # type: ignore[misc]

    def call(crd: Tensor) -> Tensor:
        return OPS.declared(tc.SparseTensor(a.format, a.shape, (None, (pos, crd)), a.values), x)

    with pytest.raises(tc.ArgumentError, match="'A' of declared differ within a batch"):
        torch.vmap(call)(crd.expand(3, -1))


# --- modules -----------------------------------------------------------------------------------------------------

LAYER = """
def layer(float(B,I) x, float(O,I) W: bsr(4,4), float(O,O) A: csr) -> (y) {
    h(n,o) +=! x(n,i) * W(o,i)
    y(n,o) +=! h(n,p) * A(o,p)
}
"""


def test_modules_learn_stored_values_and_keep_sparse_buffers() -> None:
    blocks = (torch.rand(2, 3) < 0.6).float().repeat_interleave(4, 0).repeat_interleave(4, 1) * torch.rand(8, 12)
    mixing, x = dense_matrix(8, 8), torch.rand(5, 12)
    module = tc.Module(LAYER, {"W": tc.as_sparse(blocks, "bsr(4,4)")}, buffers={"A": mixing.to_sparse_csr()})
    assert list(module.state_dict()) == ["W_values", "W_pos1", "W_crd1", "A_pos1", "A_crd1", "A_values"]
    expected = x @ blocks.T @ mixing.T
    other = tc.Module(LAYER, {"W": tc.as_sparse(blocks * 2, "bsr(4,4)")}, buffers={"A": tc.as_sparse(mixing, "csr")})
    other.load_state_dict(module.state_dict())
    for call in (module, other, torch.compile(module, **WHOLE), torch.export.export(module, (x,)).module()):
        torch.testing.assert_close(call(x), expected)
    module(x).sum().backward()
    assert module.W_values.grad.shape == module.W_values.shape
    converted = tc.Module(LAYER, {"W": blocks.to_sparse_csr()}, buffers={"A": mixing.to_sparse()})
    torch.testing.assert_close(converted(x), expected)
