"""Check and convert the arrays, shapes and types from which users make sparse tensors."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ArgumentError
from ..arguments import tensor_from_array
from .check_storage import INDEX_TYPES

_LARGEST = 2**63 - 1


def to_plain_tensor(x: Any, what: str) -> Tensor:
    """`x` as a tensor: itself, in the memory of a NumPy array, or whatever else `torch.as_tensor` makes of it.

    Raises:
        ArgumentError: torch cannot convert `x`; the message calls it `what`.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(f"{what} is a masked array", suggestion="pass x.filled(value)")
    try:
        return tensor_from_array(x) if isinstance(x, np.ndarray) else torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"torch makes no tensor of {what}: {reason}", expected="numbers in a regular array", found=short_repr(x)
        ) from None


def check_shape(shape: object) -> tuple[int, ...]:
    """The extents of a shape. Raises ArgumentError if they are not whole numbers from 0 up that int64 holds."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not all(isinstance(n, Integral) for n in shape):
        raise ArgumentError("a shape is a sequence of whole numbers", expected="(1000, 500)", found=short_repr(shape))
    extents = tuple(int(n) for n in shape)
    if any(not 0 <= n <= _LARGEST for n in extents):
        raise ArgumentError("an extent is negative or too large", expected=f"0 to {_LARGEST}", found=str(extents))
    return extents


def check_index_type(dtype: object, shape: tuple[int, ...]) -> None:
    """Check that pos and crd can have this type for a tensor of this shape. Raises ArgumentError."""
    if dtype is None:
        return
    if dtype not in INDEX_TYPES:
        found = str(dtype).removeprefix("torch.")
        raise ArgumentError("indices have another type", expected="torch.int32 or torch.int64", found=found)
    if dtype is torch.int32 and max(shape, default=0) > 2**31 - 1:
        raise ArgumentError(
            f"int32 indices do not reach an extent of {max(shape)}", expected="torch.int64", found="int32"
        )
