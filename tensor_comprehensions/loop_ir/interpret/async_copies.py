"""Asynchronous copies in the interpreter: their destination is undefined until their group is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InternalError
from ..intrinsics import COMMIT_ASYNC, COPY_ASYNC, COPY_ASYNC_ZERO, WAIT_ASYNC
from ..nodes import Invoke
from .memory import CheckedMemory
from .ops import Value, round_to

if TYPE_CHECKING:
    from .interpreter import Interpreter

Run = Callable[[], None]


@dataclass(slots=True)
class Copy:
    """A copy that has not landed."""

    target: CheckedMemory
    place: tuple[Any, ...]
    value: Value


@dataclass(slots=True)
class Group:
    """A group of copies of one thread, for which it waits together."""

    copies: list[Copy] = field(default_factory=list)

    def land(self) -> None:
        for copy in self.copies:
            copy.target.data[copy.place] = copy.value
            copy.target.written[copy.place] = True


def copy_async(machine: Interpreter, s: Invoke) -> Run:
    """A function that executes an asynchronous-copy intrinsic in the current thread."""
    if s.name == COMMIT_ASYNC:
        return lambda: machine.thread.groups.append(Group())
    if s.name == WAIT_ASYNC:
        return lambda: _wait_for_groups(machine.thread.groups, s.attributes[0])
    if s.name not in (COPY_ASYNC, COPY_ASYNC_ZERO):
        raise InternalError(f"no meaning is known for the intrinsic {s.name}")
    (target, to), (source, where) = s.operands
    written, read = [machine.expr(i) for i in to], [machine.expr(i) for i in where]
    count = s.attributes[0] // target.type.dtype.size
    given = machine.expr(s.values[0]) if s.values else lambda: True
    zero = round_to(0, target.type.dtype)

    def run() -> None:
        left, right = machine.memory[target.name], machine.memory[source.name]
        copies = bool(given())
        value = right.read(_list_row_element_indices(read, count), None, machine.races) if copies else zero
        to = _list_row_element_indices(written, count)
        left.write(to, value, None, machine.races)
        place = (0, *to)
        left.written[place] = False
        machine.thread.groups[-1].copies.append(Copy(left, place, value))

    return run


def _list_row_element_indices(indices: list[Callable[[], Value]], count: int) -> tuple[Value, ...]:
    """The indices of `count` elements of a row, from the one at `indices` on."""
    first = [i() for i in indices]
    return (*first[:-1], first[-1] + np.arange(count)) if count > 1 else tuple(first)


def _wait_for_groups(groups: list[Group], left: int) -> None:
    """Land all closed groups except the last `left`."""
    while len(groups) > left + 1:
        groups.pop(0).land()
