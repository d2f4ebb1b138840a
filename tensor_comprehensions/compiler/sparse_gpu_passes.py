"""The GPU compiler of sparse defs: lowers, simplifies, and prints CUDA C++."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from time import perf_counter

from ..codegen.gpu import cuda_printer, opencl_printer
from ..codegen.gpu.gpu_printer import GpuCode
from ..codegen.gpu.ptx import architecture_for
from ..core.diagnostics import get_logger
from ..core.errors import ArgumentError
from ..loop_ir.binding_checks import check_bindings
from ..loop_ir.nodes import Buffer, Module
from ..loop_ir.show import format_program
from ..runtime.cpu.host import host
from ..runtime.cuda import cubins, nvrtc
from ..runtime.cuda.nvrtc import Cubin
from ..sparse.call_plan import CallPlan
from ..sparse.explain import explain, text_with_formats
from ..sparse.gpu_lower import GpuProgram, lower_for_gpu
from ..sparse.lower import Program
from ..sparse.sparse_problem import SparseProblem
from ..target import GpuTarget
from .gpu_passes import check_limits, simplify_kernel, worst_resources
from .sparse_passes import verify_module


@dataclass(frozen=True, eq=False)
class CompiledSparseGpuKernel:
    """A sparse def as CUDA C++.

    Attributes:
        problem: the input of the lowering.
        lowered: the loop program of each phase, with the mapping of each kernel to threads.
        target: the GPU.
        module: the simplified loop program.
        code: the CUDA text and its launches.
        seconds: (step, seconds) in order.
    """

    problem: SparseProblem
    lowered: GpuProgram
    target: GpuTarget
    module: Module
    code: GpuCode
    seconds: tuple[tuple[str, float], ...]

    @property
    def program(self) -> Program:
        """The lowered program."""
        return self.lowered.program

    @functools.cached_property
    def plan(self) -> CallPlan:
        """How to call the kernels."""
        return self.program.call_plan

    @property
    def arguments(self) -> tuple[Buffer, ...]:
        """The arrays that a launch takes, in order."""
        return self.module.arguments

    @property
    def temporaries(self) -> tuple[Buffer, ...]:
        """Always empty: temporaries are arguments, because their sizes differ from call to call."""
        return self.module.temporaries

    @functools.cached_property
    def kernels_by_phase(self) -> tuple[slice, ...]:
        """For each phase, the slice of the kernels that it launches; the caller allocates memory between phases."""
        ends = [0, *accumulate(len(m.kernels) for m in self.program.phases)]
        return tuple(map(slice, ends, ends[1:]))

    @property
    def compile_seconds(self) -> float:
        return sum(seconds for _, seconds in self.seconds)

    @functools.cached_property
    def cubin(self) -> Cubin:
        """Machine code. Raises ArgumentError if NVRTC is not installed."""
        return cubins.cubin_of(self.code.source, architecture_for(self.code.source, self.target.name))

    @property
    def resources(self) -> dict[str, int]:
        """The kernels of a call and the most threads of a block; with NVRTC, also the `worst_resources`."""
        kernels = self.code.kernels
        found = {"kernels": len(kernels), "threads": max((prod(k.launch.block) for k in kernels), default=0)}
        return found | (worst_resources(self.cubin) if nvrtc.is_nvrtc_available() else {})

    @property
    def header(self) -> str:
        """The content of the comment at the start of a text."""
        return "\n".join(("", _format_def(self).strip("\n"), "", f"target: {self.target.name}"))

    @staticmethod
    def source_kinds() -> Mapping[str, Callable[[CompiledSparseGpuKernel], str]]:
        return SPARSE_GPU_KINDS

    def source(self, kind: str) -> str:
        """The kernels as text of a kind: "tc", "schedule", "loops", "cuda" or "opencl".

        Raises:
            ArgumentError: no such kind exists.
        """
        if kind not in SPARSE_GPU_KINDS:
            raise ArgumentError(
                f"a sparse kernel for a GPU has no source of kind {kind!r}", expected=", ".join(SPARSE_GPU_KINDS)
            )
        return SPARSE_GPU_KINDS[kind](self)


def _explain(kernel: CompiledSparseGpuKernel) -> str:
    """Explain the lowering, and the mapping of each kernel to threads."""
    lines = [explain(kernel.program)]
    for m in kernel.lowered.mappings:
        sharing = f", whose lanes share {m.shared}" if m.shared else ""
        team = "thread" if m.teams.lanes == 1 else f"team of {m.teams.lanes} lanes"
        lines.append(f"kernel {m.name}: {m.teams.blocks} blocks; a {team} for {', '.join(m.loops)}{sharing}")
    return "\n".join(lines)


def _format_def(kernel: CompiledSparseGpuKernel) -> str:
    return text_with_formats(kernel.program.problem.function)


SPARSE_GPU_KINDS: Mapping[str, Callable[[CompiledSparseGpuKernel], str]] = {
    "tc": _format_def,
    "schedule": _explain,
    "loops": lambda kernel: format_program(kernel.module),
    "cuda": lambda kernel: cuda_printer.emit_cuda(kernel.module, header=kernel.header).source,
    "opencl": lambda kernel: opencl_printer.emit_opencl(kernel.module, header=kernel.header).source,
}
"""The printers of `CompiledSparseGpuKernel.source`."""


def compile_sparse_gpu(problem: SparseProblem, target: GpuTarget) -> CompiledSparseGpuKernel:
    """Lower a problem and print it as CUDA C++.

    Raises:
        CannotLower: the GPU lowering does not support a statement.
        ArgumentError: `target` cannot launch a kernel.
    """
    start = perf_counter()
    lowered = lower_for_gpu(problem, target, host())
    done = perf_counter()
    check_bindings(lowered.module)
    verify_module(lowered.module, "lower")
    module = replace(lowered.module, kernels=tuple(map(simplify_kernel, lowered.module.kernels)))
    verify_module(module, "simplify")
    for kernel in module.kernels:
        check_limits(problem.function.name, kernel, target)
    code = cuda_printer.emit_cuda(module)
    seconds = (("lower", done - start), ("emit", perf_counter() - done))
    get_logger("schedule").debug("%s: sparse for %s, %s", problem.function.name, target.name, lowered.program.orders)
    return CompiledSparseGpuKernel(problem, lowered, target, module, code, seconds)
