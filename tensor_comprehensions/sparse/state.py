"""The state of code generation inside the loops of a nest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..loop_ir.nodes import Expr, Stmt
from ..tc_lang.ir import Access
from .absent_operands import Term
from .levels import Place


@dataclass(frozen=True, slots=True)
class State:
    """The state inside the loops so far.

    term: the value, simplified for the operands known to be absent. places: the place that each occurrence has reached.
    indices: the values of loop variables and indices.
    """

    term: Term
    places: Mapping[Access, Place]
    indices: Mapping[str, Expr] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Jammed:
    """How to compute the sums of several stored elements in one loop over their terms.

    count: the number of elements. wrap: emits the code around that loop, given the state of each element, and the
    function that emits the loop for the states inside.
    """

    count: int
    wrap: Callable[[Sequence[State], Callable[[Sequence[State]], Stmt]], Stmt]


Body = Callable[[State], Stmt]
Chosen = Callable[[State, Mapping[Access, Expr]], Stmt]
"""Emits an instance in which each operand with a condition is 0 unless the condition holds."""
Appended = Callable[[Callable[[Expr], State], Expr], Stmt]
"""Emits adjacent instances, given a function from their index (0, 1, ...) to their state, and their number."""
