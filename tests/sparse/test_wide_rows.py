"""Rows of results that are combined in hash tables: the same bits as in arrays, for any width and number of threads."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.c.c_printer import emit_c
from tensor_comprehensions.loop_ir.nodes import Module
from tests.helpers import sparse_checks
from tests.helpers.sparse_checks import interpret_def, same

GCC = shutil.which("gcc")
PRODUCTS = {
    "rows": "def f(double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }",
    "maxima": "def f(double(N,K) A: csr, double(K,M) B: csr) -> (C: csr) { C(i,j) max=! A(i,k) * B(k,j) }",
    "halves": "def f(half(N,K) A: csr, half(K,M) B: csr) -> (C: csr) { C(i,j) +=! A(i,k) * B(k,j) }",
    "columns": "def f(int64(N,K) A: csc, int64(K,M) B: csc) -> (C: csc) { C(i,j) +=! A(i,k) * B(k,j) }",
    "sums": """def f(double(N,K) A: csr, double(K,M) B: csr, double(K,M) D: csr) -> (C: csr) {
        C(i,j) +=! A(i,k) * (B(k,j) + D(k,j))
    }""",
    "a vector": "def f(double(K) A: s, double(K,M) B: csr) -> (C: s) { C(j) +=! A(k) * B(k,j) }",
    "rows that exist": "def f(double(N,K) A: ss, double(K,M) B: csr) -> (C: ss) { C(i,j) +=! A(i,k) * B(k,j) }",
    "rows of those that exist": """def f(double(N,K) A: ss, double(K,M) B: csr) -> (C: csr) {
        C(i,j) +=! A(i,k) * B(k,j)
    }""",
    "columns of a sum of a vector": """def f(int64(N) A: s, int64(N,K) B: dd, int64(K,M) ZN: csr) -> (C: csc) {
        C(h,m) *=! A(m) + B(m,k) where k in 1:1, h in 0:N
    }""",
    "rows of rows": "def f(double(N,N,K) A: dds, double(K,M) B: csr) -> (C: dds) { C(i,h,j) +=! A(i,h,k) * B(k,j) }",
}


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_operator(text: str, hash_rows: str, chunk_positions: int = 16) -> tc.Operator:
    return tc.define(text, options=tc.SparseOptions(hash_rows=hash_rows, chunk_positions=chunk_positions)).f


def make_operands(op: tc.Operator, n: int, density: float) -> list[tc.SparseTensor]:
    generator = torch.Generator().manual_seed(n)
    made = []
    for p in op.function.parameters:
        x = torch.randint(-9, 9, (n,) * p.rank, generator=generator) / 8
        x[torch.rand((n,) * p.rank, generator=generator) > density] = 0
        made.append(tc.as_sparse((x * 8 if p.dtype.is_integer else x).to(getattr(torch, p.dtype.name)), str(p.format)))
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("name", PRODUCTS)
def test_hash_tables_give_the_bits_of_arrays(name: str) -> None:
    array, table = (make_operator(PRODUCTS[name], choice) for choice in ("never", "always"))
    for n, density in ((9, 0.4), (1, 1.0), (5, 0.0)):
        given = make_operands(array, n, density)
        expected = array(*given)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert same(table(*given).check(), expected)
            assert same(table.assemble(*given)(*given), expected)
            assert same(interpret_def(table._kernels.sparse, given, {})["C"], expected)
    loops = table.compile(*given).source("loops")
    assert "coordinates" in loops
    assert "touched" not in loops


@pytest.mark.parametrize("threads", [1, 3])
def test_long_rows(threads: int) -> None:
    """More elements than the first table of a row would hold, and more coordinates at a slot than one."""
    torch.set_num_threads(threads)
    array, table = (make_operator(PRODUCTS["rows"], choice, 2048) for choice in ("never", "always"))
    given = make_operands(array, 150, 0.2)
    expected = array(*given)
    assert same(table(*given), expected)
    assert same(table.assemble(*given)(*given), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_products_of_2_to_the_40_columns(threads: int) -> None:
    """They were refused, since there is no memory for an element for each column."""
    torch.set_num_threads(threads)
    op, generator = tc.define(PRODUCTS["rows"]).f, torch.Generator().manual_seed(0)
    columns = torch.randint(2**40, (12,), generator=generator)
    where = torch.stack((torch.randint(20, (90,), generator=generator), columns[torch.arange(90) % 12]))
    values = torch.rand(90, dtype=torch.float64, generator=generator)
    wide = tc.SparseTensor.from_coordinates(where, values, (20, 2**40), "csr")
    (left,) = make_operands(op, 20, 0.3)[:1]
    found = op(left, wide).check()
    narrow = where.clone()
    ranks = torch.searchsorted(columns.sort().values, where[1])
    narrow[1] = ranks
    expected = op(left, tc.SparseTensor.from_coordinates(narrow, values, (20, 12), "csr"))
    assert found.shape == (20, 2**40)
    assert torch.equal(columns.sort().values[expected.coordinates()[1]], found.coordinates()[1])
    assert torch.equal(found.coordinates()[0], expected.coordinates()[0])
    assert torch.equal(found.values, expected.values)
    assert same(op.assemble(left, wide)(left, wide), found)


def test_sums_of_2_to_the_40_columns_by_threads() -> None:
    """Their elements were counted by a flag for each column."""
    torch.set_num_threads(3)
    op = tc.define("def f(double(N,M) A: csr, double(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }").f
    a, b = (
        tc.SparseTensor.from_coordinates([[0, 0, 2], columns], torch.ones(3).double(), (3, 2**40), "csr")
        for columns in ([5, 2**39, 1], [2**39, 2**40 - 1, 0])
    )
    assert op(a, b).check().coordinates().tolist() == [[0, 0, 0, 2, 2], [5, 2**39, 2**40 - 1, 0, 1]]
    assert op(a, b).values.tolist() == [1, 2, 1, 1, 1]


def test_kernels_of_results_without_a_workspace_are_one() -> None:
    op = tc.define("def f(double(N,M) A: csr) -> (C: csr) { C(i,j) = 2 * A(i,j) + A(i,j) }").f
    (a,) = make_operands(op, 4, 0.5)
    wide = tc.SparseTensor(a.format, (4, 2**25), a.levels, a.values)
    assert op.compile(wide).compiled is op.compile(a).compiled


@pytest.mark.skipif(GCC is None, reason="compiling the C text needs gcc")
@pytest.mark.parametrize("name", ["rows", "rows that exist"])
def test_c_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    op = make_operator(PRODUCTS[name], "always")
    given = make_operands(op, 9, 0.4)

    def run(module: Module, arrays: dict[str, np.ndarray]) -> list[int]:
        stem = module.name.replace(".", "_")
        source, library = tmp_path / f"{stem}.c", tmp_path / f"{stem}.so"
        source.write_text(emit_c(module))
        flags = ["-std=c99", "-Wall", "-Werror", "-O1", "-march=native", "-fopenmp", "-fwrapv", "-shared", "-fPIC"]
        subprocess.run([str(GCC), *flags, str(source), "-o", str(library), "-lm"], check=True)
        function = getattr(ctypes.CDLL(str(library)), stem)
        code = function(*(ctypes.c_void_p(arrays[b.name].ctypes.data) for b in module.arguments))
        return [code] if code else []

    monkeypatch.setattr(sparse_checks, "interpret", run)
    assert same(interpret_def(op._kernels.sparse, given, {})["C"], op(*given))
