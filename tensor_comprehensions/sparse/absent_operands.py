"""Simplification of expressions for absent operands: an element that is not stored is 0, and a product with it is 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..core.dtypes import DType
from ..core.math_functions import FUNCTIONS
from ..tc_lang.binding.bind import neutral_element
from ..tc_lang.ir import Access, Binary, Call, Cast, Const, Expr, Select, Unary, map_operands, walk_expr
from ..tc_lang.reference.numpy_expression import combine_arrays, convert_array, numpy_dtype


@dataclass(frozen=True, slots=True)
class Term:
    """The right side of a statement: a value at the coordinates where all of `exists` are stored.

    void: the constant that contributes nothing: the identity of the reduction, 0 for `=`; None if every value counts.
    aliases: maps accesses to the access of an operand with the same sparsity pattern, which represents them.
    """

    value: Expr
    exists: tuple[Access, ...]
    void: int | float | bool | None
    aliases: Mapping[Access, Access] = field(default_factory=dict)

    @property
    def uses(self) -> frozenset[Access]:
        """The accesses that the term reads or that must exist."""
        return frozenset(self.pattern_access(a) for a in (*self.exists, *reads(self.value)))

    def pattern_access(self, a: Access) -> Access:
        """The access of the operand whose sparsity pattern `a` has."""
        return self.aliases.get(a, a)

    def occurrences(self, sparse: Collection[str]) -> tuple[Access, ...]:
        """The distinct accesses of sparse tensors, in order of appearance."""
        found = (a for a in (*self.exists, *reads(self.value)) if a.tensor in sparse)
        return tuple(dict.fromkeys(map(self.pattern_access, found)))

    def drop_absent(self, absent: Collection[Access]) -> Term | None:
        """The term simplified for the case that the accesses `absent` are not stored; None if it becomes void."""
        if any(self.pattern_access(a) in absent for a in self.exists):
            return None
        value = drop_absent_terms(self.value, {a for a in reads(self.value) if self.pattern_access(a) in absent})
        if isinstance(value, Const) and value.value == self.void:
            return None
        return self if value is self.value else replace(self, value=value)


def term_of(value: Expr, exists: tuple[Access, ...], reduction: str | None, dtype: DType) -> Term:
    """The term of a statement that stores or reduces `value` into a tensor of type `dtype`."""
    return Term(value, exists, 0 if reduction is None else neutral_element(reduction, dtype))


def drop_absent_terms(e: Expr, absent: Collection[Access]) -> Expr:
    """`e` with 0 for the reads in `absent`, simplified.

    A constant factor 0 that does not come from an absent read does not annihilate: times infinity it is NaN.
    """
    return _drop_absent(e, absent)[0]


def _drop_absent(e: Expr, absent: Collection[Access]) -> tuple[Expr, bool]:
    """`drop_absent_terms`, and whether the result depends on an absent read."""
    if isinstance(e, Access):
        return (Const(_zero(e.dtype), e.dtype), True) if e in absent else (e, False)
    dependent: list[bool] = []

    def simplify(x: Expr) -> Expr:
        new, depends = _drop_absent(x, absent)
        dependent.append(depends)
        return new

    new = map_operands(e, simplify)
    match new:
        case Binary(op=op, left=left, right=right):
            return _simplify_binary(new, op, left, right, *dependent), any(dependent)
        case Select(condition=Const(value=value), then=then, otherwise=otherwise):
            condition, *branches = dependent
            return (then, condition or branches[0]) if value else (otherwise, condition or branches[1])
        case Unary() | Cast() | Call():
            return _evaluate_constant(new), any(dependent)
    return new, any(dependent)


def _evaluate_constant(e: Unary | Cast | Call) -> Expr:
    """`e` as a constant if its operands are."""
    match e:
        case Unary(op="!", operand=Const(value=value)):
            return Const(not value, e.dtype)
        case Unary(operand=Const(value=value)):
            return Const(_to_python_number(-np.asarray(value, _find_numpy_dtype(e)), e.dtype), e.dtype)
        case Cast(operand=Const(value=value)):
            return Const(_to_python_number(value, e.dtype), e.dtype)
        case Call(function=name, arguments=arguments) if all(isinstance(a, Const) for a in arguments):
            given = [np.asarray(a.value, _find_numpy_dtype(a)) for a in arguments if isinstance(a, Const)]
            with np.errstate(all="ignore"):
                return Const(_to_python_number(FUNCTIONS[name].evaluate(*given), e.dtype), e.dtype)
    return e


def _simplify_binary(e: Binary, op: str, left: Expr, right: Expr, left_absent: bool, right_absent: bool) -> Expr:
    """Simplify by annihilation, neutral elements and constant folding. absent: which sides depend on absent reads."""
    if isinstance(left, Const) and isinstance(right, Const) and not (op in "/%" and not right.value):
        return _fold_constants(e, op, left, right)
    if op in ("*", "/", "%") and left_absent and is_zero(left):
        return Const(_zero(e.dtype), e.dtype)
    if op == "*" and right_absent and is_zero(right):
        return Const(_zero(e.dtype), e.dtype)
    if op in ("+", "-") and is_zero(right):
        return left
    if op == "+" and is_zero(left):
        return right
    if op == "-" and is_zero(left):
        return Unary("-", right, e.dtype)
    if op in ("&&", "||"):
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Const):
                return other if bool(one.value) == (op == "&&") else one
    return e


def _fold_constants(e: Binary, op: str, left: Const, right: Const) -> Const:
    if op in ("&&", "||"):
        both = (bool(left.value), bool(right.value))
        return Const(all(both) if op == "&&" else any(both), e.dtype)
    with np.errstate(all="ignore"):
        found = combine_arrays(
            op, np.asarray(left.value, _find_numpy_dtype(left)), np.asarray(right.value, _find_numpy_dtype(right))
        )
    return Const(_to_python_number(found, e.dtype), e.dtype)


def is_additive(e: Expr, absent: Collection[Access]) -> bool:
    """Whether reading 0 for the accesses in `absent` gives the same value as dropping them, for any other operands."""
    match e:
        case Access():
            return True
        case Binary(op="+" | "-", left=left, right=right):
            return is_additive(left, absent) and is_additive(right, absent)
        case Binary(op="*", left=Const(value=value), right=x) | Binary(op="*", left=x, right=Const(value=value)):
            return math.isfinite(value) and is_additive(x, absent)
        case Unary(op="-", operand=x) | Cast(operand=x):
            return is_additive(x, absent)
    return not any(a in absent for a in reads(e))


def is_proportional(e: Expr, factor: Access) -> bool:
    """Whether the value is linear in `factor`, so that the values for several factors add up to that for their sum."""
    match e:
        case Access():
            return e == factor
        case Binary(op="+" | "-", left=left, right=right):
            return is_proportional(left, factor) and is_proportional(right, factor)
        case Binary(op="*", left=left, right=right) if factor not in reads(right):
            return is_proportional(left, factor)
        case Binary(op="*", left=left, right=right) if factor not in reads(left):
            return is_proportional(right, factor)
        case Binary(op="/", left=left, right=right):
            return factor not in reads(right) and is_proportional(left, factor)
        case Unary(op="-", operand=x):
            return is_proportional(x, factor)
    return False


def is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def _zero(dtype: DType) -> int | float | bool:
    return False if dtype.is_bool else 0.0 if dtype.is_float else 0


def _find_numpy_dtype(e: Expr) -> np.dtype[np.generic]:
    return numpy_dtype(e.dtype)


def _to_python_number(value: object, dtype: DType) -> int | float | bool:
    """`value` converted to `dtype`, as a Python number."""
    number: int | float | bool = convert_array(np.asarray(value), dtype).item()
    return number


def reads(e: Expr) -> Iterator[Access]:
    """The accesses in `e`."""
    return (x for x in walk_expr(e) if isinstance(x, Access))
