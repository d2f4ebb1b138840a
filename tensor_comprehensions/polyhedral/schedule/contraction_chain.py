"""Chains of contractions that share tiles of rows, as in attention, so that temporaries between them stay in L2.

Rows on which both factors of every contraction depend are batch dimensions: a tile has one of each. Of the rows on
which only one factor depends, a tile takes as many as fit into L2; all of them reuse the other factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ...core.memory_layout import contiguous_strides
from ...structured.match.product_matching import collect_index_names
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, Role, Tensor, walk_expr
from ...thresholds import (
    CHAIN_L2_SHARE,
    CHAIN_TILE_ROWS,
    CONTRACTION_TILE_ROWS,
    ENOUGH_PARALLELISM,
    MANY_CHAIN_TILE_ROWS,
    MAX_WHOLE_CHAIN_ROWS,
)
from ..scop.scop import ScopStatement
from .access_cost import access_stride
from .fusion import FusionGroup
from .shared_rows import BandMember
from .storage import find_storage_reuse, temporary_footprint


def contraction_tiles(function: BoundFunction, group: FusionGroup, target: CpuTarget) -> tuple[int, ...]:
    """The tile size of each row of a group with contractions.

    A contraction alone gets whole rows, because its own plan tiles it. A chain gets `chain_tiles`. In any other group,
    only the first row is tiled, in equal parts if possible.
    """
    extents = tuple(r.extent for r in group.rows)
    if len(group.nodes) == 1 or not extents:
        return extents
    if tiles := chain_tiles(function, group, target):
        return tiles
    sizes = range(CONTRACTION_TILE_ROWS, 2 * CONTRACTION_TILE_ROWS + 1)
    size = next((s for s in sizes if extents[0] % s == 0), CONTRACTION_TILE_ROWS)
    return (min(extents[0], size), *extents[1:])


def chain_tiles(function: BoundFunction, group: FusionGroup, target: CpuTarget) -> tuple[int, ...] | None:
    """The tile size of each row of `group`; None if it is not a chain, or no tile's temporaries fit into L2."""
    row, passed = tiled_row(group), _tensors_passed_on(group)
    temporaries = [t for t in function.tensors if t.role is Role.TEMPORARY and t.name in passed]
    replaced = find_storage_reuse(group, temporaries)
    handed_on = [t for t in temporaries if t.name not in replaced]
    if row is None or not handed_on:
        return None
    for rows in _row_counts(group.rows[row].extent, 0 if group.serial is not None else group.parallelism):
        sizes = tuple(rows if k == row else 1 for k in range(len(group.rows)))
        if sum(_tile_bytes(t, group, sizes) for t in handed_on) <= target.cache[1] // CHAIN_L2_SHARE:
            return sizes
    return None


def _row_counts(extent: int, points: int) -> Sequence[int]:
    """Candidates for the number of rows of a tile, best first. points: the independent iterations of the group."""
    if extent <= MAX_WHOLE_CHAIN_ROWS:
        return (extent, *(rows for rows in CHAIN_TILE_ROWS if rows < extent))
    many = [MANY_CHAIN_TILE_ROWS] if points >= ENOUGH_PARALLELISM * MANY_CHAIN_TILE_ROWS else []
    even = [
        rows for rows in range(CHAIN_TILE_ROWS[0], MAX_WHOLE_CHAIN_ROWS + 1, CHAIN_TILE_ROWS[-1]) if extent % rows == 0
    ]
    whole = [rows for rows in (*many, *even) if extent % rows == 0]
    return (*whole[:1], *many, *CHAIN_TILE_ROWS)


def _tile_bytes(tensor: Tensor, group: FusionGroup, sizes: Sequence[int]) -> int:
    return prod(e.size for e in temporary_footprint(tensor, group, sizes)) * tensor.dtype.size


def _tensors_passed_on(group: FusionGroup) -> frozenset[str]:
    """The tensors that one node of `group` writes and another one reads."""
    writers = {(w.tensor, n.name) for n in group.nodes for w in n.writes}
    written = {tensor for tensor, _ in writers}
    reads = ((r.tensor, n.name) for n in group.nodes for r in n.reads)
    return frozenset(tensor for tensor, reader in reads if tensor in written and (tensor, reader) not in writers)


def tiled_row(group: FusionGroup) -> int | None:
    """The row to tile: the last one on which exactly one factor of each contraction depends. None if there is no chain.

    A chain also needs a batch row, on which both factors depend. All rows on which one factor depends must belong to
    the same factor: otherwise little of the other one would be reused.
    """
    if group.serial is not None:
        return group.serial
    moved = [_moved_factors(row, group) for row in group.rows]
    free = [k for k, factors in enumerate(moved) if all(len(f) == 1 for f in factors)]
    batches = any(all(len(f) == 2 for f in factors) for factors in moved)
    return free[-1] if free and batches and len({moved[k] for k in free}) == 1 else None


def _moved_factors(row: BandMember, group: FusionGroup) -> tuple[frozenset[int], ...]:
    """For each contraction, which factors (0: left, 1: right) depend on `row`."""
    clusters = [(row.index_and_shift(n)[0], n.cluster) for n in group.nodes if n.cluster is not None]
    factors = ((index, enumerate((c.left, c.right))) for index, c in clusters)
    return tuple(frozenset(side for side, f in sides if index in collect_index_names(f)) for index, sides in factors)


# --- the layout of temporaries -----------------------------------------------------------------------------------


def with_chain_layouts(
    function: BoundFunction, group: FusionGroup, sizes: Sequence[int], local: Sequence[Tensor]
) -> BoundFunction:
    """`function` with its `local` temporaries contiguous along the tiled row if that saves transposing factors.

    Products are vectorized along the contiguous dimension of the result. If the factor that depends on it is contiguous
    along another one, every tile would transpose all of that factor; with lanes along the rows, only the tile's part is
    transposed. But operands such as an elementwise mask, combined with the result, would then be read strided. The
    layout stays if these are as many as the factors.
    """
    row = tiled_row(group)
    if row is None or sizes[row] == 1:
        return function
    names = _temporaries_stored_rows_last(function, group, row, frozenset(t.name for t in local))
    strided = {tensor for n in group.nodes for tensor in _find_strided_operands(function, group, n, row, names)}
    if len(strided) >= sum(_transposes_factor(function, n, group, row) for n in group.nodes):
        return function
    return replace(
        function,
        tensors=tuple(_with_rows_last(t, group, row) if t.name in names else t for t in function.tensors),
    )


def _temporaries_stored_rows_last(
    function: BoundFunction, group: FusionGroup, row: int, local: frozenset[str]
) -> frozenset[str]:
    """The `local` results of products that would transpose a factor, and temporaries computed pointwise from these."""
    found: set[str] = set()
    for node in group.nodes:
        for write in (w for w in node.writes if w.tensor in local):
            same = any(r.tensor in found and r.subscripts == write.subscripts for r in node.reads)
            if same or _transposes_factor(function, node, group, row):
                found.add(write.tensor)
    return frozenset(found)


def _transposes_factor(function: BoundFunction, node: ScopStatement, group: FusionGroup, row: int) -> bool:
    """Whether `node`, if its result is a temporary, would transpose a factor for each batch."""
    if node.cluster is None or function.tensor(node.cluster.output.tensor).role is not Role.TEMPORARY:
        return False
    last = node.cluster.output.subscripts[-1]
    if not isinstance(last, tc.Index) or last.name == group.rows[row].index_and_shift(node)[0]:
        return False
    batches = {r.index_and_shift(node)[0] for k, r in enumerate(group.rows) if k != row}
    moving = [f for f in (node.cluster.left, node.cluster.right) if last.name in collect_index_names(f)]
    accesses = [a for f in moving for a in walk_expr(f) if isinstance(a, tc.Access)]
    return any(
        bool(batches & collect_index_names(a)) and access_stride(function, a, last.name) not in (0, 1) for a in accesses
    )


def _find_strided_operands(
    function: BoundFunction, group: FusionGroup, node: ScopStatement, row: int, local: frozenset[str]
) -> Iterator[str]:
    """The operands that `node` combines pointwise with temporaries, through which lanes along `row` would stride.

    Operands that are contiguous along a batch row do not count: a tile reads one element per row of them, such as the
    logarithms of sums that attention's gradient subtracts.
    """
    rows = [r.index_and_shift(node)[0] for r in group.rows]
    factors = () if node.cluster is None else (node.cluster.left, node.cluster.right)
    multiplied = {a for f in factors for a in walk_expr(f) if isinstance(a, tc.Access)}
    accesses = (*node.writes, *node.reads)
    held = [frozenset(x for e in a.subscripts for x in collect_index_names(e)) for a in accesses if a.tensor in local]
    for access in (a for a in node.reads if a.tensor not in local and a not in multiplied):
        steps = {i.name: access_stride(function, access, i.name) for i in (*node.free, *node.reduction_indices)}
        along = {name for name, step in steps.items() if step == 1}.difference(rows)
        if steps.get(rows[row]) not in (0, 1) and along and any({rows[row]} | along <= names for names in held):
            yield access.tensor


def _with_rows_last(tensor: Tensor, group: FusionGroup, row: int) -> Tensor:
    """`tensor` made contiguous along the dimension that the tiled row subscripts."""
    rows = [d for d in range(len(tensor.shape)) if _is_row(tensor, d, group, row)]
    if len(rows) != 1:
        return tensor
    order = [d for d in range(len(tensor.shape)) if d not in rows] + rows
    strides = contiguous_strides(tuple(tensor.shape[d] for d in order))
    found = dict(zip(order, strides, strict=True))
    return replace(tensor, strides=tuple(found[d] for d in range(len(tensor.shape))))


def _is_row(tensor: Tensor, d: int, group: FusionGroup, row: int) -> bool:
    accesses = [(n, a) for n in group.nodes for a in (*n.writes, *n.reads) if a.tensor == tensor.name]
    names = ((group.rows[row].index_and_shift(n)[0], a.subscripts[d]) for n, a in accesses)
    return bool(accesses) and all(isinstance(e, tc.Index) and e.name == name for name, e in names)
