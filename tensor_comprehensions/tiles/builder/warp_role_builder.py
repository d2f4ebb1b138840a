"""Builder methods for warp specialization: roles, barriers in shared memory, and persistent loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

from ...core.errors import ArgumentError
from ...layouts.layout import flatten_tuple
from ...loop_ir import build
from ...loop_ir.atoms import WARP, WARPGROUP
from ...loop_ir.nodes import BLOCK, Expr, Space
from .. import specs
from ..lower.warpgroup_products import thread_range
from ..notation import threads as parse_threads
from ..tensors import ThreadTensor
from .barriers import Barrier, BarrierArray
from .indices import Index, PipelineStep, to_index
from .tile_views import MemoryView
from .trace_state import TraceState

BLOCK_ID = build.var(BLOCK[0])
MOST_REGISTERS, REGISTER_STEP = (24, 240), 8
"""The (minimum, maximum) number of registers per thread of a role, and the step."""
DEFAULT_REGISTERS = {1: (0, 0), 2: (48, 232), 3: (56, 152)}
"""Registers per thread of the (loading, computing) role by the number of computing warpgroups; 0: do not change."""
CLUSTER_REGISTERS = {2: (56, 224)}
"""The same in a cluster, where the loading role needs more: with fewer it spills, as addresses depend on the block."""


def role_registers(groups: int, cluster: int) -> tuple[int, int]:
    """The registers per thread of the loading role, and of the `groups` computing warpgroups."""
    default = DEFAULT_REGISTERS.get(groups, (0, 0))
    return CLUSTER_REGISTERS.get(groups, default) if cluster > 1 else default


class WarpRoleBuilder(TraceState):
    """Builder methods for threads, and for roles, barriers and clusters, which need sm_90."""

    def threads(self, count: int) -> ThreadTensor:
        """Set the number of threads of the block, and return them as `[count].thread`."""
        most = self.target.max_threads_per_block
        if type(count) is not int or count % WARP or not 0 < count <= most:
            raise ArgumentError(
                f"{self.name} asks for {count} threads", expected=f"a multiple of {WARP}, at most {most}"
            )
        if self.num_threads not in (0, count):
            raise ArgumentError(
                f"{self.name} asks for {count} threads", expected=f"{self.num_threads}, as it did before"
            )
        self.num_threads = count
        return parse_threads(f"[{count}].thread")

    def clusters(self, blocks: int) -> None:
        """Launch clusters of `blocks` blocks, which compute neighboring rows of tiles in the same column.

        The blocks of a cluster run concurrently, `k.move(multicast=True)` copies to all of them, and arrivals at
        `k.barriers(..., everywhere=True)` count in all. Call it before making barriers and mapping blocks.
        """
        self._check_target("clusters")
        if blocks not in (1, 2, 4, 8) or type(blocks) is not int:
            raise ArgumentError("no cluster has so many blocks", expected="1, 2, 4 or 8", found=repr(blocks))
        if self._mapped or any(isinstance(n, specs.MakeBarriers) for n in self._body):
            raise ArgumentError("k.clusters comes too late", expected="before k.barriers, k.blocks and k.each")
        self.cluster = blocks

    # --- roles ---------------------------------------------------------------------------------------------------

    @contextmanager
    def role(self, threads: ThreadTensor, *, registers: int = 0) -> Iterator[None]:
        """Run the body only in the warpgroups `threads`. registers: per thread from there on; 0 for no change."""
        found = thread_range(threads) if isinstance(threads, ThreadTensor) else None
        if found is None or found[0] % WARPGROUP or found[1] % WARPGROUP:
            raise ArgumentError(
                "a role is whole warpgroups", expected=f"neighbors, from a multiple of {WARPGROUP} on, as many",
                found=str(threads),
            )  # fmt: skip
        low, high = MOST_REGISTERS
        if type(registers) is not int or (registers and (not low <= registers <= high or registers % REGISTER_STEP)):
            raise ArgumentError(
                "a role cannot have so many registers", expected=f"a multiple of {REGISTER_STEP} from {low} to {high}",
                found=str(registers),
            )  # fmt: skip
        self._check_target("roles")
        if self._role is not None:
            raise ArgumentError("a role inside of a role", expected="one after the other")
        self._role = threads
        try:
            with self._collect_body("k.role", lambda body: specs.Role(threads, registers, body)):
                yield
        finally:
            self._role = None

    @contextmanager
    def one(self) -> Iterator[None]:
        """Run the body in only one thread of the role or block."""
        if self._one:
            raise ArgumentError("k.one() inside of k.one()")
        self._check_target("k.one()")
        threads = self._threads(None)
        self._one = True
        try:
            with self._collect_body("k.one", lambda body: specs.One(threads, body)):
                yield
        finally:
            self._one = False

    # --- barriers ------------------------------------------------------------------------------------------------

    def barriers(self, name: str, count: int, arrivals: int, *, everywhere: bool = False) -> BarrierArray:
        """Allocate `count` barriers in shared memory; a phase of each completes after `arrivals` arrivals.

        everywhere: arrivals count in all blocks of the cluster; a phase completes after `arrivals` from each block.
        """
        self._check_target("barriers in memory")
        if not isinstance(name, str) or not name.isidentifier():
            raise ArgumentError("barriers need a name", expected="an identifier", found=repr(name))
        if any(type(n) is not int or n < 1 for n in (count, arrivals)) or count > 64:
            raise ArgumentError(f"cannot make the barriers {name}", expected="1 to 64 of them, of 1 arrival or more")
        if self._role is not None or self._one:
            raise ArgumentError(f"the barriers {name} are made in a role", expected="before it: all know of them")
        made = BarrierArray(self._fresh_name(name), count, arrivals, self.cluster, everywhere)
        self._add(specs.MakeBarriers(made))
        return made

    def expect(self, barrier: Barrier, *tiles: MemoryView) -> None:
        """Arrive, in `k.one()`, and make the phase wait until the bytes of `tiles` have arrived, too."""
        self._check_barrier(barrier)
        if not self._one:
            raise ArgumentError("all threads would expect the same bytes", expected="k.expect in k.one()")
        for x in tiles:
            if not isinstance(x, MemoryView) or x.buffer.space is not Space.SHARED:
                raise ArgumentError("what lands are tiles in shared memory", found=str(x))
        self._add(specs.Expect(barrier, sum(map(tile_bytes, tiles))))

    def wait(self, barrier: Barrier, phase: object) -> None:
        """Wait until the phase with parity `phase` completes; the phase before the first has parity 1."""
        self._check_barrier(barrier)
        self._add(specs.Wait(barrier, to_index(phase, "phases")))

    def arrive(self, barrier: Barrier) -> None:
        """Arrive: once in `k.one()`, else once per warpgroup."""
        self._check_barrier(barrier)
        self._add(specs.Arrive(barrier, self._arriving_threads()))

    def release(self, barriers: BarrierArray, step: PipelineStep, *, after: int = 1) -> None:
        """Wait for all but the last `after` groups of products, and arrive at the barrier of the stage that is free.

        Call it at the end of the body of a `k.steps` loop; the remaining stages are released after the loop.
        """
        inside = isinstance(step, PipelineStep) and bool(self._iterations) and step.expr == self._iterations[-1][0]
        if not isinstance(barriers, BarrierArray) or not inside:
            raise ArgumentError(
                "stages are released by the steps of a loop", expected="k.release(barriers, i), i of k.steps"
            )
        if type(after) is not int or not 0 <= after < step.depth or barriers.count != step.depth:
            raise ArgumentError(
                f"cannot release {barriers} after {after} groups",
                expected=f"{step.depth} barriers, one a stage, and 0 to {step.depth - 1} groups",
            )
        threads = self._arriving_threads()

        def stage(back: int) -> Barrier:
            return barriers[Index(build.mod(build.sub(step.number, back), step.depth))]

        self._add(specs.WaitProducts(after))
        arrive: specs.Node = specs.Arrive(stage(after), threads)
        self._add(specs.When(build.ge(step.expr, after), (arrive,)) if after else arrive)
        if after:
            ending = self._endings[-1]
            ending.append(specs.WaitProducts(0))
            count = self._iterations[-1][1]
            last = self._number(build.sub(count, 1))
            for back in range(after)[::-1]:
                at = Index(build.mod(build.sub(last, back), step.depth))
                arrive = specs.Arrive(barriers[at], threads)
                if not isinstance(count, int):
                    arrive = specs.When(build.gt(count, back), (arrive,))
                if not isinstance(count, int) or count > back:
                    ending.append(arrive)

    def wait_products(self, groups: int = 0) -> None:
        """Wait for all but the last `groups` groups of products of this warpgroup."""
        self._check_target("products of warpgroups")
        if type(groups) is not int or groups < 0:
            raise ArgumentError(
                "cannot wait for products", expected="a number of groups, 0 or more", found=repr(groups)
            )
        self._add(specs.WaitProducts(groups))

    def fence(self) -> None:
        """Make earlier stores visible to TMA copies and warpgroup products after the next barrier."""
        self._check_target("k.fence()")
        self._add(specs.Fence())

    # --- loops ---------------------------------------------------------------------------------------------------

    def steps(self, count: int | Index, depth: int) -> Iterator[PipelineStep]:
        """`for i in k.steps(n, depth)`: a loop whose index has a stage and phase, which continue over outer loops."""
        good = isinstance(count, Index) or (type(count) is int and count >= 0)
        if not good or type(depth) is not int or depth < 1:
            raise ArgumentError(
                "cannot loop", expected="0 steps or more, a depth of 1 or more", found=f"{count}, {depth}"
            )
        if isinstance(count, Index) and self._iterations:
            raise ArgumentError(
                "steps of a loop inside of another count on", expected="a number of steps that the program knows"
            )
        for var in self._loop(count.expr if isinstance(count, Index) else count, "k.steps"):
            yield PipelineStep.of(var, self._number(var), depth)

    def each(self, tensor: MemoryView, *, persistent: bool = False, group: int = 1) -> Iterator[tuple[Index, ...]]:
        """`for m, n in k.each(T, persistent=True)`: loop over the coordinates of tiles in the outermost level of `T`.

        Args:
            persistent: distribute the tiles over one block per SM; otherwise, every block iterates over all tiles.
            group: as in `blocks`.
        """
        sizes = self._outer_sizes(tensor)
        check_group(group)
        if persistent and (self._mapped or self._depth or self._role is not None):
            raise ArgumentError(
                f"cannot map blocks to {tensor}", found="blocks are mapped already, or this is in a loop or role"
            )
        for number in self.share_tiles(tensor.count) if persistent else self._loop(tensor.count, "k.each"):
            found = tile_coordinates(number, sizes, group, self.cluster)
            names = tuple((self._fresh_name(f"tile_{n}"), e) for n, e in enumerate(found))
            with self.bind_names(names):
                yield tuple(Index(build.var(name)) for name, _ in names)

    def share_tiles(self, total: int) -> Iterator[Expr]:
        """Loop over the indices of the tiles of this block, when one block per SM shares `total` tiles."""
        self._mapped = True
        if total % self.cluster:
            raise ArgumentError(f"{total} tiles are no whole clusters", expected=f"a multiple of {self.cluster}")
        blocks = self.num_blocks = min(total, max(1, self.target.num_sms // self.cluster) * self.cluster)
        left = build.sub(total - 1 + blocks, BLOCK_ID)
        stop = total // blocks if total % blocks == 0 else build.div(left, blocks)
        for var in self._loop(stop, "k.each"):
            yield build.add(build.mul(var, blocks), BLOCK_ID)

    @contextmanager
    def bind_names(self, names: Sequence[tuple[str, Expr]]) -> Iterator[None]:
        """Bind `names` to expressions in the body."""
        with self._collect_body("k.each", partial(specs.Let, tuple(names))):
            yield

    def _loop(self, stop: int | Expr, what: str) -> Iterator[Expr]:
        """Trace the body of a loop once; `what` names the method in errors."""
        var = self._fresh_name("i")
        self._depth += 1
        self._iterations.append((build.var(var), stop))
        self._endings.append([])
        try:
            with self._collect_body(what, lambda body: specs.Loop(var, stop, body)):
                yield build.var(var)
        finally:
            self._depth -= 1
            ending = self._endings.pop()
            self._iterations.pop()
        for node in ending:
            self._add(node)

    def _number(self, step: Expr) -> Expr:
        """The index of a step of the innermost loop, counted over the iterations of enclosing loops."""
        count = self._iterations[-1][1]
        return build.add(build.mul(self._count_enclosing_steps(len(self._iterations) - 1), count), step)

    def _count_enclosing_steps(self, loops: int | None = None) -> Expr:
        """The number of iterations so far of the enclosing loops, or of the outermost `loops` of them."""
        number: Expr = build.const(0)
        for var, stop in self._iterations[:loops]:
            number = build.add(build.mul(number, stop), var)
        return number

    # --- helpers -------------------------------------------------------------------------------------------------

    def _outer_sizes(self, tensor: MemoryView) -> list[int]:
        """The sizes of the outer level of a tiled tensor. Raises ArgumentError if it is not tiled."""
        if not isinstance(tensor, MemoryView) or len(tensor.tensor.parts) < 2:
            raise ArgumentError(f"cannot map blocks to {tensor}", expected="a tiled tensor", found=str(tensor))
        outer = tensor.tensor.parts[0]
        return [n.size for n, whole in zip(outer.layouts[0].modes, outer.whole, strict=True) if not whole]

    def _arriving_threads(self) -> ThreadTensor | None:
        """The threads, of which one per warpgroup arrives; None in `k.one()`, where the current thread arrives."""
        if self._one:
            return None
        threads = self._threads(None)
        found = thread_range(threads)
        if found is None or found[1] % WARPGROUP:
            raise ArgumentError(f"{threads} are no whole warpgroups", expected="k.arrive in k.one(), or in a role")
        return threads

    def _check_barrier(self, barrier: object) -> None:
        if not isinstance(barrier, Barrier):
            raise ArgumentError("this is no barrier", expected="one of k.barriers: full[i.stage]", found=repr(barrier))

    def _check_target(self, what: str) -> None:
        if self.target.capability != 90:
            raise ArgumentError(f"{what} need sm_90", found=self.target.name)

    def _trace_nodes(self, write: Callable[[], Any]) -> list[specs.Node]:
        """The nodes that `write` traces, without adding them to the program."""
        outer, self._body = self._body, []
        try:
            write()
            return self._body
        finally:
            self._body = outer


def check_group(group: object) -> None:
    """Raise ArgumentError unless `group` is a valid number of tile rows."""
    if type(group) is not int or group < 1:
        raise ArgumentError("cannot walk over tiles", expected="group= rows of tiles, 1 or more", found=repr(group))


def rows_together(rows: int, group: int, cluster: int) -> int:
    """The number of tile rows visited together: the largest divisor of `rows` that is a multiple of `cluster` and at
    most `group` (or `cluster`, if larger).

    Raises:
        ArgumentError: there is no such number.
    """
    for n in range(min(max(group, cluster), rows), 0, -1):
        if rows % n == 0 and n % cluster == 0:
            return n
    raise ArgumentError(f"{rows} rows of tiles are no whole clusters", expected=f"a multiple of {cluster}")


def tile_coordinates(number: Expr, sizes: Sequence[int], group: int, cluster: int = 1) -> list[Expr]:
    """The coordinates of the tile with index `number`; about `group` rows of tiles are visited together."""
    if cluster > 1 and len(sizes) != 2:
        raise ArgumentError("blocks of a cluster compute rows of tiles", expected="rows and columns of tiles")
    if len(sizes) == 2 and (group > 1 or cluster > 1):
        rows = rows_together(sizes[0], group, cluster)
        band, inside = build.div(number, rows * sizes[1]), build.mod(number, rows * sizes[1])
        return [build.add(build.mul(band, rows), build.mod(inside, rows)), build.div(inside, rows)]
    found: list[Expr] = []
    for size in reversed(sizes):
        found.insert(0, build.mod(number, size) if len(found) + 1 < len(sizes) else number)
        number = build.div(number, size)
    return found


def tile_bytes(x: MemoryView) -> int:
    """The size of the outermost level of a tile in bytes."""
    return prod(n for size in x.shape for n in flatten_tuple(size)) * x.dtype.size
