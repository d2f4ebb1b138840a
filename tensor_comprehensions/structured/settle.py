"""What a strategy means for an op: the pipeline without a choice left, and the plan that it comes to."""

from __future__ import annotations

from ..errors import ArgumentError, CannotLower, InternalError, TCError
from ..target import Target
from .apply import explain, plan_of
from .estimate import estimate
from .expert import choose
from .movement import explain_movement, movement_of
from .normalise import normalise
from .op import StructuredOp
from .pipeline import Pipeline
from .plan import Plan
from .strategy import Expert, Strategy


def settled(strategy: Strategy, op: StructuredOp, target: Target) -> Pipeline:
    """The pipeline, without a choice left, that a strategy means for `op`: the best by the cost model that applies.

    Raises ArgumentError for unknown names, CannotLower with all reasons where none applies.
    """
    pipeline = strategy if isinstance(strategy, Pipeline) else _returned(strategy, op, target)
    alternatives = list(pipeline.alternatives())
    if len(alternatives) == 1:
        check(alternatives[0], op, target)
        return alternatives[0]
    best: tuple[float, Pipeline] | None = None
    reasons: list[str] = []
    for alternative in alternatives:
        try:
            check(alternative, op, target)
            if not op.is_product:  # the first that applies: its cost is a matter of memory, which is measured
                return alternative
            plan = plan_of(alternative, op, target)
        except CannotLower as refusal:
            reasons.append(str(refusal))
            continue
        cost = estimate(normalise(op), plan, target)
        if best is None or cost < best[0]:
            best = cost, alternative
    if best is None:
        raise CannotLower("; ".join(dict.fromkeys(reasons)))
    return best[1]


def _returned(expert: Expert, op: StructuredOp, target: Target) -> Pipeline:
    """What a function, which is the user's unless the package has it, gives for `op`."""
    try:
        pipeline = expert(op, target)
    except (TCError, InternalError, CannotLower):
        raise
    except Exception as error:
        package, own = (name.partition(".")[0] for name in (str(getattr(expert, "__module__", "")), __name__))
        if package == own:
            raise
        raise ArgumentError(
            f"the expert raises {type(error).__name__}: {error}",
            expected="a function (op, target) that gives a pipeline",
        ) from error
    if not isinstance(pipeline, Pipeline):
        raise ArgumentError(f"the expert returns {pipeline!r}", expected="a pipeline")
    return pipeline


def check(pipeline: Pipeline, op: StructuredOp, target: Target) -> None:
    """Can `op` be lowered as `pipeline`, which leaves nothing to choose, says? Raises ArgumentError, CannotLower."""
    if op.is_product:
        plan_of(pipeline, op, target)
    else:
        movement_of(pipeline, op, target)


def told(pipeline: Pipeline, op: StructuredOp, target: Target) -> str:
    """What every piece does to `op`, a line each. Raises as `check`."""
    return explain(pipeline, op, target) if op.is_product else explain_movement(pipeline, op, target)


def plan_for(strategy: Strategy | None, op: StructuredOp, target: Target, *, parallel: bool) -> Plan:
    """The plan for `normalise(op)`: what the strategy says, else what the cost model prefers."""
    if strategy is None:
        return choose(normalise(op), target, parallel=parallel)
    return plan_of(settled(strategy, op, target), op, target, parallel=parallel)
