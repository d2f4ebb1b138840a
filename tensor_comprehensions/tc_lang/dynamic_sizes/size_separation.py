"""Give separate names to dimensions that share a size only by coincidence, such as both of the scores s(t,u).

A def keeps its meaning if some of its sizes get new names, as long as these are equal in a call. Dimensions that no
statement indexes together can then be generalized one by one, even if the def has one name for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ...core.internal_names import SEPARATOR, internal_name
from ..ir import Access, ExplicitRange, Expr, Function, Index, Size, Statement, Symbol, map_operands, operands_of

_Node = tuple[str | int, str | int]
"""A dimension of a tensor, or an index of a statement."""


def original_size(name: str) -> str:
    """The size in the original def that `name` was made from."""
    return name.split(SEPARATOR)[0]


def separate_sizes(function: Function, names: Collection[str]) -> Function:
    """`function` with new names for those dimensions of the sizes `names` that no statement indexes together."""
    groups = _group_dimensions(function)
    found: dict[tuple[str, _Node], str] = {}
    for t in function.tensors:
        for d, e in enumerate(t.extents or ()):
            if isinstance(e, Size) and e.name in names:
                number = sum(name == e.name for name, _ in found)
                own = internal_name(e.name, number) if number else e.name
                found.setdefault((e.name, groups[t.name, d]), own)

    def tensor(t: Symbol) -> Symbol:
        extents = t.extents and tuple(_rename_size(e, groups[t.name, d]) for d, e in enumerate(t.extents))
        return replace(t, extents=extents)

    def explicit_range(number: int, r: ExplicitRange) -> ExplicitRange:
        group = groups.get((number, r.index), (number, r.index))
        return replace(r, lower=_rename_size(r.lower, group), upper=_rename_size(r.upper, group))

    def _rename_size(e: Expr, group: _Node) -> Expr:
        if isinstance(e, Size):
            return replace(e, name=found.get((e.name, group), e.name))
        return map_operands(e, lambda x: _rename_size(x, group))

    statements = [
        replace(s, ranges=tuple(explicit_range(n, r) for r in s.ranges)) for n, s in enumerate(function.statements)
    ]
    added = [name for name in found.values() if name not in function.sizes]
    return replace(
        function,
        tensors=tuple(map(tensor, function.tensors)),
        statements=tuple(statements),
        sizes=(*function.sizes, *added),
    )


def _group_dimensions(function: Function) -> dict[_Node, _Node]:
    """Group dimensions and indices that are connected through subscripts; map each to a representative of its group."""
    groups: dict[_Node, _Node] = {(t.name, d): (t.name, d) for t in function.tensors for d in range(t.rank)}
    for n, s in enumerate(function.statements):
        for tensor, subscripts in _list_accesses(s):
            for d, e in enumerate(subscripts):
                for index in _list_indices(e):
                    first = groups.get((tensor, d), (tensor, d))
                    second = groups.setdefault((n, index), (n, index))
                    for node, group in groups.items():
                        if group == second:
                            groups[node] = first
    return groups


def _list_accesses(s: Statement) -> Iterator[tuple[str, tuple[Expr, ...]]]:
    yield s.target, s.subscripts
    stack: list[Expr] = [*s.subscripts, s.value, *s.exists]
    while stack:
        e = stack.pop()
        if isinstance(e, Access):
            yield e.tensor, e.subscripts
        stack += operands_of(e)


def _list_indices(e: Expr) -> Iterator[str]:
    """The indices in a subscript, outside of accesses in it."""
    if isinstance(e, Index):
        yield e.name
    elif not isinstance(e, Access):
        for part in operands_of(e):
            yield from _list_indices(part)
