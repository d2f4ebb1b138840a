"""Calls of functions that `assemble` returned, eager and in graphs.

In a graph, an operator takes the levels of the results as arguments and returns only values. Its last argument is the
number of the function, which checks the patterns of operands when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import TORCH_TYPES
from ..dispatch.graph_breaks import run_outside_graphs
from ..dispatch.sparse.caller_kind import check_results_exist, results_in_caller_kind
from ..dispatch.sparse.fixed_patterns import FixedPatterns
from ..dispatch.sparse.sparse_tensor import SparseTensor, flat_values
from ..tc_lang.ir import Function
from .autograd import run_without_gradients
from .dynamo_calls import needs_dispatcher
from .registration import FOREVER, Overload
from .sparse_autograd import sparse_autograd_kernel
from .sparse_parts import (
    SparseArgument,
    SparseReturn,
    arrays_of,
    evaluate_size,
    fixed_signature,
    from_parts,
    to_levels,
    to_parts,
)
from .sparse_registration import SparseDispatcherOp, register_parts, without_autocast

if TYPE_CHECKING:
    from .sparse_op import SparseOp

_is_traced = torch.compiler.is_dynamo_compiling
_numbers = count()
_functions: WeakValueDictionary[int, FixedFunction] = WeakValueDictionary()
"""The functions that graphs may call, by number."""


class FixedFunction:
    """The function that `assemble` returns: operands and results have fixed patterns.

    It is immutable, so a copy is the function itself. It holds kernels of one process, so it cannot be pickled.

    Attributes:
        levels: the levels of the sparse results, by name.
        number: the number by which graphs call it.
    """

    def __init__(self, op: SparseOp, patterns: FixedPatterns) -> None:
        self.sparse_op = self._sparse = op
        self.patterns, self.levels, self.number = patterns, patterns.levels, next(_numbers)
        _functions[self.number] = self

    def __copy__(self) -> FixedFunction:
        return self

    def __deepcopy__(self, memo: object) -> FixedFunction:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            "an assembled function holds kernels of this process", suggestion="pickle the operator, and assemble there"
        )

    def __call__(self, *values: Any, **initial: Any) -> Any:
        if _is_traced():
            from .sparse_dynamo import call_fixed_in_graph, is_traceable

            if is_traceable((*values, *initial.values())):
                return call_fixed_in_graph(self, values, initial)
        return self._call_outside_graphs(values, initial)

    @run_outside_graphs("Dynamo traces no sparse tensors of torch or SciPy: pass tc.as_sparse(x) into the graph")
    @only_tc_errors
    def _call_outside_graphs(self, values: Sequence[Any], initial: dict[str, Any]) -> Any:
        if needs_dispatcher(flat_values((*values, *initial.values()))):
            return self._dispatch(values, initial)
        return self.sparse_op.call_eagerly(self.patterns.run, values, initial)

    def _dispatch(self, values: Sequence[Any], initial: dict[str, Any]) -> Any:
        """The result of a call through the dispatcher, because torch traces, transforms, profiles or casts it."""
        whole, operands = self.sparse_op.operator_for_call(values, initial)
        check_results_exist(self.sparse_op.kernels.function, values)
        results = fixed_operator(whole).call(operands, self.level_arrays(whole.returns), self.number)
        return results_in_caller_kind(dict(zip(whole.function.returns, results, strict=True)), values)

    def level_arrays(self, returns: Sequence[SparseReturn]) -> list[Tensor]:
        """All level arrays of results that do not share the pattern of an operand."""
        return [x for r in returns if _has_own_levels(r) for x in arrays_of(self.levels[r.name])]


def _has_own_levels(r: SparseReturn) -> bool:
    return r.arrays is not None and r.source < 0


class FixedDispatcherOp:
    """The operator of a def for results with given patterns.

    Attributes:
        whole: the operator that also computes the patterns.
        signature: its signature: the arguments of `whole`, the levels of results, the number of the function.
        names, arguments, returns: as in `whole`.
    """

    overload: Overload

    def __init__(self, whole: SparseDispatcherOp) -> None:
        self.whole, self.signature = whole, fixed_signature(whole.signature)
        self.names, self.arguments, self.returns = whole.names, whole.arguments, whole.returns
        self._num_levels = sum(sum(r.arrays or ()) for r in self.returns if _has_own_levels(r))

    def call(self, values: Sequence[Any], levels: Sequence[Tensor], number: int) -> list[Any]:
        """The results of the function `number`, for operands by position and given levels of results."""
        return self.join(values, levels, self.overload(*to_parts(self.arguments, values), *levels, number))

    def join(self, values: Sequence[Any], levels: Sequence[Tensor], found: Any) -> list[Any]:
        """Build the results from the operands, the levels of results and the outputs of the operator."""
        results: list[Any] = []
        n = 0
        for r, x in zip(self.returns, found if isinstance(found, (tuple, list)) else (found,), strict=True):
            if r.arrays is None or r.format is None:
                results.append(x)
            elif r.source >= 0:
                results.append(values[r.source].with_values(x))
            else:
                shape = tuple([evaluate_size(p, values) for p in r.extents])
                last = n + sum(r.arrays)
                results.append(SparseTensor(r.format, shape, to_levels(r.arrays, levels[n:last]), x))
                n = last
        return results

    def _split(self, parts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Tensor], int]:
        """Split arguments into the parts of the operands, the levels of results, and the number."""
        first = len(parts) - 1 - self._num_levels
        return parts[:first], parts[first:-1], parts[-1]

    def run(self, *parts: Any) -> Any:
        """The kernel for real tensors. Raises ArgumentError or RangeError."""
        found = run_without_gradients(self._compute, parts)
        return found[0] if len(found) == 1 else tuple(found)

    @only_tc_errors
    def _compute(self, parts: Sequence[Any]) -> list[Tensor]:
        operands, _, number = self._split(parts)
        fixed, whole = _functions.get(number), self.whole
        if fixed is None:
            raise ArgumentError(
                f"a graph calls a function that {whole.function.name}.assemble returned, which no longer exists",
                suggestion="keep the function as long as the graph",
            )
        values = from_parts(self.arguments, operands)
        initial = dict(zip(self.names, values[whole.count :], strict=True))
        results = fixed.patterns.run(fixed.sparse_op.kernels.accept(values[: whole.count], initial)).values()
        return [x.values if isinstance(x, SparseTensor) else x for x in results]

    def fake_kernel(self, *parts: Any) -> Any:
        """The kernel for fake and meta tensors."""
        operands, levels, _ = self._split(parts)
        values, found, n = from_parts(self.arguments, operands), list[Tensor](), 0
        device = next((x.device for x in values if isinstance(x, (Tensor, SparseTensor))), torch.device("cpu"))
        for r in self.returns:
            shape = [evaluate_size(p, values) for p in r.extents]
            if r.source >= 0:
                shape = list(values[r.source].values.shape)
            elif r.arrays is not None and r.format is not None:
                last = n + sum(r.arrays)
                positions = 1
                for level, extent in zip(to_levels(r.arrays, levels[n:last]), r.format.extents(shape), strict=False):
                    positions = positions * extent if level is None else level[1].shape[0]
                shape, n = [positions, *r.format.tail(shape)], last
            found.append(torch.empty(shape, dtype=TORCH_TYPES[r.dtype], device=device))
        return found[0] if len(found) == 1 else tuple(found)

    def autograd_kernel(self, *parts: Any) -> Any:
        """The result of a call, recorded in autograd's graph if a value requires a gradient."""
        operands, levels, number = self._split(parts)
        return sparse_autograd_kernel(BoundOp(self, tuple(levels), number), *operands)

    def autocast_kernel(self, *parts: Any) -> Any:
        """The result of a call under autocast, which casts arguments to the declared types."""
        operands, levels, number = self._split(parts)
        return without_autocast(self.arguments, operands, lambda cast: self.overload(*cast, *levels, number))

    def vmap_kernel(self, *parts: Any) -> Any:
        """Raise ArgumentError, because assembled functions do not support vmap."""
        raise ArgumentError(
            f"a function that {self.whole.function.name}.assemble returned takes no batch of vmap",
            suggestion=f"vmap over {self.whole.function.name} itself",
        )


@dataclass(frozen=True)
class BoundOp:
    """A `FixedDispatcherOp` with the levels and the number bound, so that autograd calls it with operands alone."""

    fixed: FixedDispatcherOp
    levels: tuple[Tensor, ...]
    number: int

    @property
    def arguments(self) -> tuple[SparseArgument, ...]:
        return self.fixed.arguments

    @property
    def function(self) -> Function:
        return self.fixed.whole.function

    @property
    def op(self) -> SparseOp:
        return self.fixed.whole.op

    def overload(self, *parts: Any) -> Any:
        return self.fixed.overload(*parts, *self.levels, self.number)

    def call(self, values: Sequence[Any]) -> list[Any]:
        return self.fixed.call(values, self.levels, self.number)

    def hand_back(self, results: Sequence[Any]) -> Any:
        values = [x.values if isinstance(x, SparseTensor) else x for x in results]
        return values[0] if len(values) == 1 else tuple(values)


_operators: SingleFlightCache[str, FixedDispatcherOp] = SingleFlightCache(FOREVER)
_begun: dict[str, FixedDispatcherOp] = {}


def fixed_operator(whole: SparseDispatcherOp) -> FixedDispatcherOp:
    """The operator for results with given patterns. whole: the operator that also computes the patterns."""

    def make() -> FixedDispatcherOp:
        left = _begun.get(whole.signature.name)
        made = left or _begun.setdefault(whole.signature.name, FixedDispatcherOp(whole))
        register_parts(made, again=left is not None)
        return made

    return _operators.get(whole.signature.name, make)
