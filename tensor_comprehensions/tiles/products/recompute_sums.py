"""Recompute sums that masked terms may have spoiled, in the threads that hold them.

A partly masked step multiplies zeros by elements that the def does not read. If such an element is infinite or NaN, the
product and the sum become NaN. A thread that finds a NaN sum recomputes it term by term, without the masked terms. In a
chain with a softmax, it does so only if the sum of the row's weights is not NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING

from ...core.dtypes import FLOAT32
from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir import nodes as ir
from ...lower_expr import LoweringScope, lower_expr
from ...structured.op import ACCUMULATOR
from ...tc_lang.ir import BoundIndex
from .. import specs
from ..builder.scalars import inf
from ..builder.tile_views import RegisterFragment
from ..lower.pointwise import matching_values, read_value
from ..lower.thread_values import element_at, name_coordinates
from ..tensors import DataTensor
from .masked_factors import condition_of
from .masked_steps import MaskedSteps
from .product_region import LARGEST

if TYPE_CHECKING:
    from .lower_chain import ChainedLeft
    from .lower_product import ProductLowering

SCORE, WEIGHT = "score_again", "weight_again"


def recompute_masked_sums(
    lowering: ProductLowering, masked: MaskedSteps, total: RegisterFragment, at: Mapping[str, ir.Expr]
) -> None:
    """Emit statements that recompute spoiled sums. at: the coordinates of the tile."""
    groups = (lowering.order.rows, lowering.order.columns)
    names: list[tuple[str, ir.Expr]] = []
    values = lowering.tile_points(groups, at).partition(total.tv)[total.thread]
    values = name_coordinates(values, [i.name for g in groups for i in g], names)
    rows = total.row_and_column()[0][0]
    order = sorted(range(total.values), key=lambda v: (rows[v], v))
    statements = []
    for _, row in groupby(order, key=lambda v: int(rows[v])):
        points = {v: element_at(values, v) for v in row}
        statements.append(_recompute_row(lowering, masked, total, points, at))
    body = build.block(*statements)
    for name, value in reversed(names):
        body = ir.Let(name, value, body)
    lowering.k.add_leaf(specs.Leaf((total,), (total,), lowering.threads, kind="Map", atom="ld, fma", statement=body))


def _recompute_row(
    lowering: ProductLowering, masked: MaskedSteps, total: RegisterFragment, points: Mapping[int, DataTensor],
    at: Mapping[str, ir.Expr],
) -> ir.Stmt:  # fmt: skip
    """Recompute a thread's sums of one row if one of them is NaN and may be spoiled."""
    first, chain = min(points), lowering.chained
    sums = {v: read_value(total, v) for v in points}
    spoiled = reduce(build.logical_or, [build.ne(x, x) for x in sums.values()])
    known: dict[str, ir.Expr] = {}
    if chain is not None and chain.softmax is not None:
        held = matching_values(chain.rows["total"], total)[first]
        weights = read_value(chain.rows["total"], held)
        spoiled = build.logical_and(build.eq(weights, weights), spoiled)
        largest = read_value(chain.rows["largest"], held)
        known[LARGEST] = build.select(build.gt(largest, build.const(-inf, FLOAT32)), largest, build.const(0, FLOAT32))
    clear = [build.store(total.buffer, (total.registers[v],), build.const(0, FLOAT32)) for v in points]
    terms, columns = lowering.order.pairs[0].terms, {i.name for i in lowering.order.columns}
    of_rows = [g for g in masked.domain if not columns & {name for name, _ in g.terms}]
    inside = condition_of(of_rows)
    add = _add_terms(lowering, masked, total, points, at, known)
    if inside is not None:
        add = build.when(lower_expr(inside, _scope(lowering, points[first], at)), add)
    again = build.block(*clear, _loop_over(terms, add))
    rows_exist = _row_predicate(lowering, points[first])
    return build.when(spoiled if rows_exist is None else build.logical_and(rows_exist, spoiled), again)


def _add_terms(
    lowering: ProductLowering, masked: MaskedSteps, total: RegisterFragment, points: Mapping[int, DataTensor],
    at: Mapping[str, ir.Expr], known: Mapping[str, ir.Expr],
) -> ir.Stmt:  # fmt: skip
    """Add one term to the sums of a row: the products with one left factor, except in masked columns."""
    (pair,), chain = lowering.region.pairs, lowering.chained
    score, weight = (build.register(name, FLOAT32) for name in (SCORE, WEIGHT))
    scope = _scope(lowering, points[min(points)], at)
    statements: list[ir.Stmt] = []
    if chain is not None:
        statements += [*_score_statements(chain, score, scope), *_weight_statements(chain, score, scope, known)]
        scope = _with_numbers(scope, {ACCUMULATOR: build.load(score)})
    left = build.cast(lower_expr(pair.left.value, scope), FLOAT32)
    columns = {i.name for i in lowering.order.columns}
    inside = condition_of([g for g in masked.domain if columns & {name for name, _ in g.terms}])
    statements.append(build.store(weight, (), left))
    for v, point in points.items():
        here = _scope(lowering, point, at)
        right = build.cast(lower_expr(pair.right.value, here), FLOAT32)
        added = build.add(read_value(total, v), build.mul(build.load(weight), right))
        store: ir.Stmt = build.store(total.buffer, (total.registers[v],), added)
        if inside is not None:
            store = build.when(lower_expr(inside, here), store)
        statements.append(store if point.predicate is None else build.when(point.predicate, store))
    return build.allocate([score, weight] if chain is not None else [weight], build.block(*statements))


def _score_statements(chain: ChainedLeft, score: ir.Buffer, scope: LoweringScope) -> Iterator[ir.Stmt]:
    """Statements that compute a score: the sum of the first product, with its epilogue."""
    c, (pair,) = chain.product.contraction, chain.product.pairs
    yield build.store(score, (), build.const(0, FLOAT32))
    inner = _with_numbers(scope, {i.name: _loop_value(i) for i in pair.terms})
    a, b = (build.cast(lower_expr(f.value, inner), FLOAT32) for f in (pair.left, pair.right))
    yield _loop_over(pair.terms, build.store(score, (), build.add(build.load(score), build.mul(a, b))))
    value = chain.lowering.finish_sum(build.load(score), c.initial, c.epilogue, scope.indices, scope)
    yield build.store(score, (), build.cast(build.cast(value, c.output.dtype), FLOAT32))


def _weight_statements(
    chain: ChainedLeft, score: ir.Buffer, scope: LoweringScope, known: Mapping[str, ir.Expr]
) -> Iterator[ir.Stmt]:
    """Statements that replace a score by its weight, if there is a softmax."""
    if chain.softmax is not None:
        for e in (chain.softmax.largest, chain.softmax.weight):
            numbers = {**known, ACCUMULATOR: build.load(score)}
            yield build.store(score, (), lower_expr(e, _with_numbers(scope, numbers)))


def _scope(lowering: ProductLowering, point: DataTensor, at: Mapping[str, ir.Expr]) -> LoweringScope:
    """The values of all indices at a point of the output, in the loops over terms."""
    terms = lowering.order.pairs[0].terms
    found = lowering.point_scope((lowering.order.rows, lowering.order.columns), point, at)
    return _with_numbers(found, {i.name: _loop_value(i) for i in terms})


def _with_numbers(scope: LoweringScope, numbers: Mapping[str, ir.Expr]) -> LoweringScope:
    return replace(scope, indices={**scope.indices, **numbers})


def _loop_over(indices: Sequence[BoundIndex], body: ir.Stmt) -> ir.Stmt:
    return build.loops([(_loop_name(i), i.extent) for i in indices], body)


def _loop_value(i: BoundIndex) -> ir.Expr:
    """The value of an index in the loop over it."""
    return build.add(build.var(_loop_name(i)), i.lower)


def _loop_name(i: BoundIndex) -> str:
    return internal_name(i.name, "again")


def _row_predicate(lowering: ProductLowering, point: DataTensor) -> ir.Expr | None:
    """The condition that the row of a point exists; None if it always does."""
    indices = [i for g in (lowering.order.rows, lowering.order.columns) for i in g]
    rows = len(lowering.order.rows)
    found: ir.Expr | None = None
    for i, x in list(zip(indices, point.coordinates, strict=True))[:rows]:
        if i.extent % lowering.tiles.boxes[i.name]:
            found = build.and_masks(found, build.lt(x, i.extent))
    return found
