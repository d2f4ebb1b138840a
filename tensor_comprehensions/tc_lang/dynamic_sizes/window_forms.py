"""Ranges that depend on a size when rows are computed from windows of an operand, as in convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..affine import Variable, to_affine
from ..binding.ranges import Bounds
from ..ir import Expr
from ..size_polynomial import SizePolynomial, Value, as_quotient, constant_value, to_polynomial


@dataclass(frozen=True, slots=True)
class RangeForm:
    """A range that starts at `start` and has one value per window of `reach` elements; windows are `step` apart.

    For a size, its extent is `(size - reach + step) / step`.
    """

    start: int = 0
    step: int = 1
    reach: int = 1


WHOLE = RangeForm()
"""The form of a range with one value per element."""


def parse_range_form(bounds: Bounds, name: str) -> RangeForm | None:
    """The form of a range that depends only on the size `name`; None if it has none."""
    start = constant_value(bounds[0])
    if start is None:
        return None
    extent = to_polynomial(bounds[1]) - start
    count, step = as_quotient(extent) or (extent, 1)
    rest = constant_value(count - SizePolynomial.name(name))
    if rest is None or step - rest < 1:
        return None
    return RangeForm(start, step, step - rest)


def is_in_window(
    subscript: Expr, index: str, form: RangeForm, indices: Mapping[str, Bounds], sizes: Mapping[str, Value]
) -> bool:
    """Whether a subscript is in the window of the row `index` for all values of the other indices."""
    affine = to_affine(subscript, sizes)
    start = constant_value(affine.constant)
    if start is None:
        return False
    low = high = start
    steps = 0
    for atom, factor in affine.terms:
        c = constant_value(factor)
        if not isinstance(atom, Variable) or c is None:
            return False
        if atom.name == index:
            steps = c
            continue
        first, end = map(constant_value, indices[atom.name])
        if first is None or end is None or end <= first:
            return False
        ends = (c * first, c * (end - 1))
        low, high = low + min(ends), high + max(ends)
    shift = form.step * form.start
    return steps == form.step and low + shift >= 0 and high + shift < form.reach
