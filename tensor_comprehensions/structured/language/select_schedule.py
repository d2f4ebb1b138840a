"""Resolve the choices of a schedule for one op, and make the plan."""

from __future__ import annotations

from ...core.errors import ArgumentError, CannotLower, InternalError, TCError
from ...target import CpuTarget
from ..cost.plan_cost import plan_cycles
from ..match.drop_unit_dims import drop_unit_dims
from ..memory_bound.nest_plan import explain_memory_bound, memory_bound_plan
from ..op import StructuredOp
from ..plan import Plan
from ..planners.select import select_plan
from .apply_primitives import explain_schedule, plan_of_schedule
from .primitives import Schedule
from .schedule_types import Expert, ScheduleArgument


def resolve_schedule(schedule: ScheduleArgument, op: StructuredOp, target: CpuTarget) -> Schedule:
    """The schedule for `op`, without choices: of the alternatives that apply, the best by the cost model.

    For memory-bound ops, which the cost model does not cover, it is the first that applies.

    Raises:
        ArgumentError: the schedule has an unknown name, or a heuristic fails or returns no schedule.
        CannotLower: no alternative applies; the message has all reasons.
    """
    pipeline = schedule if isinstance(schedule, Schedule) else _call_expert(schedule, op, target)
    alternatives = list(pipeline.alternatives())
    if len(alternatives) == 1:
        check_schedule(alternatives[0], op, target)
        return alternatives[0]
    best: tuple[float, Schedule] | None = None
    reasons: list[str] = []
    for alternative in alternatives:
        try:
            check_schedule(alternative, op, target)
            if not op.is_product:
                return alternative
            plan = plan_of_schedule(alternative, op, target)
        except CannotLower as refusal:
            reasons.append(str(refusal))
            continue
        cost = plan_cycles(drop_unit_dims(op), plan, target)
        if best is None or cost < best[0]:
            best = cost, alternative
    if best is None:
        raise CannotLower("; ".join(dict.fromkeys(reasons)))
    return best[1]


def _call_expert(expert: Expert, op: StructuredOp, target: CpuTarget) -> Schedule:
    """The result of a schedule heuristic for `op`. Raises ArgumentError if a user's heuristic fails."""
    try:
        pipeline = expert(op, target)
    except (TCError, InternalError, CannotLower):
        raise
    except Exception as error:
        package, own = (name.partition(".")[0] for name in (str(getattr(expert, "__module__", "")), __name__))
        if package == own:
            raise
        raise ArgumentError(
            f"the schedule heuristic raises {type(error).__name__}: {error}",
            expected="a function (op, target) that returns a schedule",
        ) from error
    if not isinstance(pipeline, Schedule):
        raise ArgumentError(f"the schedule heuristic returns {pipeline!r}", expected="a schedule")
    return pipeline


def check_schedule(pipeline: Schedule, op: StructuredOp, target: CpuTarget) -> None:
    """Check that a schedule without choices applies to `op`. Raises ArgumentError, CannotLower."""
    if op.is_product:
        plan_of_schedule(pipeline, op, target)
    else:
        memory_bound_plan(pipeline, op, target)


def explain_resolved(pipeline: Schedule, op: StructuredOp, target: CpuTarget) -> str:
    """Lines on the effect of every primitive on `op`. Raises as `check_schedule`."""
    return explain_schedule(pipeline, op, target) if op.is_product else explain_memory_bound(pipeline, op, target)


def make_contraction_plan(
    schedule: ScheduleArgument | None, op: StructuredOp, target: CpuTarget, *, parallel: bool
) -> Plan:
    """The plan for `drop_unit_dims(op)` of the schedule; None chooses by the cost model."""
    if schedule is None:
        return select_plan(drop_unit_dims(op), target, parallel=parallel)
    return plan_of_schedule(resolve_schedule(schedule, op, target), op, target, parallel=parallel)
