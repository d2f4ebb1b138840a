"""One broken rule per program, and the verifier names it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensor_comprehensions.core.dtypes import BOOL, FLOAT32, FLOAT64, INT32, INT64
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Binary,
    Block,
    Broadcast,
    Call,
    Cast,
    Check,
    CheckSite,
    Const,
    Expr,
    If,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    Ramp,
    ReduceLanes,
    Select,
    Space,
    Stmt,
    Store,
    Type,
    Unary,
    Var,
)
from tensor_comprehensions.loop_ir.verify import verify

N = 40
A = b.buffer("A", FLOAT32, (N,))
B = b.buffer("B", FLOAT32, (N, N))
REGISTER = b.buffer("reg", FLOAT32, (4,), Space.REGISTER)
SCRATCH = b.buffer("scr", FLOAT32, (4,), Space.SCRATCH)
ROW, COLUMN = b.var("i"), b.var("j")
ONE = b.const(1.0, FLOAT32)


def module(*bodies: Stmt) -> Module:
    kernels = tuple(Kernel(f"k{n}", body) for n, body in enumerate(bodies))
    return Module("m", (A, B), (), kernels, (CheckSite("A", 0, N),), ("A",))


def loop(body: Stmt, start: Expr | int = 0, stop: Expr | int = N, var: str = "i", **more) -> Loop:
    return Loop(var, b.add(start, 0), b.add(stop, 0), body, **more)


def value(e: Expr) -> Stmt:
    return b.store(A, (0,), e)


def index(e: Expr) -> Stmt:
    return b.store(A, (e,), 1.0)


PARALLEL = LoopKind.PARALLEL
WRONG = {
    "operands of types": value(b.cast(Binary("add", b.const(1), b.const(1, INT32)), FLOAT32)),
    "constant 1 of type float32": value(Const(1, Type(FLOAT32))),
    "is float64|is int64": Store(A, (b.const(0),), b.const(1)),
    "float32, not float32x4": Store(A, (b.ramp(0, 1, 4),), ONE),
    "rank": Store(A, (b.const(0), b.const(0)), ONE),
    "index of A": Store(A, (b.const(0, INT32),), ONE),
    "1 is int64, not bool, in A": Store(A, (b.const(0),), ONE, None, b.const(1)),
    "no update": Store(A, (b.const(0),), ONE, "-"),
    "not bound": index(ROW),
    "used as": loop(value(Var("i", Type(FLOAT32)))),
    "bound twice": loop(loop(SET := index(b.const(0)))),
    "allocated twice": Allocate((SCRATCH,), Allocate((SCRATCH,), SET)),
    "of one allocation are named": Allocate((SCRATCH, SCRATCH), SET),
    "not in scope": b.store(SCRATCH, (0,), 1.0),
    "as declared": b.store(replace(A, shape=(N + 1,)), (0,), 1.0),
    "inside a parallel": loop(loop(SET, var="j", kind=PARALLEL), kind=PARALLEL),
    "another thread": Allocate((REGISTER,), loop(b.store(REGISTER, (0,), 1.0), kind=PARALLEL)),
    "register is not constant": Allocate((REGISTER,), loop(b.store(REGISTER, (ROW,), 1.0), stop=4)),
    "vectors in memory": Allocate((b.buffer("v", FLOAT32, (1,), Space.SCRATCH, lanes=4),), SET),
    "but global": Allocate((b.buffer("g", FLOAT32, (1,)),), SET),
    "no site": Check(b.const(True, BOOL), 1, b.const(0)),
    "step": loop(SET, step=0),
    "do not fit: not": value(Unary("not", ONE)),
    "operands of types float64 do not fit: tf32": value(b.cast(Call("tf32", (b.const(1.0, FLOAT64),)), FLOAT32)),
    "do not fit: -": value(b.cast(Unary("neg", b.const(True, BOOL)), FLOAT32)),
    "fit: select": value(Select(b.const(1), ONE, ONE)),
    "fit: nosuch": value(Call("nosuch", (ONE,))),
    "fit: fma": value(Call("fma", (ONE, ONE))),
    "fit: exp": value(b.cast(Call("exp", (b.const(1),)), FLOAT32)),
    "fit: ramp": index(Ramp(b.ramp(0, 1, 4), 1, 4)),
    "fit: x8": Store(A, (b.ramp(0, 1, 8),), Broadcast(b.const(1.0, FLOAT32, 4), 8)),
    "fit: reduce_and": value(ReduceLanes("and", b.const(1.0, FLOAT32, 4))),
    "fit: true [+]": value(b.cast(Binary("add", b.const(True, BOOL), b.const(True, BOOL)), FLOAT32)),
    "fit: 1 and": value(b.cast(Binary("and", b.const(1), b.const(1)), FLOAT32)),
    "is int64, not bool": If(b.const(1), SET),
    "not proved inside": loop(index(b.add(ROW, 1))),
    "-1": loop(index(b.sub(ROW, 1))),
    "0 .. 47": loop(Store(A, (b.ramp(ROW, 1, 8),), b.const(1.0, FLOAT32, 8)), step=8, stop=N + 8),
    "32 .. 40": Store(
        A, (b.ramp(32, 1, 16),), b.const(1.0, FLOAT32, 16), None, b.lt(b.ramp(32, 1, 16), b.const(N + 1))
    ),
    "41": loop(loop(value(b.load(B, ROW, COLUMN)), start=ROW, stop=b.add(ROW, 3), var="j")),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_broken_rule_is_named(message: str) -> None:
    body = WRONG[message]
    with pytest.raises(InternalError, match=message):
        verify(module(body))


def test_names_of_the_module_are_unique() -> None:
    good = module(Block(()))
    for broken in (
        replace(good, temporaries=(A,)),
        replace(good, kernels=good.kernels * 2),
        replace(good, written=("Z",)),
        replace(good, arguments=(SCRATCH,)),
    ):
        with pytest.raises(InternalError):
            verify(broken)


def tiles(width: int, body: Stmt) -> Stmt:
    start = b.mul(b.var("t"), width)
    return loop(loop(body, start=start, stop=b.minimum(b.add(start, width), N)), stop=-(-N // width), var="t")


@pytest.mark.parametrize(
    "body",
    [
        loop(index(ROW)),
        loop(index(b.sub(N - 1, ROW))),
        loop(loop(value(b.load(B, b.add(ROW, COLUMN), COLUMN)), stop=b.sub(N, ROW), var="j")),
        loop(loop(value(b.load(B, b.sub(ROW, COLUMN), COLUMN)), stop=b.add(ROW, 1), var="j")),
        tiles(16, index(ROW)),
        tiles(7, index(b.sub(N - 1, ROW))),
        loop(Store(A, (b.ramp(ROW, 1, 8),), b.const(1.0, FLOAT32, 8)), step=8),
        loop(If(b.lt(ROW, b.const(N)), index(ROW)), stop=N + 3),
        Let("n", b.const(7), index(b.var("n"))),
        loop(index(b.mod(ROW, N)), stop=N + 3),
    ],
)
def test_accesses_that_stay_inside_are_proved(body: Stmt) -> None:
    verify(module(body))


def within(low: int, stop: int) -> Stmt:
    """Element `2 * i`, and the one before it."""
    return loop(b.block(index(b.mul(ROW, 2)), index(b.sub(b.mul(ROW, 2), 1))), start=low, stop=stop)


def test_what_is_known_of_a_name_ends_with_its_loop() -> None:
    verify(module(b.block(within(1, 3), within(10, 20))))
    verify(module(b.block(*(Let("n", b.const(k), loop(index(b.add(ROW, b.var("n"))), stop=N - k)) for k in (5, 1)))))
    for first, last in (((1, 3), (10, 21)), ((1, 3), (0, 3)), ((0, 3), (1, 3))):
        with pytest.raises(InternalError, match="not proved inside"):
            verify(module(b.block(within(*first), within(*last))))


LANES = b.ramp(ROW, 1, 16)
SIXTEEN = b.const(1.0, FLOAT32, 16)


@pytest.mark.parametrize(
    "mask",
    [
        b.lt(LANES, b.const(N)),
        b.le(LANES, b.const(N - 1)),
        b.gt(b.const(N), LANES),
        b.lt(b.ramp(0, 1, 16), b.sub(N, ROW)),
        b.logical_and(b.lt(LANES, b.const(N)), b.broadcast(b.lt(ROW, b.const(3)), 16)),
    ],
)
def test_masks_are_part_of_the_proof(mask: Expr) -> None:
    body = Store(A, (LANES,), SIXTEEN, None, mask)
    verify(module(loop(body, step=16, stop=N)))
    bound = Let("m", mask, Store(A, (LANES,), SIXTEEN, None, b.var("m", BOOL, 16)))
    verify(module(loop(bound, step=16, stop=N)))


def test_what_data_decides_is_beyond_the_proof() -> None:
    gathered = b.cast(b.load(A, 0), INT64)
    verify(module(index(gathered)))


def test_before_unrolling_a_register_may_be_indexed_by_a_loop() -> None:
    fill = loop(b.store(REGISTER, (ROW,), 1.0), stop=4, kind=LoopKind.UNROLLED)
    verify(module(Allocate((REGISTER,), fill)))


def test_casts_between_all_types_are_allowed() -> None:
    verify(module(value(Cast(Cast(Load(A, (b.const(0),)), BOOL), FLOAT32))))


def test_conditions_count_as_often_as_an_index_has_their_variable() -> None:
    """Where 2 * i + 1 < 20, 4 * i + 3 is below 40."""

    def store(end: int) -> Stmt:
        return Store(A, (b.add(b.mul(ROW, 4), 3),), ONE, None, b.lt(b.add(b.mul(ROW, 2), 1), end))

    verify(module(loop(store(20))))
    with pytest.raises(InternalError, match="not proved inside"):
        verify(module(loop(store(22))))


def test_masks_of_strided_lanes_are_understood() -> None:
    strided, some = b.ramp(b.mul(ROW, 3), 3, 8), b.lt(b.ramp(ROW, 1, 8), b.const(14))
    verify(module(loop(Store(A, (strided,), b.const(1.0, FLOAT32, 8), None, some), step=8, stop=14)))
