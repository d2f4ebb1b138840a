"""The tiles of a chain of two products, and their cost: a block covers all terms of the first product.

Blocks with the same rows each recompute the first product, so tiles have all columns of the result if these fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod

from ...core.dtypes import DType
from ...options import TileOptions
from ...target import GpuTarget
from ..lower.panels import PANEL_BYTES
from .group_product_cost import (
    ARRIVAL_CYCLES,
    BARRIER_BYTES,
    ISSUE_PER_CYCLE,
    STEP_CYCLES,
    group_fault,
    pair_fault,
    stores_boxes,
)
from .product_region import ProductRegion
from .product_tiles import MMA, WGMMA, ProductOrder, ProductTiles, choose_boxes

WARPS = (2, 4, 8)
"""The numbers of warps of a block, each with 16 rows."""
GROUPS = (1, 2)
"""The numbers of multiplying warpgroups of a block, each with 64 rows."""
COLUMNS = (64, 128, 192, 256)
"""The columns of a tile that are tried beside all columns."""
TERMS = (32, 64, 128)
"""The terms of the second product in a step."""
STAGES = (4, 3, 2)
MOST_VALUES = 176
"""The maximum registers of a thread for the sums of both products and the left factor of the second."""
TENSOR_UNITS = 4
"""The subpartitions of an SM, each with a tensor core for its own warps."""
BASE_REGISTERS = 56
"""Other registers of a thread: addresses, counters, conditions. From reports of NVRTC on library kernels."""
SCORE_INSTRUCTIONS = {True: 12, False: 4}
"""Instructions per score, with a softmax (True) or without one."""
GROUP = 8


def chain_candidates(
    region: ProductRegion, order: ProductOrder, options: TileOptions, target: GpuTarget, faults: dict[str, None]
) -> Iterator[ProductTiles]:
    """The tiles that `options` allow and that fit; the reasons against others are added to `faults`."""
    instructions = [options.instruction] if options.instruction else [MMA, *([WGMMA] if target.group_ops else [])]
    for instruction in instructions:
        grouped = instruction == WGMMA
        for warps in [4 * n for n in GROUPS] if grouped else WARPS:
            if options.warps and options.warps != (warps, 1):
                continue
            for columns, terms in product(_column_counts(region, order, grouped=grouped), TERMS):
                tile = (16 * warps, columns, terms)
                if not options.tile or _allows(options.tile, tile, region):
                    yield from _choose_stages(region, order, options, target, tile, instruction, faults)


def _allows(asked: tuple[int, ...], tile: tuple[int, int, int], region: ProductRegion) -> bool:
    """Whether the requested tile `asked` matches `tile`; a request for more columns than exist means all of them."""
    columns = prod(i.extent for i in region.columns)
    return asked[0] == tile[0] and asked[2] == tile[2] and (asked[1] == tile[1] or asked[1] > tile[1] >= columns)


def _column_counts(region: ProductRegion, order: ProductOrder, *, grouped: bool) -> list[int]:
    """The columns of a tile to try: all of them, or `COLUMNS` if the columns have a single index."""
    every = _padded_columns(region, order, grouped=grouped)
    return [every, *(n for n in COLUMNS if n < every and len(order.columns) == 1)]


def _choose_stages(
    region: ProductRegion, order: ProductOrder, options: TileOptions, target: GpuTarget, tile: tuple[int, int, int],
    instruction: str, faults: dict[str, None],
) -> Iterator[ProductTiles]:  # fmt: skip
    """The tiles of one size with as many stages as fit; the reason why none fits is added to `faults`."""
    assert order.inner is not None
    (inner,) = order.inner.pairs[0].terms
    grouped = instruction == WGMMA
    depth = _padded_terms(inner.extent, region.pairs[0].left.dtype, order.inner)
    boxes = {**choose_boxes(order, tile), inner.name: depth}
    held = _held_values(tile)
    if held > MOST_VALUES:
        faults[f"a thread would hold {held} values"] = None
        return
    tiles = ProductTiles(boxes, tile, (tile[0] // 16, 1), 2, options.group or GROUP, instruction)
    if grouped:
        if (fault := _group_fault(region, order, tiles, depth)) is not None:
            faults[fault] = None
            return
        half = region.output_dtype.is_float and region.output_dtype.bits == 16
        tiles = replace(tiles, stores_boxes=half and stores_boxes(order, boxes))
    for stages in (options.stages,) if options.stages else STAGES:
        found = replace(tiles, stages=stages)
        if chain_bytes(region, found, depth) <= target.max_shared_optin:
            yield found
            return
    faults["its tiles do not fit into shared memory"] = None


def _held_values(tile: tuple[int, int, int]) -> int:
    """The registers of a thread for its values: 2 lanes share each of the 16 rows of a warp."""
    return (tile[1] + tile[2] + tile[2] // 2) // 2


def resident_chain_blocks(region: ProductRegion, order: ProductOrder, tiles: ProductTiles, target: GpuTarget) -> int:
    """The number of resident blocks of an SM; 0 if not even one fits."""
    assert order.inner is not None
    shared = chain_bytes(region, tiles, tiles.boxes[order.inner.pairs[0].terms[0].name])
    if shared > target.max_shared_optin or tiles.instruction == WGMMA:
        return int(shared <= target.max_shared_optin)
    registers = min(target.registers, _held_values(tiles.tile) + BASE_REGISTERS)
    return min(target.resident_block_limits(target.warp * tiles.warps[0], registers, shared).values())


def _group_fault(region: ProductRegion, order: ProductOrder, tiles: ProductTiles, depth: int) -> str | None:
    """Why warpgroups cannot compute both products of a chain; None if they can."""
    assert order.inner is not None
    inner = replace(tiles, tile=(tiles.tile[0], tiles.tile[2], depth))
    dtype = region.pairs[0].right.dtype
    if order.inner.pairs[0].left.element is None:
        return "the left factor of the first product is computed"
    return group_fault(region, order, tiles) or pair_fault(order.inner.pairs[0], order.inner, inner, dtype)


def _padded_columns(region: ProductRegion, order: ProductOrder, *, grouped: bool) -> int:
    """All columns of the second product, padded as instructions and copies need it."""
    columns = prod(i.extent for i in order.columns)
    if len(order.columns) > 1:
        columns = prod(1 << max(0, i.extent - 1).bit_length() for i in order.columns)
    if grouped and order.pairs[0].right.transposed:
        return _padded_row(columns, region.pairs[0].right.dtype)
    return -(-columns // 16) * 16


def _padded_terms(terms: int, dtype: DType, order: ProductOrder) -> int:
    """All terms of the first product, padded to rows that form panels, without bank conflicts."""
    across = all(x.transposed for x in (order.pairs[0].left, order.pairs[0].right))
    return -(-terms // 16) * 16 if across else _padded_row(terms, dtype)


def _padded_row(count: int, dtype: DType) -> int:
    """`count` elements padded to the shortest row that forms panels."""
    whole = PANEL_BYTES[0] // dtype.size
    fitting = [n // dtype.size for n in PANEL_BYTES if n // dtype.size >= count]
    return min(fitting, default=-(-count // whole) * whole)


def chain_bytes(region: ProductRegion, tiles: ProductTiles, depth: int) -> int:
    """The bytes of shared memory of a block. depth: terms of the first product."""
    rows, columns, terms = tiles.tile
    size = region.pairs[0].right.dtype.size
    kept = BARRIER_BYTES + (64 * 16 * tiles.warpgroups * 2 if tiles.stores_boxes else 0)
    return size * (rows * depth + tiles.stages * terms * (depth + columns)) + kept


def takes_turns(tiles: ProductTiles) -> bool:
    """Whether two warpgroups alternate on the tensor cores."""
    return tiles.instruction == WGMMA and tiles.warpgroups == 2


def chain_resources(
    region: ProductRegion, order: ProductOrder, tiles: ProductTiles, target: GpuTarget, together: int
) -> dict[str, float]:
    """The cycles of an SM for one step of a block, by resource. together: the number of resident blocks."""
    assert order.inner is not None
    assert region.chain is not None
    rows, columns, terms = tiles.tile
    depth = tiles.boxes[order.inner.pairs[0].terms[0].name]
    size, grouped = region.pairs[0].right.dtype.size, tiles.instruction == WGMMA
    idle = 1.0 if grouped else max(1.0, TENSOR_UNITS / (tiles.warps[0] * together))
    rate = target.group_ops if grouped else target.tensor_ops
    loaded = terms * (depth + columns) * size
    read = loaded * (tiles.warpgroups if grouped else tiles.warps[0]) + rows * depth * size
    scores = rows * terms * SCORE_INSTRUCTIONS[region.chain.softmax is not None] / target.warp
    products = rows * terms * (depth + columns) / (16 * 8 * 16)
    multiplied = 2 * rows * terms * (depth + columns) / rate * idle
    issued = (scores + (0 if grouped else 1.5 * products)) / ISSUE_PER_CYCLE * idle
    return {
        **_by_turns(tiles, depth, multiplied, issued),
        "second-level cache": loaded / target.l2_bytes,
        "shared memory": (loaded + read) / target.shared_bytes,
        "latency": (ARRIVAL_CYCLES / (tiles.stages - 1) + STEP_CYCLES) / together,
    }


def _by_turns(tiles: ProductTiles, depth: int, multiplied: float, issued: float) -> dict[str, float]:
    """The cycles of the tensor cores, and of the critical path through a step.

    Two warpgroups a and b that take turns multiply scores a, scores b, sums a, sums b; each computes its weights
    between its two products.
    """
    if not takes_turns(tiles):
        return {"tensor cores and scores in turn": multiplied + issued}
    first = multiplied / 2 * depth / (depth + tiles.tile[1])
    second, scores = multiplied / 2 - first, issued / 2
    return {
        "tensor cores": multiplied,
        "scores between products": first + second + scores + max(first, second),
    }
