"""Extended panels: long runs of a factor that is contiguous along neither a reduction nor the register tile."""

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
    """Which points panels of the vector operand hold besides those of the register tile.

    steps: steps of the reduction in a panel.
    """

    info: ContractionInfo
    target: CpuTarget
    tile: RegisterTile
    steps: int

    def iterators(self, factor: Factor) -> tuple[Iterator, ...]:
        """The iterators, outermost first, by which to extend panels of a factor; none if it has contiguous vectors.

        The first is the iterator along which the factor is contiguous, if that is neither summed nor in the register
        tile; a panel of all its values is transposed like one of a contiguous reduction. If panels are small, iterators
        along which the memory continues follow. If memory is beyond the private caches, a short contiguous reduction
        may come before all of these.
        """
        if factor.step(self.info.vector) == 1:
            return ()
        room, run, panels = self._count_fitting_panels(), self._contiguous_sum_size(factor), 1
        chosen: list[Iterator] = []
        for i in sorted(self.info.exclusive_iterators(factor), key=lambda i: abs(factor.step(i.name) or 0)):
            if self.tile.size(i.name) == 1 and factor.step(i.name) == run and (not chosen or room >= 2 * panels):
                chosen.append(i)
                run, panels = run * i.extent, panels * i.extent
        return tuple(reversed(chosen))

    def _contiguous_sum_size(self, factor: Factor) -> int:
        """Elements of the reductions along which a factor beyond the private caches is contiguous.

        1 unless a panel has all steps of the reductions, and they are a short run.
        """
        run = 1
        for name in sorted(self.info.reductions, key=lambda name: abs(factor.step(name) or 0)):
            run *= self.info.extent(name) if factor.step(name) == run else 1
        return run if self._is_far() and self.steps == self.info.k_size and run * factor.bytes < SHORT_RUN_BYTES else 1

    def blocks(self, swept: tuple[Iterator, ...]) -> list[TileLoop]:
        """Levels that divide the swept iterators into parts whose panels fit L2 together."""
        room = self._count_fitting_panels()
        levels: list[TileLoop] = []
        for i in reversed(swept):
            if i.extent > room:
                levels.append(TileLoop(i.name, self._round_to_fetches(i, balanced_block(i.extent, max(1, room)))))
            room //= i.extent
        return list(reversed(levels))

    def _count_fitting_panels(self) -> int:
        """The number of panels that fit into L2, together with their source data if that comes from a distant cache."""
        size, columns = (
            self.info.op.dtype.size,
            prod(self.tile.size(i.name) for i in self.info.exclusive_iterators(self._moving_factor)),
        )
        one = self.steps * size * (2 * columns if self._is_far() else self._width())
        return max(CACHE_LINE_BYTES // size, self.target.cache[1] * 5 // 8 // one)

    def _round_to_fetches(self, swept: Iterator, size: int) -> int:
        """`size`, rounded so that runs along a contiguous iterator consist of whole fetches from a distant cache."""
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
