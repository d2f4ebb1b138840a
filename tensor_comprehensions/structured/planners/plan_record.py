"""Records of the decision for a contraction plan: its cost, its rivals, and the costs and savings of packing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from ...core.decisions import Decision, Rival, note_decision
from ...core.internal_names import SEPARATOR
from ...target import CpuTarget
from ..analysis.contraction_info import ContractionInfo, analyze_contraction
from ..cost.plan_cost import Costs, expected_costs, plan_costs
from ..op import StructuredOp, factor_tensor
from ..plan import PackStep, Plan, Side

MAX_RIVALS = 5
"""Most rival plans that a record keeps, the cheapest ones."""


def record_plan(
    op: StructuredOp, chosen: Plan, compared: Sequence[Plan], priced: Sequence[Plan], target: CpuTarget
) -> None:
    """Record `chosen` for a normalized op, after a comparison with `compared`.

    priced: further plans, not compared, that show the cost of other packings.
    """
    bare = {side: replace(chosen, packs=tuple(step for step in chosen.packs if step.side is not side)) for side in Side}
    known = dict.fromkeys((*compared, *priced))
    prices = _price_plans(op, dict.fromkeys((chosen, *known, *bare.values())), target)
    rivals = sorted((p for p in known if p != chosen), key=lambda p: prices[p].total)
    others = tuple(_make_rival(op, p, prices, chosen, was_compared=p in compared) for p in rivals[:MAX_RIVALS])
    count = len({*compared, chosen})
    why = f"the best of {count} plans by the cost model" if count > 1 else "the cost model's tile and order, unrivaled"
    text = describe_plan(op, chosen)
    note_decision(Decision("plan", (op.name,), text, why, _cost_numbers(prices[chosen]), others))
    for side in Side:
        copying = prices[chosen].packing - prices[bare[side]].packing
        _record_copy(op, chosen, side, [(p, prices[p]) for p in rivals], prices[chosen], copying)
    if chosen.nontemporal:
        why = "the output is larger than the caches keep until it is read"
        note_decision(Decision("memory", (op.name,), "the output is written past the caches", why))


def _price_plans(op: StructuredOp, plans: Iterable[Plan], target: CpuTarget) -> dict[Plan, Costs]:
    """The costs of plans; plans with the same lanes' iterator are evaluated together."""
    prices: dict[Plan, Costs] = {}
    same: dict[str, list[Plan]] = {}
    for plan in plans:
        if plan.output_panel_depth is None:
            same.setdefault(plan.vector, []).append(plan)
        else:
            prices[plan] = plan_costs(op, plan, target)
    for vector, group in same.items():
        prices |= zip(group, expected_costs(analyze_contraction(op, vector), group, target), strict=True)
    return prices


def _cost_numbers(costs: Costs) -> tuple[tuple[str, float], ...]:
    """The total in cycles, and each of its parts."""
    parts = ((f.name, float(getattr(costs, f.name))) for f in fields(costs) if f.name not in ("exposed", "streams"))
    return ("total", costs.total), *parts


def _make_rival(
    op: StructuredOp, plan: Plan, prices: Mapping[Plan, Costs], chosen: Plan, *, was_compared: bool
) -> Rival:
    own, costs = prices[chosen], prices[plan]
    more = {name: getattr(costs, name) - getattr(own, name) for name, _ in _cost_numbers(costs)[1:]}
    worst = max(more, key=lambda name: more[name])
    why = f"{worst.replace('_', ' ')}: {more[worst]:,.0f} cycles more" if more[worst] > 0 else "not clearly better"
    return Rival(describe_plan(op, plan), costs.total, why if was_compared else f"{why}; not looked at")


def describe_plan(op: StructuredOp, plan: Plan) -> str:
    """A plan in words: register tile, blocks, packing and parallel loops."""
    last = {level.iterator: d for d, level in enumerate(plan.levels)}
    tile = [f"{_own_name(op, n)} {plan.levels[d].size}" for n, d in last.items() if plan.levels[d].size > 1]
    blocks = [f"{_own_name(op, x.iterator)} {x.size}" for d, x in enumerate(plan.levels) if last[x.iterator] != d]
    packed = [factor_tensor(op.factors[step.side.value]) for step in plan.packs]
    shared = [_own_name(op, level.iterator) for level in plan.levels[: plan.parallel_depth]]
    parts = [
        f"tile {' x '.join(tile)}" if tile else "scalars",
        f"{plan.lanes} lanes along {_own_name(op, plan.vector)}",
        f"blocks {', '.join(blocks)}" if blocks else "",
        f"{', '.join(packed)} packed" if packed else "nothing packed",
        "results in a panel, then turned" if plan.output_panel_depth is not None else "",
        f"threads share {', '.join(shared)}" if shared else "",
        "past the caches" if plan.nontemporal else "",
        f"by {plan.instruction}" if plan.instruction else "",
    ]
    return "; ".join(filter(None, parts))


def _own_name(op: StructuredOp, iterator: str) -> str:
    """The name that an iterator has in the def."""
    return iterator.removeprefix(f"{op.name}{SEPARATOR}")


def _record_copy(
    op: StructuredOp,
    chosen: Plan,
    side: Side,
    rivals: Sequence[tuple[Plan, Costs]],
    costs: Costs,
    copying: float,
) -> None:
    """Record why a factor is packed or read in place; the rival is the best plan that decides otherwise.

    copying: cycles to fill the panels of the factor.
    """
    packed = _find_pack(chosen, side)
    otherwise = [(p, c) for p, c in rivals if (_find_pack(p, side) is None) != (packed is None)]
    others = tuple(Rival(describe_plan(op, p), c.total) for p, c in otherwise[:1])
    tensor = factor_tensor(op.factors[side.value])
    known = analyze_contraction(op, chosen.vector)
    numbers = (("total", costs.total), ("packing", copying))
    what = f"{tensor} is packed into panels" if packed is not None else f"{tensor} is read where it is"
    note_decision(Decision("pack", (op.name,), what, _copy_reason(known, side, others, costs), numbers, others))


def _find_pack(plan: Plan, side: Side) -> PackStep | None:
    return next((step for step in plan.packs if step.side is side), None)


def _copy_reason(known: ContractionInfo, side: Side, others: Sequence[Rival], costs: Costs) -> str:
    factor = known.factors[side.value]
    step = factor.step(known.vector) if known.vector in factor.iterators else None
    reads = f"its elements along the lanes are {step} apart" if step not in (None, 1) else "its rows are contiguous"
    if not others or not others[0].number:
        return f"{reads}; no plan does otherwise"
    return f"{reads}; the best plan that does otherwise takes {others[0].number / costs.total:.2f} times as long"
