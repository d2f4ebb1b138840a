"""Fuse adjacent dimensions that are always iterated together: longer vector loops, fewer loops.

Dimensions q and q+1 of tensors merge if they are contiguous in memory and every statement subscripts them by a pair of
plain indices over their whole extents that occurs nowhere else (superindex fusion as in GETT, for whole programs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ...core.internal_names import internal_name
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Tensor, map_operands, walk_expr

Candidate = tuple[str, int]  # (tensor, q)
Pair = tuple[str, str]  # (index of dimension q, index of dimension q + 1)


def collapse(function: BoundFunction) -> BoundFunction:
    """The same program on the same memory, with as few dimensions as possible."""
    function = replace(function, statements=tuple(map(_without_single_terms, function.statements)))
    while candidates := _find_merge_candidates(function):
        function = _merge_dimensions(function, candidates)
    return function


def _without_single_terms(s: BoundStatement) -> BoundStatement:
    """`s` with reduction indices of extent 1 replaced by their values, such as those of 1 x 1 convolutions."""
    single = {i.name: i.lower for i in s.reduction_indices if i.extent == 1}
    if not single:
        return s

    def substitute(e: tc.Expr) -> tc.Expr:
        match e:
            case tc.Index(name, dtype) if name in single:
                return tc.Const(single[name], dtype)
            case tc.Binary("+", left, right, dtype) if dtype == tc.INDEX_TYPE:
                a, b, zero = substitute(left), substitute(right), tc.Const(0, dtype)
                return b if a == zero else a if b == zero else tc.Binary("+", a, b, dtype)
            case _:
                return map_operands(e, substitute)

    checks = (
        replace(c, subscript=substitute(c.subscript), guard=None if c.guard is None else substitute(c.guard))
        for c in s.checks
    )
    return replace(s, value=substitute(s.value), checks=tuple(checks))


def _find_merge_candidates(function: BoundFunction) -> frozenset[Candidate]:
    """A set of dimension pairs to merge together, at most one per tensor; empty if none can be merged."""
    candidates = {(t.name, q) for t in function.tensors for q in range(len(t.shape) - 1) if _may_merge(t, q)}
    while True:
        refused = {c for s in function.statements for c in _refused_candidates(function, s, candidates)}
        if not refused:
            break
        candidates -= refused
    return _one_component(candidates, function)


def _may_merge(t: Tensor, q: int) -> bool:
    """Whether dimensions q and q + 1 are contiguous; an extent that only a call tells merges with single elements."""
    if any(t.extent_variables[q : q + 2] + t.stride_variables[q : q + 2]):
        return t.shape[q] == 1 and t.extent_variable(q) is None and t.extent_variable(q + 1) is not None
    return bool(t.strides[q] == t.strides[q + 1] * t.shape[q + 1] and t.shape[q] and t.shape[q + 1])


def _one_component(candidates: set[Candidate], function: BoundFunction) -> frozenset[Candidate]:
    """The first connected set of candidates with at most one per tensor; empty if there is none."""
    places = {t.name: place for place, t in enumerate(function.tensors)}
    for start in sorted(candidates, key=lambda c: (places[c[0]], c[1])):
        component = _connected_candidates(start, candidates, function)
        if len({tensor for tensor, _ in component}) == len(component):
            return frozenset(component)
    return frozenset()


def _connected_candidates(start: Candidate, candidates: set[Candidate], function: BoundFunction) -> set[Candidate]:
    """The candidates that must merge together with `start`, because statements use the same index pairs for them."""
    found = {start}
    grown = True
    while grown:
        grown = False
        for s in function.statements:
            pairs = {p for c, p in _collect_index_pairs(s, candidates) if c in found}
            more = {c for c, p in _collect_index_pairs(s, candidates) if p in pairs} - found
            found |= more
            grown = grown or bool(more)
    return found


def _refused_candidates(function: BoundFunction, s: BoundStatement, candidates: set[Candidate]) -> Iterator[Candidate]:
    """The candidates that the accesses of `s` forbid."""
    ranges = {i.name: i for i in s.indices}
    free = {i.name for i in s.free}
    uses = _count_index_uses(s)
    for access in _collect_accesses(s):
        tensor = function.tensor(access.tensor)
        for q in range(len(access.subscripts) - 1):
            if (tensor.name, q) not in candidates:
                continue
            pair = _match_index_pair(access, q)
            if pair is None or (pair[0] in free) != (pair[1] in free) or not _spans_dims(tensor, q, pair, ranges):
                yield tensor.name, q
                continue
            together = sum(1 for c, p in _collect_index_pairs(s, candidates) if p == pair)
            if uses.get(pair[0], 0) != together or uses.get(pair[1], 0) != together:
                yield tensor.name, q


def _spans_dims(tensor: Tensor, q: int, pair: Pair, ranges: Mapping[str, BoundIndex]) -> bool:
    return all((ranges[name].lower, ranges[name].upper) == (0, tensor.shape[q + k]) for k, name in enumerate(pair))


def _match_index_pair(access: tc.Access, q: int) -> Pair | None:
    match access.subscripts[q], access.subscripts[q + 1]:
        case tc.Index(i), tc.Index(j) if i != j:
            return i, j
    return None


def _collect_index_pairs(s: BoundStatement, candidates: set[Candidate]) -> Iterator[tuple[Candidate, Pair]]:
    for access in _collect_accesses(s):
        for q in range(len(access.subscripts) - 1):
            pair = _match_index_pair(access, q)
            if pair is not None and (access.tensor, q) in candidates:
                yield (access.tensor, q), pair


def _list_root_exprs(s: BoundStatement) -> Iterator[tc.Expr]:
    yield s.value
    for c in s.checks:
        yield c.subscript
        if c.guard is not None:
            yield c.guard


def _collect_accesses(s: BoundStatement) -> Iterator[tc.Access]:
    for root in (
        tc.Access(s.target, s.subscripts, s.value.dtype),
        *_list_root_exprs(s),
    ):  # also subscripts of the target
        yield from (e for e in walk_expr(root) if isinstance(e, tc.Access))


def _count_index_uses(s: BoundStatement) -> dict[str, int]:
    """The number of occurrences of each index in `s`."""
    counts: dict[str, int] = {}
    for root in (*s.subscripts, *_list_root_exprs(s)):
        for e in walk_expr(root):
            if isinstance(e, tc.Index):
                counts[e.name] = counts.get(e.name, 0) + 1
    return counts


def _merge_dimensions(function: BoundFunction, candidates: frozenset[Candidate]) -> BoundFunction:
    where = dict(candidates)
    tensors = tuple(_merged_tensor(t, where[t.name]) if t.name in where else t for t in function.tensors)
    statements = tuple(_merged_statement(s, set(candidates)) for s in function.statements)
    return replace(function, tensors=tensors, statements=statements)


def _merged_tensor(t: Tensor, q: int) -> Tensor:
    shape = (*t.shape[:q], t.shape[q] * t.shape[q + 1], *t.shape[q + 2 :])
    extents, strides = ((*held[:q], *held[q + 1 :]) for held in (t.extent_variables, t.stride_variables))
    return replace(
        t,
        shape=shape,
        strides=(*t.strides[:q], *t.strides[q + 1 :]),
        extent_variables=extents,
        stride_variables=strides,
    )


def _merged_index(name: str, first: BoundIndex, second: BoundIndex) -> BoundIndex:
    return BoundIndex(name, 0, first.extent * second.extent, second.variable)


def _merged_statement(s: BoundStatement, candidates: set[Candidate]) -> BoundStatement:
    pairs = tuple(dict.fromkeys(p for _, p in _collect_index_pairs(s, candidates)))
    seconds = {j: i for i, j in pairs}
    names = {i: internal_name(i, j) for i, j in pairs}
    where = dict(candidates)

    def merge_subscripts(tensor: str, subscripts: tuple[tc.Expr, ...]) -> tuple[tc.Expr, ...]:
        if tensor not in where:
            return subscripts
        q = where[tensor]
        first = subscripts[q]
        assert isinstance(first, tc.Index)
        return (*subscripts[:q], replace(first, name=names[first.name]), *subscripts[q + 2 :])

    def rewrite(e: tc.Expr) -> tc.Expr:
        e = map_operands(e, rewrite)
        return replace(e, subscripts=merge_subscripts(e.tensor, e.subscripts)) if isinstance(e, tc.Access) else e

    by_name = {i.name: i for i in s.indices}
    second_of = dict(pairs)
    indices = tuple(
        _merged_index(names[i.name], i, by_name[second_of[i.name]]) if i.name in names else i
        for i in s.indices
        if i.name not in seconds
    )
    checks = tuple(
        replace(c, subscript=rewrite(c.subscript), guard=rewrite(c.guard) if c.guard is not None else None)
        for c in s.checks
    )
    return replace(
        s,
        subscripts=merge_subscripts(s.target, tuple(rewrite(e) for e in s.subscripts)),
        value=rewrite(s.value),
        indices=indices,
        num_free=sum(1 for i in s.free if i.name not in seconds),
        checks=checks,
    )
