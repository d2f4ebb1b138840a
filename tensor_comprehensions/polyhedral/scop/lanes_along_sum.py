"""Vectorize products along the sum if both factors are contiguous along it: `c(i,j) +=! x(i,k) * y(j,k)`.

Vectors along the results need one factor transposed, which costs more than the multiply-adds if the other side is
short. `lane_sums(i,j,l) +=! x(i,kk*L+l) * y(j,kk*L+l)` reads both factors in place; then the lanes are added up.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...core.internal_names import internal_name
from ...core.memory_layout import contiguous_strides
from ...machine import LANE_SUM_CYCLES
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Role, Tensor, map_operands
from ...thresholds import MIN_FILLED_LANES, MIN_LANE_SUM_TERMS


def lanes_along_sum(s: BoundStatement, widest: int) -> int:
    """How many lanes to use along the sum of a product: a divisor of its extent that fills vectors well; 0 if none."""
    run = _summed_run(s)
    counts = range(MIN_LANE_SUM_TERMS, widest + 1) if run is not None else ()
    found = [n for n in counts if run is not None and run.extent % n == 0]
    best = max(found, key=lambda n: (_filled_share(n), n), default=0)
    return best if best and _filled_share(best) >= MIN_FILLED_LANES else 0


def _filled_share(count: int) -> float:
    """The part of a vector of the next power of two that `count` lanes fill."""
    return count / (1 << (count - 1).bit_length())


def _summed_run(s: BoundStatement) -> BoundIndex | None:
    """The summed index along which both factors of a product are contiguous, or None."""
    assert isinstance(s.value, tc.Binary)
    last = {f.subscripts[-1] for f in (s.value.left, s.value.right) if isinstance(f, tc.Access)}
    return next((i for i in s.reduction_indices if last == {tc.Index(i.name, tc.INDEX_TYPE)}), None)


def with_lanes_along_sum(function: BoundFunction, s: BoundStatement, lanes: int) -> tuple[BoundFunction, BoundFunction]:
    """`function` with its product `s` summed in `lanes` lanes that are added up afterwards, and the product alone."""
    run = _summed_run(s)
    assert run is not None
    step, lane = (
        BoundIndex(internal_name(run.name, "s"), 0, run.extent // lanes),
        BoundIndex(internal_name(run.name, "l"), 0, lanes),
    )

    def cut(e: tc.Expr) -> tc.Expr:
        if e != tc.Index(run.name, tc.INDEX_TYPE):
            return map_operands(e, cut)
        first = tc.Binary("*", _make_index_expr(step), tc.Const(lanes, tc.INDEX_TYPE), tc.INDEX_TYPE)
        return (
            tc.Binary("+", first, _make_index_expr(lane), tc.INDEX_TYPE) if step.extent > 1 else _make_index_expr(lane)
        )

    shape = (*function.tensor(s.target).shape, lanes)
    sums = Tensor(internal_name(s.target, "lanes"), s.value.dtype, shape, contiguous_strides(shape), Role.TEMPORARY)
    subscripts = (*s.subscripts, _make_index_expr(lane))
    rest = tuple(i for i in s.reduction_indices if i is not run)
    steps = (*rest, *((step,) if step.extent > 1 else ()))
    multiply = replace(
        s,
        target=sums.name,
        subscripts=subscripts,
        value=map_operands(s.value, cut),
        indices=(*s.free, lane, *steps),
        num_free=s.num_free + 1,
    )
    combine = replace(
        s,
        name=internal_name(s.name, "combined"),
        value=tc.Access(sums.name, subscripts, sums.dtype),
        indices=(*s.free, lane),
    )
    statements = [(multiply, combine) if other is s else (other,) for other in function.statements]
    alone = replace(function, tensors=(*function.tensors, sums), statements=(multiply,))
    return replace(alone, statements=tuple(x for group in statements for x in group)), alone


def combining_cycles(s: BoundStatement) -> float:
    """Cycles to add up the lanes of all results."""
    return LANE_SUM_CYCLES * prod(i.extent for i in s.free)


def _make_index_expr(i: BoundIndex) -> tc.Expr:
    return tc.Index(i.name, tc.INDEX_TYPE)
