"""Decompose products of warpgroups into `wgmma` on tiles in shared memory; the left factor may be in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from ...core.dtypes import BOOL, FLOAT32, UINT32, DType
from ...core.errors import ArgumentError
from ...layouts import Layout
from ...layouts.layout import IntTuple, flatten_tuple
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import TFLOAT32, WARPGROUP
from ...loop_ir.intrinsics import GROUP_SUFFIXES, WGMMA_COMMIT, WGMMA_FENCE
from ...loop_ir.linear_forms import linear_terms
from ...target import GpuTarget
from .. import specs
from ..builder.tile_views import MemoryView, RegisterFragment, WarpgroupPlan, register_tile
from ..tensors import ThreadTensor
from .match_atoms import Elements, find_group_product
from .panels import panel_fault
from .tensor_core_products import check_factors

ROWS, DEPTH, MOST_COLUMNS = 64, 16, 256
"""The sizes of `wgmma` m64nNk16 with 16-bit factors, and the largest N; with bytes, K is twice as large."""
WARPGROUP_INDEX = "warpgroup"
"""The name of the variable with the index of a thread's warpgroup, which is uniform in a warp."""


def thread_range(by: ThreadTensor) -> tuple[int, int] | None:
    """The threads as (first, count); None if they are not contiguous, or if their offset is symbolic."""
    if by.kind != "thread" or build.integer(by.offset) is None:
        return None
    numbers = sorted(by.offsets())
    return (numbers[0], len(numbers)) if numbers == [*range(numbers[0], numbers[0] + len(numbers))] else None


def group_depth(dtype: DType) -> int:
    """The number of terms (K) of one instruction."""
    return 2 * DEPTH // dtype.size


def are_warpgroups(by: object) -> bool:
    """Whether `by` is a tensor of warpgroups: `[n].[128].thread`."""
    return isinstance(by, ThreadTensor) and len(by.parts) == 2 and by.levels[1].flat == ((WARPGROUP, 1),)


def plan_warpgroups(shape: tuple[IntTuple, IntTuple], by: ThreadTensor, target: GpuTarget) -> WarpgroupPlan:
    """The division of an accumulator of `shape` among the warpgroups `by`. Raises ArgumentError if impossible."""
    if target.capability != 90:
        raise ArgumentError(f"{by} are warpgroups, which multiply only on sm_90", found=target.name)
    found = thread_range(by)
    if found is None or found[0] % WARPGROUP or len(by.levels[0].modes) != 1:
        raise ArgumentError(f"{by} are no neighboring warpgroups", expected="[n].[128].thread")
    if not all(isinstance(n, int) for n in shape):
        raise ArgumentError(f"{by} cannot divide sums of {shape}", expected="rows and columns, not hierarchical")
    rows, columns = (prod(flatten_tuple(n)) for n in shape)
    groups = by.levels[0].size
    width = instruction_columns(columns)
    if rows % (ROWS * groups) or not width:
        raise ArgumentError(
            f"{by} cannot divide sums of {rows} x {columns}",
            expected=f"multiples of {ROWS * groups} rows and of 8 columns",
        )
    return WarpgroupPlan(width, columns // width, rows // (ROWS * groups), by)


def instruction_columns(columns: int) -> int:
    """The columns of the widest instruction that divides `columns`; 0 if none does."""
    return next((n for n in range(MOST_COLUMNS, 0, -8) if columns % n == 0), 0)


def warpgroup_accumulator(
    name: str, shape: tuple[IntTuple, IntTuple], plan: WarpgroupPlan, dtype: DType = FLOAT32
) -> RegisterFragment:
    """An accumulator with the layout of `wgmma`."""
    rows, columns = (prod(flatten_tuple(n)) for n in shape)
    values = [(2, rows), (2, 8), (plan.columns // 8, 8 * rows), (plan.columns_each, plan.columns * rows)]
    tv = _make_warpgroup_layout(plan, 2 * rows, [*values, (plan.rows_each, ROWS)])
    first = build.integer(plan.threads.offset)
    assert first is not None
    return register_tile(name, dtype, shape, (rows, columns), tv, first=first, product=plan)


def group_left_fragment(
    name: str, shape: tuple[int, int], dtype: DType, by: ThreadTensor, target: GpuTarget
) -> RegisterFragment:
    """A left factor in registers with the layout of `wgmma`."""
    rows, columns = shape
    plan = plan_warpgroups((rows, 8), by, target)
    if columns % DEPTH:
        raise ArgumentError(f"{by} cannot divide a factor of {rows} x {columns}", expected=f"multiples of {DEPTH}")
    values = [(2, rows), (2, 8), (2, 8 * rows), (columns // DEPTH, DEPTH * rows), (plan.rows_each, ROWS)]
    first = build.integer(by.offset)
    assert first is not None
    tv = _make_warpgroup_layout(plan, 2 * rows, values)
    return register_tile(name, dtype, shape, shape, tv, per_register=2, first=first, register=UINT32)


def decompose_group_matmul(spec: specs.MatMul, target: GpuTarget) -> tuple[specs.Node, ...]:
    """Decompose a product into a group of `wgmma`, which must be waited for before the sums are used."""
    (total,), (a, b) = spec.outputs, spec.inputs
    text = f"{total} <- MatMul({a}, {b})"
    assert isinstance(total, RegisterFragment)
    for x in (a, b):
        if isinstance(x, MemoryView) and (fault := panel_fault(x.buffer)) is not None:
            raise ArgumentError(f"no descriptor leads to a factor of {text}: {fault}")
    if not isinstance(b, MemoryView) or b.buffer.space is not ir.Space.SHARED:
        raise ArgumentError(f"no rule decomposes {text}", expected="B in shared memory")
    check_factors(spec, text, target)
    sizes = [prod(flatten_tuple(n)) for x in (a, b) for n in x.shape]
    depth = group_depth(a.dtype)
    if len(sizes) != 4 or [sizes[0], sizes[2]] != [*total.padded] or sizes[1] != sizes[3] or sizes[1] % depth:
        raise ArgumentError(
            f"the sizes of {text} disagree", expected=f"M x K and N x K, K a multiple of {depth}",
            found=" and ".join(str(x.shape) for x in (a, b)),
        )  # fmt: skip
    return tuple(_emit_wgmma_products(spec, total, a, b, sizes[1] // depth, text))


def _emit_wgmma_products(
    spec: specs.MatMul, total: RegisterFragment, a: MemoryView | RegisterFragment, b: MemoryView, steps: int, text: str
) -> Iterator[specs.Node]:
    plan = total.product
    assert isinstance(plan, WarpgroupPlan)
    held = isinstance(a, RegisterFragment)
    if isinstance(a, MemoryView) and a.buffer.space is not ir.Space.SHARED:
        raise ArgumentError(f"no rule decomposes {text}", expected="A in shared memory, or in registers")
    lies = tuple(n for n, x in ((1, a), (2, b)) if isinstance(x, MemoryView) and is_across(x))
    if lies and b.dtype.size != 2:
        raise ArgumentError(f"no rule decomposes {text}", expected="factors that lie along K, if not of 16 bits")
    suffix = f"{'_registers' if held else ''}{next(name for name, n in GROUP_SUFFIXES.items() if n == lies)}"
    yield _make_intrinsic_leaf(spec, WGMMA_FENCE)
    for step in range(steps):
        for i in range(plan.rows_each):
            left, view = _left_operand(a, plan, i, step, text)
            for j in range(plan.columns_each):
                number = j + plan.columns_each * i
                sums = _slice_fragment(total, number * plan.columns // 2, ROWS, plan.columns)
                mine = None if left is None else left.elements
                left_type, right_type = (TFLOAT32 if x.dtype == FLOAT32 else x.dtype for x in (a, b))
                atom = find_group_product(text, sums.elements, mine, (total.dtype, left_type, right_type))
                rows = b.tensor.tile(plan.columns, group_depth(b.dtype))[j, step][0, 0].coordinates
                more = build.const(step > 0, BOOL) if spec.first else build.TRUE
                operands = ((total.buffer, (build.const(sums.registers[0]),)), view, (b.buffer, rows))
                statement = ir.Invoke(f"{atom.name}{suffix}", operands, (), (more,))
                yield specs.Leaf(
                    (sums,), (left or a, b), spec.threads, kind="MatMul", atom=statement.name, statement=statement
                )
    yield _make_intrinsic_leaf(spec, WGMMA_COMMIT)


def _left_operand(
    a: MemoryView | RegisterFragment, plan: WarpgroupPlan, i: int, step: int, text: str
) -> tuple[RegisterFragment | None, tuple[ir.Buffer, tuple[ir.Expr, ...]]]:
    """The part of a left factor for one instruction: (its registers, or None in memory; the operand)."""
    if isinstance(a, MemoryView):
        first = build.integer(plan.threads.offset)
        assert first is not None
        group = build.sub(build.var(WARPGROUP_INDEX), first // WARPGROUP)
        at = build.add(build.mul(group, plan.rows_each), i)
        return None, (a.buffer, a.tensor.tile(ROWS, group_depth(a.dtype))[at, step][0, 0].coordinates)
    if a.dtype.size != 2:
        raise ArgumentError(f"no rule decomposes {text}", expected="a left factor in registers of 16 bits")
    fits = a.per_register == 2 and a.first == build.integer(plan.threads.offset)
    number = step + i * (a.padded[1] // DEPTH)
    part = _slice_fragment(a, number * 8, ROWS, DEPTH) if fits and a.values >= 8 * (number + 1) else None
    wanted = None if part is None else _expected_left(a, plan, i, step)
    if part is None or wanted is None or not np.array_equal(_slice_elements(a, number * 8, 8), wanted):
        raise ArgumentError(
            f"{a} does not lie as a left factor of {text}",
            expected="a tile of k.fragment(..., 'A'), or sums mapped to halves",
        )
    return part, (a.buffer, (build.const(part.registers[0]),))


def _expected_left(a: RegisterFragment, plan: WarpgroupPlan, i: int, step: int) -> Elements:
    """The elements of `a` that each thread must hold for the instruction of rows `i` and step `step`."""
    rows, columns = a.padded
    values = [(2, rows), (2, 8), (2, 8 * rows), (columns // DEPTH, DEPTH * rows), (plan.rows_each, ROWS)]
    whole = register_tile("%", a.dtype, a.shape, a.padded, _make_warpgroup_layout(plan, 2 * rows, values))
    return _slice_elements(whole, 8 * (step + i * (columns // DEPTH)), 8)


def _slice_elements(x: RegisterFragment, first: int, count: int) -> Elements:
    found: Elements = x.elements[:, first : first + count]
    return found


def _slice_fragment(whole: RegisterFragment, first: int, rows: int, columns: int) -> RegisterFragment:
    """The part `rows` x `columns` of a fragment for one instruction: the registers from value `first` on."""
    values = [(2, rows), (2, 8), (columns // 8, 8 * rows)]
    tv = _make_tv_layout([(4, 2 * rows), (8, 1), (4, 16)], values)
    registers = whole.registers[first : first + tv[1].size]
    return replace(
        whole, shape=(rows, columns), padded=(rows, columns), tv=tv, registers=registers, group=WARPGROUP, product=None
    )


def is_across(x: MemoryView) -> bool:
    """Whether a tile is contiguous along its rows' index (MN-major) rather than along its columns (K-major)."""
    row, column = build.var("%row"), build.var("%column")
    last = linear_terms(x.tensor[row, column].coordinates[-1])[0]
    return row in last and column not in last


def _make_intrinsic_leaf(spec: specs.MatMul, name: str) -> specs.Leaf:
    return specs.Leaf(spec.outputs, (), spec.threads, kind=name, atom="", statement=ir.Invoke(name, ()))


def _make_warpgroup_layout(plan: WarpgroupPlan, pair: int, values: list[tuple[int, int]]) -> Layout:
    """The layout (thread, value) -> element for the threads of all warpgroups."""
    groups = plan.threads.levels[0].size
    return _make_tv_layout([(4, pair), (8, 1), (4, 16), (groups, ROWS * plan.rows_each)], values)


def _make_tv_layout(threads: list[tuple[int, int]], values: list[tuple[int, int]]) -> Layout:
    """The layout of (size, stride) of threads and of values, without those of size 1."""
    parts = [[m for m in modes if m[0] > 1] or [(1, 0)] for modes in (threads, values)]
    shape, stride = (tuple(p[0][k] if len(p) == 1 else tuple(m[k] for m in p) for p in parts) for k in (0, 1))
    return Layout(shape, stride)
