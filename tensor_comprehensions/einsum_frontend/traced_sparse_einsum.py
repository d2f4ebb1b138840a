"""Equations with sparse operands that torch traces: the call of their def is in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ArgumentError
from ..dispatch.sparse.sparse_tensor import SparseTensor
from ..torch_ext.dynamo_calls import arrays_to_tensors, kind_of
from ..torch_ext.graph_errors import ErrorFields, deferred_error, dynamo_constant, error_fields
from .lookup import UNKNOWN, check_kinds, check_sparse_kinds, operator_of_types
from .traced_einsum import UNSHAPED

_IN_GRAPHS = SimpleNamespace()
"""The operators that graphs call, by their names."""
UNKNOWN_DENSITY = 2.0**-7
"""The part of a sparse operand that is taken to be stored: a graph is for all patterns."""


def traced_sparse_einsum(equation: Any, operands: Sequence[Any], out: Any, format: Any) -> Any:
    """The result of an equation with sparse operands, or of a sparse one: the call of a def is in the graph."""
    tensors, _ = arrays_to_tensors(operands)
    shaped = [x for x in tensors if isinstance(x, (Tensor, SparseTensor))]
    shapes = tuple([tuple([1 if n == 1 else UNKNOWN for n in x.shape]) for x in shaped])
    stored = tuple([isinstance(x, SparseTensor) for x in tensors])
    kinds = tuple(["tensor" if s else kind_of(x) for x, s in zip(tensors, stored, strict=True)])
    given = (kind_of(equation), kind_of(format), kind_of(out))
    name, mistake = _find_operator_name(equation, format, given, kinds, stored, shapes, *[x.dtype for x in shaped])
    if mistake is not None:
        near = [x.values if isinstance(x, SparseTensor) else x for x in tensors]
        return deferred_error(mistake, near, UNSHAPED)[0]
    return getattr(_IN_GRAPHS, name)(*tensors)


@dynamo_constant
def _find_operator_name(
    equation: Any,
    format: Any,
    given: tuple[str, ...],
    kinds: tuple[str, ...],
    stored: tuple[bool, ...],
    shapes: tuple[tuple[int, ...], ...],
    *dtypes: torch.dtype,
) -> tuple[str, ErrorFields | None]:
    """The name of the operator for an equation, or the mistake in it. Sizes other than 1 do not matter."""
    try:
        check_kinds(given[0], kinds)
        check_sparse_kinds(given[1], given[2])
        densities = [UNKNOWN_DENSITY if s else 1.0 for s in stored]
        operator = operator_of_types(equation, dtypes, shapes, densities, format)
    except ArgumentError as error:
        return "", error_fields(error)
    name = f"einsum_{len(vars(_IN_GRAPHS))}"
    known = next((n for n, op in vars(_IN_GRAPHS).items() if op is operator), None)
    if known is None:
        setattr(_IN_GRAPHS, name, operator)
    return known or name, None
