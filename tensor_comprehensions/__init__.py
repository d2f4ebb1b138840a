"""Tensor Comprehensions: write the maths of an operator, get a fast PyTorch operator.

    import torch, tensor_comprehensions as tc

    ops = tc.define("def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }")
    C = ops.matmul(torch.randn(4, 8), torch.randn(8, 6))

Importing the package loads neither torch nor a compiler; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core import diagnostics, knobs
from .core.errors import (
    ArgumentError,
    CacheError,
    CheckError,
    DeviceError,
    InternalError,
    ParseError,
    RangeError,
    TCError,
)
from .core.knobs import override_knobs
from .core.lazy_import import import_without_gc

if TYPE_CHECKING:
    from .api import Library, Op, define
    from .autotuner.search_loop import TuningResult
    from .decorators import from_expression, from_notation, op, tile_kernel
    from .dispatch.compile_statistics import statistics
    from .dispatch.sparse.interop import as_sparse
    from .dispatch.sparse.sparse_tensor import SparseTensor
    from .dispatch.sparse.tensor_files import read_tensor, write_tensor
    from .einsum_frontend import einsum
    from .kernel import Kernel
    from .nn import Module
    from .options import CpuOptions, MappingOptions, SparseOptions, TileOptions
    from .target import CpuTarget

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "CacheError",
    "CheckError",
    "CpuOptions",
    "CpuTarget",
    "DeviceError",
    "InternalError",
    "Kernel",
    "Library",
    "MappingOptions",
    "Module",
    "Op",
    "ParseError",
    "RangeError",
    "SparseOptions",
    "SparseTensor",
    "TCError",
    "TileOptions",
    "TuningResult",
    "as_sparse",
    "define",
    "einsum",
    "from_expression",
    "from_notation",
    "op",
    "override_knobs",
    "read_tensor",
    "statistics",
    "tile_kernel",
    "write_tensor",
]

_HOMES = {
    "Kernel": "kernel",
    "Library": "api",
    "Module": "nn",
    "Op": "api",
    "define": "api",
    "einsum": "einsum_frontend",
    "from_expression": "decorators",
    "from_notation": "decorators",
    "op": "decorators",
    "tile_kernel": "decorators",
    "statistics": "dispatch.compile_statistics",
    "SparseTensor": "dispatch.sparse.sparse_tensor",
    "as_sparse": "dispatch.sparse.interop",
    "read_tensor": "dispatch.sparse.tensor_files",
    "write_tensor": "dispatch.sparse.tensor_files",
    "CpuOptions": "options",
    "MappingOptions": "options",
    "TileOptions": "options",
    "SparseOptions": "options",
    "CpuTarget": "target",
    "TuningResult": "autotuner.search_loop",
}

diagnostics.start_logging(knobs.current_or_default().logs)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_without_gc(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
