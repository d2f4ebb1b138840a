"""The values of a tile that a thread holds: their coordinates, groups of neighbors, and guarded stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from ...core.internal_names import internal_name
from ...layouts import Layout
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.linear_forms import difference, linear_terms, terms_to_expr
from ..builder.tile_views import RegisterFragment
from ..tensors import DataTensor
from .memory_moves import is_multiple
from .neighbor_values import VectorLoads, store_neighbors

VALUES_TOGETHER = 8
"""The maximum number of values that a thread computes and stores together: 16 bytes of 16-bit values."""


def name_coordinates(values: DataTensor, indices: Sequence[str], names: list[tuple[str, ir.Expr]]) -> DataTensor:
    """`values` with named coordinates of a thread's first element, so that the others are at constant distances.

    Appends (name, expression) to `names`. The common factor of all terms of a coordinate stays outside of its name,
    because vectorization needs to see alignment.
    """
    found: list[ir.Expr] = [values.origins[0]]
    known: dict[ir.Expr, ir.Expr] = {}
    numbers = iter(indices)
    for at, extent in zip(values.origins[1:], values.extents, strict=True):
        index = next(numbers) if extent is None else ""
        terms, constant = linear_terms(at)
        if at not in known and terms:
            step, name = gcd(*terms.values()), internal_name("first", index or str(len(names)))
            names.append((name, terms_to_expr({x: c // step for x, c in terms.items()}, 0)))
            known[at] = build.add(build.mul(build.var(name), step), constant)
        found.append(known.get(at, at))
    return replace(values, origins=tuple(found))


def element_at(values: DataTensor, v: int) -> DataTensor:
    """The element with index `v` of a tensor with a single level."""
    origins = (build.add(at, layout(v)) for at, layout in zip(values.origins, values.parts[0].layouts, strict=True))
    return replace(values, parts=(), origins=tuple(origins))


def neighbor_runs(total: RegisterFragment, deals: Layout | None) -> list[tuple[int, ...]]:
    """The values of a thread, split into runs of equal length: neighboring columns of a row.

    Runs are ordered by column, so that values that depend only on the column, such as a bias, occupy registers for
    only one run at a time. deals: a permutation of the columns.
    """
    rows, numbers = (table[0] for table in total.row_and_column())
    columns = [int(n) if deals is None else deals(int(n)) for n in numbers]
    order = sorted(range(total.values), key=lambda v: (rows[v], columns[v]))
    length = 1
    while length < VALUES_TOGETHER and len(order) % (2 * length) == 0:
        runs = [order[n : n + 2 * length] for n in range(0, len(order), 2 * length)]
        if any(rows[r[-1]] != rows[r[0]] or columns[r[-1]] - columns[r[0]] != 2 * length - 1 for r in runs):
            break
        length *= 2
    found = [tuple(order[n : n + length]) for n in range(0, len(order), length)]
    return sorted(found, key=lambda run: columns[run[0]])


def guarded_store(
    buffer: ir.Buffer, places: Sequence[tuple[ir.Expr, ...]], values: Sequence[ir.Expr], points: Sequence[DataTensor],
    prefix: str, *, zeros: bool,
) -> ir.Stmt:  # fmt: skip
    """Store each value at its `places` if its element of `points` exists; else store nothing, or zero if `zeros`."""
    nothing = build.const(0, buffer.type.dtype)
    inside = points[0].predicate
    if not exist_together(points):
        half = len(points) // 2
        parts = (slice(0, half), slice(half, None))
        return build.block(
            *(guarded_store(buffer, places[p], values[p], points[p], prefix, zeros=zeros) for p in parts)
        )
    body = store_neighbors(buffer, places, values, prefix)
    if inside is None:
        return body
    other = store_neighbors(buffer, places, [nothing] * len(places), prefix) if zeros else None
    return build.when(inside, body, other)


def exist_together(points: Sequence[DataTensor]) -> bool:
    """Whether either all or none of the elements `points` exist."""
    for n, extent in enumerate(points[0].extents, 1):
        at = points[0].origins[n]
        if extent is None or all(difference(p.origins[n], at) == 0 for p in points[1:]):
            continue
        if extent % len(points) or not is_multiple(at, len(points)):
            return False
    return True


def fill_pair(pair: ir.Buffer, points: Sequence[DataTensor], values: Sequence[ir.Expr], prefix: str) -> ir.Stmt:
    """Store two values in `pair`, or zero for one whose element does not exist."""
    zeros = [build.store(pair, (n,), build.const(0, pair.type.dtype)) for n in range(2)]
    if not exist_together(points):
        parts = [build.store(pair, (n,), x) for n, x in enumerate(values)]
        return build.block(
            *(
                x if p.predicate is None else build.when(p.predicate, x, zero)
                for p, x, zero in zip(points, parts, zeros, strict=True)
            )
        )
    loads = VectorLoads(prefix)
    kept = [build.store(pair, (n,), x) for n, x in enumerate(loads.join(values))]
    body = build.block(*loads.statements, *kept)
    body = build.allocate(loads.buffers, body) if loads.buffers else body
    inside = points[0].predicate
    return body if inside is None else build.when(inside, body, build.block(*zeros))
