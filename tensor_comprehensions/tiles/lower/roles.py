"""Gather the code of each role, i.e. of some warpgroups, and insert waits for asynchronous products.

Roles synchronize only by barriers in memory, so `for (...) { if (role) ... }` can become `if (role) for (...)`.
Products of warpgroups are asynchronous; waits are inserted before their registers are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ...core.errors import ArgumentError
from ...loop_ir.nodes import Space
from .. import specs
from ..builder.tile_views import MemoryView, Operand, RegisterFragment, WarpgroupPlan
from .warpgroup_products import thread_range

Threads = tuple[int, int]
"""A range of threads: (first, count)."""


def arrange_roles(program: specs.Program, registers: int) -> specs.Program:
    """The program with shared memory and barriers first, contiguous code for each role, and waits for products.

    registers: the registers of an SM. Raises ArgumentError if roles overlap, or need more registers.
    """
    found = dict.fromkeys(t for t in _list_node_threads(program.body, program.threads) if t is not None)
    if not found and not any(isinstance(n, specs.MakeBarriers) for n in every_node(program.body)):
        return replace(program, body=tuple(_insert_product_waits(program.body, [])[0]))
    ordered = sorted(found)
    for a, b in pairwise(ordered):
        if sum(a) > b[0]:
            raise ArgumentError(
                "roles overlap",
                expected="the same threads, or others",
                found=f"threads {_print_thread_range(a)} and {_print_thread_range(b)}",
            )
    _check_registers(program, ordered, registers)
    top = sorted(
        (n for n in every_node(program.body) if _is_shared_allocation(n)),
        key=lambda n: isinstance(n, specs.MakeBarriers),
    )
    rest = _arrange_roles(_drop_top(program.body), program.threads, ordered)
    return replace(program, body=(*top, *_insert_product_waits(rest, [])[0]))


def role_of_tile(x: RegisterFragment, threads: int) -> Threads | None:
    """The threads that hold a tile; None if it is distributed over all threads of the block, or over groups."""
    return x.spread if x.group is None and x.spread != (0, threads) else None


def _print_thread_range(t: Threads) -> str:
    return f"{t[0]} to {sum(t) - 1}"


def _is_shared_allocation(n: specs.Node) -> bool:
    shared = isinstance(n, specs.Allocate) and isinstance(n.tile, MemoryView) and n.tile.buffer.space is Space.SHARED
    return shared or isinstance(n, specs.MakeBarriers)


def every_node(nodes: Sequence[specs.Node]) -> Iterator[specs.Node]:
    """All nodes in preorder, including those in bodies of other nodes and in decompositions of specs."""
    for n in nodes:
        yield n
        if isinstance(n, (*specs.BODIES, specs.Spec)):
            yield from every_node(n.body)


def _drop_top(nodes: Sequence[specs.Node]) -> list[specs.Node]:
    """The nodes without allocations of shared memory and barriers, which belong to the top of the program."""
    return [
        replace(n, body=tuple(_drop_top(n.body))) if isinstance(n, (*specs.BODIES, specs.Spec)) else n
        for n in nodes
        if not _is_shared_allocation(n)
    ]


def _list_node_threads(nodes: Sequence[specs.Node], threads: int) -> Iterator[Threads | None]:
    """The threads that execute each node; None for all threads of the block."""
    for n in nodes:
        match n:
            case specs.Role():
                yield thread_range(n.threads)
            case specs.Loop() | specs.When() | specs.Let():
                yield from _list_node_threads(n.body, threads)
            case specs.Allocate(RegisterFragment() as tile):
                if tile.group is None:
                    yield role_of_tile(tile, threads)
            case specs.Spec():
                found = thread_range(n.threads)
                yield found if found is not None and found != (0, threads) else None
            case _ if not _is_shared_allocation(n):
                yield None


def _arrange_roles(nodes: Sequence[specs.Node], threads: int, roles: Sequence[Threads]) -> list[specs.Node]:
    found: list[specs.Node] = []
    run: list[specs.Node] = []
    if any(None in _list_node_threads([n], threads) for n in nodes):  # tiles must outlive nodes of all threads
        found = [n for n in nodes if isinstance(n, specs.Allocate)]
        nodes = [n for n in nodes if not isinstance(n, specs.Allocate)]
    for n in nodes:
        own = set(_list_node_threads([n], threads))
        if None not in own:
            run.append(n)
            continue
        found += _by_role(run, threads, roles)
        run = []
        if isinstance(n, (specs.Loop, specs.When, specs.Let)) and own != {None}:
            n = replace(n, body=tuple(_arrange_roles(n.body, threads, roles)))
        found.append(n)
    return found + _by_role(run, threads, roles)


def _by_role(run: Sequence[specs.Node], threads: int, roles: Sequence[Threads]) -> list[specs.Node]:
    """A role with the part that it executes of consecutive nodes, for each role in order."""
    found: list[specs.Node] = []
    for role in roles:
        body = _project_role(run, threads, role)
        if not body:
            continue
        named = [n for n in every_node(run) if isinstance(n, specs.Role) and thread_range(n.threads) == role]
        own = [n.threads for n in named]
        own += [n.threads for n in every_node(body) if isinstance(n, specs.Spec) and thread_range(n.threads) == role]
        if own:  # otherwise, the body only allocates tiles
            found.append(specs.Role(own[0], max((n.registers for n in named), default=0), tuple(body)))
    return found


def _project_role(nodes: Sequence[specs.Node], threads: int, role: Threads) -> list[specs.Node]:
    found: list[specs.Node] = []
    for n in nodes:
        match n:
            case specs.Role():
                if thread_range(n.threads) == role:
                    found += n.body
            case specs.Loop() | specs.When() | specs.Let():
                if body := _project_role(n.body, threads, role):
                    found.append(replace(n, body=tuple(body)))
            case specs.Allocate(RegisterFragment() as tile) if tile.group is not None:
                found.append(n)
            case _ if role in set(_list_node_threads([n], threads)):
                found.append(n)
    return found


def _check_registers(program: specs.Program, roles: Sequence[Threads], available: int) -> None:
    """Raise ArgumentError if roles need more registers than an SM has, or if only some declare registers."""
    most: dict[Threads, int] = {}
    for n in every_node(program.body):
        if isinstance(n, specs.Role) and n.registers:
            role = thread_range(n.threads)
            assert role is not None
            most[role] = max(n.registers, most.get(role, 0))
    total = sum(role[1] * n for role, n in most.items())
    if total > available:
        raise ArgumentError(f"roles ask for {total:,} of {available:,} registers")
    if most and (set(most) != set(roles) or sum(r[1] for r in roles) != program.threads):
        raise ArgumentError(
            "some warpgroups have registers= and others not", expected="registers= in all roles, which are all threads",
            found=", ".join(f"threads {_print_thread_range(r)}" for r in most),
        )  # fmt: skip


# --- waits for products ------------------------------------------------------------------------------------------

Pending = list[frozenset[str]]
"""The names of register buffers that each pending group of products may use, the latest group first."""
MOST_PENDING = 8
"""The maximum number of groups that are distinguished; older ones are merged."""


def is_group_product(n: specs.Node) -> bool:
    """Whether a node is a product by warpgroups."""
    if not isinstance(n, specs.MatMul):
        return False
    (total,) = n.outputs
    return isinstance(total, RegisterFragment) and isinstance(total.product, WarpgroupPlan)


def is_warpgroup_node(n: specs.Node) -> bool:
    """Whether the lowering of a node needs the warpgroup index."""
    return isinstance(n, specs.Role) or is_group_product(n)


def _insert_product_waits(nodes: Sequence[specs.Node], pending: Pending) -> tuple[list[specs.Node], Pending]:
    found: list[specs.Node] = []
    for n in nodes:
        late = _first_conflict(n, pending)
        if late is not None:
            found.append(specs.WaitProducts(late))
            pending = pending[:late]
        match n:
            case specs.WaitProducts(groups):
                pending = pending[:groups]
            case specs.Role():
                body, left = _insert_product_waits(n.body, [])
                n = replace(n, body=(*body, *([specs.WaitProducts(0)] if left else [])))
            case specs.Loop():
                entry: Pending = pending
                body, left = _insert_product_waits(n.body, entry)
                while (merged := _merge_pending(_merge_pending(pending, left), entry)) != entry:
                    entry = merged
                    body, left = _insert_product_waits(n.body, entry)
                n, pending = replace(n, body=tuple(body)), _merge_pending(pending, left)
            case specs.When() | specs.Let() | specs.One():
                body, left = _insert_product_waits(n.body, pending)
                pending = _merge_pending(pending, left) if isinstance(n, specs.When) else left
                n = replace(n, body=tuple(body))
            case specs.Spec(body=by_hand) if by_hand:
                body, pending = _insert_product_waits(by_hand, pending)
                n = replace(n, body=tuple(body))
            case specs.Spec():
                if is_group_product(n):
                    pending = _merge_pending([_collect_register_buffers((*n.outputs, *n.inputs)), *pending], [])
        found.append(n)
    return found, pending


def _first_conflict(n: specs.Node, pending: Pending) -> int | None:
    """The index of the latest pending group whose registers a node, or its body, uses other than by products.

    The wait comes before a branch or loop, not inside, so that the assembler sees a single point where products end.
    """
    holds = isinstance(n, (*specs.BODIES, specs.Spec)) and bool(n.body)
    inner = list(every_node(n.body)) if holds else [n]  # type: ignore[union-attr]
    plain = [s for s in inner if isinstance(s, specs.Spec) and not is_group_product(s)]
    used = frozenset().union(*(_collect_register_buffers((*s.outputs, *s.inputs)) for s in plain))
    return next((k for k, group in enumerate(pending) if group & used), None)


def _collect_register_buffers(operands: Sequence[Operand]) -> frozenset[str]:
    return frozenset(x.buffer.name for x in operands if isinstance(x, RegisterFragment))


def _merge_pending(a: Pending, b: Pending) -> Pending:
    """The groups that may be pending after either of two branches; those beyond `MOST_PENDING` are merged."""
    longest = max(len(a), len(b))
    found = [(a[k] if k < len(a) else frozenset()) | (b[k] if k < len(b) else frozenset()) for k in range(longest)]
    older: frozenset[str] = frozenset().union(*found[MOST_PENDING - 1 :])
    return found if longest <= MOST_PENDING else [*found[: MOST_PENDING - 1], older]
