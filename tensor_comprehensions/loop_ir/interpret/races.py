"""Who touched which element in a launch: threads that barriers order, of the block, of parts of it or of warps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.errors import InternalError
from ..atoms import WARP
from .memory import ACTIONS, CONFLICTS, CheckedMemory, Place, Race

Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class ThreadRace(Race):
    """The accesses to each element since the last barrier of the block.

    The iteration counts, before the thread, the times that its warp has met others, or its own lanes. After the threads
    of a turn come its warps: several threads of each.
    warps: their number. apart: whether elements record each warp, else one, or "several".
    known: for each other warp, the number of its turns that the warp of the current thread knows.
    """

    threads: int = 1
    apart: bool = False
    thread: int = 0
    known: Array = field(default_factory=lambda: np.zeros(1, np.int64))

    fences: dict[int, list[int]] = field(default_factory=dict)

    turn_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.turn_size = self.threads + self.warps

    @property
    def warps(self) -> int:
        return -(-self.threads // WARP)

    def enter(self, thread: int, turn: int, known: Array) -> None:
        """Switch to `thread`, whose warp has met `turn` times."""
        self.thread, self.known = thread, known
        self.iteration = turn * self.turn_size + thread
        self.label = self.first + 1 + self.iteration

    def pass_barrier(self, turns: int) -> None:
        """All threads have met, after that many turns of the warps."""
        self.first += 1 + (1 + turns) * self.turn_size

    def races_with(self, who: Any) -> Any:
        if not isinstance(who, np.ndarray):  # most accesses: asked first, without the cost of arrays
            if who <= self.first:
                return who == self.first
            before, thread = divmod(int(who) - self.first - 1, self.turn_size)
            warp = thread // WARP if thread < self.threads else thread - self.threads
            return thread != self.thread and before >= self.known[warp]
        since: Array = who - self.first - 1
        theirs: Array = since % self.turn_size
        unordered = since // self.turn_size >= self.known[self.warps_of(theirs)]
        return (who == self.first) | ((who > self.first) & (theirs != self.thread) & unordered)

    def warps_of(self, theirs: Array) -> Array:
        return np.where(theirs < self.threads, theirs // WARP, theirs - self.threads)

    def mark(self, who: Any) -> Any:
        """This thread alone; or several of its warp, in this turn; or several of any."""
        others, warp = self.races_with(who), self.thread // WARP
        lanes = self.label - self.thread + self.threads + warp
        if isinstance(who, np.ndarray):
            own = (who > self.first) & (self.warps_of((who - self.first - 1) % self.turn_size) == warp)
            return np.where(others, np.where(own, lanes, self.first), self.label)
        if not others or who == self.first:
            return self.first if others else self.label
        theirs = (int(who) - self.first - 1) % self.turn_size
        own = theirs // WARP == warp if theirs < self.threads else theirs - self.threads == warp
        return lanes if own else self.first

    def visit(self, memory: CheckedMemory, where: Place, action: str) -> None:
        if not self.apart:
            Race.visit(self, memory, where, action)
            return
        marks = memory.marks.get(self)
        if marks is None:
            shape = (self.warps, *memory.data.shape)
            marks = memory.marks[self] = tuple(np.zeros(shape, np.int64) for _ in ACTIONS)
        self.require_apart(memory, where, action)
        if memory.writers.size and action != "read":
            memory.writers[where] = self.thread + 1
            memory.fence_counts[where] = len(self.fences.get(self.thread, ()))
        mine = marks[ACTIONS.index(action)][self.thread // WARP]
        mine[where] = self.mark(mine[where])

    def require_apart(self, memory: CheckedMemory, where: Place, action: str) -> None:
        """Check that the current thread knows all accesses that conflict with `action`."""
        marks = memory.marks.get(self)
        if marks is not None:
            every_warp = (slice(None), *where)
            for other in CONFLICTS[action]:
                if np.any(self.races_with(marks[other][every_warp])):
                    self.fail(memory, where, action, other)
        for span in memory.spans:
            conflicts = action != "read" or span.action != "read"
            if conflicts and span.turn >= self.known[span.clock] and span.meets(where):
                raise InternalError(
                    f"race: thread {self.thread} does a {action} of {memory.name_of(where)[:200]}, which {span.who}"
                    f" {span.action}, with no wait between"
                )
