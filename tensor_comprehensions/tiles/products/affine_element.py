"""A tensor element with affine subscripts, and tiles of such elements as views of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...layouts import Layout
from ...loop_ir import build
from ...loop_ir.linear_forms import linear_terms
from ...loop_ir.nodes import Buffer, Expr, Space, Var
from ...lower_expr import LoweringScope, lower_access
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex
from ..builder.tile_views import MemoryView
from ..tensor_levels import TensorLevel
from ..tensors import DataTensor


@dataclass(frozen=True, slots=True)
class AffineElement:
    """`buffer[sum of coefficient * index + constant, ...]`, where indices are counted from their lower bounds.

    Attributes:
        coefficients, constants: for each dimension of the buffer; coefficients by the name of the index.
    """

    buffer: Buffer
    coefficients: tuple[Mapping[str, int], ...]
    constants: tuple[int, ...]

    def stride(self, name: str) -> int:
        """The stride of the address along an index, in elements."""
        return sum(c.get(name, 0) * s for c, s in zip(self.coefficients, self.buffer.strides, strict=True))

    def view(self, indices: Sequence[BoundIndex], outside: Mapping[str, Expr]) -> MemoryView:
        """The elements along `indices`, a dimension for each; `outside` has the values of all other indices."""
        first = [
            _add_terms([build.const(constant), *(build.mul(outside[n], c) for n, c in part.items() if n in outside)])
            for part, constant in zip(self.coefficients, self.constants, strict=True)
        ]
        origin = _add_terms([build.mul(x, s) for x, s in zip(first, self.buffer.strides, strict=True)])
        extents = tuple(i.extent for i in indices)
        layouts = (
            Layout(extents, tuple(self.stride(i.name) for i in indices)),
            *(Layout(extents, tuple(part.get(i.name, 0) for i in indices)) for part in self.coefficients),
        )
        level = TensorLevel(layouts, (False,) * len(extents))
        tensor = DataTensor(
            (level,), (origin, *first), (None,) * len(first), dtype=self.buffer.type.dtype, memory=Space.GLOBAL
        )
        return MemoryView(self.buffer, tensor)


def affine_element(
    access: tc.Access, indices: Sequence[BoundIndex], buffers: Mapping[str, Buffer]
) -> AffineElement | None:
    """The element that `access` reads; None if a subscript is not affine or has a negative coefficient."""
    values = {i.name: build.add(build.var(i.name), i.lower) for i in indices}
    buffer, where = lower_access(access.tensor, access.subscripts, LoweringScope(values, buffers))
    coefficients, constants = [], []
    for index in where:
        terms, constant = linear_terms(index)
        if any(not isinstance(atom, Var) or c < 0 for atom, c in terms.items()):
            return None
        coefficients.append({atom.name: c for atom, c in terms.items() if isinstance(atom, Var)})
        constants.append(constant)
    return AffineElement(buffer, tuple(coefficients), tuple(constants))


def _add_terms(terms: Sequence[Expr]) -> Expr:
    total: Expr = build.const(0)
    for term in terms:
        total = build.add(total, term)
    return total
