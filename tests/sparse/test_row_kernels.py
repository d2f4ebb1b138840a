"""Rows of every length through the ways that kernels walk, merge, add up and sort them, in all types of indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, FLOAT64, INT32, INT64, DType
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.sparse.lower import lower
from tensor_comprehensions.sparse.row_workspace import LINE, MAX_MARK
from tensor_comprehensions.sparse.sparse_problem import SparseProblem
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget
from tensor_comprehensions.thresholds import JAMMED_ELEMENTS
from tests.helpers.sparse_checks import interpret_def, same

GATHERS = CpuTarget("cpu", "sapphirerapids", AVX512.features, 512, 32, AVX512.cache)
INDICES = (torch.int32, torch.int64)
TYPES = {
    "double": torch.float64, "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
LENGTHS = (0, 1, 7, 8, 9, 0, 0, 15, 16, 17, 31, 33, 64, 65, 100, 3, 0)
"""Elements of the rows of a matrix, around the lanes of vectors."""
COLUMNS = 130


def matrix(
    lengths: tuple[int, ...] = LENGTHS, columns: int = COLUMNS, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Whole numbers from 1 to 3 at random columns, so that sums are exact."""
    rng = np.random.default_rng(seed)
    x = np.zeros((len(lengths), columns))
    for row, n in enumerate(lengths):
        x[row, rng.choice(columns, n, replace=False)] = rng.integers(1, 4, n)
    return torch.from_numpy(x).to(dtype)


def make_stored(x: Tensor, index: torch.dtype = torch.int32, format: str = "csr") -> tc.SparseTensor:
    where = x.nonzero().T
    return tc.SparseTensor.from_coordinates(where, x[tuple(where)], tuple(x.shape), format, index)


def assert_stores(result: tc.SparseTensor, expected: Tensor) -> None:
    """The same values, at no place where `expected` is 0, in order."""
    assert torch.equal(result.check().to_dense(), expected)
    assert result.nnz == int((expected != 0).sum())


@pytest.mark.parametrize(
    ("name", "reduction", "operator"), [("double", "min", "+"), ("half", "max", "+"), ("int32", "*", "*")]
)
def test_rows_that_combine_products(name: str, reduction: str, operator: str) -> None:
    """A product over other operations than sum and product, whole and its values alone."""
    op = tc.define(
        f"def f({name}(N,K) A: csr, {name}(K,M) B: csr) -> (C: csr) "
        f"{{ C(i,j) {reduction}=! A(i,k) {operator} B(k,j) where exists A(i,k), exists B(k,j) }}"
    ).f
    A = matrix((0, 2, 3, 1, 0, 2), 12, dtype=TYPES[name])
    B = matrix((3, 0, 9, 1, 70, 1, 2, 0, 40, 5, 2, 3), seed=1, dtype=TYPES[name])
    both = (A != 0)[:, :, None] & (B != 0)[None]
    pairs = A.double()[:, :, None] + B.double()[None] if operator == "+" else A.double()[:, :, None] * B.double()[None]
    held = torch.where(both, pairs, {"min": torch.inf, "max": -torch.inf, "*": 1.0}[reduction])
    combined = {"min": held.amin(1), "max": held.amax(1), "*": held.prod(1)}[reduction]
    expected = torch.where(both.any(1), combined, 0.0).to(TYPES[name])
    a, b = make_stored(A), make_stored(B)
    assert "collected" not in op.compile(a, b).source("schedule")
    assert_stores(op(a, b), expected)
    fixed = op.assemble(a, b)
    assert_stores(fixed(a, b), expected)


REPEATED = "def f(double(B,V) I: du, double(V,D) W) -> (Y) { Y(b,d) +=! %s }"


@pytest.mark.parametrize(("value", "walks_runs"), [
    ("I(b,v) * W(v,d)", False), ("-W(v,d) * I(b,v) / 2 + I(b,v)", False),
    ("I(b,v) * I(b,v) * W(v,d)", True), ("max(I(b,v), 2) * W(v,d) where exists I(b,v)", True),
])  # fmt: skip
def test_repeated_elements_of_sums(value: str, walks_runs: bool) -> None:
    """A factor of a sum is walked element by element; other uses add the elements of a place first."""
    places = torch.tensor([[0, 0, 2, 2, 2, 3], [1, 1, 0, 4, 4, 2]])
    values = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, -2.0], dtype=torch.float64)
    bags = tc.SparseTensor.from_arrays(
        "du", (4, 5), [None, (torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32), places[1].int())], values
    )
    W = torch.arange(5 * 9, dtype=torch.float64).reshape(5, 9)
    op = tc.define(REPEATED % value).f
    dense = torch.zeros(4, 5, dtype=torch.float64).index_put_(tuple(places), values, accumulate=True)
    sums = dense[:, :, None]
    expected = {
        "I(b,v) * W(v,d)": sums * W,
        "-W(v,d) * I(b,v) / 2 + I(b,v)": -W * sums / 2 + sums,
        "I(b,v) * I(b,v) * W(v,d)": sums * sums * W,
    }.get(value, torch.where(sums != 0, sums.clamp(min=2) * W, 0.0))
    assert torch.equal(op(bags, W), expected.sum(1))
    assert ("I.crd1.end" in op.compile(bags, W).source("loops")) == walks_runs


@pytest.mark.parametrize(("value", "expected"), [
    ("+=! A(i,j) * A(i,j)", lambda A: (A * A).sum()), ("min=! A(i,j) where exists A(i,j)", lambda A: A[A != 0].min()),
    ("max=! A(i,0) where i in 0:1", lambda A: A[0, 0]),
])  # fmt: skip
def test_one_element_is_combined_in_a_register(value: str, expected: Callable[[Tensor], Tensor]) -> None:
    op, A = tc.define(f"def f(double(N,M) A: csr) -> (y) {{ y {value} }}").f, matrix()
    assert torch.equal(op(make_stored(A)), expected(A))
    assert op.compile(make_stored(A)).source("loops").count(" y[0] ") == 1
    empty = torch.zeros(0, 4, dtype=torch.float64)
    if "+" in value:
        assert op(make_stored(empty)) == 0


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_products_with_vectors(name: str, index: torch.dtype) -> None:
    dtype = TYPES[name]
    op = tc.define(f"def f({name}(N,M) A: csr, {name}(M) x) -> (y) {{ y(i) +=! A(i,j) * x(j) }}").f
    A, x = matrix(dtype=dtype), torch.arange(COLUMNS, dtype=torch.float64).remainder(3).to(dtype)
    assert torch.equal(op(make_stored(A, index), x), (A.double() @ x.double()).to(dtype))


@pytest.mark.parametrize(("statement", "expected"), [
    ("y(i) max=! A(i,j) where exists A(i,j)", lambda A: torch.where(A == 0, -torch.inf, A).amax(1)),
    ("y(i) min=! A(i,j)", lambda A: A.amin(1)),
    ("y(i) +=! A(i,j) * A(i,j)", lambda A: (A * A).sum(1)),
    ("y(i) +=! A(i,j) * j", lambda A: (A * torch.arange(COLUMNS)).sum(1)),
])  # fmt: skip
def test_other_reductions_of_rows(statement: str, expected: Callable[[Tensor], Tensor]) -> None:
    op = tc.define(f"def f(double(N,M) A: csr) -> (y) {{ {statement} }}").f
    A = matrix()
    assert torch.equal(op(make_stored(A)), expected(A))


@pytest.mark.sampled  # types of values and of coordinates
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("statement", "vectors"), [
    ("C(i,j) = 2 * A(i,j) + x(i) * A(i,j)", True),
    ("C(i,j) = x(i) where exists A(i,j)", True),
    ("C(i,j) = A(i,j) * A(i,j)  C(i,j) = C(i,j) - A(i,j) where exists A(i,j)", True),
    ("s(i) max=! A(i,j)  C(i,j) = A(i,j) - s(i) where exists A(i,j)", True),
    ("C(i,j) = A(i,j) * x(i) where exists A(j,i)", False),
    ("C(i,j) = A(i,j) * (j + 1)", False),
])  # fmt: skip
def test_values_beside_those_of_an_operand(statement: str, vectors: bool, name: str, index: torch.dtype) -> None:
    """In vectors, if nothing is read at a coordinate."""
    source = f"def f({name}(N,N) A: csr, {name}(N) x) -> (C: csr) {{ {statement} }}"
    op = tc.define(source, options=tc.SparseOptions(stage_rows="never")).f
    lengths = (*LENGTHS, *(0 for _ in range(COLUMNS - len(LENGTHS))))
    A, x = make_stored(matrix(lengths, dtype=TYPES[name]), index), torch.arange(COLUMNS).remainder(3).to(TYPES[name])
    assert torch.equal(op(A, x).check().to_dense(), op.reference(A, x).to_dense())
    wide = name not in ("half", "bfloat16")
    if wide:
        assert ("@ .mask" in op.compile(A, x).source("loops")) == vectors


def test_a_sum_goes_on_from_what_was_there() -> None:
    op = tc.define("def f(double(N,M) A: csr, double(M) x, double(N) b) -> (y) "
                   "{ y(i) = b(i)  y(i) += A(i,j) * x(j) }").f  # fmt: skip
    A, x, b = matrix(), torch.ones(COLUMNS, dtype=torch.float64), torch.arange(len(LENGTHS), dtype=torch.float64)
    assert torch.equal(op(make_stored(A), x, b), b + A @ x)


@pytest.mark.parametrize("columns", [1, 7, 16, 64, 65, 96, 200, 600])
@pytest.mark.parametrize("name", ["double", "float", "half", "int32"])
def test_products_with_matrices_of_every_width(name: str, columns: int) -> None:
    dtype = TYPES[name]
    op = tc.define(f"def f({name}(N,M) A: csr, {name}(M,F) X) -> (Y) {{ Y(i,f) +=! A(i,j) * X(j,f) }}").f
    A, X = matrix(dtype=dtype), matrix((columns // 2,) * COLUMNS, columns, 1, dtype)
    assert torch.equal(op(make_stored(A), X), (A.double() @ X.double()).to(dtype))


@pytest.mark.parametrize("width", [1, 8, 64, 70])
def test_sampled_products_of_every_width(width: int) -> None:
    op = tc.define("def f(double(N,M) S: csr, double(N,K) U, double(M,K) V) -> (E: csr) "
                   "{ E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j) }").f  # fmt: skip
    S, U, V = matrix(), matrix((width,) * len(LENGTHS), width, 1), matrix((width,) * COLUMNS, width, 2)
    assert torch.equal(op(make_stored(S), U, V).to_dense(), (U @ V.T) * (S != 0))


JAMMED = {
    "rows": "def f(double(N,M) S: csr, double(N,K) U, double(M,K) V) -> (E: csr) "
    "{ E(i,j) +=! S(i,j) * U(i,k) * V(j,k) }",
    "rows that exist, twice": "def f(double(N,M) S: dcsr, double(N,K) U, double(M,K) V) -> (E: dcsr) { "
    "E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j)  E(i,j) += U(i,k) * U(i,k) where exists S(i,j) }",
    "maxima": "def f(double(N,M) S: csr, double(N,K) U, double(M,K) V) -> (E: csr) "
    "{ E(i,j) max=! U(i,k) * V(j,k) where exists S(i,j) }",
    "halves": "def f(half(N,M) S: csr, half(N,K) U, half(M,K) V) -> (E: csr) "
    "{ E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j) }",
    "columns": "def f(float(N,M) S: csc, float(N,K) U, float(M,K) V) -> (E: csc) "
    "{ E(i,j) +=! U(i,k) * V(j,k) where exists S(i,j) }",
    "a temporary": "def f(double(N,M) S: csr, double(N,K) U, double(M,K) V) -> (E) "
    "{ s(i,j) +=! U(i,k) * V(j,k) where exists S(i,j)  E(i) +=! s(i,j) }",
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", JAMMED)
def test_sums_of_several_elements_in_one_loop(name: str) -> None:
    """A row that elements share is loaded once for several of them; the rest of a row has a loop for each element."""
    op = tc.define(JAMMED[name]).f
    for width in (64, 19):
        types = [getattr(torch, p.dtype.name) for p in op.function.parameters]
        S, U, V = matrix(), matrix((width,) * len(LENGTHS), width, 1), matrix((width,) * COLUMNS, width, 2)
        sparse = tc.as_sparse(S.to(types[0]), str(op.function.parameters[0].format))
        given = [sparse, U.to(types[1]), V.to(types[2])]
        kernel = op.compile(*given)
        assert f"total.{JAMMED_ELEMENTS - 1}" in kernel.source("loops")
        found = kernel(*given)
        assert same(found, interpret_def(op._kernels.sparse, given, {})["E"])
        expected = op.reference(*given)
        dense = (x.to_dense() if isinstance(x, tc.SparseTensor) else x for x in (found, expected))
        torch.testing.assert_close(*dense)


@pytest.mark.parametrize("index", [(a, b) for a in INDICES for b in INDICES], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_sums_of_two(name: str, index: tuple[torch.dtype, torch.dtype]) -> None:
    dtype = TYPES[name]
    op = tc.define(f"def f({name}(N,M) B: csr, {name}(N,M) C: csr) -> (A: csr) {{ A(i,j) = B(i,j) + C(i,j) }}").f
    B = matrix(dtype=dtype)
    for C in (B, matrix(LENGTHS[::-1], seed=1, dtype=dtype), torch.zeros_like(B)):
        assert_stores(op(make_stored(B, index[0]), make_stored(C, index[1])), B + C)
        assert_stores(op(make_stored(C, index[0]), make_stored(B, index[1])), B + C)


@pytest.mark.parametrize("count", [3, 4])
def test_sums_of_several(count: int) -> None:
    names = "BCDE"[:count]
    parameters = ", ".join(f"double(N,M) {n}: csr" for n in names)
    value = " + ".join(f"{n}(i,j)" for n in names)
    op = tc.define(f"def f({parameters}) -> (A: csr) {{ A(i,j) = {value} }}").f
    every = [matrix(LENGTHS[n:] + LENGTHS[:n], seed=n) for n in range(count)]
    for given in (every, [every[0]] * count, [every[0], *[torch.zeros_like(every[0])] * (count - 1)]):
        assert_stores(op(*map(make_stored, given)), torch.stack(given).sum(0))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of torch's threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.sampled  # types and numbers of operands
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize(("count", "value"), [
    (2, "B(i,j) + C(i,j)"), (2, "B(i,j) * C(i,j)"),
    (3, "B(i,j) - C(i,j) + D(i,j)"), (3, "B(i,j) * C(i,j) + D(i,j)"),
])  # fmt: skip
def test_any_number_of_threads_gives_the_same_sums(
    count: int, value: str, index: torch.dtype, threads: Callable[[int], None]
) -> None:
    names = "BCD"[:count]
    op = tc.define(f"def f({', '.join(f'double(N,M) {n}: csr' for n in names)}) -> (A: csr) {{ A(i,j) = {value} }}").f
    given = [make_stored(matrix(LENGTHS * 400, seed=n), index) for n in range(count)]
    found = []
    for number in (1, 3):
        threads(number)
        found.append(op(*given).check())
        fixed = op.assemble(*given)
        for other in (number, 1, 3):
            threads(other)
            found.append(fixed(*given))
    for result in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result.levels[1], found[0].levels[1], strict=True))
        assert torch.equal(result.values, found[0].values)


def test_the_last_coordinate_that_an_index_type_holds() -> None:
    op = tc.define("def f(double(N) b: s, double(N) c: s) -> (a: s) { a(i) = b(i) + c(i) }").f
    extent = 2**31 - 1
    b, c = (
        tc.SparseTensor.from_coordinates([places], torch.ones(len(places)).double(), (extent,), "s", torch.int32)
        for places in ([0, extent - 1], [5, extent - 1])
    )
    found = op(b, c)
    assert found.coordinates().tolist() == [[0, 5, extent - 1]]
    assert found.values.tolist() == [1, 1, 2]


@pytest.mark.sampled  # numbers of columns
@pytest.mark.parametrize("columns", [1, LINE, LINE + 1, LINE * LINE - 1, LINE * LINE, LINE * LINE + 70])
def test_products_of_sparse_matrices(columns: int) -> None:
    op = tc.define("def f(double(N,K) B: csr, double(K,M) C: csr) -> (A: csr) { A(i,j) +=! B(i,k) * C(k,j) }").f
    B, C = matrix(), matrix(tuple(n % (columns + 1) for n in range(COLUMNS)), columns, 1)
    for index in INDICES:
        assert_stores(op(make_stored(B, index), make_stored(C, index)), B @ C)


def test_products_of_more_rows_than_there_are_marks() -> None:
    op = tc.define("def f(float(N,K) B: csr, float(K,M) C: csr) -> (A: csr) { A(i,j) +=! B(i,k) * C(k,j) }").f
    B = matrix((3, 0, 5) * MAX_MARK, 20, dtype=torch.float32)
    C = matrix((0, 4, 2, 7) * 5, 30, 1, torch.float32)
    assert_stores(op(make_stored(B), make_stored(C)), B @ C)


@pytest.mark.parametrize("index", [INT32, INT64], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize("target", [GATHERS, AVX512, AVX2], ids=lambda t: t.name)
def test_rows_in_the_vectors_of_any_processor(target: CpuTarget, dtype: DType, index: DType) -> None:
    from tensor_comprehensions.compiler.sparse_passes import run_sparse_passes

    types = {FLOAT64: ("double", np.float64), FLOAT32: ("float", np.float32), FLOAT16: ("half", np.float16)}
    name, numpy_type = types[dtype]
    op = tc.define(f"def f({name}(N,M) A: csr, {name}(M) x) -> (y) {{ y(i) +=! A(i,j) * x(j) }}").f
    program = lower(SparseProblem(op.function, (("A", index),)), target)
    (module,) = (run_sparse_passes(m) for m in program.phases)
    uses_vectors = target is GATHERS and dtype is not FLOAT16
    assert any("x8" in line or "x16" in line for line in _loops(module)) == uses_vectors
    assert ("@llvm.masked.gather" in emit_llvm(module, target, {})) == uses_vectors
    A, x = matrix().numpy().astype(numpy_type), np.arange(COLUMNS).astype(numpy_type) % 3
    rows, columns = A.nonzero()
    pos = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(LENGTHS)))))
    integer = np.int32 if index is INT32 else np.int64
    arrays = [
        np.array([len(LENGTHS), COLUMNS]), np.zeros(1, np.int64), pos.astype(integer), columns.astype(integer),
        A[rows, columns], x, np.zeros(len(LENGTHS), numpy_type),
    ]  # fmt: skip
    interpret(module, {b.name: a for b, a in zip(module.arguments, arrays, strict=True)})
    assert (arrays[-1] == A.astype(np.float64) @ x).all()


def _loops(module: object) -> list[str]:
    from tensor_comprehensions.loop_ir.show import format_program

    return format_program(module).splitlines()  # type: ignore[arg-type]
