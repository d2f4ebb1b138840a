"""Lower instances of units to statements of the loop program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir import nodes as ir
from ....loop_ir.buffer_view import BufferView
from ....loop_ir.nodes import Buffer, Space, Type
from ....lower_expr import LoweringScope, lower_access, lower_expr
from ....tc_lang.ir import BoundStatement, Tensor
from ..plan.statement_phases import Phase, Unit


@dataclass(frozen=True, slots=True)
class StatementLowering:
    """Lowers units. buffers: where each tensor is stored. sums: registers for a thread's partial sums, by node name."""

    buffers: Mapping[str, Buffer | BufferView[int]]
    sums: Mapping[str, Buffer]

    def statement(self, unit: Unit, indices: Sequence[ir.Expr], further: Mapping[str, ir.Expr]) -> ir.Stmt:
        """The statement of `unit` for given values of its indices, and of `further` indices by name."""
        scope = LoweringScope(
            {**{i.name: e for i, e in zip(unit.indices, indices, strict=True)}, **further}, self.buffers
        )
        s = unit.statement
        buffer, where = lower_access(s.target, s.subscripts, scope)
        dtype = buffer.type.dtype
        match unit.phase:
            case Phase.INIT:
                assert s.reduction is not None
                return ir.Store(buffer, where, build.neutral(s.reduction, dtype))
            case Phase.UPDATE:
                return ir.Store(buffer, where, build.cast(lower_expr(s.value, scope), dtype), s.reduction)
            case Phase.PARTIAL:
                return ir.Store(
                    self.sums[unit.node.name], (), build.cast(lower_expr(s.value, scope), dtype), s.reduction
                )
            case Phase.FINAL:
                total = ir.Load(self.sums[unit.node.name], ())
                return ir.Store(buffer, where, total, None if s.initialize else s.reduction)
            case Phase.WHOLE:
                value, op = _stored_value(s, build.cast(lower_expr(s.value, scope), dtype))
                return ir.Store(buffer, where, value, op)


def _stored_value(s: BoundStatement, value: ir.Expr) -> tuple[ir.Expr, str | None]:
    """The value to store, and the operator of the store."""
    if s.reduction is None or not s.initialize:
        return value, s.reduction
    dtype = value.type.dtype  # a single term, combined with the neutral element
    return build.binary(build.combiner(s.reduction, dtype), build.neutral(s.reduction, dtype), value), None


def sum_register(unit: Unit, tensor: Tensor) -> Buffer:
    """The register in which a thread combines its terms of `unit`."""
    return Buffer(internal_name(unit.node.name, "sum"), Type(tensor.dtype), (), (), Space.REGISTER)
