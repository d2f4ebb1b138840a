"""Whatever is passed, only a `TCError` leaves a call, and what is accepted gives what the reference gives."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc

OPS = tc.define("""
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def axpy(float alpha, float(N) x) -> (y) { y(i) += alpha * x(i) }
def pool(float(N) x, int k) -> (y) { y(i) max=! x(i+j) where j in 0:k }
def lookup(float(V) table, long(B) words) -> (out) { out(b) = table(words(b)) }
def moments(float(N,D) x) -> (mean, square) {
    mean(n) +=! x(n,d)
    square(n) +=! x(n,d) * x(n,d)
}
""")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A small tensor: mostly a float32 matrix or vector, in some layout, rarely of a wrong kind."""
    dtype = draw(st.sampled_from([torch.float32] * 8 + DTYPES))
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    x = torch.randint(0, 4, [n + 1 for n in shape], generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x[tuple(slice(draw(st.sampled_from([0, 1])), None) for _ in shape)]
    if x.ndim == 2 and draw(st.booleans()):
        x = x.t()
    if x.ndim and len(x) and draw(st.integers(0, 4)) == 0:
        x = x[:1].expand(3, *x.shape[1:])
    return {0: x.to("meta"), 1: x.to_sparse() if x.ndim else x}.get(draw(st.integers(0, 30)), x)


ODD = st.sampled_from([
    None, "text", b"bytes", [1.0, 2.0], (), {}, object(), float("nan"), float("inf"), -0.0, 10**30, 1j, True,
    np.float32(2), np.ones((2, 2), "f4"), np.ones(3), np.array("a"), np.ma.ones(3), torch.float32, torch.Size((2,)),
    range(3), lambda: None,
])  # fmt: skip
VALUES = st.one_of(tensors(), tensors(), tensors(), st.integers(-2, 6), st.floats(-2, 2, width=32), ODD)
KEYWORDS = st.dictionaries(st.sampled_from(["out", "C", "y", "mean", "self", "x", "é"]), VALUES, max_size=2)


def outcome(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of a call, or the type of the mistake it tells; anything else fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of kinds of tensors it will drop
            return call(*args, **kwargs)
    except tc.TCError as error:
        return type(error) if str(error) else None


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(OPS)), st.lists(VALUES, max_size=3), KEYWORDS)
def test_any_call(op: tc.Op, values: list[Any], keywords: dict[str, Any]) -> None:
    result = outcome(op, *values, **keywords)
    results = result if isinstance(result, tuple) else (result,)
    if isinstance(result, type) or any(getattr(r, "is_meta", False) for r in results):
        return
    initial = {k: v for k, v in keywords.items() if k != "out"}
    reference = op.reference(*values, **initial)
    if isinstance(result, np.ndarray):
        np.testing.assert_allclose(result, reference, rtol=1e-4)
    elif "out" not in keywords:
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4, equal_nan=True)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(list(OPS)), st.lists(st.one_of(VALUES, st.lists(ODD, max_size=3)), max_size=3), KEYWORDS)
def test_any_question(op: tc.Op, values: list[Any], keywords: dict[str, Any]) -> None:
    outcome(op.infer, *values, **keywords)
    outcome(op.reference, *values, **keywords)
    keywords.pop("out", None)
    outcome(op.show, *values, **keywords)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.one_of(st.text(max_size=40), st.binary(max_size=20), ODD))
def test_any_program(source: Any) -> None:
    outcome(tc.define, source)
