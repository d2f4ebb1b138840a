"""The state of a walk: its position, and the code to emit there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..loop_ir.nodes import Expr, Stmt
from ..tc_lang.ir import Access
from .absent_operands import Term
from .levels import Place


@dataclass(frozen=True, slots=True)
class State:
    """The state inside the loops so far.

    term: the rest of the value. places: the positions of the occurrences. indices: the values of loops and of indices.
    """

    term: Term
    places: Mapping[Access, Place]
    indices: Mapping[str, Expr] = field(default_factory=dict)


Body = Callable[[State], Stmt]
Chosen = Callable[[State, Mapping[Access, Expr]], Stmt]
"""Emits an instance in which an operand counts if a condition holds, and is 0 otherwise."""
Appended = Callable[[Callable[[Expr], State], Expr], Stmt]
"""Emits neighboring instances: those of the states for 0, 1 and so on, and how many these are."""
