"""Workspaces for a row of a sparse result whose elements are combined in any order, and then appended in order.

("Tensor algebra compilation with workspaces", CGO 2019.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from ..core.dtypes import INT64, UINT8, DType
from ..core.internal_names import internal_name
from ..loop_ir import build
from ..loop_ir.instructions import BIT_AND, TRAILING_ZEROS
from ..loop_ir.names import Names
from ..loop_ir.nodes import (
    BITS,
    Allocate,
    Buffer,
    Const,
    Expr,
    If,
    Let,
    Load,
    Loop,
    LoopKind,
    ReduceLanes,
    Space,
    Stmt,
    Store,
    While,
)

LINE = 64
"""Flags of a row that one group flag summarizes, and group flags that are tested together."""
MAX_MARK = 255
"""Rows that are counted before the flags are cleared: each row marks its coordinates with a different number."""
AppendElement = Callable[[Expr, Expr], Stmt]
"""Emits the code that appends an element, given its coordinate and its value."""


@dataclass(frozen=True, slots=True)
class Row:
    """The row that a workspace holds.

    Attributes:
        tensor: the name of the result.
        dtype: the type in which elements are combined.
        neutral: the identity of the reduction.
        reduction: the operator that combines an element with a value; None stores the value.
        extent: the number of coordinates.
        vector_bits: the bits of a vector of the target.
        names: makes the names of variables.
        counts: whether the elements of the row are only counted.
    """

    tensor: str
    dtype: DType
    neutral: Const
    reduction: str | None
    extent: Expr
    vector_bits: int
    names: Names
    counts: bool

    @property
    def identity(self) -> Expr:
        """The value of an element that is combined with nothing."""
        return build.cast(self.neutral, self.dtype)

    def buffer(self, what: str, dtype: DType) -> Buffer:
        """An array of the workspace."""
        return build.dynamic_buffer(f"{self.tensor}.{what}", dtype, space=Space.SCRATCH)

    def fill(self, buffer: Buffer, length: Expr, value: Expr) -> Stmt:
        """Set the first `length` elements of an array to `value`, in vectors."""
        name = self.names.fresh(f"{buffer.name}.i")
        lanes = max(1, self.vector_bits // 8 // buffer.type.dtype.size)
        store = build.store(buffer, (build.var(name),), value)
        return Loop(name, build.const(0), length, store, LoopKind.VECTOR, vector_factors=(lanes, 1))


@dataclass(frozen=True, slots=True)
class RowWorkspace(ABC):
    """A workspace for the rows of a result, one after the other."""

    row: Row

    @abstractmethod
    def allocate_around(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        """`body`, which handles some rows, inside the allocation of the workspace.

        measure: emits the code that finds the most terms that one of these rows combines (see `RowMeasurer`).
        """

    @abstractmethod
    def begin(self) -> Stmt:
        """Start a row."""

    @abstractmethod
    def combine(self, at: Expr, value: Expr) -> Stmt:
        """Combine the element at the coordinate `at` with a value."""

    @abstractmethod
    def append(self, element: AppendElement) -> Stmt:
        """Append the elements of the row, in order, and clear it."""


@dataclass(frozen=True, slots=True)
class DenseRow(RowWorkspace):
    """An element for each coordinate, a flag for each coordinate, and a flag for every `LINE` flags."""

    @property
    def _elements(self) -> Buffer:
        return self.row.buffer("row", self.row.dtype)

    @property
    def _flags(self) -> Buffer:
        return self.row.buffer("touched", UINT8)

    @property
    def _line(self) -> Buffer:
        return self.row.buffer("line", UINT8)

    def allocate_around(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        zero = build.const(0, UINT8)
        body = with_filled(self.row, self._flags, body, zero)
        body = with_filled(self.row, self._line, body, zero, LINE)
        if not self.row.counts:
            body = with_filled(self.row, self._elements, body, self.row.identity)
        return Allocate((_LINE,), body)

    def begin(self) -> Stmt:
        return Store(_LINE, (), build.const(-1))

    def combine(self, at: Expr, value: Expr) -> Stmt:
        one, group = build.const(1, UINT8), build.div(at, LINE)
        mark = build.block(Store(self._line, (group,), one), Store(_LINE, (), group))
        marks: list[Stmt] = [Store(self._flags, (at,), one), If(build.ne(group, Load(_LINE, ())), mark)]
        if self.row.counts:
            return build.block(*marks)
        return build.block(Store(self._elements, (at,), build.cast(value, self.row.dtype), self.row.reduction), *marks)

    def append(self, element: AppendElement) -> Stmt:
        def append_one(at: Expr) -> Stmt:
            entry = element(at, Load(self._elements, (at,)))
            clear = Store(self._elements, (at,), self.row.identity)
            return entry if self.row.counts else build.block(entry, clear)

        block = self.row.names.fresh(internal_name("block"))
        lines = self._each_flag(self._line, build.var(block), lambda t: self._each_flag(self._flags, t, append_one))
        return Loop(block, build.const(0), _count_blocks(self.row), lines)

    def _each_flag(self, flags: Buffer, group: Expr, then: Callable[[Expr], Stmt]) -> Stmt:
        """Emit `then` for each set flag in a group of `LINE`, in order, and clear the flags."""
        names = self.row.names
        bits, name = build.register(names.fresh("bits")), names.fresh(internal_name("flagged"))
        first = build.mul(group, LINE)
        places = build.ramp(first, 1, LINE)
        found = ReduceLanes(BITS, build.ne(build.load(flags, places), build.const(0, UINT8, LINE)))
        one = Let(name, build.add(first, build.call(TRAILING_ZEROS, Load(bits, ()))), then(build.var(name)))
        rest = build.call(BIT_AND, Load(bits, ()), build.sub(Load(bits, ()), 1))
        # Store the remaining bits before `then`, so that the loop condition does not wait for it.
        step = build.block(Let(name, one.value, build.block(Store(bits, (), rest), one.body)))
        loop = While(build.ne(Load(bits, ()), build.const(0, INT64)), step)
        clear = build.store(flags, (places,), build.const(0, UINT8, LINE))
        some = build.block(clear, loop)
        return Allocate(
            (bits,), build.block(Store(bits, (), found), If(build.ne(Load(bits, ()), build.const(0, INT64)), some))
        )


@dataclass(frozen=True, slots=True)
class MarkedRow(RowWorkspace):
    """A flag for each coordinate, to count elements. Each row sets its flags to a number of its own.

    So the flags need not be cleared after the row. count: the register of the number of elements.
    """

    count: Buffer

    @property
    def _flags(self) -> Buffer:
        return self.row.buffer("touched", UINT8)

    def allocate_around(self, body: Stmt, measure: Callable[[], Stmt]) -> Stmt:
        zero = build.const(0, UINT8)
        return Allocate((_MARK,), with_filled(self.row, self._flags, build.block(Store(_MARK, (), zero), body), zero))

    def begin(self) -> Stmt:
        """Choose the number of the next row; clear the flags when the numbers run out."""
        zero = build.const(0, UINT8)
        length = build.mul(_count_blocks(self.row), LINE * LINE)
        again = build.block(self.row.fill(self._flags, length, zero), Store(_MARK, (), zero))
        is_last = build.eq(Load(_MARK, ()), build.const(MAX_MARK, UINT8))
        return build.block(If(is_last, again), Store(_MARK, (), build.const(1, UINT8), "+"))

    def combine(self, at: Expr, value: Expr) -> Stmt:
        is_new = build.cast(build.ne(build.load(self._flags, at), Load(_MARK, ())), INT64)
        return build.block(Store(self.count, (), is_new, "+"), Store(self._flags, (at,), Load(_MARK, ())))

    def append(self, element: AppendElement) -> Stmt:
        """Nothing: the elements are counted already."""
        return build.NOTHING


def with_filled(row: Row, buffer: Buffer, body: Stmt, value: Expr, line: int = LINE * LINE) -> Stmt:
    """`body` inside the allocation of an array of `value` with `line` elements for each block of coordinates."""
    length = build.mul(_count_blocks(row), line)
    return Allocate((buffer,), build.block(row.fill(buffer, length, value), body), (length,))


def _count_blocks(row: Row) -> Expr:
    """The number of blocks of `LINE` times `LINE` coordinates, so that flags are padded to whole vectors."""
    return build.add(build.div(row.extent, LINE * LINE), 1)


_MARK = build.register(internal_name("mark"), UINT8)
"""The flag value of the row that is being counted."""
_LINE = build.register(internal_name("last_line"), INT64)
"""The group that was flagged last: adjacent elements mostly share a group, and skipping the store saves time."""
