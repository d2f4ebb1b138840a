"""Calls with sparse operands in torch's autograd, which sees only the stored values, as plain tensors.

The gradient of a sparse operand has the pattern of the operand. Patterns bypass autograd, since integers have no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ..core.error_boundary import only_tc_errors, shorten_traceback
from ..core.errors import ArgumentError, TCError
from ..dispatch.graph_breaks import run_outside_graphs
from ..dispatch.sparse.sparse_tensor import Level, SparseTensor
from ..tc_lang.formats import Format
from .autograd import BackwardPlan, Gradients, has_tangent
from .sparse_parts import from_parts

if TYPE_CHECKING:
    from .sparse_fixed import BoundOp
    from .sparse_registration import SparseDispatcherOp

RunValues = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the results of a def from its operands by position, initial values last."""


def record_sparse_call(run: RunValues, gradients: Gradients, values: Sequence[Any]) -> list[Any]:
    """The results of a call, recorded in autograd's graph as a function of the values of sparse operands."""
    recording = _Recording(run, gradients, tuple(map(_make_pattern, values)), [])
    found = _Recorded.apply(recording, *map(_flatten_value, values))  # type: ignore[attr-defined]
    flat = found if isinstance(found, tuple) else (found,)
    return [_with_values(p, x) for p, x in zip(recording.made, flat, strict=True)]


def refuse_tangents(name: str, values: Sequence[Any]) -> None:
    """Raise ArgumentError if a value has a tangent, because there is no forward mode."""
    if has_tangent(map(_flatten_value, values)):
        raise ArgumentError(
            f"{name} has sparse operands, for which there is no forward mode",
            suggestion="use torch.autograd.grad or backward()",
        )


@run_outside_graphs("what computes an operator is no part of a graph")
def sparse_autograd_kernel(op: SparseDispatcherOp | BoundOp, *parts: Any) -> Any:
    """The result of a call of an operator on parts, recorded in autograd's graph if a value requires a gradient."""
    values = from_parts(op.arguments, parts)
    if forward_ad._current_level >= 0:
        refuse_tangents(op.function.name, values)
    wanted = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in map(_flatten_value, values)
    )
    gradients = op.op.gradients_of(op.function) if wanted else None
    if gradients is None or not gradients.possible:
        with torch._C._AutoDispatchBelowAutograd():
            return op.overload(*parts)
    if not torch._C._are_functorch_transforms_active():
        return op.hand_back(
            record_sparse_call(lambda values: _redispatch_below_autograd(op, values), gradients, values)
        )
    from torch._functorch import autograd_function

    at_one_level: Any = autograd_function.enable_single_level_autograd_function  # type: ignore[attr-defined]

    def at_level_below(values: Sequence[Any]) -> Sequence[Any]:
        with torch.enable_grad():
            return _redispatch_below_autograd(op, values)

    with at_one_level():
        return op.hand_back(record_sparse_call(at_level_below, gradients, values))


def _redispatch_below_autograd(op: SparseDispatcherOp | BoundOp, values: Sequence[Any]) -> list[Any]:
    with torch._C._AutoDispatchBelowAutograd():
        return op.call(values)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A sparse tensor without its values."""

    format: Format
    shape: tuple[int, ...]
    levels: tuple[Level, ...]


def _make_pattern(x: Any) -> _Pattern | None:
    return _Pattern(x.format, x.shape, x.levels) if isinstance(x, SparseTensor) else None


def _flatten_value(x: Any) -> Any:
    return x.values if isinstance(x, SparseTensor) else x


def _with_values(pattern: _Pattern | None, values: Tensor) -> Tensor | SparseTensor:
    return values if pattern is None else SparseTensor(pattern.format, pattern.shape, pattern.levels, values)


@dataclass(frozen=True, slots=True)
class _Recording:
    """The parts of a recorded call that autograd does not see.

    Attributes:
        run: computes the call.
        gradients: the gradients of the def.
        patterns: the patterns of the operands; None for dense ones.
        made: the patterns of the results, filled when the call runs.
    """

    run: RunValues
    gradients: Gradients
    patterns: tuple[_Pattern | None, ...]
    made: list[_Pattern | None]

    def flat_results(self, values: Sequence[Any]) -> list[Tensor]:
        """Run the call: values of the results from values of the operands."""
        results = self.run([_with_values(p, x) for p, x in zip(self.patterns, values, strict=True)])
        self.made.extend(map(_make_pattern, results))
        return list(map(_flatten_value, results))


class _Recorded(_SingleLevelFunction):
    """One recorded call, as a function of the values of its operands."""

    @staticmethod
    def forward(ctx: Any, recording: _Recording, *values: Any) -> Any:
        gradients = recording.gradients
        plan = gradients.plan(ctx.needs_input_grad[1:])
        if plan.op is None:
            raise ArgumentError(
                f"the gradient of '{gradients.function.name}' is a Python function, which takes no sparse tensors",
                suggestion="give the gradient as the text of a def, or leave it to be derived",
            )
        outputs = recording.flat_results(values)
        everything = (*values, *outputs)
        saved = [n for n in plan.saved if isinstance(everything[n], Tensor)]
        ctx.save_for_backward(*[everything[n] for n in saved])
        held = {n: _detach_tensor(everything[n]) for n in (*plan.held, *plan.saved) if n not in saved}
        ctx.call = recording, plan, saved, held
        if gradients.integers:
            ctx.mark_non_differentiable(*[outputs[n] for n in gradients.integers])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        recording, plan, saved, held = ctx.call
        known = {**held, **dict(zip(saved, map(_outlived, ctx.saved_tensors), strict=True))}
        try:
            results = _run_gradient(recording, plan, known, upstream)
        except TCError as error:
            shorten_traceback(error)
            raise
        gradients: list[Tensor | None] = []
        for place, pattern in zip(plan.outputs, recording.patterns, strict=True):
            gradient = None if place is None else results[place]
            gradients.append(gradient if gradient is None or pattern is None else _values_at(gradient, pattern))
        return (None, *gradients)


_outlived = torch._C._functorch.unwrap_if_dead
"""The tensor inside a wrapper of a torch.func transform that has ended; other tensors are returned unchanged."""


def _detach_tensor(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _run_gradient(
    recording: _Recording, plan: BackwardPlan, known: Mapping[int, Any], upstream: Sequence[Tensor]
) -> tuple[Any, ...]:
    patterns = (*recording.patterns, *recording.made)
    takes = []
    for n in plan.inputs:
        if n >= 0:
            takes.append(_with_values(patterns[n], known[n]))
        else:
            takes.append(_with_values(recording.made[-1 - n], upstream[-1 - n].contiguous()))
    assert plan.op is not None
    found = only_tc_errors(plan.op)(*takes)
    return found if isinstance(found, tuple) else (found,)


# --- gradients with the pattern of an operand ----------------------------------------------------------------------


def _values_at(x: Tensor | SparseTensor, pattern: _Pattern) -> Tensor:
    """The elements of a gradient at the stored places of an operand, in the shape of the operand's values."""
    if isinstance(x, SparseTensor) and _share_level_arrays(x.levels, pattern.levels):
        return x.values
    count = pattern.format.tail(pattern.shape)
    rows = next((len(level[1]) for level in reversed(pattern.levels) if level is not None), None)
    values = x.values if isinstance(x, SparseTensor) else x
    like = values.new_empty(count if rows is None else (rows, *count))
    places = SparseTensor(pattern.format, pattern.shape, pattern.levels, like).coordinates()
    if isinstance(x, Tensor):
        return x[tuple(places)].reshape(like.shape)
    wanted, stored = (
        _linearize_coordinates(places, pattern.shape),
        _linearize_coordinates(x.coordinates(), pattern.shape),
    )
    order = stored.argsort()
    at = torch.searchsorted(stored[order], wanted).clamp(max=max(0, len(stored) - 1))
    found = order[at] if len(stored) else at
    values = torch.cat((x.values.reshape(-1), x.values.new_zeros(1)))
    return values[torch.where(stored[found] == wanted, found, -1) if len(stored) else at - 1].reshape(like.shape)


def _share_level_arrays(a: Sequence[Level], b: Sequence[Level]) -> bool:
    """Whether the arrays of two patterns share the same memory."""
    return all(
        x is y or (x is not None and y is not None and all(map(_is_same, x, y))) for x, y in zip(a, b, strict=True)
    )


def _is_same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.data_ptr() == b.data_ptr() and len(a) == len(b))


def _linearize_coordinates(places: Tensor, shape: Sequence[int]) -> Tensor:
    """Row-major linear indices of coordinates (rank, n)."""
    number = places.new_zeros(places.shape[1])
    for row, extent in zip(places, shape, strict=True):
        number = number * extent + row
    return number
