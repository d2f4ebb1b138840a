"""How programs read."""

from __future__ import annotations

from tensor_comprehensions.core.dtypes import BOOL, FLOAT32, INT64
from tensor_comprehensions.loop_ir import build as b
from tensor_comprehensions.loop_ir.nodes import (
    Allocate,
    Binary,
    Block,
    Buffer,
    Cast,
    Check,
    CheckSite,
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
    Store,
    Type,
    Unary,
)
from tensor_comprehensions.loop_ir.show import format_program

A = b.buffer("A", FLOAT32, (4, 8))
T = Buffer("T", Type(FLOAT32), (4, 8), (1, 4))
R = b.buffer("acc", FLOAT32, (2,), Space.REGISTER, lanes=8)
ROW, COLUMN = b.var("i"), b.var("j")

EXPECTED = """\
module demo
  argument float32 A[4][8] written
  temporary float32 T[4][8] strides (1, 4)
  site 0: dimension 1 of A, extent 8 from 0

kernel first:
  parallel for i in 0 .. 4 grain 2:
    check i * 2 < 8 else fail site 0 with i * 2
    vector for j in 0 .. 8 lanes 8 x 2:
      A[i, j] += T[i, j] * 2.0
    unrolled for k in 0 .. 8 by 2:
      pass

kernel second:
  allocate register float32x8 acc[2]
  acc[0] = x8(0.0)
  let m: boolx8 = ramp(0, 1, 8) < x8(5)
  if not (A[0, 0] < 1.0 or A[0, 1] >= 1.0):
    acc[1] max= (A[0, ramp(0, 1, 8)] @ m) - acc[0]
  else:
    A[1, ramp(0, 1, 8)] = acc[0] @ m  # streaming
  A[0, 0] = select(true, reduce_add(acc[0]), float32(-(3 - (1 - 2))))
  copy(&A[0, 0], &T[0, 0], 32)
"""


def test_a_module_reads_like_this() -> None:
    lanes, m = b.ramp(0, 1, 8), b.var("m", BOOL, 8)
    update = b.store(A, (ROW, COLUMN), b.mul(b.load(T, ROW, COLUMN), 2.0), op="+")
    rows = b.block(
        Check(b.lt(b.mul(ROW, 2), 8), 0, b.mul(ROW, 2)),
        Loop("j", b.const(0), b.const(8), update, LoopKind.VECTOR, vector_factors=(8, 2)),
        Loop("k", b.const(0), b.const(8), Block(()), LoopKind.UNROLLED, step=2),
    )
    low, high = b.lt(b.load(A, 0, 0), 1.0), b.ge(b.load(A, 0, 1), 1.0)
    nested = Binary("sub", b.const(3), Binary("sub", b.const(1), b.const(2)))
    branch = If(
        Unary("not", b.logical_or(low, high)),
        Store(R, (b.const(1),), b.sub(Load(A, (b.const(0), lanes), m), Load(R, (b.const(0),))), "max"),
        Store(A, (b.const(1), lanes), Load(R, (b.const(0),)), None, m, nontemporal=True),
    )
    value = Select(b.const(True, BOOL), ReduceLanes("+", Load(R, (b.const(0),))), Cast(Unary("neg", nested), FLOAT32))
    body = b.block(
        Store(R, (b.const(0),), b.const(0.0, FLOAT32, 8)),
        Let("m", b.lt(lanes, b.const(5, INT64, 8)), branch),
        b.store(A, (0, 0), value),
        Invoke("copy", ((A, (b.const(0), b.const(0))), (T, (b.const(0), b.const(0)))), (32,)),
    )
    kernels = (
        Kernel("first", Loop("i", b.const(0), b.const(4), rows, LoopKind.PARALLEL, grain=2)),
        Kernel("second", Allocate((R,), body)),
    )
    assert format_program(Module("demo", (A,), (T,), kernels, (CheckSite("A", 1, 8),), ("A",))) == EXPECTED
