"""The library's rules for moves by boxes: TMA from global to shared memory, and sums back by way of shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from ..core.dtypes import UINT32
from ..core.errors import ArgumentError
from ..layouts.layout import flatten_tuple
from ..loop_ir import build
from ..loop_ir import nodes as ir
from ..loop_ir.async_operands import tensor_map_fault
from ..loop_ir.atoms import WARP, WARPGROUP
from ..loop_ir.intrinsics import BULK_COMMIT, BULK_WAIT, FENCE_ASYNC
from ..loop_ir.linear_forms import difference, linear_terms
from ..target import GpuTarget
from . import specs
from .panels import panel_columns, panel_fault
from .tile_views import MemoryView, RegisterFragment, WarpgroupPlan
from .warpgroup_products import thread_range

MOST_ROWS = 256
"""The longest side of a box."""
SLICE = 64
"""Columns of sums that a warpgroup stores at a time."""
_ROW, _COLUMN = build.var("%row"), build.var("%column")


@dataclass(slots=True)
class RuleContext:
    """What rules share while a program is decomposed.

    Attributes:
        registers: of a thread at first.
        maps: of the boxes that travel so far. parts: the threads that meet at each barrier of a part, from 1 on.
        shared: bytes of shared memory that are taken. staged: tiles there that rules have made.
    """

    target: GpuTarget
    registers: int
    maps: list[ir.TensorMap] = field(default_factory=list)
    parts: list[tuple[int, int]] = field(default_factory=list)
    boxed: set[str] = field(default_factory=set)
    shared: int = 0
    staged: list[MemoryView] = field(default_factory=list)

    def map_number(self, m: ir.TensorMap) -> int:
        """The position of a map among those of the kernel."""
        if m not in self.maps:
            self.maps.append(m)
        return self.maps.index(m)

    def part_number(self, threads: tuple[int, int]) -> int:
        """The number of the barrier of some threads. Raises ArgumentError where there are no more."""
        if threads not in self.parts:
            self.parts.append(threads)
        if len(self.parts) > 15:
            raise ArgumentError("too many parts of a block meet", expected="at most 15", found=str(len(self.parts)))
        return self.parts.index(threads) + 1


@dataclass(frozen=True, slots=True)
class TensorBox:
    """How a tile of rows and columns of global memory travels.

    Attributes:
        view: the tile. row: the dimension of its buffer along which rows lie; columns lie along the last one.
    """

    view: MemoryView
    row: int
    rows: int
    columns: int

    def map(self, rows: int, columns: int) -> ir.TensorMap:
        """The map of boxes of so many rows and columns."""
        b = self.view.buffer
        sides = [1] * len(b.shape)
        sides[self.row], sides[-1] = rows, columns
        return ir.TensorMap(b.name, b, tuple(sides), columns * b.type.dtype.size)

    def place(self, row: int | ir.Expr, column: int) -> tuple[ir.Buffer, tuple[ir.Expr, ...]]:
        """The element of the tensor at which a box begins."""
        first = list(self.view.tensor[0, 0].coordinates)
        first[self.row] = build.add(first[self.row], row)
        first[-1] = build.add(first[-1], column)
        return self.view.buffer, tuple(first)


def find_box(view: MemoryView, rows: int, columns: int) -> TensorBox | str:
    """How a tile travels, or why TMA does not take it."""
    b = view.buffer
    if len(view.tensor.parts) != 1 or len(view.shape) != 2:
        return "it has no rows and columns"
    if len(b.shape) < 2:
        return f"{b.name} has one dimension"
    at = view.tensor[_ROW, _COLUMN]
    terms = [linear_terms(c)[0] for c in at.coordinates]
    along = [[d for d, t in enumerate(terms) if v in t] for v in (_ROW, _COLUMN)]
    size = [prod(flatten_tuple(n)) for n in view.shape]
    if size[0] == 1:
        along[0] = [len(b.shape) - 2]
    if size != [rows, columns] or along[1] != [len(b.shape) - 1] or len(along[0]) != 1 or along[0] == along[1]:
        return "its rows and columns are not those of the tensor"
    if any(t.get(v, 1) != 1 for t in terms for v in (_ROW, _COLUMN)):
        return "its rows or columns are not neighbors"
    for origin, extent in zip(at.origins[1:], at.extents, strict=True):
        ends = (difference(origin, c) == 0 and extent == n for c, n in zip(at.coordinates, b.shape, strict=True))
        if extent is not None and not any(ends):
            return "it ends inside of the tensor"
    found = TensorBox(view, along[0][0], rows, columns)
    width = panel_columns(columns, b.type.dtype)
    if isinstance(width, str):
        return width
    return tensor_map_fault(found.map(min(rows, MOST_ROWS), width), (b,)) or found


def tile_fault(x: MemoryView, target: GpuTarget) -> str | None:
    """Why boxes cannot come to a tile in shared memory."""
    if target.capability != 90:
        return f"{target.name} has no such copies here: sm_90 has"
    if x.buffer.space is not ir.Space.SHARED or len(x.tensor.parts) != 1 or len(x.shape) != 2:
        return f"{x} is no tile of rows and columns in shared memory"
    if [prod(flatten_tuple(n)) for n in x.shape] != [*x.buffer.shape[-2:]]:
        return f"{x} is not all of the last two dimensions of {x.buffer.name}"
    return panel_fault(x.buffer)


def decompose_box_copy(spec: specs.Move, context: RuleContext) -> tuple[specs.Node, ...]:
    """One copy for each panel of 128 bytes, and for each 256 rows."""
    (to,), (source,) = spec.outputs, spec.inputs
    done = spec.done
    assert done is not None
    text = f"{to} <- Move({source})"
    if not isinstance(to, MemoryView) or not isinstance(source, MemoryView) or source.buffer.space is not _GLOBAL:
        raise ArgumentError(f"no copy by itself does {text}", expected="from global to shared memory")
    if to.dtype != source.dtype:
        raise ArgumentError(f"no copy by itself does {text}", expected="one type")
    fault = tile_fault(to, context.target)
    box = find_box(source, *to.buffer.shape[-2:]) if fault is None else fault
    if isinstance(box, str):
        raise ArgumentError(
            f"no copy by itself does {text}: {box}",
            suggestion="copy it without done=, by all threads (cp.async), or give the tensor rows of whole 16 bytes",
        )
    return tuple(_box_copies(spec, to, box, context))


def _box_copies(spec: specs.Move, to: MemoryView, box: TensorBox, context: RuleContext) -> Iterator[specs.Node]:
    assert spec.done is not None
    context.boxed.add(to.buffer.name)
    width = panel_columns(box.columns, to.dtype)
    assert isinstance(width, int)
    for column in range(0, box.columns, width):
        for row in range(0, box.rows, MOST_ROWS):
            rows = min(MOST_ROWS, box.rows - row)
            number = context.map_number(box.map(rows, width))
            name = f"tma_load_{len(box.view.buffer.shape)}"
            views = ((to.buffer, to.tensor[row, column].coordinates), box.place(row, column), spec.done.place)
            statement = ir.Invoke(name, views, (number,))
            yield specs.Leaf(spec.outputs, spec.inputs, spec.threads, kind="Move", atom=name, statement=statement)


# --- sums to global memory ---------------------------------------------------------------------------------------


def decompose_sums_store(spec: specs.Move, context: RuleContext) -> tuple[specs.Node, ...] | None:
    """Slices of sums, rounded, through shared memory into boxes: stmatrix, fence, barrier, TMA; None: not these."""
    (to,), (sums,) = spec.outputs, spec.inputs
    if not isinstance(to, MemoryView) or not isinstance(sums, RegisterFragment) or to.buffer.space is not _GLOBAL:
        return None
    plan, threads = sums.product, thread_range(spec.threads)
    columns = min(SLICE, sums.padded[1])
    if not isinstance(plan, WarpgroupPlan) or to.dtype.bits != 16 or not to.dtype.is_float or sums.padded[1] % columns:
        return None
    if columns % 16 or plan.columns % columns or threads is None:
        return None
    box = find_box(to, *sums.padded)
    groups = threads[1] // WARPGROUP
    slot = groups * 64 * columns * to.dtype.size
    room = context.target.max_shared_optin - context.shared
    if isinstance(box, str) or slot > room or isinstance(panel_columns(columns, to.dtype), str):
        return None
    return tuple(_SumsStore(spec, sums, plan, box, context, columns).nodes())


class _SumsStore:
    """One decomposition."""

    def __init__(
        self, spec: specs.Move, sums: RegisterFragment, plan: WarpgroupPlan, box: TensorBox, context: RuleContext,
        columns: int,
    ) -> None:  # fmt: skip
        self.spec, self.sums, self.plan, self.box, self.columns = spec, sums, plan, box, columns
        threads = thread_range(spec.threads)
        assert threads is not None
        self.threads = threads
        dtype = box.view.buffer.type.dtype
        name = f"staged_{len(context.staged)}"
        self.staged = MemoryView.of(name, (threads[1] // WARPGROUP * 64, columns), dtype, ir.Space.SHARED)
        context.staged.append(self.staged)
        context.shared += self.staged.buffer.bytes
        context.boxed.add(name)
        self.part = specs.SyncPart(threads, context.part_number(threads))
        self.map = context.map_number(box.map(64, columns))
        self.words = ir.Buffer(f"{name}_words", ir.Type(UINT32), (4,), (1,), ir.Space.REGISTER)
        thread = build.sub(build.var(ir.THREAD[0]), threads[0])
        self.group, self.thread = build.div(thread, WARPGROUP), build.mod(thread, WARPGROUP)
        self.leader = build.eq(self.thread, 0)

    def nodes(self) -> Iterator[specs.Node]:
        for i in range(self.plan.rows_each):
            for column in range(0, self.sums.padded[1], self.columns):
                yield self._leaf("", build.when(self.leader, ir.Invoke(BULK_WAIT, (), (0,))))
                yield self.part
                for part in range(0, self.columns, 16):
                    yield self._store_slice(i, column, part)
                yield self._leaf("", ir.Invoke(FENCE_ASYNC, ()))
                yield self.part
                yield self._send_slice(i, column)
        yield self._leaf("", build.when(self.leader, ir.Invoke(BULK_WAIT, (), (0,))))

    def _store_slice(self, i: int, column: int, part: int) -> specs.Leaf:
        """A warp's 16 x 16 of a slice: rounded in pairs, then `stmatrix`."""
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
