"""Decompose products of warps: load fragments from shared memory, then multiply them by `mma`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np

from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8, UINT32, DType
from ...core.errors import ArgumentError
from ...layouts import Layout, complement, compose
from ...layouts.layout import IntTuple, flatten_tuple
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import TFLOAT32, WARP, Atom
from ...loop_ir.instructions import TF32_BITS
from ...target import GpuTarget
from .. import specs
from ..builder.tile_views import MemoryView, ProductPlan, RegisterFragment, enumerate_tv, register_tile
from ..tensors import DTYPE_SPELLING, ThreadTensor
from .match_atoms import Elements, find_move, find_product

ROWS, COLUMNS = 16, 8
"""The rows and columns of the product of a warp, m16n8."""
DEPTH_BYTES = 32
"""The bytes of a row of a factor in one product: m16n8k16 for 16-bit elements, m16n8k32 for bytes."""
SUMS = {FLOAT16: FLOAT32, BFLOAT16: FLOAT32, INT8: INT32, UINT8: INT32}
"""The supported types of factors, and of their sums. INT8 and UINT8 factors may be mixed."""
ROUNDED = "tf32"
"""The value of `MatMul.products` that requests float32 factors rounded to tf32."""


def product_depth(dtype: DType) -> int:
    """The number of terms (K) of one instruction."""
    return DEPTH_BYTES // dtype.size


def plan_product(shape: tuple[IntTuple, IntTuple], by: ThreadTensor) -> ProductPlan:
    """The division of an accumulator of `shape` among the warps `by`.

    Raises:
        ArgumentError: they cannot divide it.
    """
    rows, columns = (prod(flatten_tuple(n)) for n in shape)
    warps = _count_warps(by)
    inner = flatten_tuple(shape[1])
    step = prod(inner[:-1])  # an instruction covers columns of the last part, so that a thread has all other parts
    if rows % (ROWS * warps[0]) or inner[-1] % COLUMNS or columns % (COLUMNS * warps[1]):
        raise ArgumentError(
            f"{by} cannot divide sums of {rows} x {columns}",
            expected=f"multiples of {ROWS * warps[0]} rows and of {COLUMNS * warps[1]} columns",
        )
    pair = 2 if columns % (2 * COLUMNS * warps[1]) == 0 and (step == 1 or flatten_tuple(shape[1])[0] % 2 == 0) else 1
    tile = Layout(COLUMNS, step)
    if pair == 2:
        tile = Layout((COLUMNS, 2), (step, COLUMNS if step == 1 else 1))
    return ProductPlan(tile, pair, rows // (ROWS * warps[0]), columns // (COLUMNS * pair * warps[1]), warps, by)


def accumulator(
    name: str, shape: tuple[IntTuple, IntTuple], plan: ProductPlan, dtype: DType = FLOAT32
) -> RegisterFragment:
    """An accumulator with the layout of `mma`: (thread, value) -> element."""
    rows, columns = (prod(flatten_tuple(n)) for n in shape)
    step = plan.columns.flat[0][1] * rows
    rest = compose(
        complement(plan.columns, columns), Layout((plan.columns_each, plan.warps[1]), (1, plan.columns_each))
    )
    mine, others = _scale_layout(rest[0], rows), _scale_layout(rest[1], rows)
    threads = [(4, 2 * step), (8, 1), *others, (plan.warps[0], ROWS * plan.rows_each)]
    pairs = [(2, plan.columns.flat[1][1] * rows)] if plan.pair == 2 else []
    values = [(2, step), (2, COLUMNS), *pairs, *mine, (plan.rows_each, ROWS)]
    tv = _make_tv_layout(threads, values)
    return register_tile(name, dtype, shape, (rows, columns), tv, product=plan)


def left_fragment(name: str, shape: tuple[int, int], dtype: DType, by: ThreadTensor) -> RegisterFragment:
    """A left factor with the layout of `mma`; all warps of a row of warps hold the same elements."""
    rows, columns = shape
    warps = _count_warps(by)
    depth, pack = product_depth(dtype), 4 // dtype.size
    if rows % (ROWS * warps[0]) or columns % depth:
        raise ArgumentError(
            f"{by} cannot divide a factor of {rows} x {columns}",
            expected=f"multiples of {ROWS * warps[0]} rows and of {depth} columns",
        )
    each = rows // (ROWS * warps[0])
    threads = [(4, pack * rows), (8, 1), (warps[1], 0), (warps[0], ROWS * each)]
    values = [(pack, rows), (2, 8), (2, 4 * pack * rows), (columns // depth, depth * rows), (each, ROWS)]
    tv = _make_tv_layout(threads, values)
    return register_tile(name, dtype, shape, shape, tv, per_register=pack, register=UINT32)


def decompose_matmul(spec: specs.MatMul, target: GpuTarget) -> tuple[specs.Node, ...]:
    """Decompose a product into loads of fragments and `mma`, for every `product_depth` columns of the factors."""
    (total,), (a, b) = spec.outputs, spec.inputs
    text = f"{total} <- MatMul({a}, {b})"
    if (
        not isinstance(total, RegisterFragment)
        or not isinstance(total.product, ProductPlan)
        or not isinstance(b, MemoryView)
    ):
        raise ArgumentError(f"no rule decomposes {text}", expected="sums of k.accumulator, and B in shared memory")
    plan = total.product
    check_factors(spec, text, target)
    depth = product_depth(a.dtype)
    sizes = [prod(flatten_tuple(n)) for x in (a, b) for n in x.shape]
    if len(sizes) != 4 or [sizes[0], sizes[2]] != [*total.padded] or sizes[1] != sizes[3] or sizes[1] % depth:
        raise ArgumentError(
            f"the sizes of {text} disagree", expected=f"M x K and N x K, K a multiple of {depth}",
            found=" and ".join(str(x.shape) for x in (a, b)),
        )  # fmt: skip
    rule = _Product(total, plan, a, b, target, text)
    return tuple(rule.nodes(sizes[1] // depth))


def check_factors(spec: specs.MatMul, text: str, target: GpuTarget) -> None:
    """Raise ArgumentError if no product supports the types of the factors, or if sums have another type."""
    (total,), (a, b) = spec.outputs, spec.inputs
    types = {**SUMS, FLOAT32: FLOAT32} if spec.products == ROUNDED else SUMS
    known = {a.dtype, b.dtype} <= set(types) and (a.dtype == b.dtype or types[a.dtype] == types[b.dtype] == INT32)
    if known and types[a.dtype] == total.dtype:
        return
    single = a.dtype == b.dtype == FLOAT32
    raise ArgumentError(
        f"no tensor-core instruction of {target.name} does {text}",
        expected="factors of one type, " + " or ".join(DTYPE_SPELLING[t] for t in SUMS),
        found=f"{DTYPE_SPELLING[a.dtype]} and {DTYPE_SPELLING[b.dtype]}",
        suggestion=f"k.matmul(products='{ROUNDED}') rounds float32 factors" if single else "",
    )


class _Product:
    """The decomposition of one product."""

    def __init__(
        self, total: RegisterFragment, plan: ProductPlan, a: MemoryView | RegisterFragment, b: MemoryView,
        target: GpuTarget, text: str,
    ) -> None:  # fmt: skip
        self.total, self.plan, self.a, self.b, self.target, self.text = total, plan, a, b, target, text
        warp = build.div(build.var(ir.THREAD[0]), WARP)
        self.lane = build.mod(build.var(ir.THREAD[0]), WARP)
        self.warp = build.div(warp, plan.warps[1]), build.mod(warp, plan.warps[1])
        left, right_dtype = (TFLOAT32 if x.dtype == FLOAT32 else x.dtype for x in (a, b))
        self.depth, self.views = product_depth(left), _fragment_views(left)
        self.left = _make_factor_fragment(f"{total.name}_left", left, ROWS, self.views.left_tv, plan.rows_each)
        right = (COLUMNS, self.views.right_one_tv) if plan.pair == 1 else (2 * COLUMNS, self.views.right_tv)
        self.right = _make_factor_fragment(f"{total.name}_right", right_dtype, *right, plan.columns_each)
        self.atoms: dict[tuple[Layout, ...], Atom] = {}

    def nodes(self, steps: int) -> Iterator[specs.Node]:
        tiles = self.a.tile(ROWS, self.depth) if isinstance(self.a, MemoryView) else None
        right = self.b.tile(self.plan.columns, self.depth)
        if tiles is not None:
            yield specs.Allocate(self.left)
        yield specs.Allocate(self.right)
        for step in range(steps):
            if tiles is not None:
                for i in range(self.plan.rows_each):
                    at = build.add(build.mul(self.warp[0], self.plan.rows_each), i)
                    yield from self._load(self.left, i, tiles[at, step], self.views.left)
            for p in range(self.plan.columns_each):
                at = build.add(build.mul(self.warp[1], self.plan.columns_each), p)
                views = self.views.right if self.plan.pair == 2 else self.views.right_one
                yield from self._load(self.right, p, right[at, step], views)
            for i in range(self.plan.rows_each):
                for p in range(self.plan.columns_each):
                    for j in range(self.plan.pair):
                        yield self._multiply(i, p, j, step)

    def _load(
        self, to: RegisterFragment, number: int, tile: MemoryView, views: tuple[Layout, Layout]
    ) -> Iterator[specs.Leaf]:
        """Load a fragment from a tile in shared memory, transposed if the factor is not contiguous along K."""
        rows = to.padded[0]
        across = tile.tensor.parts[0].layouts[0][1].flat[0][1] != 1
        source = views[across]
        part = _slice_fragment(to, number, rows, self.depth, to.tv)
        text = f"{part} <- Move({tile})"
        if to.dtype.size != 2 and across:
            kind = "bytes" if to.dtype.size == 1 else DTYPE_SPELLING[FLOAT32]
            raise ArgumentError(
                f"no instruction does {text}", expected=f"{kind} that lie along the columns of a factor", found="across"
            )
        atom = self._find_load(text, part, source, rows)
        view = MemoryView(tile.buffer, tile.tensor.partition(source)[self.lane])
        place = view.tensor[0].coordinates
        where = (build.const(part.registers[0]),)
        statement = ir.Invoke(atom.name, ((to.buffer, where), (tile.buffer, place)))
        yield specs.Leaf((part,), (view,), self.plan.threads, kind="Move", atom=atom.name, statement=statement)
        if to.dtype == TFLOAT32:
            places = [(build.const(register),) for register in part.registers]
            rounded = [build.call(TF32_BITS, build.load(to.buffer, *place)) for place in places]
            stores = (build.store(to.buffer, place, x) for place, x in zip(places, rounded, strict=True))
            yield specs.Leaf(
                (part,), (part,), self.plan.threads, kind="Map", atom="tf32", statement=build.block(*stores)
            )

    def _multiply(self, i: int, p: int, j: int, step: int) -> specs.Leaf:
        number = j + self.plan.pair * (p + self.plan.columns_each * i)
        total = _slice_fragment(self.total, number, ROWS, COLUMNS, _SUMS)
        right = _slice_fragment(self.right, j + self.plan.pair * p, COLUMNS, self.depth, self.views.right_one_tv)
        if isinstance(self.a, RegisterFragment):
            left, buffer = self._own_left(i, step), self.a.buffer
        else:
            left, buffer = _slice_fragment(self.left, i, ROWS, self.depth, self.views.left_tv), self.left.buffer
        atom = self._find_product(total, left, right)
        operands = tuple(
            (memory, (build.const(part.registers[0]),))
            for memory, part in ((self.total.buffer, total), (buffer, left), (self.right.buffer, right))
        )
        statement = ir.Invoke(atom.name, operands)
        return specs.Leaf(
            (total,), (left, right), self.plan.threads, kind="MatMul", atom=atom.name, statement=statement
        )

    def _find_load(self, text: str, part: RegisterFragment, source: Layout, rows: int) -> Atom:
        """The move that loads a fragment; it is proven once for fragments with the same layout."""
        key = part.tv, source
        if key not in self.atoms:
            elements = [_regroup_as_halfwords(x, rows, part.dtype) for x in (part.elements, enumerate_tv(source))]
            self.atoms[key] = find_move(text, elements[0], elements[1], ir.Space.SHARED, self.target.name)
        return self.atoms[key]

    def _find_product(self, *parts: RegisterFragment) -> Atom:
        """The product of fragments; it is proven once for fragments with the same layouts."""
        key = tuple(part.tv for part in parts)
        if key not in self.atoms:
            views, dtypes = [part.elements for part in parts], [part.dtype for part in parts]
            self.atoms[key] = find_product(self.text, views, dtypes, self.target.name)
        return self.atoms[key]

    def _own_left(self, i: int, step: int) -> RegisterFragment:
        """The fragment of a left factor in registers. Raises ArgumentError if it does not have the layout of `mma`."""
        a = self.a
        assert isinstance(a, RegisterFragment)
        wanted = left_fragment(a.name, a.padded, a.dtype, self.plan.threads)
        if a.tv != wanted.tv and not (
            a.elements.shape == wanted.elements.shape and (a.elements == wanted.elements).all()
        ):
            raise ArgumentError(f"{a} does not lie as a left factor", expected="a tile of k.fragment(..., 'A')")
        number = step + i * (a.padded[1] // self.depth)
        return _slice_fragment(a, number, ROWS, self.depth, self.views.left_tv)


# --- layouts -----------------------------------------------------------------------------------------------------

_SUMS = Layout(((4, 8), (2, 2)), ((32, 1), (16, 8)))


@dataclass(frozen=True, slots=True)
class FragmentViews:
    """The layouts of the fragments of factors of one type, for `ldmatrix` and `mma`.

    Attributes:
        left, right, right_one: the 16 bytes to which each lane points, in a tile of 16 rows, of 16 columns and of 8:
            (contiguous along K, transposed).
        left_tv, right_tv, right_one_tv: the elements that lanes hold; a register has 4 contiguous bytes of a row.
    """

    left: tuple[Layout, Layout]
    right: tuple[Layout, Layout]
    right_one: tuple[Layout, Layout]
    left_tv: Layout
    right_tv: Layout
    right_one_tv: Layout


@cache
def _fragment_views(dtype: DType) -> FragmentViews:
    pack, row = 4 // dtype.size, 16 // dtype.size  # elements in a register, and in 16 bytes
    tile, half = 16 * row, 8 * row  # elements in half a tile of 16 rows, and of 8
    return FragmentViews(
        (Layout(((8, 2, 2), row), ((1, 8, tile), 16)), Layout(((8, 2, 2), row), ((16, 8, tile), 1))),
        (Layout(((8, 2, 2), row), ((1, tile, 8), 16)), Layout(((8, 2, 2), row), ((16, tile, 8), 1))),
        (Layout(((8, 2, 2), row), ((1, half, 0), 8)), Layout(((8, 2, 2), row), ((8, half, 0), 1))),
        Layout(((4, 8), (pack, 2, 2)), ((16 * pack, 1), (16, 8, tile))),
        Layout(((4, 8), (pack, 2, 2)), ((16 * pack, 1), (16, tile, 8))),
        Layout(((4, 8), (pack, 2)), ((8 * pack, 1), (8, half))),
    )


def _regroup_as_halfwords(elements: Elements, rows: int, dtype: DType) -> Elements:
    """Renumber elements in units of 16 bits, as `ldmatrix` moves them: pairs of bytes, or halves of 32-bit elements."""
    if dtype.size == 2:
        return elements
    if dtype.size == 4:
        row, column = elements % rows, elements // rows
        both: Elements = np.stack([row + (2 * column + n) * rows for n in range(2)], axis=2)
        return both.reshape(len(elements), -1)
    first, second = elements[:, 0::2], elements[:, 1::2]
    if (second - first != rows).any() or (first // rows % 2).any():
        raise ArgumentError("bytes are moved two by two", expected="neighbors of a row")
    pairs: Elements = first % rows + first // rows // 2 * rows
    return pairs


def _make_factor_fragment(name: str, dtype: DType, rows: int, tv: Layout, count: int) -> RegisterFragment:
    """Registers for `count` fragments of one instruction, each with the layout `tv`."""
    shape, pack = (rows, product_depth(dtype)), 4 // dtype.size
    one = register_tile(name, dtype, shape, shape, tv, per_register=pack, group=WARP, register=UINT32)
    numbers = tuple(v // pack for v in range(count * one.values))
    return replace(one, buffer=replace(one.buffer, shape=(len(numbers) // pack,)), registers=numbers)


def _slice_fragment(whole: RegisterFragment, number: int, rows: int, columns: int, tv: Layout) -> RegisterFragment:
    """The fragment with index `number` of `whole`: the registers that one instruction uses."""
    registers = whole.registers[number * tv[1].size :][: tv[1].size]
    return replace(
        whole, shape=(rows, columns), padded=(rows, columns), tv=tv, registers=registers, group=WARP, product=None
    )


def _count_warps(by: ThreadTensor) -> tuple[int, int]:
    """The number of warps along rows and columns. Raises ArgumentError if `by` has no such warps."""
    good = len(by.parts) == 2 and by.kind == "thread" and by.levels[1].flat == ((WARP, 1),)
    sizes = [n.size for n in by.levels[0].modes] if good else []
    if not good or len(sizes) > 2 or build.integer(by.offset) != 0:
        raise ArgumentError(f"{by} are no warps", expected="one or two dimensions of [32:1].thread, from thread 0 on")
    rows, columns = (*sizes, 1)[:2]
    strides = [s for _, s in by.levels[0].flat]
    expected = [columns * WARP, WARP][: len(sizes)]
    if any(s != e for s, e, n in zip(strides, expected, sizes, strict=True) if n > 1):
        raise ArgumentError(f"{by} are not in order", expected=f"strides {tuple(expected)}", found=str(tuple(strides)))
    return rows, columns


def _scale_layout(layout: Layout, by: int) -> list[tuple[int, int]]:
    return [(size, stride * by) for size, stride in layout.flat]


def _make_tv_layout(threads: list[tuple[int, int]], values: list[tuple[int, int]]) -> Layout:
    """The layout of (size, stride) of threads and of values, without those of size 1."""
    parts = [[m for m in modes if m[0] > 1] or [(1, 0)] for modes in (threads, values)]
    shape, stride = (tuple(p[0][k] if len(p) == 1 else tuple(m[k] for m in p) for p in parts) for k in (0, 1))
    return Layout(shape, stride)
