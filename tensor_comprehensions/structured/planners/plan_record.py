"""Records of contraction plans: their costs, their rivals, and the costs and savings of copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from ...core.decisions import Decision, Rival, note_decision
from ...core.naming import SEPARATOR
from ...target import CpuTarget
from ..analysis.contraction_info import ContractionInfo, analyze_contraction
from ..cost.plan_cost import Costs, plan_costs
from ..op import StructuredOp, factor_tensor
from ..plan import PackStep, Plan, Side

RIVALS = 5
"""Rival plans that are kept, the best ones."""


def record_plan(
    op: StructuredOp, chosen: Plan, compared: Sequence[Plan], priced: Sequence[Plan], target: CpuTarget
) -> None:
    """Record `chosen` for a normalized op, after a comparison with `compared`.

    priced: further plans, outside of the comparison: the cost of other copies.
    """
    costs = plan_costs(op, chosen, target)
    ranked = sorted(dict.fromkeys((*compared, *priced)), key=lambda p: plan_costs(op, p, target).total)
    rivals = [p for p in ranked if p != chosen]
    others = tuple(_rival(op, p, costs, target, was_compared=p in compared) for p in rivals[:RIVALS])
    count = len({*compared, chosen})
    why = f"the best of {count} plans by the cost model" if count > 1 else "the cost model's tile and order, unrivaled"
    text = describe_plan(op, chosen)
    note_decision(Decision("plan", (op.name,), text, why, _cost_numbers(costs), others))
    for side in Side:
        _record_copy(op, chosen, side, rivals, target)
    if chosen.nontemporal:
        why = "the output is larger than the caches keep until it is read"
        note_decision(Decision("memory", (op.name,), "the output is written past the caches", why))


def _cost_numbers(costs: Costs) -> tuple[tuple[str, float], ...]:
    """The total in cycles, and each of its parts."""
    parts = ((f.name, float(getattr(costs, f.name))) for f in fields(costs) if f.name not in ("exposed", "streams"))
    return ("total", costs.total), *parts


def _rival(op: StructuredOp, plan: Plan, chosen: Costs, target: CpuTarget, *, was_compared: bool) -> Rival:
    costs = plan_costs(op, plan, target)
    names = [name for name, _ in _cost_numbers(costs)[1:]]
    parts = {name: getattr(costs, name) - getattr(chosen, name) for name in names}
    worst = max(parts, key=lambda name: parts[name])
    more = f"{worst.replace('_', ' ')}: {parts[worst]:,.0f} cycles more" if parts[worst] > 0 else "not clearly better"
    return Rival(describe_plan(op, plan), costs.total, more if was_compared else f"{more}; not looked at")


def describe_plan(op: StructuredOp, plan: Plan) -> str:
    """A plan in words: register tile, blocks around it, copies, and parallel loops; without names of loops."""
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
    """An iterator as the def calls it."""
    return iterator.removeprefix(f"{op.name}{SEPARATOR}")


def _record_copy(op: StructuredOp, chosen: Plan, side: Side, rivals: Sequence[Plan], target: CpuTarget) -> None:
    """Why a factor is copied into panels, or read where it is: the best plan that does otherwise is the rival."""
    packed = _find_pack(chosen, side)
    costs = plan_costs(op, chosen, target)
    otherwise = [p for p in rivals if (_find_pack(p, side) is None) != (packed is None)]
    others = tuple(Rival(describe_plan(op, p), plan_costs(op, p, target).total) for p in otherwise[:1])
    tensor = factor_tensor(op.factors[side.value])
    known = analyze_contraction(op, chosen.vector)
    numbers = (("total", costs.total), ("packing", _copy_cycles(op, chosen, side, target)))
    what = f"{tensor} is packed into panels" if packed is not None else f"{tensor} is read where it is"
    note_decision(Decision("pack", (op.name,), what, _copy_reason(known, side, others, costs), numbers, others))


def _find_pack(plan: Plan, side: Side) -> PackStep | None:
    return next((step for step in plan.packs if step.side is side), None)


def _copy_cycles(op: StructuredOp, plan: Plan, side: Side, target: CpuTarget) -> float:
    """Cycles to fill the panels of one factor."""
    packs = tuple(step for step in plan.packs if step.side is not side)
    return plan_costs(op, plan, target).packing - plan_costs(op, replace(plan, packs=packs), target).packing


def _copy_reason(known: ContractionInfo, side: Side, others: Sequence[Rival], costs: Costs) -> str:
    factor = known.factors[side.value]
    step = factor.step(known.vector) if known.vector in factor.iterators else None
    reads = f"its elements along the lanes are {step} apart" if step not in (None, 1) else "its rows are contiguous"
    if not others or not others[0].number:
        return f"{reads}; no plan does otherwise"
    return f"{reads}; the best plan that does otherwise takes {others[0].number / costs.total:.2f} times as long"
