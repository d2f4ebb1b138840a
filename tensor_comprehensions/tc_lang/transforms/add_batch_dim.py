"""Add a leading batch dimension to some tensors of a def, so that one call does the work of many (vmap).

This is exact because the new index is parallel everywhere: each slice along it is a call of the original def.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...core.dtypes import INT64
from ...core.errors import CheckError
from ..ir import (
    INDEX_TYPE,
    Access,
    Const,
    ExplicitRange,
    Expr,
    Function,
    Index,
    Size,
    Statement,
    Symbol,
    operands_of,
    walk_expr,
    with_operands,
)


def add_batch_dim(function: Function, names: Iterable[str]) -> tuple[Function, frozenset[str]]:
    """Batch the inputs and initial values `names` of a def. Return the def and the names of its batched outputs.

    Outputs that do not depend on the batch keep their shapes. Raises CheckError if one of `names` is a scalar whose
    value is part of the kernel, and so cannot vary.
    """
    asked = tuple(sorted(set(names)))
    for name in asked:
        if function.tensor(name).is_compile_time:
            raise CheckError(
                f"'{name}' of '{function.name}' is used in a subscript or a range, and cannot differ within a batch",
                source=function.source,
                span=function.tensor(name).span,
            )
    over = _dependent_tensors(function, asked)
    taken = {t.name for t in function.tensors} | {*function.sizes, *(i for s in function.statements for i in s.indices)}
    batch = _Batch(over, _fresh_name("batch", taken), _fresh_name("b", taken))
    result = replace(
        function,
        name=f"{function.name}_batched",
        tensors=tuple(batch.symbol(t) for t in function.tensors),
        statements=tuple(batch.statement(s) for s in function.statements),
        sizes=(batch.size, *function.sizes),
        constraints=tuple(
            replace(c, left=batch.expression(c.left), right=batch.expression(c.right)) for c in function.constraints
        ),
        canonical=f"{function.canonical}\nbatched by {', '.join(_list_tensor_positions(function, asked))}",
    )
    return result, frozenset(over) & frozenset(function.returns)


def _list_tensor_positions(function: Function, names: Iterable[str]) -> list[str]:
    """The positions of tensors among those of the def, as text, which do not depend on their names."""
    order = [t.name for t in function.tensors]
    return [str(order.index(name)) for name in names]


def _dependent_tensors(function: Function, names: Iterable[str]) -> set[str]:
    """The tensors that depend on any of `names`, regardless of the order of statements."""
    found, before = set(names), 0
    while len(found) != before:
        before = len(found)
        for s in function.statements:
            read = {x.tensor for e in (s.value, *s.subscripts) for x in walk_expr(e) if isinstance(x, Access)}
            if read & found:
                found.add(s.target)
    return found


def _fresh_name(base: str, taken: set[str]) -> str:
    name, n = base, 0
    while name in taken:
        n += 1
        name = f"{base}_{n}"
    return name


@dataclass(frozen=True, slots=True)
class _Batch:
    """A new batch dimension. over: the tensors that get it. size, index: its size name and its index name."""

    over: set[str]
    size: str
    index: str

    def symbol(self, t: Symbol) -> Symbol:
        if t.name not in self.over:
            return t
        extents = None if t.extents is None and t.rank else (Size(self.size, INT64), *(t.extents or ()))
        return replace(t, rank=t.rank + 1, extents=extents, format=None)

    def statement(self, s: Statement) -> Statement:
        changed = replace(
            s,
            subscripts=tuple(map(self.expression, s.subscripts)),
            value=self.expression(s.value),
            ranges=tuple(replace(r, lower=self.expression(r.lower), upper=self.expression(r.upper)) for r in s.ranges),
            exists=tuple(a for a in map(self.expression, s.exists) if isinstance(a, Access)),
        )
        if s.target not in self.over:
            return changed
        given = ExplicitRange(self.index, Const(0, INT64), Size(self.size, INT64))
        return replace(
            changed,
            subscripts=(Index(self.index, INDEX_TYPE), *changed.subscripts),
            indices=(self.index, *s.indices),
            num_free=s.num_free + 1,
            ranges=(given, *changed.ranges),
        )

    def expression(self, e: Expr) -> Expr:
        """`e` with the batch index as the first subscript of batched tensors, and with their extents renumbered."""
        e = with_operands(e, [self.expression(x) for x in operands_of(e)])
        match e:
            case Access(tensor=name, subscripts=subscripts) if name in self.over:
                return replace(e, subscripts=(Index(self.index, INDEX_TYPE), *subscripts))
            case Size(name=name):
                return replace(e, name=_shift_extent(name, self.over))
        return e


def _shift_extent(size: str, over: set[str]) -> str:
    """Rename `t.d`, the extent of dimension `d` of tensor `t`, to `t.(d + 1)` if `t` has a new first dimension."""
    tensor, dot, dimension = size.rpartition(".")
    return f"{tensor}.{int(dimension) + 1}" if dot and tensor in over else size
