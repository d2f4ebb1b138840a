"""Facts about a structured op for planning: the iterators that each factor depends on, and its strides along them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...core.errors import CannotLower
from ...loop_ir.nodes import Call, Expr, Load
from ...thresholds import MAX_LANE_SUM_BITS, MUCH_LARGER_FACTOR
from ..op import Iterator, StructuredOp, loads_in, variable_names
from ..plan import PackStep, Plan, Side
from .access_strides import access_strides, common_strides

Numbers: TypeAlias = npt.NDArray[np.float64]
Conditions: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Factor:
    """One side of the product.

    Attributes:
        iterators: the iterators that it depends on.
        strides: its stride in elements along each iterator; an iterator without a common, constant stride is left out.
        is_plain_load: whether it is an unmasked load with affine indices, or a pair of such loads of neighbors.
        bytes: size of one element of its first buffer.
        stored: elements of its largest buffer.
    """

    side: Side
    iterators: frozenset[str]
    strides: Mapping[str, int]
    is_plain_load: bool
    bytes: int
    stored: int

    def step(self, iterator: str) -> int | None:
        """The stride along `iterator` in elements; None if it is not constant."""
        if iterator not in self.iterators:
            return 0
        return self.strides.get(iterator)

    @cached_property
    def nearest(self) -> tuple[tuple[str, int], ...]:
        """(iterator, absolute stride in elements), smallest stride first."""
        return tuple(sorted(((name, abs(step)) for name, step in self.strides.items() if step), key=lambda s: s[1]))


@dataclass(frozen=True)
class ContractionInfo:
    """Facts about an op for one choice of the iterator along the lanes.

    Attributes:
        vector: the iterator along the lanes.
        output_unit_iter: an iterator along which the output is contiguous: `vector`, unless register tiles are stored
            transposed.
        vector_operand: the factor that depends on `vector` and is loaded in vectors; the left one if both do.
        broadcast_operand: the other factor, whose scalars are broadcast.
        bits: of the accumulator's type.
        k_size: multiply-adds per output element.
        output_strides: (iterator, absolute stride in elements) of the output, smallest stride first.
    """

    op: StructuredOp
    vector: str
    output_unit_iter: str
    factors: tuple[Factor, Factor]
    vector_operand: Factor
    broadcast_operand: Factor
    bits: int
    k_size: int
    output_strides: tuple[tuple[str, int], ...]

    @cached_property
    def parallel(self) -> tuple[Iterator, ...]:
        return self.op.parallel

    @cached_property
    def extents(self) -> Mapping[str, int]:
        return {i.name: i.extent for i in self.op.iterators}

    def extent(self, name: str) -> int:
        return self.extents[name]

    @cached_property
    def output_bytes(self) -> int:
        """Size of one element of the output in bytes."""
        return self.op.output.buffer.type.dtype.size

    @cached_property
    def output_size(self) -> int:
        """Size of the part of the output that the op writes, in bytes."""
        return self.output_bytes * prod(self.extent(name) for name, _ in self.output_strides)

    def run(self, points: Mapping[str, Numbers]) -> Numbers:
        """The length in elements of the contiguous runs of the output that boxes of `points` cover.

        points: sizes of the boxes along the iterators; iterators left out have size 1.
        """
        run, goes_on = np.ones_like(points[self.vector]), np.bool_(True)
        for name, step in self.output_strides:
            goes_on = goes_on & (run == step)
            run = np.where(goes_on, run * points.get(name, 1.0), run)
        return run

    def fills_lines(self, run: Numbers, line: int) -> Conditions:
        """Whether boxes whose runs are `run` elements of the output consist of whole lines of `line` bytes.

        Assumes that the output itself begins at a line.
        """
        size = self.output_bytes
        uneven = max((step for _, step in self.output_strides if step * size % line), default=0)
        filled: Conditions = (run * size % line == 0) & (run > uneven)
        return filled

    @cached_property
    def transposes_output(self) -> bool:
        """Whether the output is not contiguous along the lanes, so that register tiles are stored transposed."""
        return self.vector != self.output_unit_iter

    @cached_property
    def batch(self) -> tuple[Iterator, ...]:
        """Parallel iterators of both factors (batches), or of neither."""
        return tuple(
            i
            for i in self.parallel
            if (i.name in self.vector_operand.iterators) == (i.name in self.broadcast_operand.iterators)
        )

    def exclusive_iterators(self, factor: Factor) -> tuple[Iterator, ...]:
        """The parallel iterators that only `factor` depends on."""
        return self._columns if factor is self.vector_operand else self._rows

    @cached_property
    def _columns(self) -> tuple[Iterator, ...]:
        return tuple(
            i
            for i in self.parallel
            if i.name in self.vector_operand.iterators and i.name not in self.broadcast_operand.iterators
        )

    @cached_property
    def _rows(self) -> tuple[Iterator, ...]:
        return tuple(
            i
            for i in self.parallel
            if i.name in self.broadcast_operand.iterators and i.name not in self.vector_operand.iterators
        )

    @cached_property
    def keeps_lanes_of_sum(self) -> bool:
        """Whether each lane keeps its own partial sum of a reduction that both factors continue where the lanes end."""
        both, end = self.vector in self.broadcast_operand.iterators, self.extent(self.vector)
        goes_on = any(all(f.step(i.name) == end for f in self.factors) for i in self.op.reductions)
        rows = all(self.exclusive_iterators(f) for f in self.factors)
        return both and goes_on and rows and len(self.batch) == 1 and end * self.bits <= MAX_LANE_SUM_BITS

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """The reductions in loop order: innermost is the one along which the broadcast operand has the smallest stride.

        If the vector operand is much larger than the broadcast operand, its strides decide instead, since the few
        scalars stay in cache in any order.
        """
        factors = (self.broadcast_operand, self.vector_operand)
        if self.vector_operand.stored >= MUCH_LARGER_FACTOR * self.broadcast_operand.stored:
            factors = factors[::-1]

        def distance(i: Iterator) -> tuple[int, ...]:
            return tuple(abs(f.step(i.name) or 0) * f.bytes for f in factors)

        return tuple(i.name for i in sorted(self.op.reductions, key=distance, reverse=True))

    @cached_property
    def continuing_iterator(self) -> Iterator | None:
        """The iterator of the broadcast operand along which the output continues where its runs along the lanes end."""
        end = self.extent(self.vector)
        return next(
            (i for i in self.exclusive_iterators(self.broadcast_operand) if (i.name, end) in self.output_strides), None
        )

    @property
    def row_candidates(self) -> tuple[Iterator, ...]:
        """At most four candidates for the rows of the register tile; iterators of the broadcast operand come first."""
        reusing = sorted(
            self.exclusive_iterators(self.broadcast_operand),
            key=lambda i: (self.transposes_output and i.name != self.output_unit_iter, -i.extent),
        )
        chosen = [i for i in reusing if i.name != self.vector]
        if sum(i.extent > 3 for i in chosen) == 0:
            chosen += [i for i in self.exclusive_iterators(self.vector_operand) if i.name != self.vector]
        return tuple(chosen[:4])


def analyze_contraction(op: StructuredOp, vector: str | None = None) -> ContractionInfo:
    """The facts about `op` with lanes along `vector`.

    vector: None chooses the longest iterator along which the output is contiguous.

    Raises:
        CannotLower: the output is not affine or nowhere contiguous, no factor depends on the lanes' iterator, or a
            factor reads no tensor.
    """
    iterators = [i.name for i in op.iterators]
    written = access_strides(op.output, iterators)
    if written is None:
        raise CannotLower(f"{op.name}: the output's subscripts are not affine")
    unit = [i for i in op.parallel if written.get(i.name) == 1]
    if not unit:
        raise CannotLower(f"{op.name}: no iterator walks the output with unit stride")
    left, right = _make_factor(op, Side.LEFT, op.left, iterators), _make_factor(op, Side.RIGHT, op.right, iterators)
    longest = max(unit, key=lambda i: i.extent).name
    vector = vector or longest
    if vector not in left.iterators | right.iterators:
        raise CannotLower(f"{op.name}: no factor depends on {vector}, along which the output is contiguous")
    moving, still = (left, right) if vector in left.iterators else (right, left)
    steps_per_element = prod(i.extent for i in op.reductions)
    return ContractionInfo(
        op,
        vector,
        vector if written.get(vector) == 1 else longest,
        (left, right),
        moving,
        still,
        op.dtype.bits,
        steps_per_element,
        tuple(sorted(((name, abs(step)) for name, step in written.items()), key=lambda s: s[1])),
    )


def _make_factor(op: StructuredOp, side: Side, value: Expr, iterators: list[str]) -> Factor:
    accesses = loads_in(value)
    if not accesses:
        raise CannotLower(f"{op.name}: the {side.name.lower()} factor reads no tensor")
    used = frozenset(variable_names(value)) & frozenset(iterators)
    strides = common_strides(accesses, iterators)
    single = isinstance(value, Load) or (isinstance(value, Call) and strides.get(op.pairs) == 2)
    plain = single and all(a.mask is None and access_strides(a, iterators) is not None for a in accesses)
    stored = max(prod(a.buffer.shape) for a in accesses)
    return Factor(side, used, strides, plain, accesses[0].buffer.type.dtype.size, stored)


def is_shared_panel(op: StructuredOp, plan: Plan, step: PackStep) -> bool:
    """Whether all iterations of the parallel loop pack the same panel, so that each thread packs it once."""
    around = {level.iterator for level in plan.levels[: step.depth] if level.size < op.extent(level.iterator)}
    return 0 < step.depth == plan.parallel_depth and not around & set(variable_names(op.factors[step.side.value]))
