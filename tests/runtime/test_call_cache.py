"""Calls that need no Python: what machine code takes, what it turns away, and what it leaves behind."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.dtypes import FLOAT32, INT64
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import Binary, Check, Kernel, Loop, Module
from tensor_comprehensions.runtime.cpu import host_symbols
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.runtime.cpu.object_code import Executable, assemble_and_load
from tensor_comprehensions.runtime.fastpath import call_cache, torch_layout
from tensor_comprehensions.runtime.fastpath.call_cache import (
    CONSTANT,
    RECORDED,
    TENSOR,
    CachedCall,
    CallCache,
    MutatedArg,
    NewOutput,
    TensorGuard,
    number_kind,
)
from tensor_comprehensions.runtime.fastpath.launch_ir import ANY

from .strange import strange_values

N = 64
SPAN = 4 * N
NOTHING: tuple[tuple[int, ...], int] = ((), 0)


def torch_number(name: str) -> int:
    return int(getattr(host_symbols.torch_library(), f"aoti_torch_dtype_{name}")())


FLOAT = torch_number("float32")
VECTOR = TensorGuard(FLOAT, (N,), (1,))
OUTPUT = NewOutput(VECTOR, SPAN)


def adding(executable: Executable, *, out: bool = False) -> CallCache:
    """A cache for C(i) = A(i) + B(i)."""
    guards = (VECTOR,) * (2 + out)
    fresh, written = (() if out else (OUTPUT,)), ((MutatedArg(2),) if out else ())
    cache = CallCache([TENSOR] * len(guards), len(fresh))
    order = tuple(range(len(guards)))
    cache.add(CachedCall(executable.address, executable, guards, (SPAN,) * len(guards), order, fresh, written, NOTHING))
    return cache


@pytest.fixture
def cache(add: Callable[[int], Executable]) -> CallCache:
    return adding(add(N))


def kernel(*stores: Any, arguments: tuple[Any, ...], temporaries: tuple[Any, ...] = ()) -> Executable:
    """One loop over `N` for each statement."""
    loops = tuple(Kernel("k", Loop("i", ir.const(0), ir.const(N), s)) for s in stores)
    return assemble_and_load(emit_llvm(Module("m", arguments, temporaries, loops), host(), {}), host())


def test_calls_give_new_tensors(cache: CallCache) -> None:
    call, a, b = cache.function(), torch.randn(N), torch.randn(3 * N)[N : 2 * N]
    first, second = call(a, b), call(b, b)
    assert torch.equal(first, a + b)
    assert torch.equal(second, b + b)
    assert (first.shape, first.dtype, first.requires_grad) == ((N,), torch.float32, False)
    p = torch.nn.Parameter(a.clone(), requires_grad=False)
    assert torch.equal(call(p, b), a + b)


@pytest.mark.filterwarnings("ignore")
def test_strange_values_are_turned_away(cache: CallCache) -> None:
    call, a = cache.function(), torch.zeros(N)
    for name, x in {**strange_values(N), "longer": torch.zeros(N + 1), "strided": torch.zeros(2 * N)[::2]}.items():
        assert call(x, a) is NotImplemented, name
        assert call(a, x) is NotImplemented, name
    for arguments in ((), (a,), (a, a, a)):
        assert call(*arguments) is NotImplemented
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(a)
        assert call(a, a) is NotImplemented
    assert call(fake, a) is NotImplemented
    assert torch.vmap(lambda x: x + (call(x, x) is not NotImplemented))(torch.zeros(2, N)).sum() == 0


@pytest.mark.filterwarnings("ignore")
def test_what_torch_has_to_see_is_turned_away(cache: CallCache) -> None:
    call, a, leaf = cache.function(), torch.zeros(N), torch.zeros(N, requires_grad=True)
    assert call(a, leaf) is RECORDED
    with torch.no_grad():
        assert torch.equal(call(a, leaf), a)
    with knobs.override_knobs(interpret=True):
        assert call(a, leaf) is NotImplemented
    assert call(a, leaf.to_sparse()) is NotImplemented
    with torch.autograd.forward_ad.dual_level():
        dual = torch._make_dual(a, a, level=0)
        assert call(dual, a) is NotImplemented
        assert torch.equal(call(a, a), a)
    with torch.device("cpu"):
        assert call(a, a) is NotImplemented
    with knobs.override_knobs(interpret=True):
        assert call(a, a) is NotImplemented
    assert torch.equal(call(a, a), a)


def test_in_inference_mode(cache: CallCache) -> None:
    call, a = cache.function(), torch.ones(N)
    with torch.inference_mode():
        inside = torch.ones(N)
        assert call(a, inside).is_inference()
        assert torch.equal(call(inside, inside), a + a)
    assert not call(inside, a).is_inference()


def test_strides_that_do_not_matter(add: Callable[[int], Executable]) -> None:
    executable, facts = add(1), TensorGuard(FLOAT, (1, 1), (ANY, ANY))
    cache = CallCache([TENSOR, TENSOR], 1)
    fresh = (NewOutput(TensorGuard(FLOAT, (1, 1), (1, 1)), 4),)
    cache.add(CachedCall(executable.address, executable, (facts, facts), (4, 4), (0, 1), fresh, (), NOTHING))
    x = torch.randn(5, 7)
    assert torch.equal(cache.function()(x[2:3, 4:5], x[:1, :1].t()), x[2:3, 4:5] + x[:1, :1])


def test_several_outputs_and_temporaries() -> None:
    """T(i) = 2 A(i), U(i) = T(i) + 1, B(i) = U(i), C(i) = T(i) over two temporaries in one arena."""
    a, b, c, t, u = (ir.buffer(n, FLOAT32, (N,)) for n in ("A", "B", "C", "T", "U"))
    i = ir.var("i")
    executable = kernel(
        ir.store(t, (i,), ir.mul(ir.load(a, i), 2.0)),
        ir.store(u, (i,), ir.add(ir.load(t, i), 1.0)),
        ir.block(ir.store(b, (i,), ir.load(u, i)), ir.store(c, (i,), ir.load(t, i))),
        arguments=(a, b, c), temporaries=(t, u),
    )  # fmt: skip
    cache = CallCache([TENSOR], 2)
    cache.add(
        CachedCall(executable.address, executable, (VECTOR,), (SPAN,), (0,), (OUTPUT,) * 2, (), ((0, SPAN), 2 * SPAN))
    )
    x = torch.randn(N)
    first, second = cache.function()(x)
    assert torch.equal(first, 2 * x + 1)
    assert torch.equal(second, 2 * x)


def test_numbers(add: Callable[[int], Executable]) -> None:
    """Integers are part of the kernel; floats are passed, or tensors in their place."""
    a, s, b = ir.buffer("A", FLOAT32, (N,)), ir.buffer("s", FLOAT32, ()), ir.buffer("B", FLOAT32, (N,))
    executable = kernel(ir.store(b, (ir.var("i"),), ir.mul(ir.load(a, ir.var("i")), ir.load(s))), arguments=(s, a, b))
    cache = CallCache([CONSTANT, number_kind(FLOAT), TENSOR], 1)
    guards = (7, TensorGuard(FLOAT, (), ()), VECTOR)
    cache.add(CachedCall(executable.address, executable, guards, (0, 4, SPAN), (1, 2), (OUTPUT,), (), NOTHING))
    call, x = cache.function(), torch.randn(N)
    for value in (2.5, 0.1, -0.0, float("inf")):
        assert torch.equal(call(7, value, x), x * torch.tensor(value))
        assert torch.equal(call(7, torch.tensor(value), x), x * torch.tensor(value))
    for first in (8, True, 7.0, torch.tensor(7), 1 << 70, None):
        assert call(first, 2.5, x) is NotImplemented
    for second in (2, True, "2", torch.tensor(2.5).double(), torch.ones(1)):
        assert call(7, second, x) is NotImplemented
    assert call(7, 2.5, 2.5) is NotImplemented


def test_writing_to_arguments(add: Callable[[int], Executable]) -> None:
    call, a, b, out = adding(add(N), out=True).function(), torch.randn(N), torch.randn(N), torch.empty(2 * N)
    assert call(a, b, out[N:]) is None
    assert torch.equal(out[N:], a + b)
    assert call(out[N:], b, out[:N]) is None
    assert torch.equal(out[:N], a + b + b)
    for start in (0, 1, N - 1):
        assert call(out[:N], b, out[start : start + N]) is NotImplemented
    assert call(a, out[:N], out[1 : N + 1]) is NotImplemented


def test_writing_what_starts_with_another_argument() -> None:
    """B(i) = B(i) + A(i), which starts with C."""
    a, b = ir.buffer("A", FLOAT32, (N,)), ir.buffer("B", FLOAT32, (N,))
    i = ir.var("i")
    executable = kernel(ir.store(b, (i,), ir.add(ir.load(b, i), ir.load(a, i))), arguments=(a, b))
    cache = CallCache([TENSOR] * 3, 0)
    cached = CachedCall(
        executable.address, executable, (VECTOR,) * 3, (SPAN,) * 3, (0, 2), (), (MutatedArg(2, 1, SPAN),), NOTHING
    )
    cache.add(cached)
    call, x, y, z = cache.function(), torch.randn(N), torch.randn(N), torch.empty(N)
    assert call(x, y, z) is None
    assert torch.equal(z, y + x)
    assert call(x, z, z) is None
    assert torch.equal(z, y + x + x)
    assert call(x, x, x) is NotImplemented
    fresh = CallCache([TENSOR] * 2, 1)
    made = (NewOutput(VECTOR, SPAN, 1),)
    fresh.add(CachedCall(executable.address, executable, (VECTOR,) * 2, (SPAN,) * 2, (0,), made, (), NOTHING))
    assert torch.equal(fresh.function()(x, y), y + x)


def test_a_call_that_fails_is_left_to_others() -> None:
    a, b = ir.buffer("A", INT64, (N,)), ir.buffer("B", INT64, (N,))
    value = ir.load(a, ir.var("i"))
    executable = kernel(
        Check(Binary("lt", value, ir.const(10)), 0, value), ir.store(b, (ir.var("i"),), value), arguments=(a, b)
    )
    facts = TensorGuard(torch_number("int64"), (N,), (1,))
    cache = CallCache([TENSOR], 1)
    made = (NewOutput(facts, 8 * N),)
    cache.add(CachedCall(executable.address, executable, (facts,), (8 * N,), (0,), made, (), NOTHING))
    call, x = cache.function(), torch.arange(N) % 10
    del executable, cache
    gc.collect()
    assert torch.equal(call(x), x)
    assert call(x + 1) is NotImplemented
    assert call(x.int()) is NotImplemented


def test_no_memory_is_left_to_others(add: Callable[[int], Executable]) -> None:
    executable = add(N)
    cache = CallCache([TENSOR, TENSOR], 1)
    huge = (NewOutput(TensorGuard(FLOAT, (1 << 55,), (1,)), 1 << 57),)
    cache.add(CachedCall(executable.address, executable, (VECTOR, VECTOR), (SPAN, SPAN), (0, 1), huge, (), NOTHING))
    assert cache.function()(torch.zeros(N), torch.zeros(N)) is NotImplemented


def test_kernels_are_forgotten_and_replaced(add: Callable[[int], Executable]) -> None:
    cache = adding(add(N))
    call, a = cache.function(), torch.randn(N)
    cache.forget()
    assert call(a, a) is NotImplemented
    for _ in range(2 * call_cache.MOST):
        cache.add(CachedCall(*_call_parts(add(N), N)))
    assert torch.equal(call(a, a), a + a)
    assert len(cache._calls) == 1


def _call_parts(executable: Executable, n: int) -> tuple[Any, ...]:
    facts = TensorGuard(FLOAT, (n,), (1,))
    return executable.address, executable, (facts, facts), (4 * n,) * 2, (0, 1), (NewOutput(facts, 4 * n),), (), NOTHING


def test_calls_while_kernels_change(add: Callable[[int], Executable]) -> None:
    cache, executable = adding(add(N)), add(N)
    call, a, stop = cache.function(), torch.randn(N), threading.Event()
    wrong: list[object] = []

    def calling() -> None:
        while not stop.is_set():
            found = call(a, a)
            if found is not NotImplemented and not torch.equal(found, a + a):
                wrong.append(found)

    threads = [threading.Thread(target=calling) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        cache.forget()
        cache.add(CachedCall(*_call_parts(executable, N)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_leaks(cache: CallCache) -> None:
    call, a, b = cache.function(), torch.randn(N), torch.randn(N)
    gc.collect()  # the garbage of other tests refers to None, too
    counts = [sys.getrefcount(x) for x in (a, b, None, NotImplemented)]
    for _ in range(2000):
        call(a, b)
        call(a, None)
    gc.collect()
    after = [sys.getrefcount(x) for x in (a, b, None, NotImplemented)]
    assert all(abs(x - y) < 100 for x, y in zip(counts, after, strict=True))


@pytest.mark.parametrize("mode", [torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")])
def test_the_places_of_torch_do_not_depend_on_who_looks_first(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    found = torch_layout.probe_in_thread()
    with mode():
        assert torch_layout.probe_in_thread() == found
