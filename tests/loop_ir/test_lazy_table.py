"""Tables whose rare rows are made when one of them is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tensor_comprehensions.loop_ir.lazy_table import LazyTable


def test_other_rows_are_made_once_when_one_is_asked_for() -> None:
    made: list[int] = []
    table = LazyTable({"a": 1}, lambda: made.append(1) or {"b": 2})  # type: ignore[func-returns-value]
    assert (table["a"], table.get("a"), made) == (1, 1, [])
    assert (table["b"], "b" in table, list(table), len(table), made) == (2, True, ["a", "b"], 2, [1])
    with pytest.raises(KeyError):
        table["c"]
    assert table.get("c") is None
    assert made == [1]


def test_a_kernel_for_a_cpu_makes_no_atoms() -> None:
    program = """
import torch, tensor_comprehensions as tc
from tensor_comprehensions.loop_ir import atoms, intrinsics
op = tc.define("def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }").mm
op(torch.randn(64, 300), torch.randn(300, 200))
print(atoms.ATOMS._all is None, intrinsics.INTRINSICS._all is None)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
