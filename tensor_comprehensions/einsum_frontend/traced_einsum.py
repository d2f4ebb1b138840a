"""Equations that torch traces: an operator that becomes that of the def as soon as torch knows the sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..api import Op
from ..core.errors import ArgumentError
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import with_article
from ..torch_ext.dynamo_calls import arrays_to_tensors, kind_of
from ..torch_ext.graph_errors import ErrorFields, deferred_error, dynamo_constant, error_fields
from ..torch_ext.schema import NAMESPACE
from .lookup import check_kinds, operator_for

_registered: SingleFlightCache[str, Any] = SingleFlightCache(1)


def traced_einsum(equation: Any, operands: Sequence[Any], out: Any) -> Any:
    """The result of an equation in the graph that Dynamo makes of this function."""
    tensors, want_array = arrays_to_tensors(operands)
    mistake = _argument_error_fields(kind_of(equation), tuple([kind_of(x) for x in tensors]), kind_of(out))
    if mistake is not None:
        return deferred_error(mistake, tensors, UNSHAPED)[0]
    if out is not None:
        torch.ops.tc.einsum.out(equation, tensors, out=out)
        return out
    result = torch.ops.tc.einsum.default(equation, tensors)
    return result.numpy() if want_array else result


UNSHAPED = ((0, torch.float32),)
"""The placeholder for a result without a shape."""


@dynamo_constant
def _argument_error_fields(equation: str, operands: tuple[str, ...], out: str) -> ErrorFields | None:
    """The mistake that the kinds of the arguments show, or None. Also registers the operators."""
    _registered.get("", _register_einsum_operators)
    try:
        check_kinds(equation, operands)
    except ArgumentError as error:
        return error_fields(error)
    if out not in ("tensor", "NoneType"):
        return error_fields(ArgumentError(f"einsum: 'out' is {with_article(out)}", suggestion="pass a torch tensor"))
    return None


def _register_einsum_operators() -> Any:
    new: Callable[..., Any] = torch.library.Library
    library = new(NAMESPACE, "FRAGMENT")
    library.define("einsum(str equation, Tensor[] operands) -> Tensor")
    library.define("einsum.out(str equation, Tensor[] operands, *, Tensor(a!) out) -> ()")
    for key in ("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"):
        library.impl("einsum", _run_einsum, key)
        library.impl("einsum.out", _run_out, key)
    return library


def _run_einsum(equation: str, operands: list[Tensor]) -> Any:
    """The call of the operator; within a graph that is made, mistakes wait until it runs."""
    found = _find_operator(equation, operands)
    return found(*operands) if isinstance(found, Op) else deferred_error(found, operands, UNSHAPED)[0]


def _run_out(equation: str, operands: list[Tensor], *, out: Tensor) -> None:
    found = _find_operator(equation, operands)
    if isinstance(found, Op):
        found(*operands, out=out)
    else:
        deferred_error(found, operands, ())


def _find_operator(equation: str, operands: list[Tensor]) -> Op | ErrorFields:
    """The operator, or the mistake in the equation."""
    try:
        return operator_for(equation, *operands)
    except ArgumentError as error:
        if torch._guards.TracingContext.try_get() is None:
            raise
        return error_fields(error)
