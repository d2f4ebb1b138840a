"""Probes of the machine's limits: multiply-adds, copies, and kernels without the cost of a call.

All are loops in machine code, so that the machine is timed and not Python.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import torch
from torch import Tensor

from .host import host

FMA, COPY, KERNEL = "multiply-adds", "copy", "kernel"
LEAST = 50e-6
"""The minimum seconds of a call from Python, so that its overhead of a microsecond does not matter."""
ACCUMULATORS = 12
"""Independent chains of multiply-adds: enough to hide their latency on machines that start two per cycle."""
REPEATED = 4
"""The minimum repetitions of a kernel's work in a sample, so that its data are in the caches."""
UNROLLED = 4
"""Vectors that one iteration of the copy moves."""

_REPEAT = """
define void @repeat(i64 %times, ptr %function, ptr %arguments) {
entry:
  br label %again
again:
  %i = phi i64 [0, %entry], [%next, %again]
  %status = call i64 %function(ptr %arguments)
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %times
  br i1 %more, label %again, label %done
done:
  ret void
}
define void @library(i64 %times, ptr %function, ptr %to, ptr %from, i64 %bytes) {
entry:
  br label %again
again:
  %i = phi i64 [0, %entry], [%next, %again]
  %same = call ptr %function(ptr %to, ptr %from, i64 %bytes)
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %times
  br i1 %more, label %again, label %done
done:
  ret void
}
"""


def _make_llvm_attributes() -> str:
    bits = host().vector_bits
    return f'attributes #0 = {{ nounwind "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}" }}\n'


_LOOP_END = (
    "  %next = add i64 %i, 1",
    "  %more = icmp ult i64 %next, %times",
    "  br i1 %more, label %again, label %done",
    "done:",
)
"""The end of a loop `again` that runs `times` times, counted by `i`."""
_RETURN = ("  ret void", "}")


def _multiply_adds(scalar: str, lanes: int) -> str:
    """`void multiply(i64 times, ptr values)`: one multiply-add per accumulator and iteration."""
    vector, suffix = f"<{lanes} x {scalar}>", f"v{lanes}f{32 if scalar == 'float' else 64}"
    chains = range(ACCUMULATORS)
    lines = [
        f"declare {vector} @llvm.fma.{suffix}({vector}, {vector}, {vector})",
        "define void @multiply(i64 %times, ptr %values) #0 {",
        "entry:",
        f"  %a = load {vector}, ptr %values, align 4",
        "  br label %again",
        "again:",
        "  %i = phi i64 [0, %entry], [%next, %again]",
        *(f"  %c{k} = phi {vector} [%a, %entry], [%d{k}, %again]" for k in chains),
        *(f"  %d{k} = call {vector} @llvm.fma.{suffix}({vector} %a, {vector} %a, {vector} %c{k})" for k in chains),
        *_LOOP_END,
        *(f"  %p{k} = getelementptr {vector}, ptr %values, i64 {k}" for k in chains),
        *(f"  store {vector} %d{k}, ptr %p{k}, align 4" for k in chains),
        *_RETURN,
    ]
    return "\n".join(lines) + "\n" + _make_llvm_attributes()


def _vector_copy(width: int) -> str:
    """`void vectors(i64 times, ptr to, ptr from, i64 bytes)` for a multiple of UNROLLED * width bytes."""
    vector = f"<{width} x i8>"
    body = []
    for k in range(UNROLLED):
        body += [f"  %o{k} = add i64 %o, {k * width}", f"  %f{k} = getelementptr i8, ptr %from, i64 %o{k}"]
        body += [f"  %v{k} = load {vector}, ptr %f{k}, align 4", f"  %t{k} = getelementptr i8, ptr %to, i64 %o{k}"]
    body += [f"  store {vector} %v{k}, ptr %t{k}, align 4" for k in range(UNROLLED)]
    lines = [
        "define void @vectors(i64 %times, ptr %to, ptr %from, i64 %bytes) #0 {",
        "entry:",
        "  br label %again",
        "again:",
        "  %i = phi i64 [0, %entry], [%next, %copied]",
        "  br label %copy",
        "copy:",
        "  %o = phi i64 [0, %again], [%further, %copy]",
        *body,
        f"  %further = add i64 %o, {UNROLLED * width}",
        "  %rest = icmp ult i64 %further, %bytes",
        "  br i1 %rest, label %copy, label %copied",
        "copied:",
        *_LOOP_END,
        *_RETURN,
    ]
    return "\n".join(lines) + "\n" + _make_llvm_attributes()


@functools.cache
def _make_execution_engine(text: str) -> llvm.ExecutionEngine:
    target = host()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=target.name, features=target.features, opt=2, reloc="static", codemodel="jitdefault", jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    return engine


def _compile_llvm_function(text: str, name: str, *arguments: Any) -> Callable[..., None]:
    return ctypes.CFUNCTYPE(None, *arguments)(_make_execution_engine(text).get_function_address(name))


def repeat_long_enough(once: Callable[[int], None]) -> tuple[Callable[[], None], int]:
    """A call of `once(times)` that lasts about `LEAST` seconds or longer, and `times`."""
    once(1)
    start = time.perf_counter()
    once(1)
    times = max(1, round(LEAST / max(1e-9, time.perf_counter() - start)))
    if times > 1:  # the first estimate has the cost of the call in it
        start = time.perf_counter()
        once(times)
        times = max(1, round(times * LEAST / max(1e-9, time.perf_counter() - start)))
    times = max(REPEATED, times)
    return lambda: once(times), times


def peak_multiply_add_call(dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """A call that does multiply-adds on registers in one thread, and its floating-point operations.

    16-bit floats count as float32, in which they are summed; an instruction for pairs of them does more.
    """
    scalar, bits = ("double", 64) if dtype == torch.float64 else ("float", 32)
    lanes = host().lanes(bits)
    multiply = _compile_llvm_function(_multiply_adds(scalar, lanes), "multiply", ctypes.c_int64, ctypes.c_void_p)
    values = torch.full((ACCUMULATORS * lanes,), 1e-3, dtype=torch.float64 if bits == 64 else torch.float32)
    call, times = repeat_long_enough(lambda n: multiply(1000 * n, values.data_ptr()))
    return call, 2.0 * 1000 * times * ACCUMULATORS * lanes


def peak_copy_calls(moved: int) -> dict[str, tuple[Callable[[], None], float]]:
    """Copies of about `moved` bytes, read and written in all, by the C library and by vectors; the bytes of a call."""
    width = host().vector_bits // 8
    unit = UNROLLED * width
    size = max(1, moved // 2 // unit) * unit
    source, destination = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    to, of = destination.data_ptr(), source.data_ptr()
    memcpy = ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value
    number, address = ctypes.c_int64, ctypes.c_void_p
    library = _compile_llvm_function(_REPEAT, "library", number, address, address, address, number)
    vectors = _compile_llvm_function(_vector_copy(width), "vectors", number, address, address, number)
    found: dict[str, tuple[Callable[[], None], float]] = {}
    for name, once in (
        (f"{COPY} by the C library", lambda n: library(n, memcpy, to, of, size)),
        (f"{COPY} by vectors", lambda n: vectors(n, to, of, size)),
    ):
        call, times = repeat_long_enough(once)
        found[name] = (_keep_alive(call, source, destination), 2.0 * size * times)
    return found


def repeated_kernel_call(
    compiled: Any, arguments: Sequence[Tensor], results: Sequence[Tensor]
) -> tuple[Callable[[], None], int]:
    """A call that runs a compiled kernel repeatedly without the cost of calls from Python, and the number of runs."""
    temporaries = [torch.empty(max(1, size), dtype=torch.uint8) for size in compiled.temporaries]
    status = torch.zeros(2, dtype=torch.int64)
    tensors = (*arguments, *results, *temporaries, status)
    slots = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    repeat = _compile_llvm_function(_REPEAT, "repeat", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    call, times = repeat_long_enough(lambda n: repeat(n, compiled.executable.address, ctypes.addressof(slots)))
    return _keep_alive(call, *tensors), times


def _keep_alive(call: Callable[[], None], *alive: Tensor) -> Callable[[], None]:
    """`call`, which keeps the tensors alive whose addresses it uses."""

    def run() -> None:
        call()

    run.alive = alive  # type: ignore[attr-defined]
    return run
