"""Operations that torch's Python dispatcher decomposes before a graph is captured, and that are better left whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import OpOverload

PREFIXES = ("upsample_", "_upsample_")
"""Upsampling becomes dozens of lookups by index, at many times the cost."""
KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Dispatch keys whose decompositions the Python dispatcher always uses."""


@contextmanager
def captured_whole(examples: Sequence[Any]) -> Iterator[None]:
    """Capture upsampling as one operation, for `examples` of known sizes: torch's own code takes no symbols."""
    removed: list[tuple[OpOverload, DispatchKey, Any]] = []
    try:
        if not any(map(_has_symbols, examples)):
            for overload in _list_upsample_overloads():
                for key in KEYS:
                    if key in overload.py_kernels:
                        removed.append((overload, key, overload.py_kernels.pop(key)))
                        overload._dispatch_cache.clear()
        yield
    finally:
        for overload, key, kernel in removed:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


def _list_upsample_overloads() -> Iterator[OpOverload]:
    for name in dir(torch.ops.aten):
        if name.startswith(PREFIXES):
            packet = getattr(torch.ops.aten, name)
            yield from (getattr(packet, overload) for overload in packet.overloads())


def _has_symbols(value: object) -> bool:
    if isinstance(value, Tensor):
        return any(isinstance(n, torch.SymInt) for n in value.shape)
    return isinstance(value, torch.SymInt)
