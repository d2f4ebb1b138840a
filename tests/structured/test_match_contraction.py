"""Contractions are found in programs together with the pointwise statements around them, and no more than those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, INT64, DType
from tensor_comprehensions.core.memory_layout import contiguous_strides
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.structured.lower.contraction import lower_contraction
from tensor_comprehensions.structured.match.match_contraction import (
    MatchedContraction,
    match_contraction,
    why_unprofitable,
)
from tensor_comprehensions.target import AVX512
from tensor_comprehensions.tc_lang import ir as tc
from tensor_comprehensions.tc_lang.ir import BoundIndex, BoundStatement, Role, Tensor

EXTENTS = {"i": 9, "j": 40, "k": 6, "b": 9, "o": 40, "r": 6}


def access(text: str, dtype: DType = FLOAT32) -> tc.Access:
    """`A(i,k)`"""
    name, subscripts = text.rstrip(")").split("(")
    indices = tuple(tc.Index(s, INT64) for s in subscripts.split(",") if s)
    return tc.Access(name, indices, dtype)


def times(*factors: tc.Expr) -> tc.Expr:
    value = factors[0]
    for f in factors[1:]:
        value = tc.Binary("*", value, f, value.dtype)
    return value


def statement(target: str, value: tc.Expr, reduction: str | None = None, **extra: Any) -> BoundStatement:
    written = access(target)
    free = [s.name for s in written.subscripts if isinstance(s, tc.Index)]
    used = [e.name for e in tc.walk_expr(value) if isinstance(e, tc.Index)]
    names = list(dict.fromkeys([*free, *used]))
    indices = tuple(BoundIndex(n, 0, EXTENTS[n]) for n in names)
    fields = {"initialize": False, **extra}
    return BoundStatement(
        "s", written.tensor, written.subscripts, reduction, value=value, indices=indices, num_free=len(free), **fields
    )


def tensor(name: str, shape: tuple[int, ...], role: Role, dtype: DType = FLOAT32) -> Tensor:
    return Tensor(name, dtype, shape, contiguous_strides(shape), role)


TENSORS = {
    t.name: t
    for t in (
        tensor("A", (9, 6), Role.INPUT),
        tensor("B", (6, 40), Role.INPUT),
        tensor("d", (6,), Role.INPUT),
        tensor("bias", (40,), Role.INPUT),
        tensor("alpha", (), Role.INPUT),
        tensor("T", (9, 40), Role.TEMPORARY),
        tensor("out", (9, 40), Role.OUTPUT),
        tensor("turned", (40, 9), Role.OUTPUT),
    )
}
PRODUCT = times(access("A(i,k)"), access("B(k,j)"))


def run(cluster: MatchedContraction, ops: Any) -> dict[str, np.ndarray[Any, Any]]:
    buffers = {t.name: build.buffer(t.name, t.dtype, t.shape) for t in TENSORS.values()}
    assert why_unprofitable(cluster, buffers, AVX512) is None
    op = cluster.op("c", buffers)
    result: dict[str, np.ndarray[Any, Any]] = ops.run(op, lower_contraction(op, AVX512, parallel=False))
    return result


def test_bias_contraction_and_activation_are_one_cluster(ops: Any) -> None:
    program = [
        statement("out(b,o)", access("bias(o)")),
        statement("out(i,j)", PRODUCT, "+"),
        statement("out(b,o)", tc.Call("fmax", (access("out(b,o)"), tc.Const(0.0, FLOAT32)), FLOAT32)),
    ]
    cluster = match_contraction(program, 0, TENSORS)
    assert cluster is not None
    assert len(cluster.statements) == 3
    assert {i.name for s in cluster.statements for i in s.indices} == {"i", "j", "k"}
    arrays = run(cluster, ops)
    assert np.array_equal(arrays["result"], np.maximum(arrays["bias"] + arrays["A"] @ arrays["B"], 0))


def test_initializing_update_starts_at_zero_and_plain_update_at_the_old_value(ops: Any) -> None:
    for initialize in (True, False):
        cluster = match_contraction([statement("out(i,j)", PRODUCT, "+", initialize=initialize)], 0, TENSORS)
        assert cluster is not None
        arrays = run(cluster, ops)
        before = 0 if initialize else arrays["out"]
        assert np.array_equal(arrays["result"], before + arrays["A"] @ arrays["B"])


@pytest.mark.parametrize("order", [0, 1, 2])
def test_scalars_leave_the_sum_and_diagonals_join_a_factor(ops: Any, order: int) -> None:
    factors = [access("alpha()"), access("A(i,k)"), access("B(k,j)")]
    value = times(*factors[order:], *factors[:order], access("d(k)"))
    program = [statement("out(i,j)", access("bias(j)")), statement("out(i,j)", value, "+")]
    cluster = match_contraction(program, 0, TENSORS)
    assert cluster is not None
    a = run(cluster, ops)
    assert np.array_equal(a["result"], a["bias"] + a["alpha"] * ((a["A"] * a["d"]) @ a["B"]))


def test_a_temporary_nobody_needs_gives_way_to_what_is_made_of_it(ops: Any) -> None:
    product = statement("T(i,j)", PRODUCT, "+", initialize=True)
    use = statement("out(b,o)", tc.Binary("+", access("T(b,o)"), access("bias(o)"), FLOAT32))
    cluster = match_contraction([product, use], 0, TENSORS)
    assert cluster is not None
    assert cluster.output.tensor == "out"
    arrays = run(cluster, ops)
    assert np.array_equal(arrays["result"], arrays["A"] @ arrays["B"] + arrays["bias"])
    again = statement("out(b,o)", access("T(b,o)"), "+")
    cluster = match_contraction([product, use, again], 0, TENSORS)
    assert cluster is not None
    assert cluster.output.tensor == "T"


def test_clusters_end_where_points_or_elements_differ() -> None:
    product = statement("out(i,j)", PRODUCT, "+", initialize=True)
    elsewhere = statement("turned(o,b)", access("out(b,o)"))
    cluster = match_contraction([product, elsewhere], 0, TENSORS)
    assert cluster is not None
    assert len(cluster.statements) == 1
    shifted = statement("out(i,j)", access("out(i,k)"))
    assert len(match_contraction([product, shifted], 0, TENSORS).statements) == 1  # type: ignore[union-attr]


def test_rounding_of_a_half_precision_target_is_kept() -> None:
    tensors = TENSORS | {"out": tensor("out", (9, 40), Role.OUTPUT, FLOAT16)}
    halved = tc.Binary("*", tc.Cast(access("out(i,j)", FLOAT16), FLOAT32), tc.Const(0.5, FLOAT32), FLOAT32)
    program = [statement("out(i,j)", PRODUCT, "+", initialize=True), statement("out(i,j)", halved)]
    cluster = match_contraction(program, 0, tensors)
    assert cluster is not None
    roundings = [e for e in tc.walk_expr(cluster.epilogue) if isinstance(e, tc.Cast) and e.dtype == FLOAT16]
    assert len(roundings) == 1


@pytest.mark.parametrize(
    "program",
    [
        [statement("out(i,j)", access("bias(j)"))],
        [statement("out(i,j)", access("A(i,k)"), "+")],
        [statement("out(i,j)", PRODUCT, "max")],
        [statement("out(i,j)", tc.Binary("+", access("A(i,k)"), access("B(k,j)"), FLOAT32), "+")],
        [statement("out(i,j)", times(access("A(i,k)"), access("out(i,j)")), "+")],
        [statement("out(i,j)", access("bias(j)")), statement("T(i,j)", PRODUCT, "+")],
        [statement("out(i,j)", PRODUCT, "+", reads_own_target=True)],
    ],
)
def test_leaves_everything_else_alone(program: list[BoundStatement]) -> None:
    assert match_contraction(program, 0, TENSORS) is None
