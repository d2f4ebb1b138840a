"""Control flow of the builder: loops, branches, synchronization, and pipelines of copies and computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...core.errors import ArgumentError
from ...loop_ir import build
from ...loop_ir.atoms import WARP, WARPGROUP
from ...loop_ir.nodes import Space
from .. import specs
from ..lower.roles import every_node, is_group_product
from ..lower.warpgroup_products import WARPGROUP_INDEX, thread_range
from ..tensors import ThreadTensor
from .barriers import Barrier
from .indices import Index, PhaseParity, to_condition
from .tile_views import DynamicIndexError, MemoryView
from .warp_role_builder import WarpRoleBuilder, role_registers

FillOrUse = Callable[[Any, Any], Any]
"""A function of (stage, step) that fills or uses a stage of a ring."""


class ControlFlowBuilder(WarpRoleBuilder):
    """Builder methods for synchronization, loops, conditions and pipelines."""

    # --- order ---------------------------------------------------------------------------------------------------

    def sync(self, threads: ThreadTensor | None = None) -> None:
        """Synchronize all threads of the block, or only `threads`, so that they see each other's stores."""
        if threads is None:
            if self._role is not None or self._one:
                raise ArgumentError("not all threads of the block come here", expected="k.sync(threads of the role)")
            self._add(specs.Sync())
            return
        found = thread_range(threads) if isinstance(threads, ThreadTensor) else None
        if found is None or found[1] % WARP or self._one:
            raise ArgumentError("no part of a block meets here", expected="whole warps, neighbors", found=str(threads))
        self._add(specs.Sync() if found == (0, self.num_threads) else specs.SyncPart(found))

    def commit(self) -> None:
        """Make the asynchronous copies started since the last commit a group (`cp.async.commit_group`)."""
        self._add(specs.Commit())

    def wait_copies(self, groups: int = 0) -> None:
        """Wait until at most `groups` groups of copies are pending."""
        if type(groups) is not int or groups < 0:
            raise ArgumentError("cannot wait for copies", expected="a number of groups, 0 or more", found=repr(groups))
        self._add(specs.WaitCopies(groups))

    def loop(self, count: int) -> Iterator[Index]:
        """`for i in k.loop(n)`: a loop whose body is traced once and runs n times."""
        if type(count) is not int or count < 0:
            raise ArgumentError("cannot loop", expected="a number of steps, 0 or more", found=repr(count))
        for var in self._loop(count, "k.loop"):
            yield Index(var)

    @contextmanager
    def when(self, condition: object) -> Iterator[None]:
        """`with k.when(condition)`: the body runs only if a condition on indices holds."""
        found = to_condition(condition)
        with self._collect_body("k.when", lambda body: specs.When(found, body)):
            yield

    def ring(
        self, count: int | Index, depth: int, fill: FillOrUse, use: FillOrUse, *, load: ThreadTensor | None = None,
        first: Callable[[], Any] | None = None, lead: int = 0,
    ) -> None:  # fmt: skip
        """A pipeline of `count` steps with `depth` stages: copies into some stages overlap the use of another.

        `fill(stage, step)` moves tiles to shared memory; `use(stage, step)` computes with them. Each step syncs once.

        Args:
            load: the producer warpgroup, one thread of which starts the copies (TMA); the others consume them.
            first: a function that moves tiles which all steps use.
            lead: the number of steps by which the first of two consumer warpgroups is ahead of the second, so that the
                epilogue of each overlaps products of the other.
        """
        if type(depth) is not int or depth < 2:
            raise ArgumentError(
                "a ring needs stages to fill and to use", expected="a depth of 2 or more", found=str(depth)
            )
        if not callable(fill) or not callable(use) or not (first is None or callable(first)):
            raise ArgumentError(
                "a ring is filled and used by functions", expected="fill(stage, step) and use(stage, step)",
                found=f"{type(fill).__name__} and {type(use).__name__}",
            )  # fmt: skip
        if load is not None:
            self._ring_of_roles(count, depth, fill, use, load, first, lead)
            return
        if lead:
            raise ArgumentError("only warpgroups of a role lead", expected="lead=0, or load=")
        if not isinstance(count, Index) and (type(count) is not int or count < 0):
            raise ArgumentError("cannot loop", expected="a number of steps, 0 or more", found=repr(count))
        if self._used_ring or self._depth:
            self.sync()  # all threads have finished reading the last ring
        self._used_ring = True
        if first is not None:
            first()
        for step in range(depth - 1):
            self._fill_existing(step, count, step, fill)
            self.commit()
        if isinstance(count, Index):
            for var in self._loop(count.expr, "k.ring"):
                self._ring_step(Index(var), count, depth, fill, use)
            return
        known = len(self._body), dict(self._taken)
        left = self._left
        try:
            for number in self.loop(count):
                self._ring_step(number, count, depth, fill, use)
        except DynamicIndexError:
            del self._body[known[0] :]
            self._taken, self._left = known[1], left
            for n in range(count):
                self._ring_step(n, count, depth, fill, use)

    def _ring_step(self, step: Any, count: int | Index, depth: int, fill: FillOrUse, use: FillOrUse) -> None:
        self.wait_copies(depth - 2)
        self.sync()
        ahead = step + (depth - 1)
        self._fill_existing(ahead, count, ahead % depth, fill)
        self.commit()
        use(step % depth, step)

    def _fill_existing(self, step: Any, count: int | Index, stage: Any, fill: FillOrUse) -> None:
        """Fill a stage for `step` if it is below `count`."""
        inside: Any = step < count
        if isinstance(inside, Index):
            with self.when(inside):
                fill(stage, step)
        elif inside:
            fill(stage, step)

    def _ring_of_roles(
        self, count: int | Index, depth: int, fill: FillOrUse, use: FillOrUse, load: ThreadTensor,
        first: Callable[[], Any] | None, lead: int,
    ) -> None:  # fmt: skip
        math = self._other_warpgroups(load)
        groups = math.size // WARPGROUP
        if lead and (groups != 2 or type(count) is not int or not 0 < lead <= min(depth, count)):
            raise ArgumentError(
                f"no warpgroup leads by {lead} steps",
                expected="two that use a ring, and as many steps and stages, or more",
            )
        loading, computing = role_registers(groups, self.cluster) if load.size == WARPGROUP else (0, 0)
        full = self.barriers("full", depth, 1)
        empty = self.barriers("empty", depth, groups, everywhere=self.cluster > 1)
        begun = self.barriers("begun", 1, 1) if first is not None else None
        ended = self.barriers("ended", 1, groups) if begun is not None and self._iterations else None
        led = self.barriers("led", 1, 1) if lead else None
        leader = (thread_range(math) or (0, 0))[0] // WARPGROUP
        parity = PhaseParity(build.mod(self._count_enclosing_steps(), 2))
        with self.role(load, registers=loading), self.one():
            if begun is not None and first is not None:
                if ended is not None:
                    self.wait(ended[0], parity ^ 1)
                self._fill_for(begun[0], first)
            for i in self.steps(count, depth):
                self.wait(empty[i.stage], i.phase ^ 1)
                self._fill_for(full[i.stage], partial(fill, i.stage, i))
        with self.role(math, registers=computing):
            if begun is not None:
                self.wait(begun[0], parity)
            if led is not None:
                with self._when_group(leader + 1):
                    self.wait(led[0], parity)
            for i in self.steps(count, depth):
                self.wait(full[i.stage], i.phase)
                before = len(self._body)
                use(i.stage, i)
                if any(map(_reads_shared, every_node(self._body[before:]))):
                    self.sync(math)  # one thread of a warpgroup arrives for all of it
                self.release(empty, i, after=1)
                if led is not None:
                    with self._when_group(leader), self.when(i.equals(lead - 1)):
                        self.arrive(led[0])
            if ended is not None:
                self.arrive(ended[0])

    @contextmanager
    def _when_group(self, number: int) -> Iterator[None]:
        """The body runs only in the warpgroup with index `number`."""
        condition = build.eq(build.var(WARPGROUP_INDEX), number)
        with self._collect_body("k.ring", lambda body: specs.When(condition, body)):
            yield

    def _fill_for(self, barrier: Barrier, fill: Callable[[], Any]) -> None:
        """Trace the copies of `fill`; `barrier` expects their bytes."""
        self._done = barrier
        try:
            copies = self._trace_nodes(fill)
        finally:
            self._done = None
        moves = [n.outputs[0] for n in every_node(copies) if isinstance(n, specs.Move) and n.done is barrier]
        filled = {(x.buffer.name, x.tensor.offset): x for x in moves if isinstance(x, MemoryView)}
        self.expect(barrier, *filled.values())  # count a tile once even if several branches fill it
        for n in copies:
            self._add(n)

    def _other_warpgroups(self, load: object) -> ThreadTensor:
        """The warpgroups other than the role `load`. Raises ArgumentError unless all are on one side of it."""
        found = thread_range(load) if isinstance(load, ThreadTensor) else None
        total = self.num_threads
        if found is None or total % WARPGROUP or any(n % WARPGROUP for n in found) or found[1] == total:
            raise ArgumentError("a ring is loaded by a warpgroup, others use it", expected="a role", found=str(load))
        before, after = found[0] // WARPGROUP, (total - sum(found)) // WARPGROUP
        if before and after:
            raise ArgumentError("the role that loads is between others", expected="the first, or the last warpgroup")
        parts = self.threads(total).tile(WARPGROUP).split(*(n for n in (before, found[1] // WARPGROUP, after) if n))
        return parts[0] if before else parts[1]


def _reads_shared(n: specs.Node) -> bool:
    """Whether threads read shared memory themselves, i.e. not through warpgroup products."""
    if not isinstance(n, specs.Spec) or is_group_product(n):
        return False
    return any(isinstance(x, MemoryView) and x.buffer.space is Space.SHARED for x in n.inputs)
