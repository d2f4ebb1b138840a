"""What every iteration of a parallel loop would fill alike is found, and nothing else is."""

from __future__ import annotations

import pytest
from loop_programs import module

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import Allocate, Block, Expr, If, Let, Loop, LoopKind, Space, Stmt, Window
from tensor_comprehensions.loop_ir.passes.hoist_packing import hoist_packing
from tensor_comprehensions.loop_ir.verify import verify

N = 8
A, B = (b.buffer(name, FLOAT32, (N,)) for name in "AB")
PANEL = b.buffer("panel", FLOAT32, (N,), Space.SCRATCH)
ROW, J = b.var("i"), b.var("j")


def serial(body: Stmt) -> Loop:
    return Loop("j", b.const(0), b.const(N), body)


def shares(fill: Stmt, body: Stmt) -> Loop:
    """A parallel loop whose iterations make a panel and use it."""
    whole = Loop("i", b.const(0), b.const(N), Allocate((PANEL,), Block((fill, body))), LoopKind.PARALLEL)
    verify(module(whole, (A, B)))
    return whole


COPY = serial(b.store(PANEL, (J,), b.load(A, J)))
USE = b.store(B, (ROW,), b.load(PANEL, ROW))


def test_a_panel_that_depends_on_no_iteration() -> None:
    found, rest = hoist_packing(shares(COPY, USE))
    assert found == ((PANEL, COPY),)
    assert rest.body == USE


def test_below_names_of_the_iteration() -> None:
    at = b.var("at")
    body = Allocate((PANEL,), Block((COPY, b.store(B, (at,), b.load(PANEL, at)))))
    loop = Loop("i", b.const(0), b.const(N), Let("at", ROW, body), LoopKind.PARALLEL)
    found, rest = hoist_packing(loop)
    assert found == ((PANEL, COPY),)
    assert isinstance(rest.body, Let)


@pytest.mark.parametrize(
    ("fill", "body"),
    [
        pytest.param(serial(b.store(PANEL, (J,), b.load(A, ROW))), USE, id="reads what the iteration says"),
        pytest.param(serial(b.store(PANEL, (J,), b.load(B, J))), USE, id="reads what is written"),
        pytest.param(COPY, b.block(USE, b.store(PANEL, (ROW,), b.load(A, ROW))), id="written again"),
        pytest.param(b.store(PANEL, (ROW,), b.load(A, ROW)), USE, id="one element for each"),
        pytest.param(b.store(B, (ROW,), b.load(A, ROW)), USE, id="writes something else"),
    ],
)
def test_what_differs_stays(fill: Stmt, body: Stmt) -> None:
    loop = shares(fill, body)
    assert hoist_packing(loop) == ((), loop)


def test_through_a_window_that_moves() -> None:
    """The fill reads a window on a window, of which only the outer one depends on the iteration."""
    columns = b.buffer("columns", FLOAT32, (N,))
    inner = b.buffer("inner", FLOAT32, (N,))
    copy = Window(inner, columns, b.const(0), N, b.const(N), serial(b.store(PANEL, (J,), b.load(inner, J))))

    def view(start: Expr) -> Loop:
        body = Window(columns, A, start, N, b.const(N), Allocate((PANEL,), Block((copy, USE))))
        return Loop("i", b.const(0), b.const(N), body, LoopKind.PARALLEL)

    assert hoist_packing(view(ROW)) == ((), view(ROW))


OWN = b.buffer("own", FLOAT32, (N,), Space.SCRATCH)


def below(inside: Stmt) -> Loop:
    """A parallel loop with `inside` after each iteration has filled memory of its own."""
    mine = b.store(OWN, (ROW,), b.load(A, ROW))
    body = Allocate((OWN,), b.block(mine, inside, b.store(B, (ROW,), b.load(OWN, ROW))))
    return Loop("i", b.const(0), b.const(N), body, LoopKind.PARALLEL)


def test_behind_what_each_iteration_does_for_itself() -> None:
    loop = below(Allocate((PANEL,), Block((COPY, USE))))
    verify(module(loop, (A, B)))
    found, rest = hoist_packing(loop)
    assert found == ((PANEL, COPY),)
    assert rest == below(USE)


def test_of_what_an_earlier_statement_wrote() -> None:
    turned = serial(b.store(PANEL, (J,), b.load(OWN, J)))
    loop = below(Allocate((PANEL,), Block((turned, USE))))
    verify(module(loop, (A, B)))
    assert hoist_packing(loop) == ((), loop)


def test_tiles_of_two_sizes() -> None:
    """Shared where both fill it in one way."""
    last = b.le(b.const(N - 1), ROW)
    half = Loop("j", b.const(0), b.const(N // 2), b.store(PANEL, (J,), b.load(A, J)))
    same, other = (
        If(last, Allocate((PANEL,), Block((COPY, USE))), Allocate((PANEL,), Block((f, USE)))) for f in (COPY, half)
    )
    found, rest = hoist_packing(below(same))
    assert found == ((PANEL, COPY),)
    assert rest == below(If(last, USE, USE))
    assert hoist_packing(below(other)) == ((), below(other))


def test_last_tiles_behind_a_loop_over_others() -> None:
    """Their memory has one name: what the loop fills would be left in it."""
    other = serial(b.store(PANEL, (J,), b.mul(b.load(A, J), 2.0)))
    others = Loop("t", b.const(0), b.const(2), Allocate((PANEL,), Block((other, USE))))
    loop = below(b.block(others, Allocate((PANEL,), Block((COPY, USE)))))
    verify(module(loop, (A, B)))
    assert hoist_packing(loop) == ((), loop)
