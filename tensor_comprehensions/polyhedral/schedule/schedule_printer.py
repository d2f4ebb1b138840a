"""Print a schedule as an indented schedule tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..scop.scop import ScopStatement, node_name
from .legality import ScheduledGroup
from .loop_nest import LoopNest, NestDim
from .shared_rows import BandMember


def format_schedule(
    plan: Sequence[ScheduledGroup], pipeline: Callable[[ScheduledGroup, ScopStatement], object]
) -> Iterator[str]:
    """The lines of a schedule tree: domain, sequence of bands, their tiles, their leaves.

    pipeline: returns the schedule of a contraction, or of a group's only statement; None if it cannot be expressed.
    """
    nodes = [n for s in plan for n in s.group.nodes]
    yield "domain: " + "; ".join(
        f"{n.name}[{', '.join(f'{i.lower} <= {i.name} < {i.upper}' for i in (*n.free, *n.reduction_indices))}]"
        for n in nodes
    )
    indent = "  "
    if len(plan) > 1:
        yield "sequence:"
    for scheduled in plan:
        if len(plan) > 1:
            yield f"  filter: {', '.join(n.name for n in scheduled.group.nodes)}"
            indent = "    "
        yield from (indent + line for line in _print_group(scheduled, pipeline))


def _print_group(
    scheduled: ScheduledGroup, pipeline: Callable[[ScheduledGroup, ScopStatement], object]
) -> Iterator[str]:
    group = scheduled.group
    rows = [_print_row(r, size) for r, size in zip(group.rows, scheduled.sizes, strict=True)]
    if group.serial is not None:
        rows[group.serial] += " one after another"
    yield f"band: {', '.join(rows) or 'none'} (coincident)"
    if len(scheduled.leaves) > 1:
        yield "  sequence:"
    for leaf in scheduled.leaves:
        yield from ("    " + line for line in _print_leaf(leaf))
        for node in leaf.nodes:
            how = pipeline(scheduled, node)
            if how is not None:
                yield f"      {node.name}: {how}"


def _print_row(row: BandMember, size: int) -> str:
    places = ", ".join(f"{node}.{index}" + (f" + {shift}" if shift else "") for node, (index, shift) in row.places)
    return f"[{places}] in {row.lower}:{row.upper}" + (f" tile {size}" if size < row.extent else " whole")


def _print_leaf(leaf: LoopNest) -> Iterator[str]:
    yield f"band: {', '.join(_print_dim(d) for d in leaf.dims) or 'none'}"
    for node in leaf.nodes:
        for s in node.statements:
            update = f" {s.reduction}=" + ("!" if s.initialize else "") if s.reduction else " ="
            where = f" where {' and '.join(map(str, s.domain))}" if s.domain else ""
            yield f"  {node_name(s)}: {s.target}{update}{where}"


def _print_dim(dim: NestDim) -> str:
    return f"{dim.name} in {dim.lower}:{dim.upper} {dim.kind.value}"
