"""Symbolic indices of blocks, loops and pipeline steps, with operators that build expressions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.dtypes import BOOL
from ...core.errors import ArgumentError
from ...loop_ir import build
from ...loop_ir.nodes import Expr


@dataclass(frozen=True, slots=True)
class Index:
    """A symbolic integer, known only at run time, or a condition on such integers."""

    expr: Expr

    def __add__(self, other: object) -> Any:
        return _apply_binary(build.add, self, other)

    def __radd__(self, other: object) -> Any:
        return _apply_binary(build.add, other, self)

    def __sub__(self, other: object) -> Any:
        return _apply_binary(build.sub, self, other)

    def __rsub__(self, other: object) -> Any:
        return _apply_binary(build.sub, other, self)

    def __mul__(self, other: object) -> Any:
        return _apply_binary(build.mul, self, other)

    def __rmul__(self, other: object) -> Any:
        return _apply_binary(build.mul, other, self)

    def __floordiv__(self, other: object) -> Any:
        return _apply_binary(build.div, self, _check_divisor(other))

    def __mod__(self, other: object) -> Any:
        return _apply_binary(build.mod, self, _check_divisor(other))

    def __lt__(self, other: object) -> Any:
        return _apply_binary(build.lt, self, other)

    def __le__(self, other: object) -> Any:
        return _apply_binary(build.le, self, other)

    def __gt__(self, other: object) -> Any:
        return _apply_binary(build.gt, self, other)

    def __ge__(self, other: object) -> Any:
        return _apply_binary(build.ge, self, other)

    def equals(self, other: object) -> Any:
        """The condition that two indices are equal at run time; `==` compares the expressions instead."""
        return _apply_binary(build.eq, self, other)

    def at_most(self, most: object) -> Any:
        """The minimum of this index and `most`."""
        return _apply_binary(build.minimum, self, most)

    def __and__(self, other: object) -> Any:
        return _apply_binary(build.logical_and, self, other)

    def __or__(self, other: object) -> Any:
        return _apply_binary(build.logical_or, self, other)

    def __bool__(self) -> bool:
        raise ArgumentError("an index has no value before the run", suggestion="with k.when(condition): ...")


@dataclass(frozen=True, slots=True)
class PhaseParity(Index):
    """A phase parity, 0 or 1; `phase ^ 1` is the opposite parity."""

    def __xor__(self, other: object) -> PhaseParity:
        if other not in (0, 1):
            raise ArgumentError("a phase is 0 or 1", expected="phase ^ 1", found=f"phase ^ {other}")
        return PhaseParity(build.sub(1, self.expr)) if other else self


@dataclass(frozen=True, slots=True)
class PipelineStep(Index):
    """The index of a step of a pipeline.

    Attributes:
        stage: the stage of shared memory that the step uses.
        phase: the phase parity of the barriers of this stage.
        number: the index of the step, counted over all iterations of enclosing loops.
        depth: the number of stages.
    """

    stage: Index
    phase: PhaseParity
    number: Expr
    depth: int

    @staticmethod
    def of(expr: Expr, number: Expr, depth: int) -> PipelineStep:
        """The step with index `expr` in its loop and `number` overall."""
        parity = build.mod(build.div(number, depth), 2)
        return PipelineStep(expr, Index(build.mod(number, depth)), PhaseParity(parity), number, depth)


def to_index(x: object, what: str) -> Expr:
    """The expression of an index. Raises ArgumentError if `x` is not an index; `what` names it in the message."""
    if isinstance(x, Index):
        x = x.expr
    if type(x) is int:
        return build.const(x)
    if isinstance(x, Expr) and x.type == build.INDEX:
        return x
    raise ArgumentError(f"{what} are counted by whole numbers", found=repr(x))


def to_coordinate(x: Any) -> Any:
    """A coordinate, or nested tuple of coordinates, with each `Index` replaced by its expression."""
    if isinstance(x, tuple):
        return tuple(map(to_coordinate, x))
    return x.expr if isinstance(x, Index) else x


def to_condition(x: object) -> Expr:
    """The expression of a condition. Raises ArgumentError if `x` is not a condition."""
    found = to_coordinate(x)
    if not isinstance(found, Expr) or found.type.dtype != BOOL:
        raise ArgumentError("cannot branch", expected="a condition on indices", found=str(x))
    return found


def _apply_binary(function: Callable[[Any, Any], Expr], a: object, b: object) -> Any:
    operands = [x.expr if isinstance(x, Index) else x for x in (a, b)]
    if not all(type(x) is int or isinstance(x, Expr) for x in operands):
        return NotImplemented
    return Index(function(*operands))


def _check_divisor(x: object) -> object:
    if type(x) is int and x < 1:
        raise ArgumentError("an index is divided by a positive number", found=str(x))
    return x
