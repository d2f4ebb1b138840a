"""What is written down of a contraction's plan: its costs, its rivals, and what its copies cost and save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from ...core.decisions import Decision, Rival, note_decision
from ...core.errors import CannotLower, TCError
from ...target import CpuTarget
from ..analysis.contraction_info import ContractionInfo, analyze_contraction
from ..cost.plan_cost import Costs, plan_costs
from ..language.plan_to_schedule import plan_to_schedule
from ..op import StructuredOp, factor_tensor
from ..plan import PackStep, Plan, Side

RIVALS = 5
"""Rival plans that are kept, the best ones."""


def record_plan(op: StructuredOp, chosen: Plan, compared: Sequence[Plan], target: CpuTarget) -> None:
    """Write down `chosen` for a normalized op, after a comparison with `compared`."""
    costs = plan_costs(op, chosen, target)
    rivals = sorted((p for p in dict.fromkeys(compared) if p != chosen), key=lambda p: plan_costs(op, p, target).total)
    others = tuple(_rival(op, p, costs, target) for p in rivals[:RIVALS])
    why = f"the least of {len(rivals) + 1} plans by the cost model" if rivals else "the only plan that was considered"
    text = str(plan_to_schedule(chosen, op))
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


def _rival(op: StructuredOp, plan: Plan, chosen: Costs, target: CpuTarget) -> Rival:
    costs = plan_costs(op, plan, target)
    parts = {f.name: getattr(costs, f.name) - getattr(chosen, f.name) for f in fields(costs) if f.name != "streams"}
    worst = max(parts, key=lambda name: parts[name])
    more = f"{worst.replace('_', ' ')}: {parts[worst]:,.0f} cycles more" if parts[worst] > 0 else "not clearly better"
    return Rival(_describe(op, plan), costs.total, more)


def _describe(op: StructuredOp, plan: Plan) -> str:
    try:
        return str(plan_to_schedule(plan, op))
    except (CannotLower, TCError):  # a plan that the language of schedules has no words for
        return repr(plan)


def _record_copy(op: StructuredOp, chosen: Plan, side: Side, rivals: Sequence[Plan], target: CpuTarget) -> None:
    """Why a factor is copied into panels, or read where it is: the best plan that does otherwise is the rival."""
    packed = _packed(chosen, side)
    costs = plan_costs(op, chosen, target)
    otherwise = [p for p in rivals if (_packed(p, side) is None) != (packed is None)]
    others = tuple(Rival(_describe(op, p), plan_costs(op, p, target).total) for p in otherwise[:1])
    tensor = factor_tensor(op.factors[side.value])
    known = analyze_contraction(op, chosen.vector)
    numbers = (("total", costs.total), ("packing", _copy_cycles(op, chosen, side, target)))
    what = f"{tensor} is packed into panels" if packed is not None else f"{tensor} is read where it is"
    note_decision(Decision("pack", (op.name,), what, _copy_reason(known, side, others, costs), numbers, others))


def _packed(plan: Plan, side: Side) -> PackStep | None:
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
        return f"{reads}; no plan that was compared does otherwise"
    return f"{reads}; the best plan that does otherwise takes {others[0].number / costs.total:.2f} times as long"
