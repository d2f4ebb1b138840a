"""Loaded modules: lifetime, threads, forks, errors."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensor_comprehensions.codegen.llvm.llvm_printer import emit_llvm
from tensor_comprehensions.core.dtypes import FLOAT32, INT64
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir import build as ir
from tensor_comprehensions.loop_ir.nodes import Allocate, Kernel, Loop, LoopKind, Module, Space
from tensor_comprehensions.loop_ir.passes.vectorize import vectorize_loops
from tensor_comprehensions.runtime.cpu import host_symbols
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.runtime.cpu.object_code import (
    Executable,
    assemble,
    assemble_and_load,
    host_assembly,
    load_object,
)
from tests.runtime.conftest import addition

Add = Callable[[int], Executable]


@pytest.fixture
def threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(executable: Executable, n: int) -> None:
    a, b, c = torch.randn(n), torch.randn(n), torch.empty(n)
    assert executable([a.data_ptr(), b.data_ptr(), c.data_ptr()]) == (0, 0)
    assert torch.equal(c, a + b)


@pytest.mark.parametrize("count", [1, 2])
def test_runs_on_any_number_of_threads(add: Add, threads: None, count: int) -> None:
    torch.set_num_threads(count)
    check(add(100_000), 100_000)


def test_uses_as_many_threads_as_torch(threads: None) -> None:
    """Each trip notes the thread it ran in."""
    module = Module("ids", (ir.buffer("T", INT64, (64,)),), (), (), ())
    text = emit_llvm(module, host(), {}).replace(
        "  ret i64 0",
        "  %slot = getelementptr ptr, ptr %arguments, i64 0\n  %ids = load ptr, ptr %slot\n"
        "  %r = call i32 @tc_parallel_for(i64 0, i64 64, i64 1, ptr @note, ptr %ids)\n  ret i64 0",
    )
    text += """
declare i32 @tc_parallel_for(i64, i64, i64, ptr, ptr)
declare i64 @pthread_self()
define internal void @note(i64 %low, i64 %high, ptr %ids) {
  %id = call i64 @pthread_self()
  br label %loop
loop:
  %i = phi i64 [ %low, %0 ], [ %next, %loop ]
  %slot = getelementptr i64, ptr %ids, i64 %i
  store i64 %id, ptr %slot
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %high
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""
    executable = assemble_and_load(text, host())
    for count in (1, 2):
        torch.set_num_threads(count)
        ids = torch.zeros(64, dtype=torch.int64)
        executable([ids.data_ptr()])
        assert len(ids.unique()) == count


def test_many_python_threads_at_once(add: Add) -> None:
    executable, failures = add(5000), []

    def work() -> None:
        try:
            for _ in range(50):
                check(executable, 5000)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not failures


def test_a_processor_that_llvm_does_not_know_ends_no_process() -> None:
    program = (
        "import torch, tensor_comprehensions as tc\n"
        "op = tc.define('def f(float(N) x) -> (y) { y(i) = 2 * x(i) }').f\n"
        "strange = tc.CpuTarget('strange', 'no-such-processor', '', 128, 16, (32768, 1 << 20))\n"
        "print(op.compile(torch.ones(3), target=strange)(torch.ones(3)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2., 2., 2." in done.stdout


def test_other_python_threads_run_meanwhile() -> None:
    """A kernel that takes a while does not hold the interpreter."""
    n, s = ir.var("i"), ir.buffer("S", FLOAT32, ())
    body = Loop("i", ir.const(0), ir.const(60_000_000), ir.store(s, (), ir.cast(n, FLOAT32), op="+"))
    executable = assemble_and_load(emit_llvm(Module("slow", (s,), (), (Kernel("k", body),)), host(), {}), host())
    total = torch.zeros(())
    worker = threading.Thread(target=lambda: executable([total.data_ptr()]))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks >= 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_runs_without_the_pool(add: Add, threads: None) -> None:
    torch.set_num_threads(2)
    executable = add(100_000)
    check(executable, 100_000)
    a, b, c = torch.ones(100_000), torch.ones(100_000), torch.zeros(100_000)
    child = os.fork()
    if child == 0:
        executable([a.data_ptr(), b.data_ptr(), c.data_ptr()])
        os._exit(0 if c.numpy().sum() == 200_000 else 1)
    for _ in range(1200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell memory in use")
def test_code_is_freed_with_its_executable(add: Add) -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(30):
        add(64)
    before = resident()
    for _ in range(150):
        add(64)
    assert resident() - before < 150 * 4096  # less than a page each: code alone takes more


def test_memory_that_cannot_be_had_is_reported() -> None:
    n = 1 << 46
    scratch, out = ir.buffer("scratch", FLOAT32, (n,), Space.SCRATCH), ir.buffer("B", FLOAT32, (8,))
    i = ir.var("i")
    body = Allocate((scratch,), ir.block(ir.store(scratch, (i,), 1.0), ir.store(out, (i,), ir.load(scratch, i))))
    loop = Loop("i", ir.const(0), ir.const(8), body, LoopKind.PARALLEL)
    executable = assemble_and_load(emit_llvm(Module("big", (out,), (), (Kernel("k", loop),)), host(), {}), host())
    result = torch.zeros(8)
    assert executable([result.data_ptr()]) == (-1, 4 * n)
    assert not result.any()


def test_what_llvm_refuses_is_our_bug() -> None:
    with pytest.raises(InternalError, match="LLVM refuses"):
        assemble_and_load("define i64 @tc_entry(ptr %a) { ret i32 0 }", host())


def test_assembly_is_text() -> None:
    assert "tc_entry" in host_assembly(addition(64), host())


def test_object_code_is_the_same_each_time_and_can_be_loaded_twice() -> None:
    code = assemble(addition(64), host())
    assert code == assemble(addition(64), host())
    a, b = torch.ones(64), torch.ones(64)
    for executable in (load_object(code), load_object(code)):
        c = torch.zeros(64)
        assert executable([a.data_ptr(), b.data_ptr(), c.data_ptr()]) == (0, 0)
        assert c.eq(2).all()


def test_object_code_names_the_vector_functions_that_it_calls() -> None:
    x, y = ir.buffer("x", FLOAT32, (64,)), ir.buffer("y", FLOAT32, (64,))
    i = ir.var("i")
    body = vectorize_loops(
        Loop(
            "i",
            ir.const(0),
            ir.const(64),
            ir.store(y, (i,), ir.call("asin", ir.load(x, i))),
            LoopKind.VECTOR,
            vector_factors=(8, 1),
        )
    )
    text = emit_llvm(Module("m", (x, y), (), (Kernel("k", body),)), host(), host_symbols.vector_functions())
    code = assemble(text, host())
    assert all(name.startswith("Sleef_asin") for name in code.symbols)
    assert bool(code.symbols) == any("asin" in key for key in host_symbols.vector_functions())
    with pytest.raises(CannotLower, match="no Sleef_nothing"):
        load_object(replace(code, symbols=("Sleef_nothing",)))


def test_there_is_one_library_of_torch() -> None:
    assert host_symbols.torch_library() is host_symbols.torch_library()


def test_a_pool_that_fails_is_reported(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2)
    failing = kind(lambda begin, end, grain, function, context: 1)
    executable = add(5000)
    address = ctypes.cast(failing, ctypes.c_void_p).value
    monkeypatch.setattr(host_symbols.link_host_symbols().cell, "value", address)
    a, b, c = torch.ones(5000), torch.ones(5000), torch.zeros(5000)
    assert executable([a.data_ptr(), b.data_ptr(), c.data_ptr()]) == (-2, 0)
