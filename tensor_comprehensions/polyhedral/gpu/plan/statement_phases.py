"""Units: the statements of a kernel in the schedule tree.

A node of the scop becomes one unit, or several if its elements are initialized, updated and finished separately. The
domain of a unit that updates includes the reduced indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ....tc_lang.ir import BoundIndex, BoundStatement
from ...scop.isl_affine import isl_name, isl_upper
from ...scop.scop import ScopStatement


class Phase(Enum):
    """The part of its node that a unit computes. The value is the suffix of the unit's name."""

    WHOLE = ""  # everything at every point: an assignment, or an update
    INIT = "_start"  # each element is set to the neutral element
    UPDATE = "_update"  # each term is combined into its element
    PARTIAL = "_term"  # each term is combined into a register of its thread
    FINAL = "_finish"  # stores the result that the threads have combined


@dataclass(frozen=True, slots=True)
class Unit:
    """A statement for isl: all instances of one phase of `node`."""

    node: ScopStatement
    phase: Phase

    @property
    def name(self) -> str:
        return self.node.name + self.phase.value

    @property
    def statement(self) -> BoundStatement:
        (s,) = self.node.statements
        return s

    @property
    def indices(self) -> tuple[BoundIndex, ...]:
        return self.statement.free if self.phase in (Phase.INIT, Phase.FINAL) else self.statement.indices

    @property
    def instance(self) -> str:
        """The tuple that names an instance in isl's notation."""
        return f"{self.name}[{', '.join(isl_name(i.name) for i in self.indices)}]"

    @property
    def variables(self) -> tuple[str, ...]:
        """The int64 variables that hold extents of its indices."""
        return tuple(i.variable for i in self.indices if i.variable)

    @property
    def domain(self) -> str:
        bounds = " and ".join(f"{i.lower} <= {isl_name(i.name)} < {isl_upper(i)}" for i in self.indices)
        return f"{self.instance} : {bounds}" if bounds else self.instance


def units_of(node: ScopStatement, *, cooperative: bool = False) -> tuple[Unit, ...]:
    """The units of a node in order. cooperative: whether threads combine its terms in registers before one stores."""
    (s,) = node.statements
    if s.reduction is None or not s.reduction_indices:
        return (Unit(node, Phase.WHOLE),)
    if cooperative:
        return Unit(node, Phase.PARTIAL), Unit(node, Phase.FINAL)
    update = Unit(node, Phase.UPDATE)
    return (Unit(node, Phase.INIT), update) if s.initialize else (update,)


def filter_of(units: Sequence[Unit], condition: dict[str, str] | None = None) -> str:
    """The set of the instances of `units` as isl text, restricted by the condition of each in `condition`."""
    parts = []
    for u in units:
        text = (condition or {}).get(u.name, "")
        parts.append(f"{u.instance} : {text}" if text else u.instance)
    return "{ " + "; ".join(parts) + " }"
