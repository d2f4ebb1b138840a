"""Calls on torch tensors in plain Python: what is accepted, what is turned away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core.dtypes import BFLOAT16, BOOL, DTYPES, FLOAT32, INT64, DType
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import Binary, Check, Kernel, Loop, Module
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.runtime.cpu.object_code import Executable, assemble_and_load
from tensor_comprehensions.runtime.cpu.python_launch import CpuLauncher, OperandSpec

from .strange import strange_values

N = 64
VECTOR = OperandSpec(FLOAT32, (N,), (1,))


def no_failure(site: int, value: int) -> BaseException:
    return AssertionError(f"failure {site} with {value}")


@pytest.fixture(scope="module")
def launcher(add: Callable[[int], Executable]) -> CpuLauncher:
    return CpuLauncher(add(N), [VECTOR, VECTOR], [VECTOR], [0, 1, 2], [], no_failure)


def accepts(executable: Executable, dtype: DType, sizes: tuple[int, ...], strides: tuple[int, ...], x: Any) -> bool:
    return CpuLauncher(executable, [OperandSpec(dtype, sizes, strides)], [], [], [], no_failure).accepts(x)


def test_calls_give_new_tensors(launcher: CpuLauncher) -> None:
    a, b = torch.randn(N), torch.randn(N)
    assert launcher.accepts(a, b)
    first, second = launcher(a, b), launcher(b, b)
    assert torch.equal(first, a + b)
    assert torch.equal(second, b + b)
    assert first.shape == (N,)


def test_views_are_read_at_their_offset(launcher: CpuLauncher) -> None:
    a, b = torch.randn(3, N), torch.randn(2 * N)[5 : 5 + N]
    assert launcher.accepts(a[2], b)
    assert torch.equal(launcher(a[2], b), a[2] + b)


@pytest.mark.parametrize("sizes", [(), (N,), (4, 6), (1, 1), (2, 1, 3), (0, 4)])
def test_outputs_have_the_layout_asked_for(add: Callable[[int], Executable], sizes: tuple[int, ...]) -> None:
    for strides in (torch.empty(sizes).stride(), tuple(reversed(torch.empty(sizes[::-1]).stride()))):
        launcher = CpuLauncher(add(0), [], [OperandSpec(INT64, sizes, strides)], [0, 0, 0], [], no_failure)
        output = launcher()
        assert (output.shape, output.stride(), output.dtype) == (sizes, strides, torch.int64)
        assert output.is_cpu


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_types_are_distinguished(add: Callable[[int], Executable], dtype: DType) -> None:
    executable = add(N)
    for other in DTYPES.values():
        x = torch.zeros(3, dtype=getattr(torch, other.name))
        assert accepts(executable, dtype, (3,), (1,), x) == (other == dtype)


def test_sizes_and_strides_are_distinguished(add: Callable[[int], Executable]) -> None:
    executable = add(N)
    x = torch.zeros(4, 6)
    assert accepts(executable, FLOAT32, (4, 6), (6, 1), x)
    assert not accepts(executable, FLOAT32, (4, 6), (1, 4), x)
    assert accepts(executable, FLOAT32, (6, 4), (1, 6), x.T)
    assert not accepts(executable, FLOAT32, (4, 6), (6, 1), x[:, :5])
    assert not accepts(executable, FLOAT32, (4, 6), (6, 1), x[None])
    assert not accepts(executable, FLOAT32, (24,), (1,), x)
    assert accepts(executable, FLOAT32, (4, 1), (1, 1), x[:, :1]) is False
    assert accepts(executable, FLOAT32, (4, 1), (6, 99), x[:, :1])
    assert accepts(executable, FLOAT32, (0, 6), (3, 3), x[:0])
    assert accepts(executable, FLOAT32, (), (), torch.tensor(1.0))


@pytest.mark.filterwarnings("ignore")
def test_strange_values_are_turned_away(launcher: CpuLauncher) -> None:
    a = torch.zeros(N)
    for name, x in strange_values(N).items():
        assert not launcher.accepts(x, a), name
        assert not launcher.accepts(a, x), name
    assert not launcher.accepts()
    assert not launcher.accepts(a)
    assert not launcher.accepts(a, a, a)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(a)
    assert not launcher.accepts(fake, a)
    assert torch.vmap(lambda x: x + launcher.accepts(x, x))(torch.zeros(2, N)).sum() == 0


def test_parameters_are_tensors(launcher: CpuLauncher) -> None:
    p = torch.nn.Parameter(torch.randn(N), requires_grad=False)
    assert launcher.accepts(p, p)
    assert torch.equal(launcher(p, p), p + p)


def test_several_outputs_and_temporaries() -> None:
    """T(i) = 2 A(i), B(i) = T(i) + 1, C(i) = T(i) over two temporaries in one arena."""
    a, b, c, t, u = (ir.buffer(n, FLOAT32, (N,)) for n in ("A", "B", "C", "T", "U"))
    i = ir.var("i")

    def loop(store: Any) -> Kernel:
        return Kernel("k", Loop("i", ir.const(0), ir.const(N), store))

    kernels = (
        loop(ir.store(t, (i,), ir.mul(ir.load(a, i), 2.0))),
        loop(ir.store(u, (i,), ir.add(ir.load(t, i), 1.0))),
        loop(ir.block(ir.store(b, (i,), ir.load(u, i)), ir.store(c, (i,), ir.load(t, i)))),
    )
    module = Module("two", (c, a, b), (t, u), kernels)
    executable = assemble_and_load(emit_llvm(module, host(), {}), host())
    launcher = CpuLauncher(executable, [VECTOR], [VECTOR, VECTOR], [2, 0, 1], [4 * N, 4 * N], no_failure)
    x = torch.randn(N)
    first, second = launcher(x)
    assert torch.equal(first, 2 * x + 1)
    assert torch.equal(second, 2 * x)


def test_failures_become_the_callers_exception() -> None:
    a = ir.buffer("A", INT64, (N,))
    value = ir.load(a, ir.var("i"))
    body = Loop("i", ir.const(0), ir.const(N), Check(Binary("lt", value, ir.const(10)), 2, value))
    executable = assemble_and_load(emit_llvm(Module("check", (a,), (), (Kernel("k", body),)), host(), {}), host())
    launcher = CpuLauncher(executable, [OperandSpec(INT64, (N,), (1,))], [], [0], [], lambda s, v: ValueError(s, v))
    x = torch.zeros(N, dtype=torch.int64)
    assert launcher(x) == ()
    x[7] = 1 << 40
    with pytest.raises(ValueError, match=str(1 << 40)):
        launcher(x)


def test_bool_and_bfloat16_have_their_own_kinds(add: Callable[[int], Executable]) -> None:
    executable = add(N)
    assert accepts(executable, BOOL, (2,), (1,), torch.zeros(2, dtype=torch.bool))
    assert accepts(executable, BFLOAT16, (2,), (1,), torch.zeros(2, dtype=torch.bfloat16))
    assert not accepts(executable, BFLOAT16, (2,), (1,), torch.zeros(2, dtype=torch.float16))
