"""Merge lattices: the combinations of operands that may be present at an index, and their expressions (TACO, 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ..core.errors import CannotLower
from ..tc_lang.ir import Access
from .absent_operands import Term

MAX_ITERATORS = 8
"""Maximum operands at one index: with more, the lattice has too many points to emit code for."""


@dataclass(frozen=True, slots=True)
class Point:
    """A case of a lattice: `term` is the expression where exactly the operands of `present` store a coordinate."""

    present: frozenset[Access]
    term: Term


@dataclass(frozen=True, slots=True)
class Lattice:
    """The points of an index that are not void, those with more operands first. default: the term without operands."""

    points: tuple[Point, ...]
    default: Term | None

    @property
    def is_full(self) -> bool:
        """Whether something is computed at every coordinate."""
        return self.default is not None

    def list_subpoints(self, point: Point) -> tuple[Point, ...]:
        """The points whose operands are a subset of those of `point`, itself first."""
        return tuple(p for p in self.points if p.present <= point.present)


def build_lattice(term: Term, iterators: Sequence[Access]) -> Lattice:
    """The lattice of `term` over the operands `iterators`, whose levels at the index are not dense.

    Raises:
        CannotLower: there are more than `MAX_ITERATORS`.
    """
    if len(iterators) > MAX_ITERATORS:
        raise CannotLower(f"{len(iterators)} sparse operands meet at one index, more than {MAX_ITERATORS}")
    points: dict[frozenset[Access], Point] = {}
    for count in range(len(iterators), 0, -1):
        for chosen in combinations(iterators, count):
            left = term.drop_absent([a for a in iterators if a not in chosen])
            if left is not None and (needed := left.uses & frozenset(chosen)):
                points.setdefault(needed, Point(needed, left))
    return Lattice(tuple(sorted(points.values(), key=lambda p: -len(p.present))), term.drop_absent(iterators))
