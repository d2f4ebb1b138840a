"""The cost model: which register tile, which loop order and which copies suit an op on a machine.

Everything is counted in cycles of one core. The model knows issue limits of multiply-adds and loads, the latency of
a chain of multiply-adds, lanes wasted at edges, and how many cycles a byte costs by the cache it comes from.
"""

from __future__ import annotations

from collections.abc import Iterator as Generator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from ..target import Target
from .facts import Factor, Facts
from .op import Iterator

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
NEARLY = 1.15
"""Times the cycles of the best register tile: that is nearly as good."""
SHORT_SUM, SLOWEST = 32, 2.0
"""Terms of sums that take no longer than to write them beyond the second cache; for these, times the cycles of
multiply-adds along the lanes that vectors of another width may take to be thought of."""
SHORT_RUN = 48
"""Points along the lanes below which tiles that go on where the output's runs end are tried."""
ROW_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28)


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """Points of each tiled parallel iterator; others have one. `lanes` scalars per vector along the lane iterator."""

    lanes: int
    sizes: tuple[tuple[str, int], ...]

    def size(self, iterator: str) -> int:
        return dict(self.sizes).get(iterator, 1)

    @property
    def cells(self) -> int:
        """Accumulators."""
        return prod(n for _, n in self.sizes) // self.lanes


def vector_cost(lanes: int, bits: int, target: Target) -> float:
    """Cycles per multiply-add or load of a vector: at most two start in a cycle."""
    return max(0.5, lanes * bits / target.issue_bits)


def multiply_cost(lanes: int, facts: Facts, target: Target) -> float:
    """The same for multiply-adds alone: one of pairs takes the time of a vector of 512 bits on every processor."""
    cost = vector_cost(lanes, facts.bits, target)
    return max(cost, lanes * facts.bits / 512) if facts.op.pairs else cost


def step_cycles(facts: Facts, target: Target, lanes: int, sizes: Mapping[str, int]) -> float:
    """Cycles of one step of the innermost reduction on a register tile."""
    cost, vector = vector_cost(lanes, facts.bits, target), facts.vector
    vectors = -(-sizes[vector] // lanes)
    lines = _lines(facts.still, facts.reductions[-1], sizes) if facts.reductions else 0
    cells, count, loads = vectors, 0, 0.0
    for name, n in sizes.items():
        if name != vector:
            cells *= n
    for factor in facts.factors:
        used, rows = factor.used, 1
        for name, n in sizes.items():
            if name != vector and name in used:
                rows *= n
        count += rows * (vectors if vector in used else 1)
        loads += rows * (vectors * cost if vector in used else 0.5)
    products = cells * multiply_cost(lanes, facts, target)
    started = (cells + count) / STARTED
    waiting = _in_place_cycles(facts, target, sizes, vectors) + _split_cycles(facts, target, sizes, vectors)
    waiting += PANEL_VECTOR * vectors if facts.turned else _row_cycles(facts, target, sizes, vectors)
    return max(products, loads, started, LATENCY) + 0.05 * loads + 0.1 * lines + waiting


def _in_place_cycles(facts: Facts, target: Target, sizes: Mapping[str, int], vectors: int) -> float:
    """Cycles of a step for more vectors than a few of long rows that come from afar and are read where they are."""
    moving = facts.moving
    if facts.turned or moving.step(facts.vector) != 1 or not facts.reductions:
        return 0.0
    panel = facts.steps * sizes[facts.vector] * moving.bytes
    if not is_far(moving.stored * moving.bytes, target) or panel <= target.cache[0] * 9 // 10:
        return 0.0
    apart = abs(moving.step(facts.reductions[-1]) or 0) * moving.bytes
    uses = prod(i.extent for i in facts.only(facts.still))
    in_place = 0 < apart < SHORT_STEP or uses <= USES_IN_PLACE
    return IN_PLACE * max(0, vectors - 4) if in_place else 0.0


def _split_cycles(facts: Facts, target: Target, sizes: Mapping[str, int], vectors: int) -> float:
    """Cycles of a step for vectors of rows that begin anywhere in a line and are read where they are.

    More than three of them ask for more lines than come from the second cache while the multiply-adds last. That was
    measured where it is large, and the third one far.
    """
    moving = facts.moving
    if not target.is_meshed or facts.turned or moving.step(facts.vector) != 1 or not facts.reductions:
        return 0.0
    apart = abs(moving.step(facts.reductions[-1]) or 0) * moving.bytes
    if facts.steps * sizes[facts.vector] * moving.bytes <= target.cache[0] * 3 // 4 or apart % LINE == 0:
        return 0.0
    in_place = LINE < apart < row_bound(facts, moving.stored * moving.bytes, sizes[facts.vector], target)
    return SPLIT * max(0, vectors - 3) if in_place else 0.0


def row_bound(facts: Facts, footprint: int, width: int, target: Target) -> int:
    """Bytes between rows of the moving factor from which on panels `width` wide are copied.

    footprint: bytes of the factor. Where the second cache is large and the third one far, rows up to the longest step
    that prefetching follows are near, but what fills half of the second cache is lost to what passes by.
    """
    if not target.is_meshed:
        return ROWS if footprint > target.cache[1] * 3 // 4 else FAR_ROWS
    panel = facts.steps * width * facts.moving.bytes
    return ROWS if footprint + panel > target.cache[1] // 2 else FAR_ROWS + LINE


def _row_cycles(facts: Facts, target: Target, sizes: Mapping[str, int], vectors: int) -> float:
    """Cycles of a step that rows read where they are cost beside a panel in the second cache.

    What windows read again is near by then.
    """
    still = facts.still
    stored = still.stored * still.bytes
    if not target.is_meshed or stored <= target.cache[0] or facts.vector in still.used or not facts.reductions:
        return 0.0
    inner = facts.reductions[-1]
    if still.step(inner) != 1 or facts.extent(inner) * still.bytes < LONG_ROW:
        return 0.0
    rows = prod(n for name, n in sizes.items() if abs(still.step(name) or 0) * still.bytes >= LINE)
    panel = facts.steps * sizes[facts.vector] * facts.bits // 8
    if rows < 2:
        return 0.0
    queued = QUEUED * vectors**2 if panel > target.cache[0] * 3 // 4 else 0.0
    read = prod(i.extent for i in facts.op.iterators if i.name in still.used)
    far = 1.0 if is_far(stored, target) else NEARER
    return far * (ROW * rows + queued) * min(1.0, still.stored / read)


def _lines(factor: Factor, reduction: str, sizes: Mapping[str, int]) -> float:
    """Cache lines that the rows of a register tile begin per step of the innermost reduction."""
    step = abs(factor.step(reduction) or 0) * factor.bytes
    lines = min(1.0, step / LINE)
    for name, size in sizes.items():
        apart = abs(factor.step(name) or 0) * factor.bytes
        if apart and size > 1:
            lines *= size if apart >= LINE or step < LINE else max(1.0, size * apart / LINE)
    return lines


def registers(facts: Facts, lanes: int, sizes: Mapping[str, int]) -> int:
    """Vector registers that a register tile keeps alive."""
    vectors = -(-sizes[facts.vector] // lanes)
    rows = {name for name, n in sizes.items() if n > 1 and name != facts.vector}
    total = vectors * prod(sizes[name] for name in rows)
    for factor in facts.factors:
        if facts.vector in factor.used and rows - factor.used:
            total += vectors * prod(sizes[name] for name in rows & factor.used)
        else:
            total += 1
    return total


def compute_cycles(facts: Facts, target: Target, tile: RegisterTile) -> float:
    """Cycles of all register tiles of the op, full and partial, were memory free."""
    sizes = dict(tile.sizes)
    variants: list[list[tuple[str, int, int]]] = []
    for name, size in tile.sizes:
        full, rest = divmod(facts.extent(name), size)
        variants.append([(name, n, count) for n, count in ((size, full), (rest, 1)) if n and count])
    total = 0.0
    others = prod(i.extent for i in facts.parallel if i.name not in sizes)
    for variant in product(*variants):
        points = {name: n for name, n, _ in variant}
        total += others * prod(c for _, _, c in variant) * tile_cycles(facts, target, tile.lanes, points)
    return total


def tile_cycles(facts: Facts, target: Target, lanes: int, points: Mapping[str, int]) -> float:
    """Cycles of one register tile of so many points, over all reductions."""
    along = points[facts.vector]
    vectors = -(-along // lanes)
    cells = vectors * prod(n for name, n in points.items() if name != facts.vector)
    steps = facts.steps * step_cycles(facts, target, lanes, points)
    written = _output_cycles(facts, target, points, steps)
    if facts.turned:
        written += TURN_OVERHEAD + TURN * cells * lanes
    return steps + TILE_OVERHEAD + 2 * cells * vector_cost(lanes, facts.bits, target) + written


def _output_cycles(facts: Facts, target: Target, points: Mapping[str, int], steps: float) -> float:
    """Cycles for the lines of memory that the runs of the output in a register tile touch, whole ones or in part.

    steps: cycles of the sums, beside which lines come from memory unless they are done before.
    """
    run = facts.run(points)
    runs = prod(points.values()) / run
    cycles = runs * (1 + run * facts.output_bytes / LINE) * LINE_OVERHEAD
    if facts.output_size > FAR and not facts.fills_lines(run, LINE):
        cycles += runs * SHARED_LINE
        passes = not facts.turned and facts.output_size > max(target.far, target.kept)  # the caches, but for this one
        fetched = runs * run * facts.output_bytes / LINE * FETCHED_LINE
        if passes and fetched > steps and not fills_memory(facts, target, points):
            cycles += fetched
    return cycles


def fills_memory(facts: Facts, target: Target, points: Mapping[str, int]) -> bool:
    """Whether what a box of `points` writes may go past the caches: whole lines, or past a far one long runs.

    These begin and end in the middle of a line, where the lanes' iterator does.
    """
    run = facts.run(points)
    if facts.fills_lines(run, LINE):
        return True
    ends = points.get(facts.vector, 1) == facts.extent(facts.vector)
    return target.is_meshed and ends and run * facts.output_bytes >= LONG_RUN and facts.fills_lines(run, LINE // 2)


@dataclass(frozen=True)
class Ranking:
    """The register tiles worth a thought, those with the fewest cycles first."""

    facts: Facts
    target: Target

    @cached_property
    def cycles(self) -> dict[RegisterTile, float]:
        """Of those that fill a good part of the registers where any do, in this order."""
        cells = {tile: tile.cells for tile in _tiles(self.facts, self.target)}
        most = max(cells.values())
        found = {tile: compute_cycles(self.facts, self.target, tile) for tile, n in cells.items() if 2 * n >= most}
        return dict(sorted(found.items(), key=lambda item: item[1]))

    @property
    def best(self) -> RegisterTile:
        return next(iter(self.cycles))

    def several(self, count: int) -> list[RegisterTile]:
        """The best one and then others with few cycles, no two of one width and number of lanes.

        The second is the narrowest that is nearly as good and fills cache lines: panels of it hold long runs of memory.
        """
        chosen: dict[tuple[int, int], RegisterTile] = {}
        for tile in self.cycles:
            chosen.setdefault((tile.lanes, tile.size(self.facts.vector)), tile)
        tiles = list(chosen.values())
        vector, line = self.facts.vector, LINE // self.facts.output_bytes
        good = [t for t in tiles if t.size(vector) >= line and self.cycles[t] <= NEARLY * self.cycles[tiles[0]]]
        narrow = min(good, key=lambda t: (t.size(vector), -t.lanes), default=tiles[0])
        return list(dict.fromkeys([tiles[0], narrow, *tiles]))[:count]

    def shapes(self, count: int) -> list[RegisterTile]:
        """The best one and then others with few cycles, no two of one width and with rows along the same iterators."""
        chosen: dict[object, RegisterTile] = {}
        for tile in self.cycles:
            rows = tuple(name for name, _ in tile.sizes)
            chosen.setdefault((tile.lanes, tile.size(self.facts.vector), rows), tile)
        return list(chosen.values())[:count]


def _tiles(facts: Facts, target: Target) -> Generator[RegisterTile]:
    widest = target.lanes(facts.bits)
    extent = facts.extent(facts.vector)
    useful = [lanes for lanes in _halves(widest) if lanes < 2 * extent] or [_halves(widest)[-1]]
    if facts.steps <= SHORT_SUM:  # many ways around these are compared
        slots = {lanes: -(-extent // lanes) * multiply_cost(lanes, facts, target) for lanes in useful}
        useful = [lanes for lanes in useful if slots[lanes] <= SLOWEST * min(slots.values())]
    all_rows = tuple(dict.fromkeys(_turned_rows(facts) if facts.turned else _rows(facts, target)))
    for lanes in useful[:3]:
        for vectors in range(1, 9):
            across = min(vectors, -(-extent // lanes)) * lanes
            if across < vectors * lanes:
                break
            for rows in all_rows:
                if across // lanes * prod(n for _, n in rows) >= target.vector_registers:
                    continue
                sizes = {facts.vector: min(across, extent), **dict(rows)}
                if registers(facts, lanes, {**sizes, facts.vector: across}) <= target.vector_registers - 1:
                    yield RegisterTile(lanes, ((facts.vector, across), *rows))


def _halves(lanes: int) -> list[int]:
    """`lanes`, half of it, and so on, down to 4."""
    return [lanes, *_halves(lanes // 2)] if lanes > 4 else [lanes]


def _rows(facts: Facts, target: Target) -> Generator[tuple[tuple[str, int], ...]]:
    """Ways to give rows to a register tile: one iterator, or two where one alone is short."""
    names = [i.name for i in facts.row_candidates]
    contiguous = [n for n in names if facts.still.step(n) == 1 and facts.extent(n) >= 4]
    names = contiguous or names
    yield ()
    for name in names:
        for size in _sizes(facts.extent(name)):
            yield ((name, size),)
    if facts.continuing is not None and facts.extent(facts.vector) < SHORT_RUN:
        for row in facts.row_candidates:
            for size in _sizes(min(8, facts.continuing.extent)):
                if row is not facts.continuing and facts.continuing.extent % size == 0:
                    yield from (((facts.continuing.name, size), (row.name, n)) for n in _sizes(min(14, row.extent)))
    short = [name for name in names if facts.extent(name) < 8][:3]
    for name in short:
        for other in names:
            if other != name:
                for size in _sizes(facts.extent(other)):
                    yield ((name, facts.extent(name)), (other, size))
    if facts.extent(facts.vector) < 32:
        yield from _columns(facts, target)


def _turned_rows(facts: Facts) -> Generator[tuple[tuple[str, int], ...]]:
    """Rows of tiles that are stored across: along the output's runs, by one more iterator where those are short."""
    extent = facts.extent(facts.unit)
    sizes = [n for n in sorted({-(-extent // parts) for parts in range(1, extent)}) if 4 <= n <= ROW_SIZES[-1]]
    rows = [i for i in facts.row_candidates if i.name != facts.unit]
    for size in sizes:
        if extent <= ROW_SIZES[-1]:
            for row in sorted(rows, key=lambda i: abs(facts.still.step(i.name) or 0)):
                for other in _sizes(min(row.extent, ROW_SIZES[-1] // size)):
                    yield ((facts.unit, size), (row.name, other))
        yield ((facts.unit, size),)
    if extent < 4:
        yield ((facts.unit, extent),)


def _columns(facts: Facts, target: Target) -> Generator[tuple[tuple[str, int], ...]]:
    """Rows together with another iterator of the moving factor, where its runs along the lanes are short.

    Where the output goes past a far cache, rows along which its runs go on come first.
    """
    rows, far = facts.only(facts.still), facts.output_size > target.far
    for row in sorted(rows, key=lambda i: not far or i is not facts.continuing)[:2]:
        for column in _column_candidates(facts):
            for across in _sizes(min(column.extent, 8)):
                if across >= 4 or facts.moving.step(column.name) != 1:  # smaller copies cannot be turned
                    for size in _sizes(min(row.extent, 14)):
                        yield ((row.name, size), (column.name, across))


def _column_candidates(facts: Facts) -> list[Iterator]:
    """The iterators of the moving factor for columns: the one it is contiguous along if a sum goes on where that ends.

    Otherwise not that one: all of its values had better be copied at once. In any case the one along which the
    output's runs go on.
    """
    moving, end = facts.moving, facts.extent(facts.vector)
    candidates = [i for i in facts.only(moving) if i.name != facts.vector]
    contiguous = [i for i in candidates if moving.step(i.name) == 1]
    continued = [i for i in contiguous if any(moving.step(name) == i.extent for name in facts.reductions)]
    written = [i for i in candidates if i not in contiguous and (i.name, end) in facts.output_steps]
    return [*continued, *written] if continued else [i for i in candidates if i not in contiguous]


def _sizes(extent: int) -> Generator[int]:
    for size in ROW_SIZES:
        if 1 < size <= extent:
            yield size


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
