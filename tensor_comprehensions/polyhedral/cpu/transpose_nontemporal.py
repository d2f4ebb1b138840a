"""Non-temporal transposition: transpose into a buffer in L2, and store that to memory in whole cache lines.

A partly written line would travel to a distant last-level cache and back between writes. Rows of the output may begin
anywhere in a line, so a tile stores the lines that begin in it, and transposes a few lanes of the next tile for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Expr, Let, Load, Loop, LoopKind, Stmt, Store
from ...machine import CACHE_LINE_BYTES
from ...structured.lower.transpose import Axis, has_aligned_rows, with_registers
from ...structured.lower.vector_expr import substitute_vectorized
from ...thresholds import MAX_NONTEMPORAL_STAGE
from .transpose_staging import chunk_of, chunk_start, staged_loads, transpose_into, with_loads


def transpose_nontemporal(
    stores: Sequence[Store],
    reads: Sequence[Load],
    row: Axis,
    lane: Axis,
    whole: tuple[int, int],
    factor: tuple[int, int],
    before: int = 0,
) -> Stmt:
    """The loops over `row` and `lane` around pointwise non-temporal `stores`, with `reads` transposed in buffers.

    Args:
        whole: the range of which `lane` is a part. A line that begins in one part and ends in the next is stored by the
            loops of the first part.
        factor: the side of the square blocks to transpose, which is the lanes of stored vectors; and vectors at once.
        before: for a shorter last part, the lanes of each earlier part.
    """
    if parts := _split_long_axis(row):
        return build.block(*(transpose_nontemporal(stores, reads, part, lane, whole, factor, before) for part in parts))
    if parts := _split_long_axis(lane):
        whole_chunks, rest = parts
        chunks = transpose_nontemporal(stores, reads, row, whole_chunks, whole, factor, before)
        return build.block(
            chunks, transpose_nontemporal(stores, reads, row, rest, whole, factor, MAX_NONTEMPORAL_STAGE)
        )
    rows, lanes = (chunk_of(a, min(MAX_NONTEMPORAL_STAGE, a.length or MAX_NONTEMPORAL_STAGE)) for a in (row, lane))
    assert rows.length is not None
    assert lanes.length is not None
    store = next(s for s in stores if s.nontemporal)
    line = CACHE_LINE_BYTES // store.buffer.type.dtype.size

    def is_apart(length: int) -> bool:
        return length >= line and not _is_aligned(store.buffer, whole[0], length)

    apart = is_apart(lanes.length)
    at_once = factor if apart else (factor[0], max(1, min(factor[1], lanes.length // factor[0])))
    shape = (rows.length, lanes.length + line * apart)
    found = staged_loads(reads, rows, lanes, lambda read: (shape[0], _compute_row_pitch(read.buffer, shape[1])))
    point = with_registers(stores, build.block(*(with_loads(s, found) for s in stores)))

    def loop_lanes(start: Expr, stop: Expr) -> Stmt:
        return Loop(lane.name, start, stop, point, LoopKind.VECTOR, vector_factors=at_once)

    copies = [transpose_into(found, rows, lanes, factor[0], along_reads=True)]
    inner = loop_lanes(lanes.start, lanes.stop)
    if apart:
        first = build.minimum(lanes.stop, whole[1] - line)
        more = replace(lanes, start=first, stop=build.add(first, line))
        beyond = transpose_into(found, rows, more, factor[0], along_reads=True)
        copies.append(build.when(build.lt(lanes.stop, whole[1]), beyond))
    if apart or is_apart(before):  # the previous part has stored the rest of its last line
        inner = _by_lines(store, line, lanes, whole, loop_lanes)
    body = build.block(*copies, Loop(row.name, rows.start, rows.stop, inner))
    body = build.allocate([place.buffer for place in found.values()], body)
    body = Loop(chunk_start(lane), lane.start, lane.stop, body, step=lanes.length)
    return Loop(chunk_start(row), row.start, row.stop, body, step=rows.length)


def _split_long_axis(axis: Axis) -> tuple[Axis, ...]:
    """The whole chunks of a long axis, and the remainder; () if the axis needs no split."""
    length = axis.length
    return (
        ()
        if length is None or length < MAX_NONTEMPORAL_STAGE or axis.splits(MAX_NONTEMPORAL_STAGE)
        else axis.cut(MAX_NONTEMPORAL_STAGE)
    )


def _is_aligned(buffer: Buffer, first: int, lanes: int) -> bool:
    """Whether all rows of a part of `lanes` lanes start at a cache line, assuming that the buffer does."""
    size = buffer.type.dtype.size
    return (
        has_aligned_rows(buffer.strides, size)
        and first * size % CACHE_LINE_BYTES == lanes * size % CACHE_LINE_BYTES == 0
    )


def _compute_row_pitch(buffer: Buffer, lanes: int) -> int:
    """The pitch of rows with `lanes` elements: an odd number of lines, which spreads rows over all cache sets."""
    line = CACHE_LINE_BYTES // buffer.type.dtype.size
    return (-(-lanes // line) | 1) * line


def _by_lines(store: Store, line: int, lane: Axis, whole: tuple[int, int], along: Callable[[Expr, Expr], Stmt]) -> Stmt:
    """`along` for the lines of `store` that begin in `lane`; at the start of the range, also for the partial line."""
    lines = build.var(internal_name(lane.name, "lines"))
    before = build.when(build.le(lane.start, whole[0]), along(lane.start, lines))
    stop = build.minimum(_line_at(store, line, lane, lane.stop), whole[1])
    first = build.minimum(_line_at(store, line, lane, lane.start), lane.stop)
    return Let(lines.name, first, build.block(before, along(lines, stop)))


def _line_at(store: Store, line: int, lane: Axis, at: Expr) -> Expr:
    """The first lane from `at` on where `store` starts a cache line, assuming that its buffer does."""
    indices = [substitute_vectorized(i, {lane.name: at}) for i in store.indices]
    place: Expr = build.const(0)
    for index, stride in zip(indices, store.buffer.strides, strict=True):
        place = build.add(place, build.mul(index, stride))
    return build.add(at, build.mod(build.sub(line, build.mod(place, line)), line))
