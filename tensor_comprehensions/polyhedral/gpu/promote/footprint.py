"""The footprint of a scope in a tensor: references, their bounding boxes, and groups that share a box.

A scope is a relation `S[i] -> [c]`: the instances below a node of the schedule tree, each with the values of the
schedule's dimensions above that node. Block and thread identifiers may be parameters of it. The elements that the
instances at each `c` access are copied as a box: in each dimension evenly spaced elements, the first of which is affine
in `c` and the parameters, while their spacing and number are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import islpy as isl

from ....loop_ir.buffer_view import BufferDim, buffer_shape
from ....tc_lang import ir as tc

IN, OUT, PARAM, SET, DIV = isl.dim_type.in_, isl.dim_type.out, isl.dim_type.param, isl.dim_type.set, isl.dim_type.div

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class IndirectAccess:
    """A data-dependent access, with subscripts that are functions of affine coordinates `y0, y1...`.

    subscripts: the subscripts of `tensor` in terms of the coordinates. coordinates: `S[i] -> [y]`. reads: (tensor, tag)
    of the references in the subscripts.
    """

    tensor: str
    subscripts: tuple[tc.Expr, ...]
    coordinates: isl.MultiAff
    reads: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """One occurrence of a tensor in a statement.

    tag: the unique name of the occurrence. relation: `S[i] -> T[x]`, the elements that it may access.
    affine: whether the subscripts are quasi-affine; otherwise they depend on data.
    subscripts: `S[i] -> [x]` if affine, also for instances whose access a condition prevents.
    init_ref: the tag of the reference that initializes each element before this one, if any.
    lookup: the data-dependent access, if any. After `references.with_coordinates`, `tensor`, `relation` and
    `subscripts` refer to a tensor over its coordinates.
    """

    tag: str
    tensor: str
    relation: isl.Map
    reads: bool
    writes: bool
    affine: bool = True
    subscripts: isl.MultiAff | None = None
    init_ref: str = ""
    lookup: IndirectAccess | None = None

    def element(self) -> isl.MultiPwAff:
        """`S[i] -> [x]`, the accessed element; only for an affine reference."""
        if self.subscripts is not None:
            return self.subscripts.to_multi_pw_aff()
        return isl.PwMultiAff.from_map(self.relation).to_multi_pw_aff()


@dataclass(frozen=True, slots=True, eq=False)
class BoxDim:
    """One dimension of a box: the coordinates `first + sum(stride * p)`, with `0 <= p < extent` for each digit.

    digits: (stride, extent), by descending stride; a single one if the elements are evenly spaced.
    """

    first: isl.Aff
    digits: tuple[tuple[int, int], ...]

    def offsets(self) -> isl.Set:
        """`[o]`: the offsets of the elements from the first."""
        names = [f"p{k}" for k in range(len(self.digits))]
        total = " + ".join(f"{stride}*{p}" for p, (stride, _) in zip(names, self.digits, strict=True))
        bounds = " and ".join(f"0 <= {p} < {extent}" for p, (_, extent) in zip(names, self.digits, strict=True))
        return isl.Set(f"{{ [o] : exists {', '.join(names)} : o = {total} and {bounds} }}", self.first.get_ctx())


@dataclass(frozen=True, eq=False)
class Box:
    """For each point `[c]` of a scope, a box of elements of a tensor; it has one side per dimension."""

    sides: tuple[BoxDim, ...]
    space: isl.Space

    @property
    def digits(self) -> tuple[BufferDim[int], ...]:
        """The dimensions of a buffer for the box; their axes are the tensor's dimensions."""
        return tuple(BufferDim(d, *digit) for d, side in enumerate(self.sides) for digit in side.digits)

    @property
    def shape(self) -> tuple[int, ...]:
        return buffer_shape(self.digits)

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return prod(self.shape)

    @cached_property
    def relation(self) -> isl.Map:
        """`[c] -> T[x]`: the elements of the box."""
        result = isl.Map.universe(self.space)
        local = isl.LocalSpace.from_space(self.space.range())
        for d, side in enumerate(self.sides):
            offset = _make_offset_aff(isl.Aff.var_on_domain(local, SET, d), side.first, self.space)
            inside = side.offsets().preimage_multi_aff(isl.MultiAff.from_aff(offset))
            result = result.intersect(inside.unwrap())
        return result


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceGroup:
    """References to one tensor that share a copy of a box. footprint: `[c] -> T[x]`, the elements they may access."""

    references: tuple[Reference, ...]
    footprint: isl.Map
    box: Box

    @property
    def tensor(self) -> str:
        return self.references[0].tensor

    @property
    def lookup(self) -> IndirectAccess | None:
        """The data-dependent access if the dimensions are its coordinates, else None; the same for all references."""
        return self.references[0].lookup

    @property
    def reads(self) -> bool:
        return any(r.reads for r in self.references)

    @property
    def writes(self) -> bool:
        return any(r.writes for r in self.references)


def reference_groups(
    references: Sequence[Reference], scope: isl.UnionMap, around: Callable[[isl.Map], Box | None]
) -> Mapping[str, tuple[ReferenceGroup, ...]]:
    """For each tensor, the groups of its references below `scope`, in order of appearance; () if it must not be copied.

    Two references with overlapping boxes share a group if one of them writes, or if a common box is no larger than both
    together. A reference that is not affine may access any element: if the tensor is also written, no copy is safe; if
    not, the reference keeps reading the tensor itself.

    around: returns the box around a footprint, or None.
    """
    touched = _memoize(lambda relation: _footprint_below(relation, scope))
    boxed = _memoize(around)
    live = [(r, f) for r in references if (f := touched(r.relation)) is not None]
    found: dict[str, tuple[ReferenceGroup, ...]] = {}
    for tensor in dict.fromkeys(r.tensor for r, _ in live):
        mine = [(r, f) for r, f in live if r.tensor == tensor]
        exact = [(r, f) for r, f in mine if r.affine]
        unsafe = len(exact) < len(mine) and any(r.writes for r, _ in mine)
        found[tensor] = () if unsafe else _merge_groups(exact, boxed)
    return found


def _memoize(f: Callable[[isl.Map], T]) -> Callable[[isl.Map], T]:
    """`f` with cached results, because several references often access the same elements."""
    known: dict[isl.Map, T] = {}

    def look_up(x: isl.Map) -> T:
        if x not in known:
            known[x] = f(x)
        return known[x]

    return look_up


def reference_footprint(reference: Reference, scope: isl.UnionMap) -> isl.Map | None:
    """`[c] -> T[x]`, the elements that `reference` accesses below `scope`; None if it has no instance there."""
    return _footprint_below(reference.relation, scope)


def _footprint_below(relation: isl.Map, scope: isl.UnionMap) -> isl.Map | None:
    mine = scope.intersect_domain(isl.UnionSet.from_set(relation.domain()))
    if mine.is_empty():
        return None
    touched = mine.reverse().apply_range(isl.UnionMap.from_map(relation))
    return isl.Map.from_union_map(touched).coalesce()


def _merge_groups(
    items: Sequence[tuple[Reference, isl.Map]], around: Callable[[isl.Map], Box | None]
) -> tuple[ReferenceGroup, ...]:
    """The groups of the references to one tensor, merged to a fixpoint; () if a written tensor lacks a box."""
    found: list[ReferenceGroup] = []
    for reference, footprint in items:
        mine = around(footprint)
        if mine is None:
            if any(r.writes for r, _ in items):
                return ()
            continue
        found.append(ReferenceGroup((reference,), footprint, mine))
    while (pair := _first_pair(found, around)) is not None:
        i, j, joined = pair
        if joined is None:
            return ()
        found[i] = joined
        del found[j]
    return tuple(found)


def _first_pair(
    found: Sequence[ReferenceGroup], boxed: Callable[[isl.Map], Box | None]
) -> tuple[int, int, ReferenceGroup | None] | None:
    """(i, j, union) for the first two groups to merge, with None for a union without a box; None if none should be."""
    for i, a in enumerate(found):
        for j in range(i + 1, len(found)):
            b = found[j]
            if a.box is not b.box and a.box.relation.is_disjoint(b.box.relation):
                continue
            footprint = a.footprint.union(b.footprint).coalesce()
            around = boxed(footprint)
            must = a.writes or b.writes
            if must or (around is not None and around.size <= a.box.size + b.box.size):
                both = (*a.references, *b.references)
                return i, j, None if around is None else ReferenceGroup(both, footprint, around)
    return None


# --- boxes -------------------------------------------------------------------------------------------------------


def bounding_box(footprint: isl.Map) -> Box | None:
    """The box around `[c] -> T[x]`; None if a dimension has no constant extent."""
    sides: list[BoxDim] = []
    for d in range(footprint.dim(OUT)):
        side = _compute_box_dim(footprint, d)
        if side is None:
            return None
        sides.append(side)
    return Box(tuple(sides), footprint.get_space())


def _compute_box_dim(footprint: isl.Map, d: int) -> BoxDim | None:
    info = footprint.get_range_stride_info(d)
    stride = info.get_stride().to_python()
    outside = footprint.dim(IN)
    points = _project_onto_dim(footprint, d).set_tuple_name(OUT, "x").wrap().flatten()
    element = isl.Aff.var_on_domain(isl.LocalSpace.from_space(points.get_space()), SET, outside)
    if stride > 1:
        offset = _on_points(info.get_offset(), points)
        points, element = _divide_by_stride(points, element, offset, stride)
    else:
        offset = None
    narrowest = _narrowest_bound(points, outside)
    if narrowest is None:
        return None
    low, extent = narrowest
    if offset is not None:
        low = low.scale_val(isl.Val(stride, low.get_ctx())).add(_drop_last(offset))
    digit = (stride if extent > 1 else 1, extent)
    return BoxDim(simplify_floors(low, points.project_out(SET, outside, 1)), (digit,))


def _divide_by_stride(points: isl.Set, element: isl.Aff, offset: isl.Aff, stride: int) -> tuple[isl.Set, isl.Aff]:
    """`points [c, x]` as `[c, y]` with `x = stride * y + offset`, and the function y on these."""
    quotient = element.sub(offset).scale_down_val(isl.Val(stride, points.get_ctx())).floor()
    outside = points.dim(SET) - 1
    local = isl.LocalSpace.from_space(points.get_space())
    kept = [isl.Aff.var_on_domain(local, SET, k) for k in range(outside)]
    change = isl.Map.from_multi_aff(_make_multi_aff([*kept, quotient]))
    moved = points.apply(change)
    return moved, isl.Aff.var_on_domain(isl.LocalSpace.from_space(moved.get_space()), SET, outside)


def _make_multi_aff(parts: Sequence[isl.Aff]) -> isl.MultiAff:
    space = parts[0].get_domain_space()
    items = isl.AffList.alloc(space.get_ctx(), len(parts))
    for p in parts:
        items = items.add(p)
    return isl.MultiAff.from_aff_list(
        space.map_from_set().drop_dims(OUT, 0, space.dim(SET)).add_dims(OUT, len(parts)), items
    )


def _narrowest_bound(points: isl.Set, outside: int) -> tuple[isl.Aff, int] | None:
    """The tightest lower bound of the last dimension of `points [c, x]`, and the extent from it; None if unbounded."""
    best: tuple[tuple[int, ...], isl.Aff, int] | None = None
    for low in _lower_bounds(points, outside):
        here = isl.Aff.var_on_domain(isl.LocalSpace.from_space(points.get_space()), SET, outside)
        most = points.max_val(here.sub(low))
        if not most.is_int():
            continue
        bound = simplify_floors(_drop_last(low), points.project_out(SET, outside, 1))
        rank = (most.to_python(), *_count_floors_and_terms(bound))
        if best is None or rank < best[0]:
            best = rank, bound, most.to_python() + 1
    return None if best is None else best[1:]


def _lower_bounds(points: isl.Set, outside: int) -> Iterator[isl.Aff]:
    """Integer lower bounds of the last dimension, as functions on the space of `points` that do not depend on it."""
    for constraint in points.remove_unknown_divs().simple_hull().get_constraints():
        if any(not constraint.get_coefficient_val(DIV, k).is_zero() for k in range(constraint.dim(DIV))):
            continue
        equality = constraint.is_equality() and constraint.involves_dims(SET, outside, 1)
        if equality or constraint.is_lower_bound(SET, outside):
            yield constraint.get_bound(SET, outside).ceil()


def simplify_floors(aff: isl.Aff, domain: isl.Set) -> isl.Aff:
    """`aff` with floors that are constant on `domain` replaced by their values."""
    for k in reversed(range(aff.dim(DIV))):
        weight = aff.get_coefficient_val(DIV, k)
        if weight.is_zero():
            continue
        whole = aff.get_div(k).floor()
        low, high = domain.min_val(whole), domain.max_val(whole)
        if low.is_int() and low.eq(high):
            aff = aff.set_coefficient_val(DIV, k, isl.Val(0, aff.get_ctx())).add_constant_val(weight.mul(low))
    return aff


def _count_floors_and_terms(aff: isl.Aff) -> tuple[int, ...]:
    """A key that prefers fewer floors, then fewer terms."""
    terms = (
        sum(not aff.get_coefficient_val(kind, k).is_zero() for k in range(aff.dim(kind))) for kind in (DIV, IN, PARAM)
    )
    return tuple(terms)


# --- boxes with gaps ---------------------------------------------------------------------------------------------

MOST_OFFSETS = 512
"""The most elements along one dimension for which gaps are searched."""


def strided_bounding_box(footprint: isl.Map) -> Box | None:
    """The box around `[c] -> T[x]`, in which a side may have two digits, as for vectors dealt to threads cyclically.

    The digits are determined at a sample point. If the box does not contain the footprint elsewhere, or is no smaller,
    the result is `bounding_box`.
    """
    plain = bounding_box(footprint)
    sides: dict[int, BoxDim] = {}
    single = [plain is not None and plain.sides[d].digits == _SINGLE for d in range(footprint.dim(OUT))]
    for d in sorted(range(len(single)), key=lambda d: single[d]):
        if single[d] and plain is not None and plain.size <= prod(e for s in sides.values() for _, e in s.digits):
            return plain
        side = _spaced_side(_project_onto_dim(footprint, d), single=single[d])
        if side is None:
            return plain
        sides[d] = side
    found = Box(tuple(sides[d] for d in range(len(single))), footprint.get_space())
    if plain is not None and plain.size <= found.size:
        return plain
    return found if footprint.is_subset(found.relation) else plain


_SINGLE = ((1, 1),)


def _project_onto_dim(footprint: isl.Map, d: int) -> isl.Map:
    """`[c] -> [x_d]`: the coordinates of the elements along one dimension."""
    return footprint.project_out(OUT, d + 1, footprint.dim(OUT) - d - 1).project_out(OUT, 0, d)


def _spaced_side(line: isl.Map, *, single: bool) -> BoxDim | None:
    """The side around `line`, or None. single: whether it is known to have one element."""
    firsts = _first_points(line)
    if not firsts or any(not f.plain_is_equal(firsts[0]) for f in firsts[1:]):
        return None
    digits = _SINGLE if single else _find_offset_digits(_sample_offsets(line))
    return None if digits is None else BoxDim(firsts[0], digits)


def _first_points(line: isl.Map) -> list[isl.Aff]:
    found: list[isl.Aff] = []
    domain = line.domain()
    line.lexmin_pw_multi_aff().get_at(0).coalesce().foreach_piece(lambda _, f: found.append(simplify_floors(f, domain)))
    return found


def _sample_offsets(line: isl.Map) -> list[int] | None:
    """The sorted offsets from the first of the elements at a sample point; None if there are too many."""
    flat = line.wrap().flatten().move_dims(SET, 0, PARAM, 0, line.dim(PARAM))
    outside = flat.dim(SET) - 1
    point = flat.sample_point().get_multi_val()
    for k in range(outside):
        flat = flat.fix_val(SET, k, point.get_at(k))
    here = flat.project_out(SET, 0, outside)
    low, high = here.dim_min_val(0), here.dim_max_val(0)
    if not (low.is_int() and high.is_int()) or high.sub(low).to_python() > 8 * MOST_OFFSETS:
        return None
    found: list[int] = []
    here.foreach_point(lambda p: found.append(p.get_coordinate_val(SET, 0).to_python()))
    return [x - min(found) for x in sorted(found)] if len(found) <= MOST_OFFSETS else None


def _find_offset_digits(offsets: Sequence[int] | None) -> tuple[tuple[int, int], ...] | None:
    """One or two digits (stride, extent) whose sums are exactly `offsets`, which are sorted from 0; else None."""
    if offsets is None or len(offsets) == 1:
        return None if offsets is None else _SINGLE
    stride = offsets[1]
    run = next((k for k, o in enumerate(offsets) if o != k * stride), len(offsets))
    if run == len(offsets):
        return ((stride, run),)
    period, count = offsets[run], len(offsets) // run
    if list(offsets) != [k * period + j * stride for k in range(count) for j in range(run)]:
        return None
    return (period, count), (stride, run)


# --- spaces ------------------------------------------------------------------------------------------------------


def _on_points(aff: isl.Aff, points: isl.Set) -> isl.Aff:
    """An affine function of `[c]` as a function of `[c, x]`."""
    return aff.insert_dims(IN, aff.dim(IN), 1).align_params(points.get_space().params())


def _drop_last(aff: isl.Aff) -> isl.Aff:
    """An affine function of `[c, x]` that does not depend on x as a function of `[c]`."""
    return aff.drop_dims(IN, aff.dim(IN) - 1, 1)


def _make_offset_aff(element: isl.Aff, first: isl.Aff, space: isl.Space) -> isl.Aff:
    """`x_d - first(c)` on the wrapped `[c] -> T[x]`."""
    where = element.pullback_multi_aff(isl.MultiAff.range_map(space))
    return where.sub(first.pullback_multi_aff(isl.MultiAff.domain_map(space)))
