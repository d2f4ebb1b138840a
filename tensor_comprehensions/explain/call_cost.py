"""The work of a call: operations and bytes."""

from __future__ import annotations

from math import prod

from ..tc_lang.ir import Access, Binary, BoundFunction, Call, Role, Select, Unary, walk_expr


def call_flops(bound: BoundFunction) -> int:
    """Arithmetic operations of a call as the def states them: operators, functions, and one addition per summed term.

    Operations in subscripts do not count.
    """
    return sum(
        (_count_operations(s.value) + (s.reduction is not None)) * prod(i.extent for i in s.indices)
        for s in bound.statements
    )


def _count_operations(value: object) -> int:
    """Operators and functions in a value, without those of subscripts."""
    found: list[object] = [value]
    count = 0
    while found:
        e = found.pop()
        if isinstance(e, Access):
            continue
        count += isinstance(e, Binary | Unary | Call | Select)
        inner = [x for x in walk_expr(e) if x is not e]  # type: ignore[arg-type]
        nested = {id(y) for x in inner for y in walk_expr(x) if y is not x}
        found += [x for x in inner if id(x) not in nested]
    return count


def call_bytes(bound: BoundFunction) -> int:
    """Bytes of all arguments and results: a lower bound on the memory traffic of a call."""
    return sum(t.size * t.dtype.size for t in bound.tensors if t.role is not Role.TEMPORARY)
