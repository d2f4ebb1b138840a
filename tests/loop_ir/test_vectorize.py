"""What VECTOR loops become, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest
from loop_programs import assert_same_effect, module

from tensor_comprehensions.core.dtypes import BFLOAT16, BOOL, FLOAT32, INT8, INT32, INT64, UINT16, DType
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Check,
    Expr,
    If,
    Let,
    Load,
    Loop,
    LoopKind,
    ReduceLanes,
    Select,
    Space,
    Stmt,
    Store,
)
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.rewrite import allocated_buffers, walk_stmt_exprs, walk_stmts
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify

N = 45
X = b.buffer("X", FLOAT32, (N,))
Y = b.buffer("Y", FLOAT32, (N,))
M = b.buffer("M", FLOAT32, (N, N))
TOTAL = b.buffer("total", FLOAT32, ())
PLACES = b.buffer("places", INT32, (N,))
BUFFERS = (X, Y, M, TOTAL, PLACES)
COLUMN, ROW = b.var("c"), b.var("r")
COPY = b.store(Y, (COLUMN,), b.load(X, COLUMN))
SUM = b.store(TOTAL, (), b.load(X, COLUMN), op="+")


def columns(body: Stmt, factor: tuple[int, int] = (8, 2), start: Expr | int = 0, stop: Expr | int = N) -> Loop:
    return Loop("c", b.add(start, 0), b.add(stop, 0), body, LoopKind.VECTOR, vector_factors=factor)


def vectorize_checked(before: Stmt) -> Stmt:
    """`before` vectorized, after the verifier and the interpreter agreed."""
    after = vectorize_loops(before)
    verify(module(after, BUFFERS))
    assert_same_effect(before, after, BUFFERS)
    return after


def loops(s: Stmt) -> list[Loop]:
    return [x for x in walk_stmts(s) if isinstance(x, Loop)]


def test_a_constant_trip_count_gives_blocks_single_vectors_and_one_masked_vector() -> None:
    assert format_program(vectorize_checked(columns(COPY))) == (
        "for c in 0 .. 32 by 16:\n"
        "  Y[ramp(c, 1, 8)] = X[ramp(c, 1, 8)]\n"
        "  Y[ramp(c + 8, 1, 8)] = X[ramp(c + 8, 1, 8)]\n"
        "Y[ramp(32, 1, 8)] = X[ramp(32, 1, 8)]\n"
        "Y[ramp(40, 1, 8)] = X[ramp(40, 1, 8)] @ (ramp(0, 1, 8) < x8(5)) @ (ramp(0, 1, 8) < x8(5))\n"
    )


def test_exact_trip_counts_need_no_mask() -> None:
    after = vectorize_checked(columns(COPY, stop=32))
    assert all(s.mask is None for s in walk_stmts(after) if isinstance(s, Store))


@pytest.mark.parametrize("stop", range(36))
@pytest.mark.parametrize("factor", [(4, 1), (4, 2), (8, 3), (16, 1), (8, 0)])
def test_every_extent(stop: int, factor: tuple[int, int]) -> None:
    vectorize_checked(columns(b.block(COPY, SUM), factor, stop=stop))


@pytest.mark.parametrize("factor", [(4, 1), (4, 3), (4, 0)])
def test_bounds_of_the_loops_around(factor: tuple[int, int]) -> None:
    triangle = columns(b.store(M, (ROW, COLUMN), b.load(X, COLUMN)), factor, start=ROW)
    vectorize_checked(Loop("r", b.const(0), b.const(N), triangle))
    backwards = columns(b.store(M, (ROW, COLUMN), b.load(X, COLUMN)), factor, start=ROW, stop=b.sub(20, ROW))
    vectorize_checked(Loop("r", b.const(0), b.const(N), backwards))


def test_a_tile_with_constant_extent_needs_no_tail() -> None:
    tile = columns(COPY, (8, 1), start=b.mul(ROW, 16), stop=b.add(b.mul(ROW, 16), 16))
    after = vectorize_checked(Loop("r", b.const(0), b.const(2), tile))
    assert [x.step for x in loops(after)] == [1, 8]
    assert not [s for s in walk_stmts(after) if isinstance(s, If | Let)]


@pytest.mark.parametrize("op", ["+", "*", "min", "max"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, INT8, UINT16, INT64], ids=str)
def test_reductions_keep_their_neutral_element(op: str, dtype: DType) -> None:
    data, result = b.buffer("data", dtype, (N,)), b.buffer("result", dtype, ())
    before = columns(b.store(result, (), b.load(data, COLUMN), op=op), (8, 2))
    rng = np.random.default_rng(0)
    values = rng.choice([1, 1, 1, 2] if op == "*" else [1, 2, 3, 4], N)
    found = []
    for body in (before, vectorize_loops(before)):
        arrays = {"data": values.astype("float32" if dtype == BFLOAT16 else dtype.name)}
        arrays["result"] = np.asarray(2, arrays["data"].dtype)
        interpret(module(body, (data, result)), arrays)
        found.append(arrays["result"][()])
    if dtype == BFLOAT16 and op in ("+", "*"):  # vectors accumulate in float32: fewer roundings, not more
        np.testing.assert_allclose(found[1], found[0], rtol=0.05)
    else:
        assert found[0] == found[1]


@pytest.mark.parametrize("op", ["+", "*", "min", "max"])
def test_reductions_of_booleans(op: str) -> None:
    data, result = b.buffer("data", BOOL, (N,)), b.buffer("result", BOOL, ())
    before = columns(b.store(result, (), b.load(data, COLUMN), op=op), (8, 2))
    for start in (False, True):
        for fill in (False, True):
            found = []
            for body in (before, vectorize_loops(before)):
                arrays = {"data": np.full(N, fill), "result": np.asarray(start)}
                interpret(module(body, (data, result)), arrays)
                found.append(bool(arrays["result"]))
            assert found[0] == found[1]


def test_interleaved_copies_accumulate_apart() -> None:
    after = vectorize_checked(columns(SUM, (4, 3)))
    (accumulator,) = allocated_buffers(after)
    assert accumulator.shape == (3,)
    assert accumulator.type.lanes == 4
    assert sum(isinstance(e, ReduceLanes) for e in walk_stmt_exprs(after)) == 1


def test_the_tail_of_a_reduction_gives_the_neutral_element() -> None:
    after = vectorize_checked(columns(b.store(TOTAL, (), b.add(b.load(X, COLUMN), 1.0), op="+"), (8, 1)))
    assert any(isinstance(e, Select) for e in walk_stmt_exprs(after))


def test_a_tile_of_reductions_has_a_register_each() -> None:
    rows = Loop("r", b.const(0), b.const(3), b.store(Y, (ROW,), b.load(M, ROW, COLUMN), op="+"), LoopKind.UNROLLED)
    after = vectorize_checked(columns(rows, (8, 2)))
    assert len(allocated_buffers(after)) == 3


def test_an_outer_loop_carries_its_inner_loop_along() -> None:
    inner = Loop("r", b.const(0), b.const(N), b.store(Y, (COLUMN,), b.load(M, ROW, COLUMN), op="+"))
    after = vectorize_checked(columns(b.block(b.store(Y, (COLUMN,), 0.0), inner), (8, 2)))
    assert format_program(after).startswith(
        "for c in 0 .. 32 by 16:\n"
        "  Y[ramp(c, 1, 8)] = x8(0.0)\n"
        "  Y[ramp(c + 8, 1, 8)] = x8(0.0)\n"
        "  for r in 0 .. 45:\n"
        "    Y[ramp(c, 1, 8)] += M[r, ramp(c, 1, 8)]\n"
        "    Y[ramp(c + 8, 1, 8)] += M[r, ramp(c + 8, 1, 8)]\n"
    )


@pytest.mark.parametrize("space", [Space.SCRATCH, Space.REGISTER])
def test_private_scalars_become_private_vectors(space: Space) -> None:
    private = b.buffer("t", FLOAT32, (2,), space)
    steps = b.block(
        b.store(private, (0,), b.load(X, COLUMN)),
        b.store(private, (1,), b.mul(b.load(private, 0), 2.0)),
        b.store(Y, (COLUMN,), b.load(private, 1)),
    )
    vectorize_checked(columns(Allocate((private,), steps)))


def test_private_memory_may_be_indexed_by_data() -> None:
    private = b.buffer("t", FLOAT32, (N,), Space.SCRATCH)
    at = b.mod(COLUMN, 3)
    steps = b.block(b.store(private, (at,), b.load(X, COLUMN)), b.store(Y, (COLUMN,), b.load(private, at)))
    vectorize_checked(columns(Allocate((private,), steps)))


def test_a_condition_is_evaluated_before_its_branches_change_what_it_reads() -> None:
    swap = If(
        b.lt(b.load(Y, COLUMN), b.const(0.0, FLOAT32)),
        b.block(b.store(Y, (COLUMN,), 3.0), b.store(Y, (COLUMN,), 2.0, op="+")),
        b.store(Y, (COLUMN,), 7.0),
    )
    vectorize_checked(columns(swap))


def test_nothing_is_read_where_no_lane_runs() -> None:
    outside = b.add(ROW, N - 1)  # exists for r == 0 only
    guarded = If(b.eq(b.add(ROW, b.mul(COLUMN, 0)), b.const(0)), b.store(Y, (COLUMN,), b.load(X, outside)))
    by_lane = If(b.lt(COLUMN, b.sub(1, ROW)), b.store(Y, (COLUMN,), b.load(X, outside)))
    vectorize_checked(Loop("r", b.const(0), b.const(3), b.block(columns(guarded), columns(by_lane))))


def test_divisors_of_lanes_that_do_not_run_are_not_zero() -> None:
    quotient = b.cast(b.div(b.const(7, INT32), b.add(b.load(PLACES, COLUMN), 9)), FLOAT32)
    after = vectorize_checked(columns(b.store(Y, (COLUMN,), quotient)))
    assert any(isinstance(e, Select) for e in walk_stmt_exprs(after))


def test_one_lane_is_a_serial_loop() -> None:
    (loop,) = loops(vectorize_checked(columns(COPY, (1, 1))))
    assert loop.kind is LoopKind.SERIAL


REGISTERS = b.buffer("registers", FLOAT32, (N,), Space.REGISTER)
INNER = Loop("r", b.const(0), b.const(3), b.store(M, (ROW, COLUMN), 1.0), LoopKind.PARALLEL)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b.store(TOTAL, (), b.load(X, COLUMN)), "one element"),
        (b.block(SUM, b.store(Y, (COLUMN,), b.load(TOTAL))), "reduced and read"),
        (b.block(SUM, b.store(TOTAL, (), 2.0, op="max")), "reduced and stored"),
        (Check(b.lt(COLUMN, b.const(3)), 0, COLUMN), "Check"),
        (INNER, "parallel"),
        (Loop("r", b.const(0), COLUMN, b.store(M, (ROW, COLUMN), 1.0)), "bounds"),
        (Loop("r", b.const(0), b.const(3), b.store(Y, (ROW,), b.load(X, COLUMN), op="+")), "changes"),
        (b.store(Y, (b.cast(b.load(PLACES, COLUMN), INT64),), 1.0, op="+"), "together"),
        (b.store(REGISTERS, (COLUMN,), 1.0), "registers"),
        (b.store(Y, (b.ramp(COLUMN, 1, 4),), 1.0), "explicit vectors"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals_say_why(body: Stmt, reason: str) -> None:
    with pytest.raises(CannotLower, match=reason):
        vectorize_loops(columns(body))


def test_masks_join_those_that_are_there() -> None:
    own = b.lt(COLUMN, b.const(30))
    masked = Store(Y, (COLUMN,), Load(X, (COLUMN,), own), None, own)
    vectorize_checked(columns(masked))


def rows(body: Stmt, stop: Expr | int = N) -> Loop:
    return Loop("r", b.const(0), b.add(stop, 0), body)


ROW_SUM = columns(b.store(TOTAL, (), b.load(M, ROW, COLUMN), op="+"))


def test_lanes_are_combined_once_after_the_loops_around() -> None:
    after = vectorize_checked(rows(ROW_SUM))
    assert isinstance(after, Allocate)
    assert not any(isinstance(e, ReduceLanes) for s in loops(after) for e in walk_stmt_exprs(s))


@pytest.mark.parametrize(
    "around",
    [
        rows(b.block(ROW_SUM, b.store(Y, (ROW,), b.load(TOTAL)))),
        rows(b.block(b.store(TOTAL, (), 0.0), ROW_SUM)),
        rows(Let("x", b.load(TOTAL), b.block(ROW_SUM, b.store(Y, (ROW,), b.var("x", FLOAT32))))),
        rows(columns(b.store(Y, (ROW,), b.load(M, ROW, COLUMN), op="+"))),
        rows(If(b.lt(ROW, b.const(3)), ROW_SUM)),
        Loop("q", b.const(0), b.const(3), rows(ROW_SUM, stop=b.var("q"))),
    ],
    ids=["read", "set", "let", "moves", "condition", "empty"],
)
def test_lanes_are_combined_inside_a_loop_that_needs_the_element(around: Stmt) -> None:
    after = vectorize_checked(around)
    assert any(isinstance(e, ReduceLanes) for s in loops(after) for e in walk_stmt_exprs(s))


def test_an_element_that_no_iteration_reduces_is_not_touched() -> None:
    beyond = columns(b.store(Y, (b.add(ROW, 40),), b.load(X, COLUMN), op="+"), stop=b.sub(5, ROW))
    vectorize_checked(rows(beyond))  # for r >= 5 there is no element, and no iteration


def test_an_element_that_exists_under_a_condition_only_is_refused() -> None:
    shifted = If(b.ge(ROW, b.const(1)), b.store(Y, (b.sub(ROW, 1),), b.load(X, COLUMN), op="+"))
    with pytest.raises(CannotLower, match="may not exist"):
        vectorize_loops(rows(columns(shifted)))
    inside = If(b.ge(ROW, b.const(1)), b.store(Y, (ROW,), b.load(X, COLUMN), op="+"))
    vectorize_checked(rows(columns(inside)))
