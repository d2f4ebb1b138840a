"""Collect the accesses of units as references, and redirect accesses to promoted buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

import islpy as isl

from ....core.internal_names import internal_name
from ....tc_lang import ir as tc
from ....tc_lang.ir import BoundFunction, map_operands
from ...scop.isl_affine import isl_extent, isl_parameters, isl_tensor, quasi_affine
from ..plan.statement_phases import Phase, Unit
from .footprint import OUT, IndirectAccess, Reference

T = TypeVar("T")


def references_of(units: Collection[Unit], function: BoundFunction, context: isl.Context) -> tuple[Reference, ...]:
    """Every occurrence of a tensor in `units`; for each unit the write, then reads in the order of the text."""
    return tuple(r for u in units for r in _of_unit(u, function, context))


def _of_unit(unit: Unit, function: BoundFunction, context: isl.Context) -> Iterator[Reference]:
    s = unit.statement
    if unit.phase is not Phase.PARTIAL:
        written = tc.Access(s.target, s.subscripts, s.value.dtype)
        updates = unit.phase is Phase.UPDATE or (
            s.reduction is not None and not s.initialize and unit.phase is not Phase.INIT
        )
        yield _make_reference(unit, "w", written, function, context, reads=updates, writes=True)
        for n, access in enumerate(e for root in s.subscripts for e in _collect_accesses(root)):  # data-dependent
            yield _make_reference(unit, f"s{n}", access, function, context, reads=True, writes=False)
    if unit.phase in (Phase.WHOLE, Phase.UPDATE, Phase.PARTIAL):
        for n, access in enumerate(_collect_accesses(s.value)):
            found = _make_reference(unit, f"r{n}", access, function, context, reads=True, writes=False)
            yield found if found.affine else replace(found, lookup=_make_indirect_access(unit, n, access, context))


def _collect_accesses(root: tc.Expr) -> Iterator[tc.Access]:
    return (e for e in tc.walk_expr(root) if isinstance(e, tc.Access))


def _make_reference(
    unit: Unit,
    place: str,
    access: tc.Access,
    function: BoundFunction,
    context: isl.Context,
    *,
    reads: bool,
    writes: bool,
) -> Reference:
    """The reference of `access`. A guarded access is to the element at its subscripts, or to none if out of bounds."""
    tensor = function.tensor(access.tensor)
    extents = [isl_extent(tensor, d) for d in range(len(tensor.shape))]
    texts = [quasi_affine(e) for e in access.subscripts]
    names = [f"x{d}" for d in range(len(texts))]
    conditions = [f"{x} = {t}" for x, t in zip(names, texts, strict=True) if t is not None]
    if None in texts or access.guarded:
        conditions += [f"0 <= {x} < {extent}" for x, extent in zip(names, extents, strict=True)]
    element = f"{isl_tensor(access.tensor)}[{', '.join(names)}]"
    bounds = unit.domain.partition(" : ")[2]
    formula = " and ".join(c for c in (bounds, *conditions) if c)
    prefix = isl_parameters((*unit.variables, *(v or "" for v in tensor.extent_variables)))
    relation = isl.Map(f"{prefix}{{ {unit.instance} -> {element}{' : ' + formula if formula else ''} }}", context)
    subscripts = None
    if None not in texts:
        subscripts = isl.MultiAff(f"{{ {unit.instance} -> [{', '.join(f'({t})' for t in texts)}] }}", context)
    starts = unit.phase is Phase.UPDATE and unit.statement.initialize and writes
    starter = f"{Unit(unit.node, Phase.INIT).name}.w" if starts else ""
    tag = f"{unit.name}.{place}"
    return Reference(tag, access.tensor, relation, reads, writes, None not in texts, subscripts, starter)


def _make_indirect_access(unit: Unit, number: int, access: tc.Access, context: isl.Context) -> IndirectAccess | None:
    """The data-dependent access of read number `number`; None if it is guarded, or has no coordinates.

    The coordinates are the largest affine parts of the subscripts: `T(i + I(j,k), l)` has i, j, k, l.
    """
    inner = [e for root in access.subscripts for e in _collect_accesses(root)]
    if access.guarded or any(e.guarded for e in inner):
        return None
    found: dict[str, int] = {}

    def template(e: tc.Expr) -> tc.Expr:
        text = None if isinstance(e, tc.Const) or not e.dtype.is_integer else quasi_affine(e)
        return (
            map_operands(e, template)
            if text is None
            else tc.Index(coordinate_name(found.setdefault(text, len(found))), e.dtype)
        )

    subscripts = tuple(map(template, access.subscripts))
    if not found:
        return None
    coordinates = isl.MultiAff(f"{{ {unit.instance} -> [{', '.join(f'({t})' for t in found)}] }}", context)
    reads = tuple((e.tensor, f"{unit.name}.r{n}") for n, e in enumerate(inner, number + 1))
    return IndirectAccess(access.tensor, subscripts, coordinates, reads)


def coordinate_name(k: int) -> str:
    """The name of a coordinate in the subscripts of an `IndirectAccess`."""
    return f"y{k}"


def coordinates_by_name(values: Sequence[T]) -> dict[str, T]:
    """`values` of the coordinates, keyed by name."""
    return {coordinate_name(k): v for k, v in enumerate(values)}


def with_coordinates(references: Sequence[Reference]) -> tuple[Reference, ...]:
    """`references` with data-dependent reads replaced by reads of virtual tensors over the coordinates.

    This needs that neither the tensor nor its subscripts are written. Reads with the same lookup share a tensor. It has
    no memory: copies of boxes of it are filled by looking up the element at each coordinate.
    """
    written = {r.tensor for r in references if r.writes}
    names: dict[tuple[str, tuple[tc.Expr, ...]], str] = {}

    def use_coordinates(r: Reference) -> Reference:
        if r.lookup is None or not written.isdisjoint((r.tensor, *(tensor for tensor, _ in r.lookup.reads))):
            return replace(r, lookup=None)
        name = names.setdefault((r.tensor, r.lookup.subscripts), internal_name(r.tensor, len(names)))
        places = isl.Map.from_multi_aff(r.lookup.coordinates).intersect_domain(r.relation.domain())
        return replace(
            r,
            tensor=name,
            relation=places.set_tuple_name(OUT, isl_tensor(name)),
            affine=True,
            subscripts=r.lookup.coordinates,
        )

    return tuple(map(use_coordinates, references))


def with_moved_accesses(unit: Unit, buffers: Mapping[str, tuple[str, int]]) -> Unit:
    """`unit` with the accesses whose tags are in `buffers` redirected to these buffers, given as (name, rank).

    The new subscripts are further indices, named by `subscript_name`.
    """
    numbers = {"r": count(), "s": count()}

    def expression(e: tc.Expr, place: str) -> tc.Expr:
        tag = f"{unit.name}.{place}{next(numbers[place])}" if isinstance(e, tc.Access) else ""
        parts = [expression(child, place) for child in tc.operands_of(e)]
        if isinstance(e, tc.Access) and tag in buffers:
            name, rank = buffers[tag]
            return replace(e, tensor=name, subscripts=_make_subscripts(tag, rank))
        return tc.with_operands(e, parts)

    s = unit.statement
    subscripts = tuple(expression(e, "s") for e in s.subscripts)
    new = replace(s, value=expression(s.value, "r"), subscripts=subscripts)
    tag = f"{unit.name}.w"
    if tag in buffers:
        name, rank = buffers[tag]
        new = replace(new, target=name, subscripts=_make_subscripts(tag, rank))
    return Unit(replace(unit.node, statements=(new,)), unit.phase)


def subscript_name(tag: str, d: int) -> str:
    """The name of the index that subscripts dimension `d` of the redirected access `tag`."""
    return f"{tag}.{d}"


def _make_subscripts(tag: str, rank: int) -> tuple[tc.Expr, ...]:
    return tuple(tc.Index(subscript_name(tag, d), tc.INDEX_TYPE) for d in range(rank))
