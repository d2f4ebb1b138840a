"""Masked sums of products: apply a mask by zeroing elements of a factor.

A sum over `k <= m ? A(m,k) * B(k,n) : 0` uses a tile of A with zeros where the mask is false. An inequality in rows and
terms masks the left factor, one in columns and terms the right factor, and one without terms the sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.dtypes import BOOL, INT64
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...lower_expr import lower_expr
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundIndex, Inequality
from .. import specs
from ..builder.tile_views import THREAD_X, MemoryView
from ..lower.warpgroup_products import thread_range
from .product_region import ProductFactor, ProductRegion

if TYPE_CHECKING:
    from .lower_product import ProductLowering, StagedFactor


def condition_of(domain: Sequence[Inequality]) -> tc.Expr | None:
    """The expression that a point is in `domain`; None if the domain is unrestricted."""
    found: tc.Expr | None = None
    for g in domain:
        total: tc.Expr = tc.Const(g.constant, INT64)
        for name, c in g.terms:
            term = tc.Binary("*", tc.Const(c, INT64), tc.Index(name, INT64), INT64)
            total = tc.Binary("+", total, term, INT64)
        inside = tc.Binary(">=", total, tc.Const(0, INT64), BOOL)
        found = inside if found is None else tc.Binary("&&", found, inside, BOOL)
    return found


def mask_of_left(region: ProductRegion) -> tuple[Inequality, ...]:
    """The inequalities that mask the left factor: those that depend on terms, but not on columns."""
    return _select_inequalities(region, without=region.columns)


def mask_of_right(region: ProductRegion) -> tuple[Inequality, ...]:
    """The inequalities that mask the right factor: those that depend on terms and columns, but not on rows."""
    left = mask_of_left(region)
    return tuple(g for g in _select_inequalities(region, without=region.rows) if g not in left)


def mask_of_sums(region: ProductRegion) -> tuple[Inequality, ...]:
    """The inequalities that do not depend on terms; where one fails, a sum is 0."""
    terms = {i.name for p in region.pairs for i in p.terms}
    return tuple(g for g in region.domain if not terms & {name for name, _ in g.terms})


def _select_inequalities(region: ProductRegion, without: Sequence[BoundIndex]) -> tuple[Inequality, ...]:
    names = {i.name for i in without}
    free = mask_of_sums(region)
    return tuple(g for g in region.domain if g not in free and not names & {name for name, _ in g.terms})


def mask_computed_factors(region: ProductRegion) -> ProductRegion:
    """The masked region, with masks applied to the values of computed factors.

    Raises:
        CannotLower: the mask cannot be applied to factors.
    """
    (pair, *more) = region.pairs
    taken = {*mask_of_left(region), *mask_of_right(region), *mask_of_sums(region)}
    if len(taken) < len({*region.domain}):
        raise CannotLower("its mask depends on rows, columns and terms together")
    if more or region.others or pair.left.rounding:
        raise CannotLower("a masked sum is of one product of factors that are not rounded to tf32")
    left = _mask_value(pair.left, mask_of_left(region))
    return replace(region, pairs=(replace(pair, left=left, right=_mask_value(pair.right, mask_of_right(region))),))


def _mask_value(factor: ProductFactor, domain: Sequence[Inequality]) -> ProductFactor:
    condition = condition_of(domain)
    if condition is None or factor.element is not None:
        return factor
    zero = tc.Const(0.0 if factor.value.dtype.is_float else 0, factor.value.dtype)
    return replace(factor, value=tc.Select(condition, factor.value, zero, factor.value.dtype))


def mask_stage(
    lowering: ProductLowering, sides: Sequence[StagedFactor], stage: object, terms: Sequence[BoundIndex],
    at: Mapping[str, ir.Expr],
) -> bool:  # fmt: skip
    """Zero the masked elements of copied tiles in shared memory; return whether any factor is copied and masked."""
    region, found = lowering.region, False
    masks = ((lowering.order.rows, mask_of_left(region)), (lowering.order.columns, mask_of_right(region)))
    for side in sides:
        domain = next(mask for own, mask in masks if own is side.own)
        condition = condition_of(domain)
        if condition is None or side.place.element is None:
            continue
        found = True
        groups = (terms, side.own) if side.place.transposed else (side.own, terms)
        _zero_tile(lowering, side.memory[stage], condition, groups, at)  # type: ignore[index]
    return found


def _zero_tile(
    lowering: ProductLowering, to: MemoryView, condition: tc.Expr, groups: Sequence[Sequence[BoundIndex]],
    at: Mapping[str, ir.Expr],
) -> None:  # fmt: skip
    """Zero the elements of a tile for which `condition` does not hold; the elements are distributed over threads."""
    tile = lowering.tile_points(groups, at)
    rows, columns = (x.size for x in tile.levels[0].modes)
    first, threads = thread_range(lowering.threads) or (0, lowering.k.num_threads)
    var = internal_name("element", "masked")
    number = build.add(build.mul(build.var(var), threads), build.sub(THREAD_X, first))
    row, column = build.div(number, columns), build.mod(number, columns)
    scope = lowering.point_scope(groups, tile[row, column], at)
    zero = build.const(0.0 if to.dtype.is_float else 0, to.dtype)
    store = build.store(to.buffer, to[row, column].tensor.coordinates, zero)
    body = build.when(build.logical_not(lower_expr(condition, scope)), store)
    count = -(-rows * columns // threads)
    if count * threads > rows * columns:
        body = build.when(build.lt(number, rows * columns), body)
    statement = build.loops([(var, count)], body)
    lowering.k.add_leaf(specs.Leaf((to,), (), lowering.threads, kind="Map", atom="st", statement=statement))
