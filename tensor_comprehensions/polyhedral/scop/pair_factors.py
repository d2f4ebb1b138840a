"""Split sums of products of three or more factors into products of two: `x(i,j) +=! g(a,b) * u(i,a) * v(j,b)`.

The order is the one with the fewest multiplications, as in `tc.einsum`. Each step is a contraction, which can use
register tiles; a loop over all indices at once cannot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ...core.decisions import Decision, is_recording, note_decision
from ...core.internal_names import internal_name
from ...core.memory_layout import contiguous_strides
from ...structured.contraction_path import ContractionPath, Labels, best_path
from ...structured.match.product_matching import (
    collect_index_names,
    list_factors,
    multiply_factors,
    split_product,
)
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundStatement, Role, Tensor, walk_expr
from ...thresholds import FACTOR_PAIRS_GAIN, MIN_PAIRED_PRODUCTS, STORED_ELEMENT_PRODUCTS


def pair_factors(function: BoundFunction) -> BoundFunction:
    """`function` with sums of products of several factors split into steps of two; the same object if none gains."""
    tensors = {t.name: t for t in function.tensors}
    statements = tuple(new for s in function.statements for new in _pair_statement(s, tensors))
    if len(statements) == len(function.statements):
        return function
    return replace(function, tensors=tuple(tensors.values()), statements=statements)


def _pair_statement(s: BoundStatement, tensors: dict[str, Tensor]) -> Iterator[BoundStatement]:
    """`s`, or its steps if it gains by them; temporaries for their results are added to `tensors`."""
    factors, scales = _split_factors(s)
    if len(factors) < 3 or not _is_plain(s):
        yield s
        return
    labels, output = [frozenset(collect_index_names(x)) for x in factors], frozenset(i.name for i in s.free)
    sizes = {i.name: i.extent for i in s.indices}
    path = best_path(labels, output, sizes)
    if not _gains(s, path, len(factors)):
        yield s
        return
    if is_recording():
        _record_path(s, path)
    alive = dict(enumerate(factors))
    for number, (one, other) in enumerate(path.steps[:-1]):
        pair = [alive.pop(one), alive.pop(other)]
        needed = output.union(*map(collect_index_names, alive.values()))
        step, result = _make_step(s, number, pair, needed, tensors)
        alive[len(factors) + number] = result
        yield step
    left = set().union(*map(collect_index_names, alive.values()))
    kept = tuple(i for i in s.reduction_indices if i.name in left)
    is_sum = bool(kept) or not s.initialize
    yield replace(
        s,
        value=multiply_factors([*alive.values(), *scales]),
        indices=(*s.free, *kept),
        reduction="+" if is_sum else None,
        initialize=s.initialize and is_sum,
    )


def _split_factors(s: BoundStatement) -> tuple[list[tc.Expr], list[tc.Expr]]:
    """The factors that depend on an index, and the others."""
    factors = list_factors(s.value)
    return [x for x in factors if collect_index_names(x)], [x for x in factors if not collect_index_names(x)]


def _is_plain(s: BoundStatement) -> bool:
    """Whether `s` is a plain sum of floats: over a box that starts at 0, without checks or restrictions."""
    return (
        s.reduction == "+"
        and s.value.dtype.is_float
        and s.value.dtype.bits >= 32
        and not (s.checks or s.exists or s.domain or s.reads_own_target)
        and all(i.lower == 0 < i.extent for i in s.indices)
        and all(isinstance(e, tc.Index) for e in s.subscripts)
        and all(x.dtype == s.value.dtype for x in list_factors(s.value))
        and not any(isinstance(e, tc.Access) and e.tensor == s.target for e in walk_expr(s.value))
    )


def _gains(s: BoundStatement, path: ContractionPath, factors: int) -> bool:
    """Whether the steps do much less work than a single loop, or allow register tiles where that does not."""
    together = prod(i.extent for i in s.indices)
    steps = path.operations + STORED_ELEMENT_PRODUCTS * path.memory
    if together < MIN_PAIRED_PRODUCTS:
        return False
    return steps * FACTOR_PAIRS_GAIN <= together or (split_product(s) is None and steps < (factors - 1) * together)


def _make_step(
    s: BoundStatement, number: int, pair: Sequence[tc.Expr], needed: Labels, tensors: dict[str, Tensor]
) -> tuple[BoundStatement, tc.Access]:
    """The product of two factors, summed over the indices not in `needed`, and the access to its result."""
    present = set().union(*map(collect_index_names, pair))
    kept = tuple(i for i in s.indices if i.name in present & needed)
    summed = tuple(i for i in s.indices if i.name in present - needed)
    name, shape = internal_name(s.name, "product", number), tuple(i.extent for i in kept)
    tensors[name] = Tensor(name, s.value.dtype, shape, contiguous_strides(shape), Role.TEMPORARY)
    where = tuple(tc.Index(i.name, tc.INDEX_TYPE) for i in kept)
    step = replace(
        s,
        name=name,
        target=name,
        subscripts=where,
        reduction="+" if summed else None,
        initialize=bool(summed),
        value=multiply_factors(pair),
        indices=(*kept, *summed),
        num_free=len(kept),
    )
    return step, tc.Access(name, where, s.value.dtype)


def _record_path(s: BoundStatement, path: ContractionPath) -> None:
    together = prod(i.extent for i in s.indices)
    numbers = (
        ("multiplications", path.operations),
        ("multiplications at once", together),
        ("elements of results", path.memory),
    )
    steps = f"in {len(path.steps)} products of two factors"
    note_decision(Decision("lowering", (s.name,), steps, "a loop over all indices at once does more", numbers))
