"""Loops that are split where a mask changes: the same results, without the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32, INT32
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import (
    Buffer,
    Expr,
    If,
    Kernel,
    Load,
    Loop,
    LoopKind,
    Module,
    Select,
    Stmt,
    Store,
    Type,
)
from tensor_comprehensions.loop_ir.passes import split_masks
from tensor_comprehensions.loop_ir.passes.split_masks import split_masked_loops
from tensor_comprehensions.loop_ir.rewrite import walk_expr, walk_stmt_exprs, walk_stmts
from tensor_comprehensions.loop_ir.verify import verify

ROWS, COLUMNS = 5, 7
X, OUT = (Buffer(name, Type(FLOAT32), (ROWS, COLUMNS), (COLUMNS, 1)) for name in "xo")
SUM = Buffer("s", Type(FLOAT32), (ROWS,), (1,))
T, U = build.var("t"), build.var("u")
NEUTRAL: dict[str, float] = {"+": 0.0, "max": -np.inf, "min": np.inf}


def narrow(e: Expr) -> Expr:
    return build.cast(e, INT32)


def loop_over(body: Stmt, start: int = 0, kind: LoopKind = LoopKind.SERIAL) -> Stmt:
    """`body` for each t, and for each u from `start` on."""
    return Loop("t", build.const(0), build.const(ROWS), Loop("u", build.const(start), build.const(COLUMNS), body, kind))


def masked_sum(mask: Expr, op: str) -> Stmt:
    """`o` is `x` where the mask holds and neutral elsewhere, and `s` is its reduction along u."""
    value = build.select(mask, Load(X, (T, U)), build.const(NEUTRAL[op], FLOAT32))
    return build.block(Store(OUT, (T, U), value), Store(SUM, (T,), Load(OUT, (T, U)), op))


def run(body: Stmt) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    module = Module("f", (X, OUT, SUM), (), (Kernel("f.0", body),), (), ("o", "s"))
    verify(module)
    x = np.arange(1, ROWS * COLUMNS + 1, dtype=np.float32).reshape(ROWS, COLUMNS)
    o, s = np.full_like(x, -1), np.full(ROWS, 2, np.float32)
    assert interpret(module, {"x": x, "o": o, "s": s}) == []
    return o, s


def selects(s: Stmt) -> int:
    return sum(isinstance(x, Select) for e in walk_stmt_exprs(s) for x in walk_expr(e))


COMPARISONS = ("le", "lt", "ge", "gt")


@pytest.mark.parametrize("op", NEUTRAL)
@pytest.mark.parametrize("comparison", COMPARISONS)
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("start", [0, 3])
def test_a_split_loop_computes_the_same(op: str, comparison: str, is_narrow: bool, start: int) -> None:
    sides = [(U, T), (T, U), (build.add(U, 1), T), (build.sub(T, U), build.const(2)), (U, build.const(-1))]
    for left, right in (*sides, (build.const(9), U)):
        mask = build.binary(comparison, *((narrow(left), narrow(right)) if is_narrow else (left, right)))
        body = loop_over(masked_sum(mask, op), start)
        split = split_masked_loops(body)
        assert selects(split) == (selects(body) if is_narrow else 0), "only the way for large indices has the mask"
        for mine, expected in zip(run(split), run(body), strict=True):
            assert np.array_equal(mine, expected)


def test_neutral_elements_are_not_added() -> None:
    split = split_masked_loops(loop_over(masked_sum(build.le(U, T), "+"), kind=LoopKind.VECTOR))
    loops = [s for s in walk_stmts(split) if isinstance(s, Loop) and s.var == "u"]
    sums = [[x for x in walk_stmts(s) if isinstance(x, Store) and x.buffer == SUM] for s in loops]
    assert [len(found) for found in sums] == [1, 0]


def test_a_loop_that_only_adds_neutral_elements_is_left_out() -> None:
    value = build.select(build.le(U, T), Load(X, (T, U)), build.const(0.0, FLOAT32))
    split = split_masked_loops(loop_over(Store(SUM, (T,), value, "+")))
    assert len([s for s in walk_stmts(split) if isinstance(s, Loop) and s.var == "u"]) == 1


def test_large_indices_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    body = loop_over(masked_sum(build.le(narrow(U), narrow(T)), "+"))
    expected = run(body)
    monkeypatch.setattr(split_masks, "LARGEST_INDEX", COLUMNS - 1)
    split = split_masked_loops(body)
    assert not any(isinstance(s, If) for s in walk_stmts(body))
    assert all(np.array_equal(a, b) for a, b in zip(run(split), expected, strict=True))
    assert split != body


OTHERS: dict[str, Expr] = {
    "data": build.lt(Load(X, (T, U)), build.const(3.0, FLOAT32)),
    "a multiple": build.le(build.mul(U, 2), T),
    "equality": build.eq(U, T),
    "two conditions": build.logical_and(build.le(U, T), build.ge(build.add(U, 2), T)),
    "another variable": build.le(T, build.const(2)),
    "a remainder": build.le(build.mod(U, 3), T),
    "a product": build.le(U, build.mul(T, T)),
    "large numbers": build.le(narrow(U), narrow(build.add(T, 1 << 30))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_conditions_stay(name: str) -> None:
    body = loop_over(masked_sum(OTHERS[name], "+"))
    assert split_masked_loops(body) == body


@pytest.mark.parametrize("kind", [LoopKind.PARALLEL, LoopKind.UNROLLED])
def test_loops_of_other_kinds_are_whole(kind: LoopKind) -> None:
    store = Store(OUT, (T, U), build.select(build.le(U, T), Load(X, (T, U)), build.const(0.0, FLOAT32)))
    assert split_masked_loops(loop_over(store, kind=kind)) == loop_over(store, kind=kind)
