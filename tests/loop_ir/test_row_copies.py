"""Loops that copy several rows per iteration: which loops do, and what they copy if there are fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.binding_checks import check_bindings
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Buffer,
    Expr,
    If,
    Kernel,
    Let,
    Load,
    Loop,
    Module,
    Space,
    Stmt,
    Store,
    Type,
)
from tensor_comprehensions.loop_ir.rewrite import map_stmt, walk_stmts
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
from tensor_comprehensions.loop_ir.row_copies import find_row_copies
from tensor_comprehensions.loop_ir.verify import verify

ROWS, LINES, SIDE = 16, 2, 2
"""Rows of a block, elements of a row, and the rows and columns of a square tile."""
X = Buffer("x", Type(FLOAT32), (LINES, ROWS), (1040, 1), stride_variables=("stride", None))
OUT = Buffer("o", Type(FLOAT32), (ROWS, LINES), (LINES, 1))
PANEL = Buffer("panel", Type(FLOAT32), (ROWS, LINES), (LINES, 1), Space.SCRATCH)
C, N, D = build.var("c"), build.var("n"), build.var("d")
Tile = Callable[[Expr], Stmt]


def copy_transposed(first: Expr, rows: Expr | None = None) -> Stmt:
    """The tile of the rows from `first` on: columns of `x` become rows of the panel (from `rows` on, if given)."""
    lanes = [build.var(f"v{k}", FLOAT32, SIDE) for k in range(LINES)]
    pairs = ((0, 2), (1, 3))
    body: Stmt = build.block(
        *(
            Store(
                PANEL,
                (build.add(first if rows is None else rows, k), build.ramp(0, 1, LINES)),
                build.shuffle(lanes[0], lanes[1], pair),
            )
            for k, pair in enumerate(pairs)
        )
    )
    for k, lane in reversed(list(enumerate(lanes))):
        body = Let(lane.name, Load(X, (build.const(k), build.ramp(first, 1, SIDE))), body)
    return body


def pair_of_tiles(first: Expr) -> Stmt:
    return build.block(copy_transposed(first), copy_transposed(build.add(first, SIDE)))


def copy_loop(tile: Tile, rows: int) -> Loop:
    return Loop("c", build.const(0), build.const(ROWS // rows), tile(build.mul(C, rows)))


def block_of(copy: Stmt) -> RowBlock:
    """A block that copies rows to the panel, and doubles them."""
    double = Store(OUT, (N, D), build.mul(Load(PANEL, (N, D)), 2.0))
    use = Loop("n", build.const(0), build.const(ROWS), Loop("d", build.const(0), build.const(LINES), double))
    kernel = Kernel("f.0", Allocate((PANEL,), build.block(copy, use)))
    return RowBlock(ROWS, Module("f", (X, OUT), (), (kernel,), (), ("o",)), 1, may_be_shorter=True)


SOURCES = (
    Buffer("x", Type(FLOAT32), (LINES, 0), (1040, 1), dynamic=(1,), stride_variables=("stride", None)),
    Buffer("o", Type(FLOAT32), (0, LINES), (LINES, 1), dynamic=(0,)),
)
PROGRAM = RowProgram("f", SOURCES, (), {"x": (0,), "o": (0,)})


def join(block: RowBlock) -> Module:
    rows = build.maximum(Load(sizes_buffer(1), (build.const(0),)), 0)
    joined = join_row_blocks(PROGRAM, [(block,)])
    return bind_variables(joined, 1, [(rows_variable(0), rows), ("stride", build.var(rows_variable(0)))])


@pytest.mark.parametrize(("tile", "rows"), [(copy_transposed, SIDE), (pair_of_tiles, 2 * SIDE)])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 15, 16, 17, 18, 33])
def test_the_last_iteration_copies_the_last_rows(tile: Tile, rows: int, count: int) -> None:
    block = block_of(copy_loop(tile, rows))
    assert has_row_loops(PROGRAM, block)
    module = join(block)
    check_bindings(module)
    verify(module)
    x = np.arange(count * LINES, dtype=np.float32).reshape(LINES, count)
    o = np.full((count, LINES), -1, np.float32)
    assert interpret(module, {"x": x, "o": o, SIZES: np.array([count])}) == []
    assert np.array_equal(o, 2 * x.T)


def test_a_pair_of_tiles_is_copied_tile_by_tile() -> None:
    _, found = find_row_copies(copy_loop(pair_of_tiles, 2 * SIDE), ROWS, {"x": 1})
    (copy,) = found.values()
    assert (copy.each, copy.rows, copy.part) == (2 * SIDE, SIDE, copy_transposed(build.mul(C, 2 * SIDE)))


def test_a_single_row_is_copied_element_by_element() -> None:
    body, _ = find_row_copies(copy_loop(copy_transposed, SIDE), ROWS, {"x": 1})
    stores = [s for s in walk_stmts(body) if isinstance(s, Store)]
    elements = [Store(PANEL, (C, build.const(d)), Load(X, (build.const(d), C))) for d in range(LINES)]
    assert stores == elements


OTHERS: dict[str, Stmt] = {
    "rows in another order": copy_loop(lambda first: copy_transposed(first, build.sub(ROWS - SIDE, first)), SIDE),
    "one row for all": copy_loop(lambda first: copy_transposed(first, build.const(0)), SIDE),
    "a part of the rows": Loop("c", build.const(0), build.const(3), copy_transposed(build.mul(C, SIDE))),
    "one of two rows": copy_loop(
        lambda first: Store(
            PANEL, (first, build.ramp(0, 1, LINES)), Load(X, (build.const(0), build.ramp(first, 1, 2)))
        ),
        SIDE,
    ),
    "columns": copy_loop(lambda first: Store(PANEL, (first, build.const(0)), Load(X, (first, build.const(0)))), SIDE),
    "what has no rows": copy_loop(
        lambda first: Store(PANEL, (first, build.const(0)), Load(replace(X, name="w"), (build.const(0), first))), SIDE
    ),
    "what is computed": copy_loop(
        lambda first: Store(PANEL, (first, build.const(0)), build.mul(Load(X, (build.const(0), first)), 2.0)), SIDE
    ),
    "a sum": copy_loop(
        lambda first: Store(PANEL, (first, build.const(0)), Load(X, (build.const(0), first)), "+"), SIDE
    ),
    "masked": copy_loop(
        lambda first: Store(
            PANEL,
            (first, build.const(0)),
            Load(X, (build.const(0), first), mask=build.const(True, build.TRUE.type.dtype)),
        ),
        SIDE,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_loops_are_no_copies_of_rows(name: str) -> None:
    assert find_row_copies(OTHERS[name], ROWS, {"x": 1}) == (OTHERS[name], {})


def test_the_verifier_finds_copies_that_end_behind_the_rows() -> None:
    module = join(block_of(copy_loop(copy_transposed, SIDE)))
    verify(module)

    def begin_late(s: Stmt) -> Stmt:
        new = map_stmt(s, lambda e: e, begin_late)
        return (
            replace(new, stop=build.mul(build.add(C, 1), SIDE)) if isinstance(new, Loop) and "first" in new.var else new
        )

    wrong = replace(module, kernels=tuple(replace(k, body=begin_late(k.body)) for k in module.kernels))
    assert any(isinstance(s, If) for k in module.kernels for s in walk_stmts(k.body))
    with pytest.raises(InternalError, match="may end behind"):
        verify(wrong)
