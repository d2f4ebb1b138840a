"""The steps of a masked product that have terms for a given tile: fully masked steps are skipped.

A domain is a conjunction of inequalities. Their extreme values over a box of indices tell whether a step has any terms,
and whether it has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex, Inequality
from .masked_factors import condition_of
from .product_region import ProductRegion
from .product_tiles import ProductOrder, ProductTiles

Ranges = Mapping[str, tuple[ir.Expr, ir.Expr]]
"""The (first, last) value of an index, by its name."""


@dataclass(frozen=True, slots=True)
class MaskedSteps:
    """The steps of each tile that have terms; all steps if the terms have several indices.

    Attributes:
        free, terms: the free indices, and the indices of terms.
        boxes: the size of a tile along each index.
    """

    domain: tuple[Inequality, ...]
    free: tuple[BoundIndex, ...]
    terms: tuple[BoundIndex, ...]
    boxes: Mapping[str, int]

    @staticmethod
    def of(region: ProductRegion, order: ProductOrder, tiles: ProductTiles) -> MaskedSteps:
        """The steps of `region` when it is divided into `tiles`."""
        free = (*order.rows, *order.columns, *order.batch)
        return MaskedSteps(region.domain, free, order.pairs[0].terms, tiles.boxes)

    def bounds(self, at: Mapping[str, ir.Expr]) -> tuple[ir.Expr, ir.Expr]:
        """The (first step with terms, number of steps) of the tile at the coordinates `at`."""
        term, *others = self.terms
        if others:
            return build.const(0), build.const(prod(map(self._count, self.terms)))
        size, ranges = self.boxes[term.name], self._ranges(at, self.free)
        begin: list[ir.Expr] = [build.const(0)]
        end: list[ir.Expr] = [build.const(self._count(term))]
        for g in self.domain:
            c = dict(g.terms).get(term.name, 0)
            rest = _extreme(g, ranges, term.name, largest=True)
            if c > 0:  # c * term >= -rest
                least = build.sub(build.sub(0, build.div(rest, c)), term.lower)
                begin.append(build.div(build.maximum(least, 0), size))
            elif c < 0:
                beyond = build.add(build.sub(build.div(rest, -c), term.lower), 1)
                end.append(build.div(build.add(build.maximum(beyond, 0), size - 1), size))
            else:  # independent of terms: either all steps have terms, or none
                end.append(build.select(build.lt(rest, 0), build.const(0), build.const(self._count(term))))
        start = build.fold_maximum(begin)
        return start, build.maximum(build.sub(build.fold_minimum(end), start), 0)

    def has_partial_terms(self, at: Mapping[str, ir.Expr]) -> ir.Expr:
        """The condition that a step may be partly masked. at: the coordinates of the tile and of the step."""
        ranges = self._ranges(at, (*self.free, *self.terms))
        found: ir.Expr | None = None
        for g in self.domain:
            lacks = build.lt(_extreme(g, ranges, "", largest=False), 0)
            found = lacks if found is None else build.logical_or(found, lacks)
        assert found is not None
        return found

    @property
    def condition(self) -> tc.Expr:
        """The expression that a point is in the domain."""
        found = condition_of(self.domain)
        assert found is not None
        return found

    def mean_count(self) -> float:
        """The mean number of steps over all tiles."""
        counts = [build.integer(self.bounds(at)[1]) or 0 for at in self._tiles()]
        return sum(counts) / len(counts)

    @property
    def grow_with_rows(self) -> bool:
        """Whether the last tile has more steps than the first."""
        zero: dict[str, ir.Expr] = {i.name: build.const(0) for i in self.free}
        last: dict[str, ir.Expr] = {i.name: build.const(self._count(i) - 1) for i in self.free}
        first, final = (build.integer(self.bounds(at)[1]) or 0 for at in (zero, last))
        return final > first

    def _tiles(self) -> list[dict[str, ir.Expr]]:
        """The coordinates of all tiles along the indices in the domain; 0 along other indices."""
        named = {name for g in self.domain for name, _ in g.terms}
        found: list[dict[str, ir.Expr]] = [{}]
        for i in self.free:
            count = self._count(i) if i.name in named else 1
            found = [{**at, i.name: build.const(n)} for at in found for n in range(count)]
        return found

    def _count(self, i: BoundIndex) -> int:
        """The number of tiles along an index."""
        return -(-i.extent // self.boxes[i.name])

    def _ranges(self, at: Mapping[str, ir.Expr], indices: Sequence[BoundIndex]) -> Ranges:
        """The ranges of `indices` in the tile at the coordinates `at`."""
        found = {}
        for i in indices:
            first = build.add(build.mul(at[i.name], self.boxes[i.name]), i.lower)
            found[i.name] = first, build.minimum(build.add(first, self.boxes[i.name] - 1), i.upper - 1)
        return found


def _extreme(g: Inequality, ranges: Ranges, without: str, *, largest: bool) -> ir.Expr:
    """The largest or smallest value of an inequality's affine form over `ranges`, without the term of `without`."""
    total: ir.Expr = build.const(g.constant)
    for name, c in g.terms:
        if name != without:
            low, high = ranges[name]
            total = build.add(build.mul(high if (c > 0) == largest else low, c), total)
    return total
