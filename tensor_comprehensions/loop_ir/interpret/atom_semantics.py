"""Atoms in the interpreter: gather matrices from the lanes by the atom's layouts, multiply or move them, scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, FLOAT16, DType
from ...core.errors import InternalError
from ..atoms import MATMUL, ROW_BYTES, TFLOAT32, WARP, Atom, AtomOperand, group_lanes
from ..nodes import Buffer, Space
from ..swizzled_buffer import contiguous_elements
from .memory import CheckedMemory
from .ops import Value

Array = np.ndarray[Any, Any]
View = tuple[CheckedMemory, tuple[Value, ...]]
"""A memory and the indices of the first element."""
Lanes = Sequence[Sequence[View]]
ReadRow = Callable[[int], Array]
"""Reads the row of shared memory that a lane points at, as 16-bit numbers."""
WriteRow = Callable[[int, Array], None]
"""Writes the row of shared memory that a lane points at."""
Meaning = Callable[[Lanes, ReadRow, WriteRow], None]


@dataclass(frozen=True, slots=True)
class Fragment:
    """An operand with its layout as an array: `places[thread, value]` is a column-major offset in the matrix."""

    operand: AtomOperand
    places: Array
    span: Array

    def gather(self, views: Sequence[View], raw: type | None = None) -> Array:
        """The matrix that the threads hold, in float64 or int64; with `raw`, the register bits as that type."""
        registers = np.stack([m.read((*where[:-1], where[-1] + self.span), None, ()) for m, where in views])
        values = registers.view(raw) if raw is not None else decode(registers, self.operand.dtype)
        matrix = np.zeros(self.operand.rows * self.operand.columns, values.dtype)
        matrix[self.places] = values
        return matrix.reshape((self.operand.rows, self.operand.columns), order="F")

    def scatter(self, views: Sequence[View], matrix: Array) -> None:
        """Write to each thread's registers its elements of `matrix`."""
        values = matrix.reshape(-1, order="F")[self.places]
        bits = np.ascontiguousarray(encode(values, self.operand.dtype))
        for (memory, where), row in zip(views, bits, strict=True):
            memory.write((*where[:-1], where[-1] + self.span), row.view(memory.data.dtype), None, ())


@cache
def fragment_of(operand: AtomOperand) -> Fragment:
    """The `Fragment` of `operand`."""
    assert operand.layout is not None
    threads, values = (range(mode.size) for mode in operand.layout.modes)
    places = np.array([[operand.layout(t, v) for v in values] for t in threads])
    return Fragment(operand, places, np.arange(operand.registers))


def atom_meaning(atom: Atom) -> Meaning:
    """A function that executes `atom` on the lanes of a warp."""
    fragments = [fragment_of(o) for o in atom.operands]
    meaning = _make_multiply_meaning(atom, fragments) if atom.kind == MATMUL else _make_move_meaning(atom, fragments)

    def run(lanes: Lanes, read_row: ReadRow, write_row: WriteRow) -> None:
        if len(lanes) < WARP:
            raise InternalError(f"{atom.name} in a warp of {len(lanes)} threads")
        meaning(lanes, read_row, write_row)

    return run


def _make_move_meaning(atom: Atom, fragments: Sequence[Fragment]) -> Meaning:
    to, source = fragments

    def run(lanes: Lanes, read_row: ReadRow, write_row: WriteRow) -> None:
        if source.operand.space is Space.SHARED:
            matrix = np.stack([read_row(lane) for lane in range(source.operand.rows)])
        else:
            matrix = source.gather([v[1] for v in lanes], np.uint16)
        if to.operand.space is Space.SHARED:
            for lane in range(to.operand.rows):
                write_row(lane, matrix[lane])
        else:
            to.scatter([v[0] for v in lanes], matrix)

    return run


def _make_multiply_meaning(atom: Atom, fragments: Sequence[Fragment]) -> Meaning:
    """`sum += A * B.T`, accumulated in float64 or int64 in the order of k and rounded once at the end."""
    groups = list(group_lanes(atom))

    def run(lanes: Lanes, read_row: ReadRow, write_row: WriteRow) -> None:
        for group in groups:
            views = [[lanes[lane][n] for lane in group] for n in range(3)]
            total, left, right = (f.gather(v) for f, v in zip(fragments, views, strict=True))
            with np.errstate(all="ignore"):
                for k in range(left.shape[1]):
                    total = total + left[:, k, np.newaxis] * right[:, k]
            fragments[0].scatter(views[0], total)

    return run


def decode(registers: Array, dtype: DType) -> Array:
    """The values in registers of `dtype`, as float64 or int64."""
    bits = np.ascontiguousarray(registers)
    if dtype == BFLOAT16:
        wide: Array = bits.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32).astype(np.float64)
    if dtype == TFLOAT32:
        kept: Array = bits.view(np.uint32) & np.uint32(0xFFFFE000)
        return kept.view(np.float32).astype(np.float64)
    found = bits.view(np.dtype(dtype.name))
    return found.astype(np.float64 if dtype.is_float else np.int64)


def encode(values: Array, dtype: DType) -> Array:
    """Values converted to `dtype` for registers: floats are rounded, integers wrap."""
    with np.errstate(all="ignore"):
        return values.astype(np.float16 if dtype == FLOAT16 else np.dtype(dtype.name), copy=False)


# --- rows of shared memory ---------------------------------------------------------------------------------------


def read_row(memory: CheckedMemory, where: tuple[Value, ...], races: Any) -> Array:
    """The 16 bytes from `memory[where]` on, as 16-bit numbers."""
    b = memory.buffer
    count = ROW_BYTES // b.type.dtype.size
    require_aligned(b, where, ROW_BYTES)
    return view_as_uint16(
        np.asarray(memory.read((*where[:-1], where[-1] + np.arange(count)), None, races)), b.type.dtype
    )


def write_row(memory: CheckedMemory, where: tuple[Value, ...], row: Array, races: Any) -> None:
    """Write a row of 16-bit numbers to the 16 bytes from `memory[where]` on."""
    b = memory.buffer
    require_aligned(b, where, ROW_BYTES)
    bits = np.ascontiguousarray(row)
    if b.type.dtype == BFLOAT16:
        values: Array = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = bits.view(memory.data.dtype)
    memory.write((*where[:-1], where[-1] + np.arange(ROW_BYTES // b.type.dtype.size)), values, None, races)


def view_as_uint16(values: Array, dtype: DType) -> Array:
    """The elements of a buffer as 16-bit numbers; bfloat16 is held in float32."""
    if dtype == BFLOAT16:
        wide: Array = np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)
        return wide.astype(np.uint16)
    return np.ascontiguousarray(values).view(np.uint16)


def require_aligned(b: Buffer, where: tuple[Value, ...], size: int) -> None:
    """Fail unless the element starts an aligned, contiguous group of `size` bytes."""
    count = size // b.type.dtype.size
    offset = sum(int(i) * s for i, s in zip(where, b.strides, strict=True))
    together = contiguous_elements(b)
    if offset % count or (together is not None and together < count):
        place = ", ".join(str(int(i)) for i in where)
        raise InternalError(f"misaligned: {b.name}[{place}] is no start of {size} bytes that lie together")
