"""Blocks of rows whose code consists of loops over the rows, so that it also serves fewer rows.

If all accesses to rows are in loops over all rows of the block, and the loop variable is the index of the row, then the
first iterations compute the first rows. So the loops may end earlier, and no smaller blocks are needed for the
remaining rows. Each iteration accesses its row through a `Window`, so that the verifier proves it in bounds. Loops that
copy several rows per iteration end with an iteration that begins earlier, or copy row by row if there are fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from ..core.errors import CannotLower
from ..core.internal_names import internal_name
from . import build
from .nodes import Buffer, Expr, If, Invoke, Load, Loop, LoopKind, Module, Stmt, Store, Var, Window
from .rewrite import children, list_accesses, map_expr, map_stmt, stmt_expressions, used_values, walk_stmts
from .row_copies import RowCopy, find_row_copies
from .uses import accessed_buffers


@dataclass(frozen=True, slots=True)
class RowLoops:
    """The loops over the rows of a module.

    rows: the number of iterations. variables: the variables of the loops. arguments: the names of those with rows.
    dimensions: the dimension of rows in each of these, and in buffers that the module allocates for rows.
    copies: the loops that copy several rows per iteration, by id.
    """

    rows: int
    variables: frozenset[str]
    arguments: frozenset[str]
    dimensions: Mapping[str, int]
    copies: Mapping[int, RowCopy] = field(default_factory=dict)


def find_row_loops(module: Module, sources: Mapping[str, Buffer], dimensions: Mapping[str, int], rows: int) -> RowLoops:
    """The loops over the rows of a block.

    Args:
        module: the module for `rows` rows, of a def in which each statement has one index of rows.
        sources: the arguments with rows, for any number of rows, by name.
        dimensions: the dimension of rows in each of these.
        rows: the number of rows of the block.

    Raises:
        CannotLower: a row is accessed in another way.
    """
    for b in module.arguments:
        if b.name in dimensions and not _has_form(b, sources[b.name], dimensions[b.name], rows):
            raise CannotLower(f"{b.name} has another shape in a block")
    found = [find_row_copies(k.body, rows, dimensions) for k in module.kernels]
    bodies, copies = [body for body, _ in found], {n: c for _, copies in found for n, c in copies.items()}
    places, variables = {b.name: dimensions[b.name] for b in module.arguments if b.name in dimensions}, set[str]()
    arguments = frozenset(places)
    fixed = {b.name for b in module.arguments} - arguments
    accesses = [a for body in bodies for a in list_accesses(body)]
    before = -1
    while before != len(places) + len(variables):
        before = len(places) + len(variables)
        for buffer, indices in accesses:
            if buffer.name in places:
                variables.add(_require_variable(indices[places[buffer.name]]))
            for d in (d for d, e in enumerate(indices) if _uses(e, variables)):
                if places.setdefault(buffer.name, d) != d or buffer.name in fixed:
                    raise CannotLower(f"{buffer.name} has rows along several dimensions")
    if any(b.shape[places[b.name]] != rows for b, _ in accesses if b.name in places):
        raise CannotLower("memory for rows has room for another number of them")
    loops = RowLoops(rows, frozenset(variables), arguments, places, copies)
    for body in bodies:
        _check_loops(body, loops)
    return loops


def end_row_loops(
    body: Stmt,
    loops: RowLoops,
    sources: Mapping[str, Buffer],
    start: Expr,
    length: Expr,
    end: Expr,
    windows: Mapping[str, Buffer],
) -> Stmt:
    """`body` for the rows of a block from `start` on, but only for `end` rows, up to the row `length`.

    sources: as in `find_row_loops`. windows: the forms of these in the block, with the names for windows.
    """
    rows = {name: _set_extent(windows[name], loops.dimensions[name], 1) for name in loops.arguments}
    return _Ender(loops, sources, rows, start, length, end).stmt(body)


def _has_form(b: Buffer, source: Buffer, dimension: int, rows: int) -> bool:
    """Whether `b` is `source` with `rows` rows; dimensions of fixed extents inside of the rows may be merged."""
    own = _set_extent(source, dimension, rows)
    if b.shape == own.shape:
        return True
    end = dimension + 1
    return (
        not (b.dynamic or own.dynamic)
        and (b.shape[:end], b.strides[:end]) == (own.shape[:end], own.strides[:end])
        and prod(b.shape[end:]) == prod(own.shape[end:])
    )


def _require_variable(e: Expr) -> str:
    if not isinstance(e, Var):
        raise CannotLower("a row is not the variable of a loop")
    return e.name


def _uses(e: Expr, variables: set[str]) -> bool:
    """Whether an index depends on one of `variables`, other than in subscripts of its loads."""
    if isinstance(e, Var):
        return e.name in variables
    return not isinstance(e, Load) and any(_uses(c, variables) for c in children(e))


def _check_loops(body: Stmt, loops: RowLoops) -> None:
    """Refuse loops over only a part of the rows, nested ones, and row variables used other than as indices of rows."""
    whole = (build.const(0), build.const(loops.rows), 1)
    bound = set[str]()
    for s in walk_stmts(body):
        if isinstance(s, Window) and s.source.name in loops.arguments:
            raise CannotLower("rows are in blocks along other axes")
        if isinstance(s, Loop) and s.var in loops.variables:
            bound.add(s.var)
            if (s.start, s.stop, s.step) != whole or s.kind not in (LoopKind.SERIAL, LoopKind.PARALLEL):
                raise CannotLower("a loop runs over a part of the rows")
            for inner in walk_stmts(s.body):
                if isinstance(inner, Loop) and inner.var in loops.variables:
                    raise CannotLower("loops over rows are nested")
        elif not isinstance(s, Store):  # its indices were checked before
            parts = s.values if isinstance(s, Invoke) else stmt_expressions(s)
            if any(isinstance(e, Var) and e.name in loops.variables for p in parts for e in _walk_outside_loads(p)):
                raise CannotLower("a loop or a variable depends on the number of its row")
    if {e.name for e in used_values(body) if isinstance(e, Var) and e.name in loops.variables} - bound:
        raise CannotLower("a row is not the variable of a loop")


def _walk_outside_loads(e: Expr) -> Iterator[Expr]:
    """`e` and its subexpressions, without the subscripts of loads."""
    yield e
    if not isinstance(e, Load):
        for c in children(e):
            yield from _walk_outside_loads(c)


def _set_extent(b: Buffer, dimension: int, rows: int) -> Buffer:
    """`b` with the fixed extent `rows` along `dimension`."""
    shape = tuple(rows if d == dimension else n for d, n in enumerate(b.shape))
    return replace(b, shape=shape, dynamic=tuple(d for d in b.dynamic if d != dimension))


@dataclass(frozen=True, slots=True)
class _Ender:
    """Makes loops over rows end at the last row. rows: the windows of a single row, by the name of their source."""

    loops: RowLoops
    sources: Mapping[str, Buffer]
    rows: Mapping[str, Buffer]
    start: Expr
    length: Expr
    end: Expr

    def stmt(self, s: Stmt) -> Stmt:
        if id(s) in self.loops.copies:
            return self.copy(self.loops.copies[id(s)])
        if isinstance(s, Loop) and s.var in self.loops.variables:
            return self.loop(s)
        return map_stmt(s, lambda e: e, self.stmt)

    def loop(self, s: Loop) -> Loop:
        """The loop `s`, ending at the last row, with a window of one row in its body."""
        body: Stmt = _Reach(self.rows, self.loops.dimensions).stmt(s.body)
        row = build.add(self.start, build.var(s.var))
        for name in sorted(self.rows.keys() & accessed_buffers(s.body), reverse=True):
            d = self.loops.dimensions[name]
            body = Window(self.rows[name], self.sources[name], row, 1, self.length, body, d)
        return replace(s, stop=self.end, body=body)

    def copy(self, c: RowCopy) -> Stmt:
        """The loop of a copy, whose last iteration begins early enough to end at the last row.

        The inner loop runs once, and tells the verifier that the rows are in bounds.
        """
        first = build.var(internal_name(c.loop.var, "first"))
        names = sorted(self.rows.keys() & accessed_buffers(c.part), reverse=True)
        dimensions = self.loops.dimensions
        windows = {name: _set_extent(self.rows[name], dimensions[name], c.rows) for name in names}
        body = c.start_at(first, {name: (b, dimensions[name]) for name, b in windows.items()})
        for name, b in windows.items():
            row = build.add(self.start, first)
            body = Window(b, self.sources[name], row, c.rows, self.length, body, dimensions[name])
        begin = build.minimum(build.mul(build.var(c.loop.var), c.rows), build.sub(self.end, c.rows))
        once = Loop(first.name, build.maximum(begin, 0), build.add(begin, 1), body)
        count = build.div(build.add(self.end, c.rows - 1), c.rows)
        return If(build.lt(self.end, c.rows), self.loop(c.by_row), replace(c.loop, stop=count, body=once))


@dataclass(frozen=True, slots=True)
class _Reach:
    """Redirects accesses to the one-row windows in `rows`, with index 0 for the row."""

    rows: Mapping[str, Buffer]
    dimensions: Mapping[str, int]

    def indices(self, b: Buffer, indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return tuple(build.const(0) if d == self.dimensions[b.name] else e for d, e in enumerate(indices))

    def expr(self, e: Expr) -> Expr:
        new = map_expr(e, self.expr)
        if isinstance(new, Load) and new.buffer.name in self.rows:
            return replace(new, buffer=self.rows[new.buffer.name], indices=self.indices(new.buffer, new.indices))
        return new

    def stmt(self, s: Stmt) -> Stmt:
        new = map_stmt(s, self.expr, self.stmt)
        match new:
            case Store(b, indices) if b.name in self.rows:
                return replace(new, buffer=self.rows[b.name], indices=self.indices(b, indices))
            case Invoke(_, operands):
                views = tuple(
                    (self.rows[b.name], self.indices(b, where)) if b.name in self.rows else (b, where)
                    for b, where in operands
                )
                return replace(new, operands=views)
        return new
