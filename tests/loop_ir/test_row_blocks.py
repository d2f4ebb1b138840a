"""Modules for any number of rows: what they compute, and faults in them that the verifier and the interpreter find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.binding_checks import check_bindings
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Buffer, Kernel, Load, Loop, LoopKind, Module, Stmt, Store, Type, Window
from tensor_comprehensions.loop_ir.rewrite import map_stmt, walk_stmts
from tensor_comprehensions.loop_ir.row_blocks import (
    SIZES,
    RowBlock,
    RowProgram,
    bind_variables,
    join_row_blocks,
    rows_variable,
    sizes_buffer,
)
from tensor_comprehensions.loop_ir.verify import verify

WIDTH = 5


def block(rows: int, grain: int = 1, overlap_from: int = 0) -> RowBlock:
    """`t(n, d) = 2 * x(n, d)` and `o(n, d) += t(n, d)`, in two kernels, for so many rows."""
    x, o, t = (Buffer(name, Type(FLOAT32), (rows, WIDTH), (WIDTH, 1)) for name in "xot")
    n, d = build.var("n"), build.var("d")

    def over(body: Stmt) -> Stmt:
        inner = Loop("d", build.const(0), build.const(WIDTH), body)
        return Loop("n", build.const(0), build.const(rows), inner, LoopKind.PARALLEL)

    first = over(Store(t, (n, d), build.mul(Load(x, (n, d)), 2.0)))
    second = over(Store(o, (n, d), Load(t, (n, d)), "+"))
    module = Module("f", (x, o), (t,), (Kernel("f.0", first), Kernel("f.1", second)), (), ("o",))
    return RowBlock(rows, module, grain, overlap_from)


def sources() -> dict[str, Buffer]:
    return {name: Buffer(name, Type(FLOAT32), (0, WIDTH), (WIDTH, 1), dynamic=(0,)) for name in "xo"}


def join_blocks(*blocks: RowBlock) -> Module:
    program = RowProgram("f", tuple(sources().values()), (), {"x": (0,), "o": (0,)})
    rows = build.maximum(Load(sizes_buffer(1), (build.const(0),)), 0)
    module = bind_variables(join_row_blocks(program, [blocks]), 1, [(rows_variable(0), rows)])
    check_bindings(module)
    verify(module)
    return module


def run(module: Module, rows: int) -> np.ndarray:
    x = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH)
    o = np.ones((rows, WIDTH), np.float32)
    assert interpret(module, {"x": x, "o": o, SIZES: np.array([rows])}) == []
    assert module.temporaries == ()
    return o - 1 - 2 * x


@pytest.mark.parametrize("grain", [0, 1, 100])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 23, 64, 65, 130])
def test_every_row_is_computed_once(rows: int, grain: int) -> None:
    module = join_blocks(block(64, grain), block(8, grain), block(1, grain))
    assert not run(module, rows).any()


@pytest.mark.parametrize("rows", range(20))
def test_overlapping_blocks_reach_every_row(rows: int) -> None:
    found = run(join_blocks(block(8, overlap_from=3), block(1)), rows)
    again = rows % 8 if rows >= 8 and rows % 8 >= 3 else 0
    assert not found[: rows - 8 if again else rows].any()
    assert (found != 0).any() == bool(again and again != 8 and rows > 0 and (8 - again))


@pytest.mark.parametrize("rows", [*range(30), 63, 64, 65, 79, 80, 100, 127, 128, 130, 191])
def test_blocks_of_several_sizes_overlap(rows: int) -> None:
    """The last block of a size begins before larger ones end, even where there is no other of its size."""
    found = run(join_blocks(block(64, overlap_from=16), block(8, overlap_from=1), block(1)), rows)
    twice = np.count_nonzero(found[:, 0])
    left = rows % 64
    expected = 64 - left if rows >= 64 and left >= 16 else 8 - left % 8 if rows >= 8 and left % 8 else 0
    assert twice == expected - (0 in range(rows - expected, rows) and expected == rows)


def change(s: Stmt, kind: type, edit: object) -> Stmt:
    new = map_stmt(s, lambda e: e, lambda c: change(c, kind, edit))
    return edit(new) if isinstance(new, kind) else new  # type: ignore[operator]


def mutate_nodes(kind: type, edit: object) -> Module:
    module = join_blocks(block(8), block(1))
    return replace(module, kernels=tuple(replace(k, body=change(k.body, kind, edit)) for k in module.kernels))


@pytest.mark.parametrize(
    ("kind", "edit", "reason"),
    [
        (Window, lambda w: replace(w, start=build.add(w.start, 1)), "may end behind"),
        (Window, lambda w: replace(w, start=build.sub(w.start, 1)), "may start before"),
        (Window, lambda w: replace(w, rows=w.rows + 1), "elements"),
        (Window, lambda w: replace(w, buffer=replace(w.buffer, shape=(w.rows + 1, WIDTH))), "elements"),
        (Loop, lambda s: replace(s, stop=build.add(s.stop, 1)) if s.var == ".block" else s, "may end behind"),
    ],
)
def test_the_verifier_finds_windows_that_leave_their_rows(kind: type, edit: object, reason: str) -> None:
    with pytest.raises(InternalError, match=reason):
        verify(mutate_nodes(kind, edit))


def test_the_interpreter_finds_them_too() -> None:
    wrong = mutate_nodes(Window, lambda w: replace(w, start=build.add(w.start, 1)))
    with pytest.raises(InternalError, match="are the rows"):
        run(wrong, 8)
    wrong = mutate_nodes(Window, lambda w: replace(w, length=build.add(w.length, 1)))
    with pytest.raises(InternalError, match="has 8 rows, not 9"):
        run(wrong, 8)


def test_the_interpreter_finds_blocks_that_meet() -> None:
    wrong = mutate_nodes(Window, lambda w: replace(w, start=build.const(0)) if w.rows == 8 else w)
    with pytest.raises(InternalError, match="race"):
        run(wrong, 16)


def test_the_interpreter_compares_the_number_of_rows() -> None:
    module = join_blocks(block(8), block(1))
    x = np.zeros((9, WIDTH), np.float32)
    with pytest.raises(InternalError, match="has 9 rows"):
        interpret(module, {"x": x, "o": x.copy(), SIZES: np.array([8])})


def test_temporaries_belong_to_the_thread_that_runs_a_block() -> None:
    module = join_blocks(block(8), block(1))
    loops = [s for k in module.kernels for s in walk_stmts(k.body) if isinstance(s, Loop)]
    assert [s.kind for s in loops if s.var == ".block"] == [LoopKind.PARALLEL, LoopKind.PARALLEL]
    assert all(s.kind is LoopKind.SERIAL for s in loops if s.var != ".block")
    assert rows_variable(0) in repr(module)
