"""Kernels with launches, interpreted: the threads of a block take turns between the places where all of them meet.

Statements around collectives run once for a block, and their bounds and conditions must agree among its threads; all
others run thread by thread. Two threads of a block that meet in an element without a barrier between them are a race,
and so are two blocks that meet in one at all, unless both update it atomically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InternalError
from ..intrinsics import (
    BARRIER,
    COMMIT_ASYNC,
    COPY_ASYNC,
    SHUFFLE_DOWN,
    SHUFFLE_XOR,
    WAIT_ASYNC,
    WARP_BARRIER,
    is_collective,
)
from ..nodes import BLOCK, THREAD, Allocate, Block, Expr, If, Invoke, Kernel, Launch, Let, Loop, Space, Stmt
from ..rewrite import walk_stmts
from .memory import CheckedMemory, Race
from .ops import Value

if TYPE_CHECKING:
    from .machine import Interpreter

WARP = 32
_SHARED_DEPTH, _PRIVATE_DEPTH = 1, 2  # races between blocks come first, then those between threads
Run = Callable[[], None]


@dataclass(slots=True, eq=False)
class ThreadRace(Race):
    """Who touched what since the last barrier. The iteration counts, before the thread, how often its warp has met."""

    threads: int = 1

    def enter(self, thread: int, turn: int) -> None:
        """Make `thread`, whose warp has met `turn` times, the one that runs."""
        self.iteration = turn * self.threads + thread
        self.label = self.first + 1 + self.iteration

    def others(self, who: Any) -> Any:
        thread, turn = self.iteration % self.threads, self.iteration // self.threads
        theirs, before = (who - self.first - 1) % self.threads, (who - self.first - 1) // self.threads
        unordered = (theirs // WARP != thread // WARP) | (before >= turn)
        return (who == self.first) | ((who > self.first) & (theirs != thread) & unordered)


@dataclass(slots=True)
class _Copy:
    """A copy past the registers that has not landed."""

    target: CheckedMemory
    place: tuple[Any, ...]
    value: Value


@dataclass(slots=True)
class Thread:
    """What one thread has for itself. groups: its copies under way, the last group being open."""

    number: int
    values: dict[str, Value]
    memory: dict[str, CheckedMemory]
    groups: list[list[_Copy]] = field(default_factory=lambda: [[]])


def run_launch(machine: Interpreter, kernel: Kernel, launch: Launch) -> None:
    """Run all blocks of a kernel, in order."""
    threads = prod(launch.block)
    between_blocks, between_threads = Race("blocks", reduces=True), ThreadRace("threads", reduces=True, threads=threads)
    for memory in machine.memory.values():
        memory.marks.clear()
    machine.scopes = [(None, set()), (None, set())]
    machine.races = [between_blocks, between_threads]
    state = _Launched(machine, between_threads, threads)
    run = state.stmt(kernel.body)
    outer = machine.memory
    for number, block in enumerate(_points(launch.grid)):
        between_blocks.step(number)
        places = dict(zip(BLOCK, map(np.int64, block), strict=True))
        state.threads = [
            Thread(n, {**places, **dict(zip(THREAD, map(np.int64, t), strict=True))}, dict(outer))
            for n, t in enumerate(_points(launch.block))
        ]
        state.meet()
        run()
    machine.scopes, machine.races, machine.memory = [], [], outer


def _points(extents: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    """All (x, y, z), x fastest."""
    for z, y, x in product(*map(range, reversed(extents))):
        yield x, y, z


class _Launched:
    """Translates the statements of a kernel into functions that run them for the threads of the current block."""

    def __init__(self, machine: Interpreter, race: ThreadRace, threads: int) -> None:
        self.machine, self.race = machine, race
        self.threads: list[Thread] = []
        self.turns = [0] * (threads // WARP + 1)

    def meet(self) -> None:
        """All threads have come to one place: nothing before it races with anything after."""
        self.race.first += 1 + (1 + max(self.turns)) * self.race.threads
        self.turns = [0] * len(self.turns)

    def select(self, t: Thread) -> None:
        """Make `t` the thread that runs."""
        self.machine.values, self.machine.memory, self.machine.thread = t.values, t.memory, t
        self.race.enter(t.number, self.turns[t.number // WARP])

    def each(self, run: Callable[[], Any]) -> list[Any]:
        """The results of `run` in all threads."""
        results = []
        for t in self.threads:
            self.select(t)
            results.append(run())
        return results

    def agreed(self, run: Callable[[], Value], what: str) -> Value:
        """The result of `run`, which must be the same in all threads."""
        results = self.each(run)
        if any(x != results[0] for x in results):
            raise InternalError(f"threads of a block disagree about {what}, where all must meet")
        return results[0]

    def stmt(self, s: Stmt) -> Run:
        if not any(_is_common(c) for c in walk_stmts(s)):
            return self.apart(self.machine.stmt(s))
        match s:
            case Block(body):
                return self.sequence([self.stmt(c) for c in body])
            case Loop():
                return self.loop(s)
            case If(condition, then, otherwise):
                test, yes = self.machine.expr(condition), self.stmt(then)
                no = self.stmt(otherwise) if otherwise is not None else lambda: None
                return lambda: yes() if self.agreed(test, "a condition") else no()
            case Let(name, value, body):
                return self.let(name, value, body)
            case Allocate():
                return self.allocate(s)
            case Invoke():
                return self.invoke(s)
        raise InternalError(f"not a statement for threads that meet: {s!r}")

    def apart(self, work: Run) -> Run:
        """Every thread does `work`."""

        def run() -> None:
            self.each(work)

        return run

    def sequence(self, runs: list[Run]) -> Run:
        def run() -> None:
            for step in runs:
                step()

        return run

    def loop(self, s: Loop) -> Run:
        start, stop, body = self.machine.expr(s.start), self.machine.expr(s.stop), self.stmt(s.body)

        def run() -> None:
            first, last = (self.agreed(e, f"the loop {s.var}") for e in (start, stop))
            for i in range(int(first), int(last), s.step):
                for t in self.threads:
                    t.values[s.var] = np.int64(i)
                body()

        return run

    def let(self, name: str, value: Expr, body: Stmt) -> Run:
        evaluate, inner = self.machine.expr(value), self.stmt(body)

        def run() -> None:
            for t, result in zip(self.threads, self.each(evaluate), strict=True):
                t.values[name] = result
            inner()

        return run

    def allocate(self, s: Allocate) -> Run:
        inner = self.stmt(s.body)
        shared, private = ([b for b in s.buffers if (b.space is Space.SHARED) is common] for common in (True, False))

        def run() -> None:
            everywhere = {b.name: CheckedMemory.undefined(b, _SHARED_DEPTH) for b in shared}
            for t in self.threads:
                t.memory |= everywhere | {b.name: CheckedMemory.undefined(b, _PRIVATE_DEPTH) for b in private}
            inner()

        return run

    def invoke(self, s: Invoke) -> Run:
        if s.name == BARRIER:
            return self.meet
        if s.name == WARP_BARRIER:
            return self.meet_in_warps
        if s.name in (SHUFFLE_XOR, SHUFFLE_DOWN):
            return self.shuffle(s)
        raise InternalError(f"no meaning is known for the intrinsic {s.name}")

    def meet_in_warps(self) -> None:
        self.turns = [n + 1 for n in self.turns]

    def shuffle(self, s: Invoke) -> Run:
        (target, to), (source, where) = s.operands
        offset, width = s.attributes
        read = [self.machine.expr(i) for i in where]
        written = [self.machine.expr(i) for i in to]

        def value() -> Value:
            return self.machine.memory[source.name].read(tuple([i() for i in read]), None, ())

        def run() -> None:
            values = self.each(value)
            for t in self.threads:
                self.select(t)
                lane, first = t.number % WARP, t.number - t.number % WARP
                other = lane ^ offset if s.name == SHUFFLE_XOR else lane + offset
                other = lane if other // width != lane // width else other
                if first + other >= len(values):
                    raise InternalError(f"thread {t.number} takes a value from lane {other}, which does not exist")
                place = tuple([i() for i in written])
                self.machine.memory[target.name].write(place, values[first + other], None, ())

        return run


def _is_common(s: Stmt) -> bool:
    """Whether threads of a block come to `s` together."""
    if isinstance(s, Allocate):
        return any(b.space is Space.SHARED for b in s.buffers)
    return isinstance(s, Invoke) and is_collective(s)


# --- copies past the registers -----------------------------------------------------------------------------------


def copy_async(machine: Interpreter, s: Invoke) -> Run:
    """What a thread does at one of the three intrinsics of such copies."""
    if s.name == COMMIT_ASYNC:
        return lambda: machine.thread.groups.append([])
    if s.name == WAIT_ASYNC:
        return lambda: _land(machine.thread, s.attributes[0])
    if s.name != COPY_ASYNC:
        raise InternalError(f"no meaning is known for the intrinsic {s.name}")
    (target, to), (source, where) = s.operands
    written, read = [machine.expr(i) for i in to], [machine.expr(i) for i in where]
    count = s.attributes[0] // target.type.dtype.size

    def run() -> None:
        left, right = machine.memory[target.name], machine.memory[source.name]
        for n in range(count):
            value = right.read(_moved(read, n), None, machine.races)
            left.write(_moved(written, n), value, None, machine.races)
            place = (0, *_moved(written, n))
            left.written[place] = False
            machine.thread.groups[-1].append(_Copy(left, place, value))

    return run


def _moved(indices: list[Callable[[], Value]], n: int) -> tuple[Value, ...]:
    first = [i() for i in indices]
    return (*first[:-1], first[-1] + n)


def _land(thread: Thread, left: int) -> None:
    """Let the groups land but the last `left` closed ones."""
    while len(thread.groups) > left + 1:
        for copy in thread.groups.pop(0):
            copy.target.data[copy.place] = copy.value
            copy.target.written[copy.place] = True
