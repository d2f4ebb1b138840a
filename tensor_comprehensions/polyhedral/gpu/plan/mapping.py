"""Map a fusion group to the schedule tree of one kernel: tiles, blocks, threads and sequential loops.

The rows that the nodes of a group share are tiled, and tiles are distributed over the blocks of the grid. Inside a
tile, the leaves run one after another, each with its innermost parallel dimensions on the threads of the block. Tile
and point loops are the functions `floor(row / size)` and `row mod size` of a row, so that every loop starts at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ....core.errors import CannotLower
from ....loop_ir.nodes import MOST_EXTENT, BlockCount, Launch
from ....options import MappingOptions
from ....tc_lang.ir import BoundFunction
from ....thresholds import GPU_MAX_INNER_ELEMENTS, GPU_NEIGHBOR_TERMS
from ...schedule.access_cost import access_stride, loop_order
from ...schedule.fusion import FusionGroup
from ...schedule.loop_nest import DimKind, LoopNest, NestDim, build_nests
from ...schedule.shared_rows import BandMember
from ...scop.isl_affine import isl_name, isl_parameter
from ...scop.scop import Scop
from ..tree.schedule_tree import (
    BLOCK_IDS,
    THREAD_IDS,
    Band,
    Collective,
    Empty,
    MappedBandMember,
    MappingFilter,
    Mark,
    SequenceNode,
    Tree,
    with_mark,
)
from .statement_phases import Phase, Unit, units_of

TILE, ELEMENTS, SHARED, WRITTEN_OUT = "tile", "elements", "shared", "registers"
"""The marks of a tree, outermost first: below the block-tile loops, which all leaves share; below a leaf's loops over
tiles of parallel dimensions; below all its tile loops; above innermost loops to unroll, so that they may index
registers."""
SHARED_DEPTH, PRIVATE_DEPTH = "shared depth", "private depth"
"""The marks at the depths that `MappingOptions` request."""

Child = tuple[tuple[Unit, ...], Tree]


@dataclass(frozen=True, slots=True)
class MappedDim:
    """A dimension of a leaf inside the tiles of rows: values from 0 up to `extent`, in tiles of `tile`.

    identifier: the thread dimension that it is mapped to, or None. threads: the number of threads along it; each
    takes `vector` consecutive values at a time.
    """

    dim: NestDim
    extent: int
    tile: int
    identifier: int | None = None
    threads: int = 1
    vector: int = 1

    @property
    def variable(self) -> str:
        """The int64 variable that holds the extent inside the tiles of rows; empty if that is a number."""
        return self.dim.variable if self.extent == self.dim.extent else ""

    @property
    def tiles(self) -> int:
        return -(-self.extent // self.tile)

    @property
    def trips(self) -> int:
        """The iterations of the loop over the points of a tile that each thread runs."""
        return -(-self.tile // (self.threads * self.vector))


@dataclass(frozen=True, slots=True)
class NestPlan:
    """A leaf with the order and mapping of its dimensions.

    parallel: the parallel ones, in the order of the text. inner: the others. cooperative: whether threads share the
    terms of a reduction.
    """

    leaf: LoopNest
    parallel: tuple[MappedDim, ...]
    inner: tuple[MappedDim, ...]
    cooperative: bool
    register_tiled: bool = False
    """Whether a thread keeps several elements in registers during a single pass over the reduced dimensions."""
    unrolled: bool = False
    """Whether a thread's loops are unrolled, so that it can read results of a register-tiled leaf from registers."""

    @property
    def axes(self) -> tuple[MappedDim, ...]:
        return (*self.parallel, *self.inner)

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(u for n in self.leaf.nodes for u in units_of(n, cooperative=self.cooperative))

    @property
    def reduced_over(self) -> frozenset[int]:
        """The thread dimensions along which threads share the terms of one element."""
        return frozenset(a.identifier for a in self.inner if a.identifier is not None)

    def part(self, *parts: Phase) -> tuple[Unit, ...]:
        return tuple(u for u in self.units if u.phase in parts)


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The mapping of one kernel. sizes: the tile size of each row. blocks: the grid, which iterates over the tiles.

    variables: for each row the int64 variable that holds its extent, or empty. `blocks` then has the most blocks.
    """

    group: FusionGroup
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    leaves: tuple[NestPlan, ...]
    launch: Launch
    options: MappingOptions
    variables: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """All int64 variables that hold extents of its loops."""
        return tuple(dict.fromkeys(v for u in self.units for v in u.variables))

    def is_open(self, k: int) -> bool:
        """Whether only a call tells how many tiles there are along row `k`."""
        return bool(self.variables[k]) and self.tiles[k] > 1

    @property
    def units(self) -> tuple[Unit, ...]:
        return tuple(u for leaf in self.leaves for u in leaf.units)

    @property
    def tiles(self) -> tuple[int, ...]:
        return tuple(-(-r.extent // size) for r, size in zip(self.group.rows, self.sizes, strict=True))

    @property
    def repeats(self) -> bool:
        """Whether a block may run several tiles."""
        walked = [*self.blocks, *(1 for _ in self.tiles[len(self.blocks) :])]
        most = (MOST_EXTENT if self.is_open(k) else n for k, n in enumerate(self.tiles))
        return any(n > b for n, b in zip(most, walked, strict=True))

    def row(self, k: int, unit: Unit) -> str:
        """The value of row `k` for `unit`, counted from 0, in isl's notation (as in the methods below)."""
        index, shift = self.group.rows[k].index_and_shift(unit.node)
        return f"{isl_name(index)} + {shift - self.group.rows[k].lower}"

    def tile(self, k: int, unit: Unit) -> str:
        """The index of the tile along row `k`."""
        return f"floor(({self.row(k, unit)})/{self.sizes[k]})" if self.tiles[k] > 1 else "0"

    def value(self, axis: MappedDim, unit: Unit) -> str:
        """The position along `axis` inside the tiles of rows; 0 for a unit without that index."""
        if axis.dim.row is not None:
            k = axis.dim.row
            value = self.row(k, unit)
            return value if self.sizes[k] >= self.group.rows[k].extent else f"({value}) mod {self.sizes[k]}"
        name = axis.dim.index(unit.node)
        index = next((i for i in unit.indices if i.name == name), None)
        return f"{isl_name(name)} - {index.lower}" if index is not None else "0"

    def point(self, axis: MappedDim, unit: Unit) -> str:
        """The position along `axis` inside its tile."""
        value = self.value(axis, unit)
        return value if axis.tiles == 1 else f"({value}) mod {axis.tile}"


def plan_kernel(scop: Scop, group: FusionGroup, options: MappingOptions) -> KernelPlan:
    """The tiling and mapping of `group` by `options`."""
    given = (*options.tile, *(0 for _ in group.rows))
    sizes = tuple(min(size or row.extent, row.extent) for size, row in zip(given, group.rows, strict=False))
    variables = tuple(_row_variable(row, group) for row in group.rows)
    blocks = tuple(
        min(limit, -(-(MOST_EXTENT if name and size < row.extent else row.extent) // size))
        for limit, row, size, name in zip(options.blocks, group.rows, sizes, variables, strict=False)
    )
    counts = tuple(
        BlockCount(name, size, most) if name and size < row.extent else None
        for most, row, size, name in zip(blocks, group.rows, sizes, variables, strict=False)
    )
    points = [k for k, size in enumerate(sizes) if size > 1]
    found = build_nests(scop, group, points, fuse=options.intra_tile_fusion != "min")
    plans = _unroll_short_pointwise_nests(
        tuple(_leaf_plan(scop.function, group, leaf, sizes, options) for leaf in found)
    )
    block = [1, 1, 1]
    for axis in (a for p in plans for a in p.axes):
        if axis.identifier is not None:
            block[axis.identifier] = max(block[axis.identifier], axis.threads)
    x, y, z, *_ = (*blocks, 1, 1, 1)
    launch = Launch(
        (x, y, z), (block[0], block[1], block[2]), counts=(*counts, None, None, None)[:3] if any(counts) else ()
    )
    return KernelPlan(group, sizes, blocks, plans, launch, options, variables)


def _row_variable(row: BandMember, group: FusionGroup) -> str:
    """The int64 variable that holds the extent of a row, or empty.

    Raises CannotLower if that is another one for other nodes.
    """
    indices = [(node, *row.index_and_shift(node)) for node in group.nodes]
    found = [(i, shift) for node, name, shift in indices for i in node.statements[0].indices if i.name == name]
    names = {i.variable for i, _ in found}
    if len(names) > 1 or (names != {""} and any(i.lower + shift != row.lower for i, shift in found)):
        raise CannotLower("loops of different extents, which only a call tells, are one")
    return names.pop()


def _leaf_plan(
    function: BoundFunction, group: FusionGroup, leaf: LoopNest, sizes: Sequence[int], options: MappingOptions
) -> NestPlan:
    axes = _make_mapped_dims(group, leaf, sizes, options)
    ordered = loop_order(function, leaf, None)
    parallel = [a for a in axes if a.dim.kind is DimKind.PARALLEL]
    inner = [a for d in ordered for a in axes if a.dim is d and d.kind is not DimKind.PARALLEL]
    shared = _choose_cooperative_dims(function, leaf, parallel, inner, options)
    if shared is not None:
        chosen = shared
    else:
        candidates = [a for a in reversed(parallel) if a.tile > 1]
        chosen = list(zip(range(3), candidates, strict=False))[: len(options.threads)]
    mapped = {a.dim.name: _map_to_threads(a, k, options, cooperative=shared is not None) for k, a in chosen}
    walked = tuple(mapped.get(a.dim.name, a) for a in parallel)
    blocked = options.private_memory and shared is None and _can_register_tile(leaf, walked, inner)
    return NestPlan(leaf, walked, tuple(mapped.get(a.dim.name, a) for a in inner), shared is not None, blocked)


def _unroll_short_pointwise_nests(plans: tuple[NestPlan, ...]) -> tuple[NestPlan, ...]:
    """`plans` with short pointwise leaves unrolled if another leaf is register-tiled."""
    if not any(p.register_tiled for p in plans):
        return plans
    return tuple(
        replace(p, unrolled=not p.inner and not p.cooperative and _fits_registers_in_one_tile(p.parallel))
        for p in plans
    )


def _fits_registers_in_one_tile(parallel: Sequence[MappedDim]) -> bool:
    """Whether the elements of a thread are few enough for registers, and in a single tile."""
    few = prod(a.trips * a.vector for a in parallel) <= GPU_MAX_INNER_ELEMENTS // 2
    return few and all(a.tiles == 1 for a in parallel)


def _can_register_tile(leaf: LoopNest, parallel: Sequence[MappedDim], inner: Sequence[MappedDim]) -> bool:
    """Whether `leaf` only reduces, and a thread has several elements or neighboring terms that fit into registers."""
    reduces = all(s.reduction and s.reduction_indices for n in leaf.nodes for s in n.statements)
    terms = [a for a in inner if a.dim.kind is DimKind.REDUCTION]
    elements = prod(a.trips * a.vector for a in parallel)
    if not (reduces and len(terms) == len(inner) > 0 and elements <= GPU_MAX_INNER_ELEMENTS // 2):
        return False
    return elements > 1 or terms[-1].tile % GPU_NEIGHBOR_TERMS == 0


def _make_mapped_dims(
    group: FusionGroup, leaf: LoopNest, sizes: Sequence[int], options: MappingOptions
) -> list[MappedDim]:
    """The unmapped dimensions of a leaf; those that are not rows get the tile sizes that remain in `options`."""
    rest = iter(options.tile[len(group.rows) :])
    ordered = any(d.kind is DimKind.SERIAL for d in leaf.dims)
    axes = []
    for d in leaf.dims:
        if d.row is not None:
            extent = min(d.extent, sizes[d.row])
            axes.append(MappedDim(d, extent, extent))
        else:
            size = 0 if ordered else next(rest, 0)
            axes.append(MappedDim(d, d.extent, min(size or d.extent, d.extent)))
    return axes


def _map_to_threads(axis: MappedDim, identifier: int, options: MappingOptions, *, cooperative: bool) -> MappedDim:
    """`axis` mapped to the thread dimension `identifier`; in a cooperative leaf, only reduced axes have vectors."""
    threads = options.threads[identifier]
    reduced = axis.dim.kind is DimKind.REDUCTION
    whole = identifier == 0 and axis.tile % (options.vector_width * threads) == 0
    vector = options.vector_width if whole and reduced == cooperative else 1
    most = 1 << (axis.tile - 1).bit_length() if reduced else -(-axis.tile // vector)
    return MappedDim(axis.dim, axis.extent, axis.tile, identifier, min(threads, most), vector)


def _choose_cooperative_dims(
    function: BoundFunction,
    leaf: LoopNest,
    parallel: Sequence[MappedDim],
    inner: Sequence[MappedDim],
    options: MappingOptions,
) -> list[tuple[int, MappedDim]] | None:
    """The dimensions to map if threads share the terms of a reduction, as (thread dimension, axis); else None.

    They share if the free dimensions alone would leave threads idle, or read uncoalesced. x is mapped to the contiguous
    dimension.
    """
    reductions = [a for a in reversed(inner) if a.dim.kind is DimKind.REDUCTION and a.extent > 1]
    sums = any(s.reduction and s.reduction_indices for n in leaf.nodes for s in n.statements)
    ordered = any(a.dim.kind is DimKind.SERIAL for a in inner)
    if not options.cooperative_reductions or not reductions or not sums or ordered:
        return None
    free = [a for a in reversed(parallel) if a.tile > 1]
    along = min((*reductions[:1], *free[:1]), key=lambda a: transactions_per_read(function, leaf, a.dim))
    if prod(a.tile for a in free) >= prod(options.threads) and along not in reductions:
        return None
    others = [a for a in (*free, *reductions) if a is not along]
    if along in free:
        others.sort(key=lambda a: a.dim.kind is not DimKind.REDUCTION)
    chosen = list(zip(range(len(options.threads)), (along, *others), strict=False))
    walked = [(k, a) for k, a in chosen if options.threads[k] > 1]
    return walked if any(a.dim.kind is DimKind.REDUCTION for _, a in walked) else None


def transactions_per_read(function: BoundFunction, leaf: LoopNest, dim: NestDim) -> float:
    """The relative memory traffic, summed over reads, of threads along `dim`: 1 for a coalesced read."""
    costs = {0: 0.25, 1: 1.0}
    return sum(
        8.0 if (step := access_stride(function, a, dim.index(n))) is None else costs.get(step, 8.0)
        for n in leaf.nodes
        for a in n.reads
    )


# --- the tree ----------------------------------------------------------------------------------------------------


def kernel_tree(plan: KernelPlan, barriers: Sequence[str]) -> Tree:
    """The schedule tree of a kernel. barriers: for each leaf, the name of the barrier before it; empty for none."""
    units = plan.units
    rows = range(len(plan.group.rows))
    members = tuple(
        MappedBandMember(
            tuple((u.name, plan.tile(k, u)) for u in units),
            True,
            _format_tile_label(plan, k),
        )
        for k in rows
    )
    children: list[Child | Collective] = []
    for number, leaf in enumerate(plan.leaves):
        if barriers[number]:
            children.append(Collective(barriers[number]))
        children += _make_leaf_subtrees(plan, number, leaf)
    body = Band(members, units, Mark(TILE, _in_loops(plan, tuple(children), ())))
    blocks = tuple(
        (BLOCK_IDS[k], count, tuple((u.name, f"({dict(members[k].values)[u.name]}) mod {count}") for u in units))
        for k, count in enumerate(plan.blocks)
    )
    whole: Tree = body
    if plan.options.shared_depth >= 0:
        whole = with_mark(whole, SHARED_DEPTH, plan.options.shared_depth, threads=False)
    if plan.options.private_depth >= 0:
        whole = with_mark(whole, PRIVATE_DEPTH, plan.options.private_depth, threads=True)
    return MappingFilter(blocks, units, Mark("kernel", whole))


def _format_tile_label(plan: KernelPlan, k: int) -> str:
    row = plan.group.rows[k]
    index, shift = row.places[0][1]
    name = index + (f" + {shift}" if shift else "")
    return f"{name} / {plan.sizes[k]}"


@dataclass(frozen=True, slots=True)
class LoopCount:
    """How often a loop runs: `number` times, or with a `variable` once for each `step` elements of its extent."""

    number: int
    variable: str = ""
    step: int = 1

    def format_condition(self, name: str) -> str:
        """The condition of the loop variable `name`, as isl text."""
        if not self.variable:
            return f"0 <= {name} < {self.number}"
        return f"0 <= {name} and {self.step}*{name} < {isl_parameter(self.variable)}"


def _in_loops(plan: KernelPlan, children: tuple[Child | Collective, ...], inner: Sequence[LoopCount]) -> SequenceNode:
    """The sequence of `children`, with the values of the loops around it: tile loops, then the loops `inner`."""
    tiles = (
        LoopCount(n, plan.variables[k] if plan.is_open(k) else "", plan.sizes[k]) for k, n in enumerate(plan.tiles)
    )
    counts = (*tiles, *inner)
    conditions = [count.format_condition(f"c{k}") for k, count in enumerate(counts)]
    conditions += [f"c{k} mod {count} = {BLOCK_IDS[k]}" for k, count in enumerate(plan.blocks)]
    space = f"[{', '.join(f'c{k}' for k in range(len(counts)))}]"
    domain = f"{space} : {' and '.join(conditions)}" if conditions else space
    return SequenceNode(children, domain, tuple(dict.fromkeys(c.variable for c in counts if c.variable)))


def _make_leaf_subtrees(plan: KernelPlan, number: int, leaf: NestPlan) -> list[Child | Collective]:
    if leaf.cooperative:
        return [(leaf.units, _cooperative_tree(plan, number, leaf))]
    if leaf.register_tiled:
        return [(leaf.units, _register_tiled(plan, leaf))]
    parallel, inner = ([a for a in axes if a.tiles > 1] for axes in (leaf.parallel, leaf.inner))
    if not inner:
        points = map_to_threads(plan, leaf.units, leaf, _make_thread_tree(plan, leaf.units, leaf))
        return [(leaf.units, Band(_tile_members(plan, leaf.units, parallel), leaf.units, Mark(SHARED, points)))]
    starts, rest = leaf.part(Phase.INIT), leaf.part(Phase.WHOLE, Phase.UPDATE)
    cleared = map_to_threads(plan, starts, leaf, _make_thread_tree(plan, starts, leaf)) if starts else None
    points = map_to_threads(plan, rest, leaf, _make_thread_tree(plan, rest, leaf))
    return [(leaf.units, _terms_by_tiles(plan, leaf, cleared, points))]


def _terms_by_tiles(plan: KernelPlan, leaf: NestPlan, cleared: Tree | None, points: Tree) -> Tree:
    """Loops over tiles of parallel axes; in each, `cleared` initializes, then loops over other tiles run `points`."""
    starts, rest = leaf.part(Phase.INIT), leaf.part(Phase.WHOLE, Phase.UPDATE)
    parallel, inner = ([a for a in axes if a.tiles > 1] for axes in (leaf.parallel, leaf.inner))
    children: list[Child | Collective] = [(rest, Band(_tile_members(plan, rest, inner), rest, Mark(SHARED, points)))]
    if cleared is not None:
        children.insert(0, (starts, cleared))
    return Band(
        _tile_members(plan, leaf.units, parallel), leaf.units, Mark(ELEMENTS, SequenceNode(tuple(children), ""))
    )


def thread_values(plan: KernelPlan, leaf: NestPlan, unit: Unit) -> tuple[str, str, str]:
    """The (x, y, z) of the thread that runs an instance of `unit`, in isl's notation."""
    by_identifier = {a.identifier: a for a in leaf.axes}
    x, y, z = (_format_thread_index(plan, by_identifier[k], unit) if k in by_identifier else "0" for k in range(3))
    return x, y, z


def map_to_threads(plan: KernelPlan, units: tuple[Unit, ...], leaf: NestPlan, child: Tree) -> Tree:
    """`child` mapped to the threads of the mapped axes; other thread dimensions are restricted to 0."""
    by_identifier = {a.identifier: a for a in leaf.axes}
    values = []
    for k, count in enumerate(plan.launch.block):
        axis = by_identifier.get(k)
        if axis is not None:
            values.append(
                (THREAD_IDS[k], axis.threads, tuple((u.name, _format_thread_index(plan, axis, u)) for u in units))
            )
        elif count > 1:
            values.append((THREAD_IDS[k], 1, tuple((u.name, "0") for u in units)))
    return MappingFilter(tuple(values), units, Mark("thread", child))


def _format_thread_index(plan: KernelPlan, a: MappedDim, unit: Unit) -> str:
    point = plan.point(a, unit)
    if a.vector > 1:
        point = f"floor(({point})/{a.vector})"
    return f"({point}) mod {a.threads}" if a.trips > 1 else point


def _make_point_loops(
    plan: KernelPlan, units: tuple[Unit, ...], axes: Sequence[MappedDim]
) -> tuple[MappedBandMember, ...]:
    """The sequential loops over the points of `axes` that each thread runs."""
    return tuple(m for a in axes for m in (*_make_chunk_loop(plan, units, a), *_make_vector_loop(plan, units, a)))


def _make_chunk_loop(plan: KernelPlan, units: tuple[Unit, ...], a: MappedDim) -> tuple[MappedBandMember, ...]:
    """The loop over chunks of `threads * vector` points, if there are several."""
    if a.trips == 1:
        return ()
    step = a.threads * a.vector
    label = f"{a.dim.name} mod {a.tile} / {step}" if step > 1 else f"{a.dim.name} mod {a.tile}"
    values = tuple((u.name, f"floor(({plan.point(a, u)})/{step})" if step > 1 else plan.point(a, u)) for u in units)
    return (MappedBandMember(values, a.dim.kind is DimKind.PARALLEL, label),)


def _make_vector_loop(plan: KernelPlan, units: tuple[Unit, ...], a: MappedDim) -> tuple[MappedBandMember, ...]:
    """The loop over the consecutive points of one vector, if any."""
    if a.vector == 1:
        return ()
    values = tuple((u.name, f"({plan.point(a, u)}) mod {a.vector}") for u in units)
    return (MappedBandMember(values, a.dim.kind is DimKind.PARALLEL, f"{a.dim.name} mod {a.vector}"),)


def _make_thread_tree(plan: KernelPlan, units: tuple[Unit, ...], leaf: NestPlan) -> Tree:
    """The loops of one thread: over its points; in them the initialization of an element, then the loop over terms."""
    starts = tuple(u for u in units if u.phase is Phase.INIT)
    rest = tuple(u for u in units if u.phase is not Phase.INIT)
    serial = [a for a in leaf.inner if a.dim.kind is DimKind.SERIAL]
    reduced = [a for a in leaf.inner if a.dim.kind is DimKind.REDUCTION]
    children: list[Child | Collective] = [(starts, Empty())] if starts else []
    if rest:
        children.append((rest, Band(_make_point_loops(plan, rest, reduced), rest, _in_order(rest))))
    body = SequenceNode(tuple(children), "")
    if leaf.unrolled:
        return Mark(WRITTEN_OUT, Band(_make_point_loops(plan, units, leaf.parallel), units, body))
    if not leaf.inner:
        return _by_lanes(plan, units, leaf.parallel, body)
    return Band((*_make_point_loops(plan, units, leaf.parallel), *_make_point_loops(plan, units, serial)), units, body)


def _by_lanes(plan: KernelPlan, units: tuple[Unit, ...], axes: Sequence[MappedDim], body: Tree) -> Tree:
    """`body` in loops over the points of `axes`, with vectors innermost and unrolled for vector loads and stores."""
    lanes = tuple(m for a in axes for m in _make_vector_loop(plan, units, a))
    if lanes:
        body = Mark(WRITTEN_OUT, Band(lanes, units, body))
    return Band(tuple(m for a in axes for m in _make_chunk_loop(plan, units, a)), units, body)


def _register_tiled(plan: KernelPlan, leaf: NestPlan) -> Tree:
    """A reduction in which each thread keeps several elements in registers: the loops over elements are innermost.

    The loops over terms take a few at a time, so that operands can be loaded as vectors.
    """
    starts, rest = leaf.part(Phase.INIT), leaf.part(Phase.UPDATE)
    outer, inner = _reduction_loops(plan, rest, leaf.inner)
    updates = Band((*inner, *_make_point_loops(plan, rest, leaf.parallel)), rest, _in_order(rest))
    points = map_to_threads(plan, rest, leaf, Band(outer, rest, Mark(WRITTEN_OUT, updates)))
    cleared = None
    if starts:
        loops = Band(_make_point_loops(plan, starts, leaf.parallel), starts, _in_order(starts))
        cleared = map_to_threads(plan, starts, leaf, Mark(WRITTEN_OUT, loops))
    return _terms_by_tiles(plan, leaf, cleared, points)


def _reduction_loops(
    plan: KernelPlan, units: tuple[Unit, ...], axes: Sequence[MappedDim]
) -> tuple[tuple[MappedBandMember, ...], tuple[MappedBandMember, ...]]:
    """The outer loops over the points of reduced `axes`, and the inner loop over a few neighbors along the last."""
    *rest, last = axes
    if last.tile % GPU_NEIGHBOR_TERMS:
        return _make_point_loops(plan, units, axes), ()
    name, tile = last.dim.name, last.tile
    points = tuple((u.name, plan.point(last, u)) for u in units)
    steps = tuple((u, f"floor(({p})/{GPU_NEIGHBOR_TERMS})") for u, p in points)
    terms = tuple((u, f"({p}) mod {GPU_NEIGHBOR_TERMS}") for u, p in points)
    outer = (
        [MappedBandMember(steps, False, f"{name} mod {tile} / {GPU_NEIGHBOR_TERMS}")]
        if tile > GPU_NEIGHBOR_TERMS
        else []
    )
    return (*_make_point_loops(plan, units, rest), *outer), (
        MappedBandMember(terms, False, f"{name} mod {GPU_NEIGHBOR_TERMS}"),
    )


def _tile_members(plan: KernelPlan, units: tuple[Unit, ...], axes: Sequence[MappedDim]) -> tuple[MappedBandMember, ...]:
    return tuple(
        MappedBandMember(
            tuple((u.name, f"floor(({plan.value(a, u)})/{a.tile})") for u in units),
            a.dim.kind is DimKind.PARALLEL,
            f"{a.dim.name} / {a.tile}",
        )
        for a in axes
    )


def _in_order(units: Sequence[Unit]) -> Tree:
    return SequenceNode(tuple(((u,), Empty()) for u in units), "")


def _cooperative_tree(plan: KernelPlan, number: int, leaf: NestPlan) -> Tree:
    """A cooperative reduction: clear registers, combine terms in each thread, then across threads; one thread stores.

    The enclosing loops are the same for all threads, so that all of them reach the collectives.
    """
    units = leaf.units
    terms, finish = leaf.part(Phase.PARTIAL, Phase.WHOLE), leaf.part(Phase.FINAL)
    tiled = [a for a in leaf.parallel if a.tiles > 1]
    points = _make_point_loops(plan, units, leaf.parallel)
    counts = [LoopCount(a.tiles, a.variable, a.tile) for a in tiled]
    for a in leaf.parallel:
        variable = a.variable if a.tiles == 1 else ""
        counts += [LoopCount(a.trips, variable, a.threads * a.vector)] if a.trips > 1 else []
        counts += [LoopCount(a.vector)] if a.vector > 1 else []
    inner = [a for a in leaf.inner if a.tiles > 1]
    each = Band(_tile_members(plan, terms, inner), terms, _by_lanes(plan, terms, leaf.inner, _in_order(terms)))
    children: tuple[Child | Collective, ...] = (
        Collective(f"clear{number}"),
        (terms, map_to_threads(plan, terms, leaf, each)),
        Collective(f"combine{number}"),
        (finish, map_to_threads(plan, finish, leaf, _in_order(finish))),
    )
    tiles = _tile_members(plan, units, tiled)
    return Band((*tiles, *points), units, _in_loops(plan, children, counts))
