"""Tensor Comprehensions: write the maths of an operator, get a fast PyTorch operator.

    import torch, tensor_comprehensions as tc

    ops = tc.define("def matmul(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }")
    C = ops.matmul(torch.randn(4, 8), torch.randn(8, 6))

Importing the package loads neither torch nor a compiler; the first use of a name does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inspection, knobs
from .errors import ArgumentError, CacheError, CheckError, DeviceError, InternalError, ParseError, RangeError, TCError
from .later import load

if TYPE_CHECKING:
    from .api import Library, Op, define
    from .caller import Kernel
    from .calling.sparse.files import read_tensor, write_tensor
    from .calling.sparse.interop import as_sparse
    from .calling.sparse.tensor import SparseTensor
    from .definitions import from_expression, from_notation, op
    from .einstein import einsum
    from .module import Module
    from .options import CpuOptions
    from .target import Target

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "CacheError",
    "CheckError",
    "CpuOptions",
    "DeviceError",
    "InternalError",
    "Kernel",
    "Library",
    "Module",
    "Op",
    "ParseError",
    "RangeError",
    "SparseTensor",
    "TCError",
    "Target",
    "as_sparse",
    "define",
    "einsum",
    "from_expression",
    "from_notation",
    "op",
    "read_tensor",
    "write_tensor",
]

_HOMES = {
    "Kernel": "caller",
    "Library": "api",
    "Module": "module",
    "Op": "api",
    "define": "api",
    "einsum": "einstein",
    "from_expression": "definitions",
    "from_notation": "definitions",
    "op": "definitions",
    "SparseTensor": "calling.sparse.tensor",
    "as_sparse": "calling.sparse.interop",
    "read_tensor": "calling.sparse.files",
    "write_tensor": "calling.sparse.files",
    "CpuOptions": "options",
    "Target": "target",
}

inspection.start_logging(knobs.known().logs)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(load(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
