"""Find the loops that nodes can share: rows with one index of each node, along which no dependence crosses iterations.

All indices of a row have the same extent. isl tells for which pairs of indices every dependence between two nodes has
distance zero; nodes without dependences are matched where they read a common tensor at the same pace. What is left is a
problem of constraints with few values, solved by arc consistency and search. isl's own scheduler would also order the
loops inside, which no one needs: it takes seconds for a dozen nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from ...tc_lang import ir as tc
from ...tc_lang.affine import Affine, Interval, Opaque, affine_variables, expr_interval, to_affine_cached
from ...tc_lang.ir import BoundIndex
from ..scop.scop import Scop, ScopStatement

Pairs = frozenset[tuple[str, str]]
Arcs = Mapping[tuple[str, str], Pairs]
"""For (node, node), the pairs of their indices that may be in one row."""
Candidates = dict[str, tuple[str, ...]]
"""For each node, the indices that may be in a row, outermost first."""


@dataclass(frozen=True)
class BandMember:
    """A loop that nodes share. places: (node, (index, shift)): the loop's value is `index + shift` of each node."""

    places: tuple[tuple[str, tuple[str, int]], ...]
    lower: int
    upper: int

    @property
    def extent(self) -> int:
        return self.upper - self.lower

    def index_and_shift(self, node: ScopStatement) -> tuple[str, int]:
        return self._place_of[node.name]

    @cached_property
    def _place_of(self) -> Mapping[str, tuple[str, int]]:
        return dict(self.places)


def find_shared_rows(scop: Scop, nodes: Sequence[ScopStatement]) -> tuple[BandMember, ...]:
    """The rows that `nodes` can share, outermost first; () if there are none.

    The nodes must be connected by dependences or by reads of the same elements. If reads connect them, a row must
    keep these together; further rows need not.
    """
    candidates = {n.name: tuple(i.name for i in n.free if is_parallel_index(scop, n, i)) for n in nodes}
    arcs = _find_dependence_arcs(scop, nodes)
    reuse = _find_reuse_arcs(nodes, arcs)
    if reuse is None:
        return ()
    rows: list[BandMember] = []
    for allowed in ({**arcs, **reuse}, arcs) if reuse else (arcs,):
        if allowed is arcs and reuse and not rows:
            break
        while (row := _find_row(nodes, candidates, allowed)) is not None:
            rows.append(row)
            candidates = {n.name: _remove_index(candidates[n.name], row.index_and_shift(n)[0]) for n in nodes}
    order = [i.name for i in nodes[0].free]
    return tuple(sorted(rows, key=lambda row: order.index(row.index_and_shift(nodes[0])[0])))


def is_parallel_index(scop: Scop, node: ScopStatement, index: BoundIndex) -> bool:
    """Whether instances of `node` depend only on those with the same value of `index`."""
    return node.name not in scop.sources_of(node) or (index.name,) * 2 in scop.coincident_indices(node, node)


def _remove_index(indices: tuple[str, ...], index: str) -> tuple[str, ...]:
    return tuple(i for i in indices if i != index)


def _find_dependence_arcs(scop: Scop, nodes: Sequence[ScopStatement]) -> Arcs:
    """For each node and each other one that it depends on, the pairs along which that dependence has distance zero."""
    by_name = {n.name: n for n in nodes}
    return {
        (source, n.name): scop.coincident_indices(by_name[source], n)
        for n in nodes
        for source in sorted(scop.sources_of(n))
        if source in by_name and source != n.name
    }


def _find_reuse_arcs(nodes: Sequence[ScopStatement], arcs: Arcs) -> Arcs | None:
    """The arcs that connect nodes without dependences by common reads; None if some nodes stay unconnected."""
    component = {n.name: n.name for n in nodes}
    for source, sink in arcs:
        _merge_components(component, source, sink)
    found: dict[tuple[str, str], Pairs] = {}
    for a, b in combinations(nodes, 2):
        if component[a.name] != component[b.name] and (pairs := _pair_reading_indices(a, b)):
            found[a.name, b.name] = pairs
            _merge_components(component, a.name, b.name)
    return found if len(set(component.values())) <= 1 else None


def _merge_components(component: dict[str, str], a: str, b: str) -> None:
    """Merge the connected components of `a` and `b`."""
    old, new = component[b], component[a]
    for name, c in component.items():
        if c == old:
            component[name] = new


def _pair_reading_indices(a: ScopStatement, b: ScopStatement) -> Pairs:
    """The pairs of free indices along which both nodes read a tensor at the same pace, and may share elements."""
    return frozenset(
        pair
        for x in a.reads
        for y in b.reads
        if x.tensor == y.tensor and x.subscripts and _may_overlap(a, x, b, y)
        for pair in _pair_access_indices(a, x, b, y)
    )


def _pair_access_indices(a: ScopStatement, x: tc.Access, b: ScopStatement, y: tc.Access) -> Iterator[tuple[str, str]]:
    """The pairs of free indices with the same term, such as `3 * (i / 4)`, in a dimension of two accesses."""
    ours, theirs = {i.name for i in a.free}, {i.name for i in b.free}
    for p, q in zip(x.subscripts, y.subscripts, strict=True):
        others = dict(_index_terms(q, theirs))
        yield from ((name, n) for name, term in _index_terms(p, ours) for n, t in others.items() if t == term)


def _index_terms(subscript: tc.Expr, indices: Set[str]) -> Iterator[tuple[str, str]]:
    """Each index in a term of its own in a subscript, with that term for an unnamed index."""
    for atom, factor in to_affine_cached(subscript).terms:
        form = Affine(0, ((atom, factor),))
        names = set(affine_variables(form))
        if len(names) == 1 and not isinstance(atom, Opaque) and names <= indices:
            (name,) = names
            yield name, str(form).replace(name, "_")


def _may_overlap(a: ScopStatement, x: tc.Access, b: ScopStatement, y: tc.Access) -> bool:
    """Whether the ranges of both accesses overlap in every dimension."""
    for p, q in zip(x.subscripts, y.subscripts, strict=True):
        (low, high), (other_low, other_high) = expr_interval(p, _index_ranges(a)), expr_interval(q, _index_ranges(b))
        if low > other_high or other_low > high:
            return False
    return True


def _index_ranges(node: ScopStatement) -> dict[str, Interval]:
    return {i.name: (i.lower, i.upper - 1) for i in (*node.free, *node.reduction_indices)}


def _find_row(nodes: Sequence[ScopStatement], candidates: Candidates, arcs: Arcs) -> BandMember | None:
    """The row with the outermost index of the first node for which there is one."""
    bounds = {n.name: {i.name: i for i in n.free} for n in nodes}
    first = nodes[0].name
    for index in candidates[first]:
        start = bounds[first][index]
        alike = {n: tuple(i for i in names if bounds[n][i].extent == start.extent) for n, names in candidates.items()}
        chosen = _assign_indices({**alike, first: (index,)}, arcs)
        if chosen is not None:
            places = ((n.name, (chosen[n.name], start.lower - bounds[n.name][chosen[n.name]].lower)) for n in nodes)
            return BandMember(tuple(places), start.lower, start.upper)
    return None


def _assign_indices(candidates: Candidates, arcs: Arcs) -> dict[str, str] | None:
    """One of the candidates of each node, so that every arc holds; None if that is impossible."""
    left = _prune_candidates(candidates, arcs)
    if left is None:
        return None
    open_node = next((n for n, names in left.items() if len(names) > 1), None)
    if open_node is None:
        return {n: name for n, (name,) in left.items()}
    tried = (_assign_indices({**left, open_node: (name,)}, arcs) for name in left[open_node])
    return next((found for found in tried if found is not None), None)


def _prune_candidates(candidates: Candidates, arcs: Arcs) -> Candidates | None:
    """`candidates` without those that match none of a neighbor, to a fixpoint; None if a node has none left."""
    left, changed = dict(candidates), True
    while changed and all(left.values()):
        changed = False
        for (source, sink), pairs in arcs.items():
            kept = [p for p in pairs if p[0] in left[source] and p[1] in left[sink]]
            for side, name in enumerate((source, sink)):
                fitting = tuple(i for i in left[name] if any(p[side] == i for p in kept))
                changed |= fitting != left[name]
                left[name] = fitting
    return left if all(left.values()) else None
