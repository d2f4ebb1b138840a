"""Decompose moves from global to shared memory, and locate the values of a thread in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...core.errors import ArgumentError
from ...layouts.layout import flatten_tuple
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.intrinsics import COPY_ASYNC, COPY_ASYNC_ZERO
from ...loop_ir.linear_forms import linear_terms
from .. import specs
from ..builder.tile_views import THREAD_X, MemoryView, RegisterFragment
from ..tensor_levels import Coordinate
from ..tensors import DataTensor

COPY_BYTES = (16, 8, 4)
"""The possible bytes of an asynchronous copy, widest first."""
VECTOR_BYTES = 16
"""The maximum bytes of one load or store of a thread."""


def is_multiple(e: ir.Expr, n: int) -> bool:
    """Whether `e` is provably a multiple of `n`: all its linear terms are."""
    terms, constant = linear_terms(e)
    return constant % n == 0 and all(factor % n == 0 for factor in terms.values())


def are_neighbors(first: DataTensor, count: int) -> bool:
    """Whether the `count` elements from `first` on are aligned, and either all or none of them exist."""
    guards = zip(first.origins[1:], first.extents, strict=True)
    whole = all(extent is None or (extent % count == 0 and is_multiple(at, count)) for at, extent in guards)
    return count == 1 or (whole and is_multiple(first.offset, count))


# --- global to shared --------------------------------------------------------------------------------------------


def decompose_copy(spec: specs.Move) -> tuple[specs.Node, ...]:
    """Decompose a move into `cp.async` of 16, 8 or 4 bytes per thread, or into loads and stores if unaligned."""
    (to,), (source,) = spec.outputs, spec.inputs
    assert isinstance(to, MemoryView)
    assert isinstance(source, MemoryView)
    sizes = [tuple(prod(flatten_tuple(n)) for n in x.shape) for x in (to, source)]
    if sizes[0] != sizes[1] or len(sizes[0]) != 2 or len(to.tensor.parts) != 1 or len(source.tensor.parts) != 1:
        raise ArgumentError(
            f"no rule decomposes {to} <- Move({source})", expected="tiles of the same rows and columns",
            found=f"{to.shape} and {source.shape}",
        )  # fmt: skip
    rows, columns = sizes[0]
    size = source.dtype.size
    widths = [n // size for n in COPY_BYTES if n % size == 0 and _moves_together(to, source, n // size, columns)]
    return tuple(_emit_thread_copies(spec, to, source, rows, columns, widths[0] if widths else 1))


def _moves_together(to: MemoryView, source: MemoryView, width: int, columns: int) -> bool:
    """Whether each `width` elements of a row are contiguous and aligned both in `to` and in `source`."""
    if width == 1 or columns % width:
        return width == 1
    row, chunk = build.var("%row"), build.mul(build.var("%chunk"), width)
    for x in (to, source):
        layouts = [layout[1].flat for layout in x.tensor.parts[0].layouts]
        leading = [n for n, m in enumerate(layouts[0]) if m[0] > 1][:1]
        if not leading or layouts[0][leading[0]][1] != 1 or layouts[0][leading[0]][0] % width:
            return False
        still = [modes[leading[0]][1] == 0 for modes in layouts[1:]]
        if not are_neighbors(_without_guards(x.tensor[row, chunk], still), width):
            return False
    return True


def _without_guards(element: DataTensor, idle: Sequence[bool]) -> DataTensor:
    """`element` without the guards marked in `idle`, which do not depend on the position in a row."""
    kept = tuple(None if out else n for out, n in zip(idle, element.extents, strict=True))
    return replace(element, extents=kept)


def _emit_thread_copies(
    spec: specs.Move, to: MemoryView, source: MemoryView, rows: int, columns: int, width: int
) -> Iterator[specs.Node]:
    threads, across = spec.threads.size, columns // width
    for first in range(0, rows * across, threads):
        chunk = build.add(THREAD_X, first)
        row, column = build.div(chunk, across), build.mul(build.mod(chunk, across), width)
        at = _row_coordinate(to, source, row)
        out, into = to[at, column], source[at, column]
        statement, name = _emit_thread_copy(out, into, width)
        if first + threads > rows * across:
            statement = build.when(build.lt(chunk, rows * across), statement)
        yield specs.Leaf((out,), (into,), spec.threads, kind="Move", atom=name, statement=statement)


def _row_coordinate(to: MemoryView, source: MemoryView, row: ir.Expr) -> Coordinate:
    """The coordinate of row number `row` in memory order: of two parts of a dimension, the last is the fastest."""
    match to.shape[0]:
        case (int(), int() as inner) if source.shape[0] == to.shape[0]:
            return build.div(row, inner), build.mod(row, inner)
    return row


def _emit_thread_copy(out: MemoryView, into: MemoryView, width: int) -> tuple[ir.Stmt, str]:
    """The statement of one copy of a thread, and the name of its instruction."""
    size = width * into.dtype.size
    there, here = out.tensor.coordinates, into.tensor.coordinates
    inside = into.tensor.predicate
    if size not in COPY_BYTES or out.dtype != into.dtype:
        value = build.cast(build.load(into.buffer, *here, mask=inside), out.dtype)
        return build.store(out.buffer, there, value), f"ld.global {size}"
    if inside is not None and len(here) > 1:  # keep the address in bounds although nothing is read through it
        most = [n - 1 for n in into.buffer.shape[1:-1]] + [into.buffer.shape[-1] - width]
        here = (here[0], *(build.minimum(at, n) for at, n in zip(here[1:], most, strict=True)))
    views = ((out.buffer, there), (into.buffer, here))
    if inside is None:
        return ir.Invoke(COPY_ASYNC, views, (size,)), f"cp.async {size}"
    return ir.Invoke(COPY_ASYNC_ZERO, views, (size,), (inside,)), f"cp.async {size}, zero fill"


# --- registers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValuesInMemory:
    """The locations in memory of the values of a thread.

    Attributes:
        width: the number of contiguous values in each vector.
        firsts: for each vector, the index of its first value, and the element of that value.
    """

    width: int
    firsts: tuple[tuple[int, DataTensor], ...]


def values_in_memory(view: MemoryView, tile: RegisterFragment) -> ValuesInMemory:
    """The elements of `view`, broadcast to `tile`, that correspond to the values of `tile` in the current thread."""
    whole = view.matrix(*tile.padded)
    values = whole.tensor.partition(tile.tv)[tile.thread]
    leading = [m for m in values.parts[0].layouts[0].flat if m[0] > 1][:1]
    width = 1
    if leading and leading[0][1] == 1:
        most = VECTOR_BYTES // view.dtype.size
        while width < most and leading[0][0] % (2 * width) == 0 and _all_neighbors(values, tile.values, 2 * width):
            width *= 2
    return ValuesInMemory(width, tuple((v, values[v]) for v in range(0, tile.values, width)))


def _all_neighbors(values: DataTensor, count: int, width: int) -> bool:
    return all(are_neighbors(values[v], width) for v in range(0, count, width))
