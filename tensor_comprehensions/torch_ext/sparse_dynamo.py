"""Calls with sparse operands that Dynamo traces: the graph calls an operator on the parts of the operands.

Dynamo does not support torch's sparse tensors. A `SparseTensor` is a plain object for it, with tensors as fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ..core.errors import ArgumentError
from ..dispatch.arguments import TORCH_TYPES, ParameterSpec
from ..dispatch.call_steps import check_names
from ..dispatch.kernel_table import may_be_sparse
from ..dispatch.sparse.sparse_tensor import SparseTensor, count_arrays
from ..tc_lang.formats import Format
from .dynamo_calls import arrays_to_tensors, check_kind, kind_of
from .graph_errors import ErrorFields, deferred_error, dynamo_constant, error_fields
from .sparse_fixed import FixedFunction, fixed_operator
from .sparse_parts import SparseArgument, to_levels

if TYPE_CHECKING:
    from .sparse_op import SparseOp


class SparseCallee(Protocol):
    """A callable object that makes its `SparseOp` on demand."""

    _sparse: SparseOp | None

    @property
    def sparse_op(self) -> SparseOp: ...

    def sparse_out_error(self) -> ArgumentError: ...


SPARSE = "sparse"
"""The kind of a sparse operand, which is passed as its parts."""


def is_traceable(values: Sequence[Any]) -> bool:
    """Whether Dynamo can trace a call: no operand is a sparse tensor of another library."""
    return not any(may_be_sparse(x) and not isinstance(x, SparseTensor) for x in values)


def call_sparse_in_graph(op: SparseCallee, tensors: Sequence[Any], out: Any, initial: Mapping[str, Any]) -> Any:
    """The result of a call that Dynamo traces: it inlines this function and puts the operator into the graph."""
    return _call_operator(op, None, tensors, out, initial)


def call_fixed_in_graph(fixed: FixedFunction, tensors: Sequence[Any], initial: Mapping[str, Any]) -> Any:
    """As `call_sparse_in_graph`, for a function that `assemble` returned."""
    return _call_operator(fixed, fixed, tensors, None, initial)


def _call_operator(
    op: SparseCallee | FixedFunction,
    fixed: FixedFunction | None,
    tensors: Sequence[Any],
    out: Any,
    initial: Mapping[str, Any],
) -> Any:
    plain, _ = arrays_to_tensors([_without_levels(x) for x in (*tensors, *initial.values())])
    stored = [x for x in plain if isinstance(x, SparseTensor)]
    kinds = tuple([SPARSE if isinstance(x, SparseTensor) else kind_of(x) for x in plain])
    forms = tuple([_count_level_arrays(x) for x in stored])
    name, mistake = _resolve_operator(
        op, tuple(initial), len(tensors), kinds, forms, out is not None, *[x.format for x in stored]
    )
    sparse: Any = op._sparse
    if mistake is not None:
        return _place_holders(sparse, mistake, plain)
    operator = getattr(sparse.in_graphs, name)
    by_name = dict(zip(initial, plain[len(tensors) :], strict=True))
    ordered = [*plain[: len(tensors)], *[by_name[n] for n in operator.names]]
    values = [_convert_operand(a, x) for a, x in zip(operator.arguments, ordered, strict=True)]
    if fixed is None:
        results = operator.call(values)
    else:
        results = operator.call(values, fixed.level_arrays(operator.returns), fixed.number)
    return results[0] if len(results) == 1 else tuple(results)


def _without_levels(x: Any) -> Any:
    """A `SparseTensor` of an all-dense format as a torch tensor; other values unchanged."""
    return x.as_strided() if isinstance(x, SparseTensor) and sum(_count_level_arrays(x)) == 0 else x


def _count_level_arrays(x: SparseTensor) -> tuple[int, ...]:
    """How many arrays each level of a tensor has."""
    return tuple([0 if level is None else 1 if level[0] is None else 2 for level in x.levels])


def _convert_operand(argument: SparseArgument, x: Any) -> Any:
    if argument.is_number:
        return x.item() if isinstance(x, Tensor) else x
    if isinstance(x, (Tensor, SparseTensor)):
        return x
    return torch.scalar_tensor(x, dtype=TORCH_TYPES[argument.dtype])


@dynamo_constant
def _resolve_operator(
    op: SparseCallee | FixedFunction,
    names: tuple[str, ...],
    count: int,
    kinds: tuple[str, ...],
    forms: tuple[tuple[int, ...], ...],
    with_out: bool,
    *formats: Format,
) -> tuple[str, ErrorFields | None]:
    """The name of the operator for a call, or the error in the call. The last operands are those of `names`."""
    sparse = op.sparse_op
    try:
        if with_out and not isinstance(op, FixedFunction):
            raise op.sparse_out_error()
        check_names(sparse.kernels.call_signature, kinds[:count], dict(zip(names, kinds[count:], strict=True)))
        operator = sparse.operator(_formats_by_name(sparse, names, kinds, forms, formats))
    except ArgumentError as error:
        return "", error_fields(error)
    in_graph = fixed_operator(operator) if isinstance(op, FixedFunction) else operator
    setattr(sparse.in_graphs, in_graph.signature.name, in_graph)
    return in_graph.signature.name, None


def _formats_by_name(
    sparse: SparseOp,
    names: Sequence[str],
    kinds: Sequence[str],
    forms: Sequence[tuple[int, ...]],
    formats: Sequence[Format],
) -> dict[str, Format]:
    """The formats of the sparse operands, by name. Raises ArgumentError for an operand that the def does not take."""
    kernels, call_signature = sparse.kernels, sparse.kernels.call_signature
    specs: dict[str, ParameterSpec] = {p.name: p for p in (*call_signature.parameters, *call_signature.initial)}
    order = (*(p.name for p in call_signature.parameters), *names)
    stored = iter(zip(formats, forms, strict=True))
    found: dict[str, Format] = {}
    for name, kind in zip(order, kinds, strict=True):
        symbol = kernels.function.tensor(name)
        if kind != SPARSE:
            if symbol.is_sparse:
                raise kernels.dense_error(specs[name])
            check_kind(specs[name], kind, symbol.is_compile_time)
            continue
        format, form = next(stored)
        kernels.check_format(specs[name], format)
        if form != count_arrays(format):
            raise specs[name].error(f"has other arrays than the format '{format}'", found=str(form))
        found[name] = format
    return {n: found[n] for n in specs if n in found}


def _place_holders(sparse: SparseOp, mistake: ErrorFields, given: Sequence[Any]) -> Any:
    """Placeholders for the results of an invalid call; the graph raises the error when it runs."""
    near = [x.values if isinstance(x, SparseTensor) else x for x in given]
    kinds = [(rank if arrays is None else 1, dtype) for rank, dtype, _, arrays in sparse.returned]
    found = deferred_error(mistake, near, kinds)
    results: list[Any] = []
    for x, (rank, _, format, arrays) in zip(found, sparse.returned, strict=True):
        if arrays is None or format is None:
            results.append(x)
        else:
            levels = to_levels(arrays, [x.long() for _ in range(sum(arrays))])
            results.append(SparseTensor(format, (1,) * rank, levels, x))
    return results[0] if len(results) == 1 else tuple(results)
