"""Asynchronous operations in the interpreter: mbarriers, TMA copies and `wgmma`, ordered by vector clocks.

Besides the warps, the loads that each barrier completes, the products of each warpgroup and the TMA stores of each warp
have clocks. A copy lands as late as possible, in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.errors import InternalError
from ...core.math_functions import round_to_tf32
from .. import intrinsics
from ..async_operand_checks import box_in_memory
from ..atoms import ATOMS, WARP
from ..intrinsics import INTRINSICS
from ..nodes import Invoke, TensorMap
from .atom_semantics import decode, encode, fragment_of
from .memory import AsyncAccess, CheckedMemory
from .ops import Value

if TYPE_CHECKING:
    from .interpreter import Interpreter
    from .launch import LaunchInterpreter, Thread, Warp

Array = np.ndarray[Any, Any]
Run = Callable[[], None]
View = tuple[CheckedMemory, tuple[Value, ...]]
MOST_BARRIERS, MOST_GROUPS = 64, 8
_THREAD_CALLS = frozenset(
    (
        intrinsics.BARRIER_INIT, intrinsics.BARRIER_ARRIVE, intrinsics.BARRIER_EXPECT, intrinsics.FENCE_BARRIER_INIT,
        intrinsics.BARRIER_ARRIVE_CLUSTER, intrinsics.FENCE_ASYNC, intrinsics.BULK_COMMIT, intrinsics.BULK_WAIT,
        *intrinsics.TMA_LOADS, *intrinsics.TMA_MULTICASTS, *intrinsics.TMA_STORES,
    )
)  # fmt: skip
GROUP_CALLS = (intrinsics.WGMMA_FENCE, intrinsics.WGMMA_COMMIT, intrinsics.WGMMA_WAIT, *intrinsics.REGISTER_MOVES)


@dataclass(slots=True)
class MemoryBarrier:
    """An mbarrier. phase: how many phases have ended. fenced: the turn of its creator's fence; -1: none yet."""

    name: str
    number: int
    count: int
    maker: int
    clock: Array
    ended: Array
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    fenced: int = -1
    arrivers: list[int] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseWait:
    """The wait of a thread for the end of a phase of an mbarrier."""

    barrier: MemoryBarrier
    phase: int
    thread: int

    def passes(self) -> bool:
        return self.barrier.phase > self.phase

    def __str__(self) -> str:
        b = self.barrier
        return (
            f"thread {self.thread} waits at {b.name}, whose phase {b.phase} lacks"
            f" {b.pending} arrivals and {b.bytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class _Copy:
    """A TMA load that has not landed."""

    memory: CheckedMemory
    region: tuple[Any, ...]
    values: Array
    bytes: int
    barrier: MemoryBarrier
    clock: Array
    turn: int


@dataclass(slots=True)
class _Sums:
    """The accumulators of products that have not been waited for."""

    views: Sequence[View]
    atom: str
    total: Array
    group: int


@dataclass(slots=True)
class _Products:
    """The products of a warpgroup. closed: its number of closed groups. sums: accumulators that are in use."""

    closed: int = 0
    fenced: bool = False
    sums: list[_Sums] = field(default_factory=list)


def is_thread_call(s: Invoke) -> bool:
    """Whether `s` is an asynchronous intrinsic that each thread executes by itself."""
    return s.name in _THREAD_CALLS


class Asynchronous:
    """The asynchronous state of a block, or of a cluster of blocks, and the effects of the intrinsics on it."""

    def __init__(self, launched: LaunchInterpreter, maps: tuple[TensorMap, ...]) -> None:
        self.launched, self.maps, self.random = launched, maps, Random(0)
        self.begin()

    def begin(self) -> None:
        """Reset the state for the next block or cluster."""
        cluster = self.launched.cluster
        self.barriers: dict[tuple[int, str, tuple[int, ...]], MemoryBarrier] = {}
        self.copies: list[_Copy] = []
        self.products = [_Products() for _ in range(MOST_GROUPS * cluster)]
        self.reached: list[dict[int, int]] = [{} for _ in range(cluster)]
        self.ended = [False] * cluster
        self.fences: dict[int, list[int]] = {}
        self.boxes: dict[int, list[int]] = {}

    # --- blocks of a cluster -------------------------------------------------------------------------------------

    def reach_block(self, block: int, thread: Thread) -> None:
        """Record that a thread accesses shared memory of a block of its cluster."""
        if not 0 <= block < len(self.ended):
            raise InternalError(f"out of bounds: thread {thread.number} reaches block {block} of its cluster")
        if self.ended[block]:
            raise InternalError(f"ended: thread {thread.number} reaches block {block} of its cluster, which has ended")
        if block != thread.block:
            warp = thread.number // WARP
            self.reached[block][warp] = self.launched.turns[warp]

    def end_block(self, block: int) -> None:
        """End a block. Its threads must have synchronized with all accesses of other blocks to its shared memory."""
        self.ended[block] = True
        mine = [w.number for w in self.launched.warps if w.block == block]
        knows = self.known[mine].max(axis=0)
        for warp, turn in self.reached[block].items():
            if turn >= knows[warp]:
                raise InternalError(
                    f"ended: block {block} of a cluster ends, and does not know that warp {warp} has reached its"
                    " shared memory"
                )

    # --- clocks --------------------------------------------------------------------------------------------------

    def clock_of_barrier(self, b: MemoryBarrier) -> int:
        return self.launched.race.warps + b.number

    def clock_of_group(self, group: int) -> int:
        return self.launched.race.warps + MOST_BARRIERS * self.launched.cluster + group

    def clock_of_stores(self, warp: int) -> int:
        return self.clock_of_group(MOST_GROUPS * self.launched.cluster) + warp

    @property
    def known(self) -> Array:
        return self.launched.known

    def advance_warp_clock(self, warp: int) -> Array:
        """Advance the clock of a warp; returns a copy of its vector clock."""
        self.launched.turns[warp] += 1
        self.known[warp, warp] = self.launched.turns[warp]
        row: Array = self.known[warp].copy()
        return row

    def span(self, memory: CheckedMemory, region: tuple[Any, ...], clock: int, action: str, who: str) -> None:
        """Record an asynchronous access, and drop earlier ones to the same region that it supersedes."""
        new = AsyncAccess(region, clock, self.launched.turns[clock], action, who)
        kept = [s for s in memory.spans if not (s.region == region and (action == "write" or s.clock == clock))]
        memory.spans = [*kept, new]

    # --- barriers ------------------------------------------------------------------------------------------------

    def barrier(self, view: View, thread: Thread, *, by_copy: bool = False, block: int | None = None) -> MemoryBarrier:
        """The mbarrier at `view` in `block` of the cluster (None: the thread's own).

        Fails unless the thread created it or knows of a fence of its creator. by_copy: a TMA copy relies on it, so that
        the creator itself needs the fence, too.
        """
        block = thread.block if block is None else block
        memory, where = view
        place = tuple(int(i) for i in where)
        name = f"{memory.buffer.name}[{', '.join(map(str, place))}]"
        b = self.barriers.get((block, memory.buffer.name, place))
        if b is None:
            where_to = f" of block {block}" if block != thread.block else ""
            raise InternalError(
                f"undefined: thread {thread.number} uses the barrier {name}{where_to}, which nothing made"
            )
        mine = b.maker == thread.number
        known = mine or 0 <= b.fenced < self.known[thread.number // WARP, b.maker // WARP]
        if not known or (mine and by_copy and b.fenced < 0):
            raise InternalError(
                f"fence: thread {thread.number} relies on {name}, which thread {b.maker} made,"
                " with no fence and barrier between"
            )
        return b

    def init(self, view: View, arrivals: int, thread: Thread) -> None:
        memory, where = view
        memory.reach(where, None)
        place, size = tuple(int(i) for i in where), len(self.launched.turns)
        name = f"{memory.buffer.name}[{', '.join(map(str, place))}]"
        clocks = np.zeros(size, np.int64), np.zeros(size, np.int64)
        made = MemoryBarrier(name, len(self.barriers), arrivals, thread.number, *clocks, pending=arrivals)
        self.barriers[thread.block, memory.buffer.name, place] = made

    def arrive(self, b: MemoryBarrier, count: int, thread: Thread) -> None:
        if not b.pending:
            raise InternalError(
                f"too many arrivals: thread {thread.number} arrives at {b.name}, whose phase lacks only bytes"
            )
        b.arrivers.append(thread.number)
        b.clock = np.maximum(b.clock, self.advance_warp_clock(thread.number // WARP))
        b.pending -= 1
        b.bytes += count
        self.end_phase(b)

    def end_phase(self, b: MemoryBarrier) -> None:
        if b.pending or b.bytes > 0:
            return
        if b.bytes < 0:
            raise InternalError(f"bytes: more land on {b.name} than its phase expects")
        arrivers = sorted(b.arrivers)
        if b.phase and arrivers != b.before:
            other = next((t for t in arrivers if t not in b.before), -1)
            raise InternalError(f"other arrivers: a phase of {b.name} ends with an arrival of thread {other}")
        b.before, b.arrivers, b.pending = arrivers, [], b.count
        b.phase += 1
        b.ended = np.maximum(b.ended, b.clock)

    def wait_for(self, view: View, parity: int, thread: Thread) -> PhaseWait:
        """The wait of a thread for the next phase with this parity; fails if the phase after it has ended, too."""
        b = self.barrier(view, thread)
        phase = b.seen.get(thread.number, -1)
        phase += (phase & 1) != (parity & 1)
        if b.phase >= phase + 2:
            raise InternalError(
                f"lapped: thread {thread.number} waits for a phase of {b.name}, and the next one has ended, too"
            )
        return PhaseWait(b, phase, thread.number)

    def pass_wait(self, wait: PhaseWait) -> None:
        """End a wait: add the clocks of the arriving threads and completed copies to that of the thread."""
        wait.barrier.seen[wait.thread] = wait.phase
        row = self.known[wait.thread // WARP]
        np.maximum(row, wait.barrier.ended, out=row)

    # --- copies of boxes -----------------------------------------------------------------------------------------

    def region_of(self, view: View, m: TensorMap) -> tuple[Any, ...]:
        """The slices of shared memory that a box occupies; fails if it is misaligned."""
        memory, where = view
        box = box_in_memory(m, memory.buffer)
        assert box is not None
        outer = len(where) - len(box)
        starts = [int(i) for i in where]
        ends = [*(s + 1 for s in starts[:outer]), *(s + n for s, n in zip(starts[outer:], box, strict=True))]
        offset = sum(s * t for s, t in zip(starts, memory.buffer.strides, strict=True)) * memory.buffer.type.dtype.size
        if offset % (8 * m.swizzle or 128):
            raise InternalError(f"misaligned: a box at {memory.buffer.name}{starts}")
        return (slice(0, 1), *(slice(s, e) for s, e in zip(starts, ends, strict=True)))

    def clip_box(self, m: TensorMap, first: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The part of a box that is inside the tensor, as slices of the tensor and slices of the box."""
        tensor, box = [], []
        for start, count, extent in zip(first, m.box, m.shape, strict=True):
            low, high = max(start, 0), min(start + count, extent)
            high = max(low, high)
            tensor.append(slice(low, high))
            box.append(slice(low - start, high - start))
        return tuple(tensor), tuple(box)

    def load(self, views: Sequence[View], m: TensorMap, thread: Thread, blocks: int | None = None) -> None:
        """Start a TMA load into the thread's own block, or into the blocks of the cluster with a bit in `blocks`."""
        target, (tensor, first), done = views
        values = self.read_box((tensor, first), m)
        if blocks is None:
            self.begin_copy(target, values, m, self.barrier(done, thread, by_copy=True), thread)
            return
        mine = target[0]
        position = self.launched.shared[thread.block, mine.buffer.name].index(mine)
        for block in range(blocks.bit_length()):
            if blocks >> block & 1:
                self.reach_block(block, thread)
                b = self.barrier(done, thread, by_copy=True, block=block)
                memory = self.launched.shared[block, mine.buffer.name][position]
                self.begin_copy((memory, target[1]), values, m, b, thread)

    def read_box(self, source: View, m: TensorMap) -> Array:
        """The elements of a box, with zeros outside of the tensor."""
        tensor, first = source
        here, there = self.clip_box(m, [int(i) for i in first])
        values = np.zeros(m.box, tensor.data.dtype)
        if all(s.stop > s.start for s in here):
            found = tensor.read(_places_of(m, here), None, self.launched.machine.races)
            found = round_to_tf32(found) if m.rounds else np.asarray(found)
            values[there] = found.reshape([s.stop - s.start for s in here])
        return values

    def begin_copy(self, target: View, values: Array, m: TensorMap, b: MemoryBarrier, thread: Thread) -> None:
        """Start a load of `values`; its target is undefined until the load lands."""
        memory, region = target[0], self.region_of(target, m)
        self.require_apart(memory, region, "write")
        memory.written[region] = False
        memory.writers[region] = 0
        for marks in memory.marks.values():
            for mark in marks:
                mark[(slice(None), *region) if mark.ndim > memory.data.ndim else region] = 0
        warp, clock = thread.number // WARP, self.clock_of_barrier(b)
        self.span(memory, region, clock, "write", f"the copies that end on {b.name}")
        turn = self.launched.turns[clock]
        self.launched.turns[clock] += 1
        shaped = values.reshape(memory.data[region].shape)
        self.copies.append(_Copy(memory, region, shaped, m.bytes, b, self.advance_warp_clock(warp), turn))

    def land(self) -> bool:
        """Land a pending copy, chosen at random; returns False if there is none."""
        if not self.copies:
            return False
        copy = self.copies.pop(self.random.randrange(len(self.copies)))
        copy.memory.data[copy.region] = copy.values
        copy.memory.written[copy.region] = True
        b = copy.barrier
        b.clock = np.maximum(b.clock, copy.clock)
        clock = self.clock_of_barrier(b)
        b.clock[clock] = max(b.clock[clock], copy.turn + 1)
        b.bytes -= copy.bytes
        self.end_phase(b)
        return True

    def store(self, views: Sequence[View], m: TensorMap, thread: Thread) -> None:
        (tensor, first), source = views
        memory, region = source[0], self.region_of(source, m)
        self.read_asynchronously(memory, region, thread)
        here, there = self.clip_box(m, [int(i) for i in first])
        values = memory.data[region].reshape(m.box)[there]
        if values.size:
            tensor.write(_places_of(m, here), values.ravel(), None, self.launched.machine.races)
        warp = thread.number // WARP
        clock = self.clock_of_stores(warp)
        self.span(memory, region, clock, "read", f"the stores of boxes of warp {warp}")

    def wait_boxes(self, left: int, thread: Thread) -> None:
        groups, warp = self.boxes.get(thread.number, []), thread.number // WARP
        if len(groups) > left:
            clock = self.clock_of_stores(warp)
            self.known[warp, clock] = max(self.known[warp, clock], groups[len(groups) - 1 - left])

    def require_apart(self, memory: CheckedMemory, region: tuple[Any, ...], action: str) -> None:
        race = self.launched.race
        places = np.meshgrid(*(np.arange(s.start, s.stop) for s in region), indexing="ij")
        race.require_apart(memory, tuple(p.ravel() for p in places), action)

    def read_asynchronously(self, memory: CheckedMemory, region: tuple[Any, ...], thread: Thread) -> None:
        """Check that elements read asynchronously are defined, and that their writes were fenced and are known."""
        if not memory.written[region].all():
            hole = np.argwhere(~memory.written[region])[0][1:] + [s.start for s in region[1:]]
            raise InternalError(f"undefined: thread {thread.number} reads {memory.buffer.name}{hole.tolist()}")
        self.require_apart(memory, region, "read")
        pairs = np.stack([memory.writers[region].ravel(), memory.fence_counts[region].ravel()])
        for writer, count in np.unique(pairs[:, pairs[0] > 0], axis=1).T.tolist():
            fences = self.fences.get(writer - 1, [])
            warp = thread.number // WARP
            mine = writer - 1 == thread.number
            if len(fences) <= count or not (mine or fences[count] < self.known[warp, (writer - 1) // WARP]):
                found = np.argwhere(memory.writers[region] == writer)[0][1:] + [s.start for s in region[1:]]
                raise InternalError(
                    f"fence: thread {thread.number} relies on {memory.buffer.name}{found.tolist()}, which thread"
                    f" {writer - 1} wrote, with no fence and barrier between"
                )

    # --- products of warpgroups ----------------------------------------------------------------------------------

    def group_call(self, s: Invoke, warps: Sequence[Warp]) -> None:
        """Execute a collective intrinsic of a warpgroup other than a product."""
        state, number = self.products[warps[0].number // 4], warps[0].number // 4
        clock = self.clock_of_group(number)
        match s.name:
            case intrinsics.WGMMA_FENCE:
                state.fenced = True
            case intrinsics.WGMMA_COMMIT:
                state.closed += 1
                self.launched.turns[clock] += 1
            case intrinsics.WGMMA_WAIT:
                state.fenced = False
                done = state.closed - s.attributes[0]
                for w in warps:
                    self.known[w.number, clock] = max(self.known[w.number, clock], done)
                for sums in [x for x in state.sums if x.group < done]:
                    _give_back(sums)
                    state.sums.remove(sums)

    def multiply(self, s: Invoke, warps: Sequence[Warp], views: Sequence[Sequence[View]], more: bool) -> None:
        """Execute a `wgmma`. views: the operands of each thread. more: whether to add to the sums."""
        known, threads = INTRINSICS[s.name], [t for w in warps for t in w.threads]
        atom, number = ATOMS[known.atom], warps[0].number // 4
        state = self.products[number]
        if not state.fenced:
            raise InternalError(f"products of warpgroup {number} follow a wait without {intrinsics.WGMMA_FENCE}")
        factors = []
        for n in (1, 2):
            if n not in known.described:
                fragment = fragment_of(atom.operands[n])
                factors.append(fragment.gather([v[n] for v in views]))
                continue
            memory, where = views[0][n]
            if any(tuple(map(int, v[n][1])) != tuple(map(int, where)) for v in views):
                raise InternalError(f"threads of a warpgroup disagree about {memory.buffer.name} at {s.name}")
            factors.append(self.matrix(memory, where, n, s, threads, number))
        total = fragment_of(atom.operands[0])
        mine = [v[0] for v in views]
        found = next((x for x in state.sums if x.views[0][0] is mine[0][0] and x.views[0][1] == mine[0][1]), None)
        sums = total.gather(mine) if more and found is None else found.total if found is not None else None
        if sums is None or not more:
            sums = np.zeros((atom.operands[0].rows, atom.operands[0].columns))
        left, right = factors
        with np.errstate(all="ignore"):
            for k in range(left.shape[1]):
                sums = sums + left[:, k, np.newaxis] * right[:, k]
            sums = decode(encode(sums, atom.operands[0].dtype), atom.operands[0].dtype)
        if found is None:
            found = _Sums(mine, known.atom, sums, 0)
            state.sums.append(found)
        found.total, found.group = sums, state.closed
        for memory, where in mine:
            memory.written[_registers(where, total.span)] = False

    def matrix(
        self, memory: CheckedMemory, where: tuple[Value, ...], n: int, s: Invoke, threads: list[Thread], number: int
    ) -> Array:
        """Read a factor from shared memory, as a matrix with rows of M or N and columns of K."""
        known = INTRINSICS[s.name]
        operand, starts = ATOMS[known.atom].operands[n], [int(i) for i in where]
        lasts = [operand.rows, operand.columns]
        if n in known.across:
            width = memory.buffer.shape[-1]
            lasts = [-(-operand.rows // width), operand.columns, min(operand.rows, width)]
        counts = [1] * (len(starts) - len(lasts)) + lasts
        region = (slice(0, 1), *(slice(i, i + c) for i, c in zip(starts, counts, strict=True)))
        for d, part in enumerate(region[1:]):
            if part.stop > memory.buffer.shape[d]:
                raise InternalError(f"out of bounds: {s.name} reads {memory.buffer.name} beyond dimension {d}")
        for t in threads[::WARP]:
            self.launched.select(t)
            self.read_asynchronously(memory, region, t)
        clock = self.clock_of_group(number)
        self.span(memory, region, clock, "read", f"the products of warpgroup {number}")
        values = memory.data[region].reshape(lasts)
        if n in known.across:
            values = values.transpose(0, 2, 1).reshape(operand.rows, operand.columns)
        if operand.dtype.is_float and operand.dtype.bits == 32:
            return decode(np.ascontiguousarray(values).ravel(), operand.dtype).reshape(values.shape)
        return values.astype(np.float64 if operand.dtype.is_float else np.int64)


def _places_of(m: TensorMap, here: Sequence[slice]) -> tuple[Array, ...]:
    """The buffer indices of the elements in the slices `here` of the tensor, whose dimensions may be the map's own."""
    places = [p.ravel() for p in np.meshgrid(*(np.arange(s.start, s.stop) for s in here), indexing="ij")]
    if not m.dimensions:
        return tuple(places)
    rest = sum((p * s for p, s in zip(places, m.strides, strict=True)), np.zeros((), np.int64))
    found = [np.zeros_like(rest)] * len(m.buffer.shape)
    for d in sorted(range(len(found)), key=lambda d: -m.buffer.strides[d]):
        if m.buffer.strides[d] and m.buffer.shape[d] > 1:
            found[d], rest = np.divmod(rest, m.buffer.strides[d])
    return tuple(found)


def _registers(where: tuple[Value, ...], span: Array) -> tuple[Any, ...]:
    """The position in `CheckedMemory.data` of the registers `span` from `where` on."""
    return (0, *where[:-1], where[-1] + span)


def _give_back(sums: _Sums) -> None:
    """Write finished sums to their registers, after checking that nothing has written these meanwhile."""
    fragment = fragment_of(ATOMS[sums.atom].operands[0])
    for thread, (memory, where) in enumerate(sums.views):
        if memory.written[_registers(where, fragment.span)].any():
            raise InternalError(
                f"touched: thread {thread} of a warpgroup writes {memory.buffer.name},"
                " sums of a product that it has not waited for"
            )
    fragment.scatter(sums.views, sums.total)


def thread_call(machine: Interpreter, s: Invoke) -> Run:
    """A function that executes an intrinsic of `is_thread_call` in the current thread."""
    views = [(b.name, [machine.expr(i) for i in where]) for b, where in s.operands]
    values = [machine.expr(e) for e in s.values]

    def run() -> None:
        thread, state = machine.thread, machine.asynchronous
        found = [(machine.memory[name], tuple([i() for i in where])) for name, where in views]
        match s.name:
            case intrinsics.BARRIER_INIT:
                state.init(found[0], s.attributes[0], thread)
            case intrinsics.BARRIER_ARRIVE:
                state.arrive(state.barrier(found[0], thread), 0, thread)
            case intrinsics.BARRIER_ARRIVE_CLUSTER:
                block = int(values[0]())
                state.reach_block(block, thread)
                state.arrive(state.barrier(found[0], thread, block=block), 0, thread)
            case intrinsics.BARRIER_EXPECT:
                state.arrive(state.barrier(found[0], thread, by_copy=True), s.attributes[0], thread)
            case intrinsics.FENCE_ASYNC | intrinsics.FENCE_BARRIER_INIT:
                turn = state.launched.turns[thread.number // WARP]
                if s.name == intrinsics.FENCE_ASYNC:
                    state.fences.setdefault(thread.number, []).append(turn)
                for b in state.barriers.values():
                    if b.maker == thread.number and b.fenced < 0:
                        b.fenced = turn
            case intrinsics.BULK_COMMIT:
                clock = state.clock_of_stores(thread.number // WARP)
                state.launched.turns[clock] += 1
                state.boxes.setdefault(thread.number, []).append(state.launched.turns[clock])
            case intrinsics.BULK_WAIT:
                state.wait_boxes(s.attributes[0], thread)
            case _ if s.name in intrinsics.TMA_LOADS:
                state.load(found, state.maps[s.attributes[0]], thread)
            case _ if s.name in intrinsics.TMA_MULTICASTS:
                state.load(found, state.maps[s.attributes[0]], thread, s.attributes[1])
            case _:
                state.store(found, state.maps[s.attributes[0]], thread)

    return run
