"""`einsum`: find the operator for an equation and its operands, and call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, strided

from ..api import Op
from ..core.error_boundary import only_tc_errors, shorten_traceback
from ..core.errors import TCError
from ..core.single_flight import SingleFlightCache
from ..dispatch.graph_breaks import run_outside_graphs
from ..dispatch.kernel_table import may_be_sparse
from .first_calls import are_first, note_first_calls
from .lookup import LIMIT, check_kinds, check_sparse_kinds, kinds_of, operator_for
from .traced_einsum import traced_einsum

_is_traced = torch.compiler.is_dynamo_compiling
_by_shapes: SingleFlightCache[tuple[Any, ...], Op] = SingleFlightCache(LIMIT)


def einsum(equation: str, *operands: Any, out: Any = None, format: str | None = None) -> Any:
    """Compute the sum of products that `equation` describes, as `torch.einsum`: `einsum("bij,bjk->bik", a, b)`.

    Every subscript is a letter and names a dimension; subscripts that the output lacks are summed over. Without `->`,
    the output has the subscripts that occur once, in alphabetical order. A subscript that is repeated in one operand
    takes the diagonal. `...` stands for dimensions that are matched from the right; dimensions of size 1 are broadcast.
    Several operands are contracted in pairs, in the order with the fewest multiplications. The result has the type of
    the operands, or the wider type if they differ; integers wrap. A subscript of a single operand is summed first; as
    in `torch.sum`, integers and bools then accumulate in int64. Torch computes the first
    products of floats of an equation, until their work pays for a compilation.

    Args:
        equation: `"ij,jk->ik"`; spaces are ignored.
        operands: torch tensors, NumPy arrays or sparse tensors, one for each operand of the equation.
        out: a tensor to write to instead of fresh memory.
        format: the format of the result, such as "csr"; by default dense, even if operands are sparse.

    Raises:
        ArgumentError: the equation is malformed or does not fit the operands, or the result cannot have this format.
    """
    if _is_traced() and (format is not None or any(may_be_sparse(x) for x in operands)):
        from ..torch_ext.sparse_dynamo import is_traceable
        from .traced_sparse_einsum import traced_sparse_einsum

        if is_traceable(operands):
            return traced_sparse_einsum(equation, operands, out, format)
        return _outside_graphs(equation, operands, out, format)
    if _is_traced():
        return traced_einsum(equation, operands, out)
    if format is not None:
        return _of_sparse(equation, operands, out, format)
    for x in operands:
        if (type(x) is not Tensor or x.layout is not strided) and may_be_sparse(x):
            return _of_sparse(equation, operands, out, format)
    try:
        try:
            if out is None and are_first(equation, operands):
                return torch.einsum(equation, *operands).contiguous()
            key = (equation, *[(x.shape, x.dtype) for x in operands])
            operator = _by_shapes.get(key, lambda: _make_operator(equation, operands))
        except (
            AttributeError,
            IndexError,
            RuntimeError,
            TypeError,
        ):  # no operands, no tensors, or sizes that are symbols without a hash
            check_kinds(type(equation).__name__, kinds_of(operands))
            operator = operator_for(equation, *operands)
        return operator(*operands) if out is None else operator(*operands, out=out)
    except TCError as error:
        shorten_traceback(error)
        raise


def _make_operator(equation: str, operands: Sequence[Tensor]) -> Op:
    """The operator, which knows the sizes of the calls before it."""
    operator = operator_for(equation, *operands)
    note_first_calls(equation, operands, operator._kernels.dynamic)
    return operator


@run_outside_graphs("Dynamo traces no sparse tensors of torch or SciPy: pass tc.as_sparse(x) into the graph")
def _outside_graphs(equation: str, operands: Sequence[Any], out: Any, format: str | None) -> Any:
    return _of_sparse(equation, operands, out, format)


@only_tc_errors
def _of_sparse(equation: str, operands: Sequence[Any], out: Any, format: str | None) -> Any:
    """An equation with sparse operands, or a result that has a format."""
    check_sparse_kinds(type(format).__name__, type(out).__name__)
    return operator_for(equation, *operands, format=format)(*operands)
