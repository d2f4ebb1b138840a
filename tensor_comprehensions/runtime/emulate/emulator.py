"""Runs CUDA kernels on the CPU: compiles the source for NVRTC by the host's C++ compiler.

Threads are fibers. Every memory access is checked: races, reads of uninitialized memory, accesses outside of tensors
and arrays, barriers that some threads do not reach. `cuda_on_cpu/machine.cpp` is the machine, `device.h` the extensions
of CUDA to C++.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...codegen.gpu.gpu_printer import GpuCode, GpuKernelSource
from ...core.errors import ArgumentError, InternalError
from ...loop_ir import nodes as ir
from ...loop_ir.intrinsics import BARRIER_INIT, BARRIER_PART, TMA_STORES, WGMMA_FENCE
from .emulated_atoms import atom_functions
from .faults import EmulatorFailure, describe_failure

SOURCES = Path(__file__).parent / "cuda_on_cpu"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-std=c++17",
    "-O1",
    "-g1",
    "-gdwarf-4",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fwrapv",
)
_CHECKS = ("-fsanitize=thread,bounds", "-Wno-unknown-pragmas", "-Wno-psabi")
_STACK = 64 << 10
_lock = threading.Lock()


class _Region(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("grain", ctypes.c_int64),
        ("defined", ctypes.c_int64), ("free", ctypes.c_int64),
    )  # fmt: skip


class _TensorMap(ctypes.Structure):
    """`struct TensorMap` of `atoms.h`."""

    _fields_ = (
        ("base", ctypes.c_void_p), ("stride", ctypes.c_int64 * 5), ("extent", ctypes.c_int * 5),
        ("rank", ctypes.c_int), ("size", ctypes.c_int), ("swizzle", ctypes.c_int), ("box", ctypes.c_short * 5),
        ("rounds", ctypes.c_short), ("unused", ctypes.c_short * 12), ("more", ctypes.c_char * 128),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EmulatedTensor:
    """A tensor in the memory of this process. defined: whether its contents are defined before the first kernel."""

    address: int
    buffer: ir.Buffer
    defined: bool


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a run: accesses of threads to tensors and to shared memory, of any width, and waits at barriers."""

    tensors: int
    shared: int
    waits: int


class Emulated:
    """The compiled source of a module, to run on tensors in memory.

    Attributes:
        path: the library.
        counts: the counts of the last run without a fault.
    """

    counts = Counts(0, 0, 0)

    def __init__(self, code: GpuCode, library: Path, prefix: str) -> None:
        self.code = code
        self.path = library
        self._library = ctypes.CDLL(str(library))
        self._prefix = prefix

    def __call__(self, memories: Sequence[EmulatedTensor]) -> tuple[int, int]:
        """Run all kernels on the module's arguments and temporaries, in order.

        Returns (0, 0), or the number of a failed check and its value.

        Raises:
            InternalError: a kernel would be wrong on a device; the message names tensor, thread and line.
        """
        status = (ctypes.c_int64 * 2)()
        regions = [_make_region(m) for m in memories]
        regions.append(_Region(ctypes.addressof(status), 16, 8, 1, 1))
        table = (_Region * len(regions))(*regions)
        with _lock:
            machine = _build_machine_library()
            machine.machine_load(table, len(regions))
            ctypes.c_int.in_dll(machine, "machine_parts").value = BARRIER_PART in self.code.source
            asynchronous = any(name in self.code.source for name in (BARRIER_INIT, WGMMA_FENCE, *TMA_STORES))
            asynchronous |= any(k.launch.cluster > 1 for k in self.code.kernels)
            ctypes.c_int.in_dll(machine, "machine_asynchronous").value = asynchronous
            ctypes.c_int.in_dll(machine, "machine_parts").value |= asynchronous
            for kernel in (k for k in self.code.kernels if 0 not in k.launch.grid):
                taken = [memories[n].address for n in kernel.buffers]
                if kernel.status:
                    taken.append(ctypes.addressof(status))
                values = (ctypes.c_int64 * len(kernel.values))(*kernel.values)
                taken += [ctypes.addressof(values) + 8 * n for n in range(len(values))]
                maps = [_tensor_map(t, memories) for t in kernel.maps]
                taken += [ctypes.addressof(t) for t in maps]
                if self._run(machine, kernel, taken):
                    failure = EmulatorFailure.in_dll(machine, "machine_failure")
                    raise InternalError(
                        describe_failure(failure, kernel, self.code, [m.buffer for m in memories], self.path)
                    )
            self.counts = Counts(*(ctypes.c_int64 * 3).in_dll(machine, "machine_counts"))
        return status[0], status[1]

    def bind_parameters(self, values: Mapping[str, int]) -> Emulated:
        """The same for a call with these values of the module's parameters."""
        return Emulated(self.code.bind_parameters(values), self.path, self._prefix)

    def select(self, kernels: slice) -> Emulated:
        """The same with only a slice of the module's kernels."""
        return Emulated(replace(self.code, kernels=self.code.kernels[kernels]), self.path, self._prefix)

    def _run(self, machine: ctypes.CDLL, kernel: GpuKernelSource, addresses: Sequence[int]) -> int:
        function = getattr(self._library, f"machine_enter_{self._prefix}{kernel.name}")
        getattr(self._library, f"machine_anchor_{self._prefix or '_'}")()  # makes the thread's copy of shared arrays
        grid, block = ((ctypes.c_uint * 3)(*d) for d in (kernel.launch.grid, kernel.launch.block))
        slots = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        grain = min((b.type.dtype.size for b in kernel.arrays), default=1)
        entry = ctypes.cast(function, ctypes.c_void_p)
        run = machine.machine_run
        code = run(
            entry,
            slots,
            len(addresses),
            grid,
            block,
            kernel.launch.cluster,
            ctypes.c_int64(grain),
            ctypes.c_int64(_STACK + 2 * kernel.local),
        )
        if code < 0:
            raise ArgumentError("there is no memory for the stacks of the emulated threads")
        return int(code)


def _make_region(m: EmulatedTensor) -> _Region:
    b = m.buffer
    return _Region(m.address, b.bytes, b.type.dtype.size, m.defined, 0)


def _tensor_map(t: ir.TensorMap, memories: Sequence[EmulatedTensor]) -> _TensorMap:
    """The machine's form of a tensor map: the fastest dimension first."""
    b, size = t.buffer, t.buffer.type.dtype.size
    address = next(m.address for m in memories if m.buffer.name == b.name)
    found = _TensorMap(base=address, rank=len(t.box), size=size, swizzle=t.swizzle, rounds=t.rounds)
    for d, (stride, extent, count) in enumerate(zip(t.strides[::-1], t.shape[::-1], t.box[::-1], strict=True)):
        found.stride[d], found.extent[d], found.box[d] = stride * size, extent, count
    return found


def build_emulated(codes: Sequence[GpuCode]) -> list[Emulated]:
    """Compile the sources of modules together, which takes less time than one by one.

    Raises:
        ArgumentError: there is no C++ compiler.
        InternalError: it refuses a source.
    """
    prepare_machine()
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    prefixes = [f"m{n}_" if len(codes) > 1 else "" for n in range(len(codes))]
    for prefix, code in zip(prefixes, codes, strict=True):
        (folder / f"{prefix}kernel.cu").write_text(code.source)
    dynamic = max([16, *(k.dynamic for code in codes for k in code.kernels)])
    shared = f'extern "C" {{ thread_local __align__(1024) unsigned char dynamic_shared[{dynamic}]; }}\n'  # of all
    parts = (_emit_kernel_wrapper(p, c) for p, c in zip(prefixes, codes, strict=True))
    (folder / "unit.cpp").write_text(shared + "".join(parts))
    flags = [*_FLAGS, *_CHECKS, f"-I{SOURCES}", "-include", str(SOURCES / "device.h")]
    _compile([*flags, "-c", "unit.cpp", "-o", "unit.o"], folder)
    _compile(["-shared", "unit.o", str(_folder() / "machine.so"), f"-Wl,-rpath,{_folder()}", "-o", "unit.so"], folder)
    return [Emulated(code, folder / "unit.so", prefix) for prefix, code in zip(prefixes, codes, strict=True)]


def prepare_machine() -> None:
    """Compile the machine now, so that processes forked from this one find it."""
    with _lock:
        _build_machine_library()


def is_emulator_available() -> bool:
    """Whether there is a C++ compiler."""
    return any(map(shutil.which, _COMPILERS))


def run_emulated_code(
    code: GpuCode,
    module: ir.Module,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    parameters: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Compile and run the source of `module` on contiguous arrays, one per argument by name, outputs included.

    Arrays of half-precision numbers have their own type or hold their bits. Temporaries are allocated here. Returns and
    raises as `Emulated` and `build_emulated` do.
    """
    return run_emulated_module(build_emulated([code])[0], module, arrays, parameters)


def run_emulated_module(
    emulated: Emulated,
    module: ir.Module,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    parameters: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Run a compiled module on arrays, as `run_emulated_code` does. parameters: the values of its parameters."""
    values = parameters or {}
    arguments, temporaries = ([b.bind_parameters(values) for b in bs] for bs in (module.arguments, module.temporaries))
    memories = [EmulatedTensor(arrays[b.name].ctypes.data, b, True) for b in arguments]
    rooms = [np.zeros(max(1, int(np.prod(b.shape))) * b.type.dtype.size + 16, np.uint8) for b in temporaries]
    for b, room in zip(temporaries, rooms, strict=True):
        memories.append(EmulatedTensor(-(-room.ctypes.data // 16) * 16, b, False))
    return (emulated.bind_parameters(values) if values else emulated)(memories)


# --- compiling ---------------------------------------------------------------------------------------------------


def _emit_kernel_wrapper(prefix: str, code: GpuCode) -> str:
    """The C++ around one source: it gives each kernel a unique name, and an entry that the machine calls."""
    name = prefix or "_"
    renames = [(k.name, f"{prefix}{k.name}") for k in code.kernels] if prefix else []
    lines = [
        "#include <cuda_fp16.h>",
        "#include <cuda_bf16.h>",
        "#include <cuda_pipeline_primitives.h>",
        "#include <atoms.h>",
        *(f"#define {old} {new}" for old, new in renames),
        f"namespace {prefix}text {{",
        atom_functions(code.source),
        f'#include "{prefix}kernel.cu"',
        f'extern "C" void *machine_anchor_{name}() {{ return dynamic_shared; }}',
    ]
    for k in code.kernels:
        function = f"{prefix}{k.name}"
        lines.append(f'extern "C" void machine_enter_{function}(void **a) {{ machine_call({function}, a); }}')
    return "\n".join([*lines, "}", *(f"#undef {old}" for old, _ in renames), ""])


@functools.cache
def _folder() -> Path:
    """The folder for this process's compiled libraries."""
    keep = tempfile.TemporaryDirectory(prefix="tc_emulator_", ignore_cleanup_errors=True)
    _kept.append(keep)
    return Path(keep.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _build_machine_library() -> ctypes.CDLL:
    """The machine, compiled once per process."""
    library = _folder() / "machine.so"
    _compile(["-std=c++17", "-O2", "-fPIC", "-shared", str(SOURCES / "machine.cpp"), "-o", str(library)], _folder())
    return ctypes.CDLL(str(library))


def _compile(arguments: Sequence[str], folder: Path) -> None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ArgumentError(
            "running CUDA kernels on the CPU needs a C++ compiler, and there is none",
            expected=" or ".join(_COMPILERS),
            suggestion="install g++",
        )
    done = subprocess.run([compiler, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InternalError(f"{Path(compiler).name} refuses our code:\n{done.stderr[:4000]}")
