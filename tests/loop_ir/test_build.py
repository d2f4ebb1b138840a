"""Constructors fold what is the same for every value, and nothing else; rewriting keeps what it does not change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_programs import BUFFERS, booleans, evaluate, floats, integers, module, programs, same_bits, values

import tensor_comprehensions.core.dtypes as dtypes
import tensor_comprehensions.loop_ir.nodes as nodes
from tensor_comprehensions.core.dtypes import BOOL, FLOAT32, INT8, INT32, INT64, UINT8, DType
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.names import Names
from tensor_comprehensions.loop_ir.nodes import Binary, Const, Expr, Loop, LoopKind, Ramp, Stmt, Type
from tensor_comprehensions.loop_ir.passes.unroll import unroll_loops
from tensor_comprehensions.loop_ir.rewrite import (
    map_expr,
    map_stmt,
    substitute,
    substitute_stmt,
    walk_expr,
    walk_stmt_exprs,
    walk_stmts,
)
from tests.helpers.planted_faults import replace_buffer

quick = settings(max_examples=60, deadline=None, derandomize=True)
ROW, COLUMN = b.var("i"), b.var("j")
A = b.buffer("A", FLOAT32, (4, 6))


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (b.add(2, 3), b.const(5)),
        (b.add(ROW, 0), ROW),
        (b.add(0, ROW), ROW),
        (b.add(b.add(ROW, 1), 2), b.add(ROW, 3)),
        (b.sub(b.add(ROW, 1), 1), ROW),
        (b.mul(ROW, 1), ROW),
        (b.mul(ROW, 0), b.const(0)),
        (b.div(-7, 2), b.const(-4)),
        (b.mod(-7, 2), b.const(1)),
        (b.mod(ROW, 1), b.const(0)),
        (b.add(b.const(127, INT8), 1), b.const(-128, INT8)),
        (b.lt(1, 2), b.TRUE),
        (b.logical_and(b.lt(ROW, 3), b.TRUE), b.lt(ROW, 3)),
        (b.logical_or(b.lt(ROW, 3), b.TRUE), b.TRUE),
        (b.add(b.ramp(ROW, 1, 4), 2), b.ramp(b.add(ROW, 2), 1, 4)),
        (b.mul(b.ramp(ROW, 1, 4), 3), b.ramp(b.mul(ROW, 3), 3, 4)),
        (b.sub(b.ramp(ROW, 2, 4), b.ramp(0, 2, 4)), b.broadcast(ROW, 4)),
        (b.sub(COLUMN, b.ramp(ROW, 1, 4)), b.ramp(b.sub(COLUMN, ROW), -1, 4)),
        (b.broadcast(b.const(2), 4), b.const(2, INT64, 4)),
        (b.select(b.TRUE, ROW, COLUMN), ROW),
        (b.cast(b.const(300), UINT8), b.const(44, UINT8)),
        (b.cast(ROW, INT64), ROW),
        (b.logical_not(b.logical_not(b.lt(ROW, 3))), b.lt(ROW, 3)),
    ],
)
def test_folding(built: Expr, expected: Expr) -> None:
    assert built == expected


@pytest.mark.parametrize("e", [b.add(b.load(A, 0, 0), 0.0), b.mul(b.load(A, 0, 0), 0.0), b.div(1, 0)])
def test_what_is_not_exact_is_not_folded(e: Expr) -> None:
    assert isinstance(e, Binary)


def test_numbers_take_the_type_of_the_other_operand() -> None:
    assert b.mul(b.load(A, 0, 0), 2).type == Type(FLOAT32)
    assert b.add(b.var("x", INT32), 1).type == Type(INT32)


def test_scalars_take_the_lanes_of_the_other_operand() -> None:
    assert b.lt(b.ramp(ROW, 1, 8), COLUMN).type == Type(BOOL, 8)
    assert b.store(A, (0, b.ramp(0, 1, 4)), 1).value == b.const(1.0, FLOAT32, 4)
    assert b.call("fma", b.const(1.0, FLOAT32, 4), b.load(A, 0, 0), b.const(1.0, FLOAT32)).type.lanes == 4


def test_lanes_that_differ_are_refused() -> None:
    with pytest.raises(InternalError, match="8"):
        b.add(b.ramp(0, 1, 4), b.ramp(0, 1, 8))


@pytest.mark.parametrize("op", ["+", "*", "min", "max"])
@pytest.mark.parametrize("dtype", dtypes.DTYPES.values(), ids=str)
def test_neutral_elements(op: str, dtype: DType) -> None:
    for value in (0, 1, 2, 100):
        x = b.const(value, dtype)
        combined = Binary(b.combiner(op, dtype), x, b.neutral(op, dtype))
        assert same_bits(evaluate(combined, {}), evaluate(x, {}))


@quick
@given(st.one_of(integers(), integers(4), booleans(4), floats(4)), values())
def test_substitution_is_evaluation(e: Expr, at: dict[str, int]) -> None:
    constants = {name: b.const(value) for name, value in at.items()}
    new = substitute(e, constants)
    assert same_bits(evaluate(new, {}), evaluate(e, at))
    assert not any(isinstance(x, nodes.Var) for x in walk_expr(new))
    assert substitute(e, {"elsewhere": b.const(1)}) is e


@quick
@given(programs())
def test_a_rewrite_that_changes_nothing_gives_the_same_object(program: Stmt) -> None:
    assert map_stmt(program, lambda e: map_expr(e, lambda c: c), lambda s: s) is program
    assert substitute_stmt(program, {}) is program
    assert replace_buffer(program, A, A) is program


@quick
@given(programs())
def test_repr_evaluates_to_the_program(program: Stmt) -> None:
    scope = {**vars(nodes), **vars(dtypes), "inf": np.inf}
    text = repr(module(program)).replace("<Space.GLOBAL: 'global'>", "Space.GLOBAL")
    for kind in (*LoopKind, *nodes.Space):
        text = text.replace(repr(kind), str(kind))
    assert eval(text, scope) == module(program)


@quick
@given(programs())
def test_buffers_are_replaced_everywhere(program: Stmt) -> None:
    old = BUFFERS[0]
    new = b.buffer("renamed", old.type.dtype, old.shape)
    renamed = replace_buffer(program, old, new)
    assert "renamed" not in Names.of(program).taken
    assert old.name not in Names.of(renamed).taken
    assert replace_buffer(renamed, new, old) == program


def test_fresh_names_are_not_taken() -> None:
    names = Names.of(Loop("i.0", b.const(0), b.const(4), b.store(A, (0, 0), 1.0)))
    assert [names.fresh("i"), names.fresh("i"), names.fresh("A")] == ["i.1", "i.2", "A.0"]


def test_walking_is_in_program_order() -> None:
    stores = [b.store(A, (n, 0), float(n)) for n in range(3)]
    body = b.block(stores[0], Loop("i", b.const(0), b.const(2), stores[1]), stores[2])
    assert [s for s in walk_stmts(body) if isinstance(s, nodes.Store)] == stores
    assert [e.value for e in walk_stmt_exprs(body) if isinstance(e, Const) and e.type.dtype == FLOAT32] == [
        0.0,
        1.0,
        2.0,
    ]


def make_unrolled_loop(body: Stmt, start: Expr | int = 0, stop: Expr | int = 3, step: int = 1) -> Loop:
    return Loop("i", b.add(start, 0), b.add(stop, 0), body, LoopKind.UNROLLED, step)


def test_unrolled_copies_have_constant_indices() -> None:
    body = unroll_loops(make_unrolled_loop(b.store(A, (ROW, b.mul(ROW, 2)), 1.0)))
    assert body == b.block(*[b.store(A, (n, 2 * n), 1.0) for n in range(3)])


def test_unrolled_loops_inside_each_other() -> None:
    inner = Loop("j", ROW, b.const(3), b.store(A, (ROW, COLUMN), 1.0), LoopKind.UNROLLED)
    assert unroll_loops(make_unrolled_loop(inner)) == b.block(
        *[b.store(A, (n, m), 1.0) for n in range(3) for m in range(n, 3)]
    )


def test_only_the_trip_count_need_be_constant() -> None:
    body = unroll_loops(make_unrolled_loop(b.store(A, (0, ROW), 1.0), COLUMN, b.add(COLUMN, 3), step=2))
    assert body == b.block(b.store(A, (0, COLUMN), 1.0), b.store(A, (0, b.add(COLUMN, 2)), 1.0))


def test_a_trip_count_that_varies_cannot_be_unrolled() -> None:
    with pytest.raises(CannotLower, match="trip count"):
        unroll_loops(make_unrolled_loop(b.store(A, (ROW, 0), 1.0), stop=COLUMN))


def test_what_does_not_depend_on_the_loop_is_shared_between_copies() -> None:
    value = b.mul(b.load(A, 0, COLUMN), 2.0)
    copies = unroll_loops(make_unrolled_loop(b.store(A, (ROW, 0), value)))
    assert all(s.value is value for s in walk_stmts(copies) if isinstance(s, nodes.Store))


def test_a_ramp_of_one_lane_is_a_scalar() -> None:
    assert b.ramp(ROW, 1, 1) is ROW
    assert b.ramp(ROW, 0, 4) == b.broadcast(ROW, 4)
    assert isinstance(b.ramp(ROW, 2, 4), Ramp)
