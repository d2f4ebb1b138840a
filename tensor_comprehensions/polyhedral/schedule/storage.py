"""Storage contraction: temporaries that fusion makes local shrink to the part that one iteration of the shared loops
needs.

If all accesses of a temporary are in one group, a dimension that a shared row subscripts shrinks to the tile of that
row; other dimensions stay whole. A temporary that a single nest writes and reads at the same point becomes a register.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...structured.lower.transpose import has_aligned_rows
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, Role, Tensor
from ..scop.isl_affine import to_isl_affine
from ..scop.scop import ScopStatement
from .fusion import FusionGroup
from .loop_nest import DimKind, LoopNest


@dataclass(frozen=True, slots=True)
class BufferExtent:
    """One dimension of a contracted temporary: `size` elements from `offset` after the start of the tile of `row`.

    With row None, it is the whole dimension.
    """

    row: int | None
    offset: int
    size: int


def local_temporaries(function: BoundFunction, groups: Sequence[FusionGroup], group: FusionGroup) -> tuple[Tensor, ...]:
    """The temporaries that only `group` touches."""
    inside = {t for n in group.nodes for t in n.tensors}
    outside = {t for g in groups if g is not group for n in g.nodes for t in n.tensors}
    return tuple(t for t in function.tensors if t.role is Role.TEMPORARY and t.name in inside - outside)


def temporary_footprint(tensor: Tensor, group: FusionGroup, tiles: Sequence[int]) -> tuple[BufferExtent, ...]:
    """For each dimension of `tensor`, the part that one iteration of the tile loops touches."""
    accesses = group.accesses.get(tensor.name, ())
    return tuple(_compute_buffer_extent(d, tensor, accesses, group, tiles) for d in range(len(tensor.shape)))


def _compute_buffer_extent(
    d: int,
    tensor: Tensor,
    accesses: Sequence[tuple[ScopStatement, tc.Access]],
    group: FusionGroup,
    tiles: Sequence[int],
) -> BufferExtent:
    whole = BufferExtent(None, 0, tensor.shape[d])
    positions = [_match_row_offset(node, access.subscripts[d], group) for node, access in accesses]
    found = [p for p in positions if p is not None]
    if len(found) < len(positions) or len({row for row, _ in found}) != 1:
        return whole
    row = found[0][0]
    offsets = [offset for _, offset in found]
    size = tiles[row] + max(offsets) - min(offsets)
    return whole if size >= tensor.shape[d] else BufferExtent(row, min(offsets), size)


def _match_row_offset(node: ScopStatement, subscript: tc.Expr, group: FusionGroup) -> tuple[int, int] | None:
    """(row, offset) if `subscript` is the value of a shared row plus a constant, else None."""
    form = to_isl_affine(subscript)
    if form is None or form.single is None:
        return None
    for position, row in enumerate(group.rows):
        index, shift = row.index_and_shift(node)
        if index == form.single:
            return position, form.constant - shift
    return None


def fits_register(tensor: Tensor, group: FusionGroup, leaf: LoopNest) -> bool:
    """Whether `tensor` is only accessed in `leaf`, at one element per iteration, so that a register can hold it."""
    touching = [n for n in leaf.nodes if tensor.name in n.tensors]
    if not touching or any(tensor.name in n.tensors and n not in leaf.nodes for n in group.nodes):
        return False
    if any(d.kind is DimKind.SERIAL for d in leaf.dims):
        return False
    writers = [n for n in touching if any(w.tensor == tensor.name for w in n.writes)]
    return all(not n.reduction_indices and n.statements[0].reduction is None for n in writers)


def find_storage_reuse(group: FusionGroup, local: Sequence[Tensor]) -> dict[str, str]:
    """Maps temporaries to others whose memory they may reuse, because those are dead once they are written.

    The first statement that writes the temporary is the last to read the other one, and reads it at the same point.
    """
    found: dict[str, str] = {}
    shapes = {t.name: (t.dtype, t.shape, t.strides) for t in local}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(group.nodes):
        for name in node.tensors:
            first.setdefault(name, position)
            last[name] = position
    for position, node in enumerate(group.nodes):
        if node.cluster is not None or node.reduction_indices or node.statements[0].reduction is not None:
            continue
        (write,) = node.writes
        if first[write.tensor] < position:
            continue
        for name in dict.fromkeys(a.tensor for a in node.reads):
            same = all(a.subscripts == write.subscripts for a in node.reads if a.tensor == name)
            alike = name in shapes and shapes[name] == shapes.get(write.tensor)
            if same and alike and last[name] == position and name not in found.values():
                found[write.tensor] = name
                break
    return found


def nontemporal_outputs(function: BoundFunction, group: FusionGroup, target: CpuTarget) -> frozenset[str]:
    """The tensors that `group` should store non-temporally, in whole cache lines.

    The group does not read them, and its working set is too large for later readers to find them in cache.
    """
    if bytes_touched(function, group) < target.reuse_limit_bytes:
        return frozenset()
    tensors = (function.tensor(name) for name in _only_written(group))
    return frozenset(t.name for t in tensors if has_aligned_rows(t.strides, t.dtype.size))


def needs_line_staging(function: BoundFunction, group: FusionGroup, target: CpuTarget) -> frozenset[str]:
    """The tensors that a transposition should store non-temporally through a buffer in L2.

    A partly written line travels to the last-level cache and back between writes. If that cache is distant, it pays to
    assemble whole lines, for any alignment of the output's rows.
    """
    return _only_written(group) if bytes_touched(function, group) > target.writeback_limit_bytes else frozenset()


def _only_written(group: FusionGroup) -> frozenset[str]:
    """The tensors that `group` accesses but does not read, except any with a subscript of several indices: its rows
    would begin anywhere in a cache line."""
    read = {r.tensor for n in group.nodes for r in n.reads}
    joined = {w.tensor for n in group.nodes for w in n.writes if any(_count_indices(e) > 1 for e in w.subscripts)}
    return frozenset(t for n in group.nodes for t in n.tensors) - read - joined


def _count_indices(e: tc.Expr) -> int:
    return len({x.name for x in tc.walk_expr(e) if isinstance(x, tc.Index)})


def bytes_touched(function: BoundFunction, group: FusionGroup) -> int:
    """An upper bound of the bytes that `group` touches; of a large table, only the rows that data selects count."""
    points = Counter[str]()
    for node in group.nodes:
        extents = {i.name: i.extent for i in (*node.free, *node.reduction_indices)}
        for access in (*node.writes, *node.reads):
            names = {x.name for e in access.subscripts for x in tc.walk_expr(e) if isinstance(x, tc.Index)}
            points[access.tensor] += prod(extents[name] for name in names if name in extents)
    return sum(min(t.size, points[t.name]) * t.dtype.size for t in function.tensors)
