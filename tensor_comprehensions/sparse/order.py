"""The order of the loops of a nest: the cheapest of those in which every operand can be walked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from ..errors import CannotLower
from ..tc_lang.formula import Value
from ..tc_lang.function import Access, Index
from .graph import Nest, Path

MAX_PERMUTED = 7
"""Loops up to which all orders are compared: 5040 of them."""
UNKNOWN_EXTENT = 10_000.0
"""Iterations assumed of a loop whose extent only the run decides."""
COMPRESSED_FANOUT, ROOT_FANOUT = 10.0, 1_000.0
"""Coordinates assumed below a parent of a compressed level, and below the root."""

Edges = frozenset[tuple[str, str]]


def order_loops(nest: Nest, result: Path | None = None) -> tuple[str, ...]:
    """The names of the loops, outermost first.

    Args:
        result: the levels of a sparse result that is to be written in its order.

    Raises:
        CannotLower: no order walks every operand from its outermost level inwards.
    """
    paths = (*nest.paths.values(), *([result] if result is not None else []))
    names = tuple(nest.loops)
    edges = frozenset(e for p in paths for e in hard_edges(p))
    best: tuple[float, int] | None = None
    chosen: tuple[str, ...] | None = None
    for rank, order in enumerate(_orders(names, edges)):
        cost = (_cost(order, nest), rank)
        if best is None or cost < best:
            best, chosen = cost, order
    if chosen is None:
        raise CannotLower(f"no order of loops walks all of {', '.join(_spell(p.access) for p in paths)}")
    return chosen


def hard_edges(path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of loops of which the first must be outside: levels of one path that are not both dense."""
    for n, below in enumerate(path.steps):
        for above in path.steps[:n]:
            both_dense = above.level.is_dense and below.level.is_dense
            match above.loop, below.loop:
                case str(first), str(second) if first != second and not both_dense:
                    yield first, second


def _orders(names: Sequence[str], edges: Edges) -> Iterator[tuple[str, ...]]:
    if len(names) > MAX_PERMUTED:
        found = _topological(names, edges)
        if found is not None:
            yield found
        return
    for order in permutations(names):
        place = {n: i for i, n in enumerate(order)}
        if all(place[a] < place[b] for a, b in edges):
            yield order


def _topological(names: Sequence[str], edges: Edges) -> tuple[str, ...] | None:
    done: list[str] = []
    while len(done) < len(names):
        ready = [n for n in names if n not in done and all(a in done for a, b in edges if b == n)]
        if not ready:
            return None
        done.append(ready[0])
    return tuple(done)


def _cost(order: Sequence[str], nest: Nest) -> float:
    """What the iterations cost: of the innermost loop, and what is written out of order or read across memory."""
    total, reached = 1.0, 0.0
    for n, name in enumerate(order):
        total *= _fanout(name, order[:n], nest)
        reached += total
    innermost = order[-1] if order else ""
    if innermost and not _is_contiguous(innermost, nest):
        reached *= 1.25
    return reached


def _fanout(name: str, outside: Sequence[str], nest: Nest) -> float:
    """The coordinates of a loop: of the operand that has the fewest, where all must be present."""
    found = []
    for path in nest.paths.values():
        steps = [s for s in path.iterated if s.loop == name]
        if steps and _is_required(path.access, nest):
            is_root = not any(s.loop in outside for s in path.steps)
            found.append(ROOT_FANOUT if is_root else COMPRESSED_FANOUT)
    loop = nest.loops[name]
    extent = _number(loop.upper) - _number(loop.lower)
    return min([*found, max(1.0, extent)])


def _is_required(access: Access, nest: Nest) -> bool:
    return nest.term.without([access]) is None


def _number(x: Value) -> float:
    if isinstance(x, int):
        return float(x)
    return float(x.value) if x.value is not None else UNKNOWN_EXTENT


def _is_contiguous(name: str, nest: Nest) -> bool:
    """Whether no dense tensor is read or written across its rows by the innermost loop."""
    s = nest.statement
    across = [s.subscripts[:-1]] if nest.loops[name].is_free else []
    across += [a.subscripts[:-1] for a in nest.term.uses if a not in nest.paths]
    return not any(isinstance(e, Index) and e.name == name for subscripts in across for e in subscripts)


def _spell(a: Access) -> str:
    return f"{a.tensor}({', '.join(e.name if isinstance(e, Index) else '...' for e in a.subscripts)})"
