"""Autocast: floating-point arguments are cast to the types that the def declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from ..dispatch.arguments import TORCH_TYPES, ParameterSpec

if TYPE_CHECKING:
    from .registration import DispatcherOp

_CASTING = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def autocast_kernel(op: DispatcherOp, *values: Any) -> Any:
    """The result of a call under autocast, which casts arguments to the declared types.

    As in torch, float64 is not cast: such an argument raises ArgumentError unless the def declares it.
    """
    expected = (*op.call_signature.parameters, *op.call_signature.initial)
    with torch._C._ExcludeDispatchKeyGuard(_CASTING):
        return op.overload(*[_cast_argument(e, x) for e, x in zip(expected, values, strict=True)])


def _cast_argument(expected: ParameterSpec, x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(TORCH_TYPES[expected.dtype]) if expected.dtype.is_float else x
