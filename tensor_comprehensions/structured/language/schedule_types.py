"""Types of the option `schedule`: schedules, heuristics that return them, and mappings from tensors to these."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

from ...core.checked_fields import describe_value
from ...core.errors import ArgumentError
from ...core.lazy_import import lazy_module

if TYPE_CHECKING:
    from ...target import CpuTarget
    from ..op import StructuredOp
    from . import primitives
    from .primitives import Schedule
else:
    primitives = lazy_module("structured.language.primitives")

Expert: TypeAlias = "Callable[[StructuredOp, CpuTarget], Schedule]"
"""A function of an op and a target that returns a schedule."""
ScheduleArgument: TypeAlias = "Schedule | Expert"
ScheduleArguments: TypeAlias = "ScheduleArgument | tuple[tuple[str, ScheduleArgument], ...] | None"
"""A schedule for all contractions, or (tensor that a contraction defines, its schedule) pairs; None: the default."""


def freeze_schedule(schedule: object) -> ScheduleArguments:
    """A user's schedule (mappings become tuples) as a hashable value. Raises ArgumentError."""
    pairs = tuple(schedule.items()) if isinstance(schedule, Mapping) else schedule
    if isinstance(pairs, tuple):
        return tuple(map(_check_pair, pairs))
    return None if schedule is None else _check_schedule(schedule)


def _check_pair(pair: object) -> tuple[str, ScheduleArgument]:
    match pair:
        case (str(name), schedule):
            return name, _check_schedule(schedule)
    raise ArgumentError(
        f"schedules of several contractions hold {describe_value(pair)}",
        expected="the tensor that a contraction defines and its schedule, such as {'C': tile(m=8, n=32)}",
    )


def _check_schedule(schedule: object) -> ScheduleArgument:
    is_expert = callable(schedule) and isinstance(schedule, Hashable) and not isinstance(schedule, type)
    if isinstance(schedule, primitives.Schedule) or is_expert:
        return cast("ScheduleArgument", schedule)
    raise ArgumentError(
        f"the schedule is {describe_value(schedule)}",
        expected='a schedule, such as tile(m=8, n=32) >> pack(B="n1"), or a function (op, target) that returns one',
    )


def schedule_for(schedules: ScheduleArguments, *names: str) -> ScheduleArgument | None:
    """The schedule for a contraction with any of these names; None if there is none."""
    if isinstance(schedules, tuple):
        return next((s for name, s in schedules if name in names), None)
    return schedules
