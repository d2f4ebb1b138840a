"""Drop dimensions of one element from a bound def, so that contiguous elements lie along its last dimension."""

from __future__ import annotations

from dataclasses import replace

from .. import ir as f
from ..ir import BoundFunction, BoundStatement, Tensor


def without_unit_dims(function: BoundFunction) -> BoundFunction:
    """The same program on the same memory, without unit dimensions. Free indices with one value become constants."""
    if any(s.elements or s.terms for s in function.statements):
        return function
    kept = {t.name: tuple(n for n, size in enumerate(t.shape) if size != 1) for t in function.tensors}
    return replace(
        function,
        tensors=tuple(_squeeze_tensor(t, kept[t.name]) for t in function.tensors),
        statements=tuple(_squeeze_statement(s, kept) for s in function.statements),
    )


def _squeeze_tensor(t: Tensor, kept: tuple[int, ...]) -> Tensor:
    return replace(t, shape=tuple(t.shape[n] for n in kept), strides=tuple(t.strides[n] for n in kept))


def _squeeze_statement(s: BoundStatement, kept: dict[str, tuple[int, ...]]) -> BoundStatement:
    values = {i.name: i.lower for i in s.free if i.extent == 1}

    def squeeze(e: f.Expr) -> f.Expr:
        if isinstance(e, f.Index) and e.name in values:
            return f.Const(values[e.name], e.dtype)
        if isinstance(e, f.Access):
            e = replace(e, subscripts=tuple(e.subscripts[n] for n in kept[e.tensor]))
        return f.map_operands(e, squeeze)

    return replace(
        s,
        subscripts=tuple(squeeze(s.subscripts[n]) for n in kept[s.target]),
        value=squeeze(s.value),
        indices=tuple(i for i in s.indices if i.name not in values),
        num_free=s.num_free - len(values),
        checks=tuple(
            replace(c, subscript=squeeze(c.subscript), guard=None if c.guard is None else squeeze(c.guard))
            for c in s.checks
        ),
    )
