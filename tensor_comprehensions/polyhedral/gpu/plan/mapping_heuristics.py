"""The default mapping of each kernel, chosen from sizes and the target.

There are three kinds of kernels. A contraction reuses its operands: it gets square tiles in shared memory and
registers, as large as a tile for every multiprocessor allows. A reduction gets a warp or a block per row, or strips of
columns. Every other kernel gets a thread per element, along the contiguous dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf, prod

from ....core.decisions import Decision, Rival, is_recording, note_decision
from ....machine import GPU_MAX_GRID, GPU_MEMORY_LATENCY_CYCLES, GPU_PENDING_BYTES_PER_THREAD
from ....options import MappingOptions
from ....target import GpuTarget
from ....tc_lang import ir as tc
from ....tc_lang.ir import walk_expr
from ....thresholds import (
    GPU_BLOCK_SIDE,
    GPU_BLOCK_THREADS,
    GPU_CONTRACTION_TILES,
    GPU_LIGHT_BLOCK_ELEMENTS,
    GPU_MIN_TILE_TERMS,
    GPU_REREAD_BYTES,
    GPU_SERIAL_TERMS,
    GPU_WARP_ROW,
)
from ...schedule.access_cost import access_stride, op_count
from ...schedule.fusion import FusionGroup, FusionObjection
from ...schedule.loop_nest import DimKind, LoopNest, NestDim, build_nests
from ...scop.isl_affine import to_isl_affine
from ...scop.scop import Scop, ScopStatement, statements_of
from .mapping import transactions_per_read
from .vector_width import vector_width_along


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The sizes of a group that matter to the mapping.

    rows: the extents of the shared rows. leaf: the leaf with most work. inner: the largest number of iterations that a
    leaf has per point of the rows. reduced: the number of terms per element in `leaf`.
    """

    group: FusionGroup
    rows: tuple[int, ...]
    leaf: LoopNest
    inner: int
    reduced: int

    @property
    def points(self) -> int:
        return prod(self.rows)


def object_to_fusion(
    scop: Scop, target: GpuTarget, before: FusionGroup, alone: FusionGroup, joined: FusionGroup
) -> FusionObjection | None:
    """The objection to fusing, if any: too little parallelism would remain, or too much would be read repeatedly.

    A sum that is split for parallelism is never fused with the statement that adds its parts.
    """
    written = {w.tensor for n in before.nodes for w in n.writes}
    if any(written & scop.parts & set(n.tensors) for n in alone.nodes):
        return FusionObjection("a sum is in parts, and these are added up by a kernel of their own")
    apart = min(before.parallelism, alone.parallelism)
    parallelism = ("parallelism", float(joined.parallelism)), ("parallelism apart", float(apart))
    if joined.parallelism <= 1:
        return FusionObjection("no iterations of shared loops are independent", parallelism)
    if joined.parallelism < target.num_sms and joined.parallelism < max(before.parallelism, alone.parallelism):
        if all(
            _make_group_shape(scop, g).inner * g.parallelism <= GPU_LIGHT_BLOCK_ELEMENTS * joined.parallelism
            for g in (before, alone)
        ):
            return None
        return FusionObjection("processors would idle", (*parallelism, ("processors", float(target.num_sms))))
    again = 0 if joined.parallelism >= apart else _reread_bytes(scop, joined)
    if again <= GPU_REREAD_BYTES:
        return None
    return FusionObjection(
        "blocks would read too much again", (("bytes read again", again), ("limit", GPU_REREAD_BYTES))
    )


def is_launch_bound(scop: Scop, target: GpuTarget, *groups: FusionGroup) -> bool:
    """Whether `groups` have so little work that launches dominate, and contain no contraction."""
    shapes = [_make_group_shape(scop, g) for g in groups]
    work = sum(shape.points * max(1, shape.inner) for shape in shapes)
    return work <= GPU_LIGHT_BLOCK_ELEMENTS * target.num_sms and not any(
        _find_contraction_sides(shape) for shape in shapes
    )


def _reread_bytes(scop: Scop, group: FusionGroup) -> int:
    """The bytes of tensors that several points of the rows read, counted once for each reading point."""
    total = 0
    for node in group.nodes:
        places = [row.index_and_shift(node)[0] for row in group.rows]
        for access in dict.fromkeys(node.reads):
            names = {x.name for e in access.subscripts for x in walk_expr(e) if isinstance(x, tc.Index)}
            again = prod(r.extent for r, name in zip(group.rows, places, strict=True) if name not in names)
            tensor = scop.function.tensor(access.tensor)
            total += tensor.size * tensor.dtype.size * again if again > 1 else 0
    return total


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()


def choose_mapping(scop: Scop, group: FusionGroup, target: GpuTarget) -> MappingOptions:
    """The default mapping of one group; records it as a decision."""
    options, cycles = _choose_mapping(scop, _make_group_shape(scop, group), target)
    if is_recording():
        _record_mapping(scop, group, options, cycles, target)
    return options


def _describe_mapping(options: MappingOptions) -> str:
    """The sizes and features of a mapping, for display."""
    sizes = (("tiles", options.tile), ("threads", options.threads))
    parts = [f"{name} {' x '.join(map(str, values))}" for name, values in sizes if values]
    parts += [f"{options.unroll} iterations unrolled"] if options.unroll > 1 else []
    parts += [f"vectors of {options.vector_width}"] if options.vector_width > 1 else []
    flags = ("shared_memory", "private_memory", "double_buffer", "cooperative_reductions", "read_only_cache")
    return ", ".join([*parts, *(name.replace("_", " ") for name in flags if getattr(options, name))])


def _record_mapping(scop: Scop, group: FusionGroup, options: MappingOptions, cycles: float, target: GpuTarget) -> None:
    """Record the mapping of a group, and slower tiles as rivals."""
    shape = _make_group_shape(scop, group)
    sides = _find_contraction_sides(shape) if shape.reduced > GPU_SERIAL_TERMS else None
    rivals: tuple[Rival, ...] = ()
    if sides is not None:
        ranked = sorted(_rank_tiles(scop, shape, sides, target), key=lambda f: f[0])
        kind = "a contraction: tiles in shared memory and registers"
        rivals = tuple(
            Rival(f"tiles of {' x '.join(map(str, t.tile))}, {t.depth} terms", c, "more cycles by the model")
            for c, t in ranked
            if c > cycles
        )
    elif _column_reduction(scop, shape):
        kind = "a sum of columns: strips of columns, rows shared by threads"
    elif shape.inner > GPU_SERIAL_TERMS:
        kind = "a reduction of rows: a warp or a block for each"
    else:
        kind = "a thread for each element"
    numbers = ("cycles", cycles), ("independent iterations", shape.points), ("terms", shape.reduced)
    note_decision(Decision("mapping", statements_of(group.nodes), _describe_mapping(options), kind, numbers, rivals))


def group_cycles(scop: Scop, group: FusionGroup, target: GpuTarget) -> float:
    """The predicted cycles of a group with its default mapping, at least those of reading its tensors from memory."""
    names = dict.fromkeys(a.tensor for node in group.nodes for a in node.reads)
    moved = sum(t.size * t.dtype.size for t in map(scop.function.tensor, names))
    return max(
        _choose_mapping(scop, _make_group_shape(scop, group), target)[1], moved * target.clock / target.bandwidth
    )


def _choose_mapping(scop: Scop, shape: GroupShape, target: GpuTarget) -> tuple[MappingOptions, float]:
    """The mapping of a group, and its predicted cycles."""
    sides = _find_contraction_sides(shape) if shape.reduced > GPU_SERIAL_TERMS else None
    if sides is not None:
        cycles, square = _find_fastest_tile(scop, shape, sides, target)
        if cycles <= _by_warps(scop, shape, target):
            return _make_contraction_options(scop, shape, sides, square), cycles
        options = _map_row_reduction(scop, shape, target)
    elif _column_reduction(scop, shape):
        options = _map_column_reduction(scop, shape, target)
    elif shape.inner > GPU_SERIAL_TERMS:
        options = _map_row_reduction(scop, shape, target)
    else:
        options = _map_pointwise(scop, shape, target)
    return options, _streaming_cycles(scop, shape, options, target)


def _streaming_cycles(scop: Scop, shape: GroupShape, options: MappingOptions, target: GpuTarget) -> float:
    """The predicted cycles if threads read terms directly from memory; loads in flight per multiprocessor limit it."""
    blocks = prod(-(-n // size) for n, size in zip(shape.rows, options.tile, strict=False) if size)
    each, threads = -(-blocks // target.num_sms), prod(options.threads)
    together = min(each, max(1, target.threads_per_sm // threads), target.blocks_per_sm)
    rate = min(target.l2_bytes, together * threads * GPU_PENDING_BYTES_PER_THREAD / GPU_MEMORY_LATENCY_CYCLES)
    return 2 * GPU_MEMORY_LATENCY_CYCLES + each * _streamed_operand_bytes(scop, shape, shape.inner) / blocks / rate


def heaviest_group(scop: Scop, groups: tuple[FusionGroup, ...]) -> FusionGroup:
    """The group with the most operations."""
    return max(groups, key=lambda g: sum(_count_leaf_operations(scop, leaf) for leaf in _make_group_nests(scop, g)))


def _make_group_nests(scop: Scop, group: FusionGroup) -> tuple[LoopNest, ...]:
    return build_nests(scop, group, range(len(group.rows)), fuse=True)


def _count_leaf_operations(scop: Scop, leaf: LoopNest) -> int:
    return prod(d.extent for d in leaf.dims) * op_count(scop.function, leaf)


def _make_group_shape(scop: Scop, group: FusionGroup) -> GroupShape:
    found = _make_group_nests(scop, group)
    heavy = max(found, key=lambda leaf: _count_leaf_operations(scop, leaf))
    inner = max(prod(d.extent for d in leaf.dims if d.row is None) for leaf in found)
    reduced = prod(d.extent for d in heavy.dims if d.kind is DimKind.REDUCTION)
    return GroupShape(group, tuple(r.extent for r in group.rows), heavy, inner, reduced)


# --- everything else ---------------------------------------------------------------------------------------------


def _map_pointwise(scop: Scop, shape: GroupShape, target: GpuTarget) -> MappingOptions:
    """A thread per point of the rows, x along the last row; square tiles if reads are contiguous along another row."""
    turned = _find_transposed_read_row(scop, shape)
    if turned is not None:
        sizes = tuple(32 if k in (turned, len(shape.rows) - 1) else 1 for k in range(len(shape.rows)))
        blocks = (GPU_MAX_GRID, 65535, 65535)
        return MappingOptions(
            tile=sizes,
            threads=(32, 8),
            blocks=blocks,
            unroll=8,
            shared_memory=True,
            unroll_copy_shared=True,
            collapse_loops=True,
        )
    vector = _choose_vector_width(scop, shape, target)
    block = GPU_BLOCK_THREADS if shape.points >= GPU_BLOCK_THREADS * vector * target.num_sms else GPU_BLOCK_THREADS // 2
    tile: list[int] = []
    threads: list[int] = []
    left = block * vector
    for k, extent in reversed(list(enumerate(shape.rows))):
        size = min(extent, left) if len(threads) < 3 else 1
        if k > 2:
            size = min(extent, left)
            tile.append(0)
        else:
            tile.append(size)
        if size > 1:
            threads.append(size if threads else size // vector)
            left = max(1, left // size)
    return MappingOptions(
        tile=tuple(reversed(tile)) or (0,),
        threads=_limit_threads(threads, target),
        blocks=(GPU_MAX_GRID, 65535, 65535),
        unroll=8,
        private_memory=vector > 1,
        vector_width=vector,
        collapse_loops=True,
    )


def _choose_vector_width(scop: Scop, shape: GroupShape, target: GpuTarget) -> int:
    """The elements along the last row that a thread takes as a vector; 1 if otherwise too few threads would remain."""
    last = len(shape.rows) - 1
    places = [(leaf, d) for leaf in _make_group_nests(scop, shape.group) for d in leaf.dims if d.row == last]
    found = vector_width_along(scop, places) if shape.inner == 1 else 1
    return found if shape.points >= found * (GPU_BLOCK_THREADS // 2) * target.num_sms else 1


def _find_transposed_read_row(scop: Scop, shape: GroupShape) -> int | None:
    """The row along which a read of the heaviest leaf is contiguous that is strided along the last row, or None."""
    if len(shape.rows) < 2 or min(shape.rows[-1], max(shape.rows[:-1])) < 16:
        return None
    dims = {d.row: d for d in shape.leaf.dims if d.row is not None}
    last = dims[len(shape.rows) - 1]
    for node in shape.leaf.nodes:
        for access in node.reads:
            if access_stride(scop.function, access, last.index(node)) in (0, 1, None):
                continue
            for k in range(min(3, len(shape.rows) - 1)):
                if shape.rows[k] >= 16 and access_stride(scop.function, access, dims[k].index(node)) == 1:
                    return k
    return None


def _limit_threads(threads: Sequence[int], target: GpuTarget) -> tuple[int, ...]:
    """`threads` limited to the target's maximum along each axis."""
    return tuple(min(n, most) for n, most in zip(threads, target.block, strict=False)) or (1,)


# --- reductions --------------------------------------------------------------------------------------------------


def _map_row_reduction(scop: Scop, shape: GroupShape, target: GpuTarget) -> MappingOptions:
    """As many threads per point of the rows as have work; several points per block if that is few."""
    inner = shape.inner
    plenty = shape.points >= 16 * target.num_sms
    found = [(leaf, [d for d in leaf.dims if d.row is None]) for leaf in _make_group_nests(scop, shape.group)]
    vector = vector_width_along(scop, [(leaf, dims[-1]) for leaf, dims in found if dims])
    if inner <= 32 or (inner <= GPU_WARP_ROW and plenty):
        along = min(32, next_power_of_two(inner))
    else:
        along = min(1024, max(32, next_power_of_two(inner // (max(8, 4 * vector) if plenty else 4))))
    beside = prod(d.extent for d in shape.leaf.dims if d.row is None and d.kind is DimKind.PARALLEL)
    if shape.reduced > 1 and beside > 1:  # several sums per point of the rows: up to a warp for each
        along = min(32, next_power_of_two(shape.reduced))
        threads = (along, min(next_power_of_two(beside), 2 * GPU_BLOCK_THREADS // along))
        return _map_cooperative_reduction(shape, 1, threads, vector, target)
    last = min(shape.rows[-1], max(1, GPU_BLOCK_THREADS // 2 // along)) if shape.rows else 1
    return _map_cooperative_reduction(shape, last, (along, last) if last > 1 else (along,), vector, target)


def _map_cooperative_reduction(
    shape: GroupShape, last: int, threads: tuple[int, ...], vector: int, target: GpuTarget
) -> MappingOptions:
    """Cooperative reductions: a block has one point of the rows, but `last` along the last row."""
    return MappingOptions(
        tile=(*(1 for _ in shape.rows[:-1]), last) if shape.rows else (0,),
        threads=_limit_threads(threads, target),
        blocks=(GPU_MAX_GRID, 65535, 65535),
        unroll=8 * vector * vector,
        cooperative_reductions=True,
        private_memory=vector > 1,
        vector_width=vector,
        shared_memory=len(shape.group.nodes) > 1,
        unroll_copy_shared=len(shape.group.nodes) > 1,
        collapse_loops=True,
    )


def _column_reduction(scop: Scop, shape: GroupShape) -> bool:
    """Whether reads are contiguous along the last row, but strided along the long sums."""
    if shape.reduced <= GPU_SERIAL_TERMS or not shape.rows or shape.rows[-1] < 8:
        return False
    dims = [d for d in shape.leaf.dims if d.row == len(shape.rows) - 1]
    inner = [d for d in shape.leaf.dims if d.row is None]
    costs = [transactions_per_read(scop.function, shape.leaf, d) for d in inner]
    return bool(dims) and transactions_per_read(scop.function, shape.leaf, dims[0]) < min(costs, default=0.0)


def _map_column_reduction(scop: Scop, shape: GroupShape, target: GpuTarget) -> MappingOptions:
    """Strips of columns; the fewer strips there are, the more threads share the terms of a column."""
    width = min(32, next_power_of_two(shape.rows[-1]))
    strips = shape.points // width
    down = 1 if strips * width >= 4 * GPU_BLOCK_THREADS * target.num_sms else 8 if strips >= 4 * target.num_sms else 32
    down = max(1, min(down, next_power_of_two(shape.reduced // 4)))
    if down == 1:
        return _map_pointwise(scop, shape, target)
    return MappingOptions(
        tile=(*(1 for _ in shape.rows[:-1]), width),
        threads=(width, down),
        blocks=(GPU_MAX_GRID, 65535, 65535),
        unroll=8,
        cooperative_reductions=True,
        collapse_loops=True,
    )


# --- contractions ------------------------------------------------------------------------------------------------


def _find_contraction_sides(shape: GroupShape) -> tuple[NestDim, NestDim] | None:
    """Two rows of a contraction, the last one and an earlier one, on which different reads do not depend; else None."""
    free = [d for d in shape.leaf.dims if d.kind is DimKind.PARALLEL and d.extent > 1]
    if len(shape.leaf.nodes) != 1 or len(free) < 2 or any(d.row is None for d in free):
        return None
    (node,) = shape.leaf.nodes
    last = free[-1]
    still = _reads_invariant_along(node, last)
    others = (
        d for d in reversed(free[:-1]) if _reads_invariant_along(node, d) and _reads_invariant_along(node, d) != still
    )
    other = next(others, None)
    return None if other is None or not still else (other, last)


def _reads_invariant_along(node: ScopStatement, dim: NestDim) -> frozenset[str]:
    """The tensors other than the target that `node` reads at elements that do not depend on `dim`."""
    name = dim.index(node)
    target = node.statements[0].target
    return frozenset(
        a.tensor
        for a in node.reads
        if a.tensor != target
        and not any(isinstance(x, tc.Index) and x.name == name for e in a.subscripts for x in walk_expr(e))
    )


@dataclass(frozen=True, slots=True)
class ContractionTile:
    """A tile of a contraction.

    each: the elements of a thread along both sides. depth: the terms of a reduced dimension that are staged at once,
    together with all later dimensions. outer: the number of earlier dimensions, which are taken one term at a time.
    """

    tile: tuple[int, int]
    each: tuple[int, int]
    depth: int
    outer: int = 0

    @property
    def threads(self) -> tuple[int, int]:
        return self.tile[1] // self.each[1], self.tile[0] // self.each[0]

    def cycles(self, target: GpuTarget) -> float:
        """The cycles per term of a tile, limited by instruction issue or by the bandwidth of shared memory."""
        warps = -(-prod(self.threads) // target.warp)
        issued = prod(self.each) + sum(self.each) / 4 + 1
        moved = self.each[0] / 4 + self.each[1] / 2
        return warps * max(issued * target.warp / target.float32_lanes, moved)

    def resident_blocks(self, target: GpuTarget) -> int:
        """The blocks per multiprocessor that registers allow."""
        return max(1, target.registers_per_sm // (prod(self.threads) * (32 + prod(self.each) * 3 // 2)))

    def duration(self, blocks: int, steps: int, terms: int, target: GpuTarget) -> float:
        """The cycles of `blocks` blocks with `steps` steps of `terms` terms; resident blocks hide latency."""
        each = -(-blocks // target.num_sms)
        together = min(each, self.resident_blocks(target))
        return GPU_MEMORY_LATENCY_CYCLES + steps * each * max(
            GPU_MEMORY_LATENCY_CYCLES / together, terms * self.cycles(target)
        )


def _find_fastest_tile(
    scop: Scop, shape: GroupShape, sides: tuple[NestDim, NestDim], target: GpuTarget
) -> tuple[float, ContractionTile]:
    """(cycles, tile) of the fastest tile; tiles are square except for short sides."""
    found = _rank_tiles(scop, shape, sides, target)
    return min(reversed(found), key=lambda f: f[0])  # of equally fast tiles, the one with most blocks


def _rank_tiles(
    scop: Scop, shape: GroupShape, sides: tuple[NestDim, NestDim], target: GpuTarget
) -> list[tuple[float, ContractionTile]]:
    """All candidate tiles, each with its predicted cycles."""
    extents = [d.extent for d in sides]
    others = prod(r for k, r in enumerate(shape.rows) if k not in [d.row for d in sides])
    terms = [d.extent for d in shape.leaf.dims if d.row is None]
    found: list[tuple[float, ContractionTile]] = []
    for side, depth in GPU_CONTRACTION_TILES:
        tile = (min(side, next_power_of_two(extents[0])), min(side, next_power_of_two(extents[1])))
        square = ContractionTile(tile, (max(1, tile[0] // GPU_BLOCK_SIDE), max(1, tile[1] // GPU_BLOCK_SIDE)), depth)
        blocks = others * prod(-(-n // size) for n, size in zip(extents, tile, strict=True))
        square = _deepen_tile(scop, shape, sides, square, blocks, target)
        steps = prod(terms[: square.outer]) * -(-terms[square.outer] // square.depth)
        cycles = square.duration(blocks, steps, square.depth * prod(terms[square.outer + 1 :]), target)
        found.append((cycles, square))
    return found


def _make_contraction_options(
    scop: Scop, shape: GroupShape, sides: tuple[NestDim, NestDim], square: ContractionTile
) -> MappingOptions:
    """The mapping of a contraction with this tile: in shared memory and registers, double buffered."""
    sizes = {d.row: size for d, size in zip(sides, square.tile, strict=True) if d.row is not None}
    return MappingOptions(
        tile=(*(sizes.get(k, 1) for k in range(len(shape.rows))), *(1 for _ in range(square.outer)), square.depth),
        threads=square.threads,
        blocks=(GPU_MAX_GRID, 65535, 65535),
        unroll=8,
        shared_memory=True,
        unroll_copy_shared=True,
        private_memory=True,
        vector_width=gcd(4, square.each[1]) if _reads_along(scop, shape.leaf, sides[1]) else 1,
        double_buffer=True,
    )


def _deepen_tile(
    scop: Scop,
    shape: GroupShape,
    sides: tuple[NestDim, NestDim],
    square: ContractionTile,
    blocks: int,
    target: GpuTarget,
) -> ContractionTile:
    """`square` with its depth limited by shared memory, or increased if there are too few blocks to hide latency."""
    sizes = {d.row: size for d, size in zip(sides, square.tile, strict=True) if d.row is not None}
    terms = [d.extent for d in shape.leaf.dims if d.row is None]

    def fits(depth: int) -> bool:
        return 2 * _staged_bytes(scop, shape, sizes, [*(1 for _ in range(outer)), depth]) <= target.max_shared

    outer = 0
    while outer + 1 < len(terms) and not fits(min(GPU_MIN_TILE_TERMS, terms[outer])):
        outer += 1
    depth = min(square.depth, terms[outer])
    while depth > GPU_MIN_TILE_TERMS and not fits(depth):
        depth //= 2
    together = min(-(-blocks // target.num_sms), square.resident_blocks(target))
    each = square.cycles(target) * prod(terms[outer + 1 :]) * together
    while depth * each < GPU_MEMORY_LATENCY_CYCLES and 2 * depth <= terms[outer] and fits(2 * depth):
        depth *= 2
    return replace(square, depth=depth, outer=outer)


def _by_warps(scop: Scop, shape: GroupShape, target: GpuTarget) -> float:
    """The predicted cycles if a warp sums the terms of each element: those of reading them from L2."""
    inner = [d for d in shape.leaf.dims if d.row is None]
    if vector_width_along(scop, [(shape.leaf, inner[-1])]) == 1:
        return inf
    return 2 * GPU_MEMORY_LATENCY_CYCLES + _streamed_operand_bytes(scop, shape, shape.reduced) / (
        target.l2_bytes * target.num_sms
    )


def _streamed_operand_bytes(scop: Scop, shape: GroupShape, terms: int) -> float:
    """The bytes read if each point of the rows reads `terms` terms of one factor, with the other factor in cache."""
    sizes = (scop.function.tensor(a.tensor).dtype.size for n in shape.leaf.nodes for a in n.reads)
    return shape.points * max(1, terms) * max(sizes, default=0) * 5 / 4


def _staged_bytes(scop: Scop, shape: GroupShape, sizes: Mapping[int, int], depths: Sequence[int]) -> int:
    """The bytes of the heaviest leaf's operands in a tile. sizes: of rows. depths: of the first inner dimensions.

    Shared memory must hold this twice for double buffering.
    """
    inner = [d for d in shape.leaf.dims if d.row is None]
    extents = {d.name: min(d.extent, sizes.get(d.row, 1)) for d in shape.leaf.dims if d.row is not None}
    extents |= {d.name: d.extent for d in inner}
    extents |= {d.name: min(d.extent, depth) for d, depth in zip(inner, depths, strict=False)}
    total = 0
    for node in shape.leaf.nodes:
        values = {d.index(node): extents[d.name] for d in shape.leaf.dims}
        for access in (a for a in dict.fromkeys(node.reads) if a.tensor != node.statements[0].target):
            tensor = scop.function.tensor(access.tensor)
            total += prod(_subscript_value_span(e, values) for e in access.subscripts) * tensor.dtype.size
    return total


def _subscript_value_span(subscript: tc.Expr, extents: Mapping[str, int]) -> int:
    """The number of values in the range of a subscript, including gaps; one per point if it depends on data."""
    form = to_isl_affine(subscript)
    if form is not None:
        return 1 + sum(abs(c) * (extents.get(name, 1) - 1) for name, c in form.terms)
    names = {x.name for x in walk_expr(subscript) if isinstance(x, tc.Index)}
    return prod(extents.get(name, 1) for name in names)


def _reads_along(scop: Scop, leaf: LoopNest, dim: NestDim) -> bool:
    """Whether some read is contiguous along `dim`."""
    return any(access_stride(scop.function, a, dim.index(n)) == 1 for n in leaf.nodes for a in n.reads)
