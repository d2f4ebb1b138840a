"""Decompose moves by TMA: tiles from global to shared memory, and accumulators to global memory via shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ...core.dtypes import UINT32, DType
from ...core.errors import ArgumentError
from ...layouts.layout import flatten_tuple
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.async_operand_checks import tensor_map_fault
from ...loop_ir.atoms import WARP, WARPGROUP
from ...loop_ir.intrinsics import BARRIER_PART, BULK_COMMIT, BULK_WAIT, FENCE_ASYNC
from ...loop_ir.linear_forms import difference
from ...loop_ir.matrix_descriptor import CORE_ROWS
from ...target import GpuTarget
from .. import specs
from ..builder.tile_views import MemoryView, RegisterFragment, WarpgroupPlan
from .panels import panel_columns, panel_fault
from .warpgroup_products import WARPGROUP_INDEX, thread_range

MOST_ROWS = 256
"""The maximum size of a box in each dimension."""
SLICES = (64, 32, 16)
"""The columns of sums that a warpgroup may store at a time, in order of preference."""
SLICE_ROWS = 64
"""The rows of such a slice."""


@dataclass(slots=True)
class RuleContext:
    """The state that decomposition rules share.

    Attributes:
        registers: the registers per thread at launch.
        maps: the tensor maps so far. parts: the (first, count) threads of each named barrier, numbered from 1.
        boxed: the names of shared buffers that need panels, because TMA or warpgroup products access them.
        rounded: the names of shared float32 buffers that TMA rounds to tf32 as it loads them.
        shared: bytes of shared memory in use. staged: staging tiles in shared memory that rules allocated.
        tensors: the arguments by name; tiles may view them with other dimensions.
    """

    target: GpuTarget
    registers: int
    tensors: Mapping[str, ir.Buffer] = field(default_factory=dict)
    maps: list[ir.TensorMap] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    boxed: set[str] = field(default_factory=set)
    rounded: frozenset[str] = frozenset()
    shared: int = 0
    staged: list[MemoryView] = field(default_factory=list)

    def map_number(self, m: ir.TensorMap) -> int:
        """The index of a tensor map in the kernel, which is added if it is new."""
        if m not in self.maps:
            self.maps.append(m)
        return self.maps.index(m)

    def part_number(self, threads: tuple[int, int]) -> int:
        """The number of the named barrier of `threads`. Raises ArgumentError if all 15 are in use."""
        if threads not in self.parts:
            self.parts.append(threads)
        if len(self.parts) > 15:
            raise ArgumentError("too many parts of a block meet", expected="at most 15", found=str(len(self.parts)))
        return self.parts.index(threads) + 1


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A matrix tile in global memory that TMA can copy in boxes.

    Attributes:
        view: the tile. tensor: the argument of which `view.buffer` is a view.
        rows, columns: the (dimension of `view.buffer`, size) that they extend along, the fastest first.
    """

    view: MemoryView
    tensor: ir.Buffer
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]

    def map(self, rows: int, columns: int) -> ir.TensorMap:
        """The tensor map of boxes of this size."""
        b = self.view.buffer
        sides = [1] * len(b.shape)
        sides[-1] = columns
        for d, size in self.rows:
            sides[d] = min(size, rows)
            rows //= sides[d]
        seen = () if b == self.tensor else tuple(zip(b.shape, b.strides, strict=True))
        return ir.TensorMap(b.name, self.tensor, tuple(sides), columns * b.type.dtype.size, seen)

    def place(self, row: int | ir.Expr, column: int) -> tuple[ir.Buffer, tuple[ir.Expr, ...]]:
        """The operand (tensor, coordinates) of the box that begins at `row` and `column` of the tile."""
        first = [*self.view.tensor.coordinates] if not self.view.tensor.parts else _first_element(self.view)
        for parts, number in ((self.rows, row), (self.columns, column)):
            rest: ir.Expr = build.const(number) if isinstance(number, int) else number
            for n, (d, size) in enumerate(parts):
                first[d] = build.add(first[d], build.mod(rest, size) if n + 1 < len(parts) else rest)
                rest = build.div(rest, size)
        return self.tensor, tuple(first)

    def splits_rows(self, rows: int) -> bool:
        """Whether each aligned group of `rows` neighboring rows is a box."""
        return splits_sides([size for _, size in self.rows], rows)


def splits_sides(sizes: Sequence[int], rows: int) -> bool:
    """Whether each aligned group of `rows` rows is a box, if rows extend along sides of `sizes`, the fastest first."""
    for n, size in enumerate(sizes):
        if n + 1 == len(sizes):
            return True  # the slowest side may be split anywhere
        if rows % size and size % rows:
            return False
        rows = max(1, rows // size)
    return rows == 1


def part_rows(rows: int, blocks: int) -> int | None:
    """The rows of a tile that each block of a cluster copies; None if they are no multiple of the swizzle's 8 rows."""
    return rows // blocks if rows % (blocks * CORE_ROWS) == 0 else None


def _first_element(view: MemoryView) -> list[ir.Expr]:
    return list(view.tensor[(0,) * len(view.shape)].coordinates)


def find_box(
    view: MemoryView, rows: int, columns: int, width: int | str, tensor: ir.Buffer | None = None
) -> TensorBox | str:
    """The boxes of a tile, or the reason why TMA cannot copy it.

    width: columns of a box, or the reason why there is none. tensor: the buffer of which the tile's buffer is a view.
    """
    b = view.buffer
    if len(view.tensor.parts) != 1 or len(view.shape) != 2:
        return "it has no rows and columns"
    if len(b.shape) < 2:
        return f"{b.name} has one dimension"
    size = [prod(flatten_tuple(n)) for n in view.shape]
    along = [_find_box_dimensions(view, n) for n in range(2)] if size == [rows, columns] else [None, None]
    down, across = along
    if down is None or across is None or not across or across[0][0] != len(b.shape) - 1:
        return "its rows and columns are not those of the tensor"
    order = [d for d, _ in (*across[:1], *down)]
    if order != sorted(set(order), reverse=True) or set(order) & {d for d, _ in across[1:]}:
        return "its rows or columns are not neighbors"
    if not _ends_with_tensor(view):
        return "it ends inside of the tensor"
    if isinstance(width, str):
        return width
    if across[0][1] % width:
        return f"its rows have {across[0][1]} neighbors, no multiple of {width}"
    found = TensorBox(view, b if tensor is None else tensor, down, across)
    if not found.splits_rows(min(rows, MOST_ROWS)):
        return f"{MOST_ROWS} of its rows are no box"
    m = found.map(min(rows, MOST_ROWS), width)
    return tensor_map_fault(m, (found.tensor,)) or found


def _find_box_dimensions(view: MemoryView, which: int) -> tuple[tuple[int, int], ...] | None:
    """The (dimension, size) of the buffer that rows (0) or columns (1) extend along; None if they form no box."""
    layouts = view.tensor.parts[0].layouts[1 : 1 + len(view.buffer.shape)]
    found = []
    for n, (size, _) in enumerate(layouts[0][which].flat):
        steps = [layout[which].flat[n][1] for layout in layouts]
        if size > 1:
            if sorted(steps)[-2:] not in ([0, 1], [1]) or sum(steps) != 1:
                return None
            found.append((steps.index(1), size))
    return tuple(found) if found or which == 0 else ((len(layouts) - 1, 1),)


def _ends_with_tensor(view: MemoryView) -> bool:
    """Whether padding of the tile is also outside of the tensor, so that TMA fills it with zeros."""
    b, tensor = view.buffer, view.tensor
    layouts = tensor.parts[0].layouts[1:]
    dimensions = [*zip(tensor.origins[1:], layouts, strict=True)][: len(b.shape)]
    for origin, extent, layout in zip(tensor.origins[1:], tensor.extents, layouts, strict=True):
        ends = (
            extent is not None and difference(start, origin) == n - extent and layout.flat == steps.flat
            for (start, steps), n in zip(dimensions, b.shape, strict=True)
        )
        if extent is not None and not any(ends):
            return False
    return True


def tile_fault(x: MemoryView, target: GpuTarget) -> str | None:
    """Why TMA cannot copy to a tile in shared memory, or None if it can."""
    if target.capability != 90:
        return f"{target.name} has no such copies here: sm_90 has"
    if x.buffer.space is not ir.Space.SHARED or len(x.tensor.parts) != 1 or len(x.shape) != 2:
        return f"{x} is no tile of rows and columns in shared memory"
    if [prod(flatten_tuple(n)) for n in x.shape] != [*x.buffer.shape[-2:]]:
        return f"{x} is not all of the last two dimensions of {x.buffer.name}"
    return panel_fault(x.buffer)


def decompose_box_copy(spec: specs.Move, context: RuleContext) -> tuple[specs.Node, ...]:
    """Decompose a move into TMA copies: one for each panel of 128 bytes and each 256 rows. Raises ArgumentError."""
    (to,), (source,) = spec.outputs, spec.inputs
    done = spec.done
    assert done is not None
    text = f"{to} <- Move({source})"
    if not isinstance(to, MemoryView) or not isinstance(source, MemoryView) or source.buffer.space is not _GLOBAL:
        raise ArgumentError(f"no copy by itself does {text}", expected="from global to shared memory")
    if to.dtype != source.dtype:
        raise ArgumentError(f"no copy by itself does {text}", expected="one type")
    fault = tile_fault(to, context.target)
    tensor = context.tensors.get(source.buffer.name)
    height, columns = to.buffer.shape[-2:]
    box = fault or find_box(source, height, columns, panel_columns(columns, to.dtype), tensor)
    if spec.blocks > 1 and isinstance(box, TensorBox):
        part = part_rows(height, spec.blocks)
        if part is None or not box.splits_rows(part):
            box = f"{spec.blocks} blocks cannot copy a part of its {height} rows each"
    if isinstance(box, str):
        raise ArgumentError(
            f"no copy by itself does {text}: {box}",
            suggestion="copy it without done=, by all threads (cp.async), or give the tensor rows of whole 16 bytes",
        )
    return tuple(_box_copies(spec, to, box, context))


def _box_copies(spec: specs.Move, to: MemoryView, box: TensorBox, context: RuleContext) -> Iterator[specs.Node]:
    assert spec.done is not None
    context.boxed.add(to.buffer.name)
    height, columns = to.buffer.shape[-2:]
    width = panel_columns(columns, to.dtype)
    assert isinstance(width, int)
    part = height // spec.blocks
    begin = build.mul(build.mod(build.var(ir.BLOCK[0]), spec.blocks), part) if spec.blocks > 1 else build.const(0)
    suffix, more = ("_multicast", ((1 << spec.blocks) - 1,)) if spec.blocks > 1 else ("", ())
    for column in range(0, columns, width):
        for first in range(0, part, MOST_ROWS):
            rows, row = min(MOST_ROWS, part - first), build.add(begin, first)
            m = replace(box.map(rows, width), rounds=to.buffer.name in context.rounded)
            number = context.map_number(m)
            name = f"tma_load_{len(box.view.buffer.shape)}{suffix}"
            views = ((to.buffer, to.tensor[row, column].coordinates), box.place(row, column), spec.done.place)
            statement = ir.Invoke(name, views, (number, *more))
            yield specs.Leaf(spec.outputs, spec.inputs, spec.threads, kind="Move", atom=name, statement=statement)


# --- sums to global memory ---------------------------------------------------------------------------------------


def decompose_sums_store(spec: specs.Move, context: RuleContext) -> tuple[specs.Node, ...] | None:
    """Round and store sums in slices via shared memory: stmatrix, fence, barrier, TMA store; None if not applicable."""
    (to,), (sums,) = spec.outputs, spec.inputs
    if not isinstance(to, MemoryView) or not isinstance(sums, RegisterFragment) or to.buffer.space is not _GLOBAL:
        return None
    threads = thread_range(spec.threads)
    room = context.target.max_shared_optin - context.shared
    if threads is None:
        return None
    columns = slice_columns(sums, to.dtype, room)
    box = None if columns is None else find_box(to, *sums.padded, columns, context.tensors.get(to.buffer.name))
    if columns is None or not isinstance(box, TensorBox) or not box.splits_rows(SLICE_ROWS):
        return None
    return tuple(_SumsStore(spec, sums, box, context, columns).nodes())


def slice_columns(sums: RegisterFragment, dtype: DType, room: int) -> int | None:
    """The columns of a slice of sums that fits `room` bytes of shared memory; None if sums cannot be stored by TMA."""
    plan = sums.product
    if not isinstance(plan, WarpgroupPlan) or dtype.bits != 16 or not dtype.is_float:
        return None
    rows = plan.threads.levels[0].size * SLICE_ROWS
    fitting = (n for n in SLICES if plan.columns % n == 0 and rows * n * dtype.size <= room)
    return next(fitting, None)


class _SumsStore:
    """The decomposition of one store of sums."""

    def __init__(
        self, spec: specs.Move, sums: RegisterFragment, box: TensorBox, context: RuleContext, columns: int
    ) -> None:
        assert isinstance(sums.product, WarpgroupPlan)
        self.spec, self.sums, self.plan, self.box, self.columns = spec, sums, sums.product, box, columns
        threads = thread_range(spec.threads)
        assert threads is not None
        self.threads = threads
        dtype = box.view.buffer.type.dtype
        name = f"staged_{len(context.staged)}"
        self.staged = MemoryView.of(name, (threads[1] // WARPGROUP * SLICE_ROWS, columns), dtype, ir.Space.SHARED)
        context.staged.append(self.staged)
        context.shared += self.staged.buffer.bytes
        context.boxed.add(name)
        groups = range(threads[0] // WARPGROUP, sum(threads) // WARPGROUP)
        parts = {g: context.part_number((g * WARPGROUP, WARPGROUP)) for g in groups}
        meet = {g: ir.Invoke(BARRIER_PART, (), (number, WARPGROUP)) for g, number in parts.items()}
        own = [build.when(build.eq(build.var(WARPGROUP_INDEX), g), s) for g, s in meet.items()]
        self.meet = build.block(*(own if len(own) > 1 else meet.values()))  # each warpgroup has its own slice
        self.map = context.map_number(box.map(SLICE_ROWS, columns))
        self.words = ir.Buffer(f"{name}_words", ir.Type(UINT32), (4,), (1,), ir.Space.REGISTER)
        thread = build.sub(build.var(ir.THREAD[0]), threads[0])
        self.group, self.thread = build.div(thread, WARPGROUP), build.mod(thread, WARPGROUP)
        self.leader = build.eq(self.thread, 0)

    def nodes(self) -> Iterator[specs.Node]:
        for i in range(self.plan.rows_each):
            for column in range(0, self.sums.padded[1], self.columns):
                yield self._leaf("", build.when(self.leader, ir.Invoke(BULK_WAIT, (), (0,))))
                yield self._leaf("", self.meet)
                for part in range(0, self.columns, 16):
                    yield self._store_slice(i, column, part)
                yield self._leaf("", ir.Invoke(FENCE_ASYNC, ()))
                yield self._leaf("", self.meet)
                yield self._send_slice(i, column)
        yield self._leaf("", build.when(self.leader, ir.Invoke(BULK_WAIT, (), (0,))))

    def _store_slice(self, i: int, column: int, part: int) -> specs.Leaf:
        """Round the 16 x 16 part that a warp has of a slice and store it by `stmatrix`."""
        dtype = self.staged.dtype
        number, inside = divmod(column + part, self.plan.columns)
        first = (number + self.plan.columns_each * i) * self.plan.columns // 2 + inside // 2
        pairs = []
        for n in range(4):
            both = (build.load(self.sums.buffer, self.sums.registers[first + 2 * n + h]) for h in range(2))
            pair = build.call(f"pair_{dtype.name}", *(build.cast(x, dtype) for x in both))
            pairs.append(build.store(self.words, (n,), pair))
        lane, warp = build.mod(self.thread, WARP), build.div(self.thread, WARP)
        row = build.add(build.mul(build.add(build.mul(self.group, 4), warp), 16), build.mod(lane, 16))
        at = build.add(build.mul(build.div(lane, 16), 8), part)
        views = ((self.staged.buffer, (row, at)), (self.words, (build.const(0),)))
        whole = build.allocate([self.words], build.block(*pairs, ir.Invoke("stmatrix_x4", views)))
        return self._leaf("stmatrix_x4", whole)

    def _send_slice(self, i: int, column: int) -> specs.Leaf:
        row = build.mul(build.add(build.mul(self.group, self.plan.rows_each), i), 64)
        name = f"tma_store_{len(self.box.view.buffer.shape)}"
        views = (self.box.place(row, column), (self.staged.buffer, (build.mul(self.group, 64), build.const(0))))
        send = build.block(ir.Invoke(name, views, (self.map,)), ir.Invoke(BULK_COMMIT, ()))
        return self._leaf(name, build.when(self.leader, send))

    def _leaf(self, atom: str, statement: ir.Stmt) -> specs.Leaf:
        spec = self.spec
        return specs.Leaf(spec.outputs, spec.inputs, spec.threads, kind="Move", atom=atom, statement=statement)


_GLOBAL = ir.Space.GLOBAL
