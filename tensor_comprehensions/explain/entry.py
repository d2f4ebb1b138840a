"""Selects the report of a kernel by its class."""

from __future__ import annotations

from ..compiler.compiled_kernel import CompiledCpuKernel
from ..compiler.gpu_passes import CompiledGpuKernel
from ..compiler.sparse_gpu_passes import CompiledSparseGpuKernel
from ..compiler.sparse_passes import CompiledSparseKernel
from ..core.decisions import Decision
from ..core.errors import ArgumentError
from .cpu import explain_cpu_kernel
from .gpu import explain_gpu_kernel
from .report import Report
from .sparse import explain_sparse_gpu_kernel, explain_sparse_kernel


def explain_compiled(compiled: object, tuning: tuple[Decision, ...] = ()) -> Report:
    """The report on a kernel. Raises ArgumentError for a kernel that contains library calls.

    tuning: the caller's decisions about its options.
    """
    match compiled:
        case CompiledCpuKernel():
            return explain_cpu_kernel(compiled, tuning)
        case CompiledGpuKernel():
            return explain_gpu_kernel(compiled, tuning)
        case CompiledSparseKernel():
            return explain_sparse_kernel(compiled)
        case CompiledSparseGpuKernel():
            return explain_sparse_gpu_kernel(compiled)
    raise ArgumentError(
        "a def with calls of a library is not explained as a whole", suggestion="leave out match_library_calls"
    )
