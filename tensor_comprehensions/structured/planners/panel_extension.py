"""Panels that hold long runs of a factor which is contiguous along neither a sum nor the register tile."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...machine import CACHE_LINE_BYTES
from ...target import CpuTarget
from ...thresholds import SHORT_RUN_BYTES
from ..analysis.contraction_info import ContractionInfo, Factor
from ..cost.tile_cost import RegisterTile, is_in_mesh_llc
from ..lower.tile import balanced_block
from ..op import Iterator
from ..plan import TileLoop


@dataclass(frozen=True, slots=True)
class PanelExtension:
    """Points that panels of the moving factor hold besides those of the register tile. steps: of the sum in a panel."""

    info: ContractionInfo
    target: CpuTarget
    tile: RegisterTile
    steps: int

    def iterators(self, factor: Factor) -> tuple[Iterator, ...]:
        """The iterator along which a factor is contiguous, if it is neither summed nor in the register tile.

        A panel of all its values is transposed like one of a contiguous sum. If such panels are small, the
        iterators along which memory continues are included, and after a short sum, too, if memory is far.
        """
        if factor.step(self.info.vector) == 1:
            return ()
        room, run, panels = self._room(), self._contiguous_sum_size(factor), 1
        chosen: list[Iterator] = []
        for i in sorted(self.info.exclusive_iterators(factor), key=lambda i: abs(factor.step(i.name) or 0)):
            if self.tile.size(i.name) == 1 and factor.step(i.name) == run and (not chosen or room >= 2 * panels):
                chosen.append(i)
                run, panels = run * i.extent, panels * i.extent
        return tuple(reversed(chosen))

    def _contiguous_sum_size(self, factor: Factor) -> int:
        """Elements of the sums along which a far factor is contiguous, if a panel has all of them and they are few."""
        run = 1
        for name in sorted(self.info.reductions, key=lambda name: abs(factor.step(name) or 0)):
            run *= self.info.extent(name) if factor.step(name) == run else 1
        return run if self._is_far() and self.steps == self.info.k_size and run * factor.bytes < SHORT_RUN_BYTES else 1

    def blocks(self, swept: tuple[Iterator, ...]) -> list[TileLoop]:
        """A part of the swept iterators whose panels fit the second cache together."""
        room = self._room()
        levels: list[TileLoop] = []
        for i in reversed(swept):
            if i.extent > room:
                levels.append(TileLoop(i.name, self._in_lines(i, balanced_block(i.extent, max(1, room)))))
            room //= i.extent
        return list(reversed(levels))

    def _room(self) -> int:
        """The number of panels that fit into L2 together, besides their source data if that is far."""
        size, columns = (
            self.info.op.dtype.size,
            prod(self.tile.size(i.name) for i in self.info.exclusive_iterators(self._moving_factor)),
        )
        one = self.steps * size * (2 * columns if self._is_far() else self._width())
        return max(CACHE_LINE_BYTES // size, self.target.cache[1] * 5 // 8 // one)

    def _in_lines(self, swept: Iterator, size: int) -> int:
        """About so many points of a contiguous iterator that runs consist of whole fetches."""
        moving, fetched = self._moving_factor, self.target.fetch_bytes
        if not self._is_far() or moving.step(swept.name) != 1 or swept.extent * moving.bytes % fetched:
            return size
        line, panel = fetched // moving.bytes, self.steps * self._width() * moving.bytes
        return size // line * line or (line if line * panel <= self.target.cache[1] * 3 // 4 else size)

    @property
    def _moving_factor(self) -> Factor:
        return self.info.vector_operand

    def _is_far(self) -> bool:
        return is_in_mesh_llc(self._moving_factor.stored * self._moving_factor.bytes, self.target)

    def _width(self) -> int:
        return self.tile.size(self.info.vector)
