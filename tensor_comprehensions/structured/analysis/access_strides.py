"""Strides of accesses along each iterator, in elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...loop_ir.linear_forms import linear_terms
from ...loop_ir.nodes import Expr, Load, Var
from ...loop_ir.rewrite import mentions


def iterator_coefficients(e: Expr, iterators: Iterable[str]) -> Mapping[str, int] | None:
    """The non-zero integer coefficients of `iterators` in the scalar `e`; None unless it is affine in all of them."""
    wanted = frozenset(iterators)
    factors: dict[str, int] = {}
    for atom, factor in linear_terms(e)[0].items():
        if isinstance(atom, Var):
            if atom.name in wanted:
                factors[atom.name] = factor
        elif mentions(atom, wanted):
            return None
    return factors


def access_strides(access: Load, iterators: Iterable[str]) -> Mapping[str, int] | None:
    """The non-zero strides of `access` in elements along `iterators`; None unless it is affine in all of them."""
    wanted = tuple(iterators)
    total: dict[str, int] = {}
    for index, stride in zip(access.indices, access.buffer.strides, strict=True):
        factors = iterator_coefficients(index, wanted)
        if factors is None:
            return None
        for name, factor in factors.items():
            total[name] = total.get(name, 0) + factor * stride
    return {name: step for name, step in total.items() if step}


def common_strides(accesses: Sequence[Load], iterators: Iterable[str]) -> Mapping[str, int]:
    """The stride along each iterator, in elements, that all `accesses` depending on it have in common.

    Iterators with different strides in two accesses are left out. The result is empty if an access is not affine.
    """
    wanted = tuple(iterators)
    all_steps = [access_strides(a, wanted) for a in accesses]
    if any(s is None for s in all_steps):
        return {}
    found: dict[str, set[int]] = {}
    for moved in all_steps:
        for name, step in (moved or {}).items():
            found.setdefault(name, set()).add(step)
    return {name: min(values) for name, values in found.items() if len(values) == 1}
