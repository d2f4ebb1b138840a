"""The interpreter computes what the nodes say, and reports what compiled code would get wrong in silence."""

from __future__ import annotations

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT16, FLOAT32, INT8, INT32, INT64, UINT8, DType
from tensor_comprehensions.core.errors import InternalError
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.interpret.ops import binary_function, storage_dtype
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Binary,
    Block,
    Buffer,
    Call,
    Cast,
    Check,
    CheckSite,
    Expr,
    If,
    Invoke,
    Kernel,
    Let,
    Load,
    Loop,
    LoopKind,
    Module,
    ReduceLanes,
    Select,
    Space,
    Stmt,
    Store,
    Unary,
)

N = 6
A, B = b.buffer("A", FLOAT32, (N,)), b.buffer("B", FLOAT32, (N,))
AT = b.buffer("at", INT64, (N,))
TOTAL = b.buffer("total", FLOAT32, ())
BUFFERS = (A, B, AT, TOTAL)
ROW = b.var("i")


def loop(body: Stmt, kind: LoopKind = LoopKind.SERIAL, stop: int = N, var: str = "i") -> Loop:
    return Loop(var, b.const(0), b.const(stop), body, kind)


def run(body: Stmt, **given: object) -> dict[str, np.ndarray]:
    arrays = {x.name: np.zeros(x.shape, storage_dtype(x.type.dtype)) for x in BUFFERS}
    for name, array in given.items():
        arrays[name] = np.array(array, arrays[name].dtype)
    interpret(Module("m", BUFFERS, (), (Kernel("k", body),)), arrays)
    return arrays


def value(e: Expr) -> object:
    out = b.buffer("out", e.type.dtype, (e.type.lanes,))
    array = np.zeros(e.type.lanes, storage_dtype(e.type.dtype))
    body = Store(out, (b.ramp(0, 1, e.type.lanes),), e)
    interpret(Module("m", (out,), (), (Kernel("k", body),)), {"out": array})
    return array.tolist() if e.type.lanes > 1 else array[0].item()


@pytest.mark.parametrize(
    ("e", "expected"),
    [
        (Binary("div", b.const(-7), b.const(2)), -4),
        (Binary("mod", b.const(-7), b.const(2)), 1),
        (Binary("mod", b.const(-7.0, FLOAT32), b.const(2.0, FLOAT32)), -1.0),
        (Binary("add", b.const(127, INT8), b.const(1, INT8)), -128),
        (Binary("sub", b.const(0, UINT8), b.const(1, UINT8)), 255),
        (Unary("neg", b.const(1, UINT8)), 255),
        (Unary("not", b.const(True, BOOL)), False),
        (Binary("lt", b.const(1), b.const(2)), True),
        (Cast(b.const(-2.7, FLOAT32), INT32), -2),
        (Cast(b.const(2.5, FLOAT32), BOOL), True),
        (Cast(b.const(1.00390625, FLOAT32), BFLOAT16), 1.0),
        (Cast(b.const(1.01171875, FLOAT32), BFLOAT16), 1.015625),
        (Binary("add", b.const(256.0, BFLOAT16), b.const(1.0, BFLOAT16)), 256.0),
        (Binary("add", b.const(2048.0, FLOAT16), b.const(1.0, FLOAT16)), 2048.0),
        (Call("fma", tuple(b.const(x, FLOAT32) for x in (2.0, 3.0, 1.0))), 7.0),
        (Select(b.const(False, BOOL), b.const(1), b.const(2)), 2),
        (b.ramp(3, 2, 4), [3, 5, 7, 9]),
        (ReduceLanes("+", b.ramp(1, 1, 4)), 10),
        (ReduceLanes("*", b.ramp(1, 1, 4)), 24),
        (ReduceLanes("max", b.ramp(1, 1, 4)), 4),
    ],
)
def test_expressions(e: Expr, expected: object) -> None:
    assert value(e) == expected


def test_min_and_max_propagate_nan() -> None:
    for op in ("min", "max"):
        for pair in ((1.0, float("nan")), (float("nan"), 1.0)):
            assert np.isnan(value(Binary(op, *(b.const(x, FLOAT32) for x in pair))))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "mod", "min", "max", "eq", "ne", "lt", "le", "gt", "ge"])
def test_a_scalar_is_computed_as_a_lane(op: str, dtype: DType) -> None:
    kind, combine = storage_dtype(dtype), binary_function(op, dtype)
    if dtype.is_bool and op in ("sub", "div", "mod"):
        return
    with np.errstate(all="ignore"):
        floats = [0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, 3e38]
        limits = [np.iinfo(kind).min, np.iinfo(kind).max] if dtype.is_integer else []
        known = np.array(floats if dtype.is_float else [0, 1, 7, 100, *limits]).astype(kind)
        for x in known:
            lanes = combine(np.full(len(known), x), known)
            scalars = [combine(x, y) for y in known]
            assert all(s.dtype == lanes.dtype for s in scalars)
            np.testing.assert_array_equal(np.array(scalars), lanes)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_type_is_stored_and_loaded(dtype: DType) -> None:
    source, out = b.buffer("source", dtype, (4,)), b.buffer("out", dtype, (4,))
    arrays = {"source": np.array([1, 0, 1, 1]).astype(storage_dtype(dtype)), "out": np.zeros(4, storage_dtype(dtype))}
    interpret(
        Module("m", (source, out), (), (Kernel("k", loop(b.store(out, (ROW,), b.load(source, ROW)), stop=4)),)), arrays
    )
    np.testing.assert_array_equal(arrays["out"], arrays["source"])


@pytest.mark.parametrize(
    ("x", "expected"),
    [(1 + 2**-8 + 2**-45, 1 + 2**-7), (1 + 2**-8, 1.0), (-1 - 3 * 2**-8 + 2**-45, -1 - 2**-7), (3.4e38, np.inf)],
)
def test_doubles_are_rounded_to_bfloat16_once(x: float, expected: float) -> None:
    assert value(Cast(b.const(x, DTYPES["float64"]), BFLOAT16)) == expected


def test_masked_lanes_touch_nothing_and_read_zero() -> None:
    lanes, mask = b.ramp(4, 1, 4), b.lt(b.ramp(4, 1, 4), b.const(N))
    after = run(Store(B, (lanes,), b.add(Load(A, (lanes,), mask), 1.0), None, mask), A=range(N))
    assert after["B"].tolist() == [0, 0, 0, 0, 5, 6]
    spilled = b.load(A, lanes, mask=mask)
    assert run(b.store(TOTAL, (), ReduceLanes("+", spilled)), A=range(N))["total"] == 9


def test_scalar_indices_count_for_all_lanes() -> None:
    square = b.buffer("square", FLOAT32, (3, 4))
    out = b.buffer("out", FLOAT32, (4,))
    arrays = {"square": np.arange(12, dtype=np.float32).reshape(3, 4), "out": np.zeros(4, np.float32)}
    body = b.store(out, (b.ramp(0, 1, 4),), b.load(square, 2, b.ramp(3, -1, 4)))
    interpret(Module("m", (square, out), (), (Kernel("k", body),)), arrays)
    assert arrays["out"].tolist() == [11, 10, 9, 8]


def test_registers_hold_vectors() -> None:
    r = Buffer("r", b.buffer("r", FLOAT32, (2,), lanes=4).type, (2,), (1,), Space.REGISTER)
    steps = b.block(
        Store(r, (b.const(1),), b.cast(b.ramp(0, 1, 4), FLOAT32)),
        Store(r, (b.const(1),), b.const(2.0, FLOAT32, 4), "*"),
        b.store(TOTAL, (), ReduceLanes("+", Load(r, (b.const(1),)))),
    )
    assert run(Allocate((r,), steps))["total"] == 12


def test_statements() -> None:
    doubled = Let("x", b.mul(b.load(A, ROW), 2.0), b.store(B, (ROW,), b.var("x", FLOAT32)))
    after = run(loop(If(b.lt(ROW, b.const(3)), doubled, b.store(B, (ROW,), -1.0))), A=range(N))
    assert after["B"].tolist() == [0, 2, 4, -1, -1, -1]


def test_a_failed_check_stops_later_kernels_and_is_recorded_once() -> None:
    check = loop(Check(b.lt(b.load(AT, ROW), b.const(3)), 1, b.load(AT, ROW)))
    sites = (CheckSite("A", 0, 3), CheckSite("B", 0, 3))
    module = Module("m", (AT, A), (), (Kernel("check", check), Kernel("k", b.store(A, (0,), 1.0))), sites)
    arrays = {"at": np.array([0, 2, 7, 9, 0, 0]), "A": np.zeros(N, np.float32)}
    assert interpret(module, arrays) == [(1, 7)]
    assert arrays["A"][0] == 0
    assert interpret(module, {**arrays, "at": np.zeros(N, np.int64)}) == []
    assert arrays["A"][0] == 1


SCRATCH = b.buffer("s", FLOAT32, (2,), Space.SCRATCH)
VECTOR, PARALLEL = LoopKind.VECTOR, LoopKind.PARALLEL
FIRST = b.store(SCRATCH, (0,), 1.0)
READ = b.store(A, (0,), b.load(SCRATCH, 0))
NEXT = b.mod(b.add(ROW, 1), N)
AGAIN = b.sub(1, b.var("n"))  # 1, then 0
LATE = b.sub(N - 1, ROW)  # element 0 is read by all, and the last iteration writes it


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (loop(b.store(A, (b.add(ROW, 1),), 1.0)), r"A\[\[6\]\]: dimension 0 has extent 6"),
        (loop(b.store(A, (b.sub(ROW, 1),), 1.0)), "extent"),
        (b.store(TOTAL, (), ReduceLanes("+", b.load(A, b.ramp(0, 2, 4)))), "extent"),
        (Store(A, (), b.const(1.0, FLOAT32)), "rank"),
        (Allocate((SCRATCH,), READ), "undefined"),
        (Allocate((SCRATCH,), b.block(b.store(SCRATCH, (0,), 1.0), b.store(A, (0,), b.load(SCRATCH, 1)))), "undefined"),
        (loop(Allocate((SCRATCH,), b.when(b.eq(ROW, b.const(0)), FIRST, READ))), "undefined"),
        (Allocate((SCRATCH,), b.store(SCRATCH, (0,), 1.0, op="+")), "undefined"),
        (loop(b.store(A, (0,), b.load(B, ROW)), PARALLEL), "race"),
        (loop(b.store(A, (0,), b.load(B, ROW)), VECTOR), "race"),
        (loop(b.store(A, (ROW,), b.load(A, NEXT)), PARALLEL), "race"),
        (loop(b.store(A, (ROW,), b.load(A, NEXT)), VECTOR), "race"),
        (loop(b.store(TOTAL, (), 1.0, op="+"), PARALLEL), "race"),
        (loop(b.store(A, (b.load(AT, ROW),), 1.0, op="+"), VECTOR), "race"),
        (loop(b.block(b.store(TOTAL, (), 1.0, op="+"), b.store(A, (ROW,), b.load(TOTAL))), VECTOR), "race"),
        (loop(loop(b.store(A, (b.mul(ROW, AGAIN),), 1.0), PARALLEL), stop=2, var="n"), "iteration 1 does a write"),
        (loop(b.block(b.store(B, (ROW,), b.load(A, 0)), b.store(A, (LATE,), 1.0)), PARALLEL), "a read"),
        (loop(b.store(A, (b.ramp(ROW, 1, 2),), 1.0), PARALLEL, stop=4), "race"),
        (loop(b.store(A, (b.ramp(b.mul(ROW, 2), 1, 2),), b.load(A, b.ramp(ROW, 1, 2))), PARALLEL, stop=3), "race"),
        (b.store(A, (b.load(AT, b.ramp(0, 1, 4)),), 1.0, op="+"), "together"),
        (Allocate((SCRATCH,), loop(b.store(SCRATCH, (0,), 1.0), PARALLEL)), "race"),
        (Invoke("nosuch", ()), "intrinsic"),
    ],
)  # fmt: skip
def test_faults_are_reported(body: Stmt, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        run(body)


@pytest.mark.parametrize(
    "body",
    [
        loop(b.store(TOTAL, (), 1.0, op="+"), VECTOR),
        loop(b.store(A, (ROW,), b.add(b.load(A, ROW), b.load(B, 0))), PARALLEL),
        loop(
            Allocate((SCRATCH,), b.block(b.store(SCRATCH, (0,), 1.0), b.store(A, (ROW,), b.load(SCRATCH, 0)))), PARALLEL
        ),
        loop(loop(b.store(A, (ROW,), 1.0, op="+"), VECTOR, var="j"), PARALLEL),
        b.block(loop(b.store(A, (ROW,), 1.0), PARALLEL), loop(b.store(A, (NEXT,), 2.0), PARALLEL)),
        loop(loop(b.store(A, (b.mod(b.add(ROW, b.var("n")), N),), 1.0), PARALLEL), stop=3, var="n"),
        loop(b.store(A, (b.ramp(b.mul(ROW, 2), 1, 2),), b.load(A, b.ramp(b.mul(ROW, 2), 1, 2))), PARALLEL, stop=3),
    ],
)
def test_independent_iterations_are_no_race(body: Stmt) -> None:
    run(body)


def test_temporaries_start_undefined() -> None:
    temporary = b.buffer("t", FLOAT32, (2,))
    kernels = (Kernel("a", b.store(temporary, (0,), 1.0)), Kernel("b", b.store(TOTAL, (), b.load(temporary, 1))))
    with pytest.raises(InternalError, match="undefined"):
        interpret(Module("m", (TOTAL,), (temporary,), kernels), {"total": np.zeros((), np.float32)})


def test_arrays_must_fit_their_buffers() -> None:
    module = Module("m", (A,), (), (Kernel("k", Block(())),))
    for wrong in (np.zeros(N), np.zeros(N + 1, np.float32)):
        with pytest.raises(InternalError, match="argument A"):
            interpret(module, {"A": wrong})
