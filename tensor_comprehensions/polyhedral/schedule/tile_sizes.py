"""Tile sizes of a group's shared rows: the work of one iteration of its parallel loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from ...machine import MESH_FETCH_COLUMNS, PAGE_BYTES
from ...options import CpuOptions
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction
from ...thresholds import (
    COLUMN_CHUNK_VECTORS,
    CONCURRENT_SUM_ROWS,
    ENOUGH_PARALLELISM,
    HEAVY_SHARE,
    LONG_TRANSPOSED_TILES,
    MAX_PERMUTED_ELEMENTS,
    MAX_PERMUTED_ROWS,
    MAX_ROW_CHUNK,
    MIN_COLUMN_CHUNKS,
    STAGED_ROW_TILES,
    STAGED_TILES,
    TRANSPOSED_TILE,
    UNSHARED_TRANSPOSE_ELEMENTS,
)
from ..scop.scop import ScopStatement
from .access_cost import (
    access_stride,
    is_column_reduction,
    is_fully_parallel,
    op_count,
    total_op_count,
    transposed_read_dim,
    vector_dim,
)
from .contraction_chain import contraction_tiles
from .fusion import FusionGroup, reads_memory
from .loop_nest import DimKind, LoopNest, NestDim
from .storage import bytes_touched, needs_line_staging


def row_tiles(
    function: BoundFunction, group: FusionGroup, leaves: Sequence[LoopNest], options: CpuOptions, target: CpuTarget
) -> tuple[int, ...]:
    """The tile size of each row. leaves: the nests of the group with every row as a loop in them."""
    if options.tile:
        return tuple(
            min(row.extent, size or row.extent)
            for row, size in zip(group.rows, (*options.tile, *(0,) * len(group.rows)), strict=False)
        )
    if any(n.cluster is not None for n in group.nodes):
        return contraction_tiles(function, group, target)
    shared = 0 < options.grain_size < total_op_count(function, leaves)
    sizes = _lane_tiles(function, group, leaves, target, shared=shared)
    if len(leaves) == 1 and is_fully_parallel(leaves[0]):
        return _with_neighbors(function, group, leaves[0], sizes)
    return sizes


def _lane_tiles(
    function: BoundFunction, group: FusionGroup, leaves: Sequence[LoopNest], target: CpuTarget, *, shared: bool
) -> tuple[int, ...]:
    """Tile sizes for a group without contractions. shared: whether there is enough work for threads to share tiles."""
    lanes = target.lanes(32)
    nests = len(leaves)
    leaves = _heavy_nests(function, leaves)
    wanted = _vector_rows(function, leaves, target)
    transposed = _transposed_rows(function, leaves, target)
    if transposed:
        through = is_fully_parallel(leaves[0]) and bool(needs_line_staging(function, group, target))
        return _transposed_tiles(group, wanted, transposed, long=nests == 1, through=through)
    others = prod(r.extent for k, r in enumerate(group.rows) if k not in wanted)
    together = choose_rows_summed_together(function, group, leaves, target)
    if together > 1:
        return (together,)
    least = 4 * lanes
    if all(is_column_reduction(leaf, vector_dim(function, leaf, target)) for leaf in leaves):
        far = any(reads_memory(function, n, target) for leaf in leaves for n in leaf.nodes)
        few = prod(r.extent for r in group.rows) // MIN_COLUMN_CHUNKS // lanes
        least = max(least, min(COLUMN_CHUNK_VECTORS, few) * lanes)
        if far and target.private_caches != target.cache:
            least = _choose_even_tile(prod(group.rows[k].extent for k in wanted), lanes)
        if others >= MIN_COLUMN_CHUNKS // 2 and far:
            least = MAX_ROW_CHUNK
    return tuple(
        _choose_tile_size(row.extent, k in wanted, others if shared else ENOUGH_PARALLELISM, least)
        for k, row in enumerate(group.rows)
    )


def choose_rows_summed_together(
    function: BoundFunction, group: FusionGroup, leaves: Sequence[LoopNest], target: CpuTarget
) -> int:
    """How many rows a reduction along rows should sum concurrently; 1 if that does not pay."""
    if len(group.rows) != 1 or len(group.nodes) != 1:
        return 1
    (row,), (node,), (leaf,) = group.rows, group.nodes, leaves
    lanes = vector_dim(function, leaf, target)
    if (
        lanes is None
        or lanes.kind is not DimKind.REDUCTION
        or bytes_touched(function, group) < target.reuse_limit_bytes
    ):
        return 1
    apart = [
        (access_stride(function, a, row.index_and_shift(node)[0]) or 0) * function.tensor(a.tensor).dtype.size
        for a in node.reads
    ]
    if not all(abs(step) >= PAGE_BYTES for step in apart):
        return 1
    return next((n for n in CONCURRENT_SUM_ROWS if row.extent % n == 0 and row.extent >= n * ENOUGH_PARALLELISM), 1)


def _choose_even_tile(extent: int, lanes: int) -> int:
    """A tile of whole vectors that cuts `extent` into about equal parts of no fewer than MESH_FETCH_COLUMNS."""
    parts = max(1, extent // MESH_FETCH_COLUMNS)
    return -(-extent // (parts * lanes)) * lanes


def _transposed_tiles(
    group: FusionGroup, wanted: frozenset[int], transposed: frozenset[int], *, long: bool, through: bool
) -> tuple[int, ...]:
    """Tile sizes for a group that transposes. wanted: rows of lanes. transposed: rows of transposed accesses.

    long: whether no other nest of the group needs its part of a tile in L1. through: whether tiles are staged in
    buffers.
    """

    def sizes(tile: tuple[int, int]) -> tuple[int, ...]:
        sides = (tile[k in wanted] if k in transposed or k in wanted else 1 for k in range(len(group.rows)))
        return tuple(min(row.extent, side) for row, side in zip(group.rows, sides, strict=True))

    if not long:
        return sizes(TRANSPOSED_TILE)
    extents = tuple(row.extent for row in group.rows)
    if prod(extents) <= UNSHARED_TRANSPOSE_ELEMENTS:
        return extents
    for tile in _staged_tiles(sizes, wanted, extents) if through else LONG_TRANSPOSED_TILES:
        found = sizes(tile)
        if prod(-(-row.extent // size) for row, size in zip(group.rows, found, strict=True)) >= ENOUGH_PARALLELISM:
            return found
    return sizes(TRANSPOSED_TILE)


def _staged_tiles(
    sizes: Callable[[tuple[int, int]], tuple[int, ...]], wanted: frozenset[int], extents: tuple[int, ...]
) -> Sequence[tuple[int, int]]:
    """Candidate tiles for staged transposition: whole rows of the output if these are short, else the largest first."""
    whole = [tile for tile in STAGED_ROW_TILES if all(sizes(tile)[k] == extents[k] for k in wanted)]
    return whole or sorted(STAGED_TILES, key=lambda t: -prod(sizes(t)))


def _with_neighbors(
    function: BoundFunction, group: FusionGroup, leaf: LoopNest, sizes: tuple[int, ...]
) -> tuple[int, ...]:
    """`sizes`, enlarged along rows in which accesses of a permutation continue in memory, if the accesses disagree.

    A tile then covers contiguous memory for each access, rather than short pieces for all but one.
    """
    accesses = [(n, a) for n in leaf.nodes for a in (*n.reads, *n.writes)]
    found = [k for node, access in accesses for k in _find_continuing_row(function, group, node, access, sizes)]
    if len(set(found)) < 2:
        return sizes
    grown = list(sizes)
    for row in dict.fromkeys(k for k in found if k is not None):
        room = MAX_PERMUTED_ELEMENTS // prod(grown)
        grown[row] = max(1, min(group.rows[row].extent, MAX_PERMUTED_ROWS, room))
    tiles = prod(-(-row.extent // size) for row, size in zip(group.rows, grown, strict=True))
    return tuple(grown) if tiles >= ENOUGH_PARALLELISM else sizes


def _find_continuing_row(
    function: BoundFunction, group: FusionGroup, node: ScopStatement, access: tc.Access, sizes: Sequence[int]
) -> Iterator[int | None]:
    """Yields the row with tile size 1 along which `access` continues in memory after a tile.

    Yields None instead if it continues along a row that is already tiled, and nothing if a tile covers all elements.
    """
    steps = ((access_stride(function, access, row.index_and_shift(node)[0]), k) for k, row in enumerate(group.rows))
    for _, k in sorted((abs(step), k) for step, k in steps if step):
        if sizes[k] < group.rows[k].extent:
            yield k if sizes[k] == 1 else None
            return


def _choose_tile_size(extent: int, wanted: bool, others: int, least: int) -> int:
    if not wanted:
        return 1
    if others >= ENOUGH_PARALLELISM:
        return min(extent, MAX_ROW_CHUNK)
    chunk = max(least, extent * others // ENOUGH_PARALLELISM // least * least)
    return min(extent, chunk, MAX_ROW_CHUNK)


def _heavy_nests(function: BoundFunction, leaves: Sequence[LoopNest]) -> list[LoopNest]:
    """The leaves with most of the work, which determine the tiles."""
    loads = [op_count(function, leaf) * prod(d.extent for d in leaf.dims) for leaf in leaves]
    return [leaf for leaf, load in zip(leaves, loads, strict=True) if load * HEAVY_SHARE >= sum(loads)]


def _vector_rows(function: BoundFunction, leaves: Sequence[LoopNest], target: CpuTarget) -> frozenset[int]:
    chosen = (vector_dim(function, leaf, target) for leaf in leaves)
    return frozenset(d.row for d in chosen if d is not None and d.row is not None)


def _transposed_rows(function: BoundFunction, leaves: Sequence[LoopNest], target: CpuTarget) -> frozenset[int]:
    """The rows of lanes, and those along which accesses are contiguous that are strided along the lanes."""
    found: set[int] = set()
    for leaf in leaves:
        lanes = vector_dim(function, leaf, target)
        if lanes is None:
            continue
        row = transposed_read_dim(function, leaf, lanes)
        if row is not None:
            found |= {d.row for d in (lanes, row) if d.row is not None}
        if lanes.row is None:
            continue
        for dim in leaf.dims:
            if dim.row is not None and dim is not lanes and _has_access_transposed(function, leaf, lanes, dim):
                found |= {lanes.row, dim.row}
    return frozenset(found)


def _has_access_transposed(function: BoundFunction, leaf: LoopNest, lanes: NestDim, dim: NestDim) -> bool:
    for node in leaf.nodes:
        for access in (*node.reads, *node.writes):
            along = access_stride(function, access, lanes.index(node))
            if along not in (0, 1) and access_stride(function, access, dim.index(node)) == 1:
                return True
    return False


def tile_order(
    function: BoundFunction, group: FusionGroup, leaves: Sequence[LoopNest], target: CpuTarget
) -> tuple[int, ...]:
    """The order of the rows in the loop over tiles, outermost first; the row of contiguous transposed reads is last."""
    last = None
    for leaf in leaves:
        lanes = vector_dim(function, leaf, target)
        row = transposed_read_dim(function, leaf, lanes) if lanes is not None else None
        last = row.row if row is not None else last
    rows = [k for k in range(len(group.rows)) if k != last]
    return tuple(rows if last is None else [*rows, last])
