"""The accumulators of a register tile and their registers, which may hold several sub-vectors each.

Rows of 24 points are three vectors of 8 lanes. Two adjacent rows of a panel fill three registers of 16 lanes, while
vectors of 16 lanes would take four registers and leave a quarter of their lanes idle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...core.errors import InternalError
from ...loop_ir import build
from ...loop_ir.nodes import Buffer, Expr, Load, Ramp
from ..plan import Plan
from .tile import local_var


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One vector of partial sums.

    Attributes:
        at: its point in the iteration domain: the value of every iterator, a ramp along the lanes.
        offsets: its offset from the tile's first point along each parallel iterator, in vectors along the lanes.
        mask: which of its lanes are inside the domain; None: all.
        register: the number of its register.
        part: the lanes of the register that it has; empty: all.
    """

    at: dict[str, Expr]
    offsets: dict[str, int]
    mask: Expr | None
    register: int
    part: tuple[int, ...] = ()


def share_registers(cells: Sequence[Accumulator], plan: Plan, still: Collection[str]) -> list[Accumulator]:
    """`cells` with up to `plan.vectors_per_register` neighbors in a register.

    Cells that share a register have the same offsets along the iterators `still`.
    """
    found: list[Accumulator] = []
    register, row, taken = -1, None, 0
    for cell in cells:
        here = tuple(offset for name, offset in cell.offsets.items() if name in still)
        if here != row or taken == plan.vectors_per_register:
            register, row, taken = register + 1, here, 0
        part = tuple(range(taken * plan.lanes, (taken + 1) * plan.lanes))
        found.append(replace(cell, register=register, part=part))
        taken += 1
    return found


def group_by_register(cells: Sequence[Accumulator]) -> list[list[Accumulator]]:
    """The cells of each register, in order of first appearance."""
    groups: dict[int, list[Accumulator]] = {}
    for cell in cells:
        groups.setdefault(cell.register, []).append(cell)
    return list(groups.values())


def concat_subvectors(group: Sequence[Accumulator], values: Sequence[Expr], lanes: int) -> Expr:
    """Concatenate the sub-vectors that share a register into a full vector; an odd last one is duplicated."""
    if not group[0].part or all(v.type.lanes == 1 and v == values[0] for v in values):
        return values[0]
    vectors = [build.broadcast(v, len(group[0].part)) for v in values]
    while (width := vectors[0].type.lanes) < lanes:
        pairs = zip(vectors[::2], [*vectors[1::2], vectors[-1]], strict=False)
        vectors = [build.shuffle(first, second, tuple(range(2 * width))) for first, second in pairs]
    return vectors[0]


def read_accumulator(registers: Buffer, cell: Accumulator) -> Expr:
    """The value of an accumulator: all lanes of its register, or its part of them."""
    whole = Load(registers, (build.const(cell.register),))
    return build.shuffle(whole, whole, cell.part) if cell.part else whole


def whole_register_runs(cells: Sequence[Accumulator], plan: Plan) -> list[Accumulator]:
    """`cells` with those that fill a register in the order of the lanes merged into one vector."""
    found: list[Accumulator] = []
    for group in group_by_register(cells):
        first = group[0]
        following = [
            {**first.offsets, plan.vector: first.offsets[plan.vector] + n} for n in range(plan.vectors_per_register)
        ]
        if plan.vectors_per_register > 1 and [c.offsets for c in group if c.mask is None] == following:
            longer = {
                n: _extend_ramp(first.at[n], plan.vectors_per_register * plan.lanes)
                for n in (plan.vector, local_var(plan.vector))
            }
            group = [replace(first, at=first.at | longer, part=())]
        found += group
    return found


def _extend_ramp(ramp: Expr, lanes: int) -> Expr:
    if not isinstance(ramp, Ramp):
        raise InternalError(f"lanes at {ramp}")
    return replace(ramp, lanes=lanes)
