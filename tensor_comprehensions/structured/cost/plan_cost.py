"""The predicted cost of a whole plan in cycles of one core: register tiles, transfers between caches, and packing.

`planners/blocking.py` decides step by step; this compares complete plans of heuristics, users and searches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod

import numpy as np

from ...machine import (
    CACHE_LINE_BYTES,
    ELEMENT_COPY_CYCLES,
    EXPOSED_STREAM_FRACTION,
    EXPOSED_TRANSFER_FRACTION,
    GATHERED_ELEMENT_CYCLES,
    L2_SCATTERED_LINE_CYCLES,
    L2_SCATTERED_RUN_BYTES,
    MESH_CYCLES_PER_BYTE,
    MESH_L2_USABLE_FRACTION,
    MESH_PREFETCHED_RUN_BYTES,
    MESH_RUN_CYCLES,
    MESH_STALL_CYCLES,
    NONTEMPORAL_RUN_CYCLES,
    OPEN_PAGES,
    PAGE_BYTES,
    PREFETCH_STREAMS,
    RUN_COPY_CYCLES,
    SPLIT_VECTOR_CYCLES,
    TLB_MISS_CYCLES,
    TLB_PAGES,
    TRANSFER_CYCLES_PER_BYTE,
    TRANSPOSE_COPY_CYCLES,
)
from ...target import USABLE_FRACTION, CpuTarget
from ...thresholds import MAX_INTERLEAVED_STRIDE
from ..amx import tile_plans
from ..analysis.contraction_info import ContractionInfo, Factor, analyze_contraction, is_shared_panel
from ..lower.output_panel import with_panel_output
from ..lower.tile import num_tiles
from ..op import StructuredOp
from ..plan import PackStep, Plan, Side
from .tile_cost import all_tiles_cycles, is_in_mesh_llc


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of a plan in cycles of one core, part by part; plans are compared by `total`.

    Attributes:
        compute: cycles of register tiles.
        gathers: cycles for vectors assembled from strided elements.
        split_lines: cycles for vector loads that straddle cache lines.
        short_runs: cycles for short runs that arrive late.
        pages: cycles for TLB misses of the output.
        transfer: cycles for bytes that move between caches.
        packing: cycles to fill panels.
        exposed: the fraction of `transfer` that multiply-adds do not hide.
        streams: whether only that fraction counts; otherwise the total is at least `transfer`.
        turning: cycles to transpose output panels.
    """

    compute: float
    gathers: float
    split_lines: float
    short_runs: float
    pages: float
    transfer: float
    packing: float
    exposed: float
    streams: bool
    turning: float = 0.0

    @property
    def busy(self) -> float:
        """Cycles besides transfers between caches, packing and transposing."""
        return self.compute + self.gathers + self.split_lines + (self.short_runs + self.pages)

    @property
    def total(self) -> float:
        running = self.busy + self.exposed * self.transfer
        return (running if self.streams else max(running, self.transfer)) + self.packing + self.turning


def plan_cycles(op: StructuredOp, plan: Plan, target: CpuTarget) -> float:
    """The cost of a plan for a normalized op in cycles of one core. Raises CannotLower as `analyze_contraction`."""
    return plan_costs(op, plan, target).total


def plan_costs(op: StructuredOp, plan: Plan, target: CpuTarget) -> Costs:
    """As `plan_cycles`, part by part."""
    if plan.output_panel_depth is not None:
        return _output_panel_costs(op, plan, plan.output_panel_depth, target)
    return expected_costs(analyze_contraction(op, plan.vector), [plan], target)[0]


def _output_panel_costs(op: StructuredOp, plan: Plan, depth: int, target: CpuTarget) -> Costs:
    """The costs of a plan with an output panel, which is transposed afterwards."""
    known, written = analyze_contraction(with_panel_output(op, plan.vector), plan.vector), analyze_contraction(op)
    model, moving = _Model(known, plan, target), known.vector_operand
    region = model.regions[depth]
    run = float(written.run({name: np.array(float(n)) for name, n in region.items()})) * written.output_bytes
    cycles = (TRANSPOSE_COPY_CYCLES * op.dtype.size / 4 + NONTEMPORAL_RUN_CYCLES * written.output_bytes / run) * prod(
        i.extent for i in op.parallel
    )
    if moving.side not in model.packed and is_in_mesh_llc(moving.stored * moving.bytes, target):
        cycles += MESH_STALL_CYCLES * moving.stored / model._run(moving.side, region)
    return replace(expected_costs(known, [plan], target)[0], turning=cycles)


def expected_cycles(known: ContractionInfo, plans: Sequence[Plan], target: CpuTarget) -> list[float]:
    """As `plan_cycles` for several plans with the same lanes' iterator, whose facts are `known`."""
    return [costs.total for costs in expected_costs(known, plans, target)]


def expected_costs(known: ContractionInfo, plans: Sequence[Plan], target: CpuTarget) -> list[Costs]:
    """`expected_cycles`, part by part."""
    computing = _register_tiles(known, plans, target)
    return [_make_costs(_Model(known, plan, target), cycles) for plan, cycles in zip(plans, computing, strict=True)]


def _make_costs(model: _Model, computing: float) -> Costs:
    return Costs(
        compute=computing,
        gathers=model.gathers(),
        split_lines=model.split_line_loads(),
        short_runs=model.l2_short_runs(),
        pages=model.page_revisits(),
        transfer=model.transfer_cycles(),
        packing=model.packing_cycles(),
        exposed=EXPOSED_STREAM_FRACTION if model.facts.keeps_lanes_of_sum else EXPOSED_TRANSFER_FRACTION,
        streams=model.facts.keeps_lanes_of_sum,
    )


def packs_short_runs(known: ContractionInfo, plan: Plan, target: CpuTarget) -> bool:
    """Whether panels of the vector operand are filled from runs of memory too short for the hardware prefetcher."""
    model, side = _Model(known, plan, target), known.vector_operand.side
    return side in model.packed and model.starts(side, model.regions[model.packed[side]]) > 0


def completes_pages(known: ContractionInfo, plan: Plan, target: CpuTarget) -> bool:
    """Whether non-temporal stores complete most pages of the output before they go on to others."""
    return plan.nontemporal and _Model(known, plan, target).visits * PAGE_BYTES <= 2 * known.output_size


def busy_cycles(op: StructuredOp, plan: Plan, target: CpuTarget) -> float:
    """Cycles of multiply-adds and packing, to compare plans that move the same bytes from memory."""
    known = analyze_contraction(op, plan.vector)
    model = _Model(known, plan, target)
    computing = _register_tiles(known, [plan], target)[0]
    return computing + model.gathers() + model.split_line_loads() + model.packing_cycles()


def _register_tiles(known: ContractionInfo, plans: Sequence[Plan], target: CpuTarget) -> list[float]:
    """Cycles of the register tiles of each plan; plans with the same vector shape are evaluated together."""
    names = [i.name for i in known.parallel]
    found = {plan: tile_plans.matrix_tile_cycles(known, plan) for plan in plans if plan.instruction}
    rest = [plan for plan in plans if not plan.instruction]
    for lanes, joined in {(plan.lanes, plan.vectors_per_register) for plan in rest}:
        same = [plan for plan in rest if (plan.lanes, plan.vectors_per_register) == (lanes, joined)]
        sizes = np.array([[_count_tile_points(plan, name) for plan in same] for name in names], float)
        cycles = all_tiles_cycles(known, target, lanes, dict(zip(names, sizes, strict=True)), joined)
        found.update(zip(same, cycles.tolist(), strict=True))
    return [found[plan] for plan in plans]


def _count_tile_points(plan: Plan, name: str) -> int:
    """Points of a register tile along an iterator, in whole vectors."""
    size = plan.tile(name)
    return num_tiles(size, plan.lanes) * plan.lanes if name == plan.vector else size


def _count_region_pages(moved: Iterable[tuple[str, int]], size: int, region: Mapping[str, int]) -> int:
    """Pages of a tensor that a region touches. moved: its strides in elements of `size` bytes, by iterator."""
    far, span = 1, size
    for name, step in moved:
        if step * size >= PAGE_BYTES:
            far *= region[name]
        else:
            span += (region[name] - 1) * step * size
    return far * num_tiles(span, PAGE_BYTES)


@dataclass(frozen=True)
class _Model:
    facts: ContractionInfo
    plan: Plan
    target: CpuTarget

    @property
    def room(self) -> float:
        return MESH_L2_USABLE_FRACTION if self.target.has_mesh_llc else USABLE_FRACTION

    @cached_property
    def regions(self) -> list[dict[str, int]]:
        """Points of every iterator inside the first d levels, for each d."""
        inside = dict(self.facts.extents)
        found = [dict(inside)]
        for level in self.plan.levels:
            inside[level.iterator] = min(inside[level.iterator], level.size)
            found.append(dict(inside))
        return found

    @cached_property
    def trips(self) -> list[int]:
        """Iterations of every level."""
        levels = enumerate(self.plan.levels)
        return [num_tiles(self.regions[d][level.iterator], level.size) for d, level in levels]

    @cached_property
    def packed(self) -> dict[Side, int]:
        return {step.side: step.depth for step in self.plan.packs}

    def factor(self, side: Side) -> Factor:
        return self.facts.factors[side.value]

    def elements(self, side: Side, region: Mapping[str, int]) -> int:
        """Elements of a factor that a region reads."""
        factor = self.factor(side)
        return min(prod(region[name] for name in factor.iterators), factor.stored)

    def source_bytes(self, side: Side, region: Mapping[str, int]) -> float:
        """Bytes in whole cache lines of a factor's tensor that a region reads."""
        together = self._elements_per_value(side)
        run = self._run(side, region) * self.factor(side).bytes
        return self.elements(side, region) * together * self.factor(side).bytes * max(1.0, CACHE_LINE_BYTES / run)

    def _elements_per_value(self, side: Side) -> int:
        """Elements of memory per value of a factor: 2 for pairs of bfloat16."""
        return 2 if self.facts.op.pairs else 1

    def _run(self, side: Side, region: Mapping[str, int]) -> int:
        """Length in elements of the contiguous runs of a factor's tensor that a region reads."""
        factor, together = self.factor(side), self._elements_per_value(side)
        run = together if factor.step(self.facts.op.pairs) == together else 1
        for name, step in factor.nearest:
            if step > run:
                break
            # Windows overlap: neighboring positions and taps share elements.
            run += step * (region[name] - 1)
        return run

    def cut_bytes(self, side: Side, region: Mapping[str, int]) -> float:
        """Bytes of partial lines at the ends of a factor's runs."""
        factor = self.factor(side)
        run = self._run(side, region) * factor.bytes
        around = [step * factor.bytes for _, step in factor.nearest if step * factor.bytes >= run]
        cut = min(run, CACHE_LINE_BYTES) - gcd(CACHE_LINE_BYTES, run, *around) if around else 0
        return self.elements(side, region) * self._elements_per_value(side) * factor.bytes * cut / run

    def starts(self, side: Side, region: Mapping[str, int]) -> float:
        """The number of runs of a factor's tensor that a region reads if they are too short to prefetch, else 0."""
        run = self._run(side, region)
        nearest = self.factor(side).nearest  # empty if the strides are not constant or not common
        if (
            nearest
            and self.factor(side).step(self.plan.vector) != 1
            and self.plan.tile(self.plan.vector) > PREFETCH_STREAMS
        ):
            name, step = nearest[0]
            run = min(run, step * region[name])
        short = run * self.factor(side).bytes < MESH_PREFETCHED_RUN_BYTES
        return self.elements(side, region) * self._elements_per_value(side) / run if short else 0.0

    def source_pages(self, side: Side, region: Mapping[str, int]) -> int:
        """Pages of a factor's tensor that a region touches."""
        factor = self.factor(side)
        return _count_region_pages(factor.nearest, factor.bytes, region)

    @cached_property
    def footprints(self) -> dict[Side, list[float]]:
        """Bytes of each factor, or of its panel, that the code inside the first d levels reads, for each d."""
        return {side: [self._footprint(side, d) for d in range(len(self.regions))] for side in Side}

    def _footprint(self, side: Side, depth: int) -> float:
        region = self.regions[depth]
        if depth >= self.packed.get(side, depth + 1):
            return self.elements(side, region) * self.facts.op.dtype.size
        return self.source_bytes(side, region)

    @cached_property
    def outputs(self) -> list[int]:
        """Bytes of the output that the code inside the first d levels writes, for each d."""
        moved = [name for name, _ in self.facts.output_strides]
        return [self.facts.output_bytes * prod(region[name] for name in moved) for region in self.regions]

    @cached_property
    def working(self) -> list[float]:
        """Bytes that the code inside the first d levels touches, for each d."""
        return [sum(sizes) for sizes in zip(*self.footprints.values(), self.outputs, strict=True)]

    def transfer_cycles(self) -> float:
        """Cycles for the bytes that arrive in each cache; if all data fits into L2, it is assumed to be there."""
        total = 0.0
        last = len(self.plan.levels)
        for capacity, cost in zip(self.target.cache, TRANSFER_CYCLES_PER_BYTE, strict=False):
            if self.working[0] <= self.target.cache[1] * self.room and capacity > self.target.cache[0]:
                break
            depth = next((d for d in range(last + 1) if self.working[d] <= capacity * self.room), last)
            for side in Side:
                total += cost * self._arriving_bytes(self.footprints[side][depth], self.factor(side).iterators, depth)
            ways = 1 if self.plan.nontemporal else 2
            total += ways * cost * self._arriving_bytes(self.outputs[depth], self.facts.extents.keys(), depth)
        return total

    def _arriving_bytes(self, size: float, used: Collection[str], depth: int) -> float:
        """Bytes that arrive over all iterations of the outer `depth` levels.

        The cache keeps an operand of `size` bytes over inner loops that it does not depend on (not in `used`).
        """
        around: Sequence[int] = range(depth)
        while around and self.plan.levels[around[-1]].iterator not in used:
            around = around[:-1]
        return size * prod(self.trips[d] for d in around)

    def gathers(self) -> float:
        """Extra cycles for vectors whose elements are strided in memory."""
        total = 0.0
        for side in Side:
            used = self.factor(side).iterators
            if side in self.packed or self.plan.vector not in used or self.factor(side).step(self.plan.vector) == 1:
                continue
            reuse = prod(self.plan.tile(i.name) for i in self.facts.parallel if i.name not in used)
            total += GATHERED_ELEMENT_CYCLES * self.facts.op.multiplications / reuse
        return total

    def l2_short_runs(self) -> float:
        """Extra cycles for lines of scalars, read in place, that L1 has evicted before their next use.

        Only scalars that no earlier window has read count. Measured on machines with a large L2 and a distant L3.
        """
        still, capacity = self.facts.broadcast_operand, self.target.cache[0] * self.room
        waits = self.plan.nontemporal and self.target.has_mesh_llc  # non-temporal stores occupy the line fill buffers
        if not waits or still.side in self.packed or self.plan.vector in still.iterators:
            return 0.0
        depth = next((d for d, size in enumerate(self.working) if size <= capacity), len(self.plan.levels))
        if self._run(still.side, self.regions[depth]) * still.bytes >= L2_SCATTERED_RUN_BYTES:
            return 0.0
        arriving = self.footprints[still.side][depth]
        if depth and self.plan.levels[depth - 1].iterator in still.iterators:  # its neighbors may be in the same lines
            arriving = min(arriving, self.footprints[still.side][depth - 1] / self.trips[depth - 1])
        new = min(1.0, still.stored / prod(i.extent for i in self.facts.op.iterators if i.name in still.iterators))
        return (
            L2_SCATTERED_LINE_CYCLES * new * self._arriving_bytes(arriving, still.iterators, depth) / CACHE_LINE_BYTES
        )

    def page_revisits(self) -> float:
        """Extra cycles for TLB misses of non-temporal stores. Measured on machines with a distant L3."""
        return TLB_MISS_CYCLES * self.visits if self.plan.nontemporal and self.target.has_mesh_llc else 0.0

    @cached_property
    def visits(self) -> int:
        """How often stores to the output move to another page."""
        pages = [
            _count_region_pages(self.facts.output_strides, self.facts.output_bytes, region) for region in self.regions
        ]
        depth = next((d for d, count in enumerate(pages[1:]) if count <= OPEN_PAGES), len(self.plan.levels))
        return pages[depth] * prod(self.trips[:depth])

    def split_line_loads(self) -> float:
        """Extra cycles for unaligned vectors of windows, since neighbors along a reduction begin an element later."""
        total = 0.0
        for side in Side:
            factor, vector = self.factor(side), self.plan.vector
            if side in self.packed or factor.step(vector) != 1:
                continue
            if any(0 < abs(factor.step(name) or 0) < self.plan.lanes for name in self.facts.reductions):
                reuse = prod(self.plan.tile(i.name) for i in self.facts.parallel if i.name not in factor.iterators)
                total += SPLIT_VECTOR_CYCLES * self.facts.op.multiplications / (self.plan.lanes * reuse)
        return total

    def packing_cycles(self) -> float:
        """Cycles to fill the panels."""
        total = 0.0
        for side, depth in self.packed.items():
            times = 1 if is_shared_panel(self.facts.op, self.plan, PackStep(side, depth)) else prod(self.trips[:depth])
            region = self.regions[depth]
            cycles = self._copy_cost(side) * self.elements(side, region) * self.facts.op.dtype.size / 4
            resident = self.source_bytes(side, self.regions[0])
            for capacity, cost in zip(self.target.cache[1:], TRANSFER_CYCLES_PER_BYTE[1:], strict=False):
                if resident > capacity * self.room:
                    cycles += cost * self.source_bytes(side, region)
            if is_in_mesh_llc(int(resident), self.target):
                cycles += MESH_CYCLES_PER_BYTE * self.cut_bytes(side, region)
                if resident > self.target.cache[-1] * self.room:
                    cycles += MESH_RUN_CYCLES * self.starts(side, region)
            if self.source_pages(side, self.regions[0]) > TLB_PAGES:
                cycles += TLB_MISS_CYCLES * self.source_pages(side, region)
            total += times * cycles
        return total

    def _copy_cost(self, side: Side) -> float:
        factor = self.factor(side)
        across = [i for i in self.facts.parallel if i.name in factor.iterators and self.plan.tile(i.name) > 1]
        contiguous = {i.name for i in self.facts.op.iterators if factor.step(i.name) == self._contiguous_step(i.name)}
        if self.plan.instruction and side is not self.facts.vector_operand.side:  # copied as rows of pairs
            return (
                RUN_COPY_CYCLES
                if self.facts.op.pairs in contiguous
                else TRANSPOSE_COPY_CYCLES
                if contiguous
                else ELEMENT_COPY_CYCLES
            )
        if any(i.name in contiguous for i in across):
            return RUN_COPY_CYCLES
        lanes = abs(factor.step(self.plan.vector) or 0)
        return TRANSPOSE_COPY_CYCLES if contiguous or 0 < lanes <= MAX_INTERLEAVED_STRIDE else ELEMENT_COPY_CYCLES

    def _contiguous_step(self, name: str) -> int:
        """The stride along an iterator, in elements, with which a factor is contiguous: 2 along pairs, else 1."""
        return 2 if name == self.facts.op.pairs else 1
