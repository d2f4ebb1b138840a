"""Kernels for sparse operands that an earlier process compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cache.store import KERNEL, current_store
from tensor_comprehensions.cli.main import main
from tensor_comprehensions.compiler import sparse_passes
from tensor_comprehensions.core import knobs
from tensor_comprehensions.dispatch.sparse import sparse_cache

SPMV = "def spmv(float(N,M) A: csr, float(M) x) -> (y) { y(i) +=! A(i,j) * x(j) }"
SPGEMM = "def spgemm(float(N,M) A: csr, float(M,K) B: csr) -> (C: csr) { C(i,k) +=! A(i,j) * B(j,k) }"
SDDMM = "def sddmm(float(N,M) A: csr, float(N,K) X, float(M,K) Z) -> (B: csr) { B(i,j) +=! A(i,j) * X(i,k) * Z(j,k) }"
ADD = "def add(float(N,M) A: csr, float(N,M) B: csr) -> (C: csr) { C(i,j) = A(i,j) + B(i,j) }"
FREE = "def free(float(N,M) A, float(M,K) X) -> (Y) { Y(i,k) +=! A(i,j) * X(j,k) }"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path / "cache"), verify=False):
        yield tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the defs that are compiled from now on."""
    names: list[str] = []
    original = sparse_passes.compile_sparse

    def noted(problem: Any, target: Any) -> Any:
        names.append(problem.function.name)
        return original(problem, target)

    monkeypatch.setattr(sparse_passes, "compile_sparse", noted)
    return names


TRANSPOSED = "def sum(float(N,N) A: csr) -> (C: csr) { C(i,j) = A(i,j) + A(j,i) }"
TWICE = """
def twice(float(N,N) A: csr) -> (B: csr, C: csr) {
    B(i,j) = A(i,j) + A(j,i)
    C(i,k) +=! B(i,j) * A(j,k)
}"""
PROGRAM = f"""
import sys
import torch
import tensor_comprehensions as tc
from tensor_comprehensions.cache import package_digest

package_digest._imported = "others may edit the package meanwhile"
package_digest._stamp = lambda: package_digest._imported
torch.manual_seed(0)
torch.set_num_threads(THREADS)
dense = torch.rand(20, 20)
a, x = dense.where(dense < 0.3, 0).to_sparse_csr(), torch.rand(20, 16)
ops = tc.define({SPMV + FREE + SPGEMM + SDDMM + ADD!r})
found = [ops.spmv(a, x[:, 0].contiguous()), ops.free(a, x), ops.sddmm(a, x, x), ops.add(a, a), ops.spgemm(a, a)]
parts = "polyhedral codegen loop_ir compiler sparse islpy lark sympy"
parts += " tc_lang.syntax.parse tc_lang.semantics.check tc_lang.gradients"
light = "compiler compiler.compiled_kernel compiler.row_strides compiler.compiled_sparse_kernel"
light += " sparse sparse.sparse_problem sparse.call_plan"
names = [name.removeprefix("tensor_comprehensions.") for name in sys.modules]
parts = tuple(f"{{part}}." for part in (*parts.split(), "google.protobuf"))
print(*(f.to_dense().double().sum().item() for f in found))
print(*(name for name in names if f"{{name}}.".startswith(parts) and name not in light.split()))
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_a_new_process_lowers_nothing(threads: int, tmp_path: Path) -> None:
    environment = os.environ | {"TC_CACHE_DIR": str(tmp_path), "TC_VERIFY": "0"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("THREADS", str(threads))]
    first, second = (
        subprocess.run(command, env=environment | more, capture_output=True, text=True, check=True).stdout.split("\n")
        for more in ({"TC_CACHE": "readwrite"}, {"TC_CACHE": "read", "TC_CACHE_STRICT": "1"})
    )
    assert first[0] == second[0]
    assert "sparse.lower" in first[1]
    assert second[1] == ""


def matrix(rows: int = 20, columns: int = 20, format: str = "csr") -> Any:
    generator = torch.Generator().manual_seed(rows)
    dense = torch.rand(rows, columns, generator=generator)
    return tc.as_sparse(dense.where(dense < 0.3, 0), format)


def test_a_kernel_is_found(root: Path, compiled: list[str]) -> None:
    a, x = matrix(), torch.rand(20)
    first = tc.define(SPMV).spmv
    assert torch.equal(first(a, x), tc.define(SPMV).spmv(a, x))
    assert compiled == ["spmv"]
    torch.testing.assert_close(first(a, x), a.to_dense() @ x)


def test_all_phases_are_found(root: Path, compiled: list[str]) -> None:
    a, b = matrix(20, 30), matrix(30, 25)
    expected = tc.define(SPGEMM).spgemm(a, b)
    kernel = tc.define(SPGEMM).spgemm.compile(a, b)
    assert len(kernel.compiled.executables) > 1
    assert torch.equal(kernel(a, b).to_dense(), expected.to_dense())
    assert compiled == ["spgemm"]


def test_a_kernel_of_the_cache_has_its_texts(root: Path, compiled: list[str]) -> None:
    a, x = matrix(), torch.rand(20)
    first, second = (tc.define(SPMV).spmv.compile(a, x) for _ in range(2))
    assert compiled == ["spmv"]
    for kind in ("tc", "schedule", "loops", "c", "llvm", "asm"):
        assert first.source(kind) == second.source(kind)


def test_what_a_kernel_depends_on_is_in_its_key(root: Path, compiled: list[str]) -> None:
    def call(format: str, columns: int, index: torch.dtype) -> None:
        a = matrix(format=format)
        levels = [level and tuple(None if x is None else x.to(index) for x in level) for level in a.levels]
        tc.define(FREE).free(tc.SparseTensor(a.format, a.shape, levels, a.values), torch.rand(20, columns))

    for format, columns, index in (
        ("csr", 8, torch.int64), ("csc", 8, torch.int64), ("csr", 9, torch.int64), ("csr", 8, torch.int32),
    ):  # fmt: skip
        call(format, columns, index)
        call(format, columns, index)
    assert len(compiled) == 4


def test_kernels_for_many_threads_have_keys_of_their_own(root: Path, compiled: list[str]) -> None:
    threads = torch.get_num_threads()
    try:
        for n in (1, 4, 1, 4):
            torch.set_num_threads(n)
            found = tc.define(ADD).add(matrix(20), matrix(20))
            torch.testing.assert_close(found.to_dense(), 2 * matrix(20).to_dense())
    finally:
        torch.set_num_threads(threads)
    assert compiled == ["add", "add"]


def test_a_damaged_entry_is_made_again(root: Path, compiled: list[str]) -> None:
    a, x = matrix(), torch.rand(20)
    expected = tc.define(SPMV).spmv(a, x)
    (path,) = (root / "v2" / "kernel").rglob("*.tc")
    path.write_bytes(path.read_bytes()[:-9])
    assert torch.equal(tc.define(SPMV).spmv(a, x), expected)
    assert compiled == ["spmv", "spmv"]


def test_code_of_other_phases_is_passed_over(
    root: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, x = matrix(), torch.rand(20)
    monkeypatch.setattr(sparse_cache, "_serialize_kernel", lambda made: ({"sizes": [3], "symbols": [[]]}, b"four"))
    expected = tc.define(SPMV).spmv(a, x)
    assert torch.equal(tc.define(SPMV).spmv(a, x), expected)
    assert "cannot be used: the machine code is shorter or longer" in caplog.text
    assert compiled == ["spmv", "spmv"]


@pytest.mark.parametrize("change", [lambda plan: plan["CallPlan"].pop(), lambda plan: plan.update(Path=[])])
def test_a_plan_that_cannot_be_read_is_passed_over(
    change: Any, root: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, x, content = matrix(), torch.rand(20), sparse_cache._serialize_kernel

    def damage(made: Any) -> Any:
        metadata, data = content(made)
        change(metadata["plan"])
        return metadata, data

    monkeypatch.setattr(sparse_cache, "_serialize_kernel", damage)
    expected = tc.define(SPMV).spmv(a, x)
    assert torch.equal(tc.define(SPMV).spmv(a, x), expected)
    assert "cannot be used" in caplog.text
    assert compiled == ["spmv", "spmv"]


def test_operands_are_converted_for_a_kernel_of_the_cache(root: Path, compiled: list[str]) -> None:
    a = matrix()
    expected = tc.define(TRANSPOSED).sum(a)
    assert torch.equal(tc.define(TRANSPOSED).sum(a).to_dense(), expected.to_dense())
    torch.testing.assert_close(expected.to_dense(), a.to_dense() + a.to_dense().t())
    assert compiled == ["sum"]


def test_results_that_later_statements_read_are_operands_of_a_kernel_of_the_cache(
    root: Path, compiled: list[str]
) -> None:
    a = matrix()
    first, second = (tc.define(TWICE).twice(a) for _ in range(2))
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine.to_dense(), other.to_dense())
    dense = a.to_dense()
    torch.testing.assert_close(second[1].to_dense(), (dense + dense.t()) @ dense)
    assert compiled == ["twice"]


def test_nothing_is_kept_while_the_cache_is_off(root: Path, compiled: list[str]) -> None:
    with knobs.override_knobs(cache="off"):
        tc.define(SPMV).spmv(matrix(), torch.rand(20))
    assert not list(current_store().names((KERNEL,)))


def test_the_command_lists_them(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tc.define(SPMV).spmv(matrix(), torch.rand(20))
    assert main(["cache", "ls"]) == 0
    assert "sparse" in capsys.readouterr().out
