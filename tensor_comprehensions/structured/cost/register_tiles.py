"""Candidate register tiles for an op, ranked by the cost model."""

from __future__ import annotations

from collections.abc import Iterator as Generator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...machine import CACHE_LINE_BYTES
from ...target import CpuTarget
from ...thresholds import (
    MAX_TILE_VECTORS,
    NEARLY_BEST_TILE,
    SHORT_LANE_RUN,
    SHORT_SUM_FACTOR,
    SHORT_SUM_TERMS,
    TILE_ROW_SIZES,
    UNROLLED_REDUCTION,
)
from ..analysis.contraction_info import Conditions, ContractionInfo, Numbers
from ..analysis.window_reuse import scalars_in_registers
from ..op import Iterator
from .tile_cost import RegisterTile, all_tiles_cycles, live_registers, multiply_cost, vector_cost

Rows: TypeAlias = tuple[tuple[str, int], ...]
"""Points of a register tile along the iterators other than that of the lanes."""
Shape: TypeAlias = tuple[int, int]
"""The lanes of a vector, and how many vectors share a register."""


@dataclass(frozen=True)
class RegisterTileRanking:
    """The candidate register tiles of an op, fewest cycles first."""

    info: ContractionInfo
    target: CpuTarget

    @cached_property
    def cycles(self) -> list[tuple[float, Shape, int, Rows]]:
        """(cycles, shape, columns, rows) of the tiles that fill at least half as many registers as the largest one."""
        known, target = self.info, self.target
        ways = list(
            dict.fromkeys(
                _list_transposed_rows(known) if known.transposes_output else _list_candidate_rows(known, target)
            )
        )
        fitting = [_select_fitting_tiles(known, target, lanes, ways) for lanes in _list_lane_counts(known, target)]
        fitting += _half_vector_tiles(known, target)
        filled = [tiles.cells + self._count_scalar_registers(tiles) for tiles in fitting]
        most = max(tiles.cells.max() for tiles in fitting)
        found: list[tuple[float, Shape, int, Rows]] = []
        for tiles in (t.select_where(2 * count >= most) for t, count in zip(fitting, filled, strict=True)):
            cycles = all_tiles_cycles(known, target, tiles.lanes, tiles.points, tiles.joined).tolist()
            columns = tiles.points[known.vector].astype(int).tolist()
            shape = (tiles.lanes, tiles.joined)
            found += zip(cycles, repeat(shape), columns, (tiles.ways[way] for way in tiles.way), strict=False)
        return sorted(found, key=lambda tile: tile[0])

    def _count_scalar_registers(self, tiles: _Tiles) -> Numbers | float:
        """Registers that hold scalars which the taps of a window share, per tile."""
        known, window = self.info, self.info.reductions[-1] if self.info.reductions else None
        if window is None or known.extent(window) > UNROLLED_REDUCTION or not known.transposes_output:
            return 0.0
        return scalars_in_registers(known, self.target, window, tiles.lanes, tiles.points)

    @property
    def best(self) -> RegisterTile:
        return self._tile(self.cycles[0])

    def best_tiles(self, count: int) -> list[RegisterTile]:
        """At most `count` tiles: the best one, then others with few cycles, no two of the same width and shape.

        The second is the narrowest that is nearly as good and fills cache lines, because narrow panels have room for
        long runs of memory.
        """
        chosen: dict[tuple[Shape, int], tuple[float, Shape, int, Rows]] = {}
        for tile in self.cycles:
            chosen.setdefault(tile[1:3], tile)
        tiles, line = list(chosen.values()), CACHE_LINE_BYTES // self.info.output_bytes
        good = [t for t in tiles if t[2] >= line and t[0] <= NEARLY_BEST_TILE * tiles[0][0]]
        narrow = min(good, key=lambda t: (t[2], -t[1][0]), default=tiles[0])
        return list(map(self._tile, dict.fromkeys([tiles[0], narrow, *tiles])))[:count]

    def shapes(self, count: int) -> list[RegisterTile]:
        """At most `count` tiles: the best one, then others with few cycles that differ in width or rows' iterators."""
        chosen: dict[object, tuple[float, Shape, int, Rows]] = {}
        for tile in self.cycles:
            _, lanes, columns, rows = tile
            chosen.setdefault((lanes, columns, tuple(name for name, _ in rows)), tile)
        return list(map(self._tile, chosen.values()))[:count]

    def _tile(self, ranked: tuple[float, Shape, int, Rows]) -> RegisterTile:
        _, (lanes, joined), columns, rows = ranked
        return RegisterTile(lanes, ((self.info.vector, columns), *rows), joined)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Register tiles with the same shape.

    Attributes:
        lanes: lanes of a vector.
        points: the sizes of all tiles along each iterator.
        ways: the candidates for rows.
        way: for each tile, the index of its rows in `ways`.
        joined: vectors per register.
    """

    lanes: int
    points: Mapping[str, Numbers]
    ways: Sequence[Rows]
    way: npt.NDArray[np.int64]
    joined: int = 1

    @property
    def cells(self) -> Numbers:
        """Accumulators of each tile, in registers."""
        cells: Numbers = np.prod([*self.points.values()], axis=0) / (self.lanes * self.joined)
        return cells

    def select_where(self, these: Conditions) -> _Tiles:
        kept = np.flatnonzero(these)
        return replace(self, points={name: n[kept] for name, n in self.points.items()}, way=self.way[kept])


def _select_fitting_tiles(
    facts: ContractionInfo, target: CpuTarget, lanes: int, ways: Sequence[Rows], joined: int = 1
) -> _Tiles:
    """The register tiles, of up to `MAX_TILE_VECTORS` vectors along the lanes, that leave registers for the factors."""
    most = min(MAX_TILE_VECTORS, -(-facts.extent(facts.vector) // lanes))
    counts = np.arange(1.0 if joined == 1 else float(most), most + 1)
    way = np.tile(np.arange(len(ways)), len(counts))
    points: dict[str, Numbers] = {facts.vector: np.repeat(lanes * counts, len(ways))}
    sizes = [dict(rows) for rows in ways]
    for name in dict.fromkeys(name for rows in ways for name, _ in rows):
        points[name] = np.array([float(rows.get(name, 1)) for rows in sizes])[way]
    tiles = _Tiles(lanes, points, ways, way, joined)
    return tiles.select_where(live_registers(facts, lanes, points, joined) < target.vector_registers)


def _half_vector_tiles(facts: ContractionInfo, target: CpuTarget) -> Generator[_Tiles]:
    """Register tiles in which rows of half vectors share registers, if whole vectors would leave many lanes idle.

    They need a panel with several adjacent rows of the vector operand. Windows are excluded, because such a panel would
    hold them many times.
    """
    widest, extent = target.lanes(facts.bits), facts.extent(facts.vector)
    lanes = widest // 2
    halves = -(-extent // lanes)
    pays = vector_cost(widest, facts.bits, target) < 2 * vector_cost(lanes, facts.bits, target)
    windows = prod(facts.extent(name) for name in facts.vector_operand.iterators) > facts.vector_operand.stored
    suits = halves in (1, 3) and not (
        windows or facts.transposes_output or facts.op.pairs or facts.vector in facts.broadcast_operand.iterators
    )
    if not (pays and suits):
        return
    ways: list[Rows] = []
    apart = dict(facts.output_strides)
    for row in facts.exclusive_iterators(facts.broadcast_operand):
        for column in sorted(facts.exclusive_iterators(facts.vector_operand), key=lambda i: apart.get(i.name, 0)):
            across = [n for n in _list_row_sizes(min(column.extent, 8)) if n % 2 == 0 and column.name != facts.vector]
            ways += [
                ((row.name, size), (column.name, n)) for n in across for size in _list_row_sizes(min(row.extent, 14))
            ]
    if ways:
        yield _select_fitting_tiles(facts, target, lanes, ways, 2)


def _list_lane_counts(facts: ContractionInfo, target: CpuTarget) -> list[int]:
    """The numbers of lanes worth trying: up to three, the largest first."""
    widest, extent = target.lanes(facts.bits), facts.extent(facts.vector)
    useful = [lanes for lanes in _list_halves(widest) if lanes < 2 * extent] or [_list_halves(widest)[-1]]
    if facts.k_size <= SHORT_SUM_TERMS:  # many ways around these are compared
        slots = {lanes: -(-extent // lanes) * multiply_cost(lanes, facts, target) for lanes in useful}
        useful = [lanes for lanes in useful if slots[lanes] <= SHORT_SUM_FACTOR * min(slots.values())]
    return useful[:3]


def _list_halves(lanes: int) -> list[int]:
    """`lanes`, half of it, and so on, down to 4."""
    return [lanes, *_list_halves(lanes // 2)] if lanes > 4 else [lanes]


def _list_candidate_rows(facts: ContractionInfo, target: CpuTarget) -> Generator[Rows]:
    """Candidates for the rows of a register tile: along one iterator, or along two if one alone is short."""
    names = [i.name for i in facts.row_candidates]
    contiguous = [n for n in names if facts.broadcast_operand.step(n) == 1 and facts.extent(n) >= 4]
    names = contiguous or names
    yield ()
    for name in names:
        for size in _list_row_sizes(facts.extent(name)):
            yield ((name, size),)
    if facts.continuing_iterator is not None and facts.extent(facts.vector) < SHORT_LANE_RUN:
        for row in facts.row_candidates:
            for size in _list_row_sizes(min(8, facts.continuing_iterator.extent)):
                if row is not facts.continuing_iterator and facts.continuing_iterator.extent % size == 0:
                    yield from (
                        ((facts.continuing_iterator.name, size), (row.name, n))
                        for n in _list_row_sizes(min(14, row.extent))
                    )
    short = [name for name in names if facts.extent(name) < 8][:3]
    for name in short:
        for other in names:
            if other != name:
                for size in _list_row_sizes(facts.extent(other)):
                    yield ((name, facts.extent(name)), (other, size))
    if facts.extent(facts.vector) < 32:
        yield from _list_rows_with_columns(facts, target)


def _list_transposed_rows(facts: ContractionInfo) -> Generator[Rows]:
    """Candidates for the rows of tiles that are stored transposed: along the output's runs, and one more iterator."""
    extent = facts.extent(facts.output_unit_iter)
    sizes = [n for n in sorted({-(-extent // parts) for parts in range(1, extent)}) if 4 <= n <= TILE_ROW_SIZES[-1]]
    rows = [i for i in facts.row_candidates if i.name != facts.output_unit_iter]
    for size in sizes:
        if extent <= TILE_ROW_SIZES[-1]:
            for row in sorted(rows, key=lambda i: abs(facts.broadcast_operand.step(i.name) or 0)):
                for other in _list_row_sizes(min(row.extent, TILE_ROW_SIZES[-1] // size)):
                    yield ((facts.output_unit_iter, size), (row.name, other))
        yield ((facts.output_unit_iter, size),)
    if extent < 4:
        yield ((facts.output_unit_iter, extent),)


def _list_rows_with_columns(facts: ContractionInfo, target: CpuTarget) -> Generator[Rows]:
    """Rows together with another iterator of the vector operand, if its runs along the lanes are short.

    If the output exceeds `target.writeback_limit_bytes`, rows along which its runs continue come first.
    """
    rows, far = facts.exclusive_iterators(facts.broadcast_operand), facts.output_size > target.writeback_limit_bytes
    for row in sorted(rows, key=lambda i: not far or i is not facts.continuing_iterator)[:2]:
        for column in _column_candidates(facts):
            for across in _list_row_sizes(min(column.extent, 8)):
                if across >= 4 or facts.vector_operand.step(column.name) != 1:  # smaller copies cannot be transposed
                    for size in _list_row_sizes(min(row.extent, 14)):
                        yield ((row.name, size), (column.name, across))


def _column_candidates(facts: ContractionInfo) -> list[Iterator]:
    """Candidates of the vector operand for columns.

    Its contiguous iterator and the one along which the output's runs continue, if a reduction continues the contiguous
    one. Otherwise all but the contiguous one, whose values are better packed all at once.
    """
    moving, end = facts.vector_operand, facts.extent(facts.vector)
    candidates = [i for i in facts.exclusive_iterators(moving) if i.name != facts.vector]
    contiguous = [i for i in candidates if moving.step(i.name) == 1]
    continued = [i for i in contiguous if any(moving.step(name) == i.extent for name in facts.reductions)]
    written = [i for i in candidates if i not in contiguous and (i.name, end) in facts.output_strides]
    return [*continued, *written] if continued else [i for i in candidates if i not in contiguous]


def _list_row_sizes(extent: int) -> Generator[int]:
    for size in TILE_ROW_SIZES:
        if 1 < size <= extent:
            yield size
