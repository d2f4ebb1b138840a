"""Choose the tiles of a product: estimate the cost of every candidate that fits, and take the cheapest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import prod

from ...core.errors import CannotLower
from ...options import TileOptions
from ...target import GpuTarget
from ...tc_lang.ir import BoundIndex
from .chain_tiles import chain_candidates
from .group_product_cost import cluster_fault, group_fault, most_lead, stores_boxes
from .product_cost import (
    MAX_SUMS,
    MAX_SUMS_BESIDE_ELEMENTS,
    ProductPrice,
    copies_elements,
    price_product,
    resident_blocks,
)
from .product_region import ProductRegion
from .product_tiles import MMA, WGMMA, ProductOrder, ProductTiles, choose_boxes

ROWS = (16, 32, 64, 128, 256)
COLUMNS = (16, 32, 64, 128, 256)
TERMS = (32, 64)
"""The sizes of tiles that are tried. Terms are those of 16-bit factors; factors of one byte have twice as many."""
WARPS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (4, 2))
STAGES = (2, 3, 4)
GROUPS = (1, 2, 3)
"""The numbers of multiplying warpgroups that are tried."""
GROUP_COLUMNS = (16, 32, 64, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
GROUP_TERMS = (64, 128)
MOST_STAGES = (6, 5, 4, 3, 2)
STAGGERED, TOGETHER = "staggered", "together"
CLUSTERS = (1, 2)
"""The numbers of blocks in a cluster that are tried."""
GROUP = 8
"""The tile rows that consecutive blocks cover together: the factors of 8 x 8 tiles take only a small part of L2."""


def choose_tiles(
    region: ProductRegion, order: ProductOrder, options: TileOptions, target: GpuTarget
) -> tuple[ProductTiles, ProductPrice]:
    """The tiles that `options` allow with the least predicted time, and their price.

    Raises:
        CannotLower: no tiles fit.
    """
    best: tuple[ProductTiles, ProductPrice] | None = None
    faults: dict[str, None] = {}
    candidates: Iterator[ProductTiles] = chain(
        _list_candidate_tiles(region, order, options), _group_candidates(region, order, options, target, faults)
    )
    if region.chain is not None:
        candidates = chain_candidates(region, order, options, target, faults)
    for tiles in candidates:
        price = price_product(region, order, tiles, target)
        if price is not None and (best is None or price.cycles < best[1].cycles):
            best = tiles, price
    if best is None:
        names = ("tile", "warps", "stages", "instruction", "cluster", "warpgroups")
        asked = ", ".join(f"{n} {v}" for n in names if (v := getattr(options, n)))
        raise CannotLower(
            f"no tiles of {asked or 'any size'} fit into the registers and the shared memory of {target.name}"
            + "".join(f"; {'' if region.chain else 'not by wgmma: '}{fault}" for fault in faults)
        )
    return best


def _list_candidate_tiles(region: ProductRegion, order: ProductOrder, options: TileOptions) -> Iterator[ProductTiles]:
    if options.instruction == WGMMA or options.cluster > 1 or options.warpgroups == STAGGERED:
        return
    if options.tile:
        m, n, k = options.tile
        _check_tile(region, options.tile)
        sizes = [(m, n, k)]
    else:
        rows, columns = (_padded_extent(x) for x in (order.rows, order.columns))
        sizes = [
            (m, n, 2 * t // region.factor_bytes)
            for m in ROWS for n in COLUMNS for t in TERMS
            if m < 2 * max(rows, ROWS[0]) and n < 2 * max(columns, COLUMNS[0])
        ]  # fmt: skip
    for tile in sizes:
        boxes = choose_boxes(order, tile)
        one = ProductTiles(boxes, tile, (1, 1), STAGES[0], GROUP)
        most = MAX_SUMS_BESIDE_ELEMENTS if not options.tile and copies_elements(region, order, one) else MAX_SUMS
        for warps in (options.warps,) if options.warps else WARPS:
            across, along = warps
            if tile[0] % (16 * across) or tile[1] % (8 * along):
                continue
            sums = region.sums * tile[0] * tile[1] // (32 * prod(warps))
            if sums > most or (not options.tile and (tile[1] // along) % 16):
                continue
            for stages in (options.stages,) if options.stages else STAGES:
                yield ProductTiles(boxes, tile, (across, along), stages, options.group or GROUP)


def _group_candidates(
    region: ProductRegion, order: ProductOrder, options: TileOptions, target: GpuTarget, faults: dict[str, None]
) -> Iterator[ProductTiles]:
    """Candidates that run wgmma on factors loaded by TMA, each with as many stages as fit.

    Reasons for rejecting others are added to `faults`.
    """
    if not target.group_ops or options.instruction == MMA:
        return
    for groups in GROUPS:
        if options.warps and options.warps != (4 * groups, 1):
            continue
        for tile in _group_sizes(order, options, groups, region.factor_bytes):
            boxes = choose_boxes(order, tile)
            tiles = ProductTiles(boxes, tile, (4 * groups, 1), 2, options.group or GROUP, WGMMA)
            if (fault := group_fault(region, order, tiles)) is not None:
                faults[fault] = None
                continue
            clusters = _list_clusters(region, order, tiles, options, faults)
            boxed = region.output_dtype.is_float and region.output_dtype.bits == 16 and stores_boxes(order, boxes)
            for stages in (options.stages,) if options.stages else MOST_STAGES:
                found = replace(tiles, stages=stages, stores_boxes=boxed)
                leads = _list_leads(region, found, options, faults)
                if resident_blocks(region, order, found, target):
                    yield from (replace(found, cluster=n, lead=lead) for n in clusters for lead in leads)
                    break
                if boxed and options.stages:
                    yield from (
                        replace(found, cluster=n, lead=lead, stores_boxes=False) for n in clusters for lead in leads
                    )


def _list_clusters(
    region: ProductRegion, order: ProductOrder, tiles: ProductTiles, options: TileOptions, faults: dict[str, None]
) -> list[int]:
    """The possible sizes of clusters; the reason against a requested size is added to `faults`."""
    found = []
    for n in (options.cluster,) if options.cluster else CLUSTERS:
        fault = cluster_fault(region, order, replace(tiles, cluster=n)) if n > 1 else None
        if fault is None:
            found.append(n)
        elif options.cluster:
            faults[fault] = None
    return found


def _list_leads(
    region: ProductRegion, tiles: ProductTiles, options: TileOptions, faults: dict[str, None]
) -> tuple[int, ...]:
    """The numbers of steps by which a warpgroup may lead; why a requested lead is impossible is added to `faults`."""
    most = most_lead(region, tiles)
    if options.warpgroups == STAGGERED:
        if not most:
            faults["only two warpgroups are staggered, with three stages or more"] = None
        return (most,) if most else ()
    return (0, most) if most and options.warpgroups != TOGETHER else (0,)


def _group_sizes(order: ProductOrder, options: TileOptions, groups: int, size: int) -> Iterator[tuple[int, int, int]]:
    if options.tile:
        m, n, k = options.tile
        if m % (64 * groups) == 0 and n % 8 == 0:
            yield m, n, k
        return
    rows, columns = (_padded_extent(x) for x in (order.rows, order.columns))
    for m in (64 * groups, 128 * groups):
        for n in GROUP_COLUMNS if len(order.columns) == 1 else COLUMNS:
            if m < 2 * max(rows, 64) and n < 2 * max(columns, 16):
                yield from ((m, n, 2 * k // size) for k in GROUP_TERMS)


def _check_tile(region: ProductRegion, tile: tuple[int, ...]) -> None:
    """Raise CannotLower if a requested tile cannot be made of boxes of indices."""
    depth = 32 // region.factor_bytes
    if tile[2] % depth:
        raise CannotLower(f"a tile of {tile[2]} terms of {region.pairs[0].left.dtype.name} is no multiple of {depth}")
    groups = [(region.rows, tile[0]), (region.columns, tile[1]), *((p.terms, tile[2]) for p in region.pairs)]
    for indices, size in groups:
        if len(indices) > 1 and size & (size - 1):
            raise CannotLower(f"a tile of {size} along several indices is no power of two")


def _padded_extent(indices: tuple[BoundIndex, ...]) -> int:
    """The product of the extents, each rounded up to a power of two."""
    return prod(1 << max(0, i.extent - 1).bit_length() for i in indices)
