"""Turn the gradients of convolutions into products without conditions.

If a def reads `I(h+kh)`, element `h` of the gradient of `I` gathers from those points `h - kh` that exist. If the
gradient of the output is padded with zeros, all of them exist, and the gradient is a convolution again. The gradient of
the filter is contiguous along few elements only, so it is summed with another index last, and transposed at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...core.dtypes import INT64
from ..affine import to_affine
from ..binding.ranges import Bounds
from ..ir import Access, Binary, Cast, Const, Expr, Index, Unary, walk_expr
from ..semantics.to_syntax import polynomial_to_expr
from ..size_polynomial import Value
from .adjoint_access import (
    GatherForm,
    SolvedIndex,
    affine_extremes,
    divisibility_guards,
    range_guards,
    simplify_subscript,
    substitute_indices,
    uses_index,
)
from .derivatives import guard_expr, replace_expr
from .ssa import range_extent


@dataclass(frozen=True, slots=True)
class PaddedGradient:
    """A gradient padded with zeros around it and, for strided windows, between its elements; indices count from 0.

    ranges: its indices, in order, with their ranges. value: the element at these. reads: the subscripts at which a
    gather reads it.
    """

    ranges: dict[str, Bounds]
    value: Expr
    reads: tuple[Expr, ...]

    @property
    def subscripts(self) -> tuple[Expr, ...]:
        return tuple(Index(i, INT64) for i in self.ranges)


def pad_gradient(
    value: Expr,
    seed: Expr,
    bounds: Sequence[Bounds],
    found: GatherForm,
    ranges: Mapping[str, Bounds],
    sizes: Mapping[str, Value],
) -> PaddedGradient | None:
    """Pad the gradient of a statement's target for all points of `found`; None if that is impossible.

    Args:
        value: the gradient that the statement propagates. seed: the gradient of the element that it writes, which must
            be a factor of `value`.
        bounds: the bounds of the target. ranges: the ranges of the indices of the statement.
    """
    if found.has_disjoint_windows:
        return None
    access = seed.operand if isinstance(seed, Cast) else seed
    solved = [name for name, s in found.solutions.items() if s.guards]
    summed = found.free_ranges(ranges)
    if not solved or not summed or not isinstance(access, Access) or not _is_factor(seed, value):
        return None
    if uses_any_index(solved, replace_expr(value, seed, Const(1.0, seed.dtype))):
        return None
    box: dict[str, Bounds] = {}
    elements: list[Expr] = []
    conditions: list[Expr] = []
    reads: list[Expr] = []
    for d, e in enumerate(access.subscripts):
        inner = [name for name in solved if uses_index(name, e)]
        if not inner:
            name = e.name if isinstance(e, Index) and e.name not in box else f"i{d}"
            box[name] = (0, range_extent(bounds[d]))
            elements.append(Index(name, INT64))
            reads.append(substitute_indices(e, found.substitute_in, sizes))
            continue
        solution = found.solutions[inner[0]]
        ends = affine_extremes(to_affine(solution.numerator, sizes), {**found.unsolved, **summed, **found.widest})
        others = [i for i in ranges if i != inner[0]]
        if len(inner) > 1 or uses_any_index(others, e) or inner[0] in box or ends is None:
            return None
        box[inner[0]] = (0, ends[1] - ends[0] + 1)
        here = SolvedIndex(simplify_subscript(_plus(Index(inner[0], INT64), ends[0]), sizes), solution.divisor, ())
        conditions += [*divisibility_guards(here), *range_guards(here.value, ranges[inner[0]], box, sizes)]
        elements.append(simplify_subscript(substitute_indices(e, {inner[0]: here.value}, sizes), sizes))
        reads.append(simplify_subscript(_plus(solution.numerator, -ends[0]), sizes))
    if not set(solved) <= box.keys():
        return None
    element = replace_expr(seed, access, replace(access, subscripts=tuple(elements)))
    return PaddedGradient(box, guard_expr(tuple(conditions), element), tuple(reads))


def uses_any_index(names: Sequence[str], *expressions: Expr) -> bool:
    """Whether one of the indices occurs in one of the expressions."""
    return any(uses_index(name, *expressions) for name in names)


def _plus(e: Expr, x: Value) -> Expr:
    return Binary("+", e, polynomial_to_expr(x), INT64)


def _is_factor(seed: Expr, e: Expr) -> bool:
    """Whether `e` is a product of `seed` and of factors that do not depend on it."""
    if e == seed:
        return True
    match e:
        case Unary(op="-", operand=x) | Cast(operand=x):
            return _is_factor(seed, x)
        case Binary(op="*", left=a, right=b):
            return (_is_factor(seed, a) and seed not in walk_expr(b)) or (
                _is_factor(seed, b) and seed not in walk_expr(a)
            )
        case Binary(op="/", left=a, right=b):
            return _is_factor(seed, a) and seed not in walk_expr(b)
    return False


def transposed_order(value: Expr, left: Sequence[str]) -> tuple[str, ...] | None:
    """A better order of the indices `left` for a sum of products whose last index is that of a window.

    In this order, the last index occurs in only one factor. None if `left` is as good as any order.
    """
    while isinstance(value, Unary):
        value = value.operand
    if not (isinstance(value, Binary) and value.op == "*" and len(left) > 1):
        return None
    factors = [x for x in (value.left, value.right) if isinstance(x, Access)]
    windowed = [any(uses_index(left[-1], e) and not isinstance(e, Index) for e in x.subscripts) for x in factors]
    if len(factors) < 2 or sum(windowed) != 1:
        return None
    window, other = factors if windowed[0] else factors[::-1]
    alone = [i for i in left if Index(i, INT64) in other.subscripts and not uses_index(i, window)]
    return (*(i for i in left if i != alone[0]), alone[0]) if alone and alone[0] != left[-1] else None
