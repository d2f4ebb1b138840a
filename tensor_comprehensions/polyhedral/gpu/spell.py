"""Quasi-affine functions and sets of isl as expressions of the loop program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import islpy as isl

from ...errors import CannotLower
from ...loop_ir import build
from ...loop_ir.nodes import BLOCK, THREAD, Expr

IDENTIFIERS: Mapping[str, Expr] = {
    isl_name: build.var(name)
    for names, variables in ((("b0", "b1", "b2"), BLOCK), (("t0", "t1", "t2"), THREAD))
    for isl_name, name in zip(names, variables, strict=True)
}
"""The parameters that stand for the block and the thread in sets and functions."""


@dataclass(frozen=True, slots=True)
class Values:
    """What the dimensions of a space, and its parameters, are worth in the loop program."""

    dimensions: Sequence[Expr]
    parameters: Mapping[str, Expr]

    def of(self, aff: isl.Aff) -> Expr:
        """The value of an integer-valued quasi-affine function of the space."""
        return build.div(self._numerator(aff), aff.get_denominator_val().to_python())

    def holds(self, condition: isl.Set) -> Expr:
        """Whether the point lies in a set. Raises CannotLower where that takes a search."""
        holds: Expr = build.FALSE
        for part in condition.compute_divs().get_basic_sets():
            holds = build.logical_or(holds, self._all(part))
        return holds

    def _all(self, part: isl.BasicSet) -> Expr:
        holds: Expr = build.TRUE
        for constraint in part.get_constraints():
            holds = build.logical_and(holds, self._one(constraint))
        return holds

    def _one(self, constraint: isl.Constraint) -> Expr:
        value = self._numerator(constraint.get_aff())
        return build.eq(value, 0) if constraint.is_equality() else build.ge(value, 0)

    def _numerator(self, aff: isl.Aff) -> Expr:
        """The function times its denominator."""
        scale = aff.get_denominator_val()
        total: Expr = build.const(aff.get_constant_val().mul(scale).to_python())
        for kind, k, factor in _terms(aff):
            total = build.add(self._atom(aff, kind, k, factor.mul(scale).to_python()), total)
        return total

    def _atom(self, aff: isl.Aff, kind: isl.dim_type, k: int, factor: int) -> Expr:
        match kind:
            case isl.dim_type.in_:
                atom = self.dimensions[k]
            case isl.dim_type.param:
                atom = self.parameters[aff.get_dim_name(kind, k) or ""]
            case _:
                atom = self.of(_division(aff, k))
        return build.mul(atom, factor)


def _terms(aff: isl.Aff) -> list[tuple[isl.dim_type, int, isl.Val]]:
    kinds = (isl.dim_type.in_, isl.dim_type.param, isl.dim_type.div)
    every = [(kind, k, aff.get_coefficient_val(kind, k)) for kind in kinds for k in range(aff.dim(kind))]
    return [(kind, k, factor) for kind, k, factor in every if not factor.is_zero()]


def _division(aff: isl.Aff, k: int) -> isl.Aff:
    """The rational function whose floor is local variable `k` of `aff`."""
    found = aff.get_div(k)
    if found.is_nan():
        raise CannotLower("a set whose membership takes a search")
    return found
