"""Lowering a structured op to loops: check, choose a plan, and generate what the plan says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..errors import CannotLower
from ..loop_ir import build
from ..loop_ir.nodes import Allocate, Stmt
from ..naming import mint
from ..target import Target
from .domain import is_wanted
from .expert import choose
from .facts import shared
from .fragment_kernel import allocated, fragment_kernel
from .microkernel import Operand, microkernel
from .normalise import normalise
from .op import StructuredOp
from .pack import Panel, pack
from .plan import Pack, Plan
from .tile import Region, loop, parallel_nest, peeled, whole
from .unpack import unpack

Operands = tuple[Operand, ...]


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
        return allocated(op, plan, _inside(op, plan, region, operands, plan.packs, 0))
    outer = plan.levels[: plan.collapsed]
    panels, operands = _panels(op, plan, region, operands, (step for step in plan.packs if not step.depth))
    parts = peeled(region, outer)
    return _filled(panels, build.block(*(_in_parallel(op, plan, part, operands) for part in parts)))


def _in_parallel(op: StructuredOp, plan: Plan, region: Region, operands: Operands) -> Stmt:
    """The loop that the threads share, after what they have copied together."""
    alike = tuple(step for step in plan.packs if shared(op, plan, step))
    panels, operands = _panels(op, plan, region, operands, alike)
    packs = tuple(step for step in plan.packs if step.depth and step not in alike)
    loop = parallel_nest(
        region,
        plan.levels[: plan.collapsed],
        op.name,
        plan.grain,
        lambda r: allocated(op, plan, _inside(op, plan, r, operands, packs, plan.collapsed)),
    )
    return replace(loop, body=_filled(panels, loop.body))


def _inside(
    op: StructuredOp, plan: Plan, region: Region, operands: Operands, packs: tuple[Pack, ...], depth: int
) -> Stmt:
    """The code inside `plan.levels[:depth]`: the panels of `packs` made there, then the rest of the loops."""
    if depth in (plan.collapsed, len(plan.levels)) or any(step.depth == depth for step in packs):
        return build.when(is_wanted(op, region), _computed(op, plan, region, operands, packs, depth))
    return _computed(op, plan, region, operands, packs, depth)


def _computed(
    op: StructuredOp, plan: Plan, region: Region, operands: Operands, packs: tuple[Pack, ...], depth: int
) -> Stmt:
    """`_inside` for a region with elements that are wanted."""
    if depth == plan.unpacked:
        results = unpack(op, plan, region, mint(op.name, "results"))
        inner = replace(plan, unpacked=None, streaming=False)
        body = _computed(results.op, inner, region, operands, packs, depth)
        return Allocate((results.buffer,), build.block(body, results.store))
    panels, operands = _panels(op, plan, region, operands, (step for step in packs if step.depth == depth))
    if depth == len(plan.levels):
        body = (fragment_kernel if plan.instruction else microkernel)(op, plan, region, operands)
    else:
        level = plan.levels[depth]
        name = mint(level.iterator, f"t{depth}")
        body = loop(region, level, name, lambda r: _inside(op, plan, r, operands, packs, depth + 1))
    return _filled(panels, body)


def _panels(
    op: StructuredOp, plan: Plan, region: Region, operands: Operands, packs: Iterable[Pack]
) -> tuple[list[Panel], Operands]:
    """The panels for what is read in `region`, and the operands with these in their places."""
    panels = []
    for step in packs:
        side = step.side.value
        panel = pack(op, plan, op.factors[side], region, step.depth, mint(op.name, step.side.name.lower()))
        operands = tuple(panel.operand if i == side else o for i, o in enumerate(operands))
        panels.append(panel)
    return panels, operands


def _filled(panels: Sequence[Panel], body: Stmt) -> Stmt:
    for panel in reversed(panels):
        body = Allocate((panel.buffer,), build.block(panel.fill, body))
    return body
