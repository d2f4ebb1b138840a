"""Hints go through every pass, say the same once per cache line, and hold nothing up."""

from __future__ import annotations

import pytest
from loop_programs import assert_same_effect, module

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, FLOAT64, INT32, INT64, DType
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import Allocate, Buffer, Expr, Invoke, Loop, LoopKind, Space, Stmt
from tensor_comprehensions.loop_ir.passes.scalar_promotion import hoist_accumulators
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.rewrite import allocated_buffers, walk_stmts
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify

N, ROWS = 64, 5
T = b.buffer("T", FLOAT32, (ROWS, N))
O = b.buffer("O", FLOAT32, (N,))  # noqa: E741
AT = b.buffer("at", INT64, (ROWS,))
BUFFERS = (T, O, AT)
LANE, ROW = b.var("c"), b.var("r")
NEXT = b.load(AT, b.minimum(b.add(ROW, 2), ROWS - 1))
SUM = b.store(O, (LANE,), b.load(T, ROW, LANE), op="+")


def prefetch(buffer: Buffer, *indices: Expr) -> Invoke:
    return Invoke("prefetch", ((buffer, indices),), (0,))


def columns(body: Stmt, factor: tuple[int, int], stop: int = N) -> Loop:
    return Loop("c", b.const(0), b.const(stop), body, LoopKind.VECTOR, vector_factors=factor)


def rows(body: Stmt) -> Loop:
    return Loop("r", b.const(0), b.const(ROWS), body)


def hints(s: Stmt) -> list[str]:
    return [format_program(x).strip() for x in walk_stmts(s) if isinstance(x, Invoke)]


def test_lanes_ask_once_for_each_line_and_accumulators_stay_in_registers() -> None:
    before = columns(rows(b.block(prefetch(T, NEXT, LANE), SUM)), (16, 4))
    after = simplify(hoist_accumulators(vectorize_loops(before)))
    verify(module(after, BUFFERS))
    assert_same_effect(before, after, BUFFERS)
    assert hints(after) == [f"prefetch(&T[at[min(r + 2, 4)], {c}], 0)" for c in (0, 16, 32, 48)]
    assert len(allocated_buffers(after)) == 4


@pytest.mark.parametrize(
    ("dtype", "factor", "places"),
    [
        (FLOAT32, (8, 4), [0, 16]),
        (FLOAT32, (4, 8), [0, 16]),
        (FLOAT64, (16, 2), [0, 8, 16, 24]),
        (FLOAT16, (16, 2), [0]),
        (FLOAT16, (16, 4), [0, 32]),
    ],
)
def test_one_hint_for_each_line(dtype: DType, factor: tuple[int, int], places: list[int]) -> None:
    table = b.buffer("X", dtype, (ROWS, N))
    body = b.block(prefetch(table, b.const(1), LANE), b.store(O, (LANE,), 1.0))
    after = simplify(vectorize_loops(columns(body, factor, factor[0] * factor[1])))
    assert hints(after) == [f"prefetch(&X[1, {c}], 0)" for c in places]


def test_the_same_in_all_lanes_is_said_once_and_scattered_lanes_say_nothing() -> None:
    store = b.store(O, (LANE,), 1.0)
    fixed = vectorize_loops(columns(b.block(prefetch(AT, b.const(2)), store), (8, 2), 16))
    assert hints(fixed) == ["prefetch(&at[2], 0)"]
    square, order = b.buffer("S", FLOAT32, (N, N)), b.buffer("order", INT32, (N,))
    for index in (LANE, b.cast(b.load(order, LANE), INT64)):
        assert hints(vectorize_loops(columns(b.block(prefetch(square, index, b.const(0)), store), (8, 2), 16))) == []


def test_what_is_asked_for_need_not_exist_but_its_indices_must() -> None:
    far = b.block(prefetch(T, b.const(-7), b.const(10**9)), b.store(O, (b.const(0),), 1.0))
    verify(module(far, BUFFERS))
    assert_same_effect(far, b.store(O, (b.const(0),), 1.0), BUFFERS)
    with pytest.raises(InternalError, match="extent 5"):
        assert_same_effect(prefetch(T, b.load(AT, 9), b.const(0)), b.NOTHING, BUFFERS)


REGISTER = b.buffer("g", FLOAT32, (2,), Space.REGISTER)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Invoke("fetch", ((T, (b.const(0), b.const(0))),), (0,)), "no intrinsic fetch"),
        (Invoke("prefetch", (), (0,)), "other operands"),
        (Invoke("prefetch", ((T, (b.const(0), b.const(0))),)), "other operands"),
        (prefetch(T, b.const(0)), "1 indices on T"),
        (prefetch(T, b.const(0), b.ramp(0, 1, 4)), "vector of places"),
        (prefetch(b.buffer("U", FLOAT32, (1,)), b.const(0)), "not in scope"),
        (Allocate((REGISTER,), prefetch(REGISTER, b.const(0))), "in registers"),
    ],
)
def test_faults_are_named(fault: Stmt, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        verify(module(fault, BUFFERS))
