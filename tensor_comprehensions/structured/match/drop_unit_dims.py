"""Normal form of a structured op: no iterator of extent 1."""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import InternalError
from ...loop_ir import build
from ...loop_ir.nodes import Expr, Load
from ...loop_ir.rewrite import substitute
from ..op import StructuredOp


def drop_unit_dims(op: StructuredOp) -> StructuredOp:
    """`op` with 0 in place of every iterator of extent 1."""
    zeros: dict[str, Expr] = {i.name: build.const(0) for i in op.iterators if i.extent == 1}
    if not zeros:
        return op
    output = substitute(op.output, zeros)
    if not isinstance(output, Load):
        raise InternalError(f"{op.name}: the output became {output}")
    elements, terms = (
        tuple(replace(h, terms=tuple((n, c) for n, c in h.terms if n not in zeros)) for h in halves)
        for halves in (op.elements, op.terms)
    )
    return replace(
        op,
        elements=elements,
        terms=terms,
        iterators=tuple(i for i in op.iterators if i.extent != 1),
        output=output,
        left=substitute(op.left, zeros),
        right=substitute(op.right, zeros),
        initial=None if op.initial is None else substitute(op.initial, zeros),
        epilogue=None if op.epilogue is None else substitute(op.epilogue, zeros),
    )
