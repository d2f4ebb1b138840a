"""Operands of an epilogue that lie across the lanes, such as the mask of an attention whose scores are turned.

A load of one of them would gather each lane from another cache line. So the part that a register tile needs is
transposed in registers into a buffer, from which the epilogue reads whole vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Expr, Load, Space, Stmt, Store, Var
from ...loop_ir.rewrite import map_expr
from ...machine import SHUFFLE_BYTES
from ...thresholds import MAX_INTERLEAVED_STRIDE, TRANSPOSE_BITS
from ..analysis.access_strides import access_strides
from ..op import StructuredOp, loads_in
from ..plan import Plan
from .tile import Region, local_var, region_origin
from .transpose import Axis, transpose_loops
from .vector_expr import substitute_vectorized


@dataclass(frozen=True, slots=True)
class TransposedRead:
    """A load of an epilogue that is contiguous along `unit`, a row iterator of the register tile."""

    load: Load
    unit: str


def find_transposed_reads(op: StructuredOp, plan: Plan, region: Region) -> tuple[TransposedRead, ...]:
    """The loads of the epilogue that lie across the lanes of a register tile, whose rows they follow."""
    if op.epilogue is None:
        return ()
    rows = [i.name for i in op.parallel if i.name != plan.vector and region[i.name].size > 1]
    if len(rows) != 1:
        return ()
    (unit,) = rows
    found = []
    for load in dict.fromkeys(loads_in(op.epilogue)):
        moved = access_strides(load, [i.name for i in op.iterators])
        if moved is None or load.mask is not None:
            continue
        if moved.get(unit) == 1 and abs(moved.get(plan.vector, 0)) > MAX_INTERLEAVED_STRIDE:
            found.append(TransposedRead(load, unit))
    return tuple(found)


def stage_transposed_reads(
    op: StructuredOp, plan: Plan, region: Region, reads: tuple[TransposedRead, ...]
) -> tuple[Expr, tuple[Buffer, ...], Stmt]:
    """The epilogue with loads from buffers, the buffers, and the code that fills them for a register tile."""
    lanes = -(-region[plan.vector].size // plan.lanes) * plan.lanes
    origin = region_origin(region)
    places: dict[Expr, Load] = {}
    copies: list[Stmt] = []
    buffers: list[Buffer] = []
    for k, read in enumerate(reads):
        rows, columns = (_make_axis(name, region) for name in (read.unit, plan.vector))
        dtype = read.load.buffer.type.dtype
        shape = (region[read.unit].size, lanes)
        buffer = build.buffer(internal_name(op.name, "turned", k), dtype, shape, Space.SCRATCH)
        buffers.append(buffer)
        place = (build.sub(Var(a.name), a.start) for a in (rows, columns))
        near = region[read.unit].size * dtype.size >= SHUFFLE_BYTES
        elsewhere = {name: first for name, first in origin.items() if name not in (read.unit, plan.vector)}
        load = substitute_vectorized(read.load, elsewhere)
        assert isinstance(load, Load)
        store = Store(buffer, tuple(place), load)
        side = TRANSPOSE_BITS // dtype.bits
        copies.append(transpose_loops([store], [load], rows, columns, side, near=near))
        places[read.load] = Load(buffer, (Var(local_var(read.unit)), Var(local_var(plan.vector))))
    assert op.epilogue is not None
    return _replace_loads(op.epilogue, places), tuple(buffers), build.block(*copies)


def _make_axis(name: str, region: Region) -> Axis:
    """The values of an iterator in the register tile."""
    return Axis(name, region[name].origin, build.add(region[name].origin, region[name].size))


def _replace_loads(e: Expr, places: Mapping[Expr, Load]) -> Expr:
    found = places.get(e) if isinstance(e, Load) else None
    return map_expr(e, lambda x: _replace_loads(x, places)) if found is None else found
