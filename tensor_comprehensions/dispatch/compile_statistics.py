"""Counts of compiled and loaded kernels of this process, and summaries of an operator's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock

from ..compiler.compiled_kernel import CompiledCpuKernel, CompiledRangeKernel
from ..tc_lang.ir import Role


@dataclass(frozen=True, slots=True)
class Statistics:
    """The kernels for CPUs and dense operands that this process has made so far.

    Attributes:
        compiled: the number of compiled kernels.
        ranged: how many of these are for any number of rows.
        loaded: the number of kernels from the cache.
        seconds: the time that compiling and loading took.
    """

    compiled: int = 0
    ranged: int = 0
    loaded: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """One kernel of an operator.

    Attributes:
        sizes: the shapes that it takes, by parameter; a size that may have any value is a name.
        is_range: whether it is for any number of rows.
        code_bytes: of its machine code. compile_seconds: what making it, or loading it, took.
    """

    sizes: str
    is_range: bool
    code_bytes: int
    compile_seconds: float


_lock = Lock()
_total = Statistics()


def statistics() -> Statistics:
    """Counts of the kernels that this process has compiled and loaded so far, and the time that it took.

    The difference of two, before and after a part of a program, counts the kernels of that part.
    """
    return _total


def count_kernel(made: object, *, loaded: bool, seconds: float) -> None:
    """Add a kernel that was made."""
    global _total
    if not isinstance(made, CompiledCpuKernel):
        return
    ranged = isinstance(made, CompiledRangeKernel) and not loaded
    with _lock:
        _total = replace(
            _total,
            compiled=_total.compiled + (not loaded),
            ranged=_total.ranged + ranged,
            loaded=_total.loaded + loaded,
            seconds=_total.seconds + seconds,
        )


def summarize_kernel(kernel: CompiledCpuKernel) -> KernelSummary:
    """What `Op.kernels` says of a kernel."""
    is_range = isinstance(kernel, CompiledRangeKernel)
    shapes = []
    for t in kernel.bound.tensors:
        if t.role is Role.INPUT:
            dims = [str(n) for n in t.shape]
            if isinstance(kernel, CompiledRangeKernel):
                for d, n in kernel.dynamic_dimensions(t.name).items():
                    dims[d] = kernel.dynamic_sizes[n]
            shapes.append(f"{t.name}({', '.join(dims)})" if dims else t.name)
    return KernelSummary(", ".join(shapes), is_range, len(kernel.code.data), kernel.compile_seconds)
