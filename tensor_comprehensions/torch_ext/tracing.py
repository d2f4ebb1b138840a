"""Calls of an op that go through its operator: those that torch traces, transforms, watches or casts for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..calling.arguments import PLAIN, TORCH_TYPES, article, conversion
from ..calling.calls import check_names
from ..errors import ArgumentError
from .operators import Operator

_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def is_special(values: Sequence[object]) -> bool:
    """Does torch do more with a call on `values` now than to run a kernel and to record it for autograd?"""
    return (
        _dispatch_modes() > 0
        or _transforms()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch.autograd.profiler._is_profiler_enabled
        or any(isinstance(x, Tensor) and type(x) not in PLAIN for x in values)
        or _are_shapes(values)
    ) and conversion(values) is None


def _are_shapes(values: Sequence[object]) -> bool:
    """Are all tensors on "meta", where a call gives shapes alone?"""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return bool(tensors) and all(x.is_meta for x in tensors)


def through(op: Operator, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
    """The result of a call through the operator. Raises ArgumentError or RangeError."""
    values = op.by_position(tensors, initial)
    if out is None:
        return op.overload(*values)
    op.out(*values, **_destinations(op, out))
    return out


def traced(op: Operator, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
    """A call that Dynamo traces: this function is what it sees, and an operator what it puts into the graph."""
    check_names(op.interface, tensors, initial)
    given = [*tensors, *[initial[name] for name in op.names]]
    values = [_value(op, n, x) for n, x in enumerate(given)]
    if out is None:
        return op.overload(*values)
    op.out(*values, **_destinations(op, out))
    return out


def _value(op: Operator, n: int, x: Any) -> Any:
    dtype, special, dims = op.kinds[n]
    if isinstance(x, Tensor):
        return x.item() if special else x
    if special and isinstance(x, (int, torch.SymInt)):
        return x
    accepted = bool if dtype.is_bool else int if dtype.is_integer else (int, float)
    if dims or special or not isinstance(x, accepted):
        name = (*op.function.parameters, *op.function.initial)[n].name
        raise ArgumentError(
            f"argument '{name}' of {op.function.name} is {article(type(x).__name__)}",
            expected=f"{dtype} {'tensor' if dims else 'number'} {name}",
        )
    return torch.scalar_tensor(x, dtype=TORCH_TYPES[dtype])


def _destinations(op: Operator, out: Any) -> dict[str, Any]:
    wanted = out if isinstance(out, tuple | list) else (out,)
    if len(wanted) != len(op.schema.destinations):
        raise ArgumentError(
            f"'out' of {op.function.name} has {len(wanted)} tensors",
            expected=f"{len(op.schema.destinations)}: {', '.join(op.function.returns)}",
        )
    return dict(zip(op.schema.destinations, wanted, strict=True))
