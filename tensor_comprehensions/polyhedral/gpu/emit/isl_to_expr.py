"""Convert quasi-affine functions and sets of isl to expressions of the loop program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import islpy as isl

from ....core.errors import CannotLower
from ....loop_ir import build
from ....loop_ir.nodes import BLOCK, THREAD, Expr, Launch
from ...scop.isl_affine import variable_of
from ..tree.schedule_tree import BLOCK_IDS, THREAD_IDS


def launch_identifiers(launch: Launch) -> dict[str, Expr]:
    """The expressions of the parameters for blocks and threads; those with a single value are 0."""
    names = zip((*BLOCK_IDS, *THREAD_IDS), (*BLOCK, *THREAD), (*launch.grid, *launch.block), strict=True)
    return {p: build.var(name) if count > 1 else build.const(0) for p, name, count in names}


@dataclass(frozen=True, slots=True)
class IslExprBuilder:
    """Builds expressions from functions and sets on a space, given those of its dimensions and parameters."""

    dimensions: Sequence[Expr]
    parameters: Mapping[str, Expr]

    def of(self, aff: isl.Aff) -> Expr:
        """The value of an integer-valued quasi-affine function of the space."""
        return build.div(self._numerator(aff), aff.get_denominator_val().to_python())

    def holds(self, condition: isl.Set) -> Expr:
        """The condition that the point is in a set. Raises CannotLower if testing that needs a search."""
        holds: Expr = build.FALSE
        for part in condition.compute_divs().get_basic_sets():
            holds = build.logical_or(holds, self._convert_piece(part))
        return holds

    def _convert_piece(self, part: isl.BasicSet) -> Expr:
        holds: Expr = build.TRUE
        for constraint in part.get_constraints():
            holds = build.logical_and(holds, self._convert_constraint(constraint))
        return holds

    def _convert_constraint(self, constraint: isl.Constraint) -> Expr:
        """The condition of a constraint, with negative terms on the other side: `x < 5` rather than `4 - x >= 0`."""
        aff = constraint.get_aff()
        left, right = self._sum(aff, -1), self._sum(aff, 1)
        if constraint.is_equality():
            return build.eq(left, right)
        constant = build.integer(right)
        return build.le(left, right) if constant is None else build.lt(left, constant + 1)

    def _numerator(self, aff: isl.Aff) -> Expr:
        """The value of the function times its denominator."""
        return build.sub(self._sum(aff, 1), self._sum(aff, -1))

    def _sum(self, aff: isl.Aff, sign: int) -> Expr:
        """The sum of the absolute values of the terms with this sign, including the constant, times the denominator."""
        scale = aff.get_denominator_val()
        total: Expr | None = None
        for kind, k, factor in _list_nonzero_terms(aff):
            weight = sign * factor.mul(scale).to_python()
            if weight > 0:
                term = self._atom(aff, kind, k, weight)
                total = term if total is None else build.add(total, term)
        constant = sign * aff.get_constant_val().mul(scale).to_python()
        if constant > 0 or total is None:
            total = build.const(max(0, constant)) if total is None else build.add(total, constant)
        return total

    def _atom(self, aff: isl.Aff, kind: isl.dim_type, k: int, factor: int) -> Expr:
        match kind:
            case isl.dim_type.in_:
                atom = self.dimensions[k]
            case isl.dim_type.param:
                name = aff.get_dim_name(kind, k) or ""
                variable = variable_of(name)
                atom = self.parameters[name] if variable is None else build.var(variable)
            case _:
                atom = self.of(_get_floor_argument(aff, k))
        return build.mul(atom, factor)


def _list_nonzero_terms(aff: isl.Aff) -> list[tuple[isl.dim_type, int, isl.Val]]:
    kinds = (isl.dim_type.in_, isl.dim_type.param, isl.dim_type.div)
    every = [(kind, k, aff.get_coefficient_val(kind, k)) for kind in kinds for k in range(aff.dim(kind))]
    return [(kind, k, factor) for kind, k, factor in every if not factor.is_zero()]


def _get_floor_argument(aff: isl.Aff, k: int) -> isl.Aff:
    """The rational function whose floor is the local variable `k` of `aff`; CannotLower if it has no formula."""
    found = aff.get_div(k)
    if found.is_nan():
        raise CannotLower("a set whose membership takes a search")
    return found
