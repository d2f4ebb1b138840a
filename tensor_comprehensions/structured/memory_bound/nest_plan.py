"""Plans for memory-bound ops (reductions, permutations, copies), and the plan of a schedule for one.

Such an op has no register tile to pack panels for. Tile loops determine the order of memory accesses; inside a tile,
the lanes run along one iterator, a few vectors at once. Reads across the lanes are transposed in registers, in square
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...core.errors import CannotLower
from ...target import CpuTarget
from ...thresholds import MAX_INTERLEAVED_STRIDE
from ..analysis.access_strides import access_strides
from ..language import primitives as written
from ..language.apply_primitives import apply_with_notes, state_of_schedule
from ..language.primitives import Primitive, Schedule, vectorize
from ..language.schedule_state import NOWHERE, ScheduleState, StateLoop, start_state
from ..op import StructuredOp, loads_in


@dataclass(frozen=True, slots=True)
class MemoryBoundPlan:
    """The tile loops around a nest, and the code of the nest.

    Attributes:
        tiles: (parallel iterator, points of a tile) of the tile loops, outermost first; other iterators are not tiled.
        vector: the iterator along the lanes.
        lanes: scalars per vector.
        vectors: vectors in flight at once.
        rows: steps of the reduction per iteration if the lanes run along the output; output rows per iteration if they
            run along the reduction.
        transposed: whether reads across the lanes are transposed in registers, in blocks of `lanes` rows and columns.
        staged: whether each transposed tile goes through a buffer, from which it is stored in whole cache lines.
        shared: whether the tile loops are parallel.
        nontemporal: whether non-temporal stores write the output.
    """

    tiles: tuple[tuple[str, int], ...]
    vector: str
    lanes: int
    vectors: int = 1
    rows: int = 1
    transposed: bool = False
    staged: bool = False
    shared: bool = False
    nontemporal: bool = False


def memory_bound_plan(
    pipeline: Schedule, op: StructuredOp, target: CpuTarget, *, parallel: bool = True
) -> MemoryBoundPlan:
    """The plan of a schedule without choices for `op`.

    Raises:
        ArgumentError: the schedule names an iterator or tensor that the op does not have.
        CannotLower: no code can be generated for it; the message says why.
    """
    nest = state_of_schedule(pipeline, op, target, parallel=parallel)
    if nest.vector is None:
        nest = state_of_schedule(pipeline >> vectorize(), op, target, parallel=parallel)
    assert nest.vector is not None
    for piece, given in (("pad", nest.padded), ("peel", nest.peeled)):
        if given:
            raise CannotLower(f"{piece}: remainders of vectors already have code of their own, and there are no panels")
    tiles = tuple(_list_tile_sizes(nest))
    extent = dict(tiles).get(nest.vector, op.extent(nest.vector))
    lanes = min(nest.lanes or target.lanes(max(32, op.dtype.bits)), max(2, 1 << (extent - 1).bit_length()))
    turned, staged = bool(nest.packs), any(loop is not None for _, loop in nest.packs)
    if turned:
        _check_transposed_reads(nest, nest.vector)
    vectors, rows = _unroll_counts(nest, nest.vector, dict(tiles))
    return MemoryBoundPlan(
        tiles, nest.vector, lanes, vectors, rows, turned, staged, _shares_tile_loops(nest, tiles), nest.nontemporal
    )


def explain_memory_bound(pipeline: Schedule, op: StructuredOp, target: CpuTarget, *, parallel: bool = True) -> str:
    """A line on the effect of every primitive on `op`, and one on the nest. Raises as `memory_bound_plan`."""
    found = memory_bound_plan(pipeline, op, target, parallel=parallel)
    nest, lines = apply_with_notes(pipeline, start_state(op, target, may_parallelize=parallel))
    lines.append(f"nest: {found.vectors} vectors of {found.lanes} along {nest.iterator_display_name(found.vector)}")
    return "\n".join(lines)


def memory_bound_schedule(movement: MemoryBoundPlan, op: StructuredOp) -> Schedule:
    """The schedule for which `memory_bound_plan` returns `movement`."""
    nest = start_state(op, NOWHERE)
    pieces: list[Primitive] = []
    whole = ((i.name, i.extent) for i in op.parallel if i.name not in dict(movement.tiles) and i.extent > 1)
    sizes = (*movement.tiles, *whole)
    if sizes:
        pieces.append(written.Tile(tuple((nest.iterator_display_name(name), size) for name, size in sizes)))
    if movement.transposed:
        inside = nest.name(StateLoop(sizes[-1][0], 1, sizes[-1][1])) if movement.staged else None
        pieces.append(written.Pack(tuple((name, inside) for name in transposed_reads(op, movement.vector))))
    if movement.shared:
        pieces.append(written.Parallel(tuple(nest.name(StateLoop(name, 1, size)) for name, size in movement.tiles)))
    pieces.append(written.Vectorize(nest.iterator_display_name(movement.vector), movement.lanes))
    factors = [(movement.vector, movement.vectors)]
    if movement.rows > 1:
        along_sum = not op.iterator(movement.vector).is_parallel
        factors += [(movement.tiles[-1][0] if along_sum else op.reductions[-1].name, movement.rows)]
    if unrolled := tuple((nest.iterator_display_name(name), factor) for name, factor in factors if factor > 1):
        pieces.append(written.Unroll(unrolled))
    if movement.nontemporal:
        pieces.append(written.NontemporalStores())
    return Schedule(tuple(pieces))


def _list_tile_sizes(nest: ScheduleState) -> Iterator[tuple[str, int]]:
    """(iterator, tile size) of the tile loops with several iterations."""
    seen: set[str] = set()
    for loop in nest.loops:
        shown, extent = nest.iterator_display_name(loop.iterator), nest.op.extent(loop.iterator)
        if loop.iterator in seen:
            raise CannotLower(f"tile: {shown} is tiled twice; memory-bound ops have one level of tiles")
        seen.add(loop.iterator)
        if not nest.op.iterator(loop.iterator).is_parallel:
            raise CannotLower(
                f"tile: the sum over {shown} cannot be tiled; long sums into few results are split automatically"
            )
        lanes = loop.iterator == nest.vector and not loop.number
        if not lanes and loop.size < extent:
            yield loop.iterator, loop.size


def _shares_tile_loops(nest: ScheduleState, tiles: tuple[tuple[str, int], ...]) -> bool:
    """Whether the tile loops are parallel. Raises CannotLower if only some of them are."""
    if not nest.shared:
        return False
    named = [loop.iterator for loop in nest.shared if loop.size < nest.op.extent(loop.iterator)]
    if named != [name for name, _ in tiles]:
        names = ", ".join(nest.iterator_display_name(name) for name, _ in tiles)
        raise CannotLower(f"parallel: the threads share all of the loops around the nest, or none of {names}")
    return True


def _unroll_counts(nest: ScheduleState, vector: str, tiles: Mapping[str, int]) -> tuple[int, int]:
    """The fields `vectors` and `rows` of the plan."""
    vectors = rows = 1
    along_sum = not nest.op.iterator(vector).is_parallel
    for name, factor in nest.unrolled:
        if not factor:
            raise CannotLower(f"unroll: say how many steps of {nest.iterator_display_name(name)}")
        whole = tiles.get(name) == factor and nest.op.extent(name) % factor == 0
        if name == vector:
            vectors = factor
        elif whole if along_sum else not nest.op.iterator(name).is_parallel:
            rows = factor
        else:
            raise CannotLower(
                f"unroll: only vectors along {nest.iterator_display_name(vector)}, and rows of a sum that they add to"
            )
    return vectors, rows


def _check_transposed_reads(nest: ScheduleState, vector: str) -> None:
    if nest.op.reductions:
        raise CannotLower("pack: reads can only be transposed if all iterations are independent")
    innermost = nest.loops[-1]
    if any(loop not in (None, innermost) for _, loop in nest.packs):
        raise CannotLower(
            "pack: operands are transposed in registers, block by block, or through a buffer: name the tensor alone, "
            f"or the innermost loop, {nest.name(innermost)}"
        )
    if not transposed_reads(nest.op, vector):
        raise CannotLower(f"pack: no operand lies across lanes along {nest.iterator_display_name(vector)}")


def transposed_reads(op: StructuredOp, vector: str) -> tuple[str, ...]:
    """The tensors with strided reads along `vector` that are contiguous along another iterator."""
    found: dict[str, None] = {}
    for access in loads_in(op.left):
        moved = access_strides(access, [i.name for i in op.iterators]) or {}
        if abs(moved.get(vector, 0)) > MAX_INTERLEAVED_STRIDE and 1 in moved.values():
            found[access.buffer.name] = None
    return tuple(found)
