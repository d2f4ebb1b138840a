"""Masked domains: skip tiles that a mask excludes, and shorten the reduction loops of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Expr, Let, Loop, Stmt, Var
from ..op import HalfSpace, StructuredOp
from .tile import Region, local_var, tile_number_var

Step = Callable[[dict[str, Expr]], Stmt]
"""Generates the code for given values of the reductions."""


def emit_half_space_test(half: HalfSpace, at: Mapping[str, Expr]) -> Expr:
    """A bool expression: whether a point is in the half space, per lane for a vector of points."""
    total = half.rest
    for name, c in half.terms:
        total = build.add(total, build.mul(at[name], c))
    return build.ge(total, 0)


def emit_membership(halves: Iterable[HalfSpace], at: Mapping[str, Expr]) -> Expr:
    """A bool expression: whether a point is in all half spaces, per lane for a vector of points."""
    whole: Expr = build.TRUE
    for half in halves:
        whole = build.logical_and(whole, emit_half_space_test(half, at))
    return whole


def emit_region_needed(op: StructuredOp, region: Region) -> Expr:
    """A bool expression: false only if no element of a region is needed."""
    whole: Expr = build.TRUE
    for half in op.elements:
        whole = build.logical_and(whole, build.ge(_build_form_extremum(half, region, most=True), 0))
    return whole


def _build_form_extremum(half: HalfSpace, region: Region, *, most: bool, without: str = "") -> Expr:
    """The largest (or smallest) value in a region of the half space's affine form, minus the term of `without`."""
    total = half.rest
    for name, c in half.terms:
        if name == without:
            continue
        part = region[name]
        end = part.size - 1 if (c > 0) == most else 0
        total = build.add(total, build.mul(build.add(part.origin, end), c))
    return total


@dataclass(frozen=True, slots=True)
class UnmaskedRange:
    """Which steps of one reduction have terms in a register tile, counted from the start of its range.

    Attributes:
        first, stop: the half-open range of steps in which some points of the tile have a term.
        all_first, all_stop: the half-open range, inside it, in which all points have one.
    """

    first: Expr
    stop: Expr
    all_first: Expr
    all_stop: Expr


def unmasked_range_of(op: StructuredOp, region: Region, name: str) -> UnmaskedRange:
    """The range of the reduction `name` in a register tile that holds for all values of the other reductions."""
    part = region[name]
    first: Expr = build.const(0)
    stop: Expr = build.const(part.size)
    all_first, all_stop = first, stop
    for half in op.terms:
        c = dict(half.terms).get(name, 0)
        some, every = (_build_form_extremum(half, region, most=most, without=name) for most in (True, False))
        if c == 0:
            stop = build.select(build.ge(some, 0), stop, build.const(0))
            all_stop = build.select(build.ge(every, 0), all_stop, build.const(0))
        elif c > 0:
            first, all_first = (
                build.maximum(old, build.sub(build.sub(0, build.div(f, c)), part.origin))
                for old, f in ((first, some), (all_first, every))
            )
        else:
            stop, all_stop = (
                build.minimum(old, build.sub(build.add(build.div(f, -c), 1), part.origin))
                for old, f in ((stop, some), (all_stop, every))
            )
    all_first = build.minimum(build.maximum(all_first, first), part.size)
    return UnmaskedRange(first, stop, all_first, build.maximum(all_stop, all_first))


def masked_sum(
    op: StructuredOp, name: str, at_once: int, region: Region, before: Step, step: Step, masked: Step
) -> Stmt:
    """The loops over the reduction `name` in a register tile whose bounds depend on the tile.

    Args:
        at_once: steps per iteration of the loop without masks.
        before: the code at the start of each of its iterations.
        step: the code of a step in which all points of the tile have a term.
        masked: the code of a step in which only some have.
    """
    part = region[name]

    def index_point(offset: Expr) -> dict[str, Expr]:
        return {name: build.add(offset, part.origin), local_var(name): offset, tile_number_var(name): part.number}

    ends = unmasked_range_of(op, region, name)
    first, stop, begin, full = (Var(internal_name(name, end)) for end in ("first", "stop", "begin", "full"))
    counter = Var(internal_name(name, "r"))
    offset = build.add(begin, build.mul(counter, at_once))
    many = build.block(before(index_point(offset)), *(step(index_point(build.add(offset, s))) for s in range(at_once)))
    rest = build.add(begin, build.mul(full, at_once))
    body: Stmt = build.block(
        Loop(counter.name, first, build.minimum(begin, stop), masked(index_point(counter))),
        Loop(counter.name, build.const(0), full, many),
        Loop(counter.name, build.maximum(first, rest), stop, masked(index_point(counter))),
    )
    count = build.div(build.sub(ends.all_stop, begin), at_once)
    values = (ends.first, ends.stop, ends.all_first, count)
    for end, value in reversed(list(zip((first, stop, begin, full), values, strict=True))):
        body = Let(end.name, value, body)
    return body


def find_bounded_reduction(op: StructuredOp, loops: Sequence[str], unrolled: Sequence[str]) -> str:
    """The reduction whose loop gets bounds per tile; "" if the op has no mask, or each term has to be tested."""
    if not op.terms or not loops:
        return ""
    summed = {name for half in op.terms for name, _ in half.terms} & {i.name for i in op.reductions}
    return loops[-1] if summed <= {loops[-1]} else ""
