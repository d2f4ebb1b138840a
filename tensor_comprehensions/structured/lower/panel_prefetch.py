"""Prefetching of panels: while register tiles use one panel of a factor, prefetch the lines of the next one.

Hardware prefetchers follow streams inside a page. The rows of a panel are short and pages apart, so each row would wait
for memory beyond L2. So the loops over a panel prefetch the next one: each iteration of the innermost reduction
prefetches one row of it, and the register tiles share the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...loop_ir import build
from ...loop_ir.intrinsics import PREFETCH_LATER
from ...loop_ir.nodes import Expr, Invoke, Load, Stmt
from ...machine import CACHE_LINE_BYTES
from ..analysis.access_strides import access_strides
from ..op import StructuredOp
from ..plan import PackStep, Plan
from .tile import Region, local_var, num_tiles, region_origin
from .vector_expr import substitute_vectorized


def why_no_prefetch(op: StructuredOp, plan: Plan, step: PackStep) -> str | None:
    """Why the loops inside `plan.levels[:step.depth]` cannot prefetch the next panel of a factor; None if they can."""
    factor = op.factors[step.side.value]
    moved = (
        access_strides(factor, [i.name for i in op.iterators])
        if isinstance(factor, Load) and factor.mask is None
        else None
    )
    if moved is None:
        return "is computed"
    if moved.get(plan.vector) != 1:
        return "is not contiguous along the lanes"
    if not step.depth or any(level.iterator in moved for level in plan.levels[step.depth :]):
        return "is not read anew in the next iteration as a whole"
    if any(plan.tile(i.name) > 1 for i in op.parallel if i.name != plan.vector and i.name in moved):
        return "has several rows in a register tile"
    if plan.instruction:
        return "is read by whole fragments"
    if plan.unrolled == len(plan.reductions):
        return "is not read in a loop over the sum"
    return None


def prefetch_hints_for_panel(op: StructuredOp, plan: Plan, region: Region, at: dict[str, Expr]) -> Stmt:
    """The prefetches in one iteration of the innermost reduction in the register tile `region`.

    at: the values of the reductions at the first step of the iteration.
    """
    return build.block(*(h for step in plan.prefetches for h in _emit_row_prefetches(op, plan, step, region, at)))


def _emit_row_prefetches(
    op: StructuredOp, plan: Plan, step: PackStep, region: Region, at: dict[str, Expr]
) -> Iterator[Stmt]:
    """The prefetches of one row of the next panel; the register tiles that use a panel prefetch consecutive rows."""
    factor = op.factors[step.side.value]
    assert isinstance(factor, Load)
    line = CACHE_LINE_BYTES // factor.buffer.type.dtype.size
    outer, inner = plan.levels[step.depth - 1], plan.reductions[len(plan.reductions) - plan.unrolled - 1]
    first = build.mul(_make_tile_number(op, plan, step, region), region[inner].size // plan.unroll_steps)
    row = build.add(first, build.div(at[local_var(inner)], plan.unroll_steps))
    there = region_origin(region) | at
    there[inner] = build.add(region[inner].origin, build.minimum(row, region[inner].size - 1))
    there[outer.iterator] = build.add(there[outer.iterator], outer.size)
    for k in range(num_tiles(plan.tile(plan.vector), line)):
        here = there | {plan.vector: build.add(there[plan.vector], k * line)}
        where = tuple(substitute_vectorized(index, here) for index in factor.indices)
        yield Invoke(PREFETCH_LATER, ((factor.buffer, where),), (0,))


def _make_tile_number(op: StructuredOp, plan: Plan, step: PackStep, region: Region) -> Expr:
    """The number of this register tile among those that use the same panel."""
    innermost = {level.iterator: level.size for level in plan.levels[step.depth :]}
    tile: Expr = build.const(0)
    for name, size in innermost.items():
        tile = build.add(build.mul(tile, num_tiles(op.extent(name), size)), region[name].number)
    return tile
