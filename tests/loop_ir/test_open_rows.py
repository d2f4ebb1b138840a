"""Modules for any number of rows, made from those for two numbers: which there are, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import CannotLower
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.binding_checks import check_bindings
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Buffer,
    CheckSite,
    Expr,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Space,
    Stmt,
    Store,
    Type,
)
from tensor_comprehensions.loop_ir.open_rows import OpenBuffer, OpenProgram, open_same_rows
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.loop_ir.row_blocks import SIZES, bind_variables, rows_variable, sizes_buffer
from tensor_comprehensions.loop_ir.verify import verify

WIDTH, COUNTS = 3, (32, 29)
N, D = build.var("n"), build.var("d")
W = Buffer("w", Type(FLOAT32), (WIDTH,), (1,))
Body = Callable[[int], Stmt]
"""The body of a module for a number of rows."""


def x(rows: int) -> Buffer:
    """The operand: of a row, the elements from twice its number on, and the next one."""
    return Buffer("x", Type(FLOAT32), (2 * rows, WIDTH), (WIDTH, 1))


def o(rows: int) -> Buffer:
    return Buffer("o", Type(FLOAT32), (rows, WIDTH), (WIDTH, 1))


def load(rows: int, row: Expr = N, tap: int = 0) -> Expr:
    return Load(x(rows), (build.add(build.mul(row, 2), tap), D))


def over(var: str, stop: int, body: Stmt, kind: LoopKind = LoopKind.SERIAL, start: int = 0) -> Loop:
    return Loop(var, build.const(start), build.const(stop), body, kind, vector_factors=(4, 2))


def by_row(rows: int, value: Expr, kind: LoopKind = LoopKind.SERIAL, row: Expr = N) -> Stmt:
    return over("n", rows, over("d", WIDTH, Store(o(rows), (row, D), value)), kind)


def sum_of_taps(rows: int) -> Expr:
    return build.add(load(rows), load(rows, tap=1))


def through_memory(rows: int, kind: LoopKind, extent: int | None = None) -> Stmt:
    """All rows by way of memory that each row d of the outer loop has for them."""
    held = Buffer("held", Type(FLOAT32), (extent or rows,), (1,), Space.SCRATCH)
    fill = over("n", rows, Store(held, (N,), sum_of_taps(rows)), LoopKind.VECTOR)
    use = over("n", rows, Store(o(rows), (N, D), Load(held, (N,))), LoopKind.VECTOR)
    return over("d", WIDTH, Allocate((held,), build.block(fill, use)), kind)


def with_stored_copy(rows: int) -> Stmt:
    """All rows by way of a copy, whose rows are next to each other."""
    copy = Buffer("copy", Type(FLOAT32), (WIDTH, rows), (rows, 1), Space.SCRATCH)
    fill = over("n", rows, over("d", WIDTH, Store(copy, (D, N), sum_of_taps(rows))))
    return Allocate((copy,), build.block(fill, by_row(rows, Load(copy, (D, N)))))


def flat(rows: int, *, outer: str = "n", modulus: int = 0) -> Stmt:
    """One loop over rows and columns."""
    inner, extent = ("d", WIDTH) if outer == "n" else ("n", rows)
    tile = build.var("tile")
    body: Stmt = Store(o(rows), (N, D), sum_of_taps(rows))
    body = Let(outer, build.div(tile, extent), Let(inner, build.mod(tile, modulus or extent), body))
    return over("tile", rows * WIDTH, body, LoopKind.PARALLEL)


ROWS: dict[str, Body] = {
    "loop": lambda n: by_row(n, sum_of_taps(n)),
    "threads": lambda n: by_row(n, sum_of_taps(n), LoopKind.PARALLEL),
    "vectors": lambda n: over("d", WIDTH, over("n", n, Store(o(n), (N, D), sum_of_taps(n)), LoopKind.VECTOR)),
    "memory": lambda n: through_memory(n, LoopKind.SERIAL),
    "memory of threads": lambda n: through_memory(n, LoopKind.PARALLEL),
    "memory for all": with_stored_copy,
    "tiles": flat,
    "tiles of columns": lambda n: flat(n, outer="d"),
}
FIXED: dict[str, tuple[Body, str]] = {
    "a number that follows": (lambda n: by_row(n, build.const(float(n), FLOAT32)), "other loops"),
    "an index that follows": (lambda n: by_row(n, Load(W, (build.const(n // 16),))), "other loops"),
    "a part": (lambda n: over("n", n - 1, Store(o(n), (N, build.const(0)), load(n))), "does not begin"),
    "without the first": (
        lambda n: over("n", n, Store(o(n), (N, build.const(0)), load(n)), start=1), "does not begin",
    ),
    "a part of the results": (lambda n: over("n", n - 1, Store(o(n), (N, build.const(0)), Load(W, (D,)))), "a part"),
    "the last row": (lambda n: by_row(n, load(n, build.const(n - 1))), "does not begin"),
    "reversed": (lambda n: by_row(n, load(n), row=build.sub(n - 1, N)), "not the variable"),
    "unrolled": (lambda n: by_row(n, sum_of_taps(n), LoopKind.UNROLLED), "unrolled"),
    "room for more": (lambda n: through_memory(n, LoopKind.SERIAL, n + 1), "room for another number"),
    "memory of two shapes": (
        lambda n: build.block(through_memory(n, LoopKind.SERIAL), through_memory(n, LoopKind.SERIAL, n + 1)),
        "several shapes",
    ),
    "a register tile": (
        lambda n: Allocate((Buffer("acc", Type(FLOAT32, 8), (1,), (1,), Space.REGISTER),), by_row(n, load(n))), "tile",
    ),
    "another dimension": (lambda n: by_row(n, Load(W, (N,))), "index another dimension"),
    "two loops": (
        lambda n: build.block(by_row(n, load(n)), over("n", n - 1, Store(o(n), (N, D), load(n)))), "does not begin",
    ),
    "a digit of no row": (lambda n: flat(n, modulus=2), "does not begin"),
    "an instruction": (
        lambda n: over("n", n, Invoke("transpose", ((x(n), (N, D)), (o(n), (N, D))))), "fixed number of rows",
    ),
}  # fmt: skip


def module(body: Body, rows: int, sites: tuple[CheckSite, ...] = ()) -> Module:
    return Module("f", (x(rows), W, o(rows)), (), (Kernel("f", body(rows)),), sites, ("o",))


def open_rows(body: Body) -> Module:
    arguments = (Buffer(name, Type(FLOAT32), (0, WIDTH), (WIDTH, 1), dynamic=(0,)) for name in "xo")
    steps: tuple[dict[int, int], ...] = ({0: 2}, {})
    buffers = {b.name: OpenBuffer(b, (0, 1), {0: 0}, step) for b, step in zip(arguments, steps, strict=True)}
    modules = (module(body, n) for n in COUNTS)
    opened = open_same_rows(OpenProgram(buffers, {}), modules, [(n,) for n in COUNTS])
    total = build.maximum(Load(sizes_buffer(1), (build.const(0),)), 0)
    return bind_variables(opened, 1, [(rows_variable(0), total)])


@pytest.mark.parametrize("name", ROWS)
def test_loops_end_with_the_rows(name: str) -> None:
    opened = open_rows(ROWS[name])
    for made in (opened, replace(opened, kernels=_vectorize_rows(opened))):
        check_bindings(made)
        verify(made)
        for rows in (0, 1, 3, 8, 13, 70):
            given = np.arange(2 * rows * WIDTH, dtype=np.float32).reshape(2 * rows, WIDTH)
            out = np.full((rows, WIDTH), -1, np.float32)
            arguments = {"x": given, "w": np.ones(WIDTH, np.float32), "o": out, SIZES: np.array([rows])}
            assert interpret(made, arguments) == []
            assert np.array_equal(out, given[::2] + given[1::2])


def _vectorize_rows(opened: Module) -> tuple[Kernel, ...]:
    return tuple(Kernel(k.name, vectorize_loops(k.body)) for k in opened.kernels)


@pytest.mark.parametrize("name", FIXED)
def test_what_depends_on_the_number_of_rows_is_refused(name: str) -> None:
    body, reason = FIXED[name]
    with pytest.raises(CannotLower, match=reason):
        open_rows(body)


def test_memory_that_threads_allocate_serves_several_rows() -> None:
    def by_thread(n: int) -> Stmt:
        row = Buffer("row", Type(FLOAT32), (n,), (1,), Space.SCRATCH)
        fill = over("n", n, Store(row, (N,), sum_of_taps(n)))
        use = over("n", n, Store(o(n), (N, D), Load(row, (N,))))
        return over("d", WIDTH, Allocate((row,), build.block(fill, use)), LoopKind.PARALLEL)

    (kernel,) = open_rows(by_thread).kernels
    body = kernel.body
    while isinstance(body, Let):
        body = body.body
    assert isinstance(body, Loop)
    assert body.kind is LoopKind.PARALLEL
    assert isinstance(body.body, Allocate)
    assert isinstance(body.body.body, Loop)
