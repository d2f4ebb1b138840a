"""Loop nests ("leaves") inside the shared rows of a group: their dimensions, and nodes fused into one nest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ...tc_lang import ir as tc
from ...tc_lang.ir import Inequality
from ..scop.isl_affine import to_isl_affine
from ..scop.scop import Scop, ScopStatement
from .fusion import FusionGroup
from .shared_rows import is_parallel_index


class DimKind(Enum):
    """The dependences between the iterations of a dimension."""

    PARALLEL = "parallel"  # independent for every node of the leaf
    REDUCTION = "reduction"  # combined by a commutative operator in at least one node, independent in the others
    SERIAL = "serial"  # ordered


@dataclass(frozen=True, slots=True)
class NestDim:
    """One loop of a leaf.

    name: the loop variable. row: the shared row whose points in a tile it iterates, or None. lower, upper: its range,
    as values of the first node's index. indices: (node name, index name) for each node. variable: the int64 variable
    that holds its extent, as in `BoundIndex`.
    """

    name: str
    kind: DimKind
    lower: int
    upper: int
    row: int | None
    indices: tuple[tuple[str, str], ...]
    variable: str = ""

    @property
    def extent(self) -> int:
        return max(0, self.upper - self.lower)

    def index(self, node: ScopStatement) -> str:
        return dict(self.indices)[node.name]


@dataclass(frozen=True, slots=True)
class LoopNest:
    """Nodes that run one after another in the body of one loop nest, on the domain of the first.

    elements: the inequalities of that domain that bound the elements needed; the others bound terms of sums.
    """

    nodes: tuple[ScopStatement, ...]
    dims: tuple[NestDim, ...]
    elements: frozenset[Inequality] = frozenset()

    @property
    def interleaves_reductions(self) -> bool:
        """Whether one node's reduction loop would enclose loops over the elements of another node's sums.

        These sums would be initialized and finished repeatedly inside that loop.
        """
        summed = [d for d in self.dims if d.kind is DimKind.REDUCTION]
        own = [(n, {i.name for i in n.reduction_indices}) for n in self.nodes if n.reduction_indices]
        return any(d.index(n) not in names for n, names in own for d in summed)


def build_nests(scop: Scop, group: FusionGroup, point_rows: Sequence[int], *, fuse: bool) -> tuple[LoopNest, ...]:
    """The nests of a group. The rows `point_rows` are loops in the nests; the others are fixed by the loops over tiles.

    fuse: whether to fuse consecutive nodes into one nest if that is legal.
    """
    found: list[LoopNest] = []
    for node in group.nodes:
        leaf = LoopNest((node,), _make_nest_dims(scop, group, node, point_rows), frozenset(node.elements))
        fused = _fuse_nests(group, found[-1], leaf) if found and fuse else None
        if fused is not None:
            found[-1] = fused
        else:
            found.append(leaf)
    return tuple(found)


def _make_nest_dims(
    scop: Scop, group: FusionGroup, node: ScopStatement, point_rows: Sequence[int]
) -> tuple[NestDim, ...]:
    rows = {row.index_and_shift(node)[0]: position for position, row in enumerate(group.rows)}
    dims = []
    for i in node.free:
        row = rows.get(i.name)
        if row is not None and row not in point_rows:
            continue
        independent = row is not None or is_parallel_index(scop, node, i)
        kind = DimKind.PARALLEL if independent else DimKind.SERIAL
        dims.append(NestDim(i.name, kind, i.lower, i.upper, row, ((node.name, i.name),), i.variable))
    for i in node.reduction_indices:
        row = rows.get(i.name)
        if row is None or row in point_rows:
            place = ((node.name, i.name),)
            dims.append(NestDim(i.name, DimKind.REDUCTION, i.lower, i.upper, row, place, i.variable))
    return tuple(dims)


def _fuse_nests(group: FusionGroup, first: LoopNest, second: LoopNest) -> LoopNest | None:
    """Both leaves as one nest; None unless all conflicting accesses would be in the same iteration."""
    (node,) = second.nodes
    if any(n.cluster is not None for n in (node, *first.nodes)):
        return None
    alignment = _match_nest_dims(first, second)
    if alignment is None or not all(_are_compatible(n, node, alignment, first) for n in first.nodes):
        return None
    dims = []
    for dim in first.dims:
        other = alignment[dim.name]
        kinds = {dim.kind, other.kind}
        kind = DimKind.REDUCTION if DimKind.REDUCTION in kinds else DimKind.PARALLEL
        indices = (*dim.indices, *other.indices)
        dims.append(NestDim(dim.name, kind, dim.lower, dim.upper, dim.row, indices, dim.variable))
    names = _match_index_names(group, dims, node, first.nodes[0])
    if names is None or {g.rename_indices(names) for g in node.domain} != set(first.nodes[0].domain):
        return None
    elements = first.elements & {g.rename_indices(names) for g in node.elements}
    fused = LoopNest((*first.nodes, node), tuple(dims), elements)
    return None if fused.interleaves_reductions else fused


def _match_index_names(
    group: FusionGroup, dims: Sequence[NestDim], node: ScopStatement, first: ScopStatement
) -> dict[str, str] | None:
    """For each index in the domain of `node`, the equal index of `first`; None if one has no equal."""
    names = {d.index(node): d.index(first) for d in dims}
    used = {name for g in node.domain for name, _ in g.terms}
    for row in group.rows:
        (mine, shift), (theirs, other) = row.index_and_shift(node), row.index_and_shift(first)
        if mine in used and shift != other:
            return None
        names.setdefault(mine, theirs)
    return names if used <= names.keys() else None


def _match_nest_dims(first: LoopNest, second: LoopNest) -> dict[str, NestDim] | None:
    """For each dimension of `first`, the one of `second` that iterates the same elements; None if one has no match."""
    if len(first.dims) != len(second.dims) or any(d.kind is DimKind.SERIAL for d in (*first.dims, *second.dims)):
        return None
    pairs: dict[str, NestDim] = {}
    (node,) = second.nodes
    by_index = {d.index(node): d for d in second.dims}
    for dim in first.dims:
        match = _by_row(dim, second.dims) if dim.row is not None else _by_access(first, dim, node, by_index)
        if match is None or match in pairs.values():
            return None
        if (match.lower, match.upper, match.variable) != (dim.lower, dim.upper, dim.variable):
            return None
        pairs[dim.name] = match
    return pairs


def _by_row(dim: NestDim, candidates: Sequence[NestDim]) -> NestDim | None:
    return next((d for d in candidates if d.row == dim.row), None)


def _by_access(first: LoopNest, dim: NestDim, node: ScopStatement, by_index: Mapping[str, NestDim]) -> NestDim | None:
    """The dimension of `node` that subscripts a common tensor in the same dimension as `dim` does, or None."""
    for earlier in first.nodes:
        name = dim.index(earlier)
        for a in (*earlier.writes, *earlier.reads):
            for b in (*node.reads, *node.writes):
                if a.tensor == b.tensor and len(a.subscripts) == len(b.subscripts):
                    for x, y in zip(a.subscripts, b.subscripts, strict=True):
                        left, right = _single_index(x), _single_index(y)
                        if left == name and right is not None and right in by_index:
                            return by_index[right]
    return None


def _single_index(e: tc.Expr) -> str | None:
    form = to_isl_affine(e)
    return form.single if form is not None and form.constant == 0 else None


def _are_compatible(
    earlier: ScopStatement, later: ScopStatement, alignment: Mapping[str, NestDim], leaf: LoopNest
) -> bool:
    """Whether every conflict between the two nodes stays within one iteration of the fused nest."""
    conflicts = _collect_conflicts(earlier, later)
    if not conflicts:  # the usual case in a long chain
        return True
    renamed = {alignment[d.name].index(later): d.index(earlier) for d in leaf.dims}
    for a, b in conflicts:
        if len(a.subscripts) != len(b.subscripts):
            return False
        seen = set()
        for x, y in zip(a.subscripts, b.subscripts, strict=True):
            left, right = to_isl_affine(x), to_isl_affine(y)
            if left is None or right is None:
                return False
            if left.constant != right.constant:
                return False
            own = {renamed.get(n, n): c for n, c in right.terms if n in renamed}
            if {n: c for n, c in left.terms if n in renamed.values()} != own:
                return False
            if left.single is not None:
                seen.add(left.single)
        if not all(d.index(earlier) in seen for d in leaf.dims):
            return False
    return True


def _collect_conflicts(earlier: ScopStatement, later: ScopStatement) -> list[tuple[tc.Access, tc.Access]]:
    """Pairs of accesses to one tensor, at least one of them a write."""
    pairs = [(w, a) for w in earlier.writes for a in (*later.reads, *later.writes)]
    pairs += [(r, w) for r in earlier.reads for w in later.writes]
    return [(a, b) for a, b in pairs if a.tensor == b.tensor]
