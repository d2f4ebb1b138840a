"""The iteration graph of a statement: its loops, and the paths of its sparse operands through them (TACO, section 4).

Every occurrence of a sparse tensor is a path through its levels. A level is reached from the one above it, so its loop
is inside the loop of that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from ..core.errors import CannotLower
from ..tc_lang.binding.ranges import Bounds
from ..tc_lang.formats import Format, Level, LevelKind
from ..tc_lang.ir import Access, Const, Expr, Index, Statement, Symbol, walk_expr
from ..tc_lang.size_polynomial import Value
from .absent_operands import Term, reads, term_of
from .operand_buffers import is_whole
from .shared_sparsity import representative
from .sparse_problem import SparseProblem


class MixedBlocks(CannotLower):
    """Blocks of an operand do not fit the other operands, the range or the subscripts of a statement."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of a nest: over an index of the statement, over the blocks of an index, or inside a block.

    window: whether operands may store coordinates outside of `lower` to `upper`.
    """

    name: str
    lower: Value
    upper: Value
    is_free: bool
    window: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One level of a path: the loop that iterates over it, or the constant coordinate at which it is entered."""

    level: Level
    loop: str | int
    extent: Value


@dataclass(frozen=True, slots=True)
class Path:
    """The levels of an occurrence, outermost first."""

    access: Access
    format: Format
    steps: tuple[Step, ...]

    @property
    def iterated(self) -> tuple[Step, ...]:
        """The levels that are not dense, which determine the coordinates that exist."""
        return tuple(s for s in self.steps if not s.level.is_dense)


@dataclass(frozen=True, slots=True)
class Nest:
    """A statement as loops.

    loops: loops by name, in the order of the statement's indices. paths: paths of sparse operands, by access.
    blocks: the extent of the blocks into which an index is split, by index. identity: see `keeps_places`.
    shared: pairs of a tensor and the operand whose sparsity pattern it has. own: the access of the target's operand.
    """

    statement: Statement
    term: Term
    loops: Mapping[str, Loop]
    paths: Mapping[Access, Path]
    blocks: Mapping[str, int]
    shared: tuple[tuple[str, str], ...] = ()
    identity: int | float | bool | None = None
    own: Access | None = None

    @property
    def keeps_places(self) -> bool:
        """Whether the target stores every element where `exists` holds, even if its value is the identity.

        Then no instance of a free loop is void, and `identity` is the void value inside the reduced loops.
        """
        return self.term.void is None and self.identity is not None

    @property
    def free(self) -> tuple[str, ...]:
        """The loops over the indices of the target."""
        return tuple(n for n, loop in self.loops.items() if loop.is_free)


def build_nest(problem: SparseProblem, number: int) -> Nest:
    """The nest of the statement with index `number`.

    Raises:
        MixedBlocks: a blocked operand meets one without blocks or with other blocks, a constant, or a range.
    """
    statement = problem.function.statements[number]
    symbols = {t.name: t for t in problem.function.tensors}
    target = symbols[statement.target]
    term = term_of(statement.value, statement.exists, statement.reduction, target.dtype)
    sparse = {n for n, t in symbols.items() if t.is_sparse and n != statement.target}
    stands_for = dict(problem.shared)
    accesses = (*term.exists, *reads(term.value))
    aliases = {a: representative(a, problem.function, stands_for) for a in accesses if a.tensor in stands_for}
    term = replace(term, aliases=aliases)
    occurrences = term.occurrences(sparse | set(stands_for))
    blocks = _collect_block_sizes(occurrences, symbols, statement, problem)
    free = {e.name for x in statement.subscripts for e in walk_expr(x) if isinstance(e, Index)}
    loops: dict[str, Loop] = {}
    for name in statement.indices:
        bounds = problem.ranges.statements[number][name]
        window = not all(_is_full_index_range(bounds, a, name, symbols, problem) for a in occurrences)
        for loop in _split_blocked_index(name, bounds, blocks.get(name), window):
            loops[loop[0]] = Loop(loop[0], loop[1], loop[2], name in free, window)
    paths = {a: _make_access_path(a, symbols[a.tensor], blocks, problem) for a in occurrences}
    holds_zeros = target.name in stands_for and term.void == 0  # elements that no instance writes stay 0
    keeps = target.is_sparse and not holds_zeros and _has_matching_pattern(statement)
    identity = term.void if keeps else None
    term = replace(term, void=None) if keeps or not paths else term
    own = None
    if target.name in stands_for:
        own = representative(Access(target.name, statement.subscripts, target.dtype), problem.function, stands_for)
    return Nest(statement, term, loops, paths, blocks, problem.shared, identity, own)


def _has_matching_pattern(s: Statement) -> bool:
    """Whether all `exists` conditions of a statement, at least one, have the subscripts of its target."""
    return bool(s.exists) and all(a.subscripts == s.subscripts for a in s.exists)


def _split_blocked_index(name: str, bounds: Bounds, block: int | None, window: bool) -> list[tuple[str, Value, Value]]:
    if block is None:
        return [(name, *bounds)]
    if window:
        raise MixedBlocks(f"the blocked index '{name}' has a range of its own")
    return [(outer_block_loop(name), 0, bounds[1] // block), (inner_block_loop(name), 0, block)]


def outer_block_loop(name: str) -> str:
    """The loop over the blocks of an index."""
    return f"{name}.block"


def inner_block_loop(name: str) -> str:
    """The loop inside a block of an index."""
    return f"{name}.inside"


def _collect_block_sizes(
    accesses: tuple[Access, ...], symbols: Mapping[str, Symbol], statement: Statement, problem: SparseProblem
) -> dict[str, int]:
    """The extent of the blocks of each index that is split.

    A result with blocks and levels of its own does not split indices of operands without blocks.
    """
    found: dict[str, int] = {}
    everything = [*accesses]
    target = symbols[statement.target]
    formats = [symbols[a.tensor].format for a in accesses]
    splits = target.name in dict(problem.shared) or all(f is not None and f.blocks for f in formats)
    if target.is_sparse and splits:
        everything.append(Access(target.name, statement.subscripts, target.dtype))
    for a in everything:
        format = symbols[a.tensor].format
        assert format is not None
        for subscript, block in zip(a.subscripts, format.blocks, strict=False):
            if not isinstance(subscript, Index):
                raise MixedBlocks(f"the blocked tensor '{a.tensor}' has a constant subscript")
            if found.setdefault(subscript.name, block) != block:
                raise MixedBlocks(f"blocks of {found[subscript.name]} and of {block} meet at '{subscript.name}'")
    return found


def _is_full_index_range(
    bounds: Bounds, a: Access, name: str, symbols: Mapping[str, Symbol], problem: SparseProblem
) -> bool:
    """Whether the range of an index covers the whole dimensions of `a` that it subscripts."""
    whole = problem.ranges.tensors[a.tensor]
    return all(
        is_whole(bounds, whole[d][1])
        for d, e in enumerate(a.subscripts)
        if isinstance(e, Index) and e.name == name
    )  # fmt: skip


def _make_access_path(a: Access, symbol: Symbol, blocks: Mapping[str, int], problem: SparseProblem) -> Path:
    format = symbol.format
    assert format is not None
    extents = [upper for _, upper in problem.ranges.tensors[a.tensor]]
    loops: list[str | int] = [_loop_of(e) for e in a.subscripts]
    if any(isinstance(n, str) and n in blocks for n in loops) or format.blocks:
        return _blocked_path(a, format, loops, extents, blocks)
    steps = (Step(level, loops[d], extents[d]) for level, d in zip(format.levels, format.order, strict=True))
    return Path(a, format, tuple(steps))


def _loop_of(e: Expr) -> str | int:
    if isinstance(e, Const):
        return int(e.value)
    assert isinstance(e, Index)
    return e.name


def _blocked_path(
    a: Access, format: Format, loops: list[str | int], extents: list[Value], blocks: Mapping[str, int]
) -> Path:
    if not format.blocks:
        raise MixedBlocks(f"'{a.tensor}' has no blocks, and meets one that has")
    names = [n for n in loops if isinstance(n, str)]
    split: list[str | int] = [*map(outer_block_loop, names), *map(inner_block_loop, names)]
    sizes: list[Value] = [*(n // b for n, b in zip(extents, format.blocks, strict=True)), *format.blocks]
    steps = (Step(level, split[d], sizes[d]) for level, d in zip(format.levels, format.order, strict=True))
    return Path(a, format, tuple(steps))


def is_ordered(nest: Nest, order: tuple[str, ...], format: Format) -> bool:
    """Whether the loops produce the elements of a result in the order of its levels.

    A reduced loop may be outside of the last index, if that is a compressed level at the end.
    """
    s = nest.statement
    if nest.blocks or format.blocks or not all(isinstance(e, Index) for e in s.subscripts):
        return False
    levels = [e.name for d in format.order for e in (s.subscripts[d],) if isinstance(e, Index)]
    paths = nest.paths.values()
    free = [n for n in order if nest.loops[n].is_free]
    repeats = any(not step.level.unique and step.loop in levels for p in nest.paths.values() for step in p.steps)
    if free != levels or (repeats and len(order) > len(free)) or not all(_repeats_inside(p, order) for p in paths):
        return False
    return list(order[: len(free)]) == free or needs_row_workspace(nest, order, format)


def _repeats_inside(path: Path, order: tuple[str, ...]) -> bool:
    """Whether the loop of each level below repeated coordinates is directly inside, so that no other loop repeats."""
    pairs = [(a.loop, b.loop) for a, b in pairwise(path.steps) if not a.level.unique]
    inside = ((a, b) for a, b in pairs if isinstance(a, str) and isinstance(b, str))
    return all(order.index(b) == order.index(a) + 1 for a, b in inside)


def needs_row_workspace(nest: Nest, order: tuple[str, ...], format: Format) -> bool:
    """Whether the last index of the result is inside a reduced loop, so that a dense row must accumulate results."""
    free = [n for n, name in enumerate(order) if nest.loops[name].is_free]
    inside = bool(free) and free[:-1] == list(range(len(free) - 1)) and free[-1] == len(order) - 1
    last = format.levels[-1]
    return inside and free[-1] > len(free) - 1 and last.kind is LevelKind.COMPRESSED
