"""Interpreter of kernels with launches: a coroutine per warp, which yields at barriers.

Inside a warp, statements around collectives run once for all lanes, which must agree about bounds and conditions; all
others run thread by thread. Conflicting accesses of two threads of a block to an element, without a barrier that both
reached in between, are a race. So are conflicting accesses of two blocks, unless both are atomic updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InternalError
from ..atoms import ATOMS, WARP, WARPGROUP
from ..intrinsics import (
    BARRIER,
    BARRIER_INIT,
    BARRIER_PART,
    CLUSTER_BARRIER,
    ELECT,
    INTRINSICS,
    SHUFFLE_DOWN,
    SHUFFLE_INDEX,
    SHUFFLE_XOR,
    TMA_STORES,
    WARP_BARRIER,
    WGMMA_FENCE,
    is_collective,
)
from ..nodes import BLOCK, THREAD, Allocate, Block, Expr, If, Invoke, Kernel, Launch, Let, Loop, Space, Stmt, While
from ..rewrite import walk_stmts
from .async_copies import Group
from .asynchronous import GROUP_CALLS, MOST_BARRIERS, MOST_GROUPS, Asynchronous, PhaseWait
from .atom_semantics import atom_meaning, read_row, write_row
from .memory import CheckedMemory, Race
from .ops import Value
from .races import ThreadRace
from .thread_waits import RunThread, is_phase_wait, run_thread

if TYPE_CHECKING:
    from .interpreter import Interpreter

_COMMON = (Space.SHARED, Space.BARRIER)
_BY_ITSELF = frozenset((BARRIER_INIT, WGMMA_FENCE, *TMA_STORES))
_SHARED_DEPTH, _PRIVATE_DEPTH = 1, 2  # indices into `Interpreter.races`: blocks, then threads
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class BarrierWait:
    """The wait of a warp at a barrier.

    number: the number of the barrier: 0 is the block's; warpgroups have negative ones. threads: how many participate.
    block: the block that the barrier belongs to, by its rank in the cluster; -1: the cluster.
    name: the name in messages. act: for a warpgroup, the effect of the collective once all its warps have arrived.
    """

    number: int
    threads: int
    name: str = ""
    act: Callable[[list[Warp]], None] | None = None
    block: int = 0

    def __str__(self) -> str:
        return self.name or (f"{BARRIER_PART} {self.number}" if self.number else BARRIER)


@dataclass(frozen=True, slots=True, eq=False)
class LaneWait:
    """The wait of a warp whose threads wait for phases of mbarriers."""

    waits: list[PhaseWait]

    def __str__(self) -> str:
        return str(self.waits[0])


Wait = BarrierWait | LaneWait
Run = Callable[["Warp"], Iterator[Wait]]


@dataclass(slots=True)
class Thread:
    """The private state of one thread.

    number: its index in the cluster. block: the rank of its block in the cluster. groups: its pending asynchronous
    copies; the last group is open.
    """

    number: int
    values: dict[str, Value]
    memory: dict[str, CheckedMemory]
    groups: list[Group] = field(default_factory=lambda: [Group()])
    block: int = 0


@dataclass(slots=True)
class Warp:
    """A warp. allocated: how often it has reached the allocation of each shared buffer."""

    number: int
    threads: list[Thread]
    block: int
    allocated: Counter[str] = field(default_factory=Counter)


def run_launch(machine: Interpreter, kernel: Kernel, launch: Launch) -> None:
    """Run all blocks of a kernel, in order."""
    threads = prod(launch.block) * launch.cluster
    parts = launch.cluster > 1 or any(
        isinstance(s, Invoke) and (s.name == BARRIER_PART or s.name in _BY_ITSELF) for s in walk_stmts(kernel.body)
    )
    between_blocks = Race("blocks", reduces=True)
    between_threads = ThreadRace("threads", reduces=True, threads=threads, apart=parts)
    for memory in machine.memory.values():
        memory.marks.clear()
    machine.scopes = [(None, set()), (None, set())]
    machine.races = [between_blocks, between_threads]
    state = LaunchInterpreter(machine, between_threads, kernel)
    run = state.stmt(kernel.body)
    outer = machine.memory
    given, points = machine.values, list(_list_grid_points(launch.grid))
    for first in range(0, len(points), launch.cluster):
        between_blocks.step(first)
        made: list[Thread] = []
        for rank, block in enumerate(points[first : first + launch.cluster]):
            places = dict(zip(BLOCK, map(np.int64, block), strict=True))
            for t in _list_grid_points(launch.block):
                values = {**given, **places, **dict(zip(THREAD, map(np.int64, t), strict=True))}
                made.append(Thread(len(made), values, dict(outer), block=rank))
        state.begin(made)
        state.run_block(run)
    machine.scopes, machine.races, machine.memory, machine.values = [], [], outer, given


def _list_grid_points(extents: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    """All (x, y, z) within `extents`, x fastest."""
    for z, y, x in product(*map(range, reversed(extents))):
        yield x, y, z


class LaunchInterpreter:
    """Translates the statements of a kernel into coroutines that run the warps of the current block or cluster.

    turns: the clock of each warp (and of each kind of asynchronous operation). known: their vector clocks.
    shared: the shared buffers by (rank of the block in the cluster, name), one per execution of the allocation.
    """

    def __init__(self, machine: Interpreter, race: ThreadRace, kernel: Kernel) -> None:
        self.machine, self.race = machine, race
        assert kernel.launch is not None
        self.cluster = kernel.launch.cluster
        self.by_itself = self.cluster > 1 or any(
            isinstance(s, Invoke) and s.name in _BY_ITSELF for s in walk_stmts(kernel.body)
        )
        count = race.warps + (race.warps + (MOST_BARRIERS + MOST_GROUPS) * self.cluster) * self.by_itself
        self.warps: list[Warp] = []
        self.turns = [0] * count
        self.known = np.zeros((count, count), np.int64)
        self.shared: dict[tuple[int, str], list[CheckedMemory]] = {}
        self.asynchronous = machine.asynchronous = Asynchronous(self, kernel.maps)

    # --- warps ---------------------------------------------------------------------------------------------------

    def begin(self, threads: list[Thread]) -> None:
        """Reset the state for the next block or cluster."""
        self.warps = [Warp(n // WARP, threads[n : n + WARP], threads[n].block) for n in range(0, len(threads), WARP)]
        self.shared = {}
        self.race.pass_barrier(max(self.turns))
        self.turns = [0] * len(self.turns)
        self.known[...] = 0
        self.asynchronous.begin()
        self.race.fences = self.asynchronous.fences

    def run_block(self, run: Run) -> None:
        """Run each warp until it waits, and release those whose barrier is complete, until all warps have ended."""
        runs = {w.number: run(w) for w in self.warps}
        left = Counter(w.block for w in self.warps)
        waiting: dict[int, Wait] = {}
        ready = list(runs)
        while ready:
            for number in ready:
                wait = next(runs[number], None)
                if wait is None:
                    del runs[number]
                    block = self.warps[number].block
                    left[block] -= 1
                    if not left[block]:
                        self.asynchronous.end_block(block)
                else:
                    waiting[number] = wait
            ready = self.all_released(waiting)
            while not ready and self.asynchronous.land():
                ready = self.all_released(waiting)
            for number in ready:
                del waiting[number]
        if waiting:
            self.fail_deadlock(waiting, ended=[w.number for w in self.warps if w.number not in runs])

    def all_released(self, waiting: dict[int, Wait]) -> list[int]:
        """The warps whose wait is over."""
        lanes = [n for n, w in waiting.items() if isinstance(w, LaneWait) and any(x.passes() for x in w.waits)]
        barriers = (w for w in dict.fromkeys(waiting.values()) if isinstance(w, BarrierWait))
        return lanes + [n for wait in barriers for n in self.release_waiting(wait, waiting)]

    def release_waiting(self, wait: BarrierWait, waiting: dict[int, Wait]) -> list[int]:
        """The warps at the barrier of `wait` if all participants have arrived, after synchronizing them; else none."""
        found = [n for n, other in waiting.items() if other == wait]
        count = sum(len(self.warps[n].threads) for n in found)
        if count > wait.threads:
            raise InternalError(f"threads of a block disagree: {count} wait at {wait}, which is for {wait.threads}")
        if count < wait.threads:
            return []
        if wait.act is not None:
            wait.act([self.warps[n] for n in sorted(found)])
        elif wait.number == 0 and not self.by_itself:
            self.pass_barrier()
        else:
            self.join(found)
        return found

    def pass_barrier(self) -> None:
        """Pass the barrier of the block: earlier accesses do not race with later ones."""
        self.race.pass_barrier(max(self.turns))
        self.turns = [0] * len(self.turns)
        self.known[...] = 0

    def join(self, warps: list[int]) -> None:
        """Synchronize these warps: merge their vector clocks."""
        for n in warps:
            self.turns[n] += 1
            self.known[n, n] = self.turns[n]
        self.known[warps] = self.known[warps].max(axis=0)

    def fail_deadlock(self, waiting: dict[int, Wait], ended: list[int]) -> None:
        phases = [w.waits[0] for w in waiting.values() if isinstance(w, LaneWait)]
        if phases:  # report first a phase that lacks only bytes, then one at which some have arrived
            landing = [w for w in phases if not w.barrier.pending]
            begun = [w for w in phases if w.barrier.pending < w.barrier.count or w.barrier.bytes]
            raise InternalError(f"deadlock: {(landing or begun or phases)[0]}")
        first, wait = next(iter(waiting.items()))
        other = next((f"warp {n} at {w}" for n, w in waiting.items() if w != wait), None)
        rest = other or (f"warp {ended[0]} has ended" if ended else "no other warp comes")
        raise InternalError(f"threads of a block disagree: warp {first} waits at {wait}, {rest}")

    def select(self, t: Thread) -> None:
        """Make `t` the current thread."""
        self.machine.values, self.machine.memory, self.machine.thread = t.values, t.memory, t
        warp = t.number // WARP
        self.race.enter(t.number, self.turns[warp], self.known[warp])

    def run_each(self, warp: Warp, run: Callable[[], Any]) -> list[Any]:
        """The results of `run` in each thread of `warp`."""
        results = []
        for t in warp.threads:
            self.select(t)
            results.append(run())
        return results

    def run_uniform(self, warp: Warp, run: Callable[[], Value], what: str) -> Value:
        """The result of `run`, which must be the same in all threads of `warp`."""
        results = self.run_each(warp, run)
        if any(x != results[0] for x in results):
            raise InternalError(f"threads of a warp disagree about {what}, where all must meet")
        return results[0]

    # --- statements ----------------------------------------------------------------------------------------------

    def stmt(self, s: Stmt) -> Run:
        if not any(_is_reached_together(c) for c in walk_stmts(s)):
            if any(is_phase_wait(c) for c in walk_stmts(s)):
                return self.lane_by_lane(run_thread(self, s))
            return self.at_once(self.machine.stmt(s))
        match s:
            case Block(body):
                return self.sequence([self.stmt(c) for c in body])
            case Loop():
                return self.loop(s)
            case While(condition, body):
                return self.repeat(condition, self.stmt(body))
            case If(condition, then, otherwise):
                return self.branch(condition, self.stmt(then), None if otherwise is None else self.stmt(otherwise))
            case Let(name, value, body):
                return self.let(name, value, body)
            case Allocate():
                return self.allocate(s)
            case Invoke():
                return self.invoke(s)
        raise InternalError(f"not a statement for threads that meet: {s!r}")

    def at_once(self, work: Callable[[], None]) -> Run:
        """Run `work`, which does not wait, in every thread."""

        def run(warp: Warp) -> Iterator[Wait]:
            self.run_each(warp, work)
            return iter(())

        return run

    def lane_by_lane(self, work: RunThread) -> Run:
        """Run `work`, which may wait for phases of mbarriers, in every thread."""

        def run(warp: Warp) -> Iterator[Wait]:
            left = [(work(t), None) for t in warp.threads]
            lanes: list[tuple[Iterator[PhaseWait], PhaseWait | None]] = list(left)
            while lanes:
                after = []
                for lane, wait in lanes:
                    while wait is None or wait.passes():
                        if wait is not None:
                            self.asynchronous.pass_wait(wait)
                        wait = next(lane, None)
                        if wait is None:
                            break
                    if wait is not None:
                        after.append((lane, wait))
                lanes = list(after)
                if lanes and not any(w.passes() for _, w in after):
                    yield LaneWait([w for _, w in after])

        return run

    def sequence(self, runs: list[Run]) -> Run:
        def run(warp: Warp) -> Iterator[Wait]:
            for step in runs:
                yield from step(warp)

        return run

    def branch(self, condition: Expr, yes: Run, no: Run | None) -> Run:
        test = self.machine.expr(condition)

        def run(warp: Warp) -> Iterator[Wait]:
            if self.run_uniform(warp, test, "a condition"):
                yield from yes(warp)
            elif no is not None:
                yield from no(warp)

        return run

    def repeat(self, condition: Expr, body: Run) -> Run:
        test = self.machine.expr(condition)

        def run(warp: Warp) -> Iterator[Wait]:
            while self.run_uniform(warp, test, "a condition"):
                yield from body(warp)

        return run

    def loop(self, s: Loop) -> Run:
        start, stop, body = self.machine.expr(s.start), self.machine.expr(s.stop), self.stmt(s.body)

        def run(warp: Warp) -> Iterator[Wait]:
            first, last = (self.run_uniform(warp, e, f"the loop {s.var}") for e in (start, stop))
            for i in range(int(first), int(last), s.step):
                for t in warp.threads:
                    t.values[s.var] = np.int64(i)
                yield from body(warp)

        return run

    def let(self, name: str, value: Expr, body: Stmt) -> Run:
        evaluate, inner = self.machine.expr(value), self.stmt(body)

        def run(warp: Warp) -> Iterator[Wait]:
            for t, result in zip(warp.threads, self.run_each(warp, evaluate), strict=True):
                t.values[name] = result
            yield from inner(warp)

        return run

    def allocate(self, s: Allocate) -> Run:
        inner = self.stmt(s.body)
        shared, private = ([b for b in s.buffers if (b.space in _COMMON) is common] for common in (True, False))

        def run(warp: Warp) -> Iterator[Wait]:
            everywhere = {}
            for b in shared:  # the first warp that arrives allocates it
                made = self.shared.setdefault((warp.block, b.name), [])
                if warp.allocated[b.name] == len(made):
                    made.append(CheckedMemory.allocate_undefined(b, _SHARED_DEPTH))
                    if self.by_itself:
                        made[-1].note_stores()
                everywhere[b.name] = made[warp.allocated[b.name]]
                warp.allocated[b.name] += 1
            for t in warp.threads:
                t.memory |= everywhere | {b.name: CheckedMemory.allocate_undefined(b, _PRIVATE_DEPTH) for b in private}
            yield from inner(warp)

        return run

    # --- where threads meet --------------------------------------------------------------------------------------

    def invoke(self, s: Invoke) -> Run:
        if s.name == BARRIER:
            return self.wait(BarrierWait(0, self.race.threads // self.cluster))
        if s.name == CLUSTER_BARRIER:
            return self.wait(BarrierWait(0, self.race.threads, CLUSTER_BARRIER, block=-1))
        if s.name == BARRIER_PART:
            return self.wait(BarrierWait(s.attributes[0], s.attributes[1]))
        if s.name == WARP_BARRIER:
            return self.within_warp(lambda warp: self.join([warp.number]))
        if s.name in (SHUFFLE_XOR, SHUFFLE_DOWN, SHUFFLE_INDEX):
            return self.within_warp(self.shuffle(s))
        if s.name == ELECT:
            return self.within_warp(self.elect(s))
        if s.name in GROUP_CALLS:
            return self.with_group(s, lambda warps: self.asynchronous.group_call(s, warps))
        if INTRINSICS[s.name].group == WARPGROUP:
            return self.with_group(s, self.group_product(s))
        if INTRINSICS[s.name].atom:
            return self.within_warp(self.atom(s))
        raise InternalError(f"no meaning is known for the intrinsic {s.name}")

    def wait(self, wait: BarrierWait) -> Run:
        def run(warp: Warp) -> Iterator[Wait]:
            yield wait if wait.block < 0 else replace(wait, block=warp.block)

        return run

    def within_warp(self, meet: Callable[[Warp], None]) -> Run:
        def run(warp: Warp) -> Iterator[Wait]:
            meet(warp)
            return iter(())

        return run

    def with_group(self, s: Invoke, act: Callable[[list[Warp]], None]) -> Run:
        """Run `act` on the warps of a warpgroup once all of them have arrived."""

        def run(warp: Warp) -> Iterator[Wait]:
            yield BarrierWait(-1 - warp.number // 4, WARPGROUP, s.name, act)

        return run

    def elect(self, s: Invoke) -> Callable[[Warp], None]:
        (target, to) = s.operands[0]
        written = [self.machine.expr(i) for i in to]

        def run(warp: Warp) -> None:
            for lane, t in enumerate(warp.threads):
                self.select(t)
                place = tuple([i() for i in written])
                self.machine.memory[target.name].write(place, np.uint32(lane == 0), None, ())

        return run

    def group_product(self, s: Invoke) -> Callable[[list[Warp]], None]:
        views = [(b.name, [self.machine.expr(i) for i in where]) for b, where in s.operands]
        adds = self.machine.expr(s.values[0])

        def places() -> tuple[list[tuple[CheckedMemory, tuple[Value, ...]]], Value]:
            return [(self.machine.memory[name], tuple([i() for i in where])) for name, where in views], adds()

        def run(warps: list[Warp]) -> None:
            found = [x for w in warps for x in self.run_each(w, places)]
            if any(bool(more) != bool(found[0][1]) for _, more in found):
                raise InternalError(f"threads of a warpgroup disagree about {s.name}")
            self.asynchronous.multiply(s, warps, [x for x, _ in found], bool(found[0][1]))

        return run

    def shuffle(self, s: Invoke) -> Callable[[Warp], None]:
        (target, to), (source, where) = s.operands
        width = s.attributes[-1]
        read = [self.machine.expr(i) for i in where]
        written = [self.machine.expr(i) for i in to]
        wanted = self.machine.expr(s.values[0]) if s.values else lambda: np.int64(s.attributes[0])

        def value() -> tuple[Value, int]:
            found = self.machine.memory[source.name].read(tuple([i() for i in read]), None, ())
            return found, int(wanted())

        def run(warp: Warp) -> None:
            values = self.run_each(warp, value)
            for lane, t in enumerate(warp.threads):
                self.select(t)
                other = _source_lane(s.name, lane, values[lane][1], width)
                if other >= len(values):
                    raise InternalError(f"thread {t.number} takes a value from lane {other}, which does not exist")
                place = tuple([i() for i in written])
                self.machine.memory[target.name].write(place, values[other][0], None, ())

        return run

    def atom(self, s: Invoke) -> Callable[[Warp], None]:
        meaning = atom_meaning(ATOMS[INTRINSICS[s.name].atom])
        views = [(b.name, [self.machine.expr(i) for i in where]) for b, where in s.operands]

        def places() -> list[tuple[CheckedMemory, tuple[Value, ...]]]:
            return [(self.machine.memory[name], tuple([i() for i in where])) for name, where in views]

        def run(warp: Warp) -> None:
            lanes = self.run_each(warp, places)

            def row(lane: int) -> Array:
                self.select(warp.threads[lane])
                memory, where = lanes[lane][1]
                return read_row(memory, where, self.machine.races)

            def change(lane: int, values: Array) -> None:
                self.select(warp.threads[lane])
                memory, where = lanes[lane][0]
                write_row(memory, where, values, self.machine.races)

            meaning(lanes, row, change)

        return run


def _source_lane(name: str, lane: int, wanted: int, width: int) -> int:
    """The lane from which a shuffle takes the value of `lane`."""
    if name == SHUFFLE_INDEX:
        return lane // width * width + wanted % width
    other = lane ^ wanted if name == SHUFFLE_XOR else lane + wanted
    return other if other // width == lane // width else lane


def _is_reached_together(s: Stmt) -> bool:
    """Whether several threads must execute `s` together: a collective, or an allocation of shared memory."""
    if isinstance(s, Allocate):
        return any(b.space in _COMMON for b in s.buffers)
    return isinstance(s, Invoke) and is_collective(s)
