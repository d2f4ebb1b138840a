"""Barriers in shared memory (mbarriers) as operands of tile programs."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.dtypes import UINT64
from ...core.errors import ArgumentError
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Expr, Space
from .indices import to_index


@dataclass(frozen=True, slots=True)
class BarrierArray:
    """An array of barriers; a phase of each completes after `arrivals` arrivals.

    Attributes:
        blocks: the blocks of the cluster; each has its own copy of the array.
        everywhere: whether each arrival counts in all blocks of the cluster.
    """

    name: str
    count: int
    arrivals: int
    blocks: int = 1
    everywhere: bool = False

    @property
    def buffer(self) -> Buffer:
        """The shared memory of the barriers."""
        return build.buffer(self.name, UINT64, (self.count,), Space.BARRIER)

    def __getitem__(self, at: object) -> Barrier:
        index = to_index(at, f"the barriers {self.name}")
        known = build.integer(index)
        if known is not None and not 0 <= known < self.count:
            raise ArgumentError(f"there is no {self.name}[{known}]", expected=f"a number below {self.count}")
        return Barrier(self, index)

    def __str__(self) -> str:
        return f"{self.name}[{self.count}]"


@dataclass(frozen=True, slots=True)
class Barrier:
    """An element of a `BarrierArray`."""

    array: BarrierArray
    index: Expr

    @property
    def place(self) -> tuple[Buffer, tuple[Expr, ...]]:
        """The barrier as an operand of an intrinsic: (buffer, indices)."""
        return self.array.buffer, (self.index,)
