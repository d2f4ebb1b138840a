"""Lower products of a def for Hopper: persistent blocks, a role that loads by TMA, and warpgroups that multiply.

The pipeline is that of `k.ring(load=)`. Sums are stored via shared memory by TMA if the output allows that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import InternalError
from ...layouts import Layout
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import WARPGROUP
from ...lower_expr import LoweringScope
from ...tc_lang.ir import BoundIndex
from ..builder.indices import to_index
from ..builder.tile_views import MemoryView, RegisterFragment, WarpgroupPlan
from ..builder.warp_role_builder import BLOCK_ID, role_registers
from ..lower.warpgroup_products import group_left_fragment, plan_warpgroups, warpgroup_accumulator
from ..tensors import DataTensor, ThreadTensor
from .factor_boxes import box_element
from .lower_chain import ChainedLeft
from .lower_product import ProductLowering, StagedFactor
from .masked_factors import mask_of_sums
from .product_region import FactorPair, ProductFactor
from .product_tiles import FactorPlace, PairOrder


class GroupProductLowering(ProductLowering):
    """Lowers one region to products of warpgroups."""

    def write(self) -> None:
        k, (rows, columns, _) = self.k, self.tiles.tile
        groups = self.tiles.warpgroups
        k.clusters(self.tiles.cluster)
        load, math = k.threads(WARPGROUP * (1 + groups)).tile(WARPGROUP).split(1, groups)
        pairs = [self._stages(p, order) for p, order in zip(self.region.pairs, self.order.pairs, strict=True)]
        if self.region.chain is not None:
            self.chained = ChainedLeft(self, math)
        plan = plan_warpgroups((rows, columns), math, k.target)
        registers = role_registers(groups, self.tiles.cluster)[1]

        def write_tile(blocks: Mapping[str, ir.Expr]) -> None:
            totals = [k.allocate(self._new_sums(name, plan)) for name in self.sum_names]
            self._begin(totals)
            self._multiply_all(totals, pairs, load, math, blocks)
            with k.role(math, registers=registers):
                if self.chained is not None:
                    self.chained.finish(totals, blocks)
                self.recompute_spoiled(totals, blocks)
                self._store(totals, blocks)

        if self.region.domain:  # tiles differ in steps: not persistent, so that the hardware balances them
            k.num_blocks = self.num_tiles
            blocks, k.names = self._name_tile(BLOCK_ID)
            write_tile(blocks)
            return
        for number in k.share_tiles(self.num_tiles):
            blocks, names = self._name_tile(number)
            with k.bind_names(names):
                write_tile(blocks)

    def _new_sums(self, name: str, plan: WarpgroupPlan) -> RegisterFragment:
        return warpgroup_accumulator(name, self.tiles.tile[:2], plan, self.region.total)

    @property
    def threads(self) -> ThreadTensor:
        """The threads that hold sums."""
        count = self.k.num_threads
        return self.k.threads(count).split(WARPGROUP, count - WARPGROUP)[1]

    def _meet_after_stores(self) -> None:
        self.k.fence()
        self.k.sync(self.threads)

    @property
    def column_permutation(self) -> Layout | None:
        """None: TMA cannot permute columns."""
        return None

    def _stage(
        self, name: str, factor: ProductFactor, place: FactorPlace, own: tuple[BoundIndex, ...], shape: tuple[int, int]
    ) -> StagedFactor | None:
        """The stages of a factor that TMA loads; None for a computed one, which is in registers."""
        return None if place.element is None else super()._stage(name, factor, place, own, shape)

    def _stages(self, pair: FactorPair, order: PairOrder) -> tuple[StagedFactor, ...]:
        return tuple(self.view_side(side, order) for side in super()._stages(pair, order))

    def view_side(self, side: StagedFactor, order: PairOrder) -> StagedFactor:
        groups = (order.terms, side.own) if side.place.transposed else (side.own, order.terms)
        assert side.place.element is not None
        found = box_element(side.place.element, *groups, self.order.batch, self.tiles.boxes)
        if isinstance(found, str):
            raise InternalError(f"{self.region.text} has no boxes: {found}")
        return replace(side, place=replace(side.place, element=found))

    def _multiply_all(
        self, totals: Sequence[RegisterFragment], pairs: Sequence[tuple[StagedFactor, ...]], load: ThreadTensor,
        math: ThreadTensor, blocks: Mapping[str, ir.Expr],
    ) -> None:  # fmt: skip
        """Add all products to the sums, in a single pipeline."""
        counts = [self.tiles.count(p.terms) for p in self.order.pairs]
        begin, chosen = self.pipeline_steps(blocks)

        def fill(stage: Any, step: Any) -> None:
            step, first = step + begin, 0
            for sides, order, count in zip(pairs, self.order.pairs, counts, strict=True):
                at = {**blocks, **self._digits(order.terms, to_index(step - first, "steps"))}
                if len(pairs) == 1:
                    self._fill_both(stage, sides, order, at)
                else:
                    with self.k.when((step >= first) & (step < first + count)):
                        self._fill_both(stage, sides, order, at)
                first += count

        def use(stage: Any, step: Any) -> None:
            order = self.order.pairs[0]
            at = {**blocks, **self._digits(order.terms, to_index(step + begin, "steps"))}
            if self.chained is None:
                self.mask_sides(pairs[0], order, stage, at)
            if order.left.element is not None:
                self._multiply_stage(totals, pairs[0], stage, math)
                return
            if self.chained is not None:
                self.chained.compute(stage, at, totals)
                self.chained.multiply(totals, pairs[0], stage)
                return
            self.compute_left(left, self.region.pairs[0].left.value, (self.order.rows, order.terms), at)
            self.multiply_left(totals, left, pairs[0], stage, math)

        rows, _, terms = self.tiles.tile
        factor = self.region.pairs[0].left
        left = group_left_fragment("left", (rows, terms), factor.dtype, math, self.k.target)
        if self.order.pairs[0].left.element is None and self.chained is None:
            self.k.allocate(left)
        count = sum(counts) if chosen is None else chosen
        first, lead = self.first_copies(blocks), min(self.tiles.lead, sum(counts))
        self.k.ring(count, self.tiles.stages, fill, use, load=load, first=first, lead=lead)

    def _fill_both(
        self, stage: Any, sides: Sequence[StagedFactor], order: PairOrder, at: Mapping[str, ir.Expr]
    ) -> None:
        for side in sides:
            shared = self.tiles.cluster > 1 and side.own is self.order.columns
            self.fill_side(side.memory[stage], side, order, at, multicast=shared)
        if self.chained is not None:
            self.chained.fill(stage, at)

    # --- sums ----------------------------------------------------------------------------------------------------

    def _store(self, totals: Sequence[RegisterFragment], blocks: Mapping[str, ir.Expr]) -> None:
        """Apply the epilogue and store the sums: by TMA if the output allows it, or else by each thread."""
        view = self._output_box(blocks)
        if view is None:
            self._finish(totals, blocks)
            return
        contraction = self.region.contraction
        finished = contraction.initial is not None or contraction.epilogue is not None
        if finished or mask_of_sums(self.region):
            self.each_run(totals, blocks, lambda *parts: self._finish_in_place(totals, *parts), totals[0])
        self.k.move(view, totals[0])

    def _output_box(self, blocks: Mapping[str, ir.Expr]) -> MemoryView | None:
        """The tile of the output as a box; None if it is not stored by TMA."""
        groups = (self.order.rows, self.order.columns)
        if not self.tiles.stores_boxes or self.order.output is None:
            return None
        found = box_element(self.order.output, *groups, self.order.batch, self.tiles.boxes)
        if isinstance(found, str):
            raise InternalError(f"{self.region.text} is stored as no boxes: {found}")
        view = found.view([*groups[0], *groups[1]], {i.name: blocks[i.name] for i in self.order.batch})
        return MemoryView(view.buffer, self._pick_tile(view.tensor, groups, blocks))

    def _finish_in_place(
        self, totals: Sequence[RegisterFragment], run: Sequence[int], points: Sequence[DataTensor],
        scopes: Sequence[LoweringScope],
    ) -> ir.Stmt:  # fmt: skip
        """Replace the sums of a thread in registers by the values to store."""
        values = [self._stored_value(totals, v, scope) for v, scope in zip(run, scopes, strict=True)]
        return self.keep_values(totals[0], run, points, values)
