"""Bound functions: subscripts, guards, checks, copies, types."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import bound, compile_last_def
from hypothesis import given
from hypothesis import strategies as st

from tensor_comprehensions.core.dtypes import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    UINT8,
    DType,
)
from tensor_comprehensions.core.errors import ArgumentError, RangeError, TCError
from tensor_comprehensions.tc_lang import bind
from tensor_comprehensions.tc_lang import ir as names
from tensor_comprehensions.tc_lang.affine import Interval, expr_interval, normalize_subscript
from tensor_comprehensions.tc_lang.binding.bounds_proof import Verdict, is_injective, prove_in_bounds
from tensor_comprehensions.tc_lang.ir import (
    Access,
    Binary,
    BoundIndex,
    BoundStatement,
    Cast,
    Const,
    Expr,
    Index,
    Role,
    Select,
    Unary,
    walk_expr,
)
from tensor_comprehensions.tc_lang.reference.numpy_expression import NumpyExpressionEvaluator, index_grid

i, j = Index("i", INT64), Index("j", INT64)


def n(value: int) -> Const:
    return Const(value, INT64)


def binary(op: str, a: Expr, b: Expr) -> Binary:
    return Binary(op, a, b, INT64)


def statement(source: str, scalars: dict[str, int] | None = None, **sizes: int) -> BoundStatement:
    """The last statement of the last def."""
    return bound(source, scalars, **sizes).statements[-1]


def reads(s: BoundStatement, tensor: str) -> list[Access]:
    return [e for e in walk_expr(s.value) if isinstance(e, Access) and e.tensor == tensor]


def test_matmul() -> None:
    b = bound("def mm(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }", M=2, K=3, N=4)
    (s,) = b.statements
    assert (s.target, s.reduction, s.initialize, s.num_free, s.reads_own_target, s.checks) == (
        "C",
        "+",
        True,
        2,
        False,
        (),
    )
    assert s.indices == (BoundIndex("m", 0, 2), BoundIndex("n", 0, 4), BoundIndex("k", 0, 3))
    assert [(t.name, t.shape, t.strides, t.role) for t in b.tensors] == [
        ("A", (2, 3), (3, 1), Role.INPUT),
        ("B", (3, 4), (4, 1), Role.INPUT),
        ("C", (2, 4), (4, 1), Role.OUTPUT),
    ]


def test_strides_are_those_of_the_call() -> None:
    f = compile_last_def("def f(float(N,M) a) -> (b) { b(i) += a(i,j) }")
    b = bind(f, {"N": 2, "M": 3}, {}, {"a": (1, 2), "b": (7,)})
    assert b.tensor("a").strides == (1, 2)
    assert b.tensor("b").strides == (7,)


def test_subscripts_count_from_the_start_of_storage() -> None:
    b = bound("def f(float(N) a) -> (b, c) { b(i) = a(i-1) c(i) = b(2*i) }", N=7)
    first, second = b.statements
    assert first.subscripts == (binary("-", i, n(1)),)
    assert reads(second, "b")[0].subscripts == (binary("-", binary("*", i, n(2)), n(1)),)
    assert b.starts == ((1,), (1,))


def test_sizes_and_specialized_scalars_become_numbers() -> None:
    s = statement("def f(int s, float(N) a) -> (b) { b(i) = a(s*i+N-N) * s }", {"s": 3}, N=7)
    assert reads(s, "a")[0].subscripts == (binary("*", i, n(3)),)
    assert isinstance(s.value, Binary)
    assert s.value.right == Cast(Const(3, INT32), FLOAT32)


@pytest.mark.parametrize(
    ("value", "guarded", "checks"),
    [
        ("a(i)", False, 0),
        ("i >= 1 && i <= N ? a(i-1) : 0.0", True, 0),
        ("i < 1 || i > N ? 0.0 : a(i-1)", True, 0),
        ("!(i < 1) ? (i <= N ? a(i-1) : 0.0) : 0.0", True, 0),
        ("i == 3 ? a(i) : 0.0", False, 0),
        ("a(max(min(C(i), N-1), 0))", False, 0),
        ("a(min(max(C(i), 0), N-1))", False, 0),
        ("a(C(i) % N)", False, 0),
        ("a(C(i))", False, 1),
        ("C(i) >= 0 ? a(C(i)) : 0.0", True, 1),
        ("C(i) >= 0 && C(i) < N ? a(C(i)) : 0.0", True, 0),
        ("a(C(C(i)))", False, 2),
        ("c(U(i))", False, 0),
        ("a(U(i) / 4)", False, 0),
        ("c(U(i) * 4)", False, 1),
        ("2 * i < N ? a(2*i) : 0.0", True, 0),
        ("f > 0 ? (i < N ? a(i) : 0.0) : 0.0", False, 0),
    ],
)
def test_accesses_are_decided(value: str, guarded: bool, checks: int) -> None:
    bound_ = "N" if value.startswith(("a(", "i == 3", "c(")) or "C(" in value or "f >" in value else "N+2"
    source = f"def f(float(N) a, float(256) c, int32(N) C, uint8(N) U, float f) -> (b) {{ b(i) = {value}"
    s = statement(f"{source} where i in 0:{bound_} }}", N=1_000_000)
    assert any(x.guarded for x in (*reads(s, "a"), *reads(s, "c"))) == guarded
    assert len(s.checks) == checks


def test_check_of_a_guarded_gather() -> None:
    s = statement("def f(float(N) a, int32(M) I) -> (b) { b(i) = I(i) > 2 ? a(I(i)-1) : 0.0 }", N=5, M=9)
    (check,) = s.checks
    read = Access("I", (i,), INT32)
    assert (check.tensor, check.dimension, check.extent, check.origin) == ("a", 0, 5, 0)
    assert check.subscript == binary("-", Cast(read, INT64), n(1))
    assert check.guard == Binary(">", read, Const(2, INT32), BOOL)


def test_checks_name_the_index_of_the_tensor() -> None:
    source = "def f(float(N) a, int32(M) I) -> (c) { b(i) = a(i-3) c(k) = b(I(k)) }"
    (check,) = statement(source, N=5, M=9).checks
    assert check.origin == 3


def test_guards_that_read_under_guards_stay_lazy() -> None:
    source = (
        "def f(float(N) a, float(N) x, int32(N) I) -> (b) "
        "{ b(i) = i > 0 ? (a(i-1) > 0 ? x(I(i)) : 0.0) : 1.0 where i in 0:N }"
    )
    (check,) = statement(source, N=5).checks
    assert isinstance(check.guard, Select)
    assert check.guard.otherwise == Const(False, BOOL)


def test_a_guarded_right_operand_becomes_a_select() -> None:
    s = statement("def f(float(N) a) -> (b) { b(i) = i > 0 && a(i-1) > 0 where i in 0:N }", N=5)
    assert isinstance(s.value, Select)
    assert s.value.otherwise == Const(False, BOOL)
    s = statement("def f(float(N) a) -> (b) { b(i) = i < 1 || a(i-1) > 0 where i in 0:N }", N=5)
    assert isinstance(s.value, Select)
    assert s.value.then == Const(True, BOOL)


@pytest.mark.parametrize(
    ("body", "staged"),
    [
        ("b(i) = b(i) + a(i)", False),
        ("b(i) += a(i)", False),
        ("b(i) += b(i)", False),
        ("b(i) +=! b(i)", True),
        ("b(i) = b(N-1-i)", True),
        ("b(i) += b(i) * A(i,j)", True),
        ("b(i) = b(i-0) * 2.0", False),
        ("b(i) = b(0)", True),
        ("b(I(i)) += b(I(i))", True),
        ("b(I(i)) += a(i)", False),
    ],
)
def test_staging(body: str, staged: bool) -> None:
    source = f"def f(float(N) a, float(N,N) A, int32(N) I) -> (b) {{ b(i) = a(i) {body} }}"
    assert statement(source, N=4).reads_own_target == staged


def test_initializing_scatter_is_split() -> None:
    fill, scatter = bound("def f(int32(N) I) -> (int32(8) H) { H(I(n)) +=! 1 }", N=5).statements
    assert (fill.reduction, fill.value, fill.indices) == (None, Const(0, INT32), (BoundIndex("i0", 0, 8),))
    assert (scatter.reduction, scatter.initialize, len(scatter.checks)) == ("+", False, 1)


@pytest.mark.parametrize(
    ("sizes", "scalars"), [({}, {}), ({"N": -1}, {}), ({"N": 2.0}, {}), ({"N": True}, {}), ({"N": 3}, {"t": 1})]
)
def test_missing_and_wrong_sizes(sizes: dict[str, int], scalars: dict[str, int]) -> None:
    f = compile_last_def("def f(int s, float(N) a) -> (b) { b(i) = a(s*i) }")
    with pytest.raises(ArgumentError):
        bind(f, sizes, scalars)


@pytest.mark.parametrize("size", [2**31, 2**40, 2**61, 10**30])
def test_huge_sizes(size: int) -> None:
    source = "def f(float(N,0) a) -> (b) { b(i) +=! a(i,j) * (N + i) where i in 0:N*N*N }"
    with pytest.raises(RangeError):
        bound(source, N=size)


# --- types ---------------------------------------------------------------------------------------------------------


def output_type(types: str, value: str) -> DType:
    declared = ", ".join(f"{t}(N) x{k}" for k, t in enumerate(types.split()))
    return compile_last_def(f"def f({declared}) -> (b) {{ b(i) = {value} }}").tensor("b").dtype


@pytest.mark.parametrize(
    ("types", "value", "expected"),
    [
        ("float16 bfloat16", "x0(i) + x1(i)", FLOAT32),
        ("float16", "x0(i) + x0(i)", FLOAT16),
        ("bfloat16", "exp(x0(i)) * 2", BFLOAT16),
        ("float16", "x0(i) * 2.0", FLOAT32),
        ("int64 float16", "x0(i) + x1(i)", FLOAT16),
        ("uint8 uint32", "x0(i) + x1(i)", DTYPES["uint32"]),
        ("uint8 int16", "x0(i) + x1(i)", DTYPES["int16"]),
        ("uint32 int8", "x0(i) + x1(i)", INT32),
        ("uint8", "x0(i) + 1", UINT8),
        ("uint8", "x0(i) + i", INT32),
        ("uint8", "x0(i) + N", INT32),
        ("uint8", "x0(i) + (x0(i) > 3 ? 1 : 2)", UINT8),
        ("bool", "x0(i) ? 1 : 0", INT32),
        ("float64", "x0(i) * 0.5", FLOAT64),
        ("int32", "sqrt(x0(i))", FLOAT32),
        ("int32 float64", "pow(x0(i), x1(i))", FLOAT64),
        ("int8 int16", "max(x0(i), x1(i), 3)", DTYPES["int16"]),
        ("int8", "x0(i) < 3", BOOL),
        ("int8", "abs(x0(i))", DTYPES["int8"]),
        ("int8", "relu(x0(i))", FLOAT32),
    ],
)
def test_types(types: str, value: str, expected: DType) -> None:
    assert output_type(types, value) == expected


def test_storage_types_compute_in_float32() -> None:
    s = statement("def f(float16(N) a) -> (b) { b(i) = a(i) * a(i) }", N=3)
    read = Cast(Access("a", (i,), FLOAT16), FLOAT32)
    assert s.value == Cast(Binary("*", read, read, FLOAT32), FLOAT16)
    s = statement("def f(float16(N) a) -> (b) { b(i) = a(i) }", N=3)
    assert s.value == Access("a", (i,), FLOAT16)
    s = statement("def f(float16(N) a) -> (b) { b +=! a(i) }", N=3)
    assert s.value == Cast(Access("a", (i,), FLOAT16), FLOAT32)


def test_types_of_literal_definitions_spread() -> None:
    f = compile_last_def("def f(double(N) a) -> (b, c) { b(i) = 0 c(i) = b(i) b(i) += a(i) c(i) += 1 }")
    assert [f.tensor(t).dtype for t in "bc"] == [FLOAT64, FLOAT64]


# --- affine forms and proofs ---------------------------------------------------------------------------------------

BOX: dict[str, Interval] = {"i": (-3, 4), "j": (0, 5)}
leaf = st.one_of(st.sampled_from([i, j]), st.integers(-5, 5).map(n))


def _larger(e: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    divisor = st.integers(-4, 4).filter(bool).map(n)
    return st.one_of(
        st.builds(binary, st.sampled_from(["+", "-", "*", "min", "max"]), e, e),
        st.builds(binary, st.sampled_from(["/", "%"]), e, divisor),
        st.builds(binary, st.sampled_from(["/", "%"]), e, e),
        st.builds(lambda x: Unary("-", x, INT64), e),
        st.builds(lambda c, d, a, b: Select(Binary("<", c, d, BOOL), a, b, INT64), e, e, e, e),
        st.builds(lambda x: Cast(Cast(x, UINT8), INT64), e),
    )


subscripts = st.recursive(leaf, _larger, max_leaves=8)


def values(e: Expr) -> object:
    ranges = {name: (low, high + 1) for name, (low, high) in BOX.items()}
    with np.errstate(all="ignore"):
        return np.broadcast_to(NumpyExpressionEvaluator(index_grid(ranges), lambda *_: None)(e), (8, 6))


def divides_by_zero(e: Expr) -> bool:
    return any(isinstance(x, Binary) and x.op in "/%" and np.any(values(x.right) == 0) for x in walk_expr(e))


@given(subscripts)
def test_normal_form_keeps_the_values(e: Expr) -> None:
    if not divides_by_zero(e):
        assert (values(e) == values(normalize_subscript(e, {}))).all()  # type: ignore[attr-defined]


@given(subscripts)
def test_intervals_contain_the_values(e: Expr) -> None:
    low, high = expr_interval(e, BOX)
    if not divides_by_zero(e):
        assert low <= values(e).min()  # type: ignore[attr-defined]
        assert values(e).max() <= high  # type: ignore[attr-defined]


@given(subscripts, st.integers(0, 12), st.lists(st.tuples(subscripts, subscripts, st.booleans()), max_size=2))
def test_verdicts_are_true(e: Expr, extent: int, comparisons: list[tuple[Expr, Expr, bool]]) -> None:
    guards = tuple((Binary("<", a, b, BOOL), holds) for a, b, holds in comparisons)
    if any(divides_by_zero(x) for x in (e, *(g for g, _ in guards))):
        return
    inside = (values(e) >= 0) & (values(e) < extent)  # type: ignore[operator]
    for g, holds in guards:
        inside = inside | (values(g) != holds)
    verdict = prove_in_bounds(e, extent, guards, BOX).verdict
    assert verdict is not Verdict.UNKNOWN
    assert (verdict is not Verdict.VIOLATED) == bool(inside.all())


@given(st.lists(subscripts, min_size=1, max_size=2))
def test_injectivity_is_true(es: list[Expr]) -> None:
    if any(divides_by_zero(e) for e in es):
        return
    points = set(zip(*(values(e).reshape(-1).tolist() for e in es), strict=True))  # type: ignore[attr-defined]
    assert is_injective(tuple(es), BOX) == (len(points) == 48)


def test_large_domains_are_reasoned_about() -> None:
    box = {"i": (0, 10**6 - 1), "j": (0, 3)}
    assert is_injective((binary("+", binary("*", i, n(4)), j),), box)
    assert is_injective((i, binary("+", i, j)), box)
    assert is_injective((binary("+", binary("*", i, n(3)), j),), box) is None


def test_bound_functions_round_trip_through_repr() -> None:
    b = bound("def f(float(N) a, int32(N) I) -> (b) { b(i) = i > 0 ? a(I(i)) : 0.5 }", N=3)
    scope = {**vars(names), **{repr(t): t for t in DTYPES.values()}}
    for s in b.statements:
        assert eval(repr(s), scope) == s


def test_errors_of_bind_are_tc_errors() -> None:
    with pytest.raises(TCError):
        bound("def f(float(N) a) -> (b) { b(i) = a(i+3) where i in 0:N }", N=3)
