"""Decompose operations on a thread's own values: moves, pointwise functions, fills and reductions.

The values of different tiles are matched by enumeration; a thread that lacks an operand's value is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, FLOAT16, FLOAT32, UINT32, DType
from ...core.errors import ArgumentError
from ...layouts import Layout
from ...layouts.layout import flatten_tuple
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import WARP
from ...loop_ir.intrinsics import SHUFFLE_XOR
from .. import specs
from ..builder.scalars import Scalar, to_expr
from ..builder.tile_views import (
    MapOperand,
    MemoryView,
    Operand,
    Positions,
    RegisterFragment,
    group_equal_columns,
    layout_of_table,
    register_tile,
)
from .memory_moves import ValuesInMemory, values_in_memory

Tables = np.ndarray[Any, Any]


def broadcast_shape(operands: Sequence[MapOperand]) -> tuple[int, int]:
    """The (rows, columns) to which all operands can be broadcast. Raises ArgumentError if there are none."""
    found = [1, 1]
    for x in operands:
        sizes = [prod(flatten_tuple(n)) for n in x.shape]
        for n, size in enumerate([1, 1, *sizes][-2:]):
            if found[n] != 1 and size not in (1, found[n]):
                raise ArgumentError(
                    "the sizes of a pointwise function's tiles disagree", expected=f"{found[n]} or 1",
                    found=f"{size} in {x}",
                )  # fmt: skip
            found[n] = max(found[n], size)
    return found[0], found[1]


def matching_values(x: RegisterFragment, out: RegisterFragment) -> list[int]:
    """For each value of `out`, the index of the value of `x`, in the same thread, that is (broadcast to) its element.

    Raises:
        ArgumentError: some thread does not hold this value of `x`.
    """
    rows, columns = out.row_and_column()
    held_rows, held_columns = x.row_and_column()
    threads = max(rows.shape[0], held_rows.shape[0])
    apart = (out.group is None) != (x.group is None) or (out.group is None and out.first != x.first)
    if threads % rows.shape[0] or threads % held_rows.shape[0] or apart:
        raise ArgumentError(f"{x} and {out} are spread over other threads")
    rows = _tile_tables(rows, threads) % _choose_broadcast_modulus(x.sizes[0], out.padded[0])
    columns = _tile_tables(columns, threads) % _choose_broadcast_modulus(x.sizes[1], out.padded[1])
    step = max(x.padded[0], out.padded[0])
    held = _tile_tables(held_rows + step * held_columns, threads)
    wanted = rows + step * columns
    values = {held[:, v].tobytes(): v for v in reversed(range(x.values))}
    found = []
    for v in range(out.values):
        value = values.get(wanted[:, v].tobytes())
        if value is None:
            thread = int(np.argmin((held == wanted[:, v : v + 1]).any(axis=1)))
            raise ArgumentError(
                f"value {v} of {out} is not where {x} has it",
                expected=f"row {rows[thread, v]}, column {columns[thread, v]} in thread {thread}",
                found="another value, or another thread: move it through shared memory",
            )
        found.append(value)
    return found


def _choose_broadcast_modulus(size: int, full: int) -> int:
    return 1 if size == 1 else full


def _tile_tables(table: Tables, threads: int) -> Tables:
    return np.tile(table, (threads // table.shape[0], 1))


# --- pointwise ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """An operand: functions from the index of a value of the computed tile to its expression and its load."""

    values: Callable[[int], ir.Expr]
    load: Callable[[int], ir.Stmt]
    staging: ir.Buffer | None = None


def decompose_map(spec: specs.Spec, function: Callable[..., Any], kind: str) -> tuple[specs.Node, ...]:
    """Decompose a map: every thread computes its values of the output, one vector of neighbors at a time."""
    (out,) = spec.outputs
    tile = out if isinstance(out, RegisterFragment) else _find_largest_fragment(spec)
    places = [values_in_memory(x, tile) if isinstance(x, MemoryView) else None for x in spec.inputs]
    into = values_in_memory(out, tile) if isinstance(out, MemoryView) else None
    width = max(tile.per_register, *(p.width for p in (*places, into) if p is not None), 1)
    overwritten = out.buffer if isinstance(out, RegisterFragment) else None
    sources = [
        _make_value_source(x, tile, place, width, f"{tile.name}_in{n}", overwritten)
        for n, (x, place) in enumerate(zip(spec.inputs, places, strict=True))
    ]
    for number, x in spec.positions if isinstance(spec, specs.Map) else ():
        sources.insert(number, _Source(_make_position_reader(x, tile), lambda v: build.NOTHING))
    stagings = [s.staging for s in sources if s.staging is not None]
    nodes: list[specs.Node] = [specs.Allocate(_scalar_tile(b)) for b in stagings]
    result: ir.Buffer | None = None
    if into is not None and into.width > 1:
        assert isinstance(out, MemoryView)
        result = ir.Buffer(f"{tile.name}_out", ir.Type(out.dtype), (into.width,), (1,), ir.Space.SCRATCH)
        nodes.append(specs.Allocate(_scalar_tile(result)))
    for first in range(0, tile.values, width):
        group = range(first, min(first + width, tile.values))
        body = [s.load(v) for s in sources for v in group]
        values = {v: to_expr(function(*(Scalar(s.values(v)) for s in sources))) for v in group}
        if isinstance(out, MemoryView):
            assert into is not None
            body += list(_emit_value_stores(out, into, result, values))
        else:
            body += list(_store_to_registers(out, values))
        threads, name = spec.threads, "" if kind == "Map" else "ld, st"
        nodes.append(specs.Leaf(spec.outputs, spec.inputs, threads, kind=kind, atom=name, statement=build.block(*body)))
    return tuple(nodes)


def _scalar_tile(buffer: ir.Buffer) -> RegisterFragment:
    """The private registers `buffer` of a thread as a fragment, which `Allocate` needs."""
    count = buffer.shape[0]
    tv = Layout((1, count), (0, 1)) if count > 1 else Layout((1, 1), (0, 0))
    return RegisterFragment(buffer.name, buffer.type.dtype, (1, count), (1, count), tv, buffer, tuple(range(count)))


def _find_largest_fragment(spec: specs.Spec) -> RegisterFragment:
    found = [x for x in spec.inputs if isinstance(x, RegisterFragment)]
    if not found:
        raise ArgumentError(
            f"no rule decomposes a move from {spec.inputs[0] if spec.inputs else 'nothing'} to {spec.outputs[0]}",
            expected="a tile in registers, or a copy from global to shared memory",
        )
    return max(found, key=lambda x: x.values)


def _make_value_source(
    x: Operand, tile: RegisterFragment, place: ValuesInMemory | None, group: int, name: str,
    overwritten: ir.Buffer | None,
) -> _Source:  # fmt: skip
    if isinstance(x, RegisterFragment):
        where = matching_values(x, tile)
        if overwritten is not None and x.buffer.name == overwritten.name and where != [*range(tile.values)]:
            raise ArgumentError(
                f"{x} is overwritten while other elements of it are needed", suggestion="map to a new tile"
            )

        def value(v: int) -> ir.Expr:
            return widen_half(read_value(x, where[v]))

        return _Source(value, lambda v: build.NOTHING)
    assert place is not None
    return _memory_source(x, place, group, name)


def _make_position_reader(x: Positions, tile: RegisterFragment) -> Callable[[int], ir.Expr]:
    """A function from the index of a value to the expression of its row or column."""
    if (x.tile.sizes, x.tile.first) != (tile.sizes, tile.first):
        raise ArgumentError(f"{x} are not those of {tile}", expected="positions of a tile of the result's size")
    whole = MemoryView.of("%", tile.padded, tile.dtype, ir.Space.GLOBAL)
    values = whole.tensor.partition(tile.tv)[tile.thread]
    return lambda v: build.add(values[v].coordinates[x.axis], x.start)


def _memory_source(x: MemoryView, found: ValuesInMemory, group: int, name: str) -> _Source:
    """An operand in memory, with vector loads; the staging buffer holds `group` values."""
    width, firsts = found.width, dict(found.firsts)
    if width == 1:

        def one(v: int) -> ir.Expr:
            return widen_half(build.load(x.buffer, *firsts[v].coordinates, mask=firsts[v].predicate))

        return _Source(one, lambda v: build.NOTHING)
    staging = ir.Buffer(name, ir.Type(x.dtype), (group,), (1,), ir.Space.SCRATCH)

    def load(v: int) -> ir.Stmt:
        if v % width:
            return build.NOTHING
        at, inside = firsts[v].coordinates, firsts[v].predicate
        vector = build.load(x.buffer, *at[:-1], build.ramp(at[-1], 1, width))
        whole = build.store(staging, (build.ramp(v % group, 1, width),), vector)
        if inside is None:
            return whole
        zeros = (build.store(staging, (v % group + n,), build.const(0, x.dtype)) for n in range(width))
        return build.when(inside, whole, build.block(*zeros))

    return _Source(lambda v: widen_half(build.load(staging, v % group)), load, staging)


def _emit_value_stores(
    out: MemoryView, into: ValuesInMemory, staging: ir.Buffer | None, values: dict[int, ir.Expr]
) -> Iterator[ir.Stmt]:
    for v, first in into.firsts:
        if v not in values:
            continue
        at, inside = first.coordinates, first.predicate
        if staging is None:
            one: ir.Stmt = build.store(out.buffer, at, build.cast(values[v], out.dtype))
        else:
            width = into.width
            parts = [build.store(staging, (n,), build.cast(values[v + n], out.dtype)) for n in range(width)]
            place = (*at[:-1], build.ramp(at[-1], 1, width))
            one = build.block(*parts, build.store(out.buffer, place, build.load(staging, build.ramp(0, 1, width))))
        yield one if inside is None else build.when(inside, one)


def _store_to_registers(out: RegisterFragment, values: dict[int, ir.Expr]) -> Iterator[ir.Stmt]:
    if out.per_register == 2:
        for v in values:
            if v % 2 == 0:
                pair = [build.cast(values[v + n], out.dtype) for n in range(2)]
                packed = build.call(f"pair_{out.dtype.name}", *pair)
                yield build.store(out.buffer, (out.registers[v],), packed)
        return
    for v, value in values.items():
        yield build.store(out.buffer, (out.registers[v],), build.cast(value, out.dtype))


def read_value(x: RegisterFragment, v: int) -> ir.Expr:
    """The value with index `v` in the current thread."""
    word = build.load(x.buffer, x.registers[v])
    if x.per_register == 1:
        return word
    return build.call(f"{('low', 'high')[v % 2]}_{x.dtype.name}", word)


def widen_half(e: ir.Expr) -> ir.Expr:
    """A value in the type in which functions compute: 16-bit floats are converted to float32."""
    return build.cast(e, FLOAT32) if e.type.dtype.is_float and e.type.dtype.bits == 16 else e


# --- reductions --------------------------------------------------------------------------------------------------


def reduced_tile(x: RegisterFragment, axis: int, name: str) -> tuple[RegisterFragment, list[list[int]], list[int]]:
    """The result tile of a reduction, the values of `x` combined into each of its values, and the shuffle masks.

    Raises:
        ArgumentError: a row (or column) is distributed over several warps.
    """
    kept = x.row_and_column()[1 - axis]
    groups = group_equal_columns(kept)
    table = kept[:, [group[0] for group in groups]]
    lanes = np.arange(table.shape[0])
    masks = [m for m in (1, 2, 4, 8, 16) if m < len(lanes) and np.array_equal(table[lanes ^ m], table)]
    length = x.padded[axis]
    reach = [lanes]
    for m in masks:
        reach += [r ^ m for r in reach]
    for group in groups:
        there = np.concatenate([x.elements[r][:, group] for r in reach], axis=1)
        if there.shape[1] != length or not np.diff(np.sort(there, axis=1), axis=1).all():
            raise ArgumentError(
                f"no rule reduces {x} along {axis}", expected="rows that the lanes of one warp hold",
                found=f"{len(set(there[0].tolist()))} of {length} elements in a warp",
            )  # fmt: skip
    sizes = (x.shape[0], 1) if axis == 1 else (1, x.shape[1])
    padded = (x.padded[0], 1) if axis == 1 else (1, x.padded[1])
    tv = layout_of_table(table)
    if tv is None:
        raise ArgumentError(f"no rule reduces {x} along {axis}", expected="values that lie as a layout")
    return register_tile(name, FLOAT32, sizes, padded, tv, group=x.group, first=x.first), groups, masks


def decompose_reduce(spec: specs.Reduce) -> tuple[specs.Node, ...]:
    """Decompose a reduction: each thread combines its values, then lanes combine theirs by `shfl.bfly`."""
    (out,), (x,) = spec.outputs, spec.inputs
    assert isinstance(out, RegisterFragment)
    assert isinstance(x, RegisterFragment)
    _, groups, masks = reduced_tile(x, spec.axis, out.name)
    inside = _padding_mask(x)
    other = build.register(f"{out.name}_other", FLOAT32)
    held = ir.Buffer(other.name, ir.Type(FLOAT32), (1,), (1,), ir.Space.REGISTER)
    nodes: list[specs.Node] = [specs.Allocate(_scalar_tile(held))]
    op, neutral = build.combiner(spec.op, FLOAT32), build.neutral(spec.op, FLOAT32)
    for n, group in enumerate(groups):
        total: ir.Expr | None = None
        for v in group:
            one = widen_half(read_value(x, v))
            if (there := inside(v)) is not None:
                one = build.select(there, one, neutral)
            total = one if total is None else build.binary(op, total, one)
        assert total is not None
        mine = (out.registers[n],)
        nodes.append(_make_reduce_leaf(spec, "", build.store(out.buffer, mine, build.cast(total, FLOAT32))))
        for mask in masks:
            place = (build.const(mine[0]),)
            exchange = ir.Invoke(SHUFFLE_XOR, ((held, (build.const(0),)), (out.buffer, place)), (mask, WARP))
            both = build.binary(op, build.load(out.buffer, *mine), build.load(held, 0))
            nodes.append(
                _make_reduce_leaf(spec, f"shfl.bfly {mask}", build.block(exchange, build.store(out.buffer, mine, both)))
            )
    return tuple(nodes)


def decompose_shuffle(spec: specs.Shuffle) -> tuple[specs.Node, ...]:
    """Decompose a shuffle into a `shfl.bfly` for every value."""
    (out,), (x,) = spec.outputs, spec.inputs
    assert isinstance(out, RegisterFragment)
    assert isinstance(x, RegisterFragment)
    return tuple(
        _make_reduce_leaf(
            spec, f"shfl.bfly {spec.mask}",
            ir.Invoke(
                SHUFFLE_XOR,
                ((out.buffer, (build.const(out.registers[v]),)), (x.buffer, (build.const(x.registers[v]),))),
                (spec.mask, WARP),
            ),
        )
        for v in range(x.values)
    )  # fmt: skip


def _make_reduce_leaf(spec: specs.Spec, atom: str, statement: ir.Stmt) -> specs.Leaf:
    return specs.Leaf(spec.outputs, spec.inputs, spec.threads, kind="Reduce", atom=atom, statement=statement)


def _padding_mask(x: RegisterFragment) -> Callable[[int], ir.Expr | None]:
    """A function from the index of a value to the condition that it is an element; None if it always is."""
    if not x.is_padded:
        return lambda v: None
    whole = MemoryView.of("%", x.sizes, x.dtype, ir.Space.GLOBAL).tile_to(*x.padded)
    values = whole.tensor.partition(x.tv)[x.thread]
    return lambda v: values[v].predicate


def spread_tile(name: str, shape: tuple[int, int], dtype: DType, group: int, vector: int) -> RegisterFragment:
    """A tile distributed over `group` neighboring threads, in vectors of `vector` elements of a row."""
    rows, columns = shape
    step = group * vector
    width = -(-columns // step) * step
    shapes, strides = [vector, width // step, rows], [rows, rows * step, 1]
    modes = [(n, s) for n, s in zip(shapes, strides, strict=True) if n > 1] or [(1, 0)]
    values = (tuple(m[0] for m in modes), tuple(m[1] for m in modes)) if len(modes) > 1 else modes[0]
    tv = Layout((group, values[0]), (rows * vector, values[1]))
    return register_tile(name, dtype, (rows, columns), (rows, width), tv, group=group)


def with_dtype(x: RegisterFragment, name: str, dtype: DType) -> RegisterFragment:
    """A new tile distributed like `x`; 16-bit floats are packed in pairs, as products need them."""
    pairs = dtype in (FLOAT16, BFLOAT16) and x.values % 2 == 0
    made = register_tile(
        name, dtype, x.shape, x.padded, x.tv, per_register=2 if pairs else 1, group=x.group, first=x.first,
        register=UINT32 if pairs else None,
    )  # fmt: skip
    return replace(made, product=x.product if dtype == FLOAT32 else None)
