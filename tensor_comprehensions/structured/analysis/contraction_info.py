"""Facts about a structured op for lowering: the iterators that move each factor, and their strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...core.errors import CannotLower
from ...loop_ir.nodes import Expr, Load
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
        iterators: the iterators it depends on.
        strides: elements that its accesses move per unit of each iterator, if that is constant.
        is_plain_load: whether it is just a load.
        bytes: size in memory of one element of its buffer.
        stored: elements of that buffer, of the largest one if it reads several.
    """

    side: Side
    iterators: frozenset[str]
    strides: Mapping[str, int]
    is_plain_load: bool
    bytes: int
    stored: int

    def step(self, iterator: str) -> int | None:
        """Elements moved per unit of `iterator`; None if that is not constant."""
        if iterator not in self.iterators:
            return 0
        return self.strides.get(iterator)

    @cached_property
    def nearest(self) -> tuple[tuple[str, int], ...]:
        """The iterators that move it and by how many elements, in either direction, the least first."""
        return tuple(sorted(((name, abs(step)) for name, step in self.strides.items() if step), key=lambda s: s[1]))


@dataclass(frozen=True)
class ContractionInfo:
    """An op with its lane iterator chosen.

    Attributes:
        vector: the iterator along the lanes.
        output_unit_iter: the iterator along which the output is contiguous; another one where register tiles are
        stored across. vector_operand, broadcast_operand: the factor that depends on the lanes (one, if both do), and
        the other. bits: of the accumulator's type.
        k_size: multiply-adds per output element.
        output_strides: the iterators that move the output and by how many elements, in either direction, least first.
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
        """Of one element of the output."""
        return self.op.output.buffer.type.dtype.size

    @cached_property
    def output_size(self) -> int:
        """Bytes of the output that the op writes."""
        return self.output_bytes * prod(self.extent(name) for name, _ in self.output_strides)

    def run(self, points: Mapping[str, Numbers]) -> Numbers:
        """How many neighboring elements of the output boxes of `points` cover at once, 1 along those left out."""
        run, goes_on = np.ones_like(points[self.vector]), np.bool_(True)
        for name, step in self.output_strides:
            goes_on = goes_on & (run == step)
            run = np.where(goes_on, run * points.get(name, 1.0), run)
        return run

    def fills_lines(self, run: Numbers, line: int) -> Conditions:
        """Whether boxes with runs of this many elements of the output consist of whole lines of `line` bytes.

        This checks multiples of sizes only; `op.output` itself should be aligned, too.
        """
        size = self.output_bytes
        uneven = max((step for _, step in self.output_strides if step * size % line), default=0)
        filled: Conditions = (run * size % line == 0) & (run > uneven)
        return filled

    @cached_property
    def transposes_output(self) -> bool:
        """Whether the lanes run across the output's contiguous runs."""
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
        """Parallel iterators that move `factor` and not the other one."""
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
        """Whether the lanes run along a sum that continues, in both factors, where they end."""
        both, end = self.vector in self.broadcast_operand.iterators, self.extent(self.vector)
        goes_on = any(all(f.step(i.name) == end for f in self.factors) for i in self.op.reductions)
        rows = all(self.exclusive_iterators(f) for f in self.factors)
        return both and goes_on and rows and len(self.batch) == 1 and end * self.bits <= MAX_LANE_SUM_BITS

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """In loop order: the one that moves the scalars least is innermost; vectors with large strides are packed.

        Scalars of few rows are near in any order. Then the vectors decide, whose memory is read as it lies.
        """
        factors = (self.broadcast_operand, self.vector_operand)
        if self.vector_operand.stored >= MUCH_LARGER_FACTOR * self.broadcast_operand.stored:
            factors = factors[::-1]

        def distance(i: Iterator) -> tuple[int, ...]:
            return tuple(abs(f.step(i.name) or 0) * f.bytes for f in factors)

        return tuple(i.name for i in sorted(self.op.reductions, key=distance, reverse=True))

    @cached_property
    def continuing_iterator(self) -> Iterator | None:
        """The iterator of the still factor along which the output's runs continue where those along the lanes end."""
        end = self.extent(self.vector)
        return next(
            (i for i in self.exclusive_iterators(self.broadcast_operand) if (i.name, end) in self.output_strides), None
        )

    @property
    def row_candidates(self) -> tuple[Iterator, ...]:
        """Candidates for the rows of the register tile: iterators that do not move the vectors come first."""
        reusing = sorted(
            self.exclusive_iterators(self.broadcast_operand),
            key=lambda i: (self.transposes_output and i.name != self.output_unit_iter, -i.extent),
        )
        chosen = [i for i in reusing if i.name != self.vector]
        if sum(i.extent > 3 for i in chosen) == 0:
            chosen += [i for i in self.exclusive_iterators(self.vector_operand) if i.name != self.vector]
        return tuple(chosen[:4])


def analyze_contraction(op: StructuredOp, vector: str | None = None) -> ContractionInfo:
    """The facts about `op` with lanes along `vector`; None is the longest iterator that walks the output.

    Raises:
        CannotLower: it has no output iterator to run the lanes along.
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
    plain = isinstance(value, Load) and value.mask is None and access_strides(value, iterators) is not None
    stored = max(prod(a.buffer.shape) for a in accesses)
    return Factor(side, used, common_strides(accesses, iterators), plain, accesses[0].buffer.type.dtype.size, stored)


def is_shared_panel(op: StructuredOp, plan: Plan, step: PackStep) -> bool:
    """Whether all iterations of the parallel loop make one and the same panel, so that a thread makes it once."""
    around = {level.iterator for level in plan.levels[: step.depth] if level.size < op.extent(level.iterator)}
    return 0 < step.depth == plan.parallel_depth and not around & set(variable_names(op.factors[step.side.value]))
