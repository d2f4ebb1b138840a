"""A schedule for one op: resolve its choices, and make a plan of it."""

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
    """The schedule for `op`, without choices: the best applicable alternative by the cost model.

    Raises ArgumentError for unknown names, CannotLower with all reasons if none applies.
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
            if not op.is_product:  # the first that applies: its cost is a matter of memory, which is measured
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
    """The result of a schedule heuristic, of the package or of the user, for `op`."""
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
    """The effect of every primitive on `op`, a line each. Raises as `check_schedule`."""
    return explain_schedule(pipeline, op, target) if op.is_product else explain_memory_bound(pipeline, op, target)


def make_contraction_plan(
    schedule: ScheduleArgument | None, op: StructuredOp, target: CpuTarget, *, parallel: bool
) -> Plan:
    """The plan for `drop_unit_dims(op)`: that of the schedule, else of the cost model."""
    if schedule is None:
        return select_plan(drop_unit_dims(op), target, parallel=parallel)
    return plan_of_schedule(resolve_schedule(schedule, op, target), op, target, parallel=parallel)
