"""Copies between a tensor and the buffer that holds a box of it, by all threads of a block together.

The elements of a box, in the order of the buffer, go round the threads: neighbours in memory to neighbours in a warp.
Several go at once, as one vector of up to 16 bytes, where every vector of the box is aligned and lies wholly inside or
wholly outside of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import islpy as isl

from ...loop_ir import build
from ...loop_ir.intrinsics import COPY_ASYNC
from ...loop_ir.nodes import THREAD, Buffer, Expr, Invoke, Launch, Load, Loop, LoopKind, Ramp, Stmt, Store
from .footprint import Box
from .spell import Values, identifiers

VECTOR_BYTES = 16
ASYNC_BYTES = (4, 8, 16)
# Trips of a copy's loop that are written out, so that as many loads are in flight.
UNROLLED_TRIPS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One direction of one group: between `tensor` and `buffer`, whose elements are those of `box`.

    points: `[c]`, where the scope has instances.
    only: `[c] -> T[x]`, the elements to copy where not all of the box that lies in the tensor; None for those.
    """

    tensor: Buffer
    buffer: Buffer
    box: Box
    points: isl.Set
    only: isl.Map | None
    lanes: int

    def statement(self, outer: Sequence[Expr], launch: Launch, *, into: bool, asynchronous: bool = False) -> Stmt:
        """The copy into the buffer, or back out of it, where the scope's dimensions are worth `outer`."""
        shape = units(self.box.shape, self.lanes)
        total, threads = prod(shape), prod(launch.block)
        trips = -(-total // threads)
        trip = f"{self.buffer.name}.{'in' if into else 'out'}"
        position = build.add(build.mul(build.var(trip), threads), rank(launch))
        place = _digits(rank(launch), threads, build.var(trip), shape)
        body = self._element(outer, place, launch, into=into, asynchronous=asynchronous)
        if total % threads:
            body = build.when(build.lt(position, total), body)
        kind = LoopKind.UNROLLED if trips <= UNROLLED_TRIPS else LoopKind.SERIAL
        return Loop(trip, build.const(0), build.const(trips), body, kind)

    def private(self, outer: Sequence[Expr], launch: Launch, *, into: bool) -> Stmt:
        """The copy by each thread of a box of its own, every element written out."""
        shape = units(self.box.shape, self.lanes)
        name = f"{self.buffer.name}.{'in' if into else 'out'}"
        place = [build.var(f"{name}{d}") if extent > 1 else build.const(0) for d, extent in enumerate(shape)]
        body = self._element(outer, place, launch, into=into, asynchronous=False)
        for d, extent in reversed(list(enumerate(shape))):
            if extent > 1:
                body = Loop(f"{name}{d}", build.const(0), build.const(extent), body, LoopKind.UNROLLED)
        return body

    def _element(
        self, outer: Sequence[Expr], place: Sequence[Expr], launch: Launch, *, into: bool, asynchronous: bool
    ) -> Stmt:
        inside = [*place[:-1], build.mul(place[-1], self.lanes)] if self.box.digits else []
        values = Values(tuple(outer), identifiers(launch))
        element = [values.of(side.first) for side in self.box.sides]
        for (d, stride, _), p in zip(self.box.digits, inside, strict=True):
            element[d] = build.add(element[d], build.mul(p, stride))
        here, there = ((self.buffer, tuple(inside)), (self.tensor, tuple(element)))
        target, source = (here, there) if into else (there, here)
        moved: Stmt
        if asynchronous and into:
            size = self.lanes * self.tensor.type.dtype.size
            moved = Invoke(COPY_ASYNC, (target, source), (size,))
        else:
            moved = Store(target[0], self._wide(target[1]), Load(source[0], self._wide(source[1])))
        return build.when(self._condition(outer, element, launch), moved)

    def _wide(self, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return (*indices[:-1], Ramp(indices[-1], 1, self.lanes)) if self.lanes > 1 else indices

    def _condition(self, outer: Sequence[Expr], element: Sequence[Expr], launch: Launch) -> Expr:
        around = self.box.relation()
        inside = within(around.get_space(), self.tensor.shape)
        wanted = inside if self.only is None else self.only
        missing = wanted.gist(around.intersect_domain(self.points))
        return Values((*outer, *element), identifiers(launch)).holds(missing.wrap().flatten())


def within(space: isl.Space, shape: Sequence[int]) -> isl.Map:
    """The pairs of `space`, `[c] -> T[x]`, whose element is one of a tensor of that shape."""
    result = isl.Map.universe(space)
    for d, extent in enumerate(shape):
        least, most = (isl.Val(v, space.get_ctx()) for v in (0, extent - 1))
        result = result.lower_bound_val(isl.dim_type.out, d, least).upper_bound_val(isl.dim_type.out, d, most)
    return result


def lanes_of(tensor: Buffer, box: Box, points: isl.Set, only: isl.Map | None) -> int:
    """How many elements at once: 1 where vectors would be misaligned or straddle what is not to be copied."""
    size = tensor.type.dtype.size
    if not box.sides or only is not None or tensor.strides[-1] != 1 or size >= VECTOR_BYTES:
        return 1
    lanes, side = VECTOR_BYTES // size, box.sides[-1]
    spacing, run = side.digits[-1]
    while lanes > 1:
        lengths = (*tensor.strides[:-1], tensor.shape[-1], *(stride for stride, _ in side.digits[:-1]), run)
        if spacing == 1 and all(n % lanes == 0 for n in lengths) and _divides(lanes, side.first, points):
            return lanes
        lanes //= 2
    return 1


def _divides(number: int, aff: isl.Aff, points: isl.Set) -> bool:
    rest = aff.mod_val(isl.Val(number, aff.get_ctx()))
    return bool(points.max_val(rest).is_zero())


def units(shape: Sequence[int], lanes: int) -> tuple[int, ...]:
    """The shape of a box counted in vectors."""
    return (*shape[:-1], shape[-1] // lanes) if shape else (1,)


def rank(launch: Launch) -> Expr:
    """The number of a thread in its block; x runs fastest."""
    x, y, z = (
        build.var(name) if extent > 1 else build.const(0) for name, extent in zip(THREAD, launch.block, strict=True)
    )
    return build.add(x, build.mul(build.add(y, build.mul(z, launch.block[1])), launch.block[0]))


def _digits(base: Expr, step: int, trip: Expr, shape: Sequence[int]) -> list[Expr]:
    """The number `base + step * trip` in the mixed base of `shape`, most significant first.

    While `step` is a multiple of an extent that digit is the same in all trips.
    """
    found: list[Expr] = []
    for extent in reversed(shape[1:]):
        if step and step % extent == 0:
            found.append(build.mod(base, extent))
            base, step = build.div(base, extent), step // extent
        else:
            whole = build.add(base, build.mul(trip, step))
            found.append(build.mod(whole, extent))
            base, step = build.div(whole, extent), 0
    found.append(build.add(base, build.mul(trip, step)) if step else base)
    return found[::-1]
