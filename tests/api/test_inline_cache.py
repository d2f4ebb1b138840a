"""The short way of a call gives what the long way gives, and leaves to it whatever is unusual."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs
from tensor_comprehensions.dispatch.inline_cache import MISS
from tensor_comprehensions.runtime.cpu.python_launch import CpuLauncher

SOURCE = """
def add(float(N) a, float(N) b) -> (c) { c(i) = a(i) + b(i) }
def scale(float alpha, float(N) x) -> (y) { y(i) = alpha * x(i) }
def pool(float(N) x, int k) -> (y) { y(i) max=! x(i+j) where j in 0:k }
def axpy(float alpha, float(N) x) -> (y) { y(i) += alpha * x(i) }
def both(float(N) x) -> (s, y) {
    y(i) += 2 * x(i)
    s(i) = y(i) + 1
}
def chain(float(N,D) x) -> (out) {
    t(n) +=! x(n,d)
    s(d) +=! x(n,d)
    u(d) +=! t(n) * x(n,d)
    out(n,d) = x(n,d) * s(d) * u(d)
}
def lookup(float(V) table, long(B) words) -> (out) { out(b) = table(words(b)) }
"""


@pytest.fixture
def ops() -> tc.Library:
    return tc.define(SOURCE)


def long_way(op: tc.Op, *args: object, **kwargs: object) -> object:
    """The call by a new operator, which has no cached calls."""
    return type(op)(op.function)(*args, **kwargs)


A, B = torch.randn(70), torch.randn(70)
WORDS = torch.tensor([1, 5, 0])
CALLS: dict[str, Callable[[tc.Library], tuple[tc.Op, tuple[object, ...], dict[str, object]]]] = {
    "tensors": lambda ops: (ops.add, (A, B), {}),
    "strided": lambda ops: (ops.add, (A[::2], B[1::2]), {}),
    "number": lambda ops: (ops.scale, (2.5, A), {}),
    "number as tensor": lambda ops: (ops.scale, (torch.tensor(2.5), A), {}),
    "zero": lambda ops: (ops.scale, (0.0, A.abs()), {}),
    "minus zero": lambda ops: (ops.scale, (-0.0, A.abs()), {}),
    "not a number": lambda ops: (ops.scale, (float("nan"), A), {}),
    "int for a float": lambda ops: (ops.scale, (2, A), {}),
    "bool for a float": lambda ops: (ops.scale, (True, A), {}),
    "specialized": lambda ops: (ops.pool, (A, 3), {}),
    "specialized tensor": lambda ops: (ops.pool, (A, torch.tensor(3, dtype=torch.int32)), {}),
    "in/out": lambda ops: (ops.axpy, (0.5, A), {"y": B}),
    "in/out broadcast": lambda ops: (ops.axpy, (0.5, A), {"y": B[:1].expand(70)}),
    "in/out second": lambda ops: (ops.both, (A,), {"y": B}),
    "temporaries": lambda ops: (ops.chain, (torch.ones(6, 7),), {}),
    "gather": lambda ops: (ops.lookup, (A, WORDS), {}),
    "arrays": lambda ops: (ops.add, (A.numpy(), B.numpy()), {}),
}


def same(x: object, y: object) -> None:
    if isinstance(x, tuple):
        for a, b in zip(x, y, strict=True):  # type: ignore[call-overload]
            same(a, b)
        return
    assert type(x) is type(y)
    a, b = np.asarray(x), np.asarray(y)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.parametrize("call", CALLS)
def test_the_second_and_the_third_call_give_what_the_first_gave(call: str, ops: tc.Library) -> None:
    op, args, kwargs = CALLS[call](ops)
    want = long_way(op, *args, **kwargs)
    for _ in range(3):
        same(op(*args, **kwargs), want)


@pytest.mark.parametrize(
    "call", [c for c in CALLS if c not in ("not a number", "bool for a float", "specialized tensor", "arrays")]
)
def test_the_second_call_is_served_by_a_cached_call(call: str, ops: tc.Library) -> None:
    op, args, kwargs = CALLS[call](ops)
    op(*args, **kwargs)
    assert op._inline_cache.call(args, None, kwargs) is not MISS


def test_calls_of_several_kinds_in_turns(ops: tc.Library) -> None:
    x = torch.arange(12.0)
    for _ in range(3):
        for n in (12, 5, 8):
            same(ops.add(x[:n], x[:n]), 2 * x[:n])
            same(ops.scale(float(n), x), n * x)
            same(ops.pool(x, n), x[n - 1 :])
    same(ops.pool(x[:9], 4), x[3:9])


def test_a_kernel_that_is_written_to_in_turns(ops: tc.Library) -> None:
    out, other = torch.empty(70), torch.empty(140)
    for _ in range(3):
        assert ops.add(A, B, out=out) is out
        ops.add(A, B, out=other[::2])
        ops.add(out, B, out=other[1::2])
        same(out, A + B)
        same(other, torch.stack([A + B, A + B + B], 1).flatten())


def test_in_place_updates(ops: tc.Library) -> None:
    y = B.clone()
    for n in range(1, 5):
        ops.axpy(1.0, A, y=y, out=y)
        torch.testing.assert_close(y, B + n * A)


def test_a_cached_call_does_not_hide_overlaps(ops: tc.Library) -> None:
    base = torch.randn(140)
    for _ in range(2):
        ops.add(base[:70], A, out=base[70:])
        with pytest.raises(tc.ArgumentError, match="shares memory"):
            ops.add(base[:70], A, out=base[30:100])
        with pytest.raises(tc.ArgumentError, match="shares memory"):
            ops.axpy(1.0, A, y=base[:70], out=base[1:71])


def test_the_value_of_a_specialized_tensor_is_read_anew(ops: tc.Library) -> None:
    x, k = torch.arange(9.0), torch.tensor(2, dtype=torch.int32)
    same(ops.pool(x, k), x[1:])
    k += 1
    same(ops.pool(x, k), x[2:])


# --- what the short way must not take ---------------------------------------------------------------------------


def test_gradients_are_recorded_after_a_first_call(ops: tc.Library) -> None:
    ops.add(A, B)
    assert ops.add(A.clone().requires_grad_(), B).requires_grad
    with torch.no_grad():
        same(ops.add(A.clone().requires_grad_(), B), A + B)


UNUSUAL: dict[str, Callable[[], object]] = {
    "meta": lambda: A.to("meta"),
    "double": lambda: A.double(),
    "none": lambda: None,
    "longer": lambda: torch.cat([A, A]),
    "matrix": lambda: A[None],
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_are_still_refused_after_a_first_call(kind: str, ops: tc.Library) -> None:
    ops.add(A, B)
    value = UNUSUAL[kind]()
    with pytest.raises(tc.ArgumentError):
        ops.add(A, value)
    with pytest.raises(tc.ArgumentError):
        ops.add(A, B, out=0 if value is None else value)
    with pytest.raises(tc.ArgumentError):
        ops.axpy(1.0, A, y=value)


def test_sparse_tensors_go_the_long_way_after_a_first_call(ops: tc.Library) -> None:
    ops.add(A, B)
    same(ops.add(A, B.to_sparse()), A + B)
    with pytest.raises(tc.ArgumentError):
        ops.add(A, B, out=A.to_sparse())
    with pytest.raises(tc.TCError):
        ops.axpy(1.0, A, y=A.to_sparse())


def test_lazy_views_are_still_made_real_after_a_first_call(ops: tc.Library) -> None:
    negative = torch.randn(70, dtype=torch.complex64).conj().imag
    plain = torch.empty(140)[::2].copy_(negative)
    same(ops.add(A, plain), A + negative)
    same(ops.add(A, negative), A + negative)
    same(ops.add(A, torch._efficientzerotensor(70)), A)


def test_after_a_first_call_operators_still_go_to_those_who_ask_for_them(ops: tc.Library) -> None:
    same(ops.add(A, B), A + B)
    same(torch.func.vmap(ops.add)(A[None], B[None]), (A + B)[None])
    with FakeTensorMode() as mode:
        fake = ops.add(mode.from_tensor(A), mode.from_tensor(B))
    assert isinstance(fake, FakeTensor)
    assert fake.shape == A.shape
    both = ops.add(TwoTensor(A, B), A)
    assert isinstance(both, TwoTensor)
    same(both.b, A + B)


def test_with_another_default_device_and_dtype(ops: tc.Library) -> None:
    x = torch.ones(6, 7)
    want = ops.chain(x)
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        first, second = ops.chain(x), long_way(ops.chain, x)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    same(first, want)
    same(second, want)


def test_in_inference_mode(ops: tc.Library) -> None:
    out = torch.empty(70)
    with torch.inference_mode():
        inside = torch.empty(70)
        for _ in range(2):
            same(ops.add(A, B), A + B)
            same(ops.add(A, B, out=out), A + B)
            same(ops.add(A, B, out=inside), A + B)
            same(ops.axpy(1.0, A, y=inside), inside + A)
    for op in (ops.axpy, tc.define(SOURCE).axpy):
        same(op(1.0, A, y=B, out=inside), B + A)
    same(ops.add(inside, B), inside + B)


def test_interpret_is_obeyed_after_a_first_call(ops: tc.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    ops.add(A, B)
    monkeypatch.setattr(CpuLauncher, "run", lambda *_: pytest.fail("a kernel ran"))
    with knobs.override_knobs(interpret=True):
        assert ops.add._direct is None or ops.add._direct(A, B) is NotImplemented
        same(ops.add(A, B), A + B)


def test_a_lack_of_memory_is_reported_as_one(ops: tc.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes.")

    ops.add(A, B)
    monkeypatch.setattr(ops.add, "_direct", fail)
    with pytest.raises(tc.ArgumentError, match="there is no memory"):
        ops.add(A, B)
