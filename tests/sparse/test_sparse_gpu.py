"""Sparse defs for GPUs: the text in the emulator, in NVRTC and in calls on a device whose part the CPU plays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sparse_cases import Case
from test_sparse_kernels import RUN, TOLERANCE, argument, check_stored, dense
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.schedules import parallel
from tensor_comprehensions.target import parse_gpu_target

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
pytestmark = [
    pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:Sparse .* support is in beta", "ignore:Sparse invariant checks"),
]
SMALL = replace(parse_gpu_target("cuda:sm_90"), num_sms=1)
"""A GPU of one processor: the emulator runs its whole grid in little time."""
CASES = [c for c in RUN if "by_coordinates" not in c.record]


def compile_case(case: Case) -> tuple[Any, list[Any], dict[str, Tensor]]:
    """The kernel of a case, and the operands to call it with."""
    op = list(tc.define(case.record["tc"], formats=case.record.get("define_formats")))[-1]
    operands = [argument(case, name, x) for name, x in case.operands().items()]
    initial = {name: torch.from_numpy(x.values) for name, x in case.initial().items()}
    return op.compile(*operands, target=SMALL, **initial), operands, initial


@pytest.mark.sampled  # `test_sparse_kernels` runs all programs
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_conformance(case: Case) -> None:
    """Values, places and formats."""
    kernel, operands, initial = compile_case(case)
    found = kernel.emulate(*operands, **initial)
    given = case.operands()
    results = found if isinstance(found, tuple) else (found,)
    for name, x, expected in zip(case.returns, results, case.expected(given), strict=True):
        dtype = str(x.dtype).removeprefix("torch.")
        tolerance = case.record.get("tolerance", TOLERANCE.get(dtype, 0))
        values = dense(x)
        np.testing.assert_allclose(values, expected.astype(values.dtype), rtol=tolerance, atol=tolerance, err_msg=name)
        if name in case.record.get("stored", {}):
            check_stored(case, name, x, case.stored(given)[name])


SOURCE = """
def spmv(float(N,M) A, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }
def spmm(float(N,M) A, float(M,F) X) -> (Y) { Y(i,f) +=! A(i,j) * X(j,f) }
def transposed(float(N,M) A, float(N) x) -> (y) { y(j) +=! A(i,j) * x(i) }
def total(float(N,M) A) -> (s) { s +=! A(i,j) }
def largest(float(N,M) A) -> (m) { m(i) max=! A(i,j) where exists A(i,j) }
def scaled(float(N,M) A, float(N) s) -> (B) { B(i,j) = A(i,j) * s(i) }
def sampled(float(N,M) S: csr, float(N,K) U, float(M,K) V) -> (E: csr) {
    E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j)
}
def sampled_coo(float(N,M) S: coo, float(N,K) U, float(M,K) V) -> (E: coo) {
    E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j)
}
def mttkrp(float(I,J,K) B, float(J,R) C, float(K,R) D) -> (A) { A(i,r) +=! B(i,j,k) * C(j,r) * D(k,r) }
def gcn(float(N,N) A: csr, float(N,F) X, float(F,G) W) -> (Y) {
    H(i,g) +=! X(i,f) * W(f,g)
    Y(i,g) +=! A(i,j) * H(j,g)
    Y(i,g) = max(Y(i,g), 0)
}
def attend(float(N,N) M: csr, float(N,D) Q, float(N,D) K, float(N,D) V) -> (O) {
    s(i,j) +=! Q(i,d) * K(j,d) where exists M(i,j)
    m(i) max=! s(i,j) where exists M(i,j)
    e(i,j) = exp(s(i,j) - m(i)) where exists M(i,j)
    z(i) +=! e(i,j)
    O(i,c) +=! e(i,j) * V(j,c)
    O(i,c) = O(i,c) / z(i)
}
def product(float(N,K) A: csr, float(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }
def either(float(N,M) A: csr, float(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }
def both(float(N,M) A: dcsr, float(N,M) B: dcsr) -> (C: coo) { C(i,j) = A(i,j) * B(i,j) }
def vectors(float(N) A: s, float(N) B: s) -> (C: s, y) { C(i) = 2 * A(i) - B(i)  y(i) = C(i) + A(i) }
def power(float(N,N) A: csr) -> (B: csr, C: csr) {
    B(i,j) +=! A(i,k) * A(k,j)
    C(i,j) +=! B(i,k) * A(k,j)
}
"""
OPS = tc.define(SOURCE)
FORMATS = ("csr", "csc", "dcsr", "coo", "bsr(4,2)", "bsc(4,2)")


def matrix(rows: int = 20, columns: int = 24, density: float = 0.3) -> Tensor:
    x = torch.randn(rows, columns).where(torch.rand(rows, columns) < density, 0)
    x[3] = 0
    return x


@pytest.fixture(autouse=True)
def fix_seed() -> None:
    torch.manual_seed(0)


PRODUCTS: dict[str, Callable[[Tensor], tuple[tuple[Tensor, ...], Tensor]]] = {
    "spmv": lambda a: ((x := torch.randn(24),), a @ x),
    "spmm": lambda a: ((x := torch.randn(24, 40),), a @ x),
    "transposed": lambda a: ((x := torch.randn(20),), x @ a),
    "total": lambda a: ((), a.sum()),
    "scaled": lambda a: ((x := torch.randn(20),), a * x[:, None]),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_formats(name: str, format: str) -> None:
    a = matrix()
    others, expected = PRODUCTS[name](a)
    A = tc.as_sparse(a, format)
    kernel = OPS[name].compile(A, *others, target=SMALL)
    torch.testing.assert_close(kernel.emulate(A, *others), expected, rtol=1e-4, atol=1e-4)


TEMPORARIES = tc.define("""
def transposed(double(N,M) A, double(M,N) B) -> (y) {
    t(i,j) = exp(A(i,j)) where exists A(i,j)  y(j) +=! t(i,j) * B(j,i)
}
def own(double(N,N) A, double(N,N) B) -> (y) {
    t(i,j) = A(i,j)  t(i,j) += t(i,k) * B(k,j) where exists A(i,j)  y(i) +=! t(i,j)
}
""")


@pytest.mark.parametrize("name", ["transposed", "own"])
def test_temporaries_with_stored_places_are_read_in_another_order(name: str) -> None:
    A, B = (tc.as_sparse(matrix(20, 20).double(), "csr") for _ in range(2))
    kernel = TEMPORARIES[name].compile(A, B, target=SMALL)
    torch.testing.assert_close(kernel.emulate(A, B), TEMPORARIES[name].reference(A, B))


def test_the_gradient_of_attention() -> None:
    """d_K sums the scores by columns."""
    mask = torch.rand(12, 12).lt(0.4).double() + torch.eye(12, dtype=torch.float64)
    M, (q, k, v) = tc.as_sparse(mask, "csr"), (torch.randn(12, 4, dtype=torch.float64) for _ in range(3))
    attend = tc.define(SOURCE.replace("float", "double")).attend
    (op,) = tc.define(attend.backward_source())
    saved = {"s": M.with_values(torch.randn(M.nnz, dtype=torch.float64)), "z": torch.rand(12, dtype=torch.float64) + 1}
    given = {"M": M, "Q": q, "K": k, "V": v, **saved}
    operands = [given.get(p.name, torch.randn(12, 4, dtype=torch.float64)) for p in op.function.parameters]
    expected, found = op.reference(*operands), op.compile(*operands, target=SMALL).emulate(*operands)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(dense(x), dense(y))


@pytest.mark.parametrize("average", [1, 4, 9, 40, 100])
def test_lanes_follow_the_length_of_rows_and_take_rows_of_any(average: int) -> None:
    a = torch.zeros(30, 150)
    for row, count in zip(a, torch.randint(0, 2 * average, (30,)).clamp(max=150).tolist(), strict=True):
        row[torch.randperm(150)[:count]] = torch.randn(count)
    A, x = tc.as_sparse(a, "csr"), torch.randn(150)
    kernel = OPS.spmv.compile(A, x, target=SMALL)
    torch.testing.assert_close(kernel.emulate(A, x), a @ x, rtol=1e-4, atol=1e-4)
    other = tc.as_sparse(matrix(50, 150, 0.01), "csr")  # another length of rows, by the same text
    torch.testing.assert_close(kernel.emulate(other, x), other.to_dense() @ x, rtol=1e-4, atol=1e-4)


def test_more_rows_than_the_grid_has_teams() -> None:
    a = torch.randn(5000, 3)
    A, x = tc.as_sparse(a, "csr"), torch.randn(3)
    torch.testing.assert_close(OPS.spmv.compile(A, x, target=SMALL).emulate(A, x), a @ x)


def test_nothing_is_stored_or_there() -> None:
    for rows, columns in ((5, 4), (0, 4), (5, 0)):
        A, x = tc.as_sparse(torch.zeros(rows, columns), "csr"), torch.ones(columns)
        assert torch.equal(OPS.spmv.compile(A, x, target=SMALL).emulate(A, x), torch.zeros(rows))
        assert OPS.total.compile(A, target=SMALL).emulate(A).item() == 0


@pytest.mark.parametrize("name", ["sampled", "sampled_coo"])
def test_results_have_the_places_of_their_operand(name: str) -> None:
    s, u, v = matrix(), torch.randn(20, 7), torch.randn(24, 7)
    S = tc.as_sparse(s, "coo" if name == "sampled_coo" else "csr")
    found = OPS[name].compile(S, u, v, target=SMALL).emulate(S, u, v)
    assert found.format == S.format
    assert torch.equal(found.coordinates(), S.coordinates())
    torch.testing.assert_close(found.check().to_dense(), (u @ v.T) * (s != 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["csf", "coo", "sss(2,0,1)", "dss"])
def test_tensors_of_three_dimensions(format: str) -> None:
    b = torch.randn(5, 6, 7).where(torch.rand(5, 6, 7) < 0.3, 0)
    B, c, d = tc.as_sparse(b, format), torch.randn(6, 10), torch.randn(7, 10)
    found = OPS.mttkrp.compile(B, c, d, target=SMALL).emulate(B, c, d)
    torch.testing.assert_close(found, torch.einsum("ijk,jr,kr->ir", b, c, d), rtol=1e-4, atol=1e-4)


def test_layers_of_graph_networks() -> None:
    edges = ((torch.rand(16, 16) < 0.3) | torch.eye(16, dtype=torch.bool)).float()
    A, x, w = tc.as_sparse(edges, "csr"), torch.randn(16, 9), torch.randn(9, 5)
    found = OPS.gcn.compile(A, x, w, target=SMALL).emulate(A, x, w)
    torch.testing.assert_close(found, torch.relu(edges @ x @ w), rtol=1e-4, atol=1e-4)
    q, k, v = torch.randn(3, 16, 6)
    found = OPS.attend.compile(A, q, k, v, target=SMALL).emulate(A, q, k, v)
    scores = (q @ k.T).masked_fill(edges == 0, float("-inf"))
    torch.testing.assert_close(found, torch.softmax(scores, 1) @ v, rtol=1e-4, atol=1e-4)


def test_results_with_places_of_their_own() -> None:
    a, b, c = matrix(), matrix(), matrix(24, 30)
    A, B, C = (tc.as_sparse(x, "csr") for x in (a, b, c))
    for name, operands, expected in (("product", (A, C), a @ c), ("either", (A, B), a + b)):
        found = OPS[name].compile(*operands, target=SMALL).emulate(*operands)
        assert str(found.format) == "csr"
        torch.testing.assert_close(found.check().to_dense(), expected, rtol=1e-4, atol=1e-4)
    assert "elements are collected in order" in OPS.either.compile(A, B, target=SMALL).source("schedule")
    found = OPS.both.compile(A.to("dcsr"), B.to("dcsr"), target=SMALL).emulate(A.to("dcsr"), B.to("dcsr"))
    assert str(found.format) == "coo"
    torch.testing.assert_close(found.check().to_dense(), a * b)


def test_threads_share_merges_of_the_outermost_index() -> None:
    """As many elements for each of some threads as there are coordinates, and none for others."""
    for extent in (1, 300, 5000):
        x, y = torch.rand(2, extent).where(torch.rand(2, extent) < 0.3, 0)
        operands = tc.as_sparse(x, "s"), tc.as_sparse(y, "s")
        C, z = OPS.vectors.compile(*operands, target=SMALL).emulate(*operands)
        torch.testing.assert_close(C.check().to_dense(), 2 * x - y)
        torch.testing.assert_close(z, 3 * x - y)


def test_statements_read_results_with_places_of_their_own() -> None:
    a = matrix(20, 20)
    A = tc.as_sparse(a, "csr")
    kernel = OPS.power.compile(A, target=SMALL)
    assert kernel.source("schedule").count("elements are collected") == 2
    for operand in (A, tc.as_sparse(torch.zeros(7, 7), "csr")):
        for found, expected in zip(kernel.emulate(operand), (2, 3), strict=True):
            power = torch.linalg.matrix_power(operand.to_dense(), expected)
            torch.testing.assert_close(found.check().to_dense(), power, rtol=1e-4, atol=1e-4)


# --- text --------------------------------------------------------------------------------------------------------


def examples() -> dict[str, tuple[Any, ...]]:
    """Operands for each def that GPUs run."""
    A = tc.as_sparse(matrix(), "csr")
    square = tc.as_sparse(matrix(20, 20), "csr")
    b = tc.as_sparse(torch.randn(5, 6, 7).where(torch.rand(5, 6, 7) < 0.3, 0), "csf")
    u, v = torch.randn(20, 7), torch.randn(24, 7)
    return {
        "spmv": (A, torch.randn(24)),
        "spmm": (A, torch.randn(24, 64)),
        "transposed": (tc.as_sparse(matrix(), "bsr(4,2)"), torch.randn(20)),
        "total": (A,),
        "largest": (A,),
        "sampled": (A, u, v),
        "sampled_coo": (tc.as_sparse(matrix(), "coo"), u, v),
        "mttkrp": (b, torch.randn(6, 10), torch.randn(7, 10)),
        "gcn": (square, torch.randn(20, 9), torch.randn(9, 5)),
        "attend": (square, *torch.randn(3, 20, 6)),
        "product": (square, square),
        "either": (A, A),
        "both": (A.to("dcsr"), A.to("dcsr")),
        "power": (square,),
    }


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="NVRTC is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", examples())
def test_nvrtc_takes_the_text(name: str, architecture: str) -> None:
    kernel = OPS[name].compile(*examples()[name], target=f"cuda:{architecture}")
    assert kernel.resources["spill_bytes"] == 0
    assert kernel.compiled.cubin.architecture == architecture


def test_what_source_shows() -> None:
    A, x = tc.as_sparse(matrix(200, 24), "csr"), torch.randn(24)
    kernel = OPS.spmv.compile(A, x, target="cuda:sm_90")
    assert "__shfl_xor_sync" in kernel.source("cuda")
    assert "kernel spmv.0.walk: 2112 blocks; a team of 4 lanes for i, whose lanes share j" in kernel.source("schedule")
    assert "A: csr" in kernel.source("tc")
    assert "shuffle_xor" in kernel.source("loops")
    assert "get_group_id" in kernel.source("opencl")
    with pytest.raises(ArgumentError, match="no source of kind 'llvm'"):
        kernel.source("llvm")
    again = OPS.spmv.compile(A, x, target="cuda:sm_90")
    assert again.compiled is kernel.compiled


def test_a_kernel_is_for_formats_and_fixed_sizes() -> None:
    A, X = tc.as_sparse(matrix(), "csr"), torch.randn(24, 8)
    kernel = OPS.spmm.compile(A, X, target=SMALL)
    other = torch.randn(11, 30)
    torch.testing.assert_close(
        kernel.emulate(tc.as_sparse(other, "csr"), Y := torch.randn(30, 8)), other @ Y, rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ArgumentError, match="other fixed sizes"):
        kernel.emulate(A, torch.randn(24, 9))
    with pytest.raises(ArgumentError, match="other formats"):
        kernel.emulate(A.to("csc"), X)


def test_what_is_refused() -> None:
    A = tc.as_sparse(matrix(20, 20), "csr")
    twice = tc.define("def f(float(N,M) A: csr) -> (C: coo) { C(i,j) = A(i,j)  C(i,j) max=! 2 * A(i,j) }").f
    with pytest.raises(ArgumentError, match="a second definition of the sparse 'C'"):
        twice.compile(A, target="cuda:sm_90")
    with pytest.raises(ArgumentError, match="no CPU as target"):
        OPS.spmv.compile(A, torch.randn(20), target="cuda:sm_90", schedule=parallel("i"))
    columns = tc.SparseOptions(order=("j", "i"))
    with pytest.raises(ArgumentError, match="no order of loops with j, i"):
        OPS.spmv.compile(A, torch.randn(20), target="cuda:sm_90", options=columns)


# --- calls -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ops() -> Any:
    """With kernels that no other test has loaded."""
    return tc.define(SOURCE)


def test_calls_on_a_device(fake: FakeCuda, ops: Any) -> None:
    """By the launch path of dense kernels; a new pattern or size makes no new kernel, another type of indices does."""
    for rows in (20, 50, 20):
        a, x = matrix(rows), torch.randn(24)
        for operand in (tc.as_sparse(a, "csr"), a.to_sparse_csr()):
            torch.testing.assert_close(ops.spmv(operand, x), a @ x, rtol=1e-4, atol=1e-4)
    assert len(fake.launches) == 6
    assert {launch[0] for launch in fake.launches} == {"spmv_0_walk"}
    assert fake.log.count("load_module") == 2
    assert not fake.waits


def test_dense_products_of_a_def_are_dense_kernels(fake: FakeCuda, ops: Any) -> None:
    a, x, w = matrix(20, 20), torch.randn(20, 9), torch.randn(9, 5)
    found = ops.gcn(tc.as_sparse(a, "csr"), x, w)
    torch.testing.assert_close(found, torch.relu(a @ x @ w), rtol=1e-4, atol=1e-4)
    assert len(fake.launches) == 3
    s, u, v = matrix(), torch.randn(20, 7), torch.randn(24, 7)
    sampled = ops.sampled(s.to_sparse_csr(), u, v)
    assert sampled.layout is torch.sparse_csr
    torch.testing.assert_close(sampled.to_dense(), (u @ v.T) * (s != 0), rtol=1e-4, atol=1e-4)


def test_gradients_on_a_device(fake: FakeCuda, ops: Any) -> None:
    a, x = matrix(), torch.randn(24, requires_grad=True)
    A = tc.as_sparse(a, "csr")
    A.values.requires_grad_()
    ops.spmv(A, x).square().sum().backward()
    a.requires_grad_()
    z = x.detach().clone().requires_grad_()
    (a @ z).square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-4, atol=1e-4)
    assert a.grad is not None
    torch.testing.assert_close(A.values.grad, a.grad[a != 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["product", "either"])
def test_gradients_of_counted_results_on_a_device(name: str, fake: FakeCuda, ops: Any) -> None:
    a, b = matrix(20, 20), matrix(20, 20)
    A, B = tc.as_sparse(a, "csr"), tc.as_sparse(b, "csr")
    A.values.requires_grad_()
    ops[name](A, B).values.square().sum().backward()
    a.requires_grad_()
    (a @ b if name == "product" else a + b).square().sum().backward()
    assert a.grad is not None
    assert A.values.grad is not None
    torch.testing.assert_close(A.values.grad, a.grad[tuple(A.coordinates())], rtol=1e-4, atol=1e-4)


def test_compile_uses_the_device_of_the_operands(fake: FakeCuda, ops: Any) -> None:
    A, x = tc.as_sparse(matrix(), "csr"), torch.randn(24)
    kernel = ops.spmv.compile(A, x)
    assert kernel.compiled.target.name == "sm_90"
    torch.testing.assert_close(kernel(A, x), A.to_dense() @ x, rtol=1e-4, atol=1e-4)
    fake.capturing = True
    with pytest.raises(ArgumentError, match="call it once before the capture"):
        ops.total(A)


def test_counted_results_on_a_device(fake: FakeCuda, ops: Any) -> None:
    a, c = matrix(), matrix(24, 30)
    A, C = tc.as_sparse(a, "csr"), tc.as_sparse(c, "csr")
    torch.testing.assert_close(ops.product(A, C).check().to_dense(), a @ c, rtol=1e-4, atol=1e-4)
    assert [launch[0] for launch in fake.launches] == ["product_0_count", "product_0_collect"]
    assert fake.log.count("load_module") == 1
    fake.capturing = True
    with pytest.raises(ArgumentError, match="allocates what its kernels have counted"):
        ops.product(A, C)


def test_repeated_elements_on_a_device(fake: FakeCuda, ops: Any) -> None:
    a, x = matrix(), torch.randn(24)
    places = a.nonzero().T.repeat(1, 2)
    A = tc.SparseTensor.from_coordinates(places, a[tuple(places)], a.shape, "uc")
    torch.testing.assert_close(ops.spmv(A, x), 2 * a @ x, rtol=1e-4, atol=1e-4)
    assert [launch[0] for launch in fake.launches] == ["spmv_0_fill", "spmv_0_walk"]
