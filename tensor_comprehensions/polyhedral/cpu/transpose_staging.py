"""Transpose operands of a block so that they become contiguous along the other dimension.

If all iterations are independent, that happens in registers (`structured.lower.transpose`); else in a small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from ...core.internal_names import internal_name
from ...loop_ir import build, linear_forms
from ...loop_ir.buffer_view import BufferDim, private_view
from ...loop_ir.nodes import Buffer, Expr, Load, Loop, LoopKind, Space, Stmt, Store, Var
from ...loop_ir.rewrite import map_expr, map_stmt, mentions, walk_expr
from ...machine import CACHE_LINE_BYTES, SHUFFLE_BYTES
from ...structured.lower.transpose import Axis, has_aligned_rows, transpose_loops, with_registers
from ...target import CpuTarget
from ...thresholds import (
    MAX_INTERLEAVED_STRIDE,
    MAX_TRANSPOSE_SIDE,
    STAGE_PREFETCH_LINES,
    STAGE_ROW_BYTES,
    STAGE_ROWS,
    TRANSPOSE_BITS,
)


def transposable_reads(stores: Sequence[Store], row: str, lane: str) -> tuple[Load, ...]:
    """The reads of scalar `stores` that are contiguous along `row` but strided along `lane`; () if none may move.

    They may move before the stores, which write other buffers. The stores must be contiguous along `lane`, or reduce
    over it.
    """
    if any(s.mask is not None or not _is_contiguous_store(s, lane) for s in stores):
        return ()
    written = {s.buffer.name for s in stores}
    found = (e for s in stores for e in _collect_loads(s) if e.buffer.name not in written and e.mask is None)
    return tuple(dict.fromkeys(e for e in found if _is_transposed_read(e, row, lane)))


def transpose_block_side(
    stores: Sequence[Store], reads: Sequence[Load], extents: Sequence[int], target: CpuTarget, *, pointwise: bool = True
) -> int:
    """The side, in elements, of the square blocks in which `reads` are transposed for `stores`."""
    bits = _find_widest_element_bits(stores, reads)
    lanes = target.lanes(bits)
    whole = any(s.nontemporal for s in stores) or (pointwise and _fits_l1_with_line_vectors(stores, reads, target))
    if not (whole or _writes_lines(stores, reads, target)):
        lanes = min(lanes, TRANSPOSE_BITS // bits)
    return max(2, min(lanes, MAX_TRANSPOSE_SIDE, 1 << (min(extents) - 1).bit_length()))


def loads_in_pieces(
    stores: Sequence[Store], reads: Sequence[Load], rows: Axis, lanes: Axis, block: int, target: CpuTarget
) -> bool:
    """Whether blocks of side `block` should load their rows in pieces, so that whole lines pass through L1."""
    is_line = block * _find_widest_element_bits(stores, reads) == 8 * CACHE_LINE_BYTES and _fits_l1_with_line_vectors(
        stores, reads, target
    )
    if not is_line or rows.length is None or lanes.length is None:
        return False
    return rows.length * min(r.type.dtype.size for r in reads) >= SHUFFLE_BYTES


def _fits_l1_with_line_vectors(stores: Sequence[Store], reads: Sequence[Load], target: CpuTarget) -> bool:
    """Whether vectors are as wide as cache lines, and all data fit into L1."""
    return _has_lines(target) and _touched_bytes(stores, reads) <= target.cache[0]


def _find_widest_element_bits(stores: Sequence[Store], reads: Sequence[Load]) -> int:
    return max(8, *(b.type.dtype.bits for b in (*(s.buffer for s in stores), *(r.buffer for r in reads))))


def _has_lines(target: CpuTarget) -> bool:
    """Whether vectors are as wide as cache lines, and more than one can be issued per cycle."""
    return target.vector_bits == 8 * CACHE_LINE_BYTES and target.issue_bits_per_cycle > target.vector_bits


def _touched_bytes(stores: Sequence[Store], reads: Sequence[Load]) -> int:
    """The bytes of the outputs and of the transposed inputs."""
    buffers = {*_written_buffers(stores), *(r.buffer for r in reads)}
    return sum(prod(b.shape) * b.type.dtype.size for b in buffers)


def _written_buffers(stores: Sequence[Store]) -> list[Buffer]:
    return [s.buffer for s in stores if s.buffer.space is not Space.REGISTER]


def _writes_lines(stores: Sequence[Store], reads: Sequence[Load], target: CpuTarget) -> bool:
    """Whether vectors are whole cache lines of the outputs, and the data exceed L1."""
    if not _has_lines(target) or any(s.op is not None for s in stores):
        return False
    whole = all(has_aligned_rows(b.strides, b.type.dtype.size) for b in _written_buffers(stores))
    return whole and _touched_bytes(stores, reads) > target.cache[0]


def prefetch_distance(reads: Sequence[Load], target: CpuTarget) -> int:
    """How many cache lines ahead to prefetch `reads`; 0 if they fit into the caches."""
    largest = max(prod(r.buffer.shape) * r.buffer.type.dtype.size for r in reads)
    return STAGE_PREFETCH_LINES if largest > target.cache[min(1, len(target.cache) - 1)] // 2 else 0


def transpose_staged(
    stores: Sequence[Store],
    initial: Sequence[Stmt],
    reads: Sequence[Load],
    row: Axis,
    lane: Axis,
    side: int,
    factor: tuple[int, int],
) -> Stmt:
    """The loops over `row` and `lane`, in chunks, around `stores`, with `reads` transposed in buffers.

    Like `structured.lower.transpose.transpose_loops`, but the iterations over `lane` may reduce.

    Args:
        initial: statements to run once for each row, before its loop over `lane`.
        side: the side of the square blocks to transpose. factor: the `vector_factors` of the loop over `lane`.
    """
    least = min(r.buffer.type.dtype.size for r in reads)
    shape = (STAGE_ROWS, STAGE_ROW_BYTES // least)
    rows, lanes = map(chunk_of, (row, lane), shape)
    found = staged_loads(reads, rows, lanes, lambda _: shape)
    point = with_registers(stores, build.block(*(with_loads(s, found) for s in stores)))
    inner = Loop(lane.name, lanes.start, lanes.stop, point, LoopKind.VECTOR, vector_factors=factor)
    chunk = build.block(transpose_into(found, rows, lanes, side), Loop(row.name, rows.start, rows.stop, inner))
    chunk = build.allocate([place.buffer for place in found.values()], chunk)
    body: Stmt = Loop(chunk_start(lane), lane.start, lane.stop, chunk, step=shape[1])
    if initial:
        body = build.block(Loop(row.name, rows.start, rows.stop, build.block(*initial)), body)
    return Loop(chunk_start(row), row.start, row.stop, body, step=STAGE_ROWS)


def chunk_start(axis: Axis) -> str:
    """The name of the variable that holds the start of a chunk of `axis`."""
    return internal_name(axis.name, "start")


def chunk_of(axis: Axis, size: int) -> Axis:
    """The chunk of `axis` with up to `size` elements from the variable `chunk_start` on."""
    start = build.var(chunk_start(axis))
    stop = build.add(start, size)
    return Axis(axis.name, start, stop if axis.splits(size) else build.minimum(stop, axis.stop))


def staged_loads(
    reads: Sequence[Load], rows: Axis, lanes: Axis, shape: Callable[[Load], tuple[int, int]]
) -> dict[Load, Load]:
    """For each of `reads`, the load from a new buffer of shape `shape(read)` that replaces it in a chunk."""
    axes = (rows, lanes)
    first = {a.name: a.start for a in axes}
    found = {}
    for k, read in enumerate(reads):
        digits = tuple(BufferDim(a.name, 1, extent) for a, extent in zip(axes, shape(read), strict=True))
        view = private_view(internal_name(read.buffer.name, k), read.buffer.type.dtype, digits, first)
        found[read] = Load(view.buffer, view.indices({name: build.var(name) for name in first}))
    return found


def transpose_into(
    found: Mapping[Load, Load], rows: Axis, lanes: Axis, side: int, *, along_reads: bool = False
) -> Stmt:
    """The loops that copy the reads to their buffers, transposed in registers. found: as from `staged_loads`."""
    return build.block(
        *(
            transpose_loops(
                [Store(place.buffer, place.indices, read)], [read], rows, lanes, side, along_reads=along_reads
            )
            for read, place in found.items()
        )
    )


def with_loads(s: Stmt, values: Mapping[Load, Load]) -> Stmt:
    def on_expr(e: Expr) -> Expr:
        new = values.get(e) if isinstance(e, Load) else None
        return map_expr(e, on_expr) if new is None else new

    return map_stmt(s, on_expr, lambda c: c)


def _is_contiguous_store(s: Store, lane: str) -> bool:
    step = _compute_access_stride(s.buffer, s.indices, lane)
    return s.buffer.space is Space.REGISTER or step == 1 or (step == 0 and s.op is not None)


def _collect_loads(s: Store) -> Iterator[Load]:
    for root in (s.value, *s.indices):
        yield from (e for e in walk_expr(root) if isinstance(e, Load))


def _is_transposed_read(e: Load, row: str, lane: str) -> bool:
    along = _compute_access_stride(e.buffer, e.indices, lane)
    return (
        along is not None
        and abs(along) > MAX_INTERLEAVED_STRIDE
        and _compute_access_stride(e.buffer, e.indices, row) == 1
    )


def _compute_access_stride(buffer: Buffer, indices: tuple[Expr, ...], name: str) -> int | None:
    """The stride of `buffer[indices]` in elements along the variable `name`; None if it varies."""
    total = 0
    for index, stride in zip(indices, buffer.strides, strict=True):
        for atom, c in linear_forms.linear_terms(index)[0].items():
            if isinstance(atom, Var) and atom.name == name:
                total += c * stride
            elif mentions(atom, {name}):
                return None
    return total
