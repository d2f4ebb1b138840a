"""Elements that loops accumulate into live in registers meanwhile, where that is safe."""

from __future__ import annotations

import pytest
from loop_programs import assert_same_effect, module

from tensor_comprehensions.core.dtypes import BFLOAT16, FLOAT32, INT64
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import Expr, If, Let, Load, Loop, LoopKind, Stmt, Store
from tensor_comprehensions.loop_ir.passes.scalar_promotion import hoist_accumulators
from tensor_comprehensions.loop_ir.passes.unroll import unroll_loops
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.rewrite import allocated_buffers, walk_stmts
from tensor_comprehensions.loop_ir.show import format_program
from tensor_comprehensions.loop_ir.verify import verify

N = 8
A, B, C = (b.buffer(name, FLOAT32, (N, N)) for name in "ABC")
BUFFERS = (A, B, C)
ROW, COLUMN, INNER = b.var("i"), b.var("j"), b.var("k")
PRODUCT = b.mul(b.load(A, ROW, INNER), b.load(B, INNER, COLUMN))
UPDATE = b.store(C, (ROW, COLUMN), PRODUCT, op="+")


def loop(var: Expr, body: Stmt, stop: Expr | int = N, kind: LoopKind = LoopKind.SERIAL) -> Loop:
    return Loop(format_program(var), b.const(0), b.add(stop, 0), body, kind, vector_factors=(4, 2))


def around(body: Stmt) -> Stmt:
    return loop(ROW, loop(COLUMN, body))


def promote_checked(before: Stmt) -> Stmt:
    after = hoist_accumulators(before)
    verify(module(after, BUFFERS))
    assert_same_effect(before, after, BUFFERS)
    return after


def registers(s: Stmt) -> int:
    return len(allocated_buffers(s))


def test_an_element_is_loaded_before_and_stored_after() -> None:
    assert format_program(promote_checked(around(loop(INNER, UPDATE)))) == (
        "for i in 0 .. 8:\n"
        "  for j in 0 .. 8:\n"
        "    allocate register float32 C.sum.0\n"
        "    C.sum.0[] = C[i, j]\n"
        "    for k in 0 .. 8:\n"
        "      C.sum.0[] += A[i, k] * B[k, j]\n"
        "    C[i, j] = C.sum.0[]\n"
    )


def test_initial_values_go_straight_into_the_register() -> None:
    after = promote_checked(around(b.block(b.store(C, (ROW, COLUMN), 0.0), loop(INNER, UPDATE))))
    assert "C.sum.0[] = 0.0" in format_program(after)
    assert "C[i, j] = 0.0" not in format_program(after)


def test_initial_values_of_a_loop_that_may_be_empty_are_stored_behind_it() -> None:
    """Also where a name is bound in between, unless its value reads what they store."""
    initial = b.store(C, (ROW, COLUMN), 2.0)
    for value, taken in ((b.cast(b.load(A, ROW, COLUMN), INT64), True), (b.cast(b.load(C, ROW, COLUMN), INT64), False)):
        body = Let("count", value, loop(INNER, UPDATE, b.minimum(b.maximum(b.var("count"), 0), N)))
        text = format_program(promote_checked(around(b.block(initial, body))))
        assert ("C.sum.0[] = 2.0" in text) == taken
        assert ("C[i, j] = 2.0" in text) != taken
        assert ("if " in text) != taken


def test_initial_values_that_read_the_element_stay_in_memory() -> None:
    twice = b.store(C, (ROW, COLUMN), b.mul(b.load(C, ROW, COLUMN), 2.0))
    assert "C.sum.0[] = C[i, j]" in format_program(promote_checked(around(b.block(twice, loop(INNER, UPDATE)))))


def test_a_register_spans_several_loops() -> None:
    deep = loop(INNER, loop(b.var("l"), UPDATE, 3))
    assert "C[i, j] = C.sum.0[]" in format_program(promote_checked(around(deep)))
    assert registers(promote_checked(around(deep))) == 1


def test_a_register_tile_of_vectors() -> None:
    rows = loop(b.var("r"), b.store(C, (b.add(b.mul(ROW, 4), b.var("r")), COLUMN), b.load(B, INNER, COLUMN), op="+"), 4)
    tile = loop(
        ROW,
        loop(COLUMN, loop(INNER, Loop("r", rows.start, rows.stop, rows.body, LoopKind.UNROLLED)), kind=LoopKind.VECTOR),
        2,
    )
    after = hoist_accumulators(unroll_loops(vectorize_loops(tile)))
    verify(module(after, BUFFERS))
    assert_same_effect(tile, after, BUFFERS)
    assert registers(after) == 8
    (inner,) = (x for x in walk_stmts(after) if isinstance(x, Loop) and x.var == "k")
    assert all(s.buffer.type.lanes == 4 for s in walk_stmts(inner) if isinstance(s, Store))


def test_a_loop_that_may_be_empty_is_guarded() -> None:
    after = promote_checked(around(loop(INNER, UPDATE, stop=ROW)))
    assert any(isinstance(s, If) for s in walk_stmts(after))


def test_masks_stay_on_the_memory() -> None:
    mask = b.lt(b.ramp(0, 1, 16), b.const(N))
    row = b.ramp(0, 1, 16)
    masked = Store(C, (ROW, row), Load(B, (INNER, row), mask), "+", mask)
    after = promote_checked(loop(ROW, loop(INNER, masked)))
    assert registers(after) == 1


@pytest.mark.parametrize(
    "body",
    [
        If(b.lt(INNER, b.const(3)), UPDATE),
        b.block(UPDATE, b.store(A, (0, 0), b.load(C, ROW, COLUMN))),
        b.block(UPDATE, b.store(C, (COLUMN, ROW), 1.0, op="+")),
        b.block(UPDATE, b.store(C, (ROW, COLUMN), 1.0)),
        b.store(C, (ROW, INNER), PRODUCT, op="+"),
        Let("m", b.add(INNER, 0), b.store(C, (ROW, b.var("m")), 1.0, op="+")),
        loop(b.var("l"), UPDATE, stop=INNER),
    ],
    ids=["condition", "read", "alias", "overwritten", "moves", "let", "empty"],
)
def test_what_is_not_safe_over_the_loop_is_left_in_it(body: Stmt) -> None:
    after = promote_checked(around(loop(INNER, body)))
    (outer,) = (s for s in walk_stmts(after) if isinstance(s, Loop) and s.var == "k")
    assert any(isinstance(s, Store) and s.buffer is C for s in walk_stmts(outer))


def test_updates_that_are_provably_apart_have_registers_each() -> None:
    other = b.store(C, (ROW, b.mod(b.add(COLUMN, 1), N)), 1.0, op="+")
    assert registers(promote_checked(around(loop(INNER, b.block(UPDATE, other))))) == 0
    left, right = (b.store(C, (ROW, b.add(b.mul(COLUMN, 2), n)), float(n), op="+") for n in (0, 1))
    halves = loop(ROW, loop(COLUMN, loop(INNER, b.block(left, right)), 4))
    assert registers(promote_checked(halves)) == 2


def test_half_precision_accumulates_in_single() -> None:
    low = b.buffer("low", BFLOAT16, ())
    rounded = b.cast(b.load(A, 0, INNER), BFLOAT16)
    after = hoist_accumulators(loop(INNER, b.store(low, (), rounded, op="+")))
    verify(module(after, (A, low)))
    assert format_program(after) == (
        "allocate register float32 low.sum.0\n"
        "low.sum.0[] = float32(low[])\n"
        "for k in 0 .. 8:\n"
        "  low.sum.0[] += A[0, k]\n"
        "low[] = bfloat16(low.sum.0[])\n"
    )


def test_tiles_of_a_reduction_need_no_guard() -> None:
    start = b.mul(b.var("t"), 3)
    tile = Loop("k", start, b.minimum(b.add(start, 3), N), UPDATE)
    after = promote_checked(around(loop(b.var("t"), tile, 3)))
    assert not any(isinstance(s, If) for s in walk_stmts(after))
    (tiles,) = (s for s in walk_stmts(after) if isinstance(s, Loop) and s.var == "t")
    assert all(s.buffer is not C for s in walk_stmts(tiles) if isinstance(s, Store))
