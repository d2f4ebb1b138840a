"""Calls on a CUDA device whose part the CPU plays: what is launched, where, in which order, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import ArgumentError, DeviceError, InternalError, RangeError
from tensor_comprehensions.dispatch.cuda import gpu_kernels as gpu
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime.emulate import emulator

from ..helpers.fake_cuda import FakeCuda, fake

__all__ = ["fake"]
pytestmark = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)

SOURCE = """
def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }
def scale(float a, float(N) x) -> (y) { y(n) = a * x(n) }
def add(float(N) x) -> (y) { y(n) = x(n) + y(n) }
def lookup(float(V,D) table, int64(B) words) -> (out) { out(b,d) = table(words(b),d) }
def pair(float(N,D) x) -> (s, t) { s(n) +=! x(n,d)  t(n) max=! x(n,d) }
"""


@pytest.fixture
def ops() -> Any:
    return tc.define(SOURCE)


def test_values_streams_and_no_waiting(fake: FakeCuda, ops: Any) -> None:
    a, w = torch.randn(20, 12), torch.randn(12, 9)
    for stream in (7, 8, 8):
        fake.stream = stream
        torch.testing.assert_close(ops.matmul(a, w), a @ w, rtol=1e-4, atol=1e-4)
    assert [launch[-1] for launch in fake.launches] == [7, 8, 8]
    assert fake.log.count("load_module") == 1
    assert fake.waits == 0
    x = torch.randn(6, 40)
    s, t = ops.pair(x)
    torch.testing.assert_close(s, x.sum(1), rtol=1e-4, atol=1e-4)
    assert torch.equal(t, x.amax(1))


def test_a_call_like_the_last_one_looks_at_nothing_else(
    fake: FakeCuda, ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It binds nothing, gathers nothing and calls CUDA twice: for the context, and to launch."""
    calls: list[Callable[[], Any]] = [
        lambda: ops.matmul(torch.ones(8, 4), torch.ones(4, 4)),
        lambda: ops.scale(2.0, torch.ones(8)),
        lambda: ops.add(torch.ones(8), y=torch.ones(8)),
        lambda: ops.matmul(torch.ones(8, 4), torch.ones(4, 4), out=torch.empty(8, 4)),
    ]
    first = [call() for call in calls]
    monkeypatch.setattr(gpu, "gather_on_device", lambda *_: 1 / 0)
    fake.log.clear()
    fake.context = 100
    assert all(map(torch.equal, first, [call() for call in calls]))
    assert fake.log == ["current_context", "launch"] * 4


def test_cached_calls_serve_only_what_they_may(fake: FakeCuda, ops: Any) -> None:
    """Other layouts, places, numbers and destinations than those of the call before."""
    a, w = torch.randn(8, 8), torch.randn(8, 8)
    whole = torch.randn(65)
    for x in (a, a.t(), a[:4], whole[1:].view(8, 8), whole[:64].view(8, 8), a):
        torch.testing.assert_close(ops.matmul(x, w), x @ w, rtol=1e-4, atol=1e-4)
    x = torch.randn(8)
    for number in (2.0, -0.0, 0.0, 3, torch.tensor(4.0)):
        y = ops.scale(number, x)
        assert torch.equal(y, float(number) * x)
        assert torch.equal(torch.signbit(y), torch.signbit(float(number) * x))
    out = torch.empty(8, 8)
    for destination in (out, out.t(), out):
        assert ops.matmul(a, w, out=destination) is destination
        torch.testing.assert_close(destination, a @ w, rtol=1e-4, atol=1e-4)
    before = out._version
    ops.matmul(a, w, out=out)
    assert out._version == before + 1
    with pytest.raises(ArgumentError, match="shares memory"):
        ops.matmul(a, w, out=a)
    y = torch.ones(8)
    assert ops.add(x, y=y, out=y) is y
    assert ops.add(x, y=y, out=y) is y
    torch.testing.assert_close(y, 1 + 2 * x)


def test_checks_are_reported_and_their_destinations_left_alone(fake: FakeCuda, ops: Any) -> None:
    table, words = torch.randn(9, 6), torch.tensor([1, 8, 0, 3])
    for _ in range(2):
        assert torch.equal(ops.lookup(table, words), table[words])
        with pytest.raises(RangeError, match="'table' is out of bounds in dimension 0"):
            ops.lookup(table, torch.tensor([1, 9, 0, 3]))
    out = torch.zeros(4, 6)
    with pytest.raises(RangeError):
        ops.lookup(table, torch.tensor([1, -1, 0, 3]), out=out)
    assert not out.any()
    assert fake.waits == 5


def test_while_a_graph_is_captured(fake: FakeCuda, ops: Any) -> None:
    """Nothing is loaded or waited for; numbers get memory of their own, which the graph keeps."""
    x, table, words = torch.randn(8), torch.randn(9, 6), torch.tensor([1, 8, 0, 3])
    fake.capturing = True
    with pytest.raises(ArgumentError, match="call it once before the capture"):
        ops.scale(2.0, x)
    assert not fake.launches
    fake.capturing = False
    ops.scale(2.0, x)
    ops.lookup(table, words)
    waits = fake.waits
    fake.capturing = True
    assert torch.equal(ops.scale(2.0, x), 2 * x)
    assert torch.equal(ops.lookup(table, words), table[words])
    assert fake.waits == waits
    (cache,) = ops.scale._kernels.gpu.inline_caches.values()
    first, second = (cache.with_numbers([2.0, x])[0] for _ in range(2))
    assert first is not second
    fake.capturing = False
    first, second = (cache.with_numbers([2.0, x])[0] for _ in range(2))
    fake.stream = 9
    other = cache.with_numbers([2.0, x])[0]
    assert first is second
    assert other is not first  # another stream may not have made it yet


def test_the_context_is_torchs_and_is_put_back(fake: FakeCuda, ops: Any) -> None:
    for context in (0, 55, 100):
        fake.context = context
        ops.scale(2.0, torch.ones(8))
        assert fake.context == context
    assert fake.log.count("set_context") == 2 * 3  # to load, and to launch twice


def test_shared_memory_beyond_what_is_free_for_all(fake: FakeCuda, ops: Any) -> None:
    options = MappingOptions(
        tile=(128, 64, 128), threads=(16, 8), blocks=(8, 8), shared_memory=True, max_shared_memory=160_000
    )
    a, w = torch.randn(128, 128), torch.randn(128, 64)
    kernel = ops.matmul.compile(a, w, target="cuda:sm_90", options=options)
    torch.testing.assert_close(kernel(a, w), a @ w, rtol=1e-3, atol=1e-3)
    assert kernel.resources["shared_bytes"] > 48 << 10
    assert fake.shared == {"matmul": kernel.resources["shared_bytes"]}
    assert fake.launches[0][3] == kernel.resources["shared_bytes"]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (701, InternalError, r"(?s)scale is not launched: CUDA_ERROR_701: something is wrong.*__global__"),
        (700, DeviceError, "CUDA can do no more in this process: scale is not launched: CUDA_ERROR_700"),
        (719, DeviceError, "a kernel that ran before this one failed"),
        (2, DeviceError, "no memory left"),
    ],
)
def test_what_cuda_says(fake: FakeCuda, ops: Any, code: int, kind: type[Exception], message: str) -> None:
    fake.code = code
    for _ in range(2):
        with pytest.raises(kind, match=message):
            ops.scale(2.0, torch.ones(8))
    fake.code = 0
    assert torch.equal(ops.scale(2.0, torch.ones(8)), torch.full((8,), 2.0))


def test_a_refused_launch_says_what_the_kernel_needs(fake: FakeCuda, ops: Any) -> None:
    fake.code = 701
    with pytest.raises(InternalError, match=r"Launch\(grid=.*\nFunctionAttributes\(registers=40, local_bytes=8"):
        ops.scale(2.0, torch.ones(8))


def test_a_fault_that_shows_while_waiting(fake: FakeCuda, ops: Any) -> None:
    fake.wait_code = 700
    with pytest.raises(DeviceError, match="no more in this process: waiting for lookup_check0, lookup: CUDA_ERROR_700"):
        ops.lookup(torch.randn(9, 6), torch.tensor([1, 8, 0, 3]))


def test_interpreted(fake: FakeCuda, ops: Any) -> None:
    """TC_INTERPRET holds on a device too."""
    a, w, x = torch.randn(8, 4), torch.randn(4, 4), torch.randn(8)
    ops.matmul(a, w)
    launched = len(fake.launches)
    with knobs.override_knobs(interpret=True):
        torch.testing.assert_close(ops.matmul(a, w), a @ w)
        out = torch.empty(8, 4)
        assert ops.matmul(a, w, out=out) is out
        torch.testing.assert_close(out, a @ w)
        torch.testing.assert_close(ops.add(x, y=x), 2 * x)
    assert len(fake.launches) == launched


def test_gradients(fake: FakeCuda, ops: Any) -> None:
    a, w = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(2):
        w.grad = None
        ops.matmul(a, w).sum().backward()
        torch.testing.assert_close(w.grad, a.sum(0)[:, None].expand(4, 4), rtol=1e-4, atol=1e-4)
    assert {name for name, *_ in fake.launches} >= {"matmul"}
    assert len(fake.launches) >= 4


def test_torchs_operator(fake: FakeCuda, ops: Any) -> None:
    """`torch.ops.tc` has kernels for CUDA, which are those that the operator runs."""
    a, w = torch.randn(8, 4), torch.randn(4, 4)
    overload = ops.matmul.overload
    name = overload._schema.name
    for registered, key in ((name, "CUDA"), (name, "AutocastCUDA"), (f"{name}.out", "CUDA")):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(registered, key)
    launched = len(fake.launches)
    torch.testing.assert_close(overload(a, w), a @ w, rtol=1e-4, atol=1e-4)
    out = torch.empty(8, 4)
    getattr(torch.ops.tc, name.partition("::")[2]).out(a, w, out=out)
    torch.testing.assert_close(out, a @ w, rtol=1e-4, atol=1e-4)
    assert len(fake.launches) == launched + 2
    with torch.autocast("cpu", torch.bfloat16):
        found = overload(a.bfloat16(), w)
    torch.testing.assert_close(found, a.bfloat16().float() @ w, rtol=1e-4, atol=1e-4)


def test_shapes_on_a_device_that_is_not_there(ops: Any) -> None:
    """The fake kernel, which torch.compile asks, answers for the device of the arguments."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        a, w = torch.empty(8, 4, device="cuda"), torch.empty(4, 5, device="cuda")
        y = ops.matmul.overload(a, w)
    assert (y.device.type, tuple(y.shape)) == ("cuda", (8, 5))
