"""Calls with sparse operands in torch's autograd, which knows them by their values: plain tensors with a row per place.

The gradient by a sparse operand has a value for each place that it stores, and for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError
from ..core.single_flight import SingleFlightCache
from ..dispatch.call_steps import CallSignature
from ..dispatch.sparse.fast_call import FastCall
from ..dispatch.sparse.fixed_patterns import FixedPatterns
from ..dispatch.sparse.sparse_kernels import SparseCall, SparseKernels, hand_back
from ..dispatch.sparse.sparse_tensor import Level, SparseTensor
from ..dispatch.sparse.structure import Structure
from ..tc_lang.formats import Format
from ..tc_lang.ir import Function
from .autograd import BackwardPlan, Gradients, PythonGradient, Run, has_tangent

RunCall = Callable[[SparseCall], dict[str, Tensor | SparseTensor]]
"""Computes what a def returns for operands that it takes."""

LIMIT = 64
"""For how many formats of the operands the gradients of one def are kept."""


class SparseOp:
    """A def that is called with sparse operands, and whose calls autograd can differentiate.

    Args:
        kernels: of the def. given: its gradient, where the user gave one.
        make: makes an operator of a def without sparse tensors.
    """

    def __init__(
        self, kernels: SparseKernels, make: Callable[[Function], Run], given: str | PythonGradient | None = None
    ) -> None:
        self.kernels, self.given, self._make_dense = kernels, given, make
        self._gradients: SingleFlightCache[Hashable, Gradients] = SingleFlightCache(LIMIT)
        self.direct: FastCall | None = None
        """What takes calls like the last one that had no gradient."""

    def __call__(self, *values: Any, **initial: Any) -> Any:
        self.direct = None
        return self._run(self.kernels.run, values, initial)

    def assemble(self, *values: Any, **initial: Any) -> Callable[..., Any]:
        """The def for operands with the stored places of these, of which a call computes the values of results only."""
        with torch.no_grad():
            patterns = FixedPatterns(self.kernels, self.kernels.accept(values, initial))

        @only_tc_errors
        def fixed(*values: Any, **initial: Any) -> Any:
            return self._run(patterns.run, values, initial)

        return fixed

    def _run(self, run: RunCall, values: Sequence[Any], initial: Mapping[str, Any]) -> Any:
        call = self.kernels.accept(values, initial)
        operands = [x.values for x in call.sparse.values()]
        operands += call.dense.values()
        if has_tangent(operands):
            raise ArgumentError(
                f"{self.kernels.function.name} has sparse operands, for which there is no forward mode",
                suggestion="use torch.autograd.grad or backward()",
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            gradients = self._gradients_for(call)
            if gradients.possible:
                return hand_back(self._record(run, gradients, call), values)
        result = hand_back(run(call), values)
        self.direct = self.kernels.lane(call, values)
        return result

    def _gradients_for(self, call: SparseCall) -> Gradients:
        function = self.kernels.function_for(call)
        key = tuple((t.name, t.format) for t in function.tensors)
        return self._gradients.get(key, lambda: Gradients(function, self.given, self._make, keep=False))

    def _make(self, function: Function) -> Run:
        if not function.is_sparse:
            return self._make_dense(function)
        return SparseOp(SparseKernels(CallSignature.of(function)), self._make_dense)

    def _record(self, run_call: RunCall, gradients: Gradients, call: SparseCall) -> dict[str, Tensor | SparseTensor]:
        names = [name for _, name in gradients.keys]
        operands = [call.sparse.get(name, call.dense.get(name)) for name in names]
        run = _Recording(run_call, gradients, tuple(names), tuple(map(_pattern, operands)), call.structures, [])
        found = _Recorded.apply(run, *map(_flat, operands))  # type: ignore[attr-defined]
        flat = found if isinstance(found, tuple) else (found,)
        returns = gradients.function.returns
        return {n: _with_values(p, x) for n, p, x in zip(returns, run.made, flat, strict=True)}


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A sparse tensor without its values."""

    format: Format
    shape: tuple[int, ...]
    levels: tuple[Level, ...]


def _pattern(x: Any) -> _Pattern | None:
    return _Pattern(x.format, x.shape, x.levels) if isinstance(x, SparseTensor) else None


def _flat(x: Any) -> Any:
    return x.values if isinstance(x, SparseTensor) else x


def _with_values(pattern: _Pattern | None, values: Tensor) -> Tensor | SparseTensor:
    return values if pattern is None else SparseTensor(pattern.format, pattern.shape, pattern.levels, values)


@dataclass(frozen=True, slots=True)
class _Recording:
    """What a recorded call is beside the tensors that autograd sees.

    names: of the operands. patterns, structures: of those that are sparse.
    made: the patterns of the results, once it has run.
    """

    run_call: RunCall
    gradients: Gradients
    names: tuple[str, ...]
    patterns: tuple[_Pattern | None, ...]
    structures: Mapping[str, Structure]
    made: list[_Pattern | None]

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The flat results for flat operands."""
        sparse: dict[str, SparseTensor] = {}
        dense: dict[str, Tensor] = {}
        for name, pattern, x in zip(self.names, self.patterns, values, strict=True):
            operand = _with_values(pattern, x)
            if isinstance(operand, SparseTensor):
                sparse[name] = operand
            else:
                dense[name] = operand
        results = self.run_call(SparseCall(sparse, dense, self.structures)).values()
        self.made.extend(map(_pattern, results))
        return list(map(_flat, results))


class _Recorded(_SingleLevelFunction):
    """One call, over the values of its operands."""

    @staticmethod
    def forward(ctx: Any, run: _Recording, *values: Tensor) -> Any:
        gradients = run.gradients
        plan = gradients.plan(ctx.needs_input_grad[1:])
        if plan.op is None:
            raise ArgumentError(
                f"the gradient of '{gradients.function.name}' is a Python function, which takes no sparse tensors",
                suggestion="give the gradient as the text of a def, or leave it to be derived",
            )
        outputs = run.run(values)
        everything = (*values, *outputs)
        ctx.save_for_backward(*[everything[n] for n in plan.saved])
        ctx.call = run, plan, {n: everything[n].detach() for n in plan.held}
        if gradients.integers:
            ctx.mark_non_differentiable(*[outputs[n] for n in gradients.integers])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        run, plan, held = ctx.call
        known = {**held, **dict(zip(plan.saved, ctx.saved_tensors, strict=True))}
        results = _run_gradient(run, plan, known, upstream)
        gradients: list[Tensor | None] = []
        for place, pattern in zip(plan.outputs, run.patterns, strict=True):
            gradient = None if place is None else results[place]
            gradients.append(gradient if gradient is None or pattern is None else _values_at(gradient, pattern))
        return (None, *gradients)


def _run_gradient(
    run: _Recording, plan: BackwardPlan, known: Mapping[int, Tensor], upstream: Sequence[Tensor]
) -> tuple[Any, ...]:
    patterns = (*run.patterns, *run.made)
    takes = []
    for n in plan.inputs:
        if n >= 0:
            takes.append(_with_values(patterns[n], known[n]))
        else:
            takes.append(_with_values(run.made[-1 - n], upstream[-1 - n].contiguous()))
    assert plan.op is not None
    found = only_tc_errors(plan.op)(*takes)
    return found if isinstance(found, tuple) else (found,)


def _values_at(x: Tensor | SparseTensor, pattern: _Pattern) -> Tensor:
    """The elements of a gradient at the places of an operand, as that stores its values."""
    if isinstance(x, SparseTensor) and _are_same(x.levels, pattern.levels):
        return x.values
    count = pattern.format.tail(pattern.shape)
    rows = next((len(level[1]) for level in reversed(pattern.levels) if level is not None), None)
    values = x.values if isinstance(x, SparseTensor) else x
    like = values.new_empty(count if rows is None else (rows, *count))
    places = SparseTensor(pattern.format, pattern.shape, pattern.levels, like).coordinates()
    if isinstance(x, Tensor):
        return x[tuple(places)].reshape(like.shape)
    wanted, stored = _number(places, pattern.shape), _number(x.coordinates(), pattern.shape)
    order = stored.argsort()
    at = torch.searchsorted(stored[order], wanted).clamp(max=max(0, len(stored) - 1))
    found = order[at] if len(stored) else at
    values = torch.cat((x.values.reshape(-1), x.values.new_zeros(1)))
    return values[torch.where(stored[found] == wanted, found, -1) if len(stored) else at - 1].reshape(like.shape)


def _are_same(a: Sequence[Level], b: Sequence[Level]) -> bool:
    """Whether the arrays of two patterns are the same memory."""
    return all(
        x is y or (x is not None and y is not None and all(map(_is_same, x, y))) for x, y in zip(a, b, strict=True)
    )


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr() and len(a) == len(b))


def _number(places: Tensor, shape: Sequence[int]) -> Tensor:
    """Coordinates as one number each."""
    number = places.new_zeros(places.shape[1])
    for row, extent in zip(places, shape, strict=True):
        number = number * extent + row
    return number
