"""Positions in the levels of a sparse tensor, and the code to iterate over and search the next level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..core.dtypes import INT64
from ..core.errors import InternalError
from ..loop_ir import build
from ..loop_ir.names import Names
from ..loop_ir.nodes import Allocate, Buffer, Expr, If, Let, Load, Loop, Stmt, Store, While
from ..tc_lang.formats import LevelKind
from ..tc_lang.ir import Access
from .graph import Step
from .operand_buffers import SparseOperand


@dataclass(frozen=True, slots=True)
class Place:
    """The position in its levels that an occurrence of a sparse tensor has reached.

    depth: the number of levels entered. low: the position; with `high`, all positions in [low, high), which repeat one
    coordinate. below: extent and coordinate of the dense levels under such a run. present: a condition whether the
    occurrence is stored, if one body serves both cases; if it does not hold, nothing is stored below.
    """

    low: Expr
    high: Expr | None = None
    depth: int = 0
    below: tuple[tuple[Expr, Expr], ...] = ()
    present: Expr | None = None


ROOT = Place(build.const(0))


def name_of_position(a: Access) -> str:
    """The prefix of the names of variables that hold a position of the operand of `a`."""
    return f"{a.tensor}.p"


def locate(place: Place, extent: Expr, coordinate: Expr) -> Place:
    """The place below `place` at a coordinate of a dense level."""
    if place.high is not None:
        return replace(place, depth=place.depth + 1, below=(*place.below, (extent, coordinate)))
    position = build.add(build.mul(place.low, extent), coordinate)
    return Place(position, None, place.depth + 1, present=place.present)


@dataclass(frozen=True, slots=True)
class Cursor:
    """An iterator over the stored coordinates below a place, at positions in [start, stop)."""

    crd: Buffer
    start: Expr
    stop: Expr
    depth: int
    is_unique: bool

    def coordinate(self, position: Expr, mask: Expr | None = None) -> Expr:
        """The coordinate at a position, as int64, loaded only if the mask holds."""
        return build.cast(build.load(self.crd, position, mask=mask), INT64)

    def place_at(self, position: Expr, stop: Expr | None = None) -> Place:
        """The place at one position, or at the run from `position` to before `stop`."""
        return Place(position, stop, self.depth + 1)


def cursor(operand: SparseOperand, step: Step, place: Place) -> Cursor:
    """The iterator over the children of a place on a level that is not dense."""
    crd, depth = operand.crd[place.depth], place.depth
    assert crd is not None
    unique = step.level.unique
    match step.level.kind:
        case LevelKind.COMPRESSED:
            pos = operand.pos[depth]
            assert pos is not None
            if place.high is not None:
                raise InternalError(f"{operand.name} has a compressed level below repeated coordinates")
            ends = (place.low, build.add(place.low, 1))
            start, stop = (build.cast(build.load(pos, p, mask=place.present), INT64) for p in ends)
            return Cursor(crd, start, stop, depth, unique)
        case LevelKind.SINGLETON:
            stop = place.high or build.add(place.low, 1)
            return Cursor(crd, place.low, _if_present(place, stop), depth, unique)
    raise InternalError(f"a {step.level.kind.value} level is not iterated")


def _if_present(place: Place, stop: Expr) -> Expr:
    """`stop`, or `place.low` if the occurrence is absent, so that the range is empty."""
    return stop if place.present is None else build.select(place.present, stop, place.low)


def first_not_below(c: Cursor, bound: Expr, names: Names, then: Callable[[Expr], Stmt]) -> Stmt:
    """Emit `then` with the first position whose coordinate is at least `bound`, found by binary search."""
    low, high = (build.register(names.fresh(f"{c.crd.name}.{end}")) for end in ("low", "high"))
    middle = names.fresh(f"{c.crd.name}.middle")
    at = build.var(middle)
    step = Let(
        middle,
        build.div(build.add(Load(low, ()), Load(high, ())), 2),
        If(
            build.lt(c.coordinate(at), bound),
            Store(low, (), build.add(at, 1)),
            Store(high, (), at),
        ),
    )
    search = While(build.lt(Load(low, ()), Load(high, ())), step)
    found = names.fresh(f"{c.crd.name}.found")
    start: list[Stmt] = [Store(low, (), c.start), Store(high, (), c.stop), search]
    return Allocate((low, high), build.block(*start, Let(found, Load(low, ()), then(build.var(found)))))


def run_end(c: Cursor, position: Expr, stop: Expr, value: Expr, names: Names, then: Callable[[Expr], Stmt]) -> Stmt:
    """Emit `then` with the end of the run of coordinates equal to `value` that starts at `position`."""
    if c.is_unique:
        return then(build.add(position, 1))
    end = build.register(names.fresh(f"{c.crd.name}.end"))
    live = build.lt(Load(end, ()), stop)
    same = build.and_masks(live, build.eq(c.coordinate(Load(end, ()), live), value))
    assert same is not None
    grow = While(same, Store(end, (), build.const(1), "+"))
    found = names.fresh(f"{c.crd.name}.stop")
    first = Store(end, (), build.add(position, 1))
    return Allocate((end,), build.block(first, grow, Let(found, Load(end, ()), then(build.var(found)))))


def sum_run(place: Place, values: Buffer, total: Buffer, names: Names) -> Stmt:
    """Sum the values of the run of positions of `place` into `total`."""
    name = names.fresh(f"{values.name}.p")
    element = build.cast(build.load(values, flat_position(build.var(name), place)), total.type.dtype)
    assert place.high is not None
    zero = build.const(0, total.type.dtype)
    op = "or" if total.type.dtype.is_bool else "+"
    return build.block(Store(total, (), zero), Loop(name, place.low, place.high, Store(total, (), element, op)))


def flat_position(position: Expr, place: Place) -> Expr:
    """The index of a value: `position`, extended by the coordinates of the dense levels in `place.below`."""
    for extent, coordinate in place.below:
        position = build.add(build.mul(position, extent), coordinate)
    return position
