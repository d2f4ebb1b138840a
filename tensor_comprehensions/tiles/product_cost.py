"""What a product costs on tensor cores: of each step of a tile the resource that it takes longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ..target import GpuTarget
from .product_tiles import FactorPlace, ProductOrder, ProductTiles
from .recognize_products import ProductFactor, ProductRegion

ARRIVAL_CYCLES = 800
"""From asking for what lies in memory until it is there, as in `polyhedral.gpu`."""
STEP_CYCLES = 60
"""Of a step that a block waits: its barrier, and the first fragments. From the latencies of both in public papers."""
ISSUE_PER_CYCLE, TENSOR_UNITS = 4, 4
"""Instructions of warps that a processor starts in a cycle; its parts with tensor cores, each for warps of its own."""
COPY_INSTRUCTIONS = {16: 4, 8: 4, 4: 4}
"""Of one asynchronous copy with its addresses, by its bytes."""
ELEMENT_INSTRUCTIONS = 10
"""Of one element that is loaded, computed and stored: addresses, conditions, roundings."""
LOAD_INSTRUCTIONS = 3
"""Of one `ldmatrix` with its swizzled address."""
OVERLAP_LOSS = 0.05
"""Of what other resources take that adds to the largest: of equal tiles those that leave most room are best."""
RESERVED_SHARED = 1024
"""Bytes of shared memory that each block takes beside its own."""
BASE_REGISTERS = 56
"""Of a thread beside sums and fragments: addresses, counters, conditions. From reports of NVRTC on library kernels."""
MAX_SUMS = 128
"""Of a thread, that leave registers for all else."""


@dataclass(frozen=True, slots=True)
class ProductPrice:
    """The cycles of a product, and what they go to.

    Attributes:
        limiter: the resource that a step takes longest.
    """

    cycles: float
    limiter: str
    blocks: int
    resident: int


def staged_bytes(region: ProductRegion, tiles: ProductTiles) -> int:
    """Of all stages of both factors."""
    rows, columns, terms = tiles.tile
    return tiles.stages * terms * (rows * region.left.dtype.size + columns * region.right.dtype.size)


def register_estimate(region: ProductRegion, tiles: ProductTiles) -> int:
    """Of a thread."""
    rows, columns = (n // w for n, w in zip(tiles.tile[:2], tiles.warps, strict=True))
    return rows * columns // 32 + rows // 4 + columns // 4 + BASE_REGISTERS


def resident_blocks(region: ProductRegion, tiles: ProductTiles, target: GpuTarget) -> int:
    """Blocks that a processor has room for; 0 where there is none for one."""
    threads = target.warp * prod(tiles.warps)
    registers, shared = register_estimate(region, tiles), staged_bytes(region, tiles)
    if registers > target.registers or shared > target.max_shared_optin:
        return 0
    return min(
        target.shared_per_sm // (shared + RESERVED_SHARED), target.registers_per_sm // (registers * threads),
        target.threads_per_sm // threads, target.blocks_per_sm,
    )  # fmt: skip


def price_product(
    region: ProductRegion, order: ProductOrder, tiles: ProductTiles, target: GpuTarget, output_bytes: int
) -> ProductPrice | None:
    """The expected cycles; None where a block does not fit into a processor.

    output_bytes: of an element that is stored.
    """
    room = resident_blocks(region, tiles, target)
    if not room:
        return None
    rows, columns, _ = tiles.tile
    blocks = tiles.count(order.rows) * tiles.count(order.columns) * tiles.count(order.batch)
    each = -(-blocks // target.num_sms)
    together = min(each, room)
    cost = _step_resources(region, order, tiles, target, together)
    limiter = max(cost, key=lambda name: cost[name])
    step = cost[limiter] + OVERLAP_LOSS * (sum(cost.values()) - cost[limiter])
    stored = rows * columns * (output_bytes / target.l2_bytes + ELEMENT_INSTRUCTIONS / 32 / ISSUE_PER_CYCLE)
    cycles = ARRIVAL_CYCLES + each * (tiles.count(order.terms) * step + stored)
    moved = _bytes_in_memory(region, output_bytes) * target.clock / target.bandwidth
    if moved > cycles:
        return ProductPrice(moved, "memory", blocks, together)
    return ProductPrice(cycles, limiter, blocks, together)


def _step_resources(
    region: ProductRegion, order: ProductOrder, tiles: ProductTiles, target: GpuTarget, together: int
) -> dict[str, float]:
    """Cycles of a processor for one step of one block, by the resource that limits it."""
    rows, columns, terms = tiles.tile
    across, along = tiles.warps
    warps, small = across * along, region.left.dtype.size == 1
    rate = target.tensor_ops_int8 if small else target.tensor_ops
    left, right = rows * terms * region.left.dtype.size, columns * terms * region.right.dtype.size
    depth = 32 if small else 16
    products = rows * columns * terms / (16 * 8 * depth)
    loads = (rows / 16 * along + columns / 16 * across) * terms / depth
    fills = sum(
        _fill_instructions(f, place, size, tiles, order)
        for f, place, size in ((region.left, order.left, left), (region.right, order.right, right))
    )
    idle = max(1.0, TENSOR_UNITS / (warps * together))
    return {
        "tensor cores": 2 * rows * columns * terms / rate * idle,
        "second-level cache": (left + right) / target.l2_bytes,
        "shared memory": (left + right + left * along + right * across) / target.shared_bytes,
        "issue": (products + LOAD_INSTRUCTIONS * loads + fills / target.warp + 10 * warps) / ISSUE_PER_CYCLE,
        "latency": (ARRIVAL_CYCLES / (tiles.stages - 1) + STEP_CYCLES) / together,
    }


def _fill_instructions(
    factor: ProductFactor, place: FactorPlace, size: int, tiles: ProductTiles, order: ProductOrder
) -> float:
    """Instructions of threads that bring a tile of `size` bytes to shared memory."""
    width = copy_bytes(factor, place, tiles, order)
    if width in COPY_INSTRUCTIONS:
        return size / width * COPY_INSTRUCTIONS[width]
    return size / factor.dtype.size * ELEMENT_INSTRUCTIONS


def copy_bytes(factor: ProductFactor, place: FactorPlace, tiles: ProductTiles, order: ProductOrder) -> int:
    """That one copy of a factor moves: neighbors that lie, and are aligned, alike in all rows."""
    if place.element is None:
        return factor.dtype.size
    own = order.rows if place is order.left else order.columns
    along = (own if place.transposed else order.terms)[0]
    element, size = place.element, factor.dtype.size
    if element.stride(along.name) != 1:
        return size
    steps = [element.stride(i.name) for group in (own, order.terms, order.batch) for i in group if i is not along]
    start = sum(c * s for c, s in zip(element.constants, element.buffer.strides, strict=True))
    numbers = [n for n in (*steps, start, along.extent, tiles.boxes[along.name]) if n]
    width = 16 // size
    while width > 1 and any(n % width for n in numbers):
        width //= 2
    return width * size


def _bytes_in_memory(region: ProductRegion, output_bytes: int) -> float:
    """Of both factors and the output, each once."""
    extents: Mapping[str, int] = {i.name: i.extent for i, _ in region.kinds}
    names = region.contraction
    found = prod(i.extent for i in names.free) * output_bytes
    for factor in (region.left, region.right):
        found += prod(extents[n] for n in extents if n in factor.indices) * factor.dtype.size
    return found
