"""The operands of a tile program: data in memory, and tiles spread over the registers of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, DType
from ...core.errors import ArgumentError
from ...layouts import Layout
from ...layouts.layout import IntTuple, flatten_tuple, format_tuple
from ...loop_ir import build
from ...loop_ir.nodes import THREAD, Buffer, Expr, Space, Type
from ..tensor_levels import Coordinate, is_valid_coordinate
from ..tensors import DTYPE_SPELLING, DataTensor, ThreadTensor
from .indices import to_coordinate, to_index

THREAD_X = build.var(THREAD[0])
"""The number of a thread in its block."""


class DynamicIndexError(ArgumentError):
    """A tile in registers is indexed by a number that only the run knows."""


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Part of a tensor in global or shared memory; prints as `%A:[128,32].fp16.GL`.

    Attributes:
        buffer: the memory.
        tensor: the part, which keeps the coordinates in `buffer`.
    """

    buffer: Buffer
    tensor: DataTensor

    @staticmethod
    def of(name: str, shape: Sequence[IntTuple], dtype: DType, space: Space) -> MemoryView:
        """All of a new row-major buffer. A hierarchical dimension lies with its last part fastest, as instructions
        walk it."""
        leaves = [flatten_tuple(n) for n in shape]
        sizes = tuple(n for part in leaves for n in part)
        tensor = DataTensor.make_addressed_tensor(sizes, dtype, space)
        for first, part in enumerate(leaves):
            if len(part) > 1:
                tensor = tensor.join(*range(first, first + len(part)))
        return MemoryView(build.buffer(name, dtype, sizes, space), tensor)

    def __str__(self) -> str:
        return f"%{self.buffer.name}:{self.tensor}"

    @property
    def dtype(self) -> DType:
        """The type of the elements."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[IntTuple, ...]:
        """The sizes of the outermost level."""
        return self.tensor.shape

    @property
    def count(self) -> int:
        """How many tiles, or elements, the outermost level has."""
        return self.tensor.count

    @property
    def T(self) -> MemoryView:
        """The dimensions in reverse order."""
        return replace(self, tensor=self.tensor.T)

    def tile(self, *sizes: int | str | Layout | None) -> MemoryView:
        """As `DataTensor.tile`."""
        return replace(self, tensor=self.tensor.tile(*sizes))

    def reshape(self, level: int, shape: IntTuple | Sequence[int]) -> MemoryView:
        """As `DataTensor.reshape`."""
        return replace(self, tensor=self.tensor.reshape(level, shape))

    def join(self, *dimensions: int) -> MemoryView:
        """As `DataTensor.join`."""
        return replace(self, tensor=self.tensor.join(*dimensions))

    def __getitem__(self, at: Coordinate) -> MemoryView:
        """As `DataTensor.__getitem__`."""
        return replace(self, tensor=self.tensor[to_coordinate(at)])

    def matrix(self, rows: int, columns: int) -> MemoryView:
        """The only level as rows and columns of these sizes: one of size 1 is repeated, a smaller one enlarged."""
        if len(self.tensor.parts) != 1:
            raise ArgumentError(f"cannot take {self} as a tile", expected="a single level", found=str(self.tensor))
        part = self.tensor.parts[0]
        missing = 2 - len(part.whole)
        if missing < 0:
            raise ArgumentError(f"cannot take {self} as rows and columns", expected="at most 2 dimensions")
        sizes = [1] * missing + [n.size for n in part.layouts[0].modes]
        modes = []
        for layout in part.layouts:
            own = [Layout(1, 0)] * missing + list(layout.modes)
            full = [
                Layout(n, 0) if size == 1 else mode for n, size, mode in zip((rows, columns), sizes, own, strict=True)
            ]
            modes.append(Layout(tuple(m.shape for m in full), tuple(m.stride for m in full)))
        level = type(part)(tuple(modes), (False, False))
        tensor: DataTensor = replace(self.tensor, parts=(level,))
        wanted = tuple(n if size != 1 else None for n, size in zip((rows, columns), sizes, strict=True))
        fitting = [w is None or w == s for w, s in zip(wanted, sizes, strict=True)]
        if all(fitting):
            return replace(self, tensor=tensor)
        return replace(self, tensor=tensor).tile_to(rows, columns)

    def tile_to(self, rows: int, columns: int) -> MemoryView:
        """Rows and columns enlarged to these sizes."""
        tiled = self.tensor.tile(rows, columns)
        if tiled.count != 1:
            raise ArgumentError(
                f"cannot take {self} as {rows} rows and {columns} columns", expected="a tile of at most this size",
                found=str(self.tensor),
            )  # fmt: skip
        return replace(self, tensor=tiled[0, 0])


@dataclass(frozen=True, slots=True)
class RegisterFragment:
    """A matrix spread over the registers of threads; prints as `%acc:[128,128].fp32.RF`.

    Attributes:
        name: for people.
        dtype: of the elements.
        shape: rows and columns; columns may be hierarchical.
        padded: the rows and columns that `tv` covers; places beyond `shape` are no elements.
        tv: (thread, value) -> row + column * rows, both of `padded`.
        buffer: of every thread: its registers. registers: the number of the register of each value.
        per_register: values in a register of 32 bits; 1: each has its own.
        group: the threads that `tv` spreads over: those of the block (None), or of each group of so many neighbors.
        first: the thread of the block from which on `tv` counts, if it spreads over a role.
        product: for sums: how warps, or warpgroups, and instructions divide them.
    """

    name: str
    dtype: DType
    shape: tuple[IntTuple, IntTuple]
    padded: tuple[int, int]
    tv: Layout
    buffer: Buffer
    registers: tuple[int, ...]
    per_register: int = 1
    group: int | None = None
    first: int = 0
    product: ProductPlan | WarpgroupPlan | None = None

    def __str__(self) -> str:
        sizes = ",".join(format_tuple(n).replace(" ", "") for n in self.shape)
        return f"%{self.name}:[{sizes}].{DTYPE_SPELLING[self.dtype]}.RF"

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = (prod(flatten_tuple(n)) for n in self.shape)
        return rows, columns

    @property
    def values(self) -> int:
        """How many elements a thread holds."""
        return self.tv[1].size

    @property
    def thread(self) -> Expr:
        """The number of a thread in `tv`."""
        return build.sub(THREAD_X, self.first) if self.group is None else build.mod(THREAD_X, self.group)

    @property
    def spread(self) -> tuple[int, int]:
        """Over which threads of the block `tv` goes: the first, and how many; of groups: those of each."""
        return self.first, self.tv[0].size

    @property
    def elements(self) -> np.ndarray[Any, Any]:
        """The element of each thread (rows) and value (columns): `row + column * rows` of `padded`."""
        return enumerate_tv(self.tv)

    @property
    def is_padded(self) -> bool:
        """Whether some values may be no elements."""
        return self.sizes != self.padded

    def row_and_column(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Of each thread and value."""
        found = self.elements
        return found % self.padded[0], found // self.padded[0]

    def row(self, name: str) -> RegisterFragment:
        """A new tile with one number a row, where this one has the row."""
        return row_tile(self, name)

    def positions(self, axis: int, start: object = 0) -> Positions:
        """The number of each element's row (axis 0) or column (1), from `start` on: an operand of `k.map`."""
        if axis not in (0, 1):
            raise ArgumentError(f"{self} has no axis {axis}", expected="0 or 1")
        return Positions(self, axis, to_index(start, "positions"))

    def tile(self, rows: int | None, columns: int | None) -> RegisterFragments:
        """Tiles of neighboring rows and columns, which numbers that the program knows pick."""
        return RegisterFragments(
            self, (rows or self.padded[0], columns or self.padded[1]), (rows is None, columns is None)
        )

    def __getitem__(self, at: Coordinate) -> RegisterFragment:
        """Part of hierarchical dimensions, as `z[:, (gate, None)]`."""
        at = to_coordinate(at)
        given = at if isinstance(at, tuple) else (at,)
        if len(given) != 2 or not all(map(is_valid_coordinate, self.shape, given)):
            raise ArgumentError(f"cannot index {self}", expected="a coordinate for rows and columns", found=str(at))
        picked = [_pick_positions(shape, c, self) for shape, c in zip(self.shape, given, strict=True)]
        return self.restrict(*picked)

    def restrict(self, rows: tuple[list[int], IntTuple], columns: tuple[list[int], IntTuple]) -> RegisterFragment:
        """The tile of these rows and columns, which now have these shapes."""
        r, c = self.row_and_column()
        row_places, column_places = (
            _places_of(found, size) for (found, _), size in zip((rows, columns), self.padded, strict=True)
        )
        inside = (row_places[r] >= 0) & (column_places[c] >= 0)
        keep = [int(v) for v in np.flatnonzero(inside.all(axis=0))]
        if inside.sum() != inside.shape[0] * len(keep) or not keep:
            raise ArgumentError(f"cannot take part of {self}", expected="values that all threads have alike")
        height, width = len(rows[0]), len(columns[0])
        table = row_places[r[:, keep]] + height * column_places[c[:, keep]]
        tv = layout_of_table(table)
        if tv is None or any((v - n) % self.per_register for n, v in enumerate(keep)):
            raise ArgumentError(f"cannot take part of {self}", expected="values that lie as a layout")
        kept = tuple(self.registers[v] for v in keep)
        shape = (rows[1], columns[1])
        return replace(self, shape=shape, padded=(height, width), tv=tv, registers=kept, product=None)


@dataclass(frozen=True, slots=True)
class RegisterFragments:
    """A tile in registers, cut into tiles."""

    whole: RegisterFragment
    size: tuple[int, int]
    kept: tuple[bool, bool]

    @property
    def count(self) -> int:
        """How many there are."""
        return prod(-(-n // size) for n, size in zip(self.whole.padded, self.size, strict=True))

    def __getitem__(self, at: Coordinate) -> RegisterFragment:
        at = to_coordinate(at)
        given = list(at) if isinstance(at, tuple) else [at]
        origin = []
        for n, whole in enumerate(self.kept):
            index = 0 if whole else build.integer(c) if isinstance(c := given.pop(0), Expr) else c
            if not isinstance(index, int):
                raise DynamicIndexError(
                    f"the index of a tile of {self.whole} is only known in the run",
                    expected="a number that the program knows: registers have no addresses",
                )
            origin.append(index * self.size[n])
        picked = [([*range(start, start + n)], n) for start, n in zip(origin, self.size, strict=True)]
        return self.whole.restrict(*picked)


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """How warps and instructions divide a tile of sums.

    Attributes:
        columns: the columns of one or two instructions: the second half belongs to the second.
        pair: how many instructions these are.
        rows_each, columns_each: how many times 16 rows, and such columns, a warp has.
        warps: of rows and of columns.
        threads: all of them.
    """

    columns: Layout
    pair: int
    rows_each: int
    columns_each: int
    warps: tuple[int, int]
    threads: ThreadTensor


@dataclass(frozen=True, slots=True)
class WarpgroupPlan:
    """How warpgroups and instructions divide a tile of sums.

    Attributes:
        columns: of one instruction. columns_each: how many times a warpgroup has them.
        rows_each: how many times it has 64 rows.
        threads: all of them.
    """

    columns: int
    columns_each: int
    rows_each: int
    threads: ThreadTensor


@dataclass(frozen=True, slots=True)
class Positions:
    """The number of the row, or column, of each element of a tile; no memory holds it."""

    tile: RegisterFragment
    axis: int
    start: Expr

    def __str__(self) -> str:
        return f"{('rows', 'columns')[self.axis]} of {self.tile}"

    @property
    def shape(self) -> tuple[IntTuple, ...]:
        """As of the tile."""
        return self.tile.shape


Operand = MemoryView | RegisterFragment
MapOperand = MemoryView | RegisterFragment | Positions


@cache
def enumerate_tv(tv: Layout) -> np.ndarray[Any, Any]:
    """The element of each thread (rows) and value (columns)."""
    threads, values = (np.fromiter(mode.offsets(), np.int64) for mode in tv.modes)
    found: np.ndarray[Any, Any] = threads[:, None] + values[None, :]
    return found


def group_equal_columns(table: np.ndarray[Any, Any]) -> list[list[int]]:
    """The numbers of the columns that are equal, in the order of the first of each."""
    found: dict[bytes, list[int]] = {}
    for number, column in enumerate(np.ascontiguousarray(table.T)):
        found.setdefault(column.tobytes(), []).append(number)
    return list(found.values())


def layout_of_table(table: np.ndarray[Any, Any]) -> Layout | None:
    """The layout from (thread, value) to the entries of a table, if there is one."""
    threads, values = _modes_of(table[:, 0] - table[0, 0]), _modes_of(table[0])
    if threads is None or values is None or table[0, 0] != 0:
        return None
    tv = Layout((threads.shape, values.shape), (threads.stride, values.stride))
    return tv if np.array_equal(enumerate_tv(tv), table) else None


def _modes_of(sequence: np.ndarray[Any, Any]) -> Layout | None:
    """The layout whose offsets are a sequence that begins with 0."""
    modes: list[tuple[int, int]] = []
    while len(sequence) > 1:
        stride = int(sequence[1])
        steps = np.arange(len(sequence)) * stride
        size = int(np.argmax(sequence != steps)) or len(sequence)
        while size > 1 and len(sequence) % size:
            size -= 1
        if size < 2 or stride < 0:
            return None
        modes.append((size, stride))
        sequence = sequence[::size]
    if not modes:
        return Layout(1, 0)
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(m[0] for m in modes), tuple(m[1] for m in modes))


def register_tile(
    name: str, dtype: DType, shape: tuple[IntTuple, IntTuple], padded: tuple[int, int], tv: Layout, *,
    per_register: int = 1, group: int | None = None, first: int = 0,
    product: ProductPlan | WarpgroupPlan | None = None, register: DType | None = None,
) -> RegisterFragment:  # fmt: skip
    """A tile with registers of its own."""
    count = tv[1].size // per_register
    buffer = Buffer(name, Type(register or dtype), (count,), (1,), Space.REGISTER)
    numbers = tuple(v // per_register for v in range(tv[1].size))
    return RegisterFragment(name, dtype, shape, padded, tv, buffer, numbers, per_register, group, first, product)


def row_tile(x: RegisterFragment, name: str) -> RegisterFragment:
    """A tile of float32 with one column: in every thread the rows that it has of `x`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError("a tensor needs a name", expected="an identifier", found=repr(name))
    rows = x.row_and_column()[0]
    tv = layout_of_table(rows[:, [values[0] for values in group_equal_columns(rows)]])
    if tv is None:
        raise ArgumentError(f"the rows of {x} do not lie as a layout")
    return register_tile(name, FLOAT32, (x.shape[0], 1), (x.padded[0], 1), tv, group=x.group, first=x.first)


def _places_of(found: list[int], size: int) -> np.ndarray[Any, Any]:
    """For each number, up to `size`, where it is in `found`; -1: nowhere."""
    places = np.full(max(size, *found) + 1, -1)
    places[found] = np.arange(len(found))
    return places


def _pick_positions(shape: IntTuple, at: Any, tile: RegisterFragment) -> tuple[list[int], IntTuple]:
    """The positions that a coordinate leaves of a dimension, and their shape."""
    if at is None or isinstance(at, slice):
        return [*range(prod(flatten_tuple(shape)))], shape
    leaves = flatten_tuple(shape)
    chosen = flatten_at(at, shape)
    if any(isinstance(c, Expr) for c in chosen):
        raise DynamicIndexError(f"the index of {tile} is only known in the run", expected="a number")
    found, step = [0], 1
    left: list[int] = []
    for size, c in zip(leaves, chosen, strict=True):
        steps = [int(c)] if c is not None else [*range(size)]
        found = [base + n * step for n in steps for base in found]
        left += [size] if c is None else []
        step *= size
    return found, left[0] if len(left) == 1 else tuple(left) if left else 1


def flatten_at(at: Any, shape: IntTuple) -> list[Any]:
    """A coordinate for each leaf of a dimension."""
    if isinstance(shape, int):
        return [at]
    if isinstance(at, tuple):
        return [c for part, inner in zip(at, shape, strict=True) for c in flatten_at(part, inner)]
    if at is None or isinstance(at, slice):
        return [None] * len(flatten_tuple(shape))
    found = []
    for size in flatten_tuple(shape):
        found.append(at % size)
        at //= size
    return found
