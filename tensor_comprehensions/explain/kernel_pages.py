"""With `TC_EXPLAIN`: pages about all kernels of a process, in a folder."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from ..compiler.compiled_kernel import CompiledBase, CompiledCpuKernel
from ..compiler.compiled_sparse_kernel import CompiledSparseKernel
from ..compiler.gpu_passes import CompiledGpuKernel
from ..compiler.sparse_gpu_passes import CompiledSparseGpuKernel
from ..core.errors import InternalError
from .cpu import explain_cpu_kernel
from .gpu import explain_gpu_kernel
from .kernel_report import Report
from .sparse import explain_sparse_gpu_kernel, explain_sparse_kernel


def save_page_in(folder: str, compiled: CompiledBase | CompiledSparseKernel | CompiledSparseGpuKernel) -> Path:
    """Write the page of a kernel. Returns its path.

    The file is named after the def and a digest of the page's facts, so equal kernels share a file. Raises
    ArgumentError if the folder cannot be written.
    """
    report = explain_compiled(compiled)
    texts = (report.find_listing(kind).text for kind in ("def", "loops"))
    facts = (report.sizes, report.target, report.facts, *texts)
    return report.save(Path(folder) / f"{report.name}_{sha256(repr(facts).encode()).hexdigest()[:8]}.html")


def explain_compiled(compiled: CompiledBase | CompiledSparseKernel | CompiledSparseGpuKernel) -> Report:
    """The report on a kernel of any kind."""
    match compiled:
        case CompiledCpuKernel():
            return explain_cpu_kernel(compiled)
        case CompiledGpuKernel():
            return explain_gpu_kernel(compiled)
        case CompiledSparseKernel():
            return explain_sparse_kernel(compiled)
        case CompiledSparseGpuKernel():
            return explain_sparse_gpu_kernel(compiled)
    raise InternalError(f"not a kernel: {compiled!r}")
