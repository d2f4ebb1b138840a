"""The micro-kernel: a register tile of accumulators that stays in registers over all reduction loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ...core.internal_names import internal_name
from ...loop_ir import build
from ...loop_ir.nodes import Allocate, Block, Buffer, Call, Expr, Let, Load, Loop, Space, Stmt, Store, Type, Var
from ...loop_ir.rewrite import walk_expr
from ..analysis.access_strides import access_strides
from ..op import ACCUMULATOR, HalfSpace, StructuredOp, loads_in, variable_names
from ..plan import Plan
from .accumulators import (
    Accumulator,
    concat_subvectors,
    group_by_register,
    read_accumulator,
    share_registers,
    whole_register_runs,
)
from .masked_domain import Step, emit_membership, find_bounded_reduction, masked_sum
from .panel_prefetch import prefetch_hints_for_panel
from .store_transposed import flat_row_index, store_transposed, transposed_iterator
from .tile import Region, local_var, region_origin, specialize_padded_extents, tile_number_var
from .transposed_reads import find_transposed_reads, stage_transposed_reads
from .vector_expr import first_lanes_mask, multiply_add, substitute_vectorized

CHEAP_CALLS = ("fma", "fmin", "fmax", "fabs", "sqrt", "floor", "ceil", "trunc", "rint", "tf32")


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor as the micro-kernel reads it. padded: whether lanes past the end of the range may be read."""

    value: Expr
    padded: bool = False


@dataclass(frozen=True, slots=True)
class WindowLoads:
    """Vectors that several steps of a window share.

    Attributes:
        side: the factor (0: left, 1: right).
        users: for each vector of it, the (accumulator, step of the innermost reduction) pairs that use it.
    """

    side: int
    users: tuple[tuple[tuple[Accumulator, int], ...], ...]


def microkernel(op: StructuredOp, plan: Plan, region: Region, operands: Sequence[Operand]) -> Stmt:
    """`op` on the register tile `region`, with the factors read as given by `operands`."""
    cells = tile_accumulators(op, plan, region)
    width = Type(op.dtype, plan.lanes * plan.vectors_per_register)
    registers = Buffer(internal_name(op.name, "acc"), width, (len(group_by_register(cells)),), (1,), Space.REGISTER)

    def emit_exact(make: Callable[[Region, Sequence[Accumulator]], Stmt]) -> Stmt:
        """Code that accesses memory without padding, specialized for each extent that the region may have."""
        return specialize_padded_extents(
            region,
            lambda part: make(
                part, cells if part is region else _assign_cell_registers(tile_accumulators(op, plan, part), cells)
            ),
        )

    body = build.block(
        emit_exact(lambda part, own: _emit_accumulator_init(op, part, own, cells, registers)),
        _emit_reduction_loops(op, plan, region, operands, cells, registers),
        emit_exact(lambda part, own: _emit_accumulator_stores(op, plan, part, own, registers)),
    )
    return Allocate((registers,), body)


def _assign_cell_registers(own: Sequence[Accumulator], cells: Sequence[Accumulator]) -> list[Accumulator]:
    """`own` with the registers that `cells` have at the same offsets."""
    if len(own) == len(cells):
        return list(own)
    places = {tuple(c.offsets.items()): (c.register, c.part) for c in cells}
    found = ((c, places[tuple(c.offsets.items())]) for c in own)
    return [replace(c, register=register, part=part) for c, (register, part) in found]


def tile_accumulators(op: StructuredOp, plan: Plan, region: Region) -> list[Accumulator]:
    """The accumulators of a register tile, row by row."""
    rows = _row_order(op, plan)
    lane_range = region[plan.vector]
    vectors = [
        (
            build.ramp(build.add(lane_range.origin, first), 1, plan.lanes),
            build.ramp(first, 1, plan.lanes),
            first_lanes_mask(lane_range.size - first, plan.lanes),
        )
        for first in range(0, lane_range.size, plan.lanes)
    ]
    start = region_origin(region)
    cells: list[Accumulator] = []
    for offsets in product(*(range(region[name].size) for name in rows)):
        at = dict(start)
        for name, offset in zip(rows, offsets, strict=True):
            at[name] = build.add(region[name].origin, offset)
            at[local_var(name)] = build.const(offset)
        row = dict(zip(rows, offsets, strict=True))
        for v, (where, within, mask) in enumerate(vectors):
            here = at | {plan.vector: where, local_var(plan.vector): within}
            cells.append(Accumulator(here, row | {plan.vector: v}, mask, len(cells)))
    return (
        cells if plan.vectors_per_register == 1 else share_registers(cells, plan, _iterators_beside_vectors(op, plan))
    )


def _row_order(op: StructuredOp, plan: Plan) -> list[str]:
    """The parallel iterators other than the lanes'; those of the vector operand are inside, so scalars live shortly."""
    beside = _iterators_beside_vectors(op, plan)
    return sorted((i.name for i in op.parallel if i.name != plan.vector), key=lambda name: name not in beside)


def _iterators_beside_vectors(op: StructuredOp, plan: Plan) -> frozenset[str]:
    """The parallel iterators that no factor with vectors depends on."""
    vectors = {name for f in op.factors if plan.vector in variable_names(f) for name in variable_names(f)}
    return frozenset(i.name for i in op.parallel if i.name not in vectors)


# --- before the sum ----------------------------------------------------------------------------------------------


def _emit_accumulator_init(
    op: StructuredOp, region: Region, cells: Sequence[Accumulator], everything: Sequence[Accumulator], registers: Buffer
) -> Stmt:
    """Set the accumulators: to the initial value, or to the partial sums that an earlier block stored.

    Of the accumulators `everything` of the register tile, only `cells` are in the domain; the others start from zero.
    """
    first = _and_conditions([region[i.name].first for i in op.reductions])
    existing = {(c.register, c.part): c for c in cells}
    used = {c.register for c in cells}
    zero = build.const(0, op.dtype)

    def start_sum(cell: Accumulator, value: Expr) -> Expr:
        point = existing.get((cell.register, cell.part))
        return zero if point is None else substitute_vectorized(value, point.at, point.mask)

    def fill(groups: Sequence[Sequence[Accumulator]], value: Expr) -> Stmt:
        return Block(
            tuple(_emit_register_store(registers, group, [start_sum(c, value) for c in group]) for group in groups)
        )

    groups = group_by_register(everything)
    padding = fill([g for g in groups if g[0].register not in used], zero)
    groups = [g for g in groups if g[0].register in used]
    fresh = fill(groups, op.start)
    if not build.is_true(first):
        fresh = build.when(first, fresh, fill(groups, op.output))
    return build.block(padding, fresh)


def _emit_register_store(registers: Buffer, group: Sequence[Accumulator], values: Sequence[Expr]) -> Stmt:
    """Store these values in the cells of a register."""
    return build.store(registers, (group[0].register,), concat_subvectors(group, values, registers.type.lanes))


def _and_conditions(conditions: Sequence[Expr]) -> Expr:
    whole: Expr = build.TRUE
    for c in conditions:
        whole = build.logical_and(whole, c)
    return whole


def _emit_each(cells: Sequence[Accumulator], make: Callable[[Accumulator], Stmt]) -> Stmt:
    return Block(tuple(make(c) for c in cells))


# --- the sum -----------------------------------------------------------------------------------------------------


def _emit_reduction_loops(
    op: StructuredOp,
    plan: Plan,
    region: Region,
    operands: Sequence[Operand],
    cells: Sequence[Accumulator],
    registers: Buffer,
) -> Stmt:
    """The reduction loops around one step of multiply-adds."""
    loops = plan.reductions[: len(plan.reductions) - plan.unrolled]
    unrolled = plan.reductions[len(loops) :]
    slides = unrolled and plan.vectors_per_register == 1 and not op.terms
    bounded = find_bounded_reduction(op, loops, unrolled)
    windows = _find_window_loads(op, plan, region, operands, cells, unrolled[-1]) if slides else None
    apart = unrolled[:-1] if windows else unrolled

    def unrolled_steps(values: dict[str, Expr], *, masked: bool = bool(op.terms) and not bounded) -> Stmt:
        """The unrolled reductions for given values of the others; masked: test for each term whether it is summed."""
        parts: list[Stmt] = []
        for offsets in product(*(range(region[name].size) for name in apart)):
            at = dict(values)
            for name, offset in zip(apart, offsets, strict=True):
                at |= reduction_values(region, name, build.const(offset))
            only = op.terms if masked else ()
            step = (
                _emit_multiply_adds(op.name, operands, cells, registers, at, only)
                if windows is None
                else slide(windows, at)
            )
            parts.append(step)
        return build.block(*parts)

    def slide(windows: WindowLoads, at: dict[str, Expr]) -> Stmt:
        taps = range(region[unrolled[-1]].size)
        values = [at | reduction_values(region, unrolled[-1], build.const(k)) for k in taps]
        return _emit_sliding_multiply_adds(op.name, operands, cells, registers, windows, values)

    values: dict[str, Expr] = {}
    for name in loops:
        values |= reduction_values(region, name, Var(internal_name(name, "r")))
    if not loops:
        return unrolled_steps(values)

    def before(at: dict[str, Expr]) -> Stmt:
        return prefetch_hints_for_panel(op, plan, region, values | at)

    def step(at: dict[str, Expr]) -> Stmt:
        return unrolled_steps(values | at)

    def emit_masked_step(at: dict[str, Expr]) -> Stmt:
        return unrolled_steps(values | at, masked=True)

    if bounded:
        innermost = masked_sum(op, loops[-1], plan.unroll_steps, region, before, step, emit_masked_step)
    else:
        innermost = _emit_innermost_loop(loops[-1], plan.unroll_steps, region, before, step)
    return build.loops([(internal_name(name, "r"), region[name].size) for name in loops[:-1]], innermost)


def _emit_innermost_loop(name: str, at_once: int, region: Region, before: Step, step: Step) -> Stmt:
    """The loop over the reduction `name` with `at_once` steps per iteration, then the remaining steps."""
    full, rest = divmod(region[name].size, at_once)
    first = build.mul(Var(internal_name(name, "r")), at_once)
    parts: list[Stmt] = []
    if full:
        many = [step(reduction_values(region, name, build.add(first, s))) for s in range(at_once)]
        ahead = before(reduction_values(region, name, first))
        parts.append(Loop(internal_name(name, "r"), build.const(0), build.const(full), build.block(ahead, *many)))
    parts += [step(reduction_values(region, name, build.const(full * at_once + s))) for s in range(rest)]
    return build.block(*parts)


def reduction_values(region: Region, name: str, offset: Expr) -> dict[str, Expr]:
    part = region[name]
    return {name: build.add(offset, part.origin), local_var(name): offset, tile_number_var(name): part.number}


def _emit_multiply_adds(
    prefix: str,
    operands: Sequence[Operand],
    cells: Sequence[Accumulator],
    registers: Buffer,
    at: dict[str, Expr],
    only: Sequence[HalfSpace] = (),
) -> Stmt:
    """One multiply-add per register; operands that registers share are read once. only: conditions on the terms."""
    read: dict[tuple[int, ...], FactorVector] = {}
    sequence: list[tuple[Var, Expr] | Store] = []
    moves = [_iterators_moving_operand(operand, cells[0]) for operand in operands]
    for group in group_by_register(cells):
        factors: list[FactorVector] = []
        for side, operand in enumerate(operands):
            places = [tuple(c.offsets[name] for name in moves[side]) for c in group]
            own = group[:1] if len(set(places)) == 1 else group
            key = (side, *(n for place in places[: len(own)] for n in place))
            if key not in read:
                values = [
                    substitute_vectorized(operand.value, c.at | at, None if operand.padded else c.mask) for c in own
                ]
                value = concat_subvectors(group, values, registers.type.lanes)
                read[key] = _bind_factor(internal_name(prefix, f"v{len(read)}"), value, registers, sequence)
            factors.append(read[key])
        whole = Load(registers, (build.const(group[0].register),))
        total = _multiply_factors(factors, whole)
        if only:
            kept = concat_subvectors(group, [emit_membership(only, c.at | at) for c in group], registers.type.lanes)
            total = build.select(build.broadcast(kept, registers.type.lanes), total, whole)
        sequence.append(build.store(registers, (group[0].register,), total))
    return _nest_definitions(sequence)


def _find_window_loads(
    op: StructuredOp, plan: Plan, region: Region, operands: Sequence[Operand], cells: Sequence[Accumulator], name: str
) -> WindowLoads | None:
    """The vectors of a factor that accumulators share over the steps of the reduction `name`; None if none."""
    for side, operand in enumerate(operands):
        moved = (
            access_strides(operand.value, cells[0].offsets.keys() | {name}) if isinstance(operand.value, Load) else None
        )
        if operand.value is not op.factors[side] or moved is None or plan.vector not in moved:
            continue
        lanes = {iterator: step * (plan.lanes if iterator == plan.vector else 1) for iterator, step in moved.items()}
        users: dict[tuple[int, int], list[tuple[Accumulator, int]]] = {}
        for tap in range(region[name].size):
            for cell in cells:
                place = tap * moved.get(name, 0) + sum(lanes.get(i, 0) * n for i, n in cell.offsets.items())
                users.setdefault((place, cell.offsets[plan.vector]), []).append((cell, tap))
        if any(len({tap for _, tap in shared}) > 1 for shared in users.values()):
            return WindowLoads(side, tuple(tuple(u) for u in users.values()))
    return None


def _emit_sliding_multiply_adds(
    prefix: str,
    operands: Sequence[Operand],
    cells: Sequence[Accumulator],
    registers: Buffer,
    windows: WindowLoads,
    values: Sequence[dict[str, Expr]],
) -> Stmt:
    """The multiply-adds of the steps at `values`, in the order of the vectors over which windows slide."""
    moves = [_iterators_moving_operand(operand, cells[0]) for operand in operands]
    read: dict[tuple[int, ...], FactorVector] = {}
    sequence: list[tuple[Var, Expr] | Store] = []
    for vector, users in enumerate(windows.users):
        for cell, tap in users:
            factors: list[FactorVector] = []
            for side, operand in enumerate(operands):
                own = (tap, *(cell.offsets[name] for name in moves[side]))
                key = (side, vector) if side == windows.side else (side, *own)
                if key not in read:
                    value = substitute_vectorized(
                        operand.value, cell.at | values[tap], None if operand.padded else cell.mask
                    )
                    read[key] = _bind_factor(internal_name(prefix, f"v{len(read)}"), value, registers, sequence)
                factors.append(read[key])
            total = _multiply_factors(factors, read_accumulator(registers, cell))
            sequence.append(build.store(registers, (cell.register,), total))
    return _nest_definitions(sequence)


@dataclass(frozen=True, slots=True)
class FactorVector:
    """A vector of a factor. is_scalar: whether its lanes are one scalar."""

    vector: Var
    is_scalar: bool


def _bind_factor(name: str, value: Expr, registers: Buffer, sequence: list[tuple[Var, Expr] | Store]) -> FactorVector:
    """Append the definition of `name` as `value`, in all lanes of a register, to `sequence`."""
    vector = build.broadcast(value, registers.type.lanes)
    bound = Var(name, vector.type)
    sequence.append((bound, vector))
    return FactorVector(bound, value.type.lanes == 1)


def _multiply_factors(factors: Sequence[FactorVector], total: Expr) -> Expr:
    """`total` plus the product. A scalar comes last: there, dot products can broadcast it while they load it."""
    first, last = sorted(factors, key=lambda f: f.is_scalar)
    return multiply_add(first.vector, last.vector, total)


def _iterators_moving_operand(operand: Operand, cell: Accumulator) -> list[str]:
    """The tile's iterators that an operand depends on."""
    used = variable_names(operand.value)
    return [name for name in cell.offsets if name in used or local_var(name) in used or tile_number_var(name) in used]


def _nest_definitions(sequence: Sequence[tuple[Var, Expr] | Store]) -> Stmt:
    """Definitions and stores in order, as nested `Let`s: each definition encloses everything that follows."""
    tail: list[Stmt] = []
    for item in reversed(sequence):
        if isinstance(item, Store):
            tail.append(item)
        else:
            name, value = item
            tail = [Let(name.name, value, Block(tuple(reversed(tail))))]
    return build.block(*reversed(tail))


# --- after the sum -----------------------------------------------------------------------------------------------


def _emit_accumulator_stores(
    op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Accumulator], registers: Buffer
) -> Stmt:
    """Store the accumulators: as partial sums, or through the epilogue when the sum is complete."""
    last = _and_conditions([region[i.name].last for i in op.reductions])
    if op.epilogue is None:
        last = build.TRUE
    store = (
        _store_transposed
        if transposed_iterator(op, plan, region)
        else _store_staged
        if _has_costly_call(op.stored_value) or find_transposed_reads(op, plan, region)
        else _store_in_place
    )
    complete = store(op, plan, region, cells, registers)
    if build.is_true(last):
        return complete
    partial = _emit_each(cells, lambda c: _emit_store(op, c, read_accumulator(registers, c)))
    return build.when(last, complete, partial)


def _store_in_place(
    op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Accumulator], registers: Buffer
) -> Stmt:
    cells = whole_register_runs(cells, plan)
    ordered = _sort_by_address(op, plan, cells) if plan.nontemporal else cells
    return _emit_each(
        ordered,
        lambda c: _emit_store(op, c, _finish_sum(op, c, read_accumulator(registers, c)), streaming=plan.nontemporal),
    )


def _sort_by_address(op: StructuredOp, plan: Plan, cells: Sequence[Accumulator]) -> Sequence[Accumulator]:
    """`cells` in the order of output addresses: a processor combines non-temporal stores into few open lines."""
    moved = access_strides(op.output, cells[0].offsets)
    if moved is None:
        return cells
    apart = {name: step * (plan.lanes if name == plan.vector else 1) for name, step in moved.items()}
    return sorted(cells, key=lambda c: sum(apart.get(name, 0) * n for name, n in c.offsets.items()))


def _finish_sum(op: StructuredOp, cell: Accumulator, total: Expr) -> Expr:
    return substitute_vectorized(op.stored_value, cell.at | {ACCUMULATOR: total}, cell.mask)


def _emit_store(op: StructuredOp, cell: Accumulator, value: Expr, *, streaming: bool = False) -> Store:
    where = tuple(substitute_vectorized(i, cell.at) for i in op.output.indices)
    store = build.store(op.output.buffer, where, value, mask=cell.mask)
    return replace(store, nontemporal=streaming)


def _has_costly_call(e: Expr) -> bool:
    """Whether `e` calls a function that takes more than an instruction or two."""
    return any(isinstance(x, Call) and x.function not in CHEAP_CALLS for x in walk_expr(e))


def _store_staged(
    op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Accumulator], registers: Buffer
) -> Stmt:
    """Spill the sums once and run the epilogue in a loop: a call would spill every live register at every call.

    Operands that lie across the lanes are transposed before.
    """
    buffer, spill = _emit_accumulator_spill(op, plan, region, [read_accumulator(registers, c) for c in cells])
    columns = cells[: _count_row_vectors(plan, region)]
    if not (reads := find_transposed_reads(op, plan, region)):
        return Allocate((buffer,), build.block(spill, store_rows(buffer, op, plan, region, columns)))
    epilogue, turned, fill = stage_transposed_reads(op, plan, region, reads)
    rows = store_rows(buffer, replace(op, epilogue=epilogue), plan, region, columns)
    return Allocate((buffer, *turned), build.block(spill, fill, rows))


def _store_transposed(
    op: StructuredOp, plan: Plan, region: Region, cells: Sequence[Accumulator], registers: Buffer
) -> Stmt:
    """Store the sums transposed; the epilogue runs before on whole vectors of sums, if its operands allow that."""
    rows, at = _row_order(op, plan), region_origin(region)
    sums = [read_accumulator(registers, c) for c in cells]
    if not _is_epilogue_vectorizable(op, plan.vector):
        buffer, spill = _emit_accumulator_spill(op, plan, region, sums)
        return Allocate((buffer,), build.block(spill, store_transposed(op, plan, region, rows, buffer, at)))
    ready: Stmt = build.NOTHING
    if _has_costly_call(op.stored_value):
        buffer, spill = _emit_accumulator_spill(op, plan, region, sums)
        here = Load(
            buffer, (flat_row_index(rows, region, {n: Var(local_var(n)) for n in rows}), Var(local_var(plan.vector)))
        )
        kept = replace(plan, nontemporal=False)
        ready = store_rows(buffer, replace(op, output=here), kept, region, cells[: _count_row_vectors(plan, region)])
    else:
        buffer, spill = _emit_accumulator_spill(
            op, plan, region, [_finish_sum(op, c, s) for c, s in zip(cells, sums, strict=True)]
        )
    across = store_transposed(replace(op, epilogue=None), plan, region, rows, buffer, at)
    return Allocate((buffer,), build.block(spill, ready, across))


def _is_epilogue_vectorizable(op: StructuredOp, vector: str) -> bool:
    """Whether the epilogue can run on vectors of sums: its loads are contiguous or constant along `vector`."""
    if op.epilogue is None or op.stored_value.type.dtype != op.dtype:
        return False
    moved = [access_strides(load, [i.name for i in op.iterators]) for load in loads_in(op.epilogue)]
    return all(m is not None and m.get(vector, 0) in (0, 1) for m in moved)


def store_rows(buffer: Buffer, op: StructuredOp, plan: Plan, region: Region, columns: Sequence[Accumulator]) -> Stmt:
    """Store the sums in `buffer`, which has a row per row of the register tile, through the epilogue.

    columns: the cells of the first row.
    """
    rows = [name for name in _row_order(op, plan) if region[name].size > 1]
    offsets: dict[str, Expr] = {name: Var(internal_name(name, "row")) for name in rows}
    at = dict(columns[0].at)
    for name, row in offsets.items():
        at |= {name: build.add(region[name].origin, row), local_var(name): row}
    flat = flat_row_index(rows, region, offsets)
    body = build.block(*(_emit_epilogue_store(op, buffer, flat, at, c, v, plan) for v, c in enumerate(columns)))
    return build.loops([(internal_name(name, "row"), region[name].size) for name in rows], body)


def _emit_accumulator_spill(
    op: StructuredOp, plan: Plan, region: Region, values: Sequence[Expr]
) -> tuple[Buffer, Stmt]:
    """A buffer with a row per row of the register tile, and the stores of `values`, one per accumulator, to it."""
    vectors = _count_row_vectors(plan, region)
    shape = (len(values) // vectors, vectors * plan.lanes)
    buffer = build.buffer(internal_name(op.name, "sums"), op.dtype, shape, Space.SCRATCH)
    places = (divmod(k, vectors) for k in range(len(values)))
    at = ((row, build.ramp(v * plan.lanes, 1, plan.lanes)) for row, v in places)
    return buffer, Block(tuple(build.store(buffer, i, value) for i, value in zip(at, values, strict=True)))


def _count_row_vectors(plan: Plan, region: Region) -> int:
    """Vectors in a row of the register tile."""
    return -(-region[plan.vector].size // plan.lanes)


def _emit_epilogue_store(
    op: StructuredOp, buffer: Buffer, row: Expr, at: dict[str, Expr], column: Accumulator, v: int, plan: Plan
) -> Stmt:
    here = at | {plan.vector: column.at[plan.vector], local_var(plan.vector): column.at[local_var(plan.vector)]}
    total = build.load(buffer, row, build.ramp(v * plan.lanes, 1, plan.lanes))
    cell = Accumulator(here, column.offsets, column.mask, column.register)
    return _emit_store(op, cell, _finish_sum(op, cell, total), streaming=plan.nontemporal)
