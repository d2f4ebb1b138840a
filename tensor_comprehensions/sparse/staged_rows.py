"""Rows of a sparse result that threads write in one pass, although the place of a row depends on the rows before it.

Rows are written in rounds, a part by each thread. The first part of a round is written to its place. The others are
written to a staging buffer, and all threads copy them when the lengths of the parts are known. The buffer stays in the
cache, so that a copy costs little, and no pass that only counts elements is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from ..core.dtypes import INT64
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Loop, LoopKind, Space, Stmt, Store, Type
from ..machine import CACHE_LINE_BYTES
from ..thresholds import STAGED_PART_CHUNKS, STAGED_ROUND_CHUNKS
from .chunks import CHUNK, CHUNKS, WORK, Chunks
from .operand_buffers import Assembled

PART, PARTS, ROUND, ROUNDS, ROW = (internal_name(x) for x in ("part", "parts", "round", "rounds", "row"))
DONE, FIRST, ORIGIN, ROOM = (internal_name(x) for x in ("done", "first_part", "origin", "room"))
BEFORE, SOURCE, PLACE, LENGTH, HEAD, AT = (
    internal_name(x) for x in ("before", "source", "place", "length", "head", "at")
)
_DONE, _ROOM = build.register(internal_name("written"), INT64), build.register(internal_name("most"), INT64)
"""The elements that earlier rounds have written, and the most elements that a round stages."""
_END = Buffer(internal_name("end"), Type(INT64), (1,), (1,), Space.SCRATCH)
"""The position after the first part of a round."""


@dataclass(frozen=True, slots=True)
class StagedRows:
    """Emits the rounds in which threads write the rows of a result in CSR.

    Attributes:
        result: the arrays of the result.
        positions: the row starts of the operands that together store at least as many elements.
        count: the register with the position after the last appended element.
        registers: those that the loops over rows need.
        names: makes the names of variables.
        threads: the number of parts of a round.
        chunk_size: the number of stored positions plus rows of a chunk.
        vector_bits: the bits of a vector of the target.
    """

    result: Assembled
    positions: Sequence[Buffer]
    count: Buffer
    registers: tuple[Buffer, ...]
    names: Names
    threads: int
    chunk_size: int
    vector_bits: int

    @property
    def staging(self) -> Assembled:
        """The arrays to which loops append that do not know the place of their rows: staging buffers."""
        crd, values = (
            replace(b, name=f"{b.name}.staged", space=Space.SCRATCH) for b in self._list_appended(self.result)
        )
        return replace(self.result, crd=(*self.result.crd[:-1], crd), values=values)

    def emit(self, placed: Stmt, staged: Stmt, store_total: Callable[[Expr], Stmt]) -> Stmt:
        """All rounds.

        Args:
            placed, staged: the loops over all rows, which append to `result` or to `staging`, and store the end of each
                row to its row starts.
            store_total: emits the store of the number of elements.
        """
        loop = _find_loop(placed)
        chunks = Chunks(loop, self._work_before, build.var(WORK), build.var(CHUNKS), self.names)
        first = build.block(
            Store(_DONE, (), build.const(0)), Store(self._row_starts, (build.const(0),), self._index(0))
        )
        every = Loop(ROUND, build.const(0), build.var(ROUNDS), self._round(chunks, placed, staged))
        body: Stmt = build.block(first, every, store_total(Load(_DONE, ())))
        for buffer in self._list_appended(self.staging):
            body = Allocate((buffer,), body, (build.var(ROOM),))
        body = build.block(*self._measure_rounds(chunks), Let(ROOM, Load(_ROOM, ()), body))
        body = Allocate((_DONE, _ROOM, _END, self._chunk_lengths, self._chunk_places), body)
        work, size = build.var(WORK), self.chunk_size
        is_small = build.lt(work, 2 * size)  # then one thread writes all rows to their places
        return _bind_values(
            {
                WORK: build.sub(self._work_before(loop.stop), self._work_before(loop.start)),
                ROUNDS: build.add(build.div(work, self._round_chunks * size), 1),
                CHUNKS: build.mul(build.var(ROUNDS), self._round_chunks),
                PARTS: build.select(is_small, build.const(1), build.const(self.threads)),
                FIRST: build.select(is_small, build.const(self._round_chunks), build.const(self._part_chunks)),
            },
            body,
        )

    # --- chunks of rows ------------------------------------------------------------------------------------------

    @property
    def _part_chunks(self) -> int:
        return max(1, min(STAGED_PART_CHUNKS, STAGED_ROUND_CHUNKS // self.threads))

    @property
    def _round_chunks(self) -> int:
        return self.threads * self._part_chunks

    @property
    def _chunk_lengths(self) -> Buffer:
        """The number of elements of each staged chunk of a round."""
        return self._chunk_array("lengths")

    @property
    def _chunk_places(self) -> Buffer:
        """The position in the result of the first element of each staged chunk of a round."""
        return self._chunk_array("places")

    def _chunk_array(self, what: str) -> Buffer:
        return Buffer(internal_name(what), Type(INT64), (self._round_chunks,), (1,), Space.SCRATCH)

    def _work_before(self, row: Expr) -> Expr:
        return build.add(self._stored_before(row), row)

    def _stored_before(self, row: Expr) -> Expr:
        """The number of elements of all operands before a row."""
        return reduce(build.add, (build.cast(build.load(pos, row), INT64) for pos in self.positions))

    def _chunk(self, number: Expr | int) -> Expr:
        """The number among all chunks of one of this round."""
        return build.add(build.mul(build.var(ROUND), self._round_chunks), number)

    def _measure_rounds(self, chunks: Chunks) -> Iterator[Stmt]:
        """Find the most elements that a round may stage."""

        def combine(first: Expr, last: Expr) -> Stmt:
            return Store(_ROOM, (), build.sub(self._stored_before(last), self._stored_before(first)), "max")

        begin, end = self._chunk(build.var(FIRST)), self._chunk(self._round_chunks)
        one = chunks.bind_start(begin, lambda first: chunks.bind_start(end, lambda last: combine(first, last)))
        yield Store(_ROOM, (), build.const(1))
        yield Loop(ROUND, build.const(0), build.var(ROUNDS), one)

    # --- a round -------------------------------------------------------------------------------------------------

    def _round(self, chunks: Chunks, placed: Stmt, staged: Stmt) -> Stmt:
        """The parts of a round, each by a thread, and the copies of the staged ones, by all threads."""
        chunk, first, last = build.var(CHUNK), build.var(FIRST), build.const(self._round_chunks)
        part = If(build.eq(build.var(PART), 0), self._place_part(chunks, placed), self._stage_part(chunks, staged))
        parts = Loop(PART, build.const(0), build.var(PARTS), part, LoopKind.PARALLEL)
        place = Store(self._chunk_places, (chunk,), Load(_DONE, ()))
        length = Store(_DONE, (), build.load(self._chunk_lengths, chunk), "+")
        places = Loop(CHUNK, first, last, build.block(place, length))
        copied = chunks.bind_range(self._chunk(chunk), self._copy_chunk)
        copies = Loop(CHUNK, first, last, copied, LoopKind.PARALLEL)
        steps = build.block(parts, Store(_DONE, (), build.load(_END, 0)), places, copies)
        whole = chunks.bind_start(self._chunk(first), lambda row: Let(ORIGIN, self._stored_before(row), steps))
        return Let(DONE, Load(_DONE, ()), whole)

    def _place_part(self, chunks: Chunks, placed: Stmt) -> Stmt:
        """Write the rows of the first part to their places."""
        start, end = Store(self.count, (), build.var(DONE)), Store(_END, (build.const(0),), Load(self.count, ()))
        rows = chunks.bind_start(
            self._chunk(0),
            lambda first: chunks.bind_start(
                self._chunk(build.var(FIRST)), lambda last: _with_range(placed, first, last)
            ),
        )
        return Allocate(self.registers, build.block(start, rows, end))

    def _stage_part(self, chunks: Chunks, staged: Stmt) -> Stmt:
        """Write the rows of another part to the staging buffer, and note the length of each chunk."""
        chunk, before = build.var(CHUNK), build.var(BEFORE)
        begin = build.mul(build.var(PART), self._part_chunks)

        def stage(first: Expr, last: Expr) -> Stmt:
            length = Store(self._chunk_lengths, (chunk,), build.sub(Load(self.count, ()), before))
            rows = build.block(Store(self.count, (), before), _with_range(staged, first, last), length)
            return Let(BEFORE, self._staged_before(first), rows)

        every = chunks.bind_range(self._chunk(chunk), stage)
        return Allocate(self.registers, Loop(CHUNK, begin, build.add(begin, self._part_chunks), every))

    def _staged_before(self, row: Expr) -> Expr:
        """Where a chunk with this first row starts in the staging buffer: it has room for all elements before it."""
        return build.sub(self._stored_before(row), build.var(ORIGIN))

    def _copy_chunk(self, first: Expr, last: Expr) -> Stmt:
        """Copy the rows of a chunk to their places."""
        chunk, at, after = build.var(CHUNK), build.var(AT), build.add(build.var(ROW), 1)
        source, place, head = build.var(SOURCE), build.var(PLACE), build.var(HEAD)
        loops: list[Stmt] = []
        for to, buffer in zip(self._list_appended(self.result), self._list_appended(self.staging), strict=True):
            store = build.store(to, (build.add(place, at),), build.load(buffer, build.add(source, at)))
            loops.append(Loop(AT, build.const(0), head, store))
            loops.append(self._in_vectors(Loop(AT, head, build.var(LENGTH), replace(store, nontemporal=True))))
        end = build.add(build.cast(build.load(self._row_starts, after), INT64), build.sub(place, source))
        moved = Store(self._row_starts, (after,), self._index(end))
        line = CACHE_LINE_BYTES // min(b.type.dtype.size for b in self._list_appended(self.result))
        before_line = build.mod(build.sub(build.const(0), place), line)
        return _bind_values(
            {
                SOURCE: self._staged_before(first),
                PLACE: build.load(self._chunk_places, chunk),
                LENGTH: build.load(self._chunk_lengths, chunk),
                HEAD: build.minimum(before_line, build.var(LENGTH)),  # whole lines bypass the caches
            },
            build.block(*loops, self._in_vectors(Loop(ROW, first, last, moved))),
        )

    # --- arrays --------------------------------------------------------------------------------------------------

    @property
    def _row_starts(self) -> Buffer:
        """The row starts of the result. Until a chunk is copied, they are positions in the staging buffer."""
        pos = self.result.pos[-1]
        assert pos is not None
        return pos

    @staticmethod
    def _list_appended(arrays: Assembled) -> tuple[Buffer, Buffer]:
        """The arrays that grow by each element: coordinates and values."""
        crd = arrays.crd[-1]
        assert crd is not None
        return crd, arrays.values

    def _index(self, e: Expr | int) -> Expr:
        return build.cast(build.const(e) if isinstance(e, int) else e, self.result.index)

    def _in_vectors(self, loop: Loop) -> Stmt:
        lanes = max(1, self.vector_bits // 8 // self.result.values.type.dtype.size)
        return replace(loop, kind=LoopKind.VECTOR, vector_factors=(lanes, 2))


def _find_loop(body: Stmt) -> Loop:
    """The loop over all rows."""
    while isinstance(body, Let):
        body = body.body
    assert isinstance(body, Loop)
    return body


def _with_range(body: Stmt, first: Expr, last: Expr) -> Stmt:
    """The loop over all rows with another range."""
    if isinstance(body, Let):
        return replace(body, body=_with_range(body.body, first, last))
    assert isinstance(body, Loop)
    return replace(body, start=first, stop=last)


def _bind_values(values: Mapping[str, Expr], body: Stmt) -> Stmt:
    """`body` with names for values, each of which may use the ones before it."""
    for name, value in reversed(list(values.items())):
        body = Let(name, value, body)
    return body
