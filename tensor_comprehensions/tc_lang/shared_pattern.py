"""Tensors that have the stored places of an operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ir import Access, Expr, Index, Symbol


@dataclass(frozen=True, slots=True)
class SharedPattern:
    """The operand `source` whose stored places a tensor has, and the dimensions of the tensor that are the operand's.

    Its other dimensions are dense: every stored place has a row of values.
    """

    source: str
    dims: tuple[int, ...]

    def access(self, subscripts: Sequence[Expr], source: Symbol) -> Access:
        """The access of the operand where the tensor has these subscripts."""
        return Access(self.source, tuple(subscripts[d] for d in self.dims), source.dtype)


def find_dims(a: Access, subscripts: Sequence[Expr]) -> tuple[int, ...] | None:
    """The dimensions of a target with `subscripts` that have those of `a`.

    None if the target lacks one of them or has it twice, if it only has them in another order, or if its other
    subscripts are no different indices.
    """
    own = list(subscripts)
    if any(own.count(e) != 1 for e in a.subscripts) or len(set(a.subscripts)) < len(a.subscripts):
        return None
    dims = tuple(own.index(e) for e in a.subscripts)
    dense = [e for d, e in enumerate(own) if d not in dims]
    if not dense:
        return dims if list(dims) == sorted(dims) else None
    return dims if all(isinstance(e, Index) for e in dense) and len(set(dense)) == len(dense) else None
