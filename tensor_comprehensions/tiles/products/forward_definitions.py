"""Forward the value of a definition into a copy that only starts a wider sum: `C = b; wide = C; wide += ...; C = wide`.

A half-precision tensor stores rounded elements between statements, so its sums are in a separate, wider tensor. Once
the value is forwarded, the first definition is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.dtypes import DType
from ...structured.match.product_matching import convert_exactly
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundStatement, map_operands, walk_expr
from ...tc_lang.transforms.extract_statements import tensors_of_statements


def forward_definitions(function: BoundFunction) -> BoundFunction:
    """`function` without definitions that only a copy in the next statement reads before the tensor is redefined."""
    types = {t.name: t.dtype for t in function.tensors}
    statements: list[BoundStatement] = []
    for n, s in enumerate(function.statements):
        before = statements[-1] if statements else None
        if before is not None and _is_copy_of(s, before) and _is_defined_anew(function, n, before):
            statements[-1] = _join_copy(before, s, types[before.target])
        else:
            statements.append(s)
    return replace(function, statements=tuple(statements))


def _definition_subscripts(s: BoundStatement) -> tuple[str, ...] | None:
    """The subscripts of a statement that defines all elements of a range, as distinct indices; None for others."""
    names = tuple(e.name for e in s.subscripts if isinstance(e, tc.Index))
    fine = len(names) == len(s.subscripts) == len(set(names)) == len(s.indices)
    return names if fine and s.reduction is None and not (s.checks or s.elements or s.reads_own_target) else None


def _list_subscript_ranges(s: BoundStatement) -> list[tuple[int, int]]:
    found = {i.name: (i.lower, i.upper) for i in s.indices}
    return [found[n] for n in _definition_subscripts(s) or ()]


def _is_copy_of(s: BoundStatement, before: BoundStatement) -> bool:
    """Whether `s` is a copy, perhaps into another type, of exactly the elements that `before` defines."""
    value = s.value.operand if isinstance(s.value, tc.Cast) else s.value
    if (
        _definition_subscripts(s) is None
        or _definition_subscripts(before) is None
        or _list_subscript_ranges(s) != _list_subscript_ranges(before)
        or s.target == before.target
    ):
        return False
    reads = isinstance(value, tc.Access) and (value.tensor, value.subscripts) == (before.target, s.subscripts)
    return reads and not any(isinstance(e, tc.Access) and e.tensor == before.target for e in walk_expr(before.value))


def _is_defined_anew(function: BoundFunction, copy: int, before: BoundStatement) -> bool:
    """Whether the next statement after `copy` that accesses the tensor of `before` only redefines the same elements."""
    later: Sequence[BoundStatement] = function.statements[copy + 1 :]
    for s in later:
        touched = tensors_of_statements((s,))
        if before.target in touched.read:
            return False
        if s.target == before.target:
            return _definition_subscripts(s) is not None and _list_subscript_ranges(s) == _list_subscript_ranges(before)
    return False


def _join_copy(before: BoundStatement, copy: BoundStatement, dtype: DType) -> BoundStatement:
    """`copy` with the value of the definition `before`, rounded to `dtype`, in its place."""
    names = dict(zip(_definition_subscripts(before) or (), _definition_subscripts(copy) or (), strict=True))

    def rename(e: tc.Expr) -> tc.Expr:
        if isinstance(e, tc.Index):
            return replace(e, name=names.get(e.name, e.name))
        return map_operands(e, rename)

    value = convert_exactly(rename(before.value), dtype)
    return replace(copy, value=convert_exactly(value, copy.value.dtype))
