"""Blocks of a sum for L1: all register tiles of a serial op run over some rows of the factors before the next rows.

If L2 cannot hold both factors, and each step of the sum reads other cache lines of both, every register tile waits for
lines from L3. In blocks, the vector operand's rows stay in L1, and come from L3 once.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

from ...machine import CACHE_LINE_BYTES, L2_STRIDED_BYTES_PER_CYCLE
from ...target import CpuTarget
from ...thresholds import L1_BLOCK_ROW_TILES, MIN_L1_BLOCK_STEPS
from ..analysis.contraction_info import ContractionInfo, Factor
from ..cost.tile_cost import multiply_cost
from ..lower.tile import balanced_block, num_tiles
from ..op import loads_in
from ..plan import Plan, TileLoop


def block_sum_for_l1(known: ContractionInfo, plan: Plan, target: CpuTarget) -> Plan:
    """`plan` with its sum in blocks for L1, or `plan` itself where that does not pay.

    The sums are added up in the same order. Between blocks, the output keeps them.
    """
    if not _is_in_place(plan) or len(known.reductions) != 1 or not _may_keep_partial_sums(known):
        return plan
    (name,) = known.reductions
    moving, still = known.vector_operand, known.broadcast_operand
    row = prod(i.extent for i in known.exclusive_iterators(moving)) * moving.bytes
    steps = target.cache[0] // 2 // row
    row_tiles = prod(num_tiles(i.extent, plan.tile(i.name)) for i in known.exclusive_iterators(still))
    if steps < MIN_L1_BLOCK_STEPS or row_tiles < L1_BLOCK_ROW_TILES or not _streams_past_l2(known, plan, target):
        return plan
    block = balanced_block(known.extent(name), steps)
    if not MIN_L1_BLOCK_STEPS <= block < known.extent(name):
        return plan
    batch = {i.name for i in known.batch}
    first = next(d for d, level in enumerate(plan.levels) if level.iterator not in batch)
    return replace(plan, levels=(*plan.levels[:first], TileLoop(name, block), *plan.levels[first:]))


def _is_in_place(plan: Plan) -> bool:
    """Whether a plan is serial, and reads both factors in place in loops over rows of plain vectors."""
    plain = plan.vectors_per_register == 1 and not (plan.instruction or plan.unrolled or plan.nontemporal)
    return plain and plan.parallel_depth == 0 and not (plan.packs or plan.prefetches)


def _may_keep_partial_sums(known: ContractionInfo) -> bool:
    """Whether the output can hold partial sums, and each block has terms in every register tile."""
    op = known.op
    if known.transposes_output or op.terms or op.output.buffer.type.dtype != op.dtype:
        return False
    return op.epilogue is None or all(a.buffer.name != op.output.buffer.name for a in loads_in(op.epilogue))


def _streams_past_l2(known: ContractionInfo, plan: Plan, target: CpuTarget) -> bool:
    """Whether both factors exceed L2's share of an op, and register tiles need their lines faster than L2 has them."""
    if target.has_mesh_llc:  # not measured there
        return False
    factors = (known.vector_operand, known.broadcast_operand)
    lines = [_line_bytes_per_step(known, plan, f) for f in factors]
    if None in lines:
        return False
    footprint = sum(known.k_size * prod(i.extent for i in known.exclusive_iterators(f)) * f.bytes for f in factors)
    cycles = prod(plan.tile(i.name) for i in known.parallel) / plan.lanes * multiply_cost(plan.lanes, known, target)
    needed = sum(n for n in lines if n is not None)
    return footprint > target.cache[1] * 3 // 4 and needed > L2_STRIDED_BYTES_PER_CYCLE * cycles


def _line_bytes_per_step(known: ContractionInfo, plan: Plan, factor: Factor) -> int | None:
    """Bytes of the cache lines that a register tile reads of `factor` in a step of the sum.

    An unaligned run touches one more line in part. None if a line has elements of several steps, or rows are no runs.
    """
    (name,) = known.reductions
    unit = next((n for n, step in factor.nearest if step == 1), name)
    if unit == name or not factor.is_plain_load:
        return None
    run, apart = plan.tile(unit) * factor.bytes, abs(factor.step(name) or 0) * factor.bytes
    lines = run + CACHE_LINE_BYTES - gcd(CACHE_LINE_BYTES, run, apart)
    return lines if apart >= lines else None
