"""Output panels: a panel keeps the results of the loops inside a level, and is copied to the output when complete.

If the output and the vector operand are contiguous along different iterators, one of them has to be transposed. With an
output panel that is the output, the smaller one, and both are accessed in runs as long as the panel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Expr, Load, Space, Stmt, Var
from ..analysis.access_strides import access_strides
from ..op import ACCUMULATOR, StructuredOp
from ..plan import Plan
from .tile import Region
from .transpose import Axis, transpose_loops
from .vector_expr import substitute_vectorized


@dataclass(frozen=True, slots=True)
class OutputPanel:
    """A panel of results.

    Attributes:
        buffer: its memory.
        op: the op with the panel as its output, without epilogue.
        store: the statement that copies the panel to the output through the epilogue.
    """

    buffer: Buffer
    op: StructuredOp
    store: Stmt


def with_panel_output(op: StructuredOp, vector: str) -> StructuredOp:
    """`op` with a panel that is contiguous along `vector` as its output, for the cost model."""
    order = (*(i for i in op.parallel if i.name != vector), op.iterator(vector))
    panel = build.buffer(internal_name(op.name, "results"), op.dtype, tuple(i.extent for i in order))
    return replace(op, output=Load(panel, tuple(Var(i.name) for i in order)), epilogue=None)


def make_output_panel(op: StructuredOp, plan: Plan, region: Region, name: str) -> OutputPanel:
    """The panel `name` for the results of `plan.levels[plan.output_panel_depth:]` in `region`."""
    moved = access_strides(op.output, [i.name for i in op.parallel]) or {}
    unit = next(i.name for i in op.parallel if moved.get(i.name) == 1)
    order = _order_iterators(op, plan, region, unit)
    buffer = build.buffer(name, op.dtype, tuple(region[n].size for n in order), Space.SCRATCH)
    inside = Load(buffer, tuple(build.sub(Var(n), region[n].origin) for n in order))
    offsets: dict[str, Expr] = {n: Var(internal_name(name, n, "u")) for n in order}
    at = {n: part.origin for n, part in region.items()}
    at |= {n: build.add(region[n].origin, offset) for n, offset in offsets.items()}
    total = Load(buffer, tuple(offsets.values()))
    where = (substitute_vectorized(i, at) for i in op.output.indices)
    value = substitute_vectorized(op.stored_value, {**at, ACCUMULATOR: total})
    store = replace(build.store(op.output.buffer, tuple(where), value), nontemporal=plan.nontemporal)
    # Square blocks are transposed in registers, in loops that follow the output's memory order.
    across, lanes = (
        Axis(internal_name(name, n, "u"), build.const(0), build.const(region[n].size)) for n in (plan.vector, unit)
    )
    body = transpose_loops([store], [total], across, lanes, plan.lanes)
    others = sorted((n for n in order if n not in (plan.vector, unit)), key=lambda n: -abs(moved.get(n, 0)))
    through = build.loops([(internal_name(name, n, "u"), region[n].size) for n in others], body)
    return OutputPanel(buffer, replace(op, output=inside, epilogue=None), through)


def _order_iterators(op: StructuredOp, plan: Plan, region: Region, unit: str) -> tuple[str, ...]:
    """The panel's dimensions: the iterators with several points in `region`, in loop order, the lanes' last."""
    names = [i.name for i in op.parallel if i.name != plan.vector and (region[i.name].size > 1 or i.name == unit)]
    return (*sorted(names, key=plan.depth), plan.vector)
