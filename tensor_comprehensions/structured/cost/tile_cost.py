"""The cost model of register tiles, and the cost of streams from the caches, in cycles of one core.

The model knows issue limits of multiply-adds and loads, the latency of a chain of multiply-adds, lanes wasted at edges,
and how many cycles a byte costs by the cache it comes from.

Many register tiles are evaluated at once: numbers that differ between tiles are float64 arrays, one element per tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from ...machine import (
    CACHE_LINE_BYTES,
    FMA_LATENCY_CYCLES,
    ISSUE_PER_CYCLE,
    L1_EVICTED_LINE_CYCLES,
    L1_SETS,
    L1_WAYS,
    L2_PANEL_VECTOR_CYCLES,
    L2_SPLIT_VECTOR_CYCLES,
    MESH_IN_PLACE_VECTOR_CYCLES,
    MESH_L2_ROW_FACTOR,
    MESH_QUEUE_CYCLES,
    MESH_ROW_CYCLES,
    OTHER_LINE_STORE_CYCLES,
    PARTIAL_LINE_FETCH_CYCLES,
    REGISTER_TILE_CYCLES,
    SHARED_LINE_CYCLES,
    TRANSPOSED_ELEMENT_CYCLES,
    TRANSPOSED_TILE_CYCLES,
)
from ...target import CpuTarget
from ...thresholds import (
    IN_PLACE_ROW_BYTES,
    IN_PLACE_STRIDE_BYTES,
    MAX_USES_IN_PLACE,
    NONTEMPORAL_RUN_BYTES,
    PACKED_SCALARS_PANELS,
    PACKED_STRIDE_BYTES,
    PACKED_STRIDE_BYTES_IN_L2,
    SHARED_LINE_OUTPUT_BYTES,
    UNROLLED_REDUCTION,
)
from ..analysis.contraction_info import Conditions, ContractionInfo, Numbers
from ..analysis.window_reuse import distinct_taps, scalars_in_registers


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """A register tile.

    Attributes:
        lanes: scalars per vector.
        sizes: (parallel iterator, points); other iterators have one point.
        vectors_per_register: vectors that share a register.
    """

    lanes: int
    sizes: tuple[tuple[str, int], ...]
    vectors_per_register: int = 1

    def size(self, iterator: str) -> int:
        return dict(self.sizes).get(iterator, 1)

    @property
    def cells(self) -> int:
        """Accumulators, in registers."""
        return prod(n for _, n in self.sizes) // self.width

    @property
    def width(self) -> int:
        """Scalars in a register."""
        return self.lanes * self.vectors_per_register


def vector_cost(lanes: int, bits: int, target: CpuTarget) -> float:
    """Cycles per multiply-add or load of a vector: at most two start in a cycle."""
    return max(0.5, lanes * bits / target.issue_bits_per_cycle)


def multiply_cost(lanes: int, info: ContractionInfo, target: CpuTarget) -> float:
    """Cycles per multiply-add of a vector; pairs of bfloat16 take at least a cycle per 512 bits on every processor."""
    cost = vector_cost(lanes, info.bits, target)
    return max(cost, lanes * info.bits / 512) if info.op.pairs else cost


def step_cycles(
    info: ContractionInfo, target: CpuTarget, lanes: int, points: Mapping[str, Numbers], vectors_per_register: int = 1
) -> Numbers:
    """Cycles of one step of the innermost reduction on register tiles with these `points` along each iterator."""
    width, vector = lanes * vectors_per_register, info.vector
    cost, columns = vector_cost(width, info.bits, target), points[vector]
    vectors = np.ceil(columns / lanes) / vectors_per_register
    cells = vectors * prod(n for name, n in points.items() if name != vector)
    count, loads = np.zeros_like(columns), np.zeros_like(columns)
    anew = _read_anew(info, target, width, points)
    for factor in info.factors:
        rows = prod((n for name, n in points.items() if name != vector and name in factor.iterators), start=1.0)
        rows = rows * anew if factor is info.broadcast_operand else rows
        count += rows * (vectors if vector in factor.iterators else 1)
        loads += rows * (vectors * cost if vector in factor.iterators else 0.5)
    products = cells * multiply_cost(width, info, target)
    started = (cells + count) / ISSUE_PER_CYCLE
    busy = np.maximum(np.maximum(products, loads), np.maximum(started, FMA_LATENCY_CYCLES)) + 0.05 * loads
    waiting = _in_place_cycles(info, target, columns, vectors) + _split_cycles(info, target, columns, vectors)
    waiting += (
        L2_PANEL_VECTOR_CYCLES * vectors if info.transposes_output else _row_cycles(info, target, points, vectors)
    )
    waiting += _eviction_cycles(info, points)
    return busy + 0.1 * _count_cache_lines(info, points) + waiting


def _read_anew(facts: ContractionInfo, target: CpuTarget, width: int, points: Mapping[str, Numbers]) -> Numbers:
    """The fraction of a step's scalars that must be loaded, because no register holds them from another tap.

    1 if loads are hidden, because a processor starts fewer of the widest multiply-adds than loads per cycle.
    """
    window, still = facts.reductions[-1] if facts.reductions else None, facts.broadcast_operand
    hidden = target.issue_bits_per_cycle <= target.vector_bits
    if window is None or facts.extent(window) > UNROLLED_REDUCTION or hidden or facts.vector in still.iterators:
        return np.ones_like(points[facts.vector])
    every = prod((n for name, n in points.items() if name in still.iterators), start=float(facts.extent(window)))
    different, _ = distinct_taps(facts, window, points)
    return np.where(scalars_in_registers(facts, target, window, width, points) > 0, different / every, 1.0)


def _in_place_cycles(facts: ContractionInfo, target: CpuTarget, columns: Numbers, vectors: Numbers) -> Numbers:
    """Extra cycles of a step that reads more than four vectors of a row in place from a distant cache."""
    moving = facts.vector_operand
    if facts.transposes_output or moving.step(facts.vector) != 1 or not facts.reductions:
        return np.zeros_like(columns)
    apart = abs(moving.step(facts.reductions[-1]) or 0) * moving.bytes
    uses = prod(i.extent for i in facts.exclusive_iterators(facts.broadcast_operand))
    in_place = is_in_mesh_llc(moving.stored * moving.bytes, target) and (
        0 < apart < IN_PLACE_STRIDE_BYTES or uses <= MAX_USES_IN_PLACE
    )
    panel = facts.k_size * columns * moving.bytes
    return np.where(
        in_place & (panel > target.cache[0] * 9 // 10), MESH_IN_PLACE_VECTOR_CYCLES * np.maximum(0, vectors - 4), 0.0
    )


def _split_cycles(facts: ContractionInfo, target: CpuTarget, columns: Numbers, vectors: Numbers) -> Numbers:
    """Extra cycles of a step for vectors of unaligned rows that are read in place.

    More than three vectors need more lines than L2 delivers during the multiply-adds. Measured on machines with a large
    L2 and a distant L3.
    """
    moving = facts.vector_operand
    if not target.has_mesh_llc or facts.transposes_output or moving.step(facts.vector) != 1 or not facts.reductions:
        return np.zeros_like(columns)
    apart = abs(moving.step(facts.reductions[-1]) or 0) * moving.bytes
    in_place = apart < packing_row_bytes(facts, moving.stored * moving.bytes, columns, target)
    passes = facts.k_size * columns * moving.bytes > target.cache[0] * 3 // 4
    splits = apart > CACHE_LINE_BYTES and apart % CACHE_LINE_BYTES != 0
    return np.where(splits & in_place & passes, L2_SPLIT_VECTOR_CYCLES * np.maximum(0, vectors - 3), 0.0)


def packing_row_bytes(info: ContractionInfo, footprint: int, width: Numbers, target: CpuTarget) -> Numbers:
    """The least stride in bytes between rows of the vector operand for which packing it pays.

    footprint: bytes of the factor; width: elements in a row of a panel. On a mesh, rows up to the longest stride that
    is prefetched are read in place, unless the factor and a panel exceed half of L2, where streaming data evicts them.
    """
    if not target.has_mesh_llc:
        return np.where(footprint > target.cache[1] * 3 // 4, PACKED_STRIDE_BYTES, PACKED_STRIDE_BYTES_IN_L2)
    panel = info.k_size * width * info.vector_operand.bytes
    return np.where(
        footprint + panel > target.cache[1] // 2, PACKED_STRIDE_BYTES, PACKED_STRIDE_BYTES_IN_L2 + CACHE_LINE_BYTES
    )


def _row_cycles(facts: ContractionInfo, target: CpuTarget, points: Mapping[str, Numbers], vectors: Numbers) -> Numbers:
    """Extra cycles of a step that reads rows of the broadcast operand in place from beyond L1, on a mesh.

    Rows queue behind the vectors of a panel in L2. Only scalars that no earlier window has read count.
    """
    still = facts.broadcast_operand
    stored = still.stored * still.bytes
    if not target.has_mesh_llc or stored <= target.cache[0] or facts.vector in still.iterators or not facts.reductions:
        return np.zeros_like(vectors)
    inner = facts.reductions[-1]
    if still.step(inner) != 1 or facts.extent(inner) * still.bytes < IN_PLACE_ROW_BYTES:
        return np.zeros_like(vectors)
    rows = prod(
        (n for name, n in points.items() if abs(still.step(name) or 0) * still.bytes >= CACHE_LINE_BYTES), start=1.0
    )
    panel = facts.k_size * points[facts.vector] * (facts.bits // 8)
    queued = np.where(panel > target.cache[0] * 3 // 4, MESH_QUEUE_CYCLES * vectors**2, 0.0)
    read = prod(i.extent for i in facts.op.iterators if i.name in still.iterators)
    far = 1.0 if is_in_mesh_llc(stored, target) else MESH_L2_ROW_FACTOR
    return np.where(rows < 2, 0.0, far * (MESH_ROW_CYCLES * rows + queued) * min(1.0, still.stored / read))


def _eviction_cycles(facts: ContractionInfo, points: Mapping[str, Numbers]) -> Numbers:
    """Extra cycles of a step for rows of scalars, read in place, that alias in L1, their stride being a power of two.

    If there are more rows than lines in these sets, rows evict each other's lines before all scalars are read.
    """
    still, none = facts.broadcast_operand, np.zeros_like(points[facts.vector])
    inner = abs(still.step(facts.reductions[-1]) or 0) * still.bytes if facts.reductions else 0
    apart = {name: abs(still.step(name) or 0) * still.bytes for name in points}
    rows = [name for name, step in apart.items() if step >= CACHE_LINE_BYTES]
    if not 0 < inner < CACHE_LINE_BYTES or any(apart[name] % CACHE_LINE_BYTES for name in rows):
        return none
    room = L1_WAYS * L1_SETS // gcd(L1_SETS, *(apart[name] // CACHE_LINE_BYTES for name in rows))
    excess = np.maximum(0.0, prod((points[name] for name in rows), start=none + 1) - room)
    across = facts.exclusive_iterators(facts.vector_operand)
    panel = prod((points[i.name] for i in across if i.name in points), start=none + 1)
    in_place = facts.transposes_output or prod(i.extent for i in across) < PACKED_SCALARS_PANELS * panel
    return np.where(in_place, L1_EVICTED_LINE_CYCLES * excess**2 / room, 0.0)


def _count_cache_lines(facts: ContractionInfo, points: Mapping[str, Numbers]) -> Numbers:
    """New cache lines of the broadcast operand per step of the innermost reduction, averaged over steps."""
    factor = facts.broadcast_operand
    step = abs(factor.step(facts.reductions[-1]) or 0) * factor.bytes if facts.reductions else 0
    lines = np.full_like(points[facts.vector], min(1.0, step / CACHE_LINE_BYTES))
    for name, size in points.items():
        apart = abs(factor.step(name) or 0) * factor.bytes
        if apart:
            lines *= (
                size
                if apart >= CACHE_LINE_BYTES or step < CACHE_LINE_BYTES
                else np.maximum(1.0, size * apart / CACHE_LINE_BYTES)
            )
    return lines


def live_registers(
    info: ContractionInfo, lanes: int, points: Mapping[str, Numbers], vectors_per_register: int = 1
) -> Numbers:
    """Vector registers that are live in register tiles."""
    vectors, rows = (
        np.ceil(points[info.vector] / lanes) / vectors_per_register,
        {n: p for n, p in points.items() if n != info.vector},
    )
    count = prod(rows.values(), start=1.0)
    total = vectors * count
    for factor in info.factors:
        reads = prod((n for name, n in rows.items() if name in factor.iterators), start=1.0)
        total += np.where(reads < count, vectors * reads, 1.0) if info.vector in factor.iterators else 1.0
    return total


def all_tiles_cycles(
    info: ContractionInfo, target: CpuTarget, lanes: int, sizes: Mapping[str, Numbers], vectors_per_register: int = 1
) -> Numbers:
    """Cycles of all register tiles of the op, full and partial, for each of several tilings, if memory were free.

    sizes: sizes of the tiles along parallel iterators; others have size 1.
    """
    count = len(sizes[info.vector])
    points, tiling = np.array(list(sizes.values())), np.arange(count)
    times = np.full(count, float(prod(i.extent for i in info.parallel if i.name not in sizes)))
    for row, name in reversed([*enumerate(sizes)]):
        full, rest = np.divmod(float(info.extent(name)), points[row])
        whole, short = np.flatnonzero(full), np.flatnonzero(rest)
        kept = np.concatenate([whole, short])
        times = np.concatenate([times[whole] * full[whole], times[short]])
        points, tiling = points[:, kept], tiling[kept]
        points[row, len(whole) :] = rest[short]
    total = np.zeros(count)
    np.add.at(
        total,
        tiling,
        times * tile_cycles(info, target, lanes, dict(zip(sizes, points, strict=True)), vectors_per_register),
    )
    return total


def tile_cycles(
    info: ContractionInfo, target: CpuTarget, lanes: int, points: Mapping[str, Numbers], vectors_per_register: int = 1
) -> Numbers:
    """Cycles of one register tile over all reductions, for each tile in `points`."""
    vectors = np.ceil(points[info.vector] / lanes) / vectors_per_register
    cells = vectors * prod(n for name, n in points.items() if name != info.vector)
    steps = info.k_size * step_cycles(info, target, lanes, points, vectors_per_register)
    written = _output_cycles(info, target, points, steps)
    if info.transposes_output:
        written += TRANSPOSED_TILE_CYCLES + TRANSPOSED_ELEMENT_CYCLES * cells * lanes
    return (
        steps
        + REGISTER_TILE_CYCLES
        + 2 * cells * vector_cost(lanes * vectors_per_register, info.bits, target)
        + written
    )


def _output_cycles(facts: ContractionInfo, target: CpuTarget, points: Mapping[str, Numbers], steps: Numbers) -> Numbers:
    """Cycles for the cache lines, whole or partial, that register tiles write.

    steps: cycles of the sums, which hide fetches of partial lines that take no longer.
    """
    run = facts.run(points)
    runs = prod(points.values()) / run
    cycles = runs * (1 + run * facts.output_bytes / CACHE_LINE_BYTES) * OTHER_LINE_STORE_CYCLES
    if facts.output_size > SHARED_LINE_OUTPUT_BYTES:
        partial = ~facts.fills_lines(run, CACHE_LINE_BYTES)
        cycles += np.where(partial, runs * SHARED_LINE_CYCLES, 0.0)
        if not facts.transposes_output and facts.output_size > max(
            target.writeback_limit_bytes, target.reuse_limit_bytes
        ):  # stored non-temporally if all lines were whole
            fetched = runs * run * facts.output_bytes / CACHE_LINE_BYTES * PARTIAL_LINE_FETCH_CYCLES
            waits = partial & (fetched > steps) & ~fills_whole_lines(facts, target, points)
            cycles += np.where(waits, fetched, 0.0)
    return cycles


def fills_whole_lines(info: ContractionInfo, target: CpuTarget, points: Mapping[str, Numbers]) -> Conditions:
    """Whether boxes of `points` may be stored non-temporally: they consist of whole lines or, on a mesh, of long runs.

    Long runs may begin and end in the middle of a line, with the whole range of the lanes' iterator. A partial vector
    is an ordinary store, so no non-temporal store of its row may write the rest of its line.
    """
    run = info.run(points)
    whole = info.fills_lines(run, CACHE_LINE_BYTES)
    if target.has_mesh_llc:
        ends = points[info.vector] == info.extent(info.vector)
        whole |= (
            ends & (run * info.output_bytes >= NONTEMPORAL_RUN_BYTES) & info.fills_lines(run, CACHE_LINE_BYTES // 2)
        )
    row = points[info.vector] * info.output_bytes
    ends_whole: Conditions = whole & ((row % (CACHE_LINE_BYTES // 2) == 0) | (row < CACHE_LINE_BYTES))
    return ends_whole


# --- memory ------------------------------------------------------------------------------------------------------


def byte_cost(resident: int, target: CpuTarget) -> float:
    """Cycles per byte read from the smallest cache that has room for `resident` bytes in 3/4 of its size."""
    for size, cost in zip(target.cache, (0.0, 1 / 32, 1 / 10), strict=False):
        if resident <= size * 3 // 4:
            return cost
    return 1 / 4


def is_beyond_private_caches(resident: int, target: CpuTarget) -> bool:
    """Whether so many bytes exceed the private caches."""
    return resident > target.cache[-2] * 3 // 4


def is_in_mesh_llc(resident: int, target: CpuTarget) -> bool:
    """Whether so many bytes come from a distant cache: they exceed the private caches of a machine with a mesh."""
    return target.has_mesh_llc and is_beyond_private_caches(resident, target)


def stream_cycles(outer: int, inner: int, outer_panel: int, panels: int, passes: int, target: CpuTarget) -> float:
    """Cycles to read both factors if panels of one are stationary and the other streams past each of them.

    Args:
        outer, inner: bytes of the stationary and of the streaming factor.
        outer_panel: bytes of a panel of the stationary factor.
        panels: panels of the stationary factor.
        passes: register tiles along the streaming factor.
    """
    still = outer * passes * byte_cost(outer_panel, target)
    passing = inner * panels * byte_cost(inner, target)
    return still + passing + outer * byte_cost(outer, target)
