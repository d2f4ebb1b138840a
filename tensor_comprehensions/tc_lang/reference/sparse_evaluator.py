"""The reference evaluator of defs with sparse tensors: values, and which elements of each tensor are stored.

Each tensor is a dense array with a Boolean mask of its stored elements. Values are computed as if all operands were
dense with 0 for elements that are not stored, except that 0 * x is 0 for such an element even if x is NaN or infinite.
An instance of a statement is void, and contributes nothing, if with these zeros its value is the constant identity of
the reduction. An element of a sparse result is stored if an instance for it is not void and reads a sparse tensor, or
reads none and has a value other than 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import InternalError
from ...core.math_functions import FUNCTIONS
from ..binding.bind import neutral_element
from ..formats import Format
from ..ir import (
    Access,
    Binary,
    BoundFunction,
    BoundStatement,
    Call,
    Cast,
    Const,
    Expr,
    Index,
    Select,
    Tensor,
    Unary,
    walk_expr,
)
from .numpy_expression import Array, combine_arrays, convert_array, index_grid, numpy_dtype

_SCATTER: dict[str, Any] = {"+": np.add, "*": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The values of a tensor, and the mask of its stored elements; None: all."""

    values: Array
    places: Array | None = None

    @property
    def is_sparse(self) -> bool:
        return self.places is not None


@dataclass(frozen=True, slots=True)
class SharedPlaces:
    """The pattern of a temporary or result: that of the operand `source`, restricted to `window`.

    dims: the dimensions that correspond to the operand's; the other dimensions are dense.
    """

    source: str
    window: tuple[slice, ...]
    dims: tuple[int, ...]

    def spread(self, places: Array, shape: tuple[int, ...]) -> Array:
        """The mask of a tensor of this shape, from the mask `places` of the operand."""
        part = places[self.window].transpose(np.argsort(self.dims))
        return np.broadcast_to(part.reshape([n if d in self.dims else 1 for d, n in enumerate(shape)]), shape)


NONE_SHARED: Mapping[str, SharedPlaces] = {}
TRUE, FALSE = np.asarray(True), np.asarray(False)


def evaluate_sparse(
    bound: BoundFunction,
    operands: Mapping[str, StoredTensor],
    sparse_results: Mapping[str, Format],
    shared: Mapping[str, SharedPlaces] = NONE_SHARED,
) -> dict[str, StoredTensor]:
    """The returns of a function, by name; those in `sparse_results` with a mask, according to their formats.

    operands: every input and the initial value of every in/out tensor, by name. shared: the tensors that have the
    sparsity pattern of an operand. Other temporaries are dense. Such results store elements without any terms, too.
    """
    memory = {t.name: _initial_stored(t, operands, t.name in sparse_results) for t in bound.tensors}
    with np.errstate(all="ignore"):
        for s in bound.statements:
            memory[s.target] = _store_whole_blocks(_run_statement(s, bound, memory), sparse_results.get(s.target))
            is_settled = s.target in sparse_results and all(i.extent for i in s.reduction_indices)
            if (source := shared.get(s.target)) is not None and not is_settled:
                places = operands[source.source].places
                inside = None if places is None else source.spread(places, memory[s.target].values.shape)
                memory[s.target] = _zeros_elsewhere(memory[s.target].values, inside)
    return {name: memory[name] for name in bound.returns}


def _store_whole_blocks(stored: StoredTensor, format: Format | None) -> StoredTensor:
    """Extend the mask to whole blocks, and whole dense tails, of which some element is stored."""
    if format is None or stored.places is None:
        return stored
    places = stored.places
    if format.blocks:
        split = [x for n, b in zip(places.shape, format.blocks, strict=True) for x in (n // b, b)]
        blocks = places.reshape(split).any(tuple(range(1, len(split), 2)))
        for d, b in enumerate(format.blocks):
            blocks = np.repeat(blocks, b, d)
        return StoredTensor(stored.values, blocks)
    for d in format.order[format.depth :]:
        places = np.broadcast_to(places.any(d, keepdims=True), places.shape)
    return StoredTensor(stored.values, np.array(places))


def _initial_stored(t: Tensor, operands: Mapping[str, StoredTensor], sparse: bool) -> StoredTensor:
    if t.name in operands:
        return operands[t.name]
    return StoredTensor(np.zeros(t.shape, numpy_dtype(t.dtype)), np.zeros(t.shape, bool) if sparse else None)


def _zeros_elsewhere(values: Array, places: Array | None) -> StoredTensor:
    return StoredTensor(values if places is None else np.where(places, values, np.zeros((), values.dtype)), places)


def _run_statement(s: BoundStatement, bound: BoundFunction, memory: Mapping[str, StoredTensor]) -> StoredTensor:
    """The target after a statement over the whole grid of its indices."""
    target, old = bound.tensor(s.target), memory[s.target]
    box = {i.name: (i.lower, i.upper) for i in s.indices}
    shape = tuple(i.extent for i in s.indices)
    evaluator = _Evaluator(index_grid(box), memory)
    neutral = 0 if s.reduction is None else neutral_element(s.reduction, target.dtype)
    value, constant, _ = (np.broadcast_to(x, shape) for x in evaluator(s.value))
    live = np.broadcast_to(evaluator.exist(s.exists), shape) & ~(constant & (value == neutral))
    points = tuple(np.broadcast_to(evaluator(e).value, shape) for e in s.subscripts)
    at = tuple(p[live] for p in points)
    values = (
        _assign_elements(old, at, value[live])
        if s.reduction is None
        else _reduce_elements(s, old, target, at, value[live])
    )
    if old.places is None:
        return StoredTensor(values)
    first = s.reduction is None or s.initialize
    places = np.zeros_like(old.places) if first else old.places.copy()
    if s.exists and all(_has_subscripts_of_target(a, s) for a in s.exists):  # the result has their pattern
        own = [evaluator(e).value for e in s.subscripts]  # does not depend on the extents of other indices
        kept, *own = np.broadcast_arrays(evaluator.exist(s.exists), *own)
        places[tuple(p[kept] for p in own)] = True
    elif _reads_sparse(s, memory):
        places[at] = True
    elif not any(a.is_sparse for a in _collect_read_tensors(s, memory)):
        places |= values != 0
    return _zeros_elsewhere(values, places)


def _has_subscripts_of_target(a: Access, s: BoundStatement) -> bool:
    """Whether an access has the subscripts of the target, which are relative to the starts of the index ranges."""
    lowers = {i.name: i.lower for i in s.indices}

    def is_same(e: Expr, own: Expr) -> bool:
        match own:
            case Binary(op="-", left=Index(name=name), right=Const(value=value)) if value == lowers.get(name):
                return own.left == e
        return own == e

    same = (is_same(e, own) for e, own in zip(a.subscripts, s.subscripts, strict=False))
    return len(a.subscripts) == len(s.subscripts) and all(same)


def _assign_elements(old: StoredTensor, at: tuple[Array, ...], value: Array) -> Array:
    new = np.zeros_like(old.values)
    if at:
        new[at] = value
    elif value.size:
        new[()] = value[-1]
    return new


def _reduce_elements(
    s: BoundStatement, old: StoredTensor, target: Tensor, at: tuple[Array, ...], value: Array
) -> Array:
    assert s.reduction is not None
    wide = np.dtype(np.float64) if target.dtype.is_float else numpy_dtype(target.dtype)
    start = np.full(old.values.shape, neutral_element(s.reduction, target.dtype), wide) if s.initialize else old.values
    new = start.astype(wide)
    flat = np.ravel_multi_index(at, new.shape) if at else np.zeros(value.shape, np.int64)
    _SCATTER[s.reduction].at(new.reshape(-1), flat, value.astype(wide))
    return convert_array(convert_array(new, target.dtype.accumulator), target.dtype)


def _collect_read_tensors(s: BoundStatement, memory: Mapping[str, StoredTensor]) -> Iterator[StoredTensor]:
    for root in (s.value, *s.exists):
        yield from (memory[e.tensor] for e in walk_expr(root) if isinstance(e, Access))


def _reads_sparse(s: BoundStatement, memory: Mapping[str, StoredTensor]) -> bool:
    return any(x.is_sparse for x in _collect_read_tensors(s, memory))


class Evaluated(NamedTuple):
    """The value of an expression over a grid.

    constant: where it is a constant after absent reads are replaced by 0. absent: where it depends on an absent read.
    """

    value: Array
    constant: Array
    absent: Array


@dataclass(frozen=True, slots=True)
class _Evaluator:
    """Evaluates expressions over a grid, including the effect of absent reads."""

    indices: Mapping[str, Array]
    memory: Mapping[str, StoredTensor]

    def exist(self, accesses: Sequence[Access]) -> Array:
        """The mask of the points where all of the accesses read stored elements."""
        found: Array = np.asarray(True)
        for e in accesses:
            places = self.memory[e.tensor].places
            if places is not None:
                found = found & places[self.evaluate_subscripts(e)]
        return found

    def evaluate_subscripts(self, e: Access) -> tuple[Array, ...]:
        return tuple(self(x).value for x in e.subscripts)

    def __call__(self, e: Expr) -> Evaluated:
        match e:
            case Const(value=value, dtype=dtype):
                exact = (
                    convert_array(np.asarray(value), dtype) if dtype.is_float else np.asarray(value, numpy_dtype(dtype))
                )
                return Evaluated(exact, TRUE, FALSE)
            case Index(name=name, dtype=dtype):
                return Evaluated(self.indices[name].astype(numpy_dtype(dtype)), FALSE, FALSE)
            case Access():
                return self._read(e)
            case Unary(op=op, operand=x):
                of = self(x)
                return of._replace(value=np.negative(of.value) if op == "-" else np.logical_not(of.value))
            case Binary(op=op, left=a, right=b):
                return _evaluate_binary(op, self(a), self(b))
            case Select(condition=c, then=a, otherwise=b):
                return _evaluate_select(self(c), self(a), self(b))
            case Cast(operand=x, dtype=dtype):
                of = self(x)
                return of._replace(value=convert_array(of.value, dtype))
            case Call(function=name, arguments=arguments):
                parts = [self(x) for x in arguments]
                constant = reduce(np.logical_and, (x.constant for x in parts), TRUE)
                absent = reduce(np.logical_or, (x.absent for x in parts), FALSE)
                return Evaluated(FUNCTIONS[name].evaluate(*(x.value for x in parts)), constant, absent)
        raise InternalError(f"not an expression of a bound function: {e!r}")

    def _read(self, e: Access) -> Evaluated:
        held, where = self.memory[e.tensor], self.evaluate_subscripts(e)
        if held.places is None:
            return Evaluated(held.values[_clip_subscripts(where, held.values.shape)], FALSE, FALSE)
        there = held.places[where]
        return Evaluated(np.where(there, held.values[where], np.zeros((), held.values.dtype)), ~there, ~there)


def _clip_subscripts(where: tuple[Array, ...], shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Subscripts clipped to the bounds; guarded reads out of bounds get any element, which is not used."""
    return tuple(np.clip(x, 0, max(0, n - 1)) for x, n in zip(where, shape, strict=True))


def _evaluate_binary(op: str, left: Evaluated, right: Evaluated) -> Evaluated:
    a, b = left.value, right.value
    absent, constant = left.absent | right.absent, left.constant & right.constant
    if op in ("&&", "||"):
        decided = left.constant & (a == (op == "||")) | right.constant & (b == (op == "||"))
        return Evaluated(a & b if op == "&&" else a | b, decided | constant, absent)
    value = combine_arrays(op, a, b)
    if op in ("*", "/", "%"):
        zero = _is_absent_zero(left) | (_is_absent_zero(right) if op == "*" else FALSE)
        return Evaluated(np.where(zero, np.zeros((), value.dtype), value), constant | zero, absent)
    return Evaluated(value, constant, absent)


def _is_absent_zero(x: Evaluated) -> Array:
    """Where a factor makes a product 0: not where it is a constant 0 of the def."""
    return x.absent & x.constant & (x.value == 0)


def _evaluate_select(condition: Evaluated, then: Evaluated, otherwise: Evaluated) -> Evaluated:
    c = condition.value
    constant, absent = (np.where(c, then[k], otherwise[k]) for k in (1, 2))
    return Evaluated(np.where(c, then.value, otherwise.value), condition.constant & constant, condition.absent | absent)
