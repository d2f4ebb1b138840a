"""Lowering a structured op to loops: check, choose a plan, and generate what the plan says."""

from __future__ import annotations

from ..errors import CannotLower
from ..loop_ir import build
from ..loop_ir.nodes import Allocate, Stmt
from ..target import Target
from .expert import choose
from .microkernel import Operand, microkernel
from .normalise import normalise
from .op import StructuredOp
from .pack import pack
from .plan import Plan
from .tile import Region, loop, parallel_nest, whole


def lower(op: StructuredOp, target: Target, *, parallel: bool, plan: Plan | None = None) -> Stmt:
    """The loops that compute `op` on `target`.

    parallel: the op stands alone at the top of a kernel and its outermost loop may be a parallel one; otherwise
    every loop is serial. plan: followed instead of the one the cost model chooses; it must be made for
    `normalise(op)`.

    Raises:
        CannotLower: no register tile can compute the op. Whether one does it well, `objection` tells.
    """
    if op.reduction != "+":
        raise CannotLower(f"{op.name}: reduction {op.reduction!r} of products")
    if any(i.extent == 0 for i in op.parallel):
        return build.NOTHING
    if any(i.extent == 0 for i in op.reductions):
        raise CannotLower(f"{op.name}: an empty reduction")
    op = normalise(op)
    return generate(op, plan or choose(op, target, parallel=parallel))


def generate(op: StructuredOp, plan: Plan) -> Stmt:
    """The loops of `plan` around the micro-kernel of `op`."""
    region = whole({i.name: i.extent for i in op.iterators})
    operands = tuple(Operand(factor) for factor in op.factors)
    if not plan.collapsed:
        return _inside(op, plan, region, operands, 0)
    outer = plan.levels[: plan.collapsed]
    return parallel_nest(region, outer, op.name, plan.grain, lambda r: _inside(op, plan, r, operands, plan.collapsed))


def _inside(op: StructuredOp, plan: Plan, region: Region, operands: tuple[Operand, ...], depth: int) -> Stmt:
    """The code inside `plan.levels[:depth]`: the panels made there, then the rest of the loops."""
    panels = []
    for step in plan.packs:
        if step.depth == depth:
            side = step.side.value
            panel = pack(op, plan, op.factors[side], region, depth, f"{op.name}_{step.side.name.lower()}")
            operands = tuple(panel.operand if i == side else o for i, o in enumerate(operands))
            panels.append(panel)
    if depth == len(plan.levels):
        body = microkernel(op, plan, region, operands)
    else:
        level = plan.levels[depth]
        name = f"{level.iterator}_t{depth}"
        body = loop(region, level, name, lambda r: _inside(op, plan, r, operands, depth + 1))
    for panel in reversed(panels):
        body = Allocate(panel.buffer, build.block(panel.fill, body))
    return body
