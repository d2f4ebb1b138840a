"""The reference evaluator: the meaning of a bound function, computed with NumPy in the simplest way.

It is the oracle of every test. Values have exactly the type that the language gives them. Reductions of floats
accumulate in float64 and round once, so they are more accurate than those of any kernel. bfloat16 tensors are float32
arrays whose values are already rounded to bfloat16, because NumPy has no such type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ...core.dtypes import DType
from ...core.errors import ArgumentError, InternalError, RangeError
from ..binding.bind import are_offset_indices, neutral_element
from ..ir import Access, BoundFunction, BoundIndex, BoundsCheck, BoundStatement, Role, Tensor
from .numpy_expression import Array, NumpyExpressionEvaluator, combine_arrays, convert_array, index_grid, numpy_dtype

CHUNK = 1 << 21
"""How many points of a statement's index grid are evaluated at a time."""


def evaluate_def(bound: BoundFunction, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The returns of a function, by name.

    arrays: every input and the initial value of every in/out tensor, by name; they are not modified.

    Raises RangeError if a data-dependent subscript leaves its tensor, ArgumentError for a wrong array.
    """
    memory = {t.name: _initial_array(bound, t, arrays) for t in bound.tensors}
    with np.errstate(all="ignore"):
        for s in bound.statements:
            memory[s.target] = _run_statement(s, bound, memory)
    return {name: memory[name] for name in bound.returns}


def _initial_array(bound: BoundFunction, tensor: Tensor, arrays: Mapping[str, Array]) -> Array:
    dtype = numpy_dtype(tensor.dtype)
    if tensor.role in (Role.OUTPUT, Role.TEMPORARY):
        return np.zeros(tensor.shape, dtype)
    if tensor.name not in arrays:
        raise ArgumentError(f"'{bound.name}' needs a value of the {tensor.role.value} tensor '{tensor.name}'")
    array = np.asarray(arrays[tensor.name])
    for what, expected, found in (("shape", tensor.shape, array.shape), ("type", dtype, array.dtype)):
        if expected != found:
            raise ArgumentError(f"'{tensor.name}' has another {what}", expected=str(expected), found=str(found))
    return array


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads elements for the evaluator, and checks that they are in bounds."""

    memory: Mapping[str, Array]

    def __call__(self, access: Access, subscripts: Sequence[Array], where: Array) -> Array:
        array = self.memory[access.tensor]
        if not subscripts:
            return array[()]
        legal = []
        for x, extent in zip(subscripts, array.shape, strict=True):
            bad = (x < 0) | (x >= extent)
            if np.any(bad if where is None else bad & where):
                raise InternalError(f"an access of {access.tensor} is out of bounds and was not checked")
            legal.append(np.where(bad, 0, x) if extent else np.zeros_like(x))
        if not array.size:
            return np.zeros(np.broadcast_shapes(*(x.shape for x in legal)), array.dtype)
        return array[tuple(legal)]


def _split_into_chunks(indices: Sequence[BoundIndex]) -> Iterator[dict[str, tuple[int, int]]]:
    """Split the grid of `indices` into boxes of at most about CHUNK points, with inner indices whole if they fit."""
    if any(i.extent == 0 for i in indices):
        return
    if not indices:
        yield {}
        return
    first, rest = indices[0], indices[1:]
    inner = prod(i.extent for i in rest)
    if inner > CHUNK:
        for value in range(first.lower, first.upper):
            for box in _split_into_chunks(rest):
                yield {first.name: (value, value + 1), **box}
        return
    step = max(1, CHUNK // inner)
    for lower in range(first.lower, first.upper, step):
        yield {first.name: (lower, min(first.upper, lower + step)), **{i.name: (i.lower, i.upper) for i in rest}}


def _run_statement(s: BoundStatement, bound: BoundFunction, memory: Mapping[str, Array]) -> Array:
    """The target after the statement. All reads are from `memory`, which does not change."""
    target = bound.tensor(s.target)
    old = memory[s.target]
    reader = _Reader(memory)
    for check in s.checks:
        _check_bounds(check, s.indices, reader)
    if s.reduction is None:
        return _run_assignment(s, old, reader)
    return _run_reduction(s, target.dtype, old, reader)


def _run_assignment(s: BoundStatement, old: Array, reader: _Reader) -> Array:
    new = old.copy()
    for box in _split_into_chunks(s.indices):
        points, value = _evaluate_box(s, box, reader)
        new[points] = value
    return new


def _evaluate_box(
    s: BoundStatement, box: dict[str, tuple[int, int]], reader: _Reader
) -> tuple[tuple[Array, ...], Array]:
    """The subscripts that a box of the grid writes and the values, all with the shape of the box."""
    evaluator = NumpyExpressionEvaluator(index_grid(box), reader)
    shape = tuple(upper - lower for lower, upper in box.values())
    points = tuple(np.broadcast_to(evaluator(e), shape) for e in s.subscripts)
    return points, np.broadcast_to(evaluator(s.value), shape)


_SCATTER = {"+": np.add, "*": np.multiply, "min": np.minimum, "max": np.maximum}


def _run_reduction(s: BoundStatement, dtype: DType, old: Array, reader: _Reader) -> Array:
    assert s.reduction is not None
    wide = np.dtype(np.float64) if dtype.is_float else numpy_dtype(dtype)
    new = np.full(old.shape, neutral_element(s.reduction, dtype), wide) if s.initialize else old.astype(wide)
    whole = are_offset_indices(s.subscripts)
    for box in _split_into_chunks(s.indices):
        points, value = _evaluate_box(s, box, reader)
        value = value.astype(wide)
        if whole and s.reduction_indices:
            axes = tuple(range(s.num_free, len(s.indices)))
            value = _SCATTER[s.reduction].reduce(value, axis=axes, dtype=wide)
            first = (..., *(0 for _ in axes))
            points = tuple(p[first] for p in points)
        _combine_at(s.reduction, new, points, value, distinct=whole)
    return convert_array(convert_array(new, dtype.accumulator), dtype)


def _combine_at(op: str, new: Array, points: tuple[Array, ...], value: Array, *, distinct: bool) -> None:
    if distinct:
        new[points] = combine_arrays(op, new[points], value)
    else:
        _SCATTER[op].at(new, points, value)


def _check_bounds(check: BoundsCheck, indices: Sequence[BoundIndex], reader: _Reader) -> None:
    """Raise RangeError for the first element, in the order of the indices, that a check forbids."""
    for box in _split_into_chunks(indices):
        evaluator = NumpyExpressionEvaluator(index_grid(box), reader)
        where = None if check.guard is None else evaluator(check.guard)
        values = evaluator(check.subscript, where)
        bad = (values < 0) | (values >= check.extent)
        if where is not None:
            values, bad = np.broadcast_arrays(values, bad & where)
        if np.any(bad):
            raise out_of_bounds_error(check, int(np.asarray(values)[bad].flat[0]))


def out_of_bounds_error(check: BoundsCheck, subscript: int) -> RangeError:
    """The error of a check that found `subscript`, counted from the start of storage, out of bounds."""
    return RangeError(
        f"a subscript of '{check.tensor}' is out of bounds in dimension {check.dimension}",
        expected=f"{check.origin} to {check.origin + check.extent - 1}",
        found=str(subscript + check.origin),
    )
