"""The expert for contractions: the plan that the cost model prefers, and whether an op is worth one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import inf, prod

from ..errors import CannotLower
from ..target import Target
from . import crossed, fragments, sliding
from .chooser import PACKED_STEPS, PACKED_USES, PARALLEL_WORK, Chooser
from .cost import is_far
from .estimate import busy, completes_pages, estimate, expected, in_short_runs
from .facts import Facts, facts
from .insistent import Whole, all_ways, whole_pays
from .op import StructuredOp, loads
from .plan import Plan
from .ranking import SHORT_SUM, Ranking
from .tile import tiles

MIN_ROWS_TO_TURN = 8
"""Uses of an element below which turning it across costs more than it saves."""
DOT_OVERHEAD = 20
"""Half cycles to sum the lanes of a vector: what narrow outputs cost when the lanes run along the reduction."""
TURNED_STEPS = 128
"""Reduction steps that pay for storing across what memory is slow to take."""
SHORT_UNIT, TURNED_UNIT = 128, 512
"""Points of a contiguous run of the output below which lanes across such runs may be the better ones: of any, and of
one along which the factor that it moves is not contiguous, and so has to be turned across, for sums in one block."""
LITTLE_WORK, FORK, MUCH = 4 * PARALLEL_WORK, 6000.0, 0.85
"""Multiply-adds from which on threads pay in any case; cycles until another thread has begun, and is known to be done;
the part of the cycles of one thread that two may take: what others do to the second one is not foreseen."""
PLANNED = 64
"""Plans that are kept: an op is looked at to decide what is done around it, to be lowered, and to be shown."""
TILES, CLEARLY = 6, 0.97
"""Register tiles that are looked at; less than this share of the cycles makes one of them better than those before."""


@lru_cache(PLANNED)
def choose(op: StructuredOp, target: Target, *, parallel: bool) -> Plan:
    """The plan that the cost model prefers for a normalised op, be the op worth one or not.

    Raises:
        CannotLower: the op has no contiguous output iterator that moves a factor.
    """
    views = rankings(op, target)
    shared = prefer(views, target, parallel=parallel)
    if not shared.collapsed or op.multiplications >= LITTLE_WORK:
        return shared
    serial = prefer(views, target, parallel=False)
    return shared if _shared_cycles(op, shared, target) < MUCH * estimate(op, serial, target) else serial


def _shared_cycles(op: StructuredOp, plan: Plan, target: Target) -> float:
    """Cycles until two threads are done with `plan`: where they are no faster, its work is too little to share."""
    count = prod(tiles(op.extent(level.iterator), level.size) for level in plan.levels[: plan.collapsed])
    return estimate(op, plan, target) * tiles(count, 2) / count + FORK


def rankings(op: StructuredOp, target: Target) -> tuple[Ranking, ...]:
    """Register tiles with the lanes along the output's contiguous iterator, and along the longest of the other factor.

    Raises CannotLower as `choose`.
    """
    known = facts(op)
    rows = [i for i in known.only(known.still) if 2 * i.extent >= target.lanes(known.bits)]
    if not rows or known.vector in known.still.used:
        return (Ranking(known, target),)
    across = facts(op, max(rows, key=lambda i: i.extent).name)
    return Ranking(known, target), Ranking(across, target)


def prefer(views: tuple[Ranking, ...], target: Target, *, parallel: bool) -> Plan:
    """The plan that the cost model prefers around the best register tile of one of `views`, from `rankings`."""
    default, *turned = views
    if sliding.slides(default.facts):
        return sliding.plan(default.facts, target, parallel=parallel)
    parallel = parallel and default.facts.op.multiplications >= 2 * PARALLEL_WORK  # else shares are panels made in vain
    views = views if turned and _worth_turning(default.facts, target) else (default,)
    chosen, least = Plan("", 0, (), ()), inf
    for view in views:
        plans = list(dict.fromkeys(_considered(view, target, parallel)))
        for plan, cycles in zip(plans, expected(view.facts, plans, target), strict=True):
            if cycles < least * CLEARLY:
                chosen, least = plan, cycles
    if chosen.vector == default.facts.vector and in_short_runs(default.facts, chosen, target):
        for plan in crossed.plans(default.facts, target, parallel=parallel):
            cycles = estimate(default.facts.op, plan, target)
            if cycles < least * CLEARLY:
                chosen, least = plan, cycles
    for plan in fragments.plans(default.facts, target, parallel=parallel):
        if busy(default.facts.op, plan, target) < busy(default.facts.op, chosen, target) * CLEARLY:
            chosen = plan
    return chosen


def _considered(view: Ranking, target: Target, parallel: bool) -> Iterator[Plan]:
    """The plans to compare: one for each of a few register tiles; all ways where what is written decides."""
    expert = Chooser(view.facts, target, view.best, parallel)
    if _moves_most(view.facts, target):
        shapes = view.shapes(TILES)
        if whole_pays(view.facts, target):
            copied = (Whole(view.facts, target, tile, parallel).plan() for tile in shapes)
            yield from (plan for plan in copied if completes_pages(view.facts, plan, target))
        yield expert.plan()
        gathered = view.facts.moving.step(view.facts.vector) != 1
        for tile in shapes:
            yield from all_ways(view.facts, target, tile, parallel, (True,) if gathered else (True, False))
    else:
        several = expert.sweeps() or view.facts.turned or (target.is_meshed and _streams_in_place(expert.plan()))
        for tile in view.several(TILES if several else 1):
            yield Chooser(view.facts, target, tile, parallel).plan()


def _worth_turning(known: Facts, target: Target) -> bool:
    """Whether lanes across the output's runs may be the better ones.

    The lines of scalars are read again for the next ones of a run, which a far cache is too slow for. A factor that
    would be turned for few rows has long runs of scalars instead: it had better stay as it is.
    """
    moving, turns = known.moving, known.moving.step(known.vector) != 1
    if turns and prod(i.extent for i in known.only(known.still)) <= PACKED_USES:
        longest = inf
    elif is_far(known.steps * known.extent(known.vector) * moving.bytes, target):
        return False
    else:
        longest = TURNED_UNIT if turns and known.steps <= PACKED_STEPS else SHORT_UNIT
    return known.still.plain and known.steps >= TURNED_STEPS and 4 <= known.extent(known.unit) < longest


def _streams_in_place(plan: Plan) -> bool:
    """Whether all is read where it is and the output passes the caches: wide tiles wait for the second one then."""
    return plan.streaming and not plan.packs


def _moves_most(known: Facts, target: Target) -> bool:
    """Whether results that go to a far cache take longer than the short sums before them."""
    return known.steps <= SHORT_SUM and is_far(known.output_size, target)


def objection(op: StructuredOp, target: Target) -> str | None:
    """Why a register tile would compute a normalised op badly on `target`; None where it is the right thing."""
    try:
        known = facts(op)
    except CannotLower as reason:
        return str(reason)
    columns, lanes = known.extent(known.vector), target.lanes(known.bits)
    if 4 * columns < lanes and known.steps >= columns * (2 * known.steps // lanes + DOT_OVERHEAD):
        return f"only {columns} contiguous output elements"
    rows = prod(i.extent for i in known.only(known.still))
    moving = known.moving
    if rows < MIN_ROWS_TO_TURN and moving.step(known.vector) != 1:
        return f"too few rows ({rows}) to turn the {moving.side.name.lower()} factor for"
    if rows < 2:
        access = loads(op.factors[moving.side.value])[0]
        if prod(access.buffer.shape) * 2 > op.multiplications:
            return f"every element of the {moving.side.name.lower()} factor is used once"
    return None
