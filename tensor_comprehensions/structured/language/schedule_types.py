"""Types of the option `schedule`: schedules, heuristics that return them, and mappings from tensors to these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

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
"""One for all contractions, or one per name of a tensor that a contraction defines; None: the cost model's choice."""


def freeze_schedule(schedule: object) -> ScheduleArguments:
    """A user's schedule as a value that can be a key. Raises ArgumentError."""
    if isinstance(schedule, Mapping):
        return tuple((str(name), _check_schedule(s)) for name, s in schedule.items())
    if isinstance(schedule, tuple):
        return tuple((str(name), _check_schedule(s)) for name, s in schedule)
    return None if schedule is None else _check_schedule(schedule)


def _check_schedule(schedule: object) -> ScheduleArgument:
    if isinstance(schedule, primitives.Schedule) or (callable(schedule) and not isinstance(schedule, type)):
        return schedule
    raise ArgumentError(
        f"the schedule is {schedule!r}",
        expected='a schedule, such as tile(m=8, n=32) >> pack(B="n1"), or a function (op, target) that returns one',
    )


def schedule_for(schedules: ScheduleArguments, *names: str) -> ScheduleArgument | None:
    """The schedule for the contraction that has these names."""
    if isinstance(schedules, tuple):
        return next((s for name, s in schedules if name in names), None)
    return schedules
