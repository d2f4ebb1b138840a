"""Copies between a tensor and a buffer that holds a box of it, by all threads of a block together.

The elements of a box, in the order of the buffer, are dealt out to the threads cyclically, so that neighbors in a warp
copy neighbors in memory. They are copied in vectors of up to 16 bytes if every vector of the box is aligned and lies
wholly inside or wholly outside of the tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import islpy as isl

from ....core.internal_names import internal_name
from ....loop_ir import build
from ....loop_ir.buffer_view import BufferView, footprint_offsets
from ....loop_ir.cross_thread_reduction import block_thread_rank
from ....loop_ir.nodes import Buffer, Expr, Launch, Load, Loop, LoopKind, Ramp, Stmt, Store
from ....lower_expr import LoweringScope, lower_subscript
from ....machine import GPU_VECTOR_BYTES
from ....tc_lang import ir as tc
from ...scop.isl_affine import isl_parameter
from ..emit.isl_to_expr import IslExprBuilder, launch_identifiers
from .footprint import OUT, Box, IndirectAccess, ReferenceGroup
from .references import coordinate_name, coordinates_by_name


@dataclass(frozen=True, slots=True, eq=False)
class IndirectSource:
    """The source of a copy with data-dependent subscripts.

    buffers: for each tensor that the subscripts read, (buffer, box): a buffer with a box of it, or the tensor and None.
    """

    lookup: IndirectAccess
    buffers: Mapping[str, tuple[Buffer, Box | None]]

    def element(self, coordinates: Sequence[Expr], values: IslExprBuilder) -> tuple[Expr, ...]:
        """The subscripts of the element at `coordinates`. values: expressions for the dimensions of the scope."""
        views: dict[str, Buffer | BufferView[int]] = {}
        for tensor, (buffer, around) in self.buffers.items():
            views[tensor] = buffer
            if around is not None:
                first = {d: values.of(side.first) for d, side in enumerate(around.sides)}
                views[tensor] = BufferView(buffer, around.digits, first)
        scope = LoweringScope(coordinates_by_name(coordinates), views)
        return tuple(lower_subscript(s, scope) for s in self.lookup.subscripts)


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """A copy between `tensor` and `buffer`, which holds the elements of `box`.

    points: `[c]`, the points of the scope with instances.
    only: `[c] -> T[x]`, the elements to copy; None for all elements of the box that are in the tensor.
    found: how to find an element of the tensor, if the box is one of coordinates.
    """

    tensor: Buffer
    buffer: Buffer
    box: Box
    points: isl.Set
    only: isl.Map | None
    lanes: int
    found: IndirectSource | None = None

    def is_after(self, filled: Collection[str]) -> bool:
        """Whether its subscripts read one of the buffers `filled`, which other copies fill."""
        return self.found is not None and any(b.name in filled for b, _ in self.found.buffers.values())

    def statement(self, outer: Sequence[Expr], launch: Launch, *, into: bool, unrolled: int) -> Stmt:
        """The copy into the buffer, or out of it, by all threads. outer: the values of the scope's dimensions.

        unrolled: the largest number of iterations for which the loop is unrolled.
        """
        shape = vector_shape(self.box.shape, self.lanes)
        total, threads = prod(shape), prod(launch.block)
        trips = -(-total // threads)
        trip = internal_name(self.buffer.name, "in" if into else "out")
        position = build.add(build.mul(build.var(trip), threads), block_thread_rank(launch))
        place = _unravel_trip_index(block_thread_rank(launch), threads, build.var(trip), shape)
        body = self._element(outer, place, launch, into=into)
        if total % threads:
            body = build.when(build.lt(position, total), body)
        kind = LoopKind.UNROLLED if trips <= unrolled else LoopKind.SERIAL
        return Loop(trip, build.const(0), build.const(trips), body, kind)

    def copy_by_thread(self, outer: Sequence[Expr], launch: Launch, *, into: bool) -> Stmt:
        """The copy of a private box by each thread for itself, fully unrolled."""
        shape = vector_shape(self.box.shape, self.lanes)
        name = internal_name(self.buffer.name, "in" if into else "out")
        place = [build.var(internal_name(name, d)) if extent > 1 else build.const(0) for d, extent in enumerate(shape)]
        extents = [(internal_name(name, d), extent) for d, extent in enumerate(shape) if extent > 1]
        return build.loops(extents, self._element(outer, place, launch, into=into), LoopKind.UNROLLED)

    def _element(self, outer: Sequence[Expr], position: Sequence[Expr], launch: Launch, *, into: bool) -> Stmt:
        inside = [*position[:-1], build.mul(position[-1], self.lanes)] if self.box.digits else []
        values = IslExprBuilder(tuple(outer), launch_identifiers(launch))
        element = [values.of(side.first) for side in self.box.sides]
        for d, distance in footprint_offsets(self.box.digits, inside).items():
            element[d] = build.add(element[d], distance)
        place = tuple(element) if self.found is None else self.found.element(element, values)
        here, there = ((self.buffer, tuple(inside)), (self.tensor, place))
        target, source = (here, there) if into else (there, here)
        moved = Store(target[0], self._widen_indices(target[1]), Load(source[0], self._widen_indices(source[1])))
        return build.when(self._condition(outer, element, launch), moved)

    def _widen_indices(self, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return (*indices[:-1], Ramp(indices[-1], 1, self.lanes)) if self.lanes > 1 else indices

    def _condition(self, outer: Sequence[Expr], element: Sequence[Expr], launch: Launch) -> Expr:
        around = self.box.relation
        wanted = in_bounds_map(around.get_space(), self.tensor) if self.only is None else self.only
        missing = wanted.gist(around.intersect_domain(self.points))
        return IslExprBuilder((*outer, *element), launch_identifiers(launch)).holds(missing.wrap().flatten())


def in_bounds_map(space: isl.Space, tensor: Buffer) -> isl.Map:
    """The pairs of `space`, `[c] -> T[x]`, whose elements are in bounds of a tensor."""
    result = isl.Map.universe(space)
    for d in range(len(tensor.shape)):
        result = _bound_dimension(result, d, tensor, d)
    return result


def _bound_dimension(pairs: isl.Map, d: int, tensor: Buffer, dimension: int) -> isl.Map:
    """The `pairs` whose coordinate `d` is in bounds of a dimension of a tensor."""
    ctx, variable = pairs.get_ctx(), tensor.extent_variable(dimension)
    pairs = pairs.lower_bound_val(OUT, d, isl.Val(0, ctx))
    if variable is None:
        return pairs.upper_bound_val(OUT, d, isl.Val(tensor.shape[dimension] - 1, ctx))
    name = isl_parameter(variable)
    if pairs.find_dim_by_name(isl.dim_type.param, name) < 0:
        count = pairs.dim(isl.dim_type.param)
        pairs = pairs.add_dims(isl.dim_type.param, 1).set_dim_name(isl.dim_type.param, count, name)
    number = pairs.find_dim_by_name(isl.dim_type.param, name)
    below = isl.Constraint.alloc_inequality(isl.LocalSpace.from_space(pairs.get_space()))
    below = below.set_coefficient_val(isl.dim_type.param, number, 1).set_coefficient_val(OUT, d, -1)
    return pairs.add_constraint(below.set_constant_val(-1))


def has_any_alignment(tensor: Buffer) -> bool:
    """Whether a call may give it a last extent, or a stride, that no vector divides."""
    last = len(tensor.shape) - 1
    return tensor.extent_variable(last) is not None or any(tensor.stride_variables)


def copy_lanes(tensor: Buffer, box: Box, points: isl.Set, only: isl.Map | None) -> int:
    """The number of elements to copy at once; 1 if vectors would be misaligned or contain excluded elements."""
    size = tensor.type.dtype.size
    if not box.sides or tensor.strides[-1] != 1 or size >= GPU_VECTOR_BYTES or has_any_alignment(tensor):
        return 1
    if only is not None and not _whole_rows(tensor, box, points, only):
        return 1
    lanes, side = GPU_VECTOR_BYTES // size, box.sides[-1]
    spacing, run = side.digits[-1]
    while lanes > 1:
        lengths = (*tensor.strides[:-1], tensor.shape[-1], *(stride for stride, _ in side.digits[:-1]), run)
        if spacing == 1 and all(n % lanes == 0 for n in lengths) and _is_always_divisible(lanes, side.first, points):
            return lanes
        lanes //= 2
    return 1


def indirect_copy_lanes(tensor: Buffer, group: ReferenceGroup, points: isl.Set) -> int:
    """`copy_lanes` for a box of coordinates: vectors are along the last one, if that is exactly the last subscript."""
    lookup = group.lookup
    assert lookup is not None
    *others, last = lookup.subscripts
    own = tc.Index(coordinate_name(len(group.box.sides) - 1), last.dtype)
    mixed = last != own or any(isinstance(x, tc.Index) and x.name == own.name for s in others for x in tc.walk_expr(s))
    return 1 if mixed else copy_lanes(tensor, group.box, points, group.footprint)


def _whole_rows(tensor: Buffer, box: Box, points: isl.Set, only: isl.Map) -> bool:
    """Whether `only` has either all or none of the last dimension for all other coordinates in the box."""
    d = len(box.sides) - 1
    rows = only.project_out(OUT, d, 1).insert_dims(OUT, d, 1).set_tuple_id(OUT, only.get_tuple_id(OUT))
    rows = _bound_dimension(rows, d, tensor, len(tensor.shape) - 1)
    return bool(box.relation.intersect_domain(points).intersect(rows).is_subset(only))


def _is_always_divisible(number: int, aff: isl.Aff, points: isl.Set) -> bool:
    rest = aff.mod_val(isl.Val(number, aff.get_ctx()))
    return bool(points.max_val(rest).is_zero())


def vector_shape(shape: Sequence[int], lanes: int) -> tuple[int, ...]:
    """The shape of a box counted in vectors."""
    return (*shape[:-1], shape[-1] // lanes) if shape else (1,)


def _unravel_trip_index(base: Expr, step: int, trip: Expr, shape: Sequence[int]) -> list[Expr]:
    """The digits of `base + step * trip` in the mixed radix of `shape`, the most significant first.

    Digits whose extent divides `step` are the same in all trips, so their expressions do not contain `trip`.
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
