"""How many consecutive threads of a block agree on an expression: 1, 8, 32, 128 or all of them.

Expressions of thread indices alone are evaluated for each thread. In other divisions and remainders, terms that are
multiples of the divisor are separated from the rest. Loads may differ in every thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from ..core.dtypes import BOOL, INT64
from . import build, linear_forms
from .interpret.ops import ARITHMETIC
from .intrinsics import ALL_THREADS
from .nodes import THREAD, Binary, Const, Expr, Launch, Load, Select, Type, Unary, Var
from .rewrite import children, walk_expr

GROUPS = (128, 32, 8)
"""The group sizes that instructions require, besides single threads and whole blocks."""
Values = np.ndarray[Any, Any]
_TYPES = (Type(INT64), Type(BOOL))


@dataclass(frozen=True, slots=True)
class Uniformity:
    """Facts about the variables in scope.

    Attributes:
        values: by name, the values of a variable in all threads, if they depend on thread indices only.
        groups: by name, how many consecutive threads agree on another variable. All agree on variables in neither.
        constant: the buffers that the kernel does not write.
    """

    values: Mapping[str, Values] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    constant: frozenset[str] = frozenset()

    @staticmethod
    def of(launch: Launch, constant: frozenset[str] = frozenset()) -> Uniformity:
        """The facts at the start of a kernel that does not write the buffers `constant`."""
        numbers = np.arange(prod(launch.block), dtype=np.int64)
        values = {}
        for name, extent in zip(THREAD, launch.block, strict=True):
            if extent > 1:
                values[name] = numbers % extent
            numbers = numbers // extent
        return Uniformity(values, constant=constant)

    def bind(self, name: str, value: Expr) -> Uniformity:
        """The facts where `name` is bound to `value`."""
        if self._is_shared(value):
            return self
        found = self._evaluate(value)
        if found is not None:
            return replace(self, values={**self.values, name: found})
        return replace(self, groups={**self.groups, name: self.agreement(value)})

    def bind_loop(self, name: str, start: Expr, stop: Expr) -> Uniformity:
        """The facts in a loop: threads that agree on its bounds agree on the variable in each iteration."""
        group = self.agreement(start, stop)
        return self if group == ALL_THREADS else replace(self, groups={**self.groups, name: group})

    def agreement(self, *parts: Expr) -> int:
        """How many consecutive threads agree on all of `parts`; `ALL_THREADS` for the whole block."""
        return min((self._agreement(e) for e in parts), default=ALL_THREADS)

    def _agreement(self, e: Expr) -> int:
        if self._is_shared(e):
            return ALL_THREADS
        if isinstance(e, Load):
            return self.agreement(*children(e)) if e.buffer.name in self.constant else 1
        if isinstance(e, Var):
            return self.groups[e.name] if e.name in self.groups else _compute_uniform_group_size(self.values[e.name])
        found = self._evaluate(e)
        if found is not None:
            return _compute_uniform_group_size(found)
        match e:
            case Binary("div" | "mod", left, Const(int(d), Type(dtype, 1))) if d > 0 and dtype == INT64:
                whole, rest = _split_multiples(left, d)
                kept = build.binary(e.op, rest, build.const(d))
                if whole:
                    return self.agreement(kept, *(whole if e.op == "div" else ()))
        return self.agreement(*children(e))

    def _is_shared(self, e: Expr) -> bool:
        """Whether `e` is the same in all threads."""
        return not any(
            (isinstance(x, Load) and x.buffer.name not in self.constant)
            or (isinstance(x, Var) and (x.name in self.values or x.name in self.groups))
            for x in walk_expr(e)
        )

    def _evaluate(self, e: Expr) -> Values | None:
        """The values of `e` in all threads if it depends only on thread indices and constants, else None."""
        if e.type not in _TYPES:
            return None
        match e:
            case Const(value):
                return np.asarray(value)
            case Var(name):
                return self.values.get(name)
            case Unary(op, operand):
                x = self._evaluate(operand)
                return None if x is None else ~x if op == "not" else -x
            case Binary(op, left, right):
                a, b = self._evaluate(left), self._evaluate(right)
                return None if a is None or b is None else _apply_binary_operator(op, a, b)
            case Select(condition, then, otherwise):
                c, a, b = (self._evaluate(x) for x in (condition, then, otherwise))
                return None if c is None or a is None or b is None else np.where(c, a, b)
        return None


def _apply_binary_operator(op: str, a: Values, b: Values) -> Values | None:
    if op in ("div", "mod"):
        if not np.all(b):
            return None
        return np.floor_divide(a, b) if op == "div" else np.mod(a, b)
    if op in ("min", "max"):
        return np.minimum(a, b) if op == "min" else np.maximum(a, b)
    return np.asarray(ARITHMETIC[op](a, b))


def _split_multiples(e: Expr, divisor: int) -> tuple[list[Expr], Expr]:
    """The terms of the sum `e` that are multiples of `divisor`, and the rest."""
    terms, constant = linear_forms.linear_terms(e)
    whole = [atom for atom, c in terms.items() if c % divisor == 0]
    rest = {atom: c for atom, c in terms.items() if c % divisor}
    return whole, linear_forms.terms_to_expr(rest, constant)


def _compute_uniform_group_size(values: Values) -> int:
    """The size of the largest aligned groups of threads in which `values` are equal."""
    if values.ndim == 0 or np.all(values == values[0]):
        return ALL_THREADS
    numbers = np.arange(len(values))
    return next((g for g in GROUPS if np.array_equal(values, values[numbers // g * g])), 1)
