"""Counts of compiled and loaded kernels of this process, and summaries of an operator's kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock

from ..compiler.compiled_kernel import CompiledCpuKernel, CompiledRangeKernel
from ..tc_lang.ir import Role


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of the CPU kernels with dense operands that this process has compiled and loaded so far.

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
        sizes: the shapes of its parameters as text; a dynamic size is its name.
        is_range: whether it is for any number of rows.
        code_bytes: bytes of its machine code.
        compile_seconds: the time that compiling or loading it took.
    """

    sizes: str
    is_range: bool
    code_bytes: int
    compile_seconds: float


_lock = Lock()
_total = Statistics()


def statistics() -> Statistics:
    """Counts of the kernels that this process has compiled and loaded so far, and the time that this took.

    The difference between two calls counts the kernels in between.
    """
    return _total


def count_kernel(made: object, *, loaded: bool, seconds: float) -> None:
    """Count a kernel that was compiled, or loaded, in so many seconds; kernels of other kinds are not counted."""
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
    """The summary of a kernel in `Op.kernels`."""
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
