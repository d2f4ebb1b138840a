"""Sparsity patterns in gradients: the `exists` clauses and sparse operands that a gradient's statements must keep.

The gradient of a sparse tensor is needed only at its stored elements. The same holds for a temporary that is nonzero
only where an operand stores an element.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...core.dtypes import BOOL, INT64
from ..binding.ranges import Bounds
from ..ir import Access, Binary, Call, Cast, Const, Expr, Index, Select, Symbol, Unary, walk_expr
from ..shared_pattern import SharedPattern, find_dims
from ..size_polynomial import Value, constant_value
from .adjoint_access import GatherForm, SolvedIndex, range_guards
from .ssa import SsaProgram, SsaStatement, range_extent

_ZERO_AT_ZERO = (
    "sqrt", "cbrt", "sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf", "fabs", "expm1", "log1p",
    "floor", "ceil", "trunc", "round", "rint", "tf32",
)  # fmt: skip
"""Functions of one argument that are 0 at 0."""


def find_patterns(steps: SsaProgram) -> dict[str, SharedPattern]:
    """For each version that is 0 wherever a sparse input stores nothing, the pattern of that input."""
    if not steps.function.is_sparse:
        return {}
    inputs = {p.name: p for p in steps.function.parameters if p.is_sparse}
    found = {p.name: SharedPattern(p.name, tuple(range(p.rank))) for p in inputs.values()}
    for step in steps.steps:
        pattern = _find_step_pattern(step, found, inputs)
        starts = all(constant_value(lower) == 0 for lower, _ in steps.versions[step.target].bounds)
        if pattern is not None and starts and (step.before is None or found.get(step.before) == pattern):
            found[step.target] = pattern
    return found


def _find_step_pattern(
    step: SsaStatement, known: Mapping[str, SharedPattern], inputs: Mapping[str, Symbol]
) -> SharedPattern | None:
    if step.op not in ("=", "+=", "+=!") or not _are_distinct(step.subscripts):
        return None
    reads = [a for e in (*step.exists, step.value) for a in walk_expr(e) if isinstance(a, Access) and a.tensor in known]
    stored = {a: known[a.tensor].access(a.subscripts, inputs[known[a.tensor].source]) for a in reads}
    for own in sorted(dict.fromkeys(stored.values()), key=lambda x: -len(x.subscripts)):
        dims, format = find_dims(own, step.subscripts), inputs[own.tensor].format
        if dims is None or (len(dims) < len(step.subscripts) and (format is None or format.blocks)):
            continue
        absent = {a for a in reads if stored[a] == own}
        if any(a in absent for a in step.exists) or _is_zero_if_absent(step.value, absent):
            return SharedPattern(own.tensor, dims)
    return None


def _are_distinct(subscripts: Sequence[Expr]) -> bool:
    return all(isinstance(e, Index) for e in subscripts) and len(set(subscripts)) == len(subscripts)


def _is_zero_if_absent(e: Expr, absent: Collection[Access]) -> bool:
    """Whether `e` is 0 if the elements that `absent` reads are not stored."""
    match e:
        case Access():
            return e in absent
        case Const(value=value):
            return value == 0
        case Unary(op="-", operand=x) | Cast(operand=x):
            return _is_zero_if_absent(x, absent)
        case Binary(op="*", left=a, right=b):
            return _is_zero_if_absent(a, absent) or _is_zero_if_absent(b, absent)
        case Binary(op="/", left=a):
            return _is_zero_if_absent(a, absent)
        case Binary(op="+" | "-" | "min" | "max", left=a, right=b) | Select(then=a, otherwise=b):
            return _is_zero_if_absent(a, absent) and _is_zero_if_absent(b, absent)
        case Call(function=name, arguments=(x,)) if name in _ZERO_AT_ZERO:
            return _is_zero_if_absent(x, absent)
    return False


def pattern_exists_clauses(step: SsaStatement, patterns: Collection[str]) -> tuple[Access, ...]:
    """The `exists` accesses that restrict a step: those of tensors that store only some elements."""
    return tuple(a for a in step.exists if a.tensor in patterns)


def gather_by_equality(
    subscripts: Sequence[Expr], bounds: Sequence[Bounds], ranges: Mapping[str, Bounds], sizes: Mapping[str, Value]
) -> GatherForm:
    """The gather form of a read of a sparse tensor with a repeated index or a constant as a subscript."""
    left: dict[str, Bounds] = {f"i{d}": (0, range_extent(b)) for d, b in enumerate(bounds)}
    while left.keys() & ranges.keys():
        left = {f"{name}_": b for name, b in left.items()}
    solutions: dict[str, SolvedIndex] = {}
    for place, e in zip(left, subscripts, strict=True):
        mine = Index(place, INT64)
        if isinstance(e, Index) and e.name not in solutions:
            solutions[e.name] = SolvedIndex(mine, 1, tuple(range_guards(mine, ranges[e.name], left, sizes)))
            continue
        other = solutions[e.name].numerator if isinstance(e, Index) else e
        solutions[f"{place} "] = SolvedIndex(mine, 1, (Binary("==", mine, other, BOOL),))
    return GatherForm(left, solutions)


def has_computed_sparse_subscript(exists: Sequence[Access], value: Expr, patterns: Collection[str]) -> bool:
    """Whether a tensor that stores only some elements has a subscript that is neither an index nor a constant."""
    reads = (*exists, *(x for x in walk_expr(value) if isinstance(x, Access)))
    mine = (x for x in reads if x.tensor.removeprefix("d ").rstrip("@") in patterns or x.tensor in patterns)
    return any(not isinstance(e, Index | Const) for x in mine for e in x.subscripts)
