"""Pointwise loops are split where conditions change, and compute the same."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.loop_ir.nodes import Select
from tensor_comprehensions.loop_ir.rewrite import walk_expr, walk_stmt_exprs

PROGRAMS = {
    "padding": """def f(float(3,7,20) x) -> (y) {
        y(c,i,j) = (i >= 1 && i < 8 && j >= 2 && j < 22 ? x(c,i-1,j-2) : 0.0) where i in 0:9, j in 0:25
    }""",
    "concatenation": """def f(float(3,7,20) x) -> (y) {
        y(c,i,j) = (c < 3 ? x(c,i,j) : c < 4 ? x(c-3,i,j) * 2.0 : x(c-4,i,j) + 1.0) where c in 0:7
    }""",
    "on both sides": """def f(float(3,7,20) x) -> (y) {
        y(c,i,j) = (j <= 5 || j > 17 ? x(c,i,j) : -x(c,i,j))
    }""",
    "mirrored": """def f(float(3,7,20) x) -> (y) {
        y(c,i,j) = (4 > j ? x(c,i,j) : 1.0)
    }""",
}


def expected(name: str, x: torch.Tensor) -> torch.Tensor:
    j = torch.arange(20)
    return {
        "padding": lambda: torch.nn.functional.pad(x, (2, 3, 1, 1)),
        "concatenation": lambda: torch.cat([x, x[:1] * 2, x + 1]),
        "on both sides": lambda: torch.where((j <= 5) | (j > 17), x, -x),
        "mirrored": lambda: torch.where(j < 4, x, torch.ones(())),
    }[name]()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_iteration_evaluates_a_condition_on_indices(name: str) -> None:
    x = torch.randn(3, 7, 20)
    op = tc.define(PROGRAMS[name]).f
    kernel = op.compile(x)
    torch.testing.assert_close(op(x)[: len(expected(name, x))], expected(name, x), rtol=0, atol=0)
    module = kernel.compiled.rerun_until("partition")
    values = [x for k in module.kernels for e in walk_stmt_exprs(k.body) for x in walk_expr(e)]
    assert not any(isinstance(x, Select) for x in values)


def test_conditions_on_values_remain() -> None:
    x = torch.randn(40)
    op = tc.define("def f(float(40) x) -> (y) { y(i) = (x(i) > 0.0 && i < 30 ? x(i) : 0.0) }").f
    torch.testing.assert_close(op(x), torch.where((x > 0) & (torch.arange(40) < 30), x, 0), rtol=0, atol=0)


def test_loops_with_many_borders_stay_whole() -> None:
    """Each part is code of its own."""
    chain = "x(i)"
    for k in range(2, 12):
        chain = f"(i < {k} ? x(i) * {k}.0 : {chain})" if k % 2 else f"(i < {40 - k} ? {chain} : x(i) / {k}.0)"
    op = tc.define(f"def f(float(40) x) -> (y) {{ y(i) = {chain} }}").f
    x = torch.randn(40)
    assert op.compile(x).source("asm").count("\n") < 1000
    i = torch.arange(40)
    value = x
    for k in range(2, 12):
        value = torch.where(i < k, x * k, value) if k % 2 else torch.where(i < 40 - k, value, x / k)
    torch.testing.assert_close(op(x), value)
