"""Loops over a restricted domain: its inequalities become loop bounds if possible, else conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...tc_lang.ir import Inequality
from ..schedule.loop_nest import DimKind, LoopNest, NestDim


@dataclass(frozen=True, slots=True)
class Restriction:
    """Where each inequality of a leaf's domain takes effect.

    Elements outside of the domain may be computed, but terms outside of it must not be added.

    Attributes:
        bounds: by the position of a loop, the inequalities that bound it.
        widest: the same for loops inside the vector loop, whose bounds must cover the iterations of all lanes.
        around: conditions on the whole nest.
        begun: conditions on adding terms to an element; it is initialized in any case.
        chosen: conditions that differ between lanes; where they fail, the neutral element is added.
    """

    bounds: Mapping[int, tuple[Inequality, ...]]
    around: tuple[Inequality, ...] = ()
    begun: tuple[Inequality, ...] = ()
    chosen: tuple[Inequality, ...] = ()
    widest: Mapping[int, tuple[Inequality, ...]] = field(default_factory=dict)


def place_inequalities(leaf: LoopNest, order: Sequence[NestDim], lanes: NestDim | None) -> Restriction:
    """Where the inequalities of `leaf` take effect if its loops are nested in `order` and vectorized along `lanes`."""
    first = leaf.nodes[0]
    names = [d.index(first) for d in order]
    lane = None if lanes is None else lanes.index(first)
    unwanted = leaf.elements
    bounds: dict[int, tuple[Inequality, ...]] = {}
    widest: dict[int, tuple[Inequality, ...]] = {}
    others: dict[str, list[Inequality]] = {"around": [], "begun": [], "chosen": []}
    for g in first.domain:
        used = [name for name, _ in g.terms]
        last = max((k for k, name in enumerate(names) if name in used), default=None)
        uneven = lane in used and (last is None or names[last] != lane)
        if uneven:  # a loop inside the lanes cannot have other bounds for each of them
            if last is not None and (g in unwanted or order[last].kind is DimKind.REDUCTION):
                widest[last] = (*widest.get(last, ()), g)
            if g not in unwanted:
                others["chosen"].append(g)
        elif last is None:
            others["around" if g in unwanted else "begun"].append(g)
        elif g in unwanted or order[last].kind is DimKind.REDUCTION:
            bounds[last] = (*bounds.get(last, ()), g)
        else:
            others["chosen" if names[last] == lane else "begun"].append(g)
    around, begun, chosen = (tuple(others[kind]) for kind in ("around", "begun", "chosen"))
    return Restriction(bounds, around, begun, chosen, widest)


def value_of(g: Inequality, indices: Mapping[str, ir.Expr], without: str = "") -> ir.Expr:
    """The affine form of `g`, which must be nonnegative, without the term of the index `without`."""
    total: ir.Expr = build.const(g.constant)
    for name, c in g.terms:
        if name != without:
            total = build.add(total, build.mul(indices[name], c))
    return total


def emit_conjunction(inequalities: Sequence[Inequality], indices: Mapping[str, ir.Expr]) -> ir.Expr:
    """The condition that all `inequalities` hold."""
    whole: ir.Expr = build.TRUE
    for g in inequalities:
        whole = build.logical_and(whole, build.ge(value_of(g, indices), 0))
    return whole


def restrict_bounds(
    inequalities: Sequence[Inequality], index: str, start: ir.Expr, stop: ir.Expr, indices: Mapping[str, ir.Expr]
) -> tuple[ir.Expr, ir.Expr]:
    """The part (start, stop) of a loop over `index` in which all `inequalities` hold; start is stop if it is empty."""
    first = start
    for g in inequalities:
        c = dict(g.terms)[index]
        rest = value_of(g, indices, index)
        if c > 0:
            start = build.maximum(start, build.sub(0, build.div(rest, c)))
        else:
            stop = build.minimum(stop, build.add(build.div(rest, -c), 1))
    return (start if start is first else build.minimum(start, stop)), stop


def widest_bounds(
    inequalities: Sequence[Inequality],
    index: str,
    ends: tuple[ir.Expr, ir.Expr],
    lane: tuple[str, ir.Expr, ir.Expr],
    indices: Mapping[str, ir.Expr],
) -> tuple[ir.Expr, ir.Expr]:
    """The part of a loop over `index` from `ends[0]` to `ends[1]` in which each inequality holds in some lane.

    lane: (index along the lanes, its start, its stop).
    """
    name, first, stop = lane
    for g in inequalities:
        extreme = build.sub(stop, 1) if dict(g.terms)[name] > 0 else first
        ends = restrict_bounds((g,), index, *ends, {**indices, name: extreme})
    return ends
