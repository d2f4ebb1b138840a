"""Lower a chain: compute the left factor of a product, step by step, from another product's sums in registers.

Each step computes one tile of the first product, applies its epilogue, and rounds the result into the left fragment of
the second product. With a softmax in between, every row has a running maximum, and the sums so far are rescaled when it
grows.

Two warpgroups take turns: while one computes weights, the other uses the tensor cores, as in "FlashAttention-3" (Shah
et al., 2024), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...core.dtypes import FLOAT32
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...loop_ir.atoms import WARPGROUP
from ...lower_expr import LoweringScope, lower_expr
from ...structured.op import ACCUMULATOR
from ...tc_lang import ir as tc
from ..builder import scalars
from ..builder.indices import Index
from ..builder.tile_views import MemoryView, RegisterFragment, row_tile
from ..lower.pointwise import matching_values, read_value
from ..lower.tensor_core_products import accumulator, left_fragment, plan_product
from ..lower.warpgroup_products import WARPGROUP_INDEX, group_left_fragment, plan_warpgroups, warpgroup_accumulator
from ..tensors import DataTensor, ThreadTensor
from .chain_tiles import takes_turns
from .masked_steps import MaskedSteps
from .product_region import LARGEST, TOTAL, ProductRegion, Softmax
from .product_tiles import WGMMA, PairOrder
from .recompute_sums import recompute_masked_sums

if TYPE_CHECKING:
    from .lower_product import ProductLowering, StagedFactor


class ChainedLeft:
    """Emits the first product of a chain into the program of the second."""

    def __init__(self, lowering: ProductLowering, by: ThreadTensor) -> None:
        region, order, tiles = lowering.region, lowering.order, lowering.tiles
        assert region.chain is not None
        assert order.inner is not None
        self.lowering, self.k, self.by = lowering, lowering.k, by
        self.product: ProductRegion = region.chain.product
        self.softmax: Softmax | None = region.chain.softmax
        self.order: PairOrder = order.inner.pairs[0]
        self.groups = (order.rows, order.pairs[0].terms)
        self.grouped = tiles.instruction == WGMMA
        self.masked = MaskedSteps.of(region, order, tiles) if region.domain else None
        self.sides = self._declare_sides()
        self.scores, self.left = self._declare_registers()
        self.turns = self.k.barriers("turn", 2, 1) if takes_turns(tiles) else None
        self.rows: dict[str, RegisterFragment] = {}

    def _declare_sides(self) -> tuple[StagedFactor, StagedFactor]:
        """Shared memory for the first product: its left factor, which all steps use, and stages of the right one."""
        from .lower_product import StagedFactor

        lowering, (rows, _, terms) = self.lowering, self.lowering.tiles.tile
        (pair,), (inner,) = self.product.pairs, self.order.terms
        depth = lowering.tiles.boxes[inner.name]
        found = []
        for name, factor, place, own, size, stages in (
            ("first_left", pair.left, self.order.left, self.groups[0], rows, ()),
            ("first_right", pair.right, self.order.right, self.groups[1], terms, (lowering.tiles.stages,)),
        ):
            shape = (depth, size) if place.transposed else (size, depth)
            memory = self.k.shared(name, (*stages, *shape), factor.value.dtype)
            found.append(lowering.view_side(StagedFactor(memory, factor, place, own), self.order))
        return found[0], found[1]

    def _declare_registers(self) -> tuple[RegisterFragment, RegisterFragment]:
        """The registers of the scores of a step, and of the left fragment of the second product."""
        k, (rows, _, terms) = self.k, self.lowering.tiles.tile
        narrow = self.lowering.region.pairs[0].left.dtype
        if self.grouped:
            plan = plan_warpgroups((rows, terms), self.by, k.target)
            scores = warpgroup_accumulator("scores", (rows, terms), plan)
            left = group_left_fragment("left", (rows, terms), narrow, self.by, k.target)
        else:
            scores = accumulator("scores", (rows, terms), plan_product((rows, terms), self.by))
            left = left_fragment("left", (rows, terms), narrow, self.by)
        return k.allocate(scores), k.allocate(left)

    # --- memory --------------------------------------------------------------------------------------------------

    def fill_first(self, at: Mapping[str, ir.Expr]) -> None:
        """Copy the left factor of the first product, which all steps use."""
        self.lowering.fill_side(self.sides[0].memory, self.sides[0], self.order, self._with_terms(at))

    def fill(self, stage: Any, at: Mapping[str, ir.Expr]) -> None:
        """Copy the tile of the right factor of the first product that a step uses."""
        self.lowering.fill_side(self.sides[1].memory[stage], self.sides[1], self.order, self._with_terms(at))

    def _with_terms(self, at: Mapping[str, ir.Expr]) -> dict[str, ir.Expr]:
        """The coordinates `at`, and 0 for the terms of the first product, which have a single tile."""
        return {**at, **{i.name: build.const(0) for i in self.order.terms}}

    # --- steps ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Initialize the running maximum and total of each row."""
        if self.softmax is None:
            return
        for name, value in (("largest", -scalars.inf), ("total", 0.0)):
            if name not in self.rows:
                self.rows[name] = self.k.allocate(row_tile(self.scores, name))
            self.k.init(self.rows[name], value)

    def compute(self, stage: Any, at: Mapping[str, ir.Expr], totals: Sequence[RegisterFragment]) -> None:
        """Compute the left fragment of the second product for a step, and rescale the sums `totals`."""
        a, b = (x.T if s.place.transposed else x for s, x in self._views(stage))
        with self._take_turn(0):
            self.k.matmul(self.scores, a, b, by=self.by, first=True)
            if self.turns is not None:
                self.k.wait_products()
        self._finish_scores(at)
        if self.masked is not None and self.softmax is not None:
            self._mask_scores(self.masked, at)
        if self.softmax is not None:
            self._weigh(self.softmax, at, totals)
        held = matching_values(self.scores, self.left)
        self.lowering.compute_left(
            self.left, self._left_value(), self.groups, at, lambda v: {ACCUMULATOR: read_value(self.scores, held[v])},
        )  # fmt: skip

    def multiply(self, totals: Sequence[RegisterFragment], sides: Sequence[StagedFactor], stage: Any) -> None:
        """Add the products of the left fragment to the sums `totals`."""
        with self._take_turn(1):
            self.lowering.multiply_left(totals, self.left, sides, stage, self.by)

    @contextmanager
    def _take_turn(self, number: int) -> Iterator[None]:
        """Run the body when it is this warpgroup's turn for product `number`, 0 or 1, of a step; then pass the turn on.

        A warpgroup's barrier completes two phases per step, so that it waits for the same parities in all steps.
        """
        if self.turns is None:
            yield
            return
        first = build.integer(self.by.offset)
        assert first is not None
        mine = build.sub(build.var(WARPGROUP_INDEX), first // WARPGROUP)
        self.k.wait(self.turns[Index(mine)], Index(build.mod(build.add(mine, 1 + number), 2)))
        yield
        self.k.arrive(self.turns[Index(build.sub(1, mine))])

    def _left_value(self) -> tc.Expr:
        """The left factor, masked to 0 outside of the domain, unless it is a plain weight, which is 0 there already."""
        value = self.lowering.region.pairs[0].left.value
        weight = tc.Index(ACCUMULATOR, FLOAT32)
        if self.masked is None or (self.softmax is not None and value in (weight, tc.Cast(weight, value.dtype))):
            return value
        return tc.Select(self.masked.condition, value, tc.Const(0.0, value.dtype), value.dtype)

    def _views(self, stage: Any) -> tuple[tuple[StagedFactor, MemoryView], ...]:
        left, right = self.sides
        return (left, left.memory), (right, right.memory[stage])

    def _finish_scores(self, at: Mapping[str, ir.Expr]) -> None:
        """Apply the epilogue of the first product to the scores; those out of bounds become neutral."""
        c, tiles = self.product.contraction, self.lowering.tiles
        largest = None if self.softmax is None else self.softmax.largest
        plain = largest in (None, tc.Index(ACCUMULATOR, FLOAT32))
        whole = all(i.extent % tiles.boxes[i.name] == 0 for i in self.groups[1])
        if c.initial is None and c.epilogue is None and c.output.dtype == FLOAT32 and plain and whole:
            return

        def finish(v: int, scope: LoweringScope) -> ir.Expr:
            value = self.lowering.finish_sum(read_value(self.scores, v), c.initial, c.epilogue, scope.indices, scope)
            value = build.cast(build.cast(value, c.output.dtype), FLOAT32)
            if plain or largest is None:
                return value
            return lower_expr(largest, LoweringScope({**scope.indices, ACCUMULATOR: value}, scope.buffers))

        self._replace_scores(at, finish, 0.0 if self.softmax is None else -scalars.inf)

    def _mask_scores(self, masked: MaskedSteps, at: Mapping[str, ir.Expr]) -> None:
        """Make scores outside of the domain neutral, in steps that are partly masked."""

        def mask(v: int, scope: LoweringScope) -> ir.Expr:
            score = read_value(self.scores, v)
            return build.select(lower_expr(masked.condition, scope), score, build.const(-scalars.inf, FLOAT32))

        with self.k.when(Index(masked.has_partial_terms(at))):
            self._replace_scores(at, mask, -scalars.inf)

    def _weigh(self, softmax: Softmax, at: Mapping[str, ir.Expr], totals: Sequence[RegisterFragment]) -> None:
        """Replace scores by weights, update the running maxima and totals, and rescale the sums to the new maxima."""
        k, largest, total = self.k, self.rows["largest"], self.rows["total"]
        function = {"exp": scalars.exp, "exp2": scalars.exp2}[softmax.function]
        grown = k.map(scalars.max, largest, k.reduce("max", self.scores))
        # A row without a score so far has maximum -inf, and -inf - -inf is NaN.
        base = k.map(lambda x: scalars.where(x > -scalars.inf, x, 0.0), grown)
        fade = k.map(lambda old, new: function((old - new) * softmax.scale), largest, base)
        held = matching_values(base, self.scores)

        def weigh(v: int, scope: LoweringScope) -> ir.Expr:
            known = {ACCUMULATOR: read_value(self.scores, v), LARGEST: read_value(base, held[v])}
            return lower_expr(softmax.weight, LoweringScope({**scope.indices, **known}, scope.buffers))

        self._replace_scores(at, weigh, 0.0)
        k.map(lambda x, f, more: x * f + more, total, fade, k.reduce("+", self.scores), out=total)
        for x in totals:
            k.map(lambda x, f: x * f, x, fade, out=x)
        k.move(largest, grown)

    def _replace_scores(self, at: Mapping[str, ir.Expr], value: Any, beyond: float) -> None:
        """Replace every score by `value(v, scope)`; those out of bounds by `beyond`."""

        def write(run: Sequence[int], points: Sequence[DataTensor], scopes: Sequence[LoweringScope]) -> ir.Stmt:
            values = [value(v, scope) for v, scope in zip(run, scopes, strict=True)]
            return self.lowering.keep_values(self.scores, run, points, values, beyond)

        self.lowering.each_run([self.scores], at, write, self.scores, self.groups)

    def finish(self, totals: Sequence[RegisterFragment], blocks: Mapping[str, ir.Expr]) -> None:
        """After the last step, recompute sums that masked terms may have spoiled."""
        if self.masked is not None:
            recompute_masked_sums(self.lowering, self.masked, totals[0], blocks)

    def row_values(self, v: int, totals: Sequence[RegisterFragment]) -> dict[str, ir.Expr]:
        """The variables that the epilogue needs for the row of value `v` of the sums."""
        if self.softmax is None:
            return {}
        total = self.rows["total"]
        return {TOTAL: read_value(total, matching_values(total, totals[0])[v])}
