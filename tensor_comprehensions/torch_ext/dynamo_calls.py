"""Calls of an op that go through torch's dispatcher: traced, transformed, profiled and autocast calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.dtypes import DType
from ..core.errors import ArgumentError
from ..dispatch.arguments import PLAIN, TORCH_TYPES, ParameterSpec, output_converter, with_article
from ..dispatch.call_steps import check_names
from ..dispatch.signatures import return_sizes
from .graph_errors import ErrorFields, deferred_error, dynamo_constant, error_fields
from .registration import DispatcherOp, operator_named

_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active


def needs_dispatcher(values: Sequence[object]) -> bool:
    """Whether torch currently does more with a call on `values` than run a kernel and record it for autograd."""
    return (
        _dispatch_modes() > 0
        or _transforms()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch.autograd.profiler._is_profiler_enabled
        or any(isinstance(x, Tensor) and type(x) not in PLAIN for x in values)
        or _are_all_meta(values)
    ) and output_converter(values) is None


def _are_all_meta(values: Sequence[object]) -> bool:
    """Whether all tensors are meta tensors, so that a call only computes shapes."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return bool(tensors) and all(x.is_meta for x in tensors)


def call_overload(op: DispatcherOp, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
    """The result of a call through the operator. Raises ArgumentError or RangeError."""
    values = op.by_position(tensors, initial)
    if out is None:
        return op.overload(*values)
    _check_destinations(op, [kind_of(x) for x in _wrap_in_tuple(out)])
    op.out(*values, **_bind_destinations(op, out))
    return out


def call_in_graph(op: DispatcherOp, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
    """The result of a call that Dynamo traces: it inlines this function and puts the operator into the graph."""
    given, want_arrays = arrays_to_tensors((*tensors, *initial.values()))
    wanted = () if out is None else _wrap_in_tuple(out)
    kinds, outs = tuple([kind_of(x) for x in given]), tuple([kind_of(x) for x in wanted])
    mistake = _find_call_error(op.schema.name, tuple(initial), kinds, out is not None, outs)
    if mistake is not None:
        results = deferred_error(mistake, (*given, *wanted), op.returned)
        return results[0] if len(results) == 1 else tuple(results)
    by_name = dict(zip(initial, given[len(tensors) :], strict=True))
    ordered = (*given[: len(tensors)], *[by_name[name] for name in op.names])
    values = [_to_operator_argument(op, n, x) for n, x in enumerate(ordered)]
    if out is not None:
        op.out(*values, **_bind_destinations(op, out))
        return out
    found = op.overload(*values)
    if not want_arrays:
        return found
    return found.numpy() if isinstance(found, Tensor) else tuple([x.numpy() for x in found])


def arrays_to_tensors(values: Sequence[Any]) -> tuple[list[Any], bool]:
    """Values with NumPy arrays as tensors, and whether to return arrays. Dynamo traces this function."""
    arrays, plain = [isinstance(x, np.ndarray) for x in values], [isinstance(x, Tensor) for x in values]
    tensors = [torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in values]
    return tensors, True in arrays and True not in plain


def kind_of(x: Any) -> str:
    """The kind of a value, as a name that Dynamo treats as a constant."""
    return "tensor" if isinstance(x, Tensor) else type(x).__name__


@dynamo_constant
def _find_call_error(
    operator: str, names: tuple[str, ...], kinds: tuple[str, ...], with_out: bool, outs: tuple[str, ...]
) -> ErrorFields | None:
    """The error that the kinds of a call's arguments cause; None if they are valid.

    The last kinds are those of the keyword arguments `names`. The operator is a name, because Dynamo of torch 2.10
    accepts no other object as a constant.
    """
    op = operator_named(operator)
    try:
        count = len(kinds) - len(names)
        by_name = dict(zip(names, kinds[count:], strict=True))
        check_names(op.call_signature, kinds[:count], by_name)
        ordered = (*kinds[:count], *(by_name[name] for name in op.names))
        expected = (*op.call_signature.parameters, *op.call_signature.initial)
        for e, kind, (_, special, _) in zip(expected, ordered, op.kinds, strict=True):
            check_kind(e, kind, special)
        if with_out:
            _check_destinations(op, outs)
    except ArgumentError as error:
        return error_fields(error)
    return None


def check_kind(expected: ParameterSpec, kind: str, special: bool) -> None:
    """Check the kind of an argument. special: whether it is specialized. Raises ArgumentError."""
    if kind != "tensor" and (expected.dims or kind not in _list_number_kinds(expected.dtype, special)):
        raise expected.kind_error(kind)


def _list_number_kinds(dtype: DType, special: bool) -> tuple[str, ...]:
    """The kinds of Python numbers that may be passed for a number of the def."""
    return ("bool",) if dtype.is_bool else ("bool", "int") if dtype.is_integer or special else ("bool", "int", "float")


def _check_destinations(op: DispatcherOp, kinds: Sequence[str]) -> None:
    """Check that `out` has a tensor for each output. Raises ArgumentError."""
    returns = op.function.returns
    if len(kinds) != len(returns):
        raise ArgumentError(
            f"'out' of {op.function.name} has {len(kinds)} tensors", expected=f"{len(returns)}: {', '.join(returns)}"
        )
    sizes = return_sizes(op.function)
    for name, kind in zip(returns, kinds, strict=True):
        if kind != "tensor":
            e = ParameterSpec(op.function.name, f"out ({name})", op.function.tensor(name).dtype, sizes[name])
            raise e.error(f"is {with_article(kind)}", suggestion="pass a torch tensor of the output's shape")


def _to_operator_argument(op: DispatcherOp, n: int, x: Any) -> Any:
    """An argument as the operator takes it."""
    dtype, special, _ = op.kinds[n]
    if isinstance(x, Tensor):
        return x.item() if special else x
    return x if special else torch.scalar_tensor(x, dtype=TORCH_TYPES[dtype])


def _bind_destinations(op: DispatcherOp, out: Any) -> dict[str, Any]:
    return dict(zip(op.schema.destinations, _wrap_in_tuple(out), strict=True))


def _wrap_in_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)
