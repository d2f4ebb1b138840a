"""`BoundFunction` -> `BoundFunction` without features that lowerings need not support.

Afterwards no statement has `reads_own_target`, every reduction combines in the type that its target stores, and no
reduction is empty. The first two use temporaries: a copy of the target before the statement, or an accumulator of the
wider type. An empty reduction becomes an assignment of the neutral element, or no statement at all.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from operator import is_

from ...core.dtypes import INT64, UINT8, DType
from ...core.internal_names import internal_name
from ...core.memory_layout import contiguous_strides
from ..binding.bind import neutral_element
from ..ir import (
    Access,
    BoundFunction,
    BoundIndex,
    BoundsCheck,
    BoundStatement,
    Cast,
    Const,
    Expr,
    Index,
    Role,
    Tensor,
    operands_of,
    with_operands,
)


def legalize(bound: BoundFunction) -> BoundFunction:
    """An equivalent function without these features; `bound` itself if it has none."""
    work = _Work({t.name: t for t in bound.tensors}, {s.name for s in bound.statements})
    statements = tuple(new for s in bound.statements for new in work.statement(s))
    if len(statements) == len(bound.statements) and all(map(is_, statements, bound.statements)):
        return bound
    return replace(bound, tensors=tuple(work.tensors.values()), statements=statements)


def _choose_accumulator_type(dtype: DType) -> DType:
    """The type in which a reduction into `dtype` accumulates; uint8 for bool, where min and max are `and` and `or`."""
    return UINT8 if dtype.is_bool else dtype.accumulator


@dataclass(slots=True)
class _Work:
    tensors: dict[str, Tensor]
    names: set[str]

    def statement(self, s: BoundStatement) -> Iterator[BoundStatement]:
        if s.reduction is not None and any(i.extent == 0 for i in s.indices):
            if s.initialize:
                yield _fill_with_identity(s, self.tensors[s.target])
            return
        if s.reads_own_target:
            copy = self._temporary(
                internal_name(s.target, "before"), self.tensors[s.target], self.tensors[s.target].dtype
            )
            yield self._copy(internal_name(s.name, "copy"), s, s.target, copy)
            s = _read_from_copy(s, copy.name)
        target = self.tensors[s.target]
        wide = _choose_accumulator_type(target.dtype)
        if s.reduction is None or wide == target.dtype:
            yield s
            return
        accumulator = self._temporary(internal_name(s.target, "wide"), target, wide)
        if not s.initialize:
            yield self._copy(internal_name(s.name, "load"), s, s.target, accumulator)
        value = s.value if s.value.dtype == wide else Cast(s.value, wide)
        yield replace(s, target=accumulator.name, value=value)
        yield self._copy(internal_name(s.name, "store"), s, accumulator.name, target)

    def _temporary(self, name: str, like: Tensor, dtype: DType) -> Tensor:
        name = self._fresh_name(name, self.tensors)
        tensor = Tensor(name, dtype, like.shape, contiguous_strides(like.shape), Role.TEMPORARY)
        self.tensors[tensor.name] = tensor
        return tensor

    def _fresh_name(self, name: str, taken: Container[str]) -> str:
        n, candidate = 0, name
        while candidate in taken:
            n += 1
            candidate = internal_name(name, n)
        return candidate

    def _copy(self, name: str, s: BoundStatement, source: str, destination: Tensor) -> BoundStatement:
        """The statement that copies the whole tensor `source` to `destination`."""
        name = self._fresh_name(name, self.names)
        self.names.add(name)
        indices = tuple(BoundIndex(internal_name(f"d{d}"), 0, extent) for d, extent in enumerate(destination.shape))
        subscripts = tuple(Index(i.name, INT64) for i in indices)
        value: Expr = Access(source, subscripts, self.tensors[source].dtype)
        if value.dtype != destination.dtype:
            value = Cast(value, destination.dtype)
        return BoundStatement(
            name, destination.name, subscripts, None, False, value, indices, len(indices), span=s.span
        )


def _fill_with_identity(s: BoundStatement, target: Tensor) -> BoundStatement:
    """The statement that sets every element of the target of `s` to the identity of its reduction."""
    assert s.reduction is not None
    indices = tuple(BoundIndex(internal_name(f"d{d}"), 0, extent) for d, extent in enumerate(target.shape))
    subscripts = tuple(Index(i.name, INT64) for i in indices)
    value = Const(neutral_element(s.reduction, target.dtype), target.dtype)
    return BoundStatement(s.name, s.target, subscripts, None, False, value, indices, len(indices), span=s.span)


def _read_from_copy(s: BoundStatement, copy: str) -> BoundStatement:
    """`s` with reads of its own target replaced by reads of `copy`."""

    def visit(e: Expr) -> Expr:
        e = with_operands(e, [visit(x) for x in operands_of(e)])
        return replace(e, tensor=copy) if isinstance(e, Access) and e.tensor == s.target else e

    def visit_check(c: BoundsCheck) -> BoundsCheck:
        return replace(c, subscript=visit(c.subscript), guard=None if c.guard is None else visit(c.guard))

    return replace(
        s,
        value=visit(s.value),
        subscripts=tuple(visit(e) for e in s.subscripts),
        checks=tuple(visit_check(c) for c in s.checks),
        reads_own_target=False,
    )
