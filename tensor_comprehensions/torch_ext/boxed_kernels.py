"""Dispatcher kernels that run without Python: each operator has a call cache (`runtime.fastpath.boxed`)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..runtime.fastpath import availability, call_cache
from ..runtime.fastpath.boxed import BoxedCallCache
from . import autograd_kernel

if TYPE_CHECKING:
    from .registration import DispatcherOp


def make_boxed_call_cache(op: DispatcherOp) -> BoxedCallCache | None:
    """A call cache with kernels of `op` for the CPU; None if this torch or this system does not support it."""
    if not availability.is_fast_path_available():
        return None
    kinds = [call_cache.CONSTANT if special else call_cache.TENSOR for _, special, _ in op.kinds]
    return BoxedCallCache(kinds, len(op.function.returns), op.run, partial(autograd_kernel.autograd_kernel, op))
