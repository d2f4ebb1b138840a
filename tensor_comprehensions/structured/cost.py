"""The cost model: which register tile, which loop order and which copies suit an op on a machine.

Everything is counted in cycles of one core. The model knows issue limits of multiply-adds and loads, the latency of
a chain of multiply-adds, lanes wasted at edges, and how many cycles a byte costs by the cache it comes from.

Register tiles are looked at many at a time: numbers that differ from one to another are arrays, of floats that hold
whole numbers exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ..target import Target
from .facts import Conditions, Facts, Numbers
from .windows import UNROLL, held, taps

LATENCY = 4.0
"""Cycles until the result of a multiply-add can be added to."""
STARTED = 3.0
"""Multiply-adds and loads that start in a cycle; what reads memory itself, as by an indexed address, is both."""
TILE_OVERHEAD = 24.0
"""Cycles to start and finish a register tile, beyond its loads and stores."""
TURN_OVERHEAD, TURN = 30.0, 0.4
"""Cycles to store a register tile across: for each one, and for each element."""
PANEL_VECTOR = 0.1
"""Cycles that a vector of a panel costs because it comes from the second cache."""
ROW, QUEUED, NEARER = 0.5, 0.1, 0.5
"""Where the last cache is far, cycles of a step for each row that comes from there, and for each vector of a panel in
the second cache times their number, for they wait for one another; the part of both where the rows come from nearer."""
IN_PLACE, USES_IN_PLACE, SHORT_STEP = 0.4, 256, 1024
"""Cycles of a step for each vector after the fourth of rows that are read in place from afar; uses of an element up to
which rows are, however far apart, where they can be brought near in time; bytes between rows below which all are."""
SPLIT = 1.0
"""Cycles of a step for each vector after the third that lies in two lines of the second cache."""
LONG_ROW = 1024
"""Bytes of a row from which on it is read where it is; shorter ones are packed."""
FAR_ROWS, ROWS = 2048, 1024
"""Bytes between rows from which on they are copied: of what the second cache holds, and of what it does not."""
LINE = 64
LINE_OVERHEAD = 2.0
"""Cycles to write to another cache line."""
SHARED_LINE, FAR, FETCHED_LINE = 8.0, 1 << 20, 20.0
"""Cycles for lines that two register tiles share, where the output has more than so many bytes; for each line that
comes from memory only to be written, because register tiles do not fill it."""
LONG_RUN = 256
"""Bytes of a run of the output that goes past a far cache although it begins or ends in the middle of a line."""


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """Points of each tiled parallel iterator; others have one. `lanes` scalars per vector along the lane iterator.

    joined: vectors that share a register.
    """

    lanes: int
    sizes: tuple[tuple[str, int], ...]
    joined: int = 1

    def size(self, iterator: str) -> int:
        return dict(self.sizes).get(iterator, 1)

    @property
    def cells(self) -> int:
        """Accumulators."""
        return prod(n for _, n in self.sizes) // self.width

    @property
    def width(self) -> int:
        """Scalars in a register."""
        return self.lanes * self.joined


def vector_cost(lanes: int, bits: int, target: Target) -> float:
    """Cycles per multiply-add or load of a vector: at most two start in a cycle."""
    return max(0.5, lanes * bits / target.issue_bits)


def multiply_cost(lanes: int, facts: Facts, target: Target) -> float:
    """The same for multiply-adds alone: one of pairs takes the time of a vector of 512 bits on every processor."""
    cost = vector_cost(lanes, facts.bits, target)
    return max(cost, lanes * facts.bits / 512) if facts.op.pairs else cost


def step_cycles(facts: Facts, target: Target, lanes: int, points: Mapping[str, Numbers], joined: int = 1) -> Numbers:
    """Cycles of one step of the innermost reduction on register tiles. joined: vectors to a register."""
    width, vector = lanes * joined, facts.vector
    cost, columns = vector_cost(width, facts.bits, target), points[vector]
    vectors = np.ceil(columns / lanes) / joined
    cells = vectors * prod(n for name, n in points.items() if name != vector)
    count, loads = np.zeros_like(columns), np.zeros_like(columns)
    anew = _read_anew(facts, target, width, points)
    for factor in facts.factors:
        rows = prod((n for name, n in points.items() if name != vector and name in factor.used), start=1.0)
        rows = rows * anew if factor is facts.still else rows
        count += rows * (vectors if vector in factor.used else 1)
        loads += rows * (vectors * cost if vector in factor.used else 0.5)
    products = cells * multiply_cost(width, facts, target)
    started = (cells + count) / STARTED
    busy = np.maximum(np.maximum(products, loads), np.maximum(started, LATENCY)) + 0.05 * loads
    waiting = _in_place_cycles(facts, target, columns, vectors) + _split_cycles(facts, target, columns, vectors)
    waiting += PANEL_VECTOR * vectors if facts.turned else _row_cycles(facts, target, points, vectors)
    return busy + 0.1 * _lines(facts, points) + waiting


def _read_anew(facts: Facts, target: Target, width: int, points: Mapping[str, Numbers]) -> Numbers:
    """The part of the scalars of a step that registers do not hold from other steps of a window.

    That matters where as many of the widest multiply-adds as of loads start in a cycle.
    """
    window, still = facts.reductions[-1] if facts.reductions else None, facts.still
    hidden = target.issue_bits <= target.vector_bits
    if window is None or facts.extent(window) > UNROLL or hidden or facts.vector in still.used:
        return np.ones_like(points[facts.vector])
    every = prod((n for name, n in points.items() if name in still.used), start=float(facts.extent(window)))
    different, _ = taps(facts, window, points)
    return np.where(held(facts, target, window, width, points) > 0, different / every, 1.0)


def _in_place_cycles(facts: Facts, target: Target, columns: Numbers, vectors: Numbers) -> Numbers:
    """Cycles of a step for more vectors than a few of long rows that come from afar and are read where they are."""
    moving = facts.moving
    if facts.turned or moving.step(facts.vector) != 1 or not facts.reductions:
        return np.zeros_like(columns)
    apart = abs(moving.step(facts.reductions[-1]) or 0) * moving.bytes
    uses = prod(i.extent for i in facts.only(facts.still))
    in_place = is_far(moving.stored * moving.bytes, target) and (0 < apart < SHORT_STEP or uses <= USES_IN_PLACE)
    panel = facts.steps * columns * moving.bytes
    return np.where(in_place & (panel > target.cache[0] * 9 // 10), IN_PLACE * np.maximum(0, vectors - 4), 0.0)


def _split_cycles(facts: Facts, target: Target, columns: Numbers, vectors: Numbers) -> Numbers:
    """Cycles of a step for vectors of rows that begin anywhere in a line and are read where they are.

    More than three of them ask for more lines than come from the second cache while the multiply-adds last. That was
    measured where it is large, and the third one far.
    """
    moving = facts.moving
    if not target.is_meshed or facts.turned or moving.step(facts.vector) != 1 or not facts.reductions:
        return np.zeros_like(columns)
    apart = abs(moving.step(facts.reductions[-1]) or 0) * moving.bytes
    in_place = apart < row_bound(facts, moving.stored * moving.bytes, columns, target)
    passes = facts.steps * columns * moving.bytes > target.cache[0] * 3 // 4
    splits = apart > LINE and apart % LINE != 0
    return np.where(splits & in_place & passes, SPLIT * np.maximum(0, vectors - 3), 0.0)


def row_bound(facts: Facts, footprint: int, width: Numbers, target: Target) -> Numbers:
    """Bytes between rows of the moving factor from which on panels `width` wide are copied.

    footprint: bytes of the factor. Where the second cache is large and the third one far, rows up to the longest step
    that prefetching follows are near, but what fills half of the second cache is lost to what passes by.
    """
    if not target.is_meshed:
        return np.where(footprint > target.cache[1] * 3 // 4, ROWS, FAR_ROWS)
    panel = facts.steps * width * facts.moving.bytes
    return np.where(footprint + panel > target.cache[1] // 2, ROWS, FAR_ROWS + LINE)


def _row_cycles(facts: Facts, target: Target, points: Mapping[str, Numbers], vectors: Numbers) -> Numbers:
    """Cycles of a step that rows read where they are cost beside a panel in the second cache.

    What windows read again is near by then.
    """
    still = facts.still
    stored = still.stored * still.bytes
    if not target.is_meshed or stored <= target.cache[0] or facts.vector in still.used or not facts.reductions:
        return np.zeros_like(vectors)
    inner = facts.reductions[-1]
    if still.step(inner) != 1 or facts.extent(inner) * still.bytes < LONG_ROW:
        return np.zeros_like(vectors)
    rows = prod((n for name, n in points.items() if abs(still.step(name) or 0) * still.bytes >= LINE), start=1.0)
    panel = facts.steps * points[facts.vector] * (facts.bits // 8)
    queued = np.where(panel > target.cache[0] * 3 // 4, QUEUED * vectors**2, 0.0)
    read = prod(i.extent for i in facts.op.iterators if i.name in still.used)
    far = 1.0 if is_far(stored, target) else NEARER
    return np.where(rows < 2, 0.0, far * (ROW * rows + queued) * min(1.0, still.stored / read))


def _lines(facts: Facts, points: Mapping[str, Numbers]) -> Numbers:
    """Cache lines that the rows of register tiles begin in the still factor per step of the innermost reduction."""
    factor = facts.still
    step = abs(factor.step(facts.reductions[-1]) or 0) * factor.bytes if facts.reductions else 0
    lines = np.full_like(points[facts.vector], min(1.0, step / LINE))
    for name, size in points.items():
        apart = abs(factor.step(name) or 0) * factor.bytes
        if apart:
            lines *= size if apart >= LINE or step < LINE else np.maximum(1.0, size * apart / LINE)
    return lines


def registers(facts: Facts, lanes: int, points: Mapping[str, Numbers], joined: int = 1) -> Numbers:
    """Vector registers that register tiles keep alive."""
    vectors, rows = (
        np.ceil(points[facts.vector] / lanes) / joined,
        {n: p for n, p in points.items() if n != facts.vector},
    )
    count = prod(rows.values(), start=1.0)
    total = vectors * count
    for factor in facts.factors:
        reads = prod((n for name, n in rows.items() if name in factor.used), start=1.0)
        total += np.where(reads < count, vectors * reads, 1.0) if facts.vector in factor.used else 1.0
    return total


def compute_cycles(facts: Facts, target: Target, lanes: int, sizes: Mapping[str, Numbers], joined: int = 1) -> Numbers:
    """Cycles of all register tiles of the op, full and partial, were memory free, for each of several tilings.

    sizes: points of the tiled parallel iterators; others have one. joined: vectors to a register.
    """
    count = len(sizes[facts.vector])
    points, tiling = np.array(list(sizes.values())), np.arange(count)
    times = np.full(count, float(prod(i.extent for i in facts.parallel if i.name not in sizes)))
    for row, name in reversed([*enumerate(sizes)]):
        full, rest = np.divmod(float(facts.extent(name)), points[row])
        whole, short = np.flatnonzero(full), np.flatnonzero(rest)
        kept = np.concatenate([whole, short])
        times = np.concatenate([times[whole] * full[whole], times[short]])
        points, tiling = points[:, kept], tiling[kept]
        points[row, len(whole) :] = rest[short]
    total = np.zeros(count)
    np.add.at(total, tiling, times * tile_cycles(facts, target, lanes, dict(zip(sizes, points, strict=True)), joined))
    return total


def tile_cycles(facts: Facts, target: Target, lanes: int, points: Mapping[str, Numbers], joined: int = 1) -> Numbers:
    """Cycles of single register tiles of so many points, over all reductions."""
    vectors = np.ceil(points[facts.vector] / lanes) / joined
    cells = vectors * prod(n for name, n in points.items() if name != facts.vector)
    steps = facts.steps * step_cycles(facts, target, lanes, points, joined)
    written = _output_cycles(facts, target, points, steps)
    if facts.turned:
        written += TURN_OVERHEAD + TURN * cells * lanes
    return steps + TILE_OVERHEAD + 2 * cells * vector_cost(lanes * joined, facts.bits, target) + written


def _output_cycles(facts: Facts, target: Target, points: Mapping[str, Numbers], steps: Numbers) -> Numbers:
    """Cycles for the lines of memory that the runs of the output in register tiles touch, whole ones or in part.

    steps: cycles of the sums, beside which lines come from memory unless they are done before.
    """
    run = facts.run(points)
    runs = prod(points.values()) / run
    cycles = runs * (1 + run * facts.output_bytes / LINE) * LINE_OVERHEAD
    if facts.output_size > FAR:
        partial = ~facts.fills_lines(run, LINE)
        cycles += np.where(partial, runs * SHARED_LINE, 0.0)
        if not facts.turned and facts.output_size > max(target.far, target.kept):  # passes the caches, but for this one
            fetched = runs * run * facts.output_bytes / LINE * FETCHED_LINE
            waits = partial & (fetched > steps) & ~fills_memory(facts, target, points)
            cycles += np.where(waits, fetched, 0.0)
    return cycles


def fills_memory(facts: Facts, target: Target, points: Mapping[str, Numbers]) -> Conditions:
    """Whether what boxes of `points` write may go past the caches: whole lines, or past a far one long runs.

    These begin and end in the middle of a line, where the lanes' iterator does.
    """
    run = facts.run(points)
    whole = facts.fills_lines(run, LINE)
    if target.is_meshed:
        ends = points[facts.vector] == facts.extent(facts.vector)
        whole |= ends & (run * facts.output_bytes >= LONG_RUN) & facts.fills_lines(run, LINE // 2)
    return whole


# --- memory ------------------------------------------------------------------------------------------------------


def byte_cost(resident: int, target: Target) -> float:
    """Cycles per byte read from the smallest cache that holds `resident` bytes."""
    for size, cost in zip(target.cache, (0.0, 1 / 32, 1 / 10), strict=False):
        if resident <= size * 3 // 4:
            return cost
    return 1 / 4


def is_far(resident: int, target: Target) -> bool:
    """Whether so many bytes are only in a last cache that is a mesh away."""
    return target.is_meshed and resident > target.cache[-2] * 3 // 4


def stream_cycles(outer: int, inner: int, outer_panel: int, panels: int, passes: int, target: Target) -> float:
    """Cycles to read both factors when the panels of one (`outer` bytes) stand still and the other (`inner`) passes.

    panels: of the outer factor, each `outer_panel` bytes; passes: register tiles along the inner factor.
    """
    still = outer * passes * byte_cost(outer_panel, target)
    passing = inner * panels * byte_cost(inner, target)
    return still + passing + outer * byte_cost(outer, target)
