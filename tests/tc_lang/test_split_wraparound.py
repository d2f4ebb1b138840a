"""Periodic reads along rows: a contiguous read for each period, one of which counts."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc

PERIODIC = {
    "both ways": "y(i,j) = u(i, (j + 1) % M) - u(i, (j + M - 3) % M) where i in 0:N, j in 0:M",
    "rows too": "y(i,j) = u((i + 2) % N, (j + 2) % M) where i in 0:N, j in 0:M",
    "backwards": "y(i,j) = u(i, (M - j) % M) where i in 0:N, j in 0:M",
    "steps": "y(i,j) = u(i, (2 * j + 1) % M) where i in 0:N, j in 0:M",
    "one period": "y(i,j) = u(i, (j + 2 * M) % M) where i in 0:N, j in 0:M",
    "negative": "y(i,j) = u(i, (j - 1 - i) % M) where i in 0:N, j in 0:M",
    "circular": "y(i,j) +=! u(i, (j + k) % M) * w(k) where i in 0:N, j in 0:M",
    "around": "y(i,j) +=! u(i, (j + k + M - 1) % M) * w(k) where i in 0:N, j in 0:M",
    "maximum": "y(i) max=! u(i, (j + i) % M) where i in 0:N, j in 0:M",
    "under a mask": "y(i,j) = j > 2 ? u(i, (j + 5) % M) : w(0) where i in 0:N, j in 0:M",
    "temporary": "t(i,j) = 2 * u(i,j) y(i,j) = t(i, (j + 1) % M) + t(i, j) where i in 0:N, j in 0:M",
}
MANY_PERIODS = "y(i,j) = u(i, (5 * j + i) % M) where i in 0:N, j in 0:M"


def define(body: str) -> tc.Op:
    weights = ", float(K) w" if "w(" in body else ""
    return tc.define(f"def f(float(N,M) u{weights}) -> (y) {{ {body} }}").f


def arguments(body: str, rows: int, columns: int) -> list[torch.Tensor]:
    u = torch.randint(-9, 9, (rows, columns)).float()
    return [u, torch.randint(-9, 9, (4,)).float()] if "w(" in body else [u]


@pytest.mark.parametrize("name", PERIODIC)
@pytest.mark.parametrize("shape", [(3, 37), (5, 64), (4, 7)])
def test_reads_in_few_periods_have_no_remainder(name: str, shape: tuple[int, int]) -> None:
    op, values = define(PERIODIC[name]), arguments(PERIODIC[name], *shape)
    assert torch.equal(op(*values), op.reference(*values))
    source = op.compile(*values).source("loops")
    assert "%" not in source.replace("rows", "") or name == "rows too"


def test_reads_in_many_periods_keep_their_remainder() -> None:
    op, (u,) = define(MANY_PERIODS), arguments(MANY_PERIODS, 3, 37)
    assert torch.equal(op(u), op.reference(u))
    assert "%" in op.compile(u).source("loops")


def test_reads_across_rows_keep_one_remainder_for_each_row() -> None:
    op = define("y(i,j) = u((i + 1) % N, j) where i in 0:N, j in 0:M")
    u = torch.randn(9, 33)
    assert torch.equal(op(u), u.roll(-1, 0))
    assert "select" not in op.compile(u).source("loops")


def test_a_transposed_operand_is_read_along_its_rows() -> None:
    op = define("y(i,j) = u((i + 1) % N, j) where i in 0:N, j in 0:M")
    u = torch.randn(33, 9).t()
    assert torch.equal(op(u), u.roll(-1, 0))
