"""Choose the order of the loops of a nest: the cheapest one in which every operand can be traversed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from math import inf

from ..core.errors import CannotLower
from ..options import SparseOptions
from ..tc_lang.formats import LEVELS, Format, can_store_any_pattern, parse_format
from ..tc_lang.ir import Access, Index
from ..tc_lang.size_polynomial import Value
from ..thresholds import COMPRESSED_FANOUT, CONVERSION_COST, ROOT_FANOUT, SORTED_ELEMENT_COST, UNKNOWN_LOOP_ITERATIONS
from .graph import Nest, Path, inner_block_loop, is_ordered, outer_block_loop

MAX_PERMUTED = 7
"""Maximum loops whose orders are all compared: 5040 of them."""

Edges = frozenset[tuple[str, str]]
_DEFAULT = SparseOptions()


def choose_order(
    nest: Nest, result: Format | None = None, options: SparseOptions = _DEFAULT, *, free_first: bool = False
) -> tuple[str, ...]:
    """The names of the loops, outermost first, in the cheapest order; operands stored in another order are converted.

    A target that shares the pattern of an operand is written in the order of that operand, if any order allows it.

    Args:
        result: the format of a sparse result, which is best written in its order.
        options: the allowed orders and conversions.
        free_first: put the loops over the target outside of all others, preferably in the order of its subscripts,
            because each instance of them gets its own thread.

    Raises:
        CannotLower: no order is possible.
    """
    names, paths = tuple(nest.loops), tuple(nest.paths.values())
    best: tuple[tuple[float, ...], tuple[str, ...]] | None = None
    of_paths = [(p, tuple(hard_edges(p, free_first))) for p in paths]
    edges = frozenset(e for _, own in of_paths for e in own)
    fanouts = _Fanouts.of(nest)
    needs_all_terms = nest.keeps_places or (result is not None and _stores_nonzero_results(nest))
    if free_first:
        edges |= {(a, b) for a in nest.free for b in names if b not in nest.free}
    wanted = [name for name in options.order if name in names]
    for rank, order in enumerate(_orders(names, edges | frozenset(pairwise(wanted)))):
        if [name for name in order if name in wanted] != wanted:
            continue
        if (needs_all_terms or free_first) and _count_scattering_loops(order, nest):
            continue  # an element without terms in a reduced loop may be stored, too
        stuck = [p for p, own in of_paths if p.format.repeats_padding or not _respects_edges(own, order)]
        wrong = sum(
            CONVERSION_COST if options.convert and reordered_format(p, order, free_first) else inf for p in stuck
        )
        scattering = _count_scattering_loops(order, nest)
        loses_pattern = any(p.access == nest.own for p in stuck) or (scattering > 0 and _needs_own_identity(nest))
        iterations = fanouts.count_iterations(order)
        if result is not None and not is_ordered(nest, order, result):
            iterations *= SORTED_ELEMENT_COST
        cost: tuple[float, ...]
        if free_first:
            cost = (wrong == inf, loses_pattern, wrong, _count_inversions(order, nest), iterations, rank)
        else:
            contiguous = _is_contiguous(order, nest)
            cost = (wrong == inf, loses_pattern, iterations + wrong, scattering, not contiguous, rank)
        if best is None or cost < best[0]:
            best = cost, order
    if best is None:
        reason = "; elements need all of their terms at once, so reduced loops are innermost" if needs_all_terms else ""
        raise CannotLower(f"there is no order of loops with {', '.join(wanted)} from the outside in{reason}")
    wrong_paths = [p.access.tensor for p in paths if not is_walkable_in_order(p, best[1], free_first)]
    if wrong_paths and not options.convert:
        raise CannotLower(f"{', '.join(wrong_paths)} would have to be converted, which the options rule out")
    return best[1]


def is_walkable_in_order(path: Path, order: Sequence[str], enters_late: bool = False) -> bool:
    """Whether the loops reach the levels of a path in order, outermost first.

    No order does if padding repeats: the positions of one coordinate are then neither adjacent nor sorted below.
    """
    return not path.format.repeats_padding and _respects_edges(tuple(hard_edges(path, enters_late)), order)


def _respects_edges(edges: Sequence[tuple[str, str]], order: Sequence[str]) -> bool:
    """Whether the first loop of each pair in `edges` is outside the second in `order`."""
    return all(order.index(a) < order.index(b) for a, b in edges)


def _count_inversions(order: Sequence[str], nest: Nest) -> int:
    """The number of pairs of loops over the target whose order differs from the memory order of its elements."""
    indices = [e.name for e in nest.statement.subscripts if isinstance(e, Index)]
    named = [*indices, *(outer_block_loop(n) for n in nest.blocks), *(inner_block_loop(n) for n in nest.blocks)]
    loops = sorted((n for n in dict.fromkeys(named) if n in order), key=lambda n: _rank_in_memory(n, indices, nest))
    places = [order.index(n) for n in loops]
    return sum(b < a for n, a in enumerate(places) for b in places[n + 1 :])


def _rank_in_memory(loop: str, indices: Sequence[str], nest: Nest) -> tuple[int, bool]:
    for n, name in enumerate(indices):
        if loop == name or (name in nest.blocks and loop in (outer_block_loop(name), inner_block_loop(name))):
            return n, loop == inner_block_loop(name)
    return len(indices), False


def reordered_format(path: Path, order: Sequence[str], enters_late: bool = False) -> Format | None:
    """A format in which loops in this order can traverse an operand, with the same stored elements.

    None if it is blocked, and its blocks can be traversed neither by rows nor by columns. Levels of the dense tail
    stay with their dimensions: moving one would store all coordinates of another dimension.
    """
    format = path.format
    if format.blocks:
        return next(
            (f for f in _blocked_formats(format) if is_walkable_in_order(_stored_as(path, f), order, enters_late)), None
        )
    loops = {d: step.loop for step, d in zip(path.steps, format.order, strict=True)}
    depths = {d: order.index(loop) if isinstance(loop, str) else -1 for d, loop in loops.items()}
    dims = sorted(range(format.rank), key=depths.__getitem__)  # dimensions at a constant coordinate come first
    tail = format.order[format.depth :]
    upper = iter(format.levels[: format.depth])
    made = Format(tuple(LEVELS["d"] if d in tail else next(upper) for d in dims), tuple(dims))
    return made if can_store_any_pattern(format) and can_store_any_pattern(made) else made.with_compressed_levels


def _blocked_formats(format: Format) -> Iterator[Format]:
    for name in ("bsr", "bsc"):
        yield parse_format(name, format.blocks, format.rank)


def _stored_as(path: Path, format: Format) -> Path:
    """The path of the same tensor in another format with the same dimensions."""
    steps = dict(zip(path.format.order, path.steps, strict=True))
    moved = (replace(steps[d], level=level) for level, d in zip(format.levels, format.order, strict=True))
    return replace(path, format=format, steps=tuple(moved))


def _needs_own_identity(nest: Nest) -> bool:
    """Whether elements of a target with a shared pattern cannot be updated repeatedly, from the zeros in memory."""
    return nest.own is not None and nest.statement.reduction not in (None, "+")


def _stores_nonzero_results(nest: Nest) -> bool:
    """Whether a sparse result, a reduction of dense operands only, stores the elements that are not 0 in the end."""
    return not nest.paths and nest.statement.reduction is not None


def _count_scattering_loops(order: Sequence[str], nest: Nest) -> int:
    """The number of loops over reduced indices that are outside of a loop over an index of the target."""
    free = [n for n, name in enumerate(order) if nest.loops[name].is_free]
    return sum(not nest.loops[name].is_free for name in order[: max(free, default=0)])


def hard_edges(path: Path, enters_late: bool = False) -> Iterator[tuple[str, str]]:
    """The pairs of loops whose first must be outside the second: levels of one path that are not both dense.

    enters_late: whether a dense level may be entered after its loop, once all levels above are entered.
    """
    for n, below in enumerate(path.steps):
        if enters_late and below.level.is_dense:
            continue
        for above in path.steps[:n]:
            both_dense = above.level.is_dense and below.level.is_dense
            match above.loop, below.loop:
                case str(first), str(second) if first != second and not both_dense:
                    yield first, second


def _orders(names: Sequence[str], edges: Edges) -> Iterator[tuple[str, ...]]:
    if len(names) <= MAX_PERMUTED:
        yield from permutations(names)
        return
    yield _sort_names_topologically(names, edges) or tuple(names)


def _sort_names_topologically(names: Sequence[str], edges: Edges) -> tuple[str, ...] | None:
    done: list[str] = []
    while len(done) < len(names):
        ready = [n for n in names if n not in done and all(a in done for a, b in edges if b == n)]
        if not ready:
            return None
        done.append(ready[0])
    return tuple(done)


@dataclass(frozen=True, slots=True)
class _Fanouts:
    """Estimates of the iterations of the loops of a nest.

    iterated: for each loop, the operands with a level there that is not dense, each with all of its loops.
    required: operands without which nothing is computed. is_empty: loops where nothing is computed if all operands of
    the loop are absent. extents: the extent of each loop.
    """

    iterated: Mapping[str, Sequence[tuple[Access, frozenset[str | int]]]]
    required: frozenset[Access]
    is_empty: frozenset[str]
    extents: Mapping[str, float]

    @staticmethod
    def of(nest: Nest) -> _Fanouts:
        paths = [(a, frozenset(s.loop for s in p.steps), {s.loop for s in p.iterated}) for a, p in nest.paths.items()]
        iterated = {name: [(a, loops) for a, loops, own in paths if name in own] for name in nest.loops}
        required = frozenset(a for a in nest.paths if nest.term.drop_absent([a]) is None)
        closed = (n for n, found in iterated.items() if found and nest.term.drop_absent([a for a, _ in found]) is None)
        extents = {n: max(1.0, _estimate_extent(x.upper) - _estimate_extent(x.lower)) for n, x in nest.loops.items()}
        return _Fanouts(iterated, required, frozenset(closed), extents)

    def count_iterations(self, order: Sequence[str]) -> float:
        """The estimated iterations of all loops in this order."""
        total, reached = 1.0, 0.0
        for n, name in enumerate(order):
            total *= self._fanout(name, order[:n])
            reached += total
        return reached

    def _fanout(self, name: str, outside: Sequence[str]) -> float:
        """Estimated coordinates of a loop: the fewest of any required operand, else those of all operands together."""
        found = {a: COMPRESSED_FANOUT if loops & {*outside} else ROOT_FANOUT for a, loops in self.iterated[name]}
        extent = self.extents[name]
        required = [n for a, n in found.items() if a in self.required]
        if required:
            return min(*required, extent)
        return min(sum(found.values()), extent) if name in self.is_empty else extent


def _estimate_extent(x: Value) -> float:
    if isinstance(x, int):
        return float(x)
    return float(x.value) if x.value is not None else UNKNOWN_LOOP_ITERATIONS


def _is_contiguous(order: Sequence[str], nest: Nest) -> bool:
    """Whether the innermost loop does not subscript any dimension but the last of a dense tensor."""
    name = order[-1] if order else ""
    across = [nest.statement.subscripts[:-1]]
    across += [a.subscripts[:-1] for a in nest.term.uses if a not in nest.paths]
    return not any(isinstance(e, Index) and e.name == name for subscripts in across for e in subscripts)
