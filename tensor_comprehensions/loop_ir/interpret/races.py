"""Race detection between the threads of a launch, which barriers of blocks, of parts of them and of warps order."""

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
    """Detects conflicting accesses of threads since the last barrier of the block.

    A turn of a warp ends when it synchronizes with other warps, or its own lanes with each other. Labels number, for
    each turn, first the threads, then the warps; a warp's label means several of its threads.
    apart: whether elements have marks for each warp, rather than one that may mean "several warps".
    known: for each warp, the number of its turns that the warp of the current thread has synchronized with.
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
        """Switch to `thread`, whose warp is in its turn number `turn`."""
        self.thread, self.known = thread, known
        self.iteration = turn * self.turn_size + thread
        self.label = self.first + 1 + self.iteration

    def pass_barrier(self, turns: int) -> None:
        """Pass a barrier of the block after at most `turns` turns of each warp; older marks no longer race."""
        self.first += 1 + (1 + turns) * self.turn_size

    def races_with(self, who: Any) -> Any:
        if not isinstance(who, np.ndarray):  # the most frequent case, without the cost of arrays
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
        """The new mark: this thread alone, several threads of its warp in this turn, or several warps."""
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
        """Fail unless the current thread has synchronized with all accesses that conflict with `action`."""
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
