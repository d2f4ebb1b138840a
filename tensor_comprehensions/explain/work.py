"""Operations and bytes of a call, and what the machine can do of them at most."""

from __future__ import annotations

from math import prod

from ..target import CpuTarget
from ..tc_lang.ir import Binary, BoundFunction, Call, Role, Select, Unary, walk_expr
from .report import Roofline


def call_flops(bound: BoundFunction) -> int:
    """Arithmetic of a call as the def writes it: each operator, function and term of a sum is one."""
    total = 0
    for s in bound.statements:
        own = sum(isinstance(e, Binary | Unary | Call | Select) for e in walk_expr(s.value))
        total += (own + (s.reduction is not None)) * prod(i.extent for i in s.indices)
    return total


def call_bytes(bound: BoundFunction) -> int:
    """Bytes of all arguments and results: what has to be moved at least."""
    return sum(t.size * t.dtype.size for t in bound.tensors if t.role is not Role.TEMPORARY)


def call_roofline(bound: BoundFunction, target: CpuTarget, seconds: float | None = None) -> Roofline | None:
    """Work and traffic of a call; None without limits of the machine, which are measured where that is asked for."""
    return None
