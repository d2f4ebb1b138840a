"""Calls of defs with sparse operands: eager, recorded by autograd, and through torch's dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..core.lazy_import import lazy_module
from ..core.single_flight import SingleFlightCache
from ..dispatch.arguments import TORCH_TYPES
from ..dispatch.call_steps import CallSignature, check_names
from ..dispatch.sparse.caller_kind import check_results_exist, results_in_caller_kind
from ..dispatch.sparse.fast_call import MOST_PATTERNS, FastCalls, drop_oldest
from ..dispatch.sparse.sparse_kernels import SparseKernels
from ..dispatch.sparse.sparse_run import SparseCall
from ..dispatch.sparse.sparse_tensor import SparseTensor, flat_values, storage_of
from ..tc_lang.formats import Format
from ..tc_lang.ir import Function
from .autograd import Gradients, PythonGradient, Run, has_tangent
from .dynamo_calls import needs_dispatcher

if TYPE_CHECKING:
    from ..dispatch.sparse import fixed_patterns
    from . import sparse_autograd, sparse_fixed, sparse_registration
    from .sparse_fixed import FixedFunction
    from .sparse_registration import SparseDispatcherOp
else:
    fixed_patterns, sparse_autograd, sparse_fixed, sparse_registration = (
        lazy_module("dispatch.sparse.fixed_patterns"),
        lazy_module("torch_ext.sparse_autograd"),
        lazy_module("torch_ext.sparse_fixed"),
        lazy_module("torch_ext.sparse_registration"),
    )

RunCall = Callable[[SparseCall], dict[str, Any]]
"""Computes the results of a def for checked operands."""

LIMIT = 64
"""Most combinations of operand formats for which the gradients and operators of one def are cached."""


class SparseOp:
    """A def that is called with sparse operands, and whose calls autograd can differentiate.

    Args:
        kernels: the kernels of the def.
        make_dense: makes an operator of a def without sparse tensors.
        given: the gradient that the user gave; None derives it.
    """

    def __init__(
        self, kernels: SparseKernels, make_dense: Callable[[Function], Run], given: str | PythonGradient | None = None
    ) -> None:
        self.kernels, self.given, self.make_dense = kernels, given, make_dense
        self._gradients: SingleFlightCache[Hashable, Gradients] = SingleFlightCache(LIMIT)
        self._operators: SingleFlightCache[Hashable, SparseDispatcherOp] = SingleFlightCache(LIMIT)
        self.direct = FastCalls()
        """The fast paths for calls with the patterns of at least two earlier calls, and without gradients."""
        self._seen: dict[Hashable, int] = {}
        """How many calls had these patterns and shapes: 1, or 2 for more."""
        self.in_graphs = SimpleNamespace()
        """The operators that Dynamo's graphs call, by name."""
        results = (kernels.function.tensor(r) for r in kernels.function.returns)
        self.returned = tuple((t.rank, TORCH_TYPES[t.dtype], *storage_of(t)) for t in results)
        """(number of dimensions, type, format, number of arrays of each level) of each result."""

    @staticmethod
    def of(function: Function, make_dense: Callable[[Function], Run], given: Any = None) -> SparseOp:
        """The `SparseOp` of a def whose formats are declared."""
        return SparseOp(SparseKernels(CallSignature.of(function)), make_dense, given)

    def __call__(self, *values: Any, **initial: Any) -> Any:
        if needs_dispatcher(flat_values((*values, *initial.values()))):
            return self._dispatch(values, initial)
        return self.call_eagerly(self.kernels.run, values, initial)

    def assemble(self, *values: Any, **initial: Any) -> FixedFunction:
        """The def for operands with the patterns of these: a function whose calls compute only values of results."""
        with torch.no_grad():
            patterns = fixed_patterns.FixedPatterns(self.kernels, self.kernels.accept(values, initial))
        return sparse_fixed.FixedFunction(self, patterns)

    # --- operators of torch --------------------------------------------------------------------------------------

    def operator(self, formats: Mapping[str, Format]) -> SparseDispatcherOp:
        """The operator for operands of these formats. Raises ArgumentError if it would have too many arguments."""

        def make() -> SparseDispatcherOp:
            return sparse_registration.sparse_operator(self, self.kernels.function_for(formats))

        return self._operators.get(tuple(formats.items()), make)

    def _dispatch(self, values: Sequence[Any], initial: Mapping[str, Any]) -> Any:
        """The result of a call through the dispatcher, because torch traces, transforms, profiles or casts it."""
        operator, operands = self.operator_for_call(values, initial)
        check_results_exist(self.kernels.function, values)
        results = operator.call(operands)
        return results_in_caller_kind(dict(zip(self.kernels.function.returns, results, strict=True)), values)

    def operator_for_call(
        self, values: Sequence[Any], initial: Mapping[str, Any]
    ) -> tuple[SparseDispatcherOp, list[Any]]:
        """The operator for a call, and the operands by position, initial values last. Raises ArgumentError."""
        check_names(self.kernels.call_signature, values, initial)
        names = [p.name for p in self.kernels.call_signature.initial]
        operands = self.kernels.stored_operands((*values, *(initial[n] for n in names)))
        formats = {n: x.format for n, x in operands.items() if isinstance(x, SparseTensor)}
        return self.operator(formats), list(operands.values())

    # --- eager calls ---------------------------------------------------------------------------------------------

    def call_eagerly(self, run: RunCall, values: Sequence[Any], initial: Mapping[str, Any]) -> Any:
        """The results of `run` for a call, recorded in autograd's graph if an operand requires a gradient."""
        call = self.kernels.accept(values, initial)
        check_results_exist(self.kernels.function, values)
        operands = [x.values for x in call.sparse.values()]
        operands += call.dense.values()
        if has_tangent(operands):
            sparse_autograd.refuse_tangents(self.kernels.function.name, operands)
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            gradients = self.gradients_of(self.kernels.function_for_call(call))
            if gradients.possible:
                return results_in_caller_kind(self._record(run, gradients, call), values)
        results = run(call)
        if run == self.kernels.run:
            self._add_fast_call(call, values, results)
        return results_in_caller_kind(results, values)

    def _add_fast_call(self, call: SparseCall, values: Sequence[Any], results: Mapping[str, Any]) -> None:
        """Make a fast path for the second call with the same patterns; for the first, it might never be used."""
        kinds = (x.shape if isinstance(x, torch.Tensor) and x.layout is torch.strided else type(x) for x in values)
        key = (*map(weakref.ref, call.structures.values()), *kinds)
        times = self._seen.get(key, 0)
        if times == 1 and (fast := self.kernels.make_fast_call(call, values, results)):
            self.direct.add(fast, values)
        if not times:
            drop_oldest(self._seen, MOST_PATTERNS)
        self._seen[key] = min(2, times + 1)

    def gradients_of(self, function: Function) -> Gradients:
        """The gradients of the def with the formats of a call."""
        key = tuple((t.name, t.format) for t in function.tensors)
        return self._gradients.get(key, lambda: Gradients(function, self.given, self.make, keep=False))

    def make(self, function: Function) -> Run:
        """Make an operator of a def that belongs to this one, such as a gradient."""
        return SparseOp.of(function, self.make_dense) if function.is_sparse else self.make_dense(function)

    @staticmethod
    def _record(run: RunCall, gradients: Gradients, call: SparseCall) -> dict[str, Any]:
        names = [name for _, name in gradients.keys]
        operands = [call.sparse[name] if name in call.sparse else call.dense[name] for name in names]

        def by_position(values: Sequence[Any]) -> Sequence[Any]:
            named = dict(zip(names, values, strict=True))
            sparse = {n: x for n, x in named.items() if n in call.sparse}
            dense = {n: x for n, x in named.items() if n in call.dense}
            return list(run(replace(call, sparse=sparse, dense=dense)).values())

        results = sparse_autograd.record_sparse_call(by_position, gradients, operands)
        return dict(zip(gradients.function.returns, results, strict=True))
