"""The cost of a product on tensor cores: for each step of a tile, the time of its busiest resource."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...target import GpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex, operands_of, walk_expr
from .chain_tiles import BASE_REGISTERS, TENSOR_UNITS, chain_resources, resident_chain_blocks
from .group_product_cost import (
    ARRIVAL_CYCLES,
    CLUSTER_CYCLES,
    GROUP_OVERLAP_LOSS,
    ISSUE_PER_CYCLE,
    STEP_CYCLES,
    fits_groups,
    group_step_cycles,
    hidden_cycles,
)
from .masked_steps import MaskedSteps
from .product_region import FactorPair, ProductFactor, ProductRegion
from .product_tiles import WGMMA, FactorPlace, PairOrder, ProductOrder, ProductTiles

COPY_INSTRUCTIONS = {16: 4, 8: 4, 4: 4}
"""The instructions of one asynchronous copy with its addresses, by its bytes."""
ELEMENT_INSTRUCTIONS = 10
"""The instructions to load, compute and store one element: addresses, conditions, roundings."""
BOXED_INSTRUCTIONS = 2
"""The instructions per element that is rounded in pairs, and stored by `stmatrix` and TMA."""
LOAD_INSTRUCTIONS = 3
"""The instructions of one `ldmatrix` with its swizzled address."""
ROUND_INSTRUCTIONS = 4
"""The instructions to round a register to tf32."""
CALL_INSTRUCTIONS = 12
"""The instructions of a function in an epilogue, such as `exp`, as in the estimates of the polyhedral mapper."""
OVERLAP_LOSS = 0.05
"""The fraction of the other resources' time added to the largest: among equal tiles, those with most slack win."""
MAX_SUMS, MAX_SUMS_BESIDE_ELEMENTS = 128, 64
"""The maximum sums of a thread that leave enough registers: with asynchronous copies, and with factors loaded
element by element."""


@dataclass(frozen=True, slots=True)
class ProductPrice:
    """The predicted cost of a product.

    Attributes:
        cycles: the predicted cycles. limiter: the resource that limits a step.
        blocks: the number of blocks (tiles). resident: the number of concurrent blocks per SM.
    """

    cycles: float
    limiter: str
    blocks: int
    resident: int


def staged_bytes(region: ProductRegion, order: ProductOrder, tiles: ProductTiles) -> int:
    """The bytes of all stages of all factors; products with the same tile layout share them."""
    rows, columns, terms = tiles.tile
    columns *= region.sums
    kinds = {
        (side, place.transposed, factor.dtype.name)
        for pair, places in zip(region.pairs, order.pairs, strict=True)
        for side, factor, place in ((rows, pair.left, places.left), (-columns, pair.right, places.right))
    }
    return tiles.stages * terms * sum(abs(side) for side, _, _ in kinds) * region.factor_bytes


def register_estimate(tiles: ProductTiles, sums: int) -> int:
    """The estimated registers of a thread, with `sums` sums per element."""
    rows, columns = (n // w for n, w in zip(tiles.tile[:2], tiles.warps, strict=True))
    return sums * rows * columns // 32 + rows // 4 + columns // 4 + BASE_REGISTERS


def resident_blocks(region: ProductRegion, order: ProductOrder, tiles: ProductTiles, target: GpuTarget) -> int:
    """The number of resident blocks of an SM; 0 if not even one fits."""
    if region.chain is not None:
        return resident_chain_blocks(region, order, tiles, target)
    if tiles.instruction == WGMMA:
        held = _held_bytes(region, order, tiles)
        staged = staged_bytes(region, order, tiles) - tiles.stages * held
        count = prod(map(tiles.count, (order.rows, order.columns, order.batch)))
        return int(fits_groups(staged, tiles, target, region.sums, held, count))
    threads = target.warp * prod(tiles.warps)
    registers, shared = register_estimate(tiles, region.sums), staged_bytes(region, order, tiles)
    if registers > target.registers or shared > target.max_shared_optin:
        return 0
    return min(target.resident_block_limits(threads, registers, shared).values())


def _held_bytes(region: ProductRegion, order: ProductOrder, tiles: ProductTiles) -> int:
    """The bytes of the left factor's tile that warpgroups compute in registers; 0 if it is loaded."""
    rows, _, terms = tiles.tile
    computed = tiles.instruction == WGMMA and order.pairs[0].left.element is None
    return rows * terms * region.factor_bytes if computed else 0


def price_product(
    region: ProductRegion, order: ProductOrder, tiles: ProductTiles, target: GpuTarget
) -> ProductPrice | None:
    """The predicted cost; None if a block does not fit on an SM."""
    room = resident_blocks(region, order, tiles, target)
    if not room:
        return None
    rows, columns, deep = tiles.tile
    wide = replace(tiles, tile=(rows, columns * region.sums, deep))
    blocks = tiles.count(order.rows) * tiles.count(order.columns) * tiles.count(order.batch)
    each = -(-blocks // target.num_sms)
    together = min(each, room)
    steps, limiter = 0.0, ""
    for pair, places in zip(region.pairs, order.pairs, strict=True):
        if region.chain is not None:
            cost = chain_resources(region, order, wide, target, together)
        elif tiles.instruction == WGMMA:
            cost = group_step_cycles(pair.left.dtype.size, wide, target)
        else:
            cost = _step_resources(pair, places, order, wide, target, together)
        limiter = max(cost, key=lambda name: cost[name])
        loss = GROUP_OVERLAP_LOSS if tiles.instruction == WGMMA else OVERLAP_LOSS
        step = cost[limiter] + loss * (sum(cost.values()) - cost[limiter])
        if (
            tiles.instruction == WGMMA and region.chain is None
        ):  # computing factors in registers does not overlap with products
            computed = _held_bytes(region, order, tiles) / pair.left.dtype.size * ELEMENT_INSTRUCTIONS
            step += computed / target.warp / ISSUE_PER_CYCLE
        masked = MaskedSteps.of(region, order, tiles) if region.domain else None
        steps += step * (tiles.count(places.terms) if masked is None else masked.mean_count())
    begin = 2 * ARRIVAL_CYCLES + CLUSTER_CYCLES * (tiles.cluster > 1)
    end = _end_cycles(region, tiles, target)
    cycles = begin + each * (steps + end)  # first loads, last stores
    if tiles.lead:
        cycles -= hidden_cycles(tiles, each, cost["tensor cores"], end)
    moved = _bytes_in_memory(region) * target.clock / target.bandwidth
    if moved > cycles:
        return ProductPrice(moved, "memory", blocks, together)
    return ProductPrice(cycles, limiter, blocks, together)


def _end_cycles(region: ProductRegion, tiles: ProductTiles, target: GpuTarget) -> float:
    """The cycles of an SM for the epilogue and the stores of a tile."""
    c = region.contraction
    ends = [c.initial, c.epilogue, *(x for one in region.others for x in (one.initial, one.epilogue))]
    parts = {x for e in ends if e is not None for x in walk_expr(e)}
    computed = sum(CALL_INSTRUCTIONS if isinstance(x, tc.Call) else 1 for x in parts if operands_of(x))
    read = {x for x in parts if isinstance(x, tc.Access) and _is_of_every_element(x, region)}
    stored = BOXED_INSTRUCTIONS if tiles.stores_boxes else ELEMENT_INSTRUCTIONS
    moved = sum(x.dtype.size for x in read) + region.output_dtype.size
    each = moved / target.l2_bytes, (computed + len(read) + stored) / target.warp / ISSUE_PER_CYCLE
    return tiles.tile[0] * tiles.tile[1] * (max(each) + OVERLAP_LOSS * min(each))


def _is_of_every_element(x: tc.Access, region: ProductRegion) -> bool:
    """Whether an access depends on both rows and columns, so that each result reads a different element."""
    names = {e.name for e in walk_expr(x) if isinstance(e, tc.Index)}
    return all(names & {i.name for i in indices} for indices in (region.rows, region.columns))


def _step_resources(
    pair: FactorPair, places: PairOrder, order: ProductOrder, tiles: ProductTiles, target: GpuTarget, together: int
) -> dict[str, float]:
    """The cycles of an SM for one step of a block, by resource. together: the number of resident blocks."""
    rows, columns, terms = tiles.tile
    across, along = tiles.warps
    size = pair.left.dtype.size
    warps, depth = across * along, 32 // size
    rate = target.tensor_ops_int8 if size == 1 else 2 * target.tensor_ops / size
    left, right = rows * terms * size, columns * terms * size
    products = rows * columns * terms / (16 * 8 * depth)
    loads = (rows / 16 * along + columns / 16 * across) * terms / depth
    fills = _fill_instructions(pair.left, places.left, left, [order.rows, places.terms, order.batch], tiles)
    fills += _fill_instructions(pair.right, places.right, right, [order.columns, places.terms, order.batch], tiles)
    rounded = 4 * ROUND_INSTRUCTIONS * loads if pair.left.rounding else 0
    idle = max(1.0, TENSOR_UNITS / (warps * together))
    return {
        "tensor cores": 2 * rows * columns * terms / rate * idle,
        "second-level cache": (left + right) / target.l2_bytes,
        "shared memory": (left + right + left * along + right * across) / target.shared_bytes,
        "issue": (products + LOAD_INSTRUCTIONS * loads + rounded + fills / target.warp + 10 * warps) / ISSUE_PER_CYCLE,
        "latency": (ARRIVAL_CYCLES / (tiles.stages - 1) + STEP_CYCLES) / together,
    }


def _fill_instructions(
    factor: ProductFactor, place: FactorPlace, size: int, groups: Sequence[Sequence[BoundIndex]], tiles: ProductTiles
) -> float:
    """The thread instructions that fill a tile of `size` bytes. groups: the free indices, terms, and batch."""
    width = copy_bytes(factor, place, groups, tiles)
    if width in COPY_INSTRUCTIONS:
        return size / width * COPY_INSTRUCTIONS[width]
    return size / factor.dtype.size * ELEMENT_INSTRUCTIONS


def copies_elements(region: ProductRegion, order: ProductOrder, tiles: ProductTiles) -> bool:
    """Whether threads load a factor element by element, instead of copying it asynchronously."""
    return any(
        copy_bytes(factor, place, [own, places.terms, order.batch], tiles) not in COPY_INSTRUCTIONS
        for pair, places in zip(region.pairs, order.pairs, strict=True)
        for factor, place, own in (
            (pair.left, places.left, order.rows),
            *((f, p, order.columns) for f, p in zip(pair.rights, places.rights, strict=True)),
        )
    )  # fmt: skip


def copy_bytes(
    factor: ProductFactor, place: FactorPlace, groups: Sequence[Sequence[BoundIndex]], tiles: ProductTiles
) -> int:
    """The bytes that one copy of a factor moves, limited by contiguity and alignment over all rows."""
    element, size = place.element, factor.dtype.size
    along = groups[0 if place.transposed else 1][0]
    if element is None or element.stride(along.name) != 1:
        return size
    steps = [element.stride(i.name) for group in groups for i in group if i is not along]
    start = sum(c * s for c, s in zip(element.constants, element.buffer.strides, strict=True))
    numbers = [n for n in (*steps, start, along.extent, tiles.boxes[along.name]) if n]
    width = 16 // size
    while width > 1 and any(n % width for n in numbers):
        width //= 2
    return width * size


def _bytes_in_memory(region: ProductRegion) -> float:
    """The bytes of all factors and the output, each counted once."""
    found = prod(i.extent for i in region.contraction.free) * region.output_dtype.size
    for pair in region.pairs:
        extents = {i.name: i.extent for i in (*region.rows, *region.columns, *region.batch, *pair.terms)}
        for factor in pair.factors:
            found += prod(extents[n] for n in extents if n in factor.indices) * factor.dtype.size
    return found
