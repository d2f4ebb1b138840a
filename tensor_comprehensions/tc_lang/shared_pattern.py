"""The sparsity pattern that a tensor shares with an operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .ir import Access, Expr, Index, Symbol


@dataclass(frozen=True, slots=True)
class SharedPattern:
    """The operand `source` whose sparsity pattern a tensor has, and the tensor's dimension for each of the operand's.

    The tensor's other dimensions are dense: every stored element of the operand has a row of values.
    """

    source: str
    dims: tuple[int, ...]

    def access(self, subscripts: Sequence[Expr], source: Symbol) -> Access:
        """The access of the operand where the tensor has these subscripts."""
        return Access(self.source, tuple(subscripts[d] for d in self.dims), source.dtype)


def find_dims(a: Access, subscripts: Sequence[Expr]) -> tuple[int, ...] | None:
    """For each subscript of `a`, the dimension of a target with `subscripts` that has the same subscript.

    None if the target lacks one of them or has it twice, if the target is a permutation of `a`, or if its other
    subscripts are not distinct indices.
    """
    own = list(subscripts)
    if any(own.count(e) != 1 for e in a.subscripts) or len(set(a.subscripts)) < len(a.subscripts):
        return None
    dims = tuple(own.index(e) for e in a.subscripts)
    dense = [e for d, e in enumerate(own) if d not in dims]
    if not dense:
        return dims if list(dims) == sorted(dims) else None
    return dims if all(isinstance(e, Index) for e in dense) and len(set(dense)) == len(dense) else None
