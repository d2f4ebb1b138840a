"""Random expressions and loop programs, and what it takes to run and compare them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from tensor_comprehensions.core.dtypes import BOOL, FLOAT32, INT32, INT64, DType
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.ops import storage_dtype
from tensor_comprehensions.loop_ir.nodes import (
    COMPARISONS,
    Allocate,
    Binary,
    Buffer,
    Call,
    Cast,
    Const,
    Expr,
    If,
    Kernel,
    Let,
    Loop,
    LoopKind,
    Module,
    Select,
    Space,
    Stmt,
    Store,
    Unary,
)

ROWS, COLUMNS, DEPTH = 3, 13, 4
X = b.buffer("X", FLOAT32, (ROWS, COLUMNS))
W = b.buffer("W", FLOAT32, (DEPTH, COLUMNS))
P = b.buffer("P", INT32, (COLUMNS,))
Y = b.buffer("Y", FLOAT32, (ROWS, COLUMNS))
Z = b.buffer("Z", FLOAT32, (DEPTH, COLUMNS))
S = b.buffer("S", FLOAT32, (ROWS,))
T = b.buffer("T", FLOAT32, ())
BUFFERS = (X, W, P, Y, Z, S, T)


def module(body: Stmt, buffers: tuple[Buffer, ...] = BUFFERS) -> Module:
    return Module("m", buffers, (), (Kernel("k", body),), written=tuple(x.name for x in buffers))


def run(body: Stmt, seed: int = 0, buffers: tuple[Buffer, ...] = BUFFERS) -> dict[str, np.ndarray]:
    """The arrays after `body` ran on small whole numbers, on which every order of a sum gives the same."""
    rng = np.random.default_rng(seed)
    arrays = {x.name: np.asarray(rng.integers(-3, 4, x.shape)).astype(storage_dtype(x.type.dtype)) for x in buffers}
    if P in buffers:
        arrays["P"] = np.asarray(rng.permutation(COLUMNS), np.int32)
    assert interpret(module(body, buffers), arrays) == []
    return arrays


def assert_same_effect(before: Stmt, after: Stmt, buffers: tuple[Buffer, ...] = BUFFERS) -> None:
    expected, found = run(before, buffers=buffers), run(after, buffers=buffers)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def evaluate(e: Expr, values: dict[str, int]) -> np.ndarray:
    """The lanes of `e` with its variables bound to `values`."""
    lanes = e.type.lanes
    out = b.buffer("out", e.type.dtype, (lanes,))
    body: Stmt = Store(out, (b.ramp(0, 1, lanes),), e)
    for name, value in values.items():
        body = Let(name, b.const(value), body)
    array = np.zeros(lanes, storage_dtype(e.type.dtype))
    interpret(Module("m", (out,), (), (Kernel("k", body),)), {"out": array})
    return array


def same_bits(a: np.ndarray, c: np.ndarray) -> bool:
    """Equal to the bit, any NaN being as good as another."""
    if a.dtype.kind == "f":
        either = np.isnan(a) | np.isnan(c)
        return bool(np.array_equal(np.isnan(a), np.isnan(c)) and a[~either].tobytes() == c[~either].tobytes())
    return bool(np.array_equal(a, c))


# --- expressions -------------------------------------------------------------------------------------------------

RANGES = {"i": (0, 9), "j": (-4, 20), "k": (8, 15)}
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38)


def values() -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries({name: st.integers(*where) for name, where in RANGES.items()})


def integers(lanes: int = 1) -> st.SearchStrategy[Expr]:
    """int64 expressions of `lanes` lanes over i, j, k."""
    scalar = st.one_of(
        st.sampled_from([b.var(n) for n in RANGES]), st.integers(-20, 20).map(b.const), st.just(b.const(8))
    )
    scalars = st.recursive(scalar, lambda inner: st.builds(_integer_node, _INTEGER_OPS, inner, inner), max_leaves=6)
    if lanes == 1:
        return scalars
    leaf = st.one_of(
        st.builds(lambda e, s: b.ramp(e, s, lanes), scalars, st.integers(-3, 3)),
        scalars.map(lambda e: b.broadcast(e, lanes)),
    )
    return st.recursive(leaf, lambda inner: st.builds(_integer_node, _INTEGER_OPS, inner, inner), max_leaves=3)


_INTEGER_OPS = st.sampled_from(["add", "sub", "mul", "div", "mod", "min", "max"])


def _integer_node(op: str, left: Expr, right: Expr) -> Expr:
    if op in ("div", "mod") and not (isinstance(right, Const) and right.value != 0):
        right = b.const(8, INT64, left.type.lanes)
    return Binary(op, left, right)


def booleans(lanes: int = 1) -> st.SearchStrategy[Expr]:
    leaf = st.one_of(
        st.builds(Binary, st.sampled_from(COMPARISONS), integers(lanes), integers(lanes)),
        st.booleans().map(lambda v: b.const(v, BOOL, lanes)),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(Binary, st.sampled_from(["and", "or"]), inner, inner), inner.map(lambda e: Unary("not", e))
        ),
        max_leaves=4,
    )


def floats(lanes: int = 1, dtype: DType = FLOAT32) -> st.SearchStrategy[Expr]:
    leaf = st.one_of(
        st.sampled_from(SPECIAL).map(lambda v: b.const(v, dtype, lanes)),
        integers(lanes).map(lambda e: Cast(e, dtype)),
        st.sampled_from(SPECIAL).map(lambda v: b.broadcast(Unary("neg", b.const(v, dtype)), lanes)),
    )
    ops = st.sampled_from(["add", "sub", "mul", "div", "min", "max"])
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.builds(Binary, ops, inner, inner),
            inner.map(lambda e: Unary("neg", e)),
            inner.map(lambda e: Call("fabs", (e,))),
            st.builds(Select, booleans(lanes), inner, inner),
        ),
        max_leaves=4,
    )


# --- programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scope:
    """What a random statement may use: loop variables by role, private scalars that are set, names left to give."""

    row: Expr
    column: Expr
    privates: tuple[Buffer, ...] = ()
    lets: tuple[Expr, ...] = ()
    depth: Expr | None = None


@st.composite
def scalars(draw: st.DrawFn, scope: Scope, size: int = 2) -> Expr:
    """A float32 value at a place of the program."""
    kind = draw(st.integers(0, 9 if size else 4))
    if kind == 0:
        return b.load(X, scope.row, scope.column)
    if kind == 1:
        return b.load(W, scope.depth if scope.depth is not None else 1, scope.column)
    if kind == 2:
        return b.const(draw(st.integers(-2, 2)), FLOAT32)
    if kind == 3:
        names = [*scope.lets, *(b.load(p) for p in scope.privates)]
        return draw(st.sampled_from(names)) if names else b.load(X, scope.row, 0)
    if kind == 4:
        gathered = b.cast(b.load(P, scope.column), INT64)
        return b.load(X, scope.row, gathered)
    left, right = draw(scalars(scope, size - 1)), draw(scalars(scope, size - 1))
    if kind == 5:
        return b.cast(scope.column, FLOAT32)
    if kind == 6:
        return b.select(draw(conditions(scope)), left, right)
    return b.binary(draw(st.sampled_from(["add", "sub", "min", "max"])), left, right)


@st.composite
def conditions(draw: st.DrawFn, scope: Scope) -> Expr:
    subject = draw(st.sampled_from([scope.column, scope.row, b.cast(b.load(P, scope.column), INT64)]))
    bound = draw(st.one_of(st.integers(0, COLUMNS).map(b.const), st.just(scope.row)))
    return b.binary(draw(st.sampled_from(["lt", "ge", "eq"])), subject, bound)


@st.composite
def statements(draw: st.DrawFn, scope: Scope, op: str, size: int, taken: list[str]) -> Stmt:
    """A statement of the body of a loop over columns whose iterations are independent or reduce with `op`."""
    kind = draw(st.integers(0, 8 if size else 2))
    value = draw(scalars(scope))
    if kind == 0:
        return b.store(Y, (scope.row, scope.column), value)
    if kind == 1:
        return b.store(S, (scope.row,), value, op=op)
    if kind == 2:
        return b.store(T, (), value, op=op)
    name = f"t{len(taken)}"
    taken.append(name)
    if kind == 3:
        return b.block(*[draw(statements(scope, op, size - 1, taken)) for _ in range(2)])
    if kind == 4:
        inner = [draw(statements(scope, op, size - 1, taken)) for _ in range(2)]
        return If(draw(conditions(scope)), inner[0], draw(st.sampled_from([None, inner[1]])))
    if kind == 5:
        deeper = replace(scope, lets=(*scope.lets, b.var(name, FLOAT32)))
        return Let(name, value, draw(statements(deeper, op, size - 1, taken)))
    if kind == 6:
        space = draw(st.sampled_from([Space.SCRATCH, Space.REGISTER]))
        private = b.buffer(name, FLOAT32, (), space)
        deeper = replace(scope, privates=(*scope.privates, private))
        update = Store(private, (), draw(scalars(deeper)), draw(st.sampled_from([None, "+", "max"])))
        body = b.block(b.store(private, (), value), update, draw(statements(deeper, op, size - 1, taken)))
        return Allocate((private,), body)
    start = draw(st.sampled_from([b.const(0), b.const(1)]))
    stop = draw(st.sampled_from([b.const(DEPTH), b.const(1), scope.row]))
    deeper = replace(scope, depth=b.var(name))
    inner_body = draw(st.one_of(statements(deeper, op, 0, taken), updates(deeper)))
    constant = isinstance(stop, type(b.const(0)))
    kind_of_loop = draw(st.sampled_from([LoopKind.SERIAL, LoopKind.UNROLLED])) if constant else LoopKind.SERIAL
    return Loop(name, start, stop, inner_body, kind_of_loop)


@st.composite
def updates(draw: st.DrawFn, scope: Scope) -> Stmt:
    """An accumulation that a serial loop makes on what it does not move over."""
    target = (Z, (1, scope.column)) if draw(st.booleans()) else (Z, (scope.depth or 0, scope.column))
    return b.store(target[0], target[1], draw(scalars(scope)), op=draw(st.sampled_from(["+", "max"])))


@st.composite
def programs(draw: st.DrawFn) -> Stmt:
    """Rows of vector loops over columns, with odd extents, bounds that depend on the row, and reductions."""
    row, column = b.var("r"), b.var("c")
    op = draw(st.sampled_from(["+", "min", "max"]))
    body = draw(statements(Scope(row, column), op, 3, []))
    start = draw(st.sampled_from([b.const(0), b.const(2), row]))
    stop = draw(
        st.sampled_from(
            [b.const(COLUMNS), b.const(9), b.const(3), b.add(row, 5), b.minimum(b.add(b.mul(row, 4), 6), 13)]
        )
    )
    factor = draw(st.sampled_from([(4, 1), (4, 2), (8, 1), (2, 3), (16, 1)]))
    inner = Loop("c", start, stop, body, LoopKind.VECTOR, vector_factors=factor)
    return Loop("r", b.const(0), b.const(ROWS), inner)
