"""Data tensors and thread tensors: levels of tiles, each with hierarchical dimensions.

Operations return new tensors or raise an `ArgumentError` that names the tensor and the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from typing_extensions import Self

from ..core.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, DType
from ..core.errors import ArgumentError, CannotLower
from ..layouts import Layout, Swizzle, coalesce, parse
from ..layouts.layout import IntTuple, flatten_tuple, format_tuple
from ..loop_ir import build
from ..loop_ir.atoms import TFLOAT32
from ..loop_ir.intervals import Interval
from ..loop_ir.nodes import THREAD, Expr, Space, Var
from ..loop_ir.passes.simplify import simplify
from .tensor_levels import Coordinate, TensorLevel, Tiler, is_valid_coordinate, least_tiled, row_major

DTYPE_NAMES = {"fp16": FLOAT16, "bf16": BFLOAT16, "fp32": FLOAT32, "fp64": FLOAT64} | {
    name: dtype for name, dtype in DTYPES.items() if not dtype.is_float
}
MEMORY_NAMES = {"GL": Space.GLOBAL, "SH": Space.SHARED, "RF": Space.REGISTER}
DTYPE_SPELLING = {dtype: name for name, dtype in DTYPE_NAMES.items()} | {TFLOAT32: "tf32"}
MEMORY_SPELLING = {space: name for name, space in MEMORY_NAMES.items()}
KINDS = ("thread", "block")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Tensor:
    """The common base of data tensors and thread tensors; prints in the notation of Graphene.

    Attributes:
        parts: the levels, outermost first; the strides of every level count scalars.
        origins: the offset of the first element, then its position for every guard.
        extents: for each guard, the bound below which positions have an element; None if the position is only
            a coordinate in a dimension of the memory (see `DataTensor.make_addressed_tensor`).
    """

    parts: tuple[TensorLevel, ...]
    origins: tuple[Expr, ...] = (build.const(0),)
    extents: tuple[int | None, ...] = ()

    # --- views -------------------------------------------------------------------------------------------------------

    @property
    def levels(self) -> tuple[Layout, ...]:
        """The offset layout of each level, outermost first, with a mode for every dimension."""
        return tuple(part.layouts[0] for part in self.parts)

    @property
    def shape(self) -> tuple[IntTuple, ...]:
        """The sizes of the dimensions of the outermost level."""
        return self.parts[0].shape if self.parts else ()

    @property
    def count(self) -> int:
        """The number of tiles, or elements, in the outermost level."""
        return self.parts[0].size if self.parts else 1

    @property
    def size(self) -> int:
        """The number of elements in all levels together."""
        return prod(part.size for part in self.parts)

    @property
    def offset(self) -> Expr:
        """The offset of the first element."""
        return self.origins[0]

    @property
    def predicate(self) -> Expr | None:
        """The condition under which the single element exists; None if it always does."""
        if self.parts:
            raise self._error("guard", expected="a single element: an index for every dimension")
        inside: Expr | None = None
        for at, extent in zip(self.origins[1:], self.extents, strict=True):
            if extent is not None:
                inside = build.and_masks(inside, build.lt(at, extent))
        return inside

    @property
    def coordinates(self) -> tuple[Expr, ...]:
        """The coordinates of the first element in the memory; empty if the tensor does not track them."""
        return tuple(at for at, extent in zip(self.origins[1:], self.extents, strict=True) if extent is None)

    @property
    def T(self) -> Self:
        """The tensor with the dimensions of every level in reverse order."""
        return replace(self, parts=tuple(part.select(range(len(part.whole))[::-1]) for part in self.parts))

    def offsets(self) -> tuple[int, ...]:
        """The offsets of all elements: the outermost level varies slowest; in a level, the first dimension fastest."""
        first = build.integer(self.offset)
        if first is None:
            raise self._error("enumerate", expected="an offset that is a number")
        found = [first]
        for layout in self.levels:
            inside = list(layout.offsets())
            found = [base + by for base in found for by in inside]
        return tuple(found)

    # --- transforms --------------------------------------------------------------------------------------------------

    def tile(self, *sizes: int | str | Layout | None) -> Self:
        """The tensor with its innermost level split in two: the tiles and, inside, the elements of a tile.

        Args:
            sizes: for each dimension the tile size, a layout of positions (`"2:2"`), or None to keep it whole.
                A dimension that is not a multiple is padded: `predicate` distinguishes its elements from the padding.
        """
        self._check_levels("tile")
        inner = self.parts[-1]
        by = f"by [{', '.join('_' if s is None else str(s) for s in sizes)}]"
        if len(sizes) != len(inner.whole):
            raise self._error("tile", by, expected=f"{len(inner.whole)} sizes", found=str(len(sizes)))
        tilers = [parse(size) if isinstance(size, str) else size for size in sizes]
        for size in tilers:
            if not (size is None or isinstance(size, Layout) or (isinstance(size, int) and _are_sizes(size))):
                raise self._error("tile", by, expected="sizes of 1 or more, layouts or None", found=str(size))
        return self._attempt(lambda: self._tile_levels(tilers), "tile", by)

    def reshape(self, level: int, shape: IntTuple | Sequence[int]) -> Self:
        """The tensor with `level` reshaped in row-major order: the last dimension is the fastest before and after."""
        self._check_level("reshape", level)
        wanted: IntTuple = shape if isinstance(shape, int) else tuple(shape)
        part, to = self.parts[level], f"to {shape} at level {level}"
        if not _are_sizes(wanted) or prod(flatten_tuple(wanted)) != part.size:
            raise self._error("reshape", to, expected=f"sizes of together {part.size}", found=str(shape))
        return self._attempt(lambda: self._with_level(level, part.reshaped(wanted)), "reshape", to)

    def join(self, *dimensions: int) -> Self:
        """The tensor with `dimensions` of its innermost level joined into a hierarchical one, the first fastest."""
        self._check_levels("join")
        rank = len(self.parts[-1].whole)
        if not dimensions or len(set(dimensions)) < len(dimensions) or not set(dimensions) <= set(range(rank)):
            raise self._error("join", f"along {dimensions}", expected=f"different dimensions of 0 to {rank - 1}")
        return self._with_level(-1, self.parts[-1].joined(dimensions))

    def split(self, *counts: int) -> tuple[Self, ...]:
        """Split the only dimension of the outermost level into consecutive parts of `counts` tiles."""
        self._check_levels("split")
        outer = self.parts[0]
        if len(outer.shape) != 1 or not isinstance(outer.shape[0], int):
            raise self._error(
                "split", expected="a single dimension at level 0, not hierarchical", found=format_tuple(outer.shape)
            )
        if any(type(n) is not int or n < 1 for n in counts) or sum(counts) != outer.size:
            raise self._error("split", f"into {counts}", expected=f"counts of together {outer.size}")
        starts = [sum(counts[:n]) for n in range(len(counts))]
        return tuple(self._part(start, n) for start, n in zip(starts, counts, strict=True))

    def __getitem__(self, at: Coordinate) -> Self:
        """The tensor at a coordinate of its outermost level, which disappears if the coordinate is complete.

        Dimensions that are omitted or indexed by `:` or None stay. A hierarchical dimension takes an integer, with its
        first part fastest, or a tuple with a coordinate for every part.
        """
        self._check_levels("index")
        outer, given = self.parts[0], at if isinstance(at, tuple) else (at,)
        takes = [n for n, whole in enumerate(outer.whole) if not whole]
        coordinate: list[Coordinate] = [None] * len(outer.whole)
        if len(given) > len(takes):
            raise self._error("index", expected=f"at most {len(takes)} coordinates", found=str(len(given)))
        for n, c in zip(takes, given, strict=False):
            if not is_valid_coordinate(outer.shape[n], c):
                where = f"a coordinate of {format_tuple(outer.shape[n])} in dimension {n}"
                raise self._error("index", expected=where, found=str(c))
            coordinate[n] = c
        left, offsets = outer.picked(coordinate)
        rest = self.parts[1:] if all(left.whole) else (left, *self.parts[1:])
        origins = tuple(build.add(origin, by) for origin, by in zip(self.origins, offsets, strict=True))
        return replace(self, parts=rest, origins=origins)._without_idle_guards()

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _tile_levels(self, tilers: Sequence[Tiler]) -> Self:
        tensor = self
        for n, tiler in enumerate(tilers):
            if tiler is not None:
                least = tiler if isinstance(tiler, int) else least_tiled(tiler)
                size = self.parts[-1].dimension(n)[0].size
                tensor = tensor._enlarge_dimension(n, size, -(-size // least) * least) if size % least else tensor
        return replace(tensor, parts=(*tensor.parts[:-1], *tensor.parts[-1].divided(tilers)))

    def _enlarge_dimension(self, dimension: int, before: int, size: int) -> Self:
        """The tensor with `dimension` of its innermost level padded to `size`, guarded by the old size `before`."""
        *outer, inner = self.parts
        parts = (*(part.with_guard() for part in outer), inner.enlarged(dimension, size).with_guard(dimension))
        return replace(self, parts=parts, origins=(*self.origins, build.const(0)), extents=(*self.extents, before))

    def _without_idle_guards(self) -> Self:
        """The tensor without guards that are true for every element."""
        idle = set()
        for n, (origin, extent) in enumerate(zip(self.origins[1:], self.extents, strict=True), 1):
            first = build.integer(origin)
            if (
                extent is not None
                and first is not None
                and first + sum(part.layouts[n].cosize - 1 for part in self.parts) < extent
            ):
                idle.add(n)
        if not idle:
            return self
        return replace(
            self,
            parts=tuple(part.without_layouts(idle) for part in self.parts),
            origins=tuple(x for n, x in enumerate(self.origins) if n not in idle),
            extents=tuple(x for n, x in enumerate(self.extents, 1) if n not in idle),
        )

    def _part(self, start: int, count: int) -> Self:
        """`count` tiles from `start` on in the only dimension of the outermost level."""
        outer = self.parts[0]
        strides = [flatten_tuple(layout.stride)[0] for layout in outer.layouts]
        origins = tuple(build.add(origin, start * by) for origin, by in zip(self.origins, strides, strict=True))
        level = TensorLevel(tuple(Layout((count,), (by,)) for by in strides), outer.whole)
        return replace(self, parts=(level, *self.parts[1:]), origins=origins)._without_idle_guards()

    def _with_level(self, level: int, part: TensorLevel) -> Self:
        parts = list(self.parts)
        parts[level] = part
        return replace(self, parts=tuple(parts))

    def _check_levels(self, what: str) -> None:
        if not self.parts:
            raise self._error(what, expected="a tensor with a level", found="a single element")

    def _check_level(self, what: str, level: int) -> None:
        if type(level) is not int or not -len(self.parts) <= level < len(self.parts):
            raise self._error(what, f"at level {level}", expected=f"a level of 0 to {len(self.parts) - 1}")

    def _attempt(self, transform: Callable[[], _T], what: str, operand: str) -> _T:
        try:
            return transform()
        except CannotLower as reason:
            raise self._error(what, operand, f": {reason}") from None

    def _error(
        self, what: str, operand: str = "", why: str = "", *, expected: str = "", found: str = ""
    ) -> ArgumentError:
        return ArgumentError(f"cannot {what} {self}{operand and ' '}{operand}{why}", expected=expected, found=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTensor(Tensor):
    """Elements of one type in a memory, e.g. `[(2,2):(2,16)].[(2,4):(1,4)].fp32.GL`.

    Attributes:
        swizzle: a permutation of the offsets that the layouts give; only for shared memory.
    """

    dtype: DType
    memory: Space
    swizzle: Swizzle | None = None

    @staticmethod
    def make_addressed_tensor(shape: Sequence[IntTuple], dtype: DType, memory: Space) -> DataTensor:
        """A row-major tensor that tracks the coordinates of its elements through all operations."""
        level = TensorLevel.of(row_major(tuple(shape)))
        for n in range(len(shape)):
            level = level.with_guard(n)
        zeros = (build.const(0),) * (1 + len(shape))
        return DataTensor((level,), zeros, (None,) * len(shape), dtype=dtype, memory=memory)

    def __str__(self) -> str:
        names = f"{_levels_text(self.levels)}.{DTYPE_SPELLING[self.dtype]}.{MEMORY_SPELLING[self.memory]}"
        return names if self.swizzle is None else f"{names}.{self.swizzle}"

    def swizzled(self, swizzle: Swizzle | None) -> DataTensor:
        """The tensor with `swizzle` instead of its own; None for no swizzle."""
        if swizzle is not None and (self.memory is not Space.SHARED or not isinstance(swizzle, Swizzle)):
            raise self._error("swizzle", f"by {swizzle}", expected="a tensor in SH, and a Swizzle")
        return replace(self, swizzle=swizzle)

    def partition(self, tv: str | Layout) -> DataTensor:
        """The tile as `[threads].[values]`.

        Args:
            tv: the layout from (thread, value) to an element, numbered in column-major order.
        """
        layout = parse(tv) if isinstance(tv, str) else tv
        if len(self.parts) != 1 or not isinstance(layout, Layout) or len(layout) != 2:
            raise self._error("partition", f"by {layout}", expected="one level, and a layout of threads and values")

        def split() -> DataTensor:
            both = self.parts[0].composed(layout)
            return replace(self, parts=(both.select((0,)), both.select((1,))))

        return self._attempt(split, "partition", f"by {layout}")

    def swizzled_offsets(self) -> tuple[int, ...]:
        """The swizzled offset of every element."""
        return self.offsets() if self.swizzle is None else tuple(map(self.swizzle, self.offsets()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTensor(Tensor):
    """Threads, or blocks, in nested groups, e.g. `[4:32].[32:1].thread`: offsets are their indices.

    Attributes:
        kind: `thread` or `block`.
    """

    kind: str = "thread"

    def __post_init__(self) -> None:
        reached = 1
        for size, stride in sorted((leaf for x in self.levels for leaf in x.flat if leaf[0] > 1), key=lambda m: m[1]):
            if stride < reached or stride % reached:
                raise self._error("number", expected=f"strides that are multiples of {reached}", found=str(stride))
            reached = size * stride

    def __str__(self) -> str:
        return f"{_levels_text(self.levels)}.{self.kind}"

    def indices(self, level: int = 0, thread: Expr | None = None) -> tuple[Expr, ...]:
        """The coordinates of a thread at `level`, one for every dimension that takes an index.

        Args:
            thread: the index of a thread of this tensor; by default the variable `thread.x`.
        """
        self._check_level("index", level)
        number = Var(THREAD[0]) if thread is None else thread
        part = self.parts[level]
        modes = [mode for mode, whole in zip(part.layouts[0].modes, part.whole, strict=True) if not whole]
        ranges = self._range(number)
        return tuple(simplify(_make_thread_coordinate(mode, build.sub(number, self.offset)), ranges) for mode in modes)

    def _enlarge_dimension(self, dimension: int, before: int, size: int) -> Self:
        raise CannotLower(f"{before} {self.kind}s are no whole number of tiles, and none can be added")

    def _range(self, number: Expr) -> dict[str, Interval]:
        """The range of `number`, the index of a thread of this tensor, if it is a variable."""
        first = build.integer(self.offset)
        if first is None or not isinstance(number, Var):
            return {}
        return {number.name: Interval(first, first + sum(layout.cosize - 1 for layout in self.levels))}


def _are_sizes(shape: IntTuple) -> bool:
    return all(map(_are_sizes, shape)) if isinstance(shape, tuple) else type(shape) is int and shape > 0


def _make_thread_coordinate(dimension: Layout, number: Expr) -> Expr:
    """The integer coordinate in `dimension` of the thread with index `number`."""
    total: Expr = build.const(0)
    reached = 1
    for size, stride in coalesce(dimension).flat:
        if size > 1:
            total = build.add(total, build.mul(build.mod(build.div(number, stride), size), reached))
        reached *= size
    return total


def _levels_text(levels: Sequence[Layout]) -> str:
    """Format levels in brackets; a single dimension has parentheses only if it is hierarchical."""
    return ".".join(f"[{_tuple_text(x.shape)}:{_tuple_text(x.stride)}]" for x in levels) or "[]"


def _tuple_text(t: IntTuple) -> str:
    if isinstance(t, tuple) and len(t) == 1 and isinstance(t[0], int):
        return str(t[0])
    return format_tuple(t).replace(" ", "")
