"""The operands of a tile program: data in memory, and tiles distributed over the registers of threads."""

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
"""The index of a thread in its block."""


class DynamicIndexError(ArgumentError):
    """A tile in registers is indexed by a value that is known only at run time."""


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Part of a tensor in global or shared memory; prints as `%A:[128,32].fp16.GL`.

    Attributes:
        buffer: the memory.
        tensor: the part, which tracks coordinates in `buffer`.
    """

    buffer: Buffer
    tensor: DataTensor

    @staticmethod
    def of(name: str, shape: Sequence[IntTuple], dtype: DType, space: Space) -> MemoryView:
        """A view of all of a new row-major buffer. In a hierarchical dimension, too, the last part is contiguous, as
        instructions need it."""
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
        """The number of tiles, or elements, in the outermost level."""
        return self.tensor.count

    @property
    def T(self) -> MemoryView:
        """The view with dimensions in reverse order."""
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
        """The single level as a matrix of this size: a dimension of size 1 is broadcast, a smaller one is padded."""
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
        """The matrix padded to this size. Raises ArgumentError if it is larger."""
        tiled = self.tensor.tile(rows, columns)
        if tiled.count != 1:
            raise ArgumentError(
                f"cannot take {self} as {rows} rows and {columns} columns", expected="a tile of at most this size",
                found=str(self.tensor),
            )  # fmt: skip
        return replace(self, tensor=tiled[0, 0])


@dataclass(frozen=True, slots=True)
class RegisterFragment:
    """A matrix distributed over the registers of threads; prints as `%acc:[128,128].fp32.RF`.

    Attributes:
        name: only for messages and printing.
        dtype: the type of the elements.
        shape: rows and columns; columns may be hierarchical.
        padded: the rows and columns that `tv` covers; positions outside of `shape` are padding.
        tv: (thread, value) -> row + column * rows, in the matrix of size `padded`.
        buffer: the registers of each thread. registers: for each value, the index of its register.
        per_register: the number of values packed in a 32-bit register; 1 if each value has its own register.
        group: None if `tv` covers the threads of the block or role; else the number of neighboring threads in each
            group, every one of which holds a tile.
        first: the first thread that `tv` covers; not 0 for a role.
        product: for an accumulator, how it is divided among warps or warpgroups, and instructions.
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
        """The number of rows and of columns, without padding."""
        rows, columns = (prod(flatten_tuple(n)) for n in self.shape)
        return rows, columns

    @property
    def values(self) -> int:
        """The number of values that a thread holds."""
        return self.tv[1].size

    @property
    def thread(self) -> Expr:
        """The index of the current thread in `tv`."""
        return build.sub(THREAD_X, self.first) if self.group is None else build.mod(THREAD_X, self.group)

    @property
    def spread(self) -> tuple[int, int]:
        """The threads of the block that `tv` covers, as (first, count); for groups, those of one group."""
        return self.first, self.tv[0].size

    @property
    def elements(self) -> np.ndarray[Any, Any]:
        """The element of each thread (rows) and value (columns): `row + column * rows` of `padded`."""
        return enumerate_tv(self.tv)

    @property
    def is_padded(self) -> bool:
        """Whether some values may be padding."""
        return self.sizes != self.padded

    def row_and_column(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The row, and the column, of each thread and value."""
        found = self.elements
        return found % self.padded[0], found // self.padded[0]

    def row(self, name: str) -> RegisterFragment:
        """A new tile with one value per row, held by the threads that hold the row in this tile."""
        return row_tile(self, name)

    def positions(self, axis: int, start: object = 0) -> Positions:
        """The row (axis 0) or column (axis 1) of each element, plus `start`, as an operand of `k.map`."""
        if axis not in (0, 1):
            raise ArgumentError(f"{self} has no axis {axis}", expected="0 or 1")
        return Positions(self, axis, to_index(start, "positions"))

    def tile(self, rows: int | None, columns: int | None) -> RegisterFragments:
        """The fragment cut into tiles of neighboring rows and columns; their indices must be Python integers."""
        return RegisterFragments(
            self, (rows or self.padded[0], columns or self.padded[1]), (rows is None, columns is None)
        )

    def __getitem__(self, at: Coordinate) -> RegisterFragment:
        """A part of hierarchical dimensions, e.g. `z[:, (gate, None)]`."""
        at = to_coordinate(at)
        given = at if isinstance(at, tuple) else (at,)
        if len(given) != 2 or not all(map(is_valid_coordinate, self.shape, given)):
            raise ArgumentError(f"cannot index {self}", expected="a coordinate for rows and columns", found=str(at))
        picked = [_pick_positions(shape, c, self) for shape, c in zip(self.shape, given, strict=True)]
        return self.restrict(*picked)

    def restrict(self, rows: tuple[list[int], IntTuple], columns: tuple[list[int], IntTuple]) -> RegisterFragment:
        """The tile of some rows and columns, each given as (positions, their new shape).

        Raises:
            ArgumentError: the threads hold different values of it, or it has no layout.
        """
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
    """A fragment cut into tiles of `size`; dimensions that are `kept` whole take no index."""

    whole: RegisterFragment
    size: tuple[int, int]
    kept: tuple[bool, bool]

    @property
    def count(self) -> int:
        """The number of tiles."""
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
    """How an accumulator is divided among warps and `mma` instructions.

    Attributes:
        columns: the columns of one or two instructions; the second half belongs to the second.
        pair: the number of these instructions, 1 or 2.
        rows_each, columns_each: the number of times a warp has 16 rows, and `columns`.
        warps: the number of warps along rows and along columns.
        threads: the threads of all warps.
    """

    columns: Layout
    pair: int
    rows_each: int
    columns_each: int
    warps: tuple[int, int]
    threads: ThreadTensor


@dataclass(frozen=True, slots=True)
class WarpgroupPlan:
    """How an accumulator is divided among warpgroups and `wgmma` instructions.

    Attributes:
        columns: the columns of one instruction. columns_each: the number of times a warpgroup has them.
        rows_each: the number of times a warpgroup has 64 rows.
        threads: the threads of all warpgroups.
    """

    columns: int
    columns_each: int
    rows_each: int
    threads: ThreadTensor


@dataclass(frozen=True, slots=True)
class Positions:
    """The row (axis 0) or column (axis 1) of each element of a tile, plus `start`; computed, not stored."""

    tile: RegisterFragment
    axis: int
    start: Expr

    def __str__(self) -> str:
        return f"{('rows', 'columns')[self.axis]} of {self.tile}"

    @property
    def shape(self) -> tuple[IntTuple, ...]:
        """The shape of the tile."""
        return self.tile.shape


Operand = MemoryView | RegisterFragment
MapOperand = MemoryView | RegisterFragment | Positions


@cache
def enumerate_tv(tv: Layout) -> np.ndarray[Any, Any]:
    """The table of the element of each thread (rows) and value (columns)."""
    threads, values = (np.fromiter(mode.offsets(), np.int64) for mode in tv.modes)
    found: np.ndarray[Any, Any] = threads[:, None] + values[None, :]
    return found


def group_equal_columns(table: np.ndarray[Any, Any]) -> list[list[int]]:
    """The indices of columns, in groups of equal columns ordered by the first of each."""
    found: dict[bytes, list[int]] = {}
    for number, column in enumerate(np.ascontiguousarray(table.T)):
        found.setdefault(column.tobytes(), []).append(number)
    return list(found.values())


def layout_of_table(table: np.ndarray[Any, Any]) -> Layout | None:
    """The layout from (thread, value) to the entries of `table`; None if there is no such layout."""
    threads, values = _modes_of(table[:, 0] - table[0, 0]), _modes_of(table[0])
    if threads is None or values is None or table[0, 0] != 0:
        return None
    tv = Layout((threads.shape, values.shape), (threads.stride, values.stride))
    return tv if np.array_equal(enumerate_tv(tv), table) else None


def _modes_of(sequence: np.ndarray[Any, Any]) -> Layout | None:
    """The layout whose offsets are `sequence`, which begins with 0; None if there is no such layout."""
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
    """A fragment with a new register buffer. register: the type of a register, by default `dtype`."""
    count = tv[1].size // per_register
    buffer = Buffer(name, Type(register or dtype), (count,), (1,), Space.REGISTER)
    numbers = tuple(v // per_register for v in range(tv[1].size))
    return RegisterFragment(name, dtype, shape, padded, tv, buffer, numbers, per_register, group, first, product)


def row_tile(x: RegisterFragment, name: str) -> RegisterFragment:
    """A float32 tile with one column; each thread holds the rows that it holds of `x`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ArgumentError("a tensor needs a name", expected="an identifier", found=repr(name))
    rows = x.row_and_column()[0]
    tv = layout_of_table(rows[:, [values[0] for values in group_equal_columns(rows)]])
    if tv is None:
        raise ArgumentError(f"the rows of {x} do not lie as a layout")
    return register_tile(name, FLOAT32, (x.shape[0], 1), (x.padded[0], 1), tv, group=x.group, first=x.first)


def _places_of(found: list[int], size: int) -> np.ndarray[Any, Any]:
    """The inverse of `found`: for each integer below `size`, its index in `found`, or -1."""
    places = np.full(max(size, *found) + 1, -1)
    places[found] = np.arange(len(found))
    return places


def _pick_positions(shape: IntTuple, at: Any, tile: RegisterFragment) -> tuple[list[int], IntTuple]:
    """The positions in a dimension that a coordinate selects, and their shape."""
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
    """The coordinate `at` of a dimension split into one for each leaf of `shape`; None for open ones."""
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
