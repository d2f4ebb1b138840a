"""The micro-kernel: a register tile of accumulators that stays in registers over all reduction loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..loop_ir import build
from ..loop_ir.nodes import Allocate, Block, Buffer, Call, Expr, Let, Load, Loop, Space, Stmt, Store, Type, Var
from ..loop_ir.rewrite import walk_expr
from ..naming import mint
from .affine import steps
from .ahead import hints
from .domain import Step, inside, masked_sum, summed_along
from .op import ACCUMULATOR, HalfSpace, StructuredOp, loads, names
from .plan import Plan
from .registers import Cell, get, join, side_by_side, together, whole_runs
from .tile import Region, each_extent, local, number, point
from .turned import along, flattened, store_turned
from .vector import evaluate, first_lanes, multiply_add

CHEAP_CALLS = ("fma", "fmin", "fmax", "fabs", "sqrt", "floor", "ceil", "trunc", "rint")


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor as the micro-kernel reads it. padded: reading the lanes past the end of the range is harmless."""

    value: Expr
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Windows:
    """Vectors of the factor `side`, each with the accumulators and the steps of the innermost reduction that use it."""

    side: int
    users: tuple[tuple[tuple[Cell, int], ...], ...]


def microkernel(op: StructuredOp, plan: Plan, region: Region, operands: Sequence[Operand]) -> Stmt:
    """`op` on the register tile `region`, reading the factors as `operands` say."""
    cells = cells_of(op, plan, region)
    width = Type(op.dtype, plan.lanes * plan.joined)
    registers = Buffer(mint(op.name, "acc"), width, (len(together(cells)),), (1,), Space.REGISTER)

    def exact(make: Callable[[Region, Sequence[Cell]], Stmt]) -> Stmt:
        """What touches memory that has no padding, for each extent that the region may have."""
        return each_extent(
            region, lambda part: make(part, cells if part is region else _among(cells_of(op, plan, part), cells))
        )

    body = build.block(
        exact(lambda part, own: _start(op, part, own, cells, registers)),
        _reduce(op, plan, region, operands, cells, registers),
        exact(lambda part, own: _finish(op, plan, part, own, registers)),
    )
    return Allocate((registers,), body)


def _among(own: Sequence[Cell], cells: Sequence[Cell]) -> list[Cell]:
    """`own` in the registers of those of `cells` that stand at the same places."""
    if len(own) == len(cells):
        return list(own)
    places = {tuple(c.offsets.items()): (c.register, c.part) for c in cells}
    found = ((c, places[tuple(c.offsets.items())]) for c in own)
    return [replace(c, register=register, part=part) for c, (register, part) in found]


def cells_of(op: StructuredOp, plan: Plan, region: Region) -> list[Cell]:
    """The accumulators, vectors of one row next to each other."""
    rows = _row_order(op, plan)
    lane_range = region[plan.vector]
    vectors = [
        (
            build.ramp(build.add(lane_range.origin, first), 1, plan.lanes),
            build.ramp(first, 1, plan.lanes),
            first_lanes(lane_range.size - first, plan.lanes),
        )
        for first in range(0, lane_range.size, plan.lanes)
    ]
    start = point(region)
    cells: list[Cell] = []
    for offsets in product(*(range(region[name].size) for name in rows)):
        at = dict(start)
        for name, offset in zip(rows, offsets, strict=True):
            at[name] = build.add(region[name].origin, offset)
            at[local(name)] = build.const(offset)
        row = dict(zip(rows, offsets, strict=True))
        for v, (where, within, mask) in enumerate(vectors):
            here = at | {plan.vector: where, local(plan.vector): within}
            cells.append(Cell(here, row | {plan.vector: v}, mask, len(cells)))
    return cells if plan.joined == 1 else join(cells, plan, _beside(op, plan))


def _row_order(op: StructuredOp, plan: Plan) -> list[str]:
    """The iterators other than the lanes': those that leave the vectors alone first, so that scalars live shortly."""
    beside = _beside(op, plan)
    return sorted((i.name for i in op.parallel if i.name != plan.vector), key=lambda name: name not in beside)


def _beside(op: StructuredOp, plan: Plan) -> frozenset[str]:
    """The parallel iterators that leave the vectors alone."""
    vectors = {name for f in op.factors if plan.vector in names(f) for name in names(f)}
    return frozenset(i.name for i in op.parallel if i.name not in vectors)


# --- before the sum ----------------------------------------------------------------------------------------------


def _start(
    op: StructuredOp, region: Region, cells: Sequence[Cell], everything: Sequence[Cell], registers: Buffer
) -> Stmt:
    """Set the accumulators: to the initial value, or to the partial sums that an earlier block stored.

    Of `everything` in the register tile only `cells` stand for points that exist; the others start from zero.
    """
    first = _conjunction([region[i.name].first for i in op.reductions])
    existing = {(c.register, c.part): c for c in cells}
    used = {c.register for c in cells}
    zero = build.const(0, op.dtype)

    def started(cell: Cell, value: Expr) -> Expr:
        point = existing.get((cell.register, cell.part))
        return zero if point is None else evaluate(value, point.at, point.mask)

    def fill(groups: Sequence[Sequence[Cell]], value: Expr) -> Stmt:
        return Block(tuple(_set(registers, group, [started(c, value) for c in group]) for group in groups))

    groups = together(everything)
    padding = fill([g for g in groups if g[0].register not in used], zero)
    groups = [g for g in groups if g[0].register in used]
    fresh = fill(groups, op.start)
    if not build.is_true(first):
        fresh = build.when(first, fresh, fill(groups, op.output))
    return build.block(padding, fresh)


def _set(registers: Buffer, group: Sequence[Cell], values: Sequence[Expr]) -> Stmt:
    """Give the cells of a register these values."""
    return build.store(registers, (group[0].register,), side_by_side(group, values, registers.type.lanes))


def _conjunction(conditions: Sequence[Expr]) -> Expr:
    whole: Expr = build.TRUE
    for c in conditions:
        whole = build.logical_and(whole, c)
    return whole


def _each(cells: Sequence[Cell], make: Callable[[Cell], Stmt]) -> Stmt:
    return Block(tuple(make(c) for c in cells))


# --- the sum -----------------------------------------------------------------------------------------------------


def _reduce(
    op: StructuredOp, plan: Plan, region: Region, operands: Sequence[Operand], cells: Sequence[Cell], registers: Buffer
) -> Stmt:
    """The reduction loops around one step of multiply-adds."""
    loops = plan.reductions[: len(plan.reductions) - plan.unrolled]
    unrolled = plan.reductions[len(loops) :]
    slides = unrolled and plan.joined == 1 and not op.terms
    bounded = summed_along(op, loops, unrolled)
    windows = _windows(op, plan, region, operands, cells, unrolled[-1]) if slides else None
    apart = unrolled[:-1] if windows else unrolled

    def unrolled_steps(values: dict[str, Expr], *, masked: bool = bool(op.terms) and not bounded) -> Stmt:
        """All of the unrolled reductions where the others have given values; masked: each term is asked for."""
        parts: list[Stmt] = []
        for offsets in product(*(range(region[name].size) for name in apart)):
            at = dict(values)
            for name, offset in zip(apart, offsets, strict=True):
                at |= reduction_values(region, name, build.const(offset))
            only = op.terms if masked else ()
            step = _step(op.name, operands, cells, registers, at, only) if windows is None else slide(windows, at)
            parts.append(step)
        return build.block(*parts)

    def slide(windows: Windows, at: dict[str, Expr]) -> Stmt:
        taps = range(region[unrolled[-1]].size)
        values = [at | reduction_values(region, unrolled[-1], build.const(k)) for k in taps]
        return _slide(op.name, operands, cells, registers, windows, values)

    values: dict[str, Expr] = {}
    for name in loops:
        values |= reduction_values(region, name, Var(mint(name, "r")))
    if not loops:
        return unrolled_steps(values)

    def before(at: dict[str, Expr]) -> Stmt:
        return hints(op, plan, region, values | at)

    def step(at: dict[str, Expr]) -> Stmt:
        return unrolled_steps(values | at)

    def masked(at: dict[str, Expr]) -> Stmt:
        return unrolled_steps(values | at, masked=True)

    if bounded:
        innermost = masked_sum(op, loops[-1], plan.steps, region, before, step, masked)
    else:
        innermost = _innermost(loops[-1], plan.steps, region, before, step)
    return build.loops([(mint(name, "r"), region[name].size) for name in loops[:-1]], innermost)


def _innermost(name: str, at_once: int, region: Region, before: Step, step: Step) -> Stmt:
    """The loop over the reduction `name` with `at_once` steps per iteration, then what is left of them."""
    full, rest = divmod(region[name].size, at_once)
    first = build.mul(Var(mint(name, "r")), at_once)
    parts: list[Stmt] = []
    if full:
        many = [step(reduction_values(region, name, build.add(first, s))) for s in range(at_once)]
        ahead = before(reduction_values(region, name, first))
        parts.append(Loop(mint(name, "r"), build.const(0), build.const(full), build.block(ahead, *many)))
    parts += [step(reduction_values(region, name, build.const(full * at_once + s))) for s in range(rest)]
    return build.block(*parts)


def reduction_values(region: Region, name: str, offset: Expr) -> dict[str, Expr]:
    part = region[name]
    return {name: build.add(offset, part.origin), local(name): offset, number(name): part.number}


def _step(
    prefix: str,
    operands: Sequence[Operand],
    cells: Sequence[Cell],
    registers: Buffer,
    at: dict[str, Expr],
    only: Sequence[HalfSpace] = (),
) -> Stmt:
    """One multiply-add per accumulator; what several of them read is read once and named. only: for terms in there."""
    read: dict[tuple[int, ...], Var] = {}
    sequence: list[tuple[Var, Expr] | Store] = []
    moves = [_moves(operand, cells[0]) for operand in operands]
    for group in together(cells):
        factors: list[Expr] = []
        for side, operand in enumerate(operands):
            places = [tuple(c.offsets[name] for name in moves[side]) for c in group]
            own = group[:1] if len(set(places)) == 1 else group
            key = (side, *(n for place in places[: len(own)] for n in place))
            if key not in read:
                values = [evaluate(operand.value, c.at | at, None if operand.padded else c.mask) for c in own]
                value = build.broadcast(side_by_side(group, values, registers.type.lanes), registers.type.lanes)
                read[key] = Var(mint(prefix, f"v{len(read)}"), value.type)
                sequence.append((read[key], value))
            factors.append(read[key])
        whole = Load(registers, (build.const(group[0].register),))
        total = multiply_add(factors[0], factors[1], whole)
        if only:
            kept = side_by_side(group, [inside(only, c.at | at) for c in group], registers.type.lanes)
            total = build.select(build.broadcast(kept, registers.type.lanes), total, whole)
        sequence.append(build.store(registers, (group[0].register,), total))
    return _scoped(sequence)


def _windows(
    op: StructuredOp, plan: Plan, region: Region, operands: Sequence[Operand], cells: Sequence[Cell], name: str
) -> Windows | None:
    """How accumulators share vectors of a factor over the steps of the reduction `name`; None where none do."""
    for side, operand in enumerate(operands):
        moved = steps(operand.value, cells[0].offsets.keys() | {name}) if isinstance(operand.value, Load) else None
        if operand.value is not op.factors[side] or moved is None or plan.vector not in moved:
            continue
        lanes = {iterator: step * (plan.lanes if iterator == plan.vector else 1) for iterator, step in moved.items()}
        users: dict[tuple[int, int], list[tuple[Cell, int]]] = {}
        for tap in range(region[name].size):
            for cell in cells:
                place = tap * moved.get(name, 0) + sum(lanes.get(i, 0) * n for i, n in cell.offsets.items())
                users.setdefault((place, cell.offsets[plan.vector]), []).append((cell, tap))
        if any(len({tap for _, tap in shared}) > 1 for shared in users.values()):
            return Windows(side, tuple(tuple(u) for u in users.values()))
    return None


def _slide(
    prefix: str,
    operands: Sequence[Operand],
    cells: Sequence[Cell],
    registers: Buffer,
    windows: Windows,
    values: Sequence[dict[str, Expr]],
) -> Stmt:
    """The multiply-adds of the steps at `values`, vector by vector of the factor over which windows slide."""
    moves = [_moves(operand, cells[0]) for operand in operands]
    read: dict[tuple[int, ...], Var] = {}
    sequence: list[tuple[Var, Expr] | Store] = []
    for vector, users in enumerate(windows.users):
        for cell, tap in users:
            factors: list[Expr] = []
            for side, operand in enumerate(operands):
                own = (tap, *(cell.offsets[name] for name in moves[side]))
                key = (side, vector) if side == windows.side else (side, *own)
                if key not in read:
                    value = evaluate(operand.value, cell.at | values[tap], None if operand.padded else cell.mask)
                    value = build.broadcast(value, registers.type.lanes)
                    read[key] = Var(mint(prefix, f"v{len(read)}"), value.type)
                    sequence.append((read[key], value))
                factors.append(read[key])
            total = multiply_add(factors[0], factors[1], get(registers, cell))
            sequence.append(build.store(registers, (cell.register,), total))
    return _scoped(sequence)


def _moves(operand: Operand, cell: Cell) -> list[str]:
    """The tile's iterators that change what an operand reads."""
    used = names(operand.value)
    return [name for name in cell.offsets if name in used or local(name) in used or number(name) in used]


def _scoped(sequence: Sequence[tuple[Var, Expr] | Store]) -> Stmt:
    """Definitions and stores in order, each definition reaching over all that follows."""
    tail: list[Stmt] = []
    for item in reversed(sequence):
        if isinstance(item, Store):
            tail.append(item)
        else:
            name, value = item
            tail = [Let(name.name, value, Block(tuple(reversed(tail))))]
    return build.block(*reversed(tail))


# --- after the sum -----------------------------------------------------------------------------------------------


def _finish(op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Cell], registers: Buffer) -> Stmt:
    """Store the accumulators: as partial sums, or through the epilogue when the sum is complete."""
    last = _conjunction([region[i.name].last for i in op.reductions])
    if op.epilogue is None:
        last = build.TRUE
    store = _turned if along(op, plan, region) else _staged if _calls(op.stored) else _direct
    complete = store(op, plan, region, cells, registers)
    if build.is_true(last):
        return complete
    partial = _each(cells, lambda c: _put(op, c, get(registers, c)))
    return build.when(last, complete, partial)


def _direct(op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Cell], registers: Buffer) -> Stmt:
    cells = whole_runs(cells, plan)
    ordered = _by_address(op, plan, cells) if plan.streaming else cells
    return _each(ordered, lambda c: _put(op, c, _stored(op, c, get(registers, c)), streaming=plan.streaming))


def _by_address(op: StructuredOp, plan: Plan, cells: Sequence[Cell]) -> Sequence[Cell]:
    """In the order of memory: what goes past the caches waits until the parts of a line are there, in few places."""
    moved = steps(op.output, cells[0].offsets)
    if moved is None:
        return cells
    apart = {name: step * (plan.lanes if name == plan.vector else 1) for name, step in moved.items()}
    return sorted(cells, key=lambda c: sum(apart.get(name, 0) * n for name, n in c.offsets.items()))


def _stored(op: StructuredOp, cell: Cell, total: Expr) -> Expr:
    return evaluate(op.stored, cell.at | {ACCUMULATOR: total}, cell.mask)


def _put(op: StructuredOp, cell: Cell, value: Expr, *, streaming: bool = False) -> Store:
    where = tuple(evaluate(i, cell.at) for i in op.output.indices)
    store = build.store(op.output.buffer, where, value, mask=cell.mask)
    return replace(store, streaming=streaming)


def _calls(e: Expr) -> bool:
    """Whether `e` calls a function that is more than an instruction or two."""
    return any(isinstance(x, Call) and x.function not in CHEAP_CALLS for x in walk_expr(e))


def _staged(op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Cell], registers: Buffer) -> Stmt:
    """Spill the sums once and run the epilogue in a loop: a call would spill every live register at every call."""
    buffer, spill = _spill(op, plan, region, [get(registers, c) for c in cells])
    return Allocate((buffer,), build.block(spill, rows_from(buffer, op, plan, region, cells[: _vectors(plan, region)])))


def _turned(op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Cell], registers: Buffer) -> Stmt:
    """Store the sums across, through the epilogue: on whole vectors of sums where what it reads suits their lanes."""
    rows, at = _row_order(op, plan), point(region)
    sums = [get(registers, c) for c in cells]
    if not _suits_lanes(op, plan.vector):
        buffer, spill = _spill(op, plan, region, sums)
        return Allocate((buffer,), build.block(spill, store_turned(op, plan, region, rows, buffer, at)))
    ready: Stmt = build.NOTHING
    if _calls(op.stored):
        buffer, spill = _spill(op, plan, region, sums)
        here = Load(buffer, (flattened(rows, region, {n: Var(local(n)) for n in rows}), Var(local(plan.vector))))
        kept = replace(plan, streaming=False)
        ready = rows_from(buffer, replace(op, output=here), kept, region, cells[: _vectors(plan, region)])
    else:
        buffer, spill = _spill(op, plan, region, [_stored(op, c, s) for c, s in zip(cells, sums, strict=True)])
    across = store_turned(replace(op, epilogue=None), plan, region, rows, buffer, at)
    return Allocate((buffer,), build.block(spill, ready, across))


def _suits_lanes(op: StructuredOp, vector: str) -> bool:
    """Whether the epilogue makes of sums what can stand in their place, and all it reads is contiguous along `vector`.

    Or the same in all lanes.
    """
    if op.epilogue is None or op.stored.type.dtype != op.dtype:
        return False
    moved = [steps(load, [i.name for i in op.iterators]) for load in loads(op.epilogue)]
    return all(m is not None and m.get(vector, 0) in (0, 1) for m in moved)


def rows_from(buffer: Buffer, op: StructuredOp, plan: Plan, region: Region, columns: Sequence[Cell]) -> Stmt:
    """Store the sums in `buffer`, a row of it per row of the register tile; `columns` are the cells of the first."""
    rows = [name for name in _row_order(op, plan) if region[name].size > 1]
    offsets: dict[str, Expr] = {name: Var(mint(name, "row")) for name in rows}
    at = dict(columns[0].at)
    for name, row in offsets.items():
        at |= {name: build.add(region[name].origin, row), local(name): row}
    flat = flattened(rows, region, offsets)
    body = build.block(*(_epilogue(op, buffer, flat, at, c, v, plan) for v, c in enumerate(columns)))
    return build.loops([(mint(name, "row"), region[name].size) for name in rows], body)


def _spill(op: StructuredOp, plan: Plan, region: Region, values: Sequence[Expr]) -> tuple[Buffer, Stmt]:
    """A buffer with a row per row of the register tile, and what stores `values`, one of each cell, there."""
    vectors = _vectors(plan, region)
    shape = (len(values) // vectors, vectors * plan.lanes)
    buffer = build.buffer(mint(op.name, "sums"), op.dtype, shape, Space.SCRATCH)
    places = (divmod(k, vectors) for k in range(len(values)))
    at = ((row, build.ramp(v * plan.lanes, 1, plan.lanes)) for row, v in places)
    return buffer, Block(tuple(build.store(buffer, i, value) for i, value in zip(at, values, strict=True)))


def _vectors(plan: Plan, region: Region) -> int:
    """Vectors in a row of the register tile."""
    return -(-region[plan.vector].size // plan.lanes)


def _epilogue(
    op: StructuredOp, buffer: Buffer, row: Expr, at: dict[str, Expr], column: Cell, v: int, plan: Plan
) -> Stmt:
    here = at | {plan.vector: column.at[plan.vector], local(plan.vector): column.at[local(plan.vector)]}
    total = build.load(buffer, row, build.ramp(v * plan.lanes, 1, plan.lanes))
    cell = Cell(here, column.offsets, column.mask, column.register)
    return _put(op, cell, _stored(op, cell, total), streaming=plan.streaming)
