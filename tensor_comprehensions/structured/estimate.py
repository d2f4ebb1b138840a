"""What a whole plan costs by the model: register tiles, bytes moved between caches, and copies, in cycles of a core.

`expert.py` decides step by step; this compares complete plans, of experts, of a user or of a search, with one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..target import Target
from .affine import common_steps
from .cost import LINE, RegisterTile, compute_cycles
from .facts import Facts, facts
from .op import StructuredOp, loads, names
from .plan import Plan, Side
from .tile import tiles

TRANSFER = (1 / 64, 1 / 14, 1 / 6)
"""Cycles per byte that comes into the first, the second and the third cache from the next one or from memory."""
GATHER = 0.7
"""Cycles per element of a vector that is put together from elements apart."""
COPY, TURN, ELEMENT = 0.6, 1.2, 2.5
"""Cycles per element that is copied: by vectors, turned across, one by one; for elements of 4 bytes."""


def estimate(op: StructuredOp, plan: Plan, target: Target) -> float:
    """Cycles of one core for a normalised op. Raises CannotLower for an op that has no facts."""
    known = facts(op, plan.vector)
    sizes = tuple((i.name, plan.tile(i.name)) for i in op.parallel)
    padded = tuple((name, tiles(n, plan.lanes) * plan.lanes if name == plan.vector else n) for name, n in sizes)
    model = _Model(known, plan, target)
    compute = compute_cycles(known, RegisterTile(plan.lanes, padded)) + model.gathering()
    return compute + model.copying() + model.moving()


@dataclass(frozen=True)
class _Model:
    facts: Facts
    plan: Plan
    target: Target

    @cached_property
    def regions(self) -> list[dict[str, int]]:
        """Points of every iterator inside the first d levels, for each d."""
        inside = {i.name: i.extent for i in self.facts.op.iterators}
        found = [dict(inside)]
        for level in self.plan.levels:
            inside[level.iterator] = min(inside[level.iterator], level.size)
            found.append(dict(inside))
        return found

    @cached_property
    def trips(self) -> list[int]:
        """Iterations of every level."""
        levels = enumerate(self.plan.levels)
        return [tiles(self.regions[d][level.iterator], level.size) for d, level in levels]

    @cached_property
    def packed(self) -> dict[Side, int]:
        return {step.side: step.depth for step in self.plan.packs}

    @cached_property
    def steps(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Elements that a factor moves along each iterator."""
        iterators = [i.name for i in self.facts.op.iterators]
        left, right = (common_steps(loads(f), iterators) for f in self.facts.op.factors)
        return left, right

    def elements(self, side: Side, region: Mapping[str, int]) -> int:
        """Elements of a factor that a region reads."""
        value = self.facts.op.factors[side.value]
        used = set(names(value))
        domain = prod(n for name, n in region.items() if name in used)
        return min(domain, max(prod(a.buffer.shape) for a in loads(value)))

    def source_bytes(self, side: Side, region: Mapping[str, int]) -> float:
        """Bytes in whole cache lines of a factor's tensor that a region reads."""
        size = self.facts.factors[side.value].bytes
        steps = self.steps[side.value]
        run = 1
        for name in sorted((n for n in region if steps.get(n)), key=lambda n: abs(steps[n])):
            if abs(steps[name]) > run:
                break
            # Windows overlap: neighbouring positions and taps share elements.
            run += abs(steps[name]) * (region[name] - 1)
        return self.elements(side, region) * size * max(1.0, LINE / (run * size))

    def footprint(self, side: Side, depth: int) -> float:
        """Bytes of a factor, or of its panel, that the code inside the first levels reads."""
        region = self.regions[depth]
        if side in self.packed and depth >= self.packed[side]:
            return self.elements(side, region) * self.facts.op.dtype.size
        return self.source_bytes(side, region)

    def output(self, depth: int) -> float:
        op = self.facts.op
        used = {name for index in op.output.indices for name in names(index)}
        return op.output.buffer.type.dtype.size * prod(n for name, n in self.regions[depth].items() if name in used)

    def moving(self) -> float:
        """Cycles for the bytes that reach each cache."""
        total = 0.0
        last = len(self.plan.levels)
        for capacity, cost in zip(self.target.cache, TRANSFER, strict=False):
            room = capacity * 3 // 4
            depth = next((d for d in range(last + 1) if self._working_set(d) <= room), last)
            for side in Side:
                total += cost * self._arriving(self.footprint(side, depth), self._used(side), depth)
            total += 2 * cost * self._arriving(self.output(depth), self._output_used(), depth)
        return total

    def _working_set(self, depth: int) -> float:
        return sum(self.footprint(side, depth) for side in Side) + self.output(depth)

    def _arriving(self, size: float, used: frozenset[str], depth: int) -> float:
        """Bytes that come in over all iterations around `depth`; what the next loop does not move stays."""
        around: Sequence[int] = range(depth)
        while around and self.plan.levels[around[-1]].iterator not in used:
            around = around[:-1]
        return size * prod(self.trips[d] for d in around)

    def _used(self, side: Side) -> frozenset[str]:
        return self.facts.factors[side.value].used

    def _output_used(self) -> frozenset[str]:
        """The iterators that change or complete what is stored."""
        return frozenset(i.name for i in self.facts.op.iterators)

    def gathering(self) -> float:
        """Cycles more for vectors whose elements are apart in memory."""
        total = 0.0
        for side in Side:
            used = self._used(side)
            if side in self.packed or self.plan.vector not in used or self.steps[side.value].get(self.plan.vector) == 1:
                continue
            reuse = prod(self.plan.tile(i.name) for i in self.facts.parallel if i.name not in used)
            total += GATHER * self.facts.op.multiplications / reuse
        return total

    def copying(self) -> float:
        """Cycles to fill the panels."""
        total = 0.0
        for side, depth in self.packed.items():
            times = prod(self.trips[:depth])
            region = self.regions[depth]
            cycles = self._copy_cost(side) * self.elements(side, region) * self.facts.op.dtype.size / 4
            resident = self.source_bytes(side, self.regions[0])
            for capacity, cost in zip(self.target.cache[1:], TRANSFER[1:], strict=False):
                if resident > capacity * 3 // 4:
                    cycles += cost * self.source_bytes(side, region)
            total += times * cycles
        return total

    def _copy_cost(self, side: Side) -> float:
        steps = self.steps[side.value]
        factor = self.facts.factors[side.value]
        across = [i for i in self.facts.parallel if i.name in factor.used and self.plan.tile(i.name) > 1]
        if any(steps.get(i.name) == 1 for i in across):
            return COPY
        if any(steps.get(i.name) == 1 for i in self.facts.op.iterators):
            return TURN
        return ELEMENT
