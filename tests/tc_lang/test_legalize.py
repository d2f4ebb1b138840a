"""Legalized functions: nothing staged, every reduction in its target's type, the same values."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import bound

from tensor_comprehensions.core.dtypes import FLOAT16, FLOAT32, UINT8
from tensor_comprehensions.tc_lang.ir import Access, BoundFunction, Role, walk_expr
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def
from tensor_comprehensions.tc_lang.reference.numpy_expression import numpy_dtype
from tensor_comprehensions.tc_lang.transforms.legalize import legalize

PROGRAMS = [
    "def f(float(N) a) -> (b) { b(i) = a(i) b(i) = b(N-1-i) }",
    "def f(float(N) a) -> (b) { b(i) = a(i) b(i) += b(N-1-i) * b(i) }",
    "def f(float(N,N) a) -> (b) { b(i,j) = a(i,j) b(i,j) = b(j,i) + b(i,j) }",
    "def f(float(N) a, int32(N) I) -> (b) { b(i) = a(i) b(i) = b(I(i)) }",
    "def f(int32(N) a) -> (b) { b(i) = a(i) b(b(i)) += b(i) }",
    "def f(float(N,N) a) -> (b) { b(i) = a(i,0) b(i) += b(i) * a(i,j) }",
    "def f(float(N,N) a) -> (b) { b(i) = a(i,0) b(i) +=! b(i) + a(i,j) }",
    "def f(float16(N,N) a) -> (b) { b(i) +=! a(i,j) * a(i,j) }",
    "def f(float16(N,N) a) -> (b) { b(i) = a(i,0) b(i) *= a(i,j) }",
    "def f(bfloat16(N,N) a) -> (b) { b(i) max=! a(i,j) }",
    "def f(bfloat16(N,N) a) -> (b) { b(i) += a(i,j) }",
    "def f(bool(N,N) a) -> (x, y) { x(i) min=! a(i,j) y(i) max=! a(i,j) }",
    "def f(float16(N) a, int32(N) I) -> (float16(N) b) { b(I(i)) +=! a(i) }",
    "def f(float16(N) a) -> (b) { b(i) = a(i) b(i) += b(N-1-i) }",
    "def f(float(N) b_before, float(N) a) -> (b) { b(i) = a(i) b(i) = b(N-1-i) + b_before(i) b(i) = b(N-1-i) }",
]


def arrays(b: BoundFunction) -> dict[str, object]:
    """Random inputs; integers are valid subscripts."""
    rng = np.random.default_rng(0)
    made: dict[str, object] = {}
    for t in b.tensors:
        if t.role in (Role.INPUT, Role.INOUT):
            top = 2 if t.dtype.is_bool else max(t.shape)
            x = rng.uniform(-1, 1, t.shape) if t.dtype.is_float else rng.integers(0, top, t.shape)
            made[t.name] = x.astype(numpy_dtype(t.dtype))
            if t.dtype.name == "bfloat16":
                made[t.name] = (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return made


@pytest.mark.parametrize("source", PROGRAMS)
def test_legalize(source: str) -> None:
    b = bound(source, N=6)
    legal = legalize(b)
    for s in legal.statements:
        target = legal.tensor(s.target)
        assert not s.reads_own_target
        assert s.value.dtype == target.dtype
        if s.reduction is not None:
            assert target.dtype.accumulator == target.dtype
            assert not target.dtype.is_bool
    assert legal.tensors[: len(b.tensors)] == b.tensors
    assert all(t.role is Role.TEMPORARY for t in legal.tensors[len(b.tensors) :])
    names = [t.name for t in legal.tensors]
    assert len(set(names)) == len(names)
    assert len({s.name for s in legal.statements}) == len(legal.statements)
    inputs = arrays(b)
    expected, found = evaluate_def(b, inputs), evaluate_def(legal, inputs)
    for name in b.returns:
        np.testing.assert_allclose(found[name].astype("f8"), expected[name].astype("f8"), rtol=1e-2, atol=1e-3)


def test_what_is_legal_comes_back_as_it_is() -> None:
    b = bound("def f(float(N,N) a) -> (b) { b(i) +=! a(i,j) b(i) = b(i) * 2.0 }", N=3)
    assert legalize(b) is b


def test_a_staged_statement_reads_a_copy() -> None:
    b = legalize(bound(PROGRAMS[0], N=3))
    first, copy, last = b.statements
    assert (copy.target, copy.value.tensor) == ("b.before", "b")  # type: ignore[union-attr]
    assert [e.tensor for e in walk_expr(last.value) if isinstance(e, Access)] == ["b.before"]
    assert (first.target, last.target) == ("b", "b")


def test_a_half_reduction_accumulates_in_float32() -> None:
    b = legalize(bound(PROGRAMS[7], N=3))
    reduction, store = b.statements
    assert (b.tensor(reduction.target).dtype, reduction.initialize) == (FLOAT32, True)
    assert (store.target, store.value.dtype) == ("b", FLOAT16)
    load, _, _ = legalize(bound("def f(float16(N) a) -> (b) { b += a(i) }", N=3)).statements
    assert load.value.dtype == FLOAT32


def test_bool_reductions_run_in_uint8() -> None:
    b = legalize(bound(PROGRAMS[11], N=3))
    assert [b.tensor(s.target).dtype for s in b.statements if s.reduction] == [UINT8, UINT8]
