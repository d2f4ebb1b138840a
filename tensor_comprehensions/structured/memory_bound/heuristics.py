"""Schedule heuristics for memory-bound ops: reductions along rows and columns, permutations, copies.

Each is a function of an op and a target that returns a schedule, with alternatives for a search, or raises CannotLower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from math import prod
from operator import or_

from ...core.errors import CannotLower
from ...layouts import AccessStride as Step
from ...target import CpuTarget
from ...thresholds import ENOUGH_MEMORY_BOUND_ITERATIONS, REDUCTION_ACCUMULATORS, TRANSPOSE_BLOCKS, TRANSPOSE_STAGE
from ..analysis.access_strides import access_strides
from ..language.primitives import Schedule, nontemporal_stores, pack, parallel, tile, unroll, vectorize
from ..language.schedule_state import start_state
from ..op import Iterator as Dimension
from ..op import StructuredOp, loads_in
from .nest_plan import transposed_reads


def schedule_memory_bound(op: StructuredOp, target: CpuTarget) -> Schedule:
    """The schedule of the first heuristic that applies to `op`. Raises CannotLower if none does."""
    for expert in (schedule_transposition, schedule_row_reduction, schedule_column_reduction, schedule_copy):
        try:
            return expert(op, target)
        except CannotLower:
            continue
    raise CannotLower(f"{op.name}: no iterator has lanes")


def schedule_row_reduction(op: StructuredOp, target: CpuTarget) -> Schedule:
    """Vectorize along the reduction, with several vectors of partial sums that a tree reduction adds at the end."""
    inner = [i for i in op.reductions if _access_steps_along(op, i.name) == {Step.CONTIGUOUS} and i.extent > 1]
    if not inner:
        raise CannotLower("row_reduction: no operand is contiguous along a sum")
    lanes = _choose_lane_count(op, target, inner[0].extent)
    shown = start_state(op, target).iterator_display_name
    outer = [i for i in op.parallel if i.extent > 1]
    found = parallel(*(shown(i.name) for i in outer)) if outer else Schedule()
    ways = (n for n in REDUCTION_ACCUMULATORS if n * lanes <= max(lanes, inner[0].extent))
    return (
        found
        >> vectorize(shown(inner[0].name), lanes=lanes)
        >> reduce(or_, (_make_lane_unroll(op, inner[0], n) for n in ways))
    )


def schedule_column_reduction(op: StructuredOp, target: CpuTarget) -> Schedule:
    """Vectorize along the output, whose elements stay in registers while rows of the input are added."""
    if not op.reductions:
        raise CannotLower("column_reduction: nothing is summed")
    lane = _contiguous_iterator(op)
    lanes = _choose_lane_count(op, target, lane.extent)
    vectors = [n for n in (8, 16, 4, 2) if n * lanes <= lane.extent] or [1]
    return reduce(or_, (_make_chunk_schedule(op, target, lane, lanes, n) for n in vectors))


def schedule_transposition(op: StructuredOp, target: CpuTarget) -> Schedule:
    """Transpose square blocks in registers, in tiles with long contiguous runs of both the input and the output."""
    if op.reductions:
        raise CannotLower("transposition: the iterations of a sum depend on each other")
    lane = _contiguous_iterator(op)
    names = transposed_reads(op, lane.name)
    if not names:
        name = start_state(op, target).iterator_display_name(lane.name)
        raise CannotLower(f"transposition: no operand lies across lanes along {name}")
    row = next(i for i in op.parallel if _get_strides(op, names[0]).get(i.name) == 1)
    shown = start_state(op, target).iterator_display_name
    touched, widest = _touched_bytes(op), target.lanes(op.dtype.bits)
    large = touched >= target.reuse_limit_bytes
    sides = [n for n in ((widest, widest // 2) if large else (widest // 2, widest)) if n > 1]  # whole lines to memory
    options = []
    for rows, columns in TRANSPOSE_BLOCKS:
        sizes = {lane.name: min(columns, lane.extent), row.name: min(rows, row.extent)}
        others = {i.name: 1 for i in op.parallel if i.name not in sizes}
        nest = _tile_and_share(op, target, {**others, **sizes})  # innermost along the input
        for side in sides:
            options.append(nest >> pack(*names) >> vectorize(shown(lane.name), lanes=min(side, 16)))
    found = reduce(or_, dict.fromkeys(options))
    found = found >> (nontemporal_stores() | Schedule()) if large else found
    if touched <= target.writeback_limit_bytes:
        return found
    sizes = {lane.name: min(TRANSPOSE_STAGE[1], lane.extent), row.name: min(TRANSPOSE_STAGE[0], row.extent)}
    nest = _tile_and_share(op, target, {**{i.name: 1 for i in op.parallel if i.name not in sizes}, **sizes})
    innermost = shown(next((n for n in reversed(sizes) if sizes[n] == op.extent(n)), row.name))
    through = nest >> pack(**dict.fromkeys(names, innermost)) >> vectorize(shown(lane.name), lanes=min(widest, 16))
    return through >> _make_lane_unroll(op, lane, 2) >> nontemporal_stores() | found


def schedule_copy(op: StructuredOp, target: CpuTarget) -> Schedule:
    """Vectorize along the contiguous dimension."""
    if op.reductions:
        raise CannotLower("copy: the op has a sum")
    lane = _contiguous_iterator(op)
    lanes = _choose_lane_count(op, target, lane.extent)
    found = reduce(or_, (_make_chunk_schedule(op, target, lane, lanes, n) for n in (2, 4, 1, 8)))
    return found >> (Schedule() | nontemporal_stores()) if _touched_bytes(op) >= target.reuse_limit_bytes else found


def _make_lane_unroll(op: StructuredOp, lane: Dimension, count: int) -> Schedule:
    return unroll(**{op.display_name(lane.name): count})


def _make_chunk_schedule(op: StructuredOp, target: CpuTarget, lane: Dimension, lanes: int, vectors: int) -> Schedule:
    """A schedule with the output in chunks of a multiple of `vectors` vectors, which the threads share."""
    others = prod(i.extent for i in op.parallel if i is not lane)
    chunk = max(
        vectors * lanes,
        lane.extent
        if others >= ENOUGH_MEMORY_BOUND_ITERATIONS
        else lane.extent * others // ENOUGH_MEMORY_BOUND_ITERATIONS // lanes * lanes,
    )
    sizes = {i.name: 1 for i in op.parallel} | {lane.name: min(chunk, lane.extent)}
    return (
        _tile_and_share(op, target, sizes)
        >> vectorize(op.display_name(lane.name), lanes=lanes)
        >> _make_lane_unroll(op, lane, vectors)
    )


def _tile_and_share(op: StructuredOp, target: CpuTarget, sizes: Mapping[str, int]) -> Schedule:
    """Loops over tiles of `sizes`; those of more than one iteration are outside, and parallel."""
    nest = start_state(op, target)
    cut = [name for name, size in sizes.items() if size < op.extent(name)]
    ordered = [*cut, *(name for name in sizes if name not in cut)]
    found = tile(**{nest.iterator_display_name(name): sizes[name] for name in ordered})
    return found >> parallel(*(nest.iterator_display_name(name) for name in cut)) if cut else found


def _choose_lane_count(op: StructuredOp, target: CpuTarget, extent: int) -> int:
    return min(target.lanes(max(32, op.dtype.bits)), max(2, 1 << (extent - 1).bit_length()))


def _contiguous_iterator(op: StructuredOp) -> Dimension:
    """The longest iterator along which the output is contiguous. Raises CannotLower."""
    written = access_strides(op.output, [i.name for i in op.iterators]) or {}
    found = [i for i in op.parallel if Step.of(written.get(i.name, 0)) is Step.CONTIGUOUS and i.extent > 1]
    if not found:
        raise CannotLower(f"{op.name}: the output is contiguous along none of the iterators")
    return max(found, key=lambda i: i.extent)


def _access_steps_along(op: StructuredOp, name: str) -> set[Step]:
    """The kinds of strides that reads have along an iterator they depend on."""
    found = {Step.of(moved.get(name, 0)) for moved in _list_read_strides(op)}
    return found - {Step.BROADCAST}


def _list_read_strides(op: StructuredOp) -> Iterator[Mapping[str, int]]:
    for access in loads_in(op.left):
        yield access_strides(access, [i.name for i in op.iterators]) or {}


def _get_strides(op: StructuredOp, tensor: str) -> Mapping[str, int]:
    access = next(a for a in loads_in(op.left) if a.buffer.name == tensor)
    return access_strides(access, [i.name for i in op.iterators]) or {}


def _touched_bytes(op: StructuredOp) -> int:
    """Bytes of all tensors that the op reads and writes."""
    buffers = {a.buffer.name: a.buffer for a in (op.output, *loads_in(op.left))}.values()
    return sum(prod(b.shape) * b.type.dtype.size for b in buffers)
