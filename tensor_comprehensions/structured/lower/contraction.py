"""Lowering of a structured op to loops: check the op, choose a plan, and generate code for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Allocate, Stmt
from ...loop_ir.origins import with_origin
from ...target import CpuTarget
from ..amx.tile_microkernel import matrix_tile_kernel, with_tile_buffers
from ..analysis.contraction_info import is_shared_panel
from ..match.drop_unit_dims import drop_unit_dims
from ..op import StructuredOp, factor_tensor
from ..plan import PackStep, Plan
from ..planners.select import select_plan
from .masked_domain import emit_region_needed
from .microkernel import Operand, microkernel
from .output_panel import make_output_panel
from .pack import PackedPanel, make_panel
from .tile import Region, full_region, parallel_tile_nest, peel_region, tile_loop

Operands = tuple[Operand, ...]
COPY, RESULTS = "copy of", "results from a panel"
"""Origins of stores: into the panel of a factor; from an output panel into the output."""


def lower_contraction(op: StructuredOp, target: CpuTarget, *, parallel: bool, plan: Plan | None = None) -> Stmt:
    """The loops that compute `op` on `target`.

    Args:
        op: an empty parallel iterator makes an empty program.
        parallel: whether the outermost loop may be parallel, because no loop surrounds the op.
        plan: a plan for `drop_unit_dims(op)`; None leaves the choice to the cost model.

    Raises:
        CannotLower: no register tile can compute the op. Whether one is fast is the question of `why_unprofitable`.
    """
    if op.reduction != "+":
        raise CannotLower(f"{op.name}: reduction {op.reduction!r} of products")
    if any(i.extent == 0 for i in op.parallel):
        return build.NOTHING
    if any(i.extent == 0 for i in op.reductions):
        raise CannotLower(f"{op.name}: an empty reduction")
    op = drop_unit_dims(op)
    return generate_contraction(op, plan or select_plan(op, target, parallel=parallel))


def generate_contraction(op: StructuredOp, plan: Plan) -> Stmt:
    """The loops of `plan` around the micro-kernel of `op`."""
    region = full_region({i.name: i.extent for i in op.iterators})
    operands = tuple(Operand(factor) for factor in op.factors)
    if not plan.parallel_depth:
        return with_tile_buffers(op, plan, _lower_levels(op, plan, region, operands, plan.packs, 0))
    outer = plan.levels[: plan.parallel_depth]
    panels, operands = _make_panels(op, plan, region, operands, (step for step in plan.packs if not step.depth))
    parts = peel_region(region, outer)
    return _fill_panels(panels, build.block(*(_emit_parallel_loop(op, plan, part, operands) for part in parts)))


def _emit_parallel_loop(op: StructuredOp, plan: Plan, region: Region, operands: Operands) -> Stmt:
    """The parallel loop, inside the allocations and fills of the panels that all its iterations share."""
    alike = tuple(step for step in plan.packs if is_shared_panel(op, plan, step))
    panels, operands = _make_panels(op, plan, region, operands, alike)
    packs = tuple(step for step in plan.packs if step.depth and step not in alike)
    loop = parallel_tile_nest(
        region,
        plan.levels[: plan.parallel_depth],
        op.name,
        plan.grain,
        lambda r: with_tile_buffers(op, plan, _lower_levels(op, plan, r, operands, packs, plan.parallel_depth)),
    )
    return replace(loop, body=_fill_panels(panels, loop.body))


def _lower_levels(
    op: StructuredOp, plan: Plan, region: Region, operands: Operands, packs: tuple[PackStep, ...], depth: int
) -> Stmt:
    """The code inside `plan.levels[:depth]`: the panels of `packs` at this depth, then the remaining loops.

    Tiles without needed elements are skipped.
    """
    if depth in (plan.parallel_depth, len(plan.levels)) or any(step.depth == depth for step in packs):
        return build.when(emit_region_needed(op, region), _lower_region(op, plan, region, operands, packs, depth))
    return _lower_region(op, plan, region, operands, packs, depth)


def _lower_region(
    op: StructuredOp, plan: Plan, region: Region, operands: Operands, packs: tuple[PackStep, ...], depth: int
) -> Stmt:
    """`_lower_levels` without a test whether the region has needed elements."""
    if depth == plan.output_panel_depth:
        results = make_output_panel(op, plan, region, internal_name(op.name, "results"))
        inner = replace(plan, output_panel_depth=None, nontemporal=False)
        body = _lower_region(results.op, inner, region, operands, packs, depth)
        store = with_origin(results.store, (), RESULTS)
        return Allocate((results.buffer,), build.block(body, store))
    panels, operands = _make_panels(op, plan, region, operands, (step for step in packs if step.depth == depth))
    if depth == len(plan.levels):
        body = (matrix_tile_kernel if plan.instruction else microkernel)(op, plan, region, operands)
    else:
        level = plan.levels[depth]
        name = internal_name(level.iterator, f"t{depth}")
        body = tile_loop(region, level, name, lambda r: _lower_levels(op, plan, r, operands, packs, depth + 1))
    return _fill_panels(panels, body)


def _make_panels(
    op: StructuredOp, plan: Plan, region: Region, operands: Operands, packs: Iterable[PackStep]
) -> tuple[list[PackedPanel], Operands]:
    """The panels of `packs` for reads in `region`, and all operands, of which the packed ones read panels."""
    panels = []
    for step in packs:
        side = step.side.value
        panel = make_panel(
            op, plan, op.factors[side], region, step.depth, internal_name(op.name, step.side.name.lower())
        )
        operands = tuple(panel.operand if i == side else o for i, o in enumerate(operands))
        panels.append(replace(panel, fill=with_origin(panel.fill, (), COPY, factor_tensor(op.factors[side]))))
    return panels, operands


def _fill_panels(panels: Sequence[PackedPanel], body: Stmt) -> Stmt:
    for panel in reversed(panels):
        body = Allocate((panel.buffer,), build.block(panel.fill, body))
    return body
