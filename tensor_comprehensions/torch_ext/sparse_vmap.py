"""`torch.vmap` of an operator with sparse operands, over dense operands or over the values of sparse ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.errors import ArgumentError
from ..sparse.shared_sparsity import shared_patterns
from ..tc_lang.ir import Access, Function, walk_expr
from ..tc_lang.transforms.add_batch_dim import add_batch_dim
from .sparse_parts import from_parts

if TYPE_CHECKING:
    from .sparse_registration import SparseDispatcherOp

Batched = tuple[Callable[..., Any], Function, frozenset[str]]
"""The batched def as an operator and as a function, and the names of its batched results."""


def sparse_vmap_kernel(op: SparseDispatcherOp, *parts: Any) -> Any:
    """The result of a call under a vmap that batches some of `parts`."""
    from torch._functorch.autograd_function import custom_function_call_vmap_helper
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    def rule(info: Any, dimensions: Sequence[Any], *parts: Any) -> tuple[Any, Any]:
        return _run_batch(op, info.batch_size, dimensions, parts)

    interpreter: Any = retrieve_current_functorch_interpreter()
    return custom_function_call_vmap_helper(interpreter, rule, op.overload, *parts)


def _run_batch(op: SparseDispatcherOp, size: int, dimensions: Sequence[Any], parts: Sequence[Any]) -> tuple[Any, Any]:
    """The outputs of the operator for a batch, and the batch dimension of each; None: not batched."""
    dimensions = [None if isinstance(d, list) else d for d in dimensions]
    parts = [x if d is None else x.movedim(d, 0) for x, d in zip(parts, dimensions, strict=True)]
    over, values_over = _batched_operands(op, dimensions)
    if values_over or op.op.given is not None or _returns_patterns(op) or not over:
        return _one_by_one(op, size, dimensions, parts)
    values = from_parts(op.arguments, parts)
    names = tuple(a.name for a in op.arguments if a.name in over)
    made, function, results = op.batched.get(names, lambda: _make_batched(op, names))
    initial = {
        name: x.expand(size, *x.shape) if name in results and name not in over else x
        for name, x in zip(op.names, values[op.count :], strict=True)
    }
    found = made(*values[: op.count], **initial)
    places = tuple(0 if r in results else None for r in function.returns)
    return found, places if len(places) != 1 else places[0]


def _batched_operands(op: SparseDispatcherOp, dimensions: Sequence[Any]) -> tuple[set[str], set[str]]:
    """The names of the batched dense and sparse operands. Raises ArgumentError if a pattern is batched."""
    dense, sparse, n = set(), set(), 0
    for a in op.arguments:
        if a.arrays is None:
            dense |= {a.name} if dimensions[n] is not None else set()
            n += 1
            continue
        count = sum(a.arrays)
        if any(d is not None for d in dimensions[n : n + count]):
            raise ArgumentError(
                f"the stored places of '{a.name}' of {op.function.name} differ within a batch of vmap",
                suggestion="vmap over dense operands, or over the values of a sparse one",
            )
        sparse |= {a.name} if dimensions[n + count] is not None else set()
        n += count + 2
    return dense, sparse


def _returns_patterns(op: SparseDispatcherOp) -> bool:
    return any(r.arrays is not None for r in op.returns)


def _make_batched(op: SparseDispatcherOp, names: tuple[str, ...]) -> Batched:
    function, over = add_batch_dim(op.function, names)
    return op.op.make(function), function, over


def _one_by_one(op: SparseDispatcherOp, size: int, dimensions: Sequence[Any], parts: Sequence[Any]) -> tuple[Any, Any]:
    """One call for each element of the batch; sparse results have the same pattern, which depends on the operands'."""
    _check_patterns(op)
    count = max(size, 1)
    calls = []
    for n in range(count):
        one = [_select_batch_element(x, d, n, size) for x, d in zip(parts, dimensions, strict=True)]
        found = op.overload(*one)
        calls.append((found,) if isinstance(found, Tensor) else tuple(found))
    results, places = [], []
    for slices, is_pattern in zip(zip(*calls, strict=True), _pattern_places(op), strict=True):
        results.append(slices[0] if is_pattern else torch.stack(slices)[:size])
        places.append(None if is_pattern else 0)
    return (results[0], places[0]) if len(results) == 1 else (tuple(results), tuple(places))


def _select_batch_element(x: Any, dimension: int | None, n: int, size: int) -> Any:
    if dimension is None:
        return x
    return x[n] if size else x.new_zeros(x.shape[1:])


def _pattern_places(op: SparseDispatcherOp) -> list[bool]:
    """For each tensor that the operator returns, whether it is an array of a pattern."""
    return [n + 1 < r.count for r in op.returns for n in range(r.count)]


def _check_patterns(op: SparseDispatcherOp) -> None:
    """Raise ArgumentError if the pattern of a result depends on values, which differ within the batch."""
    shared = shared_patterns(op.function)
    for s in op.function.statements:
        reads = [a for e in (s.value, *s.exists) for a in walk_expr(e) if isinstance(a, Access)]
        follows_values = not any(op.function.tensor(a.tensor).is_sparse for a in reads)
        if s.target not in shared and op.function.tensor(s.target).is_sparse and follows_values:
            raise ArgumentError(
                f"the stored places of '{s.target}' of {op.function.name} follow the values of dense operands, "
                "which differ within a batch of vmap",
                suggestion="call it in a loop",
            )
