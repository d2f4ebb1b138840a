"""The plan of a call: everything about a lowered program that a caller needs to run its machine code.

A kernel from the cache is called by its plan alone. The program is lowered again only to print it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.dtypes import DType
from ..tc_lang.formats import Format
from ..tc_lang.ir import Role
from .sparse_problem import SparseProblem


@dataclass(frozen=True, slots=True)
class Conversion:
    """An operand that the caller converts before the kernels run."""

    name: str
    source: str
    format: Format


@dataclass(frozen=True, slots=True)
class Version:
    """A sparse result as it is before a statement that reads it. The caller turns it into an operand once complete."""

    name: str
    source: str
    statement: int


@dataclass(frozen=True, slots=True)
class PlannedOperand:
    """A tensor that kernels take as arrays: `num_level_arrays` arrays of its levels, then its values.

    has_levels: whether some levels are not dense.
    """

    name: str
    role: Role
    has_levels: bool
    num_level_arrays: int


@dataclass(frozen=True, slots=True)
class AssembledLevels:
    """The levels of a sparse result that a statement writes level by level.

    bound: operands that together store at least as many elements; empty if the elements are counted first.
    counts_rows: whether the entries of each row are counted first, into `pos`, which the caller allocates before that.
    is_known: whether the caller has the levels from an earlier run, so that only the values are written.
    """

    format: Format
    index: DType
    bound: tuple[str, ...]
    counts_rows: bool
    is_known: bool


@dataclass(frozen=True, slots=True)
class PlannedResult:
    """A sparse result that the caller allocates.

    phase: the phase before which it is allocated. first: the index of its first count in `totals`.
    num_arrays: the number of arrays of its levels and its values.
    levels: None if its elements are collected as a list of coordinates and values.
    is_sorted: whether the list has each element once, in the order of the format.
    """

    statement: int
    tensor: str
    phase: int
    first: int
    num_arrays: int
    levels: AssembledLevels | None = None
    is_sorted: bool = False


@dataclass(frozen=True, slots=True)
class CallPlan:
    """How to call the phases of a program, each with the same arguments.

    Attributes:
        problem: the problem after conversions of operands and versions of results have been inserted.
        num_phases: the number of phases. counting: the indices of the phases that only count elements.
        slots: the number of counts in `totals`.
        unfilled: tensors with a shared pattern that need no zeros, since the first statement writes each element.
    The other attributes are those of `lower.Program`.
    """

    problem: SparseProblem
    operands: tuple[PlannedOperand, ...]
    conversions: tuple[Conversion, ...]
    versions: tuple[tuple[int, Version], ...]
    results: tuple[PlannedResult, ...]
    unfilled: tuple[str, ...]
    num_phases: int
    counting: tuple[int, ...]
    slots: int
