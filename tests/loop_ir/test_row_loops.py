"""Blocks that end after fewer rows: which programs may, and what they compute then."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.binding_checks import check_bindings
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Buffer,
    Expr,
    Kernel,
    Load,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
    Store,
    Type,
)
from tensor_comprehensions.loop_ir.rewrite import map_stmt, walk_expr, walk_stmts
from tensor_comprehensions.loop_ir.row_blocks import (
    SIZES,
    RowBlock,
    RowProgram,
    bind_variables,
    has_row_loops,
    join_row_blocks,
    rows_variable,
    sizes_buffer,
)
from tensor_comprehensions.loop_ir.verify import verify

ROWS, WIDTH = 8, 5
X, OUT = (Buffer(name, Type(FLOAT32), (ROWS, WIDTH), (WIDTH, 1)) for name in "xo")
W = Buffer("w", Type(FLOAT32), (WIDTH,), (1,))
PANEL = Buffer("panel", Type(FLOAT32), (WIDTH, ROWS), (ROWS, 1), Space.SCRATCH)
SHORT_PANEL = Buffer("panel", Type(FLOAT32), (WIDTH, ROWS + 1), (ROWS + 1, 1), Space.SCRATCH)
N, D = build.var("n"), build.var("d")


def over(var: str, stop: int, body: Stmt, start: int = 0, step: int = 1, kind: LoopKind = LoopKind.SERIAL) -> Loop:
    return Loop(var, build.const(start), build.const(stop), body, kind, step=step)


def store(row: Expr, value: Expr) -> Stmt:
    return over("d", WIDTH, Store(OUT, (row, D), value))


def copy_rows(panel: Buffer, again: Expr) -> Stmt:
    """`o(n, d) = x(n, d)` by way of memory for all rows, which is read at the rows `again`."""
    fill = over("n", ROWS, over("d", WIDTH, Store(panel, (D, N), Load(X, (N, D)))))
    use = over("n", ROWS, store(N, Load(panel, (D, again))))
    return Allocate((panel,), build.block(fill, use))


def block(body: Stmt, rows: int = ROWS) -> RowBlock:
    return RowBlock(rows, Module("f", (X, W, OUT), (), (Kernel("f.0", body),), (), ("o", "w")), 1)


def program(width: tuple[int, ...] = (WIDTH,), pitch: int = WIDTH) -> RowProgram:
    """The buffers of a program whose rows have these dimensions, `pitch` elements apart."""
    strides = (pitch, *(prod(width[d + 1 :]) for d in range(len(width))))
    sources = tuple(Buffer(name, Type(FLOAT32), (0, *width), strides, dynamic=(0,)) for name in "xo")
    return RowProgram("f", (sources[0], W, sources[1]), (), {"x": (0,), "o": (0,)})


MAP = over("n", ROWS, store(N, build.mul(Load(X, (N, D)), 2.0)))
ADD = over("n", ROWS, over("d", WIDTH, Store(W, (D,), Load(X, (N, D)), "+")))
SHORTER: dict[str, Stmt] = {
    "map": MAP,
    "threads": over("n", ROWS, store(N, build.mul(Load(X, (N, D)), 2.0)), kind=LoopKind.PARALLEL),
    "inner loop": over("d", WIDTH, over("n", ROWS, Store(OUT, (N, D), build.mul(Load(X, (N, D)), 2.0)))),
    "memory": build.block(copy_rows(PANEL, N), over("n", ROWS, store(N, build.mul(Load(OUT, (N, D)), 2.0)))),
}
NUMBERED: dict[str, Stmt] = {
    "its number": over("n", ROWS, store(N, build.cast(N, FLOAT32))),
    "a condition": over("n", ROWS, store(N, build.select(build.lt(N, 4), Load(X, (N, D)), build.const(0.0, FLOAT32)))),
}
"""Values that depend on the number of a row in its block."""
WHOLE: dict[str, Stmt] = {
    "a part": over("n", ROWS - 1, store(N, Load(X, (N, D)))),
    "without the first": over("n", ROWS, store(N, Load(X, (N, D))), start=1),
    "in steps": over("n", ROWS, store(N, Load(X, (N, D))), step=2),
    "vectors": over("n", ROWS, store(N, Load(X, (N, D))), kind=LoopKind.VECTOR),
    "a single row": store(build.const(3), Load(X, (build.const(3), D))),
    "the next row": over("n", ROWS, store(N, Load(X, (build.mod(build.add(N, 1), ROWS), D)))),
    "two rows": over("n", ROWS, over("m", ROWS, store(N, Load(X, (build.var("m"), D))))),
    "memory of another row": copy_rows(PANEL, build.const(2)),
    "room for more": copy_rows(SHORT_PANEL, N),
    "what has no rows": over("n", WIDTH, Store(W, (N,), Load(X, (N, build.const(0))))),
}


def join_shorter(body: Stmt, given: RowProgram | None = None) -> Module:
    """The module for any number of rows, whose last block is shorter."""
    joined = join_row_blocks(given or program(), [(replace(block(body), is_serial=body is ADD, may_be_shorter=True),)])
    total = build.maximum(Load(sizes_buffer(1), (build.const(0),)), 0)
    return bind_variables(joined, 1, [(rows_variable(0), total)])


def run(body: Stmt, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `x`, `w` and `o` are after `body` for so many rows."""
    module = join_shorter(body)
    check_bindings(module)
    verify(module)
    x = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
    w, o = np.ones(WIDTH, np.float32), np.full((rows, WIDTH), -1, np.float32)
    assert interpret(module, {"x": x, "w": w, "o": o, SIZES: np.array([rows])}) == []
    return x, w, o


@pytest.mark.parametrize("name", SHORTER)
@pytest.mark.parametrize("rows", [0, 1, 3, 7, 8, 9, 16, 21])
def test_the_last_block_may_be_shorter(name: str, rows: int) -> None:
    assert has_row_loops(program(), block(SHORTER[name]))
    x, _, o = run(SHORTER[name], rows)
    assert np.array_equal(o, 2 * x)


@pytest.mark.parametrize("rows", [0, 3, 8, 19, 20, 45])
def test_loops_over_rows_serve_blocks_of_more_rows(rows: int) -> None:
    longer = replace(block(MAP), may_be_shorter=True, longest=20)
    assert has_row_loops(program(), longer)
    total = build.maximum(Load(sizes_buffer(1), (build.const(0),)), 0)
    module = bind_variables(join_row_blocks(program(), [(longer,)]), 1, [(rows_variable(0), total)])
    verify(module)
    stops = [s.stop for k in module.kernels for s in walk_stmts(k.body) if isinstance(s, Loop) and s.var == "n"]
    assert [e for stop in stops for e in walk_expr(stop) if e == build.const(20)], "blocks have 20 rows"
    x = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
    o = np.full_like(x, -1)
    assert interpret(module, {"x": x, "w": np.ones(WIDTH, np.float32), "o": o, SIZES: np.array([rows])}) == []
    assert np.array_equal(o, 2 * x)


def test_memory_for_the_rows_of_a_block_has_no_room_for_more() -> None:
    assert has_row_loops(program(), block(SHORTER["memory"]))
    assert not has_row_loops(program(), replace(block(SHORTER["memory"]), longest=ROWS + 1))


@pytest.mark.parametrize("width", [(1, WIDTH), (WIDTH, 1)])
def test_dimensions_inside_of_rows_may_be_merged(width: tuple[int, ...]) -> None:
    given = program(width)
    assert has_row_loops(given, block(MAP))
    module = join_shorter(MAP, given)
    verify(module)
    x = np.arange(13 * WIDTH, dtype=np.float32).reshape(13, *width)
    o = np.full_like(x, -1)
    assert interpret(module, {"x": x, "w": np.ones(WIDTH, np.float32), "o": o, SIZES: np.array([13])}) == []
    assert np.array_equal(o, 2 * x)


@pytest.mark.parametrize("given", [program((2, WIDTH)), program((1, WIDTH), pitch=WIDTH + 1), program((WIDTH + 1,))])
def test_rows_of_another_size_are_no_merged_rows(given: RowProgram) -> None:
    assert not has_row_loops(given, block(MAP))


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 13, 21])
def test_values_of_a_shorter_block_may_use_the_numbers_of_its_rows(rows: int) -> None:
    numbers = np.arange(rows)[:, np.newaxis] % ROWS
    x, _, o = run(NUMBERED["its number"], rows)
    assert np.array_equal(o, np.broadcast_to(numbers, x.shape))
    x, _, o = run(NUMBERED["a condition"], rows)
    assert np.array_equal(o, np.where(numbers < 4, x, 0))


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 13])
def test_a_shorter_block_adds_its_rows_alone(rows: int) -> None:
    assert has_row_loops(program(), block(ADD))
    x, w, _ = run(ADD, rows)
    assert np.array_equal(w, 1 + x.sum(0))


@pytest.mark.parametrize("name", WHOLE)
def test_blocks_that_reach_rows_in_another_way_are_whole(name: str) -> None:
    assert not has_row_loops(program(), block(WHOLE[name]))
    with pytest.raises(CannotLower):
        join_shorter(WHOLE[name])


def test_the_verifier_finds_loops_that_do_not_end_with_the_rows() -> None:
    module = join_shorter(MAP)

    def lengthen(s: Stmt) -> Stmt:
        new = map_stmt(s, lambda e: e, lengthen)
        return replace(new, stop=build.const(ROWS)) if isinstance(new, Loop) and new.var == "n" else new

    wrong = replace(module, kernels=tuple(replace(k, body=lengthen(k.body)) for k in module.kernels))
    verify(module)
    with pytest.raises(InternalError, match="may end behind"):
        verify(wrong)
