"""Permute tensors of a contraction into the order of a matrix product if that pays (TTGT).

`c(a,b,i) +=! x(b,k,a) * y(k,i)` becomes `copy_tensor(k,b,a) = x(b,k,a)` and a matrix product in which the neighbors `b`
and `a` are fused. Short indices in unfavorable orders waste vector lanes and have no contiguous runs; a copy costs a
few dozen multiply-adds per element. The product may also go to a temporary, which is then permuted into the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product, takewhile
from math import inf, prod

from ...core.decisions import Decision, Rival, close_book, is_recording, note_decision
from ...core.errors import CannotLower
from ...core.internal_names import internal_name
from ...core.memory_layout import contiguous_strides
from ...loop_ir.nodes import Buffer, Type
from ...machine import (
    COPY_START_CYCLES,
    FAR_COPY_FACTOR,
    REORDER_RUN_CYCLES,
    REORDER_SHORT_TRANSPOSE_CYCLES,
    REORDER_TRANSPOSE_CYCLES,
)
from ...options import CpuOptions
from ...structured.cost.plan_cost import plan_cycles
from ...structured.cost.tile_cost import is_in_mesh_llc
from ...structured.lower.tile import num_tiles
from ...structured.match.drop_unit_dims import drop_unit_dims
from ...structured.match.match_contraction import match_contraction
from ...structured.match.product_matching import split_product
from ...structured.op import StructuredOp
from ...structured.planners.select import select_plan, why_not_microkernel
from ...target import CpuTarget
from ...tc_lang import ir as tc
from ...tc_lang.ir import BoundFunction, BoundIndex, BoundStatement, Role, Tensor
from ...thresholds import (
    LANE_SUM_TERMS,
    MAX_COPIED_L2_SIZES,
    MAX_REORDERED_L2_SIZES,
    MIN_REORDERED_SIDE,
    REORDER_GAIN,
    REORDERED_SHORT_RUN,
    REORDERINGS_PLANNED,
)
from .collapse import collapse
from .lanes_along_sum import combining_cycles, lanes_along_sum, with_lanes_along_sum

Order = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Contraction:
    """`c(..) +=! x(..) * y(..)`, where subscripts are plain indices and every index is in two of the three tensors.

    orders: the indices of the left factor, the right factor and the output.
    """

    function: BoundFunction
    statement: BoundStatement
    accesses: tuple[tc.Access, tc.Access, tc.Access]

    @property
    def orders(self) -> tuple[Order, Order, Order]:
        x, y, c = (tuple(e.name for e in a.subscripts if isinstance(e, tc.Index)) for a in self.accesses)
        return x, y, c

    @property
    def extents(self) -> Mapping[str, int]:
        return {i.name: i.extent for i in self.statement.indices}

    @property
    def bits(self) -> int:
        """The bits of the type in which terms are summed."""
        return self.statement.value.dtype.bits

    @property
    def bytes(self) -> int:
        """The bytes of all three tensors."""
        return sum(map(self.size, self.orders)) * self.bits // 8

    @property
    def summed_run(self) -> int:
        """The number of terms that are contiguous in both factors; vectors along these need no reordering."""
        x, y, _ = self.orders
        return self.size(_find_common_run(x, y)) if x[-1] == y[-1] else 1

    def size(self, names: Sequence[str]) -> int:
        return prod(self.extents[n] for n in names)


Orders = tuple[Order | None, Order | None, Order | None]
"""The orders into which the left factor, the right factor and the output are copied; None: not copied."""


def reorder(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> BoundFunction:
    """`function` with copies around its only statement, if that is a contraction that gains by them.

    Contractions among other statements, or of tensors with gaps, are only vectorized along their sums if that pays.
    Unchanged if the user gave a schedule.
    """
    if not options.use_microkernels or options.schedule is not None:
        return function
    parallel = options.grain_size > 0
    found = _contraction(function)
    if found is None:
        return _vectorize_sums(function, target, parallel=parallel)
    if found.bytes > MAX_REORDERED_L2_SIZES * target.cache[1]:
        return function
    least = REORDER_GAIN * _predict_op_cycles(_build_structured_op(function), target, parallel=parallel)
    if least == inf and found.summed_run >= LANE_SUM_TERMS:
        return function
    possible = enumerate(orders for orders in _enumerate_orders(found) if _can_cache_copies(found, orders, target))
    ways = sorted((_bound_reordered_cycles(found, orders, target), n, orders) for n, orders in possible)
    best = function
    for bound, _, orders in ways[:REORDERINGS_PLANNED]:
        if bound >= least:
            break
        candidate, multiply = _reorder_operands(found, orders)
        name = f"S{sum(order is not None for order in orders[:2])}"
        cycles = _copy_cycles(found, orders, target) + _predict_op_cycles(
            _build_structured_op(multiply, name), target, parallel=parallel
        )
        if cycles < least:
            best, least = candidate, cycles
    best = _with_lanes_along_sum(found, least, target, parallel=parallel) or best
    if best is not function and is_recording():
        _record_order(function, best, target, parallel=parallel)
    return best


def _vectorize_sums(function: BoundFunction, target: CpuTarget, *, parallel: bool) -> BoundFunction:
    """`function` with each of its contractions vectorized along the sum for which that pays."""
    for s in function.statements:
        found = _contraction(replace(function, statements=(s,)), dense=False)
        lanes = 0 if found is None else lanes_along_sum(s, target.lanes(found.bits))
        if found is None or not lanes or internal_name(s.target, "lanes") in {t.name for t in function.tensors}:
            continue
        plain = _predict_op_cycles(_build_structured_op(found.function), target, parallel=parallel)
        candidate, multiply = with_lanes_along_sum(function, s, lanes)
        cycles = combining_cycles(s) + _predict_op_cycles(_build_structured_op(multiply), target, parallel=parallel)
        if plain < inf and cycles < REORDER_GAIN * plain:
            function = candidate
            _record_lanes(s, lanes, cycles, plain)
    return function


def _record_lanes(s: BoundStatement, lanes: int, cycles: float, plain: float) -> None:
    """Record that `s` is vectorized along its sum."""
    if is_recording():
        why = "its few rows do not pay for transposing the other factor, which is contiguous along the sum"
        rival = Rival("the product as it is written", plain)
        chosen = f"{lanes} lanes along the sum, added up afterwards"
        note_decision(Decision("order", (s.name,), chosen, why, (("cycles", cycles),), (rival,)))


def _record_order(function: BoundFunction, best: BoundFunction, target: CpuTarget, *, parallel: bool) -> None:
    """Record which tensors are copied into another order."""
    (s,) = function.statements
    made = [t.name for t in best.tensors if t not in function.tensors]
    plain = Rival(
        "the product as it is written", _predict_op_cycles(_build_structured_op(function), target, parallel=parallel)
    )
    why = "the product takes less with its operands in the order in which it reads them, copies included"
    note_decision(
        Decision("order", (s.name,), f"copies {', '.join(made)}" if made else "another order", why, (), (plain,))
    )


def _with_lanes_along_sum(
    found: _Contraction, least: float, target: CpuTarget, *, parallel: bool
) -> BoundFunction | None:
    """The function vectorized along the sum, perhaps with a factor copied for it; None unless below `least` cycles."""
    best: BoundFunction | None = None
    for orders in _ways_along_sum(found):
        copies = _copy_cycles(found, orders, target)
        if copies + _count_product_cycles(found, target) >= least:
            continue
        candidate, multiply = _reorder_operands(found, orders)
        (s,) = multiply.statements
        if not (lanes := lanes_along_sum(s, target.lanes(found.bits))):
            continue
        candidate, multiply = with_lanes_along_sum(candidate, s, lanes)
        op = _build_structured_op(multiply, f"S{sum(order is not None for order in orders)}")
        cycles = copies + combining_cycles(s) + _predict_op_cycles(op, target, parallel=parallel)
        if cycles < least:
            best, least = candidate, cycles
    return best


def _contraction(function: BoundFunction, *, dense: bool = True) -> _Contraction | None:
    """The only statement of `function` if it is a contraction of two tensors without batch indices, else None.

    dense: whether all tensors must be contiguous; otherwise they need be along their last dimensions only.
    """
    if len(function.statements) != 1:
        return None
    (s,) = function.statements
    terms = split_product(s)
    if (
        s.reduction != "+"
        or not s.initialize
        or s.checks
        or s.reads_own_target
        or terms is None
        or terms.scale is not None
    ):
        return None
    accesses = (terms.left, terms.right, tc.Access(s.target, s.subscripts, s.value.dtype))
    if not all(isinstance(a, tc.Access) and not a.guarded for a in accesses):
        return None
    found = _Contraction(function, s, accesses)  # type: ignore[arg-type]
    whole = all(_is_whole(function, a, {i.name: i for i in s.indices}, dense) for a in found.accesses)
    if not whole or len({a.tensor for a in found.accesses}) < 3:
        return None
    x, y, c = map(set, found.orders)
    sides = (x & c, y & c, x & y)
    if x & y & c or any(len(t) != len(o) for t, o in zip((x, y, c), found.orders, strict=True)):
        return None
    if x | y | c != set().union(*sides) or min(found.size([*side]) for side in sides) < MIN_REORDERED_SIDE:
        return None
    return found


def _is_whole(function: BoundFunction, access: tc.Access, ranges: Mapping[str, BoundIndex], dense: bool) -> bool:
    """Whether `access` covers a whole tensor, contiguous if `dense` or along its last dimension, with plain indices."""
    tensor = function.tensor(access.tensor)
    if tensor.strides != contiguous_strides(tensor.shape) if dense else tensor.strides[-1:] not in ((), (1,)):
        return False
    names = [e.name for e in access.subscripts if isinstance(e, tc.Index)]
    bounds = [(ranges[n].lower, ranges[n].upper) for n in names]
    return bounds == [(0, extent) for extent in tensor.shape]


# --- ways --------------------------------------------------------------------------------------------------------


def _enumerate_orders(found: _Contraction) -> Iterator[Orders]:
    """Candidate orders for each choice of tensors to copy; the other tensors determine the order of their indices."""
    x, y, c = found.orders
    for copies in product((False, True), repeat=3):
        if not any(copies):
            continue
        kept = [o for o, copied in zip((x, y, c), copies, strict=True) if not copied]
        kept.sort(key=found.size, reverse=True)
        ranked = [*kept, *sorted((o for o in (x, y, c) if o not in kept), key=found.size, reverse=True)]
        rows, columns, sums = (
            next(tuple(n for n in o if n in side) for o in ranked if side <= set(o))
            for side in ({*x} & {*c}, {*y} & {*c}, {*x} & {*y})
        )
        lanes = [rows, columns] if copies[2] else [rows if c[-1] in rows else columns]
        for inner in lanes:
            outer = columns if inner is rows else rows
            factors = [(*sums, *inner), (*outer, *sums) if outer else ()]
            left, right = factors if inner is rows else factors[::-1]
            orders = (left, right, (*outer, *inner))
            if all(not copied or o != old for o, old, copied in zip(orders, (x, y, c), copies, strict=True)):
                yield tuple(o if copied else None for o, copied in zip(orders, copies, strict=True))  # type: ignore[misc]


def _ways_along_sum(found: _Contraction) -> Iterator[Orders]:
    """Orders in which both factors end with the same summed indices: without a copy, or with one of a factor."""
    x, y, _ = found.orders
    sums = {*x} & {*y}
    if x[-1] == y[-1] and x[-1] in sums:
        yield None, None, None
    for kept, other in ((x, y), (y, x)):
        run = tuple(takewhile(sums.__contains__, reversed(kept)))[::-1]
        if not run or other[-len(run) :] == run or found.size(other) > found.size(kept):
            continue
        outer = [n for n in kept if n in sums and n not in run]
        copy = (*outer, *(n for n in other if n not in sums), *run)
        yield (copy, None, None) if other is x else (None, copy, None)


def _count_product_cycles(found: _Contraction, target: CpuTarget) -> float:
    """The cycles of the multiply-adds in full vectors."""
    return prod(found.extents.values()) * found.bits / target.issue_bits_per_cycle


def _bound_reordered_cycles(found: _Contraction, orders: Orders, target: CpuTarget) -> float:
    """A lower bound of the cycles: multiply-adds in vectors along the output's contiguous indices, and the copies."""
    x, y, c = (new or old for new, old in zip(orders, found.orders, strict=True))
    moving = x if c[-1] in x else y
    run = [n for n in _find_common_run(c, moving) if n in moving]
    lanes = target.lanes(found.bits)
    wasted = num_tiles(found.size(run), lanes) * lanes / found.size(run)
    multiply_adds = _count_product_cycles(found, target)
    turned = 0.0 if moving[-1] == c[-1] else REORDER_TRANSPOSE_CYCLES * found.size(moving)
    return multiply_adds * min(wasted, 2.0) + turned + _copy_cycles(found, orders, target)


def _can_cache_copies(found: _Contraction, orders: Orders, target: CpuTarget) -> bool:
    """Whether the copies stay in cache until they are read."""
    copied = (found.size(order) * found.bits // 8 for order in orders if order is not None)
    return all(size <= MAX_COPIED_L2_SIZES * target.cache[1] for size in copied)


def _copy_cycles(found: _Contraction, orders: Orders, target: CpuTarget) -> float:
    """The cycles of the copies."""
    total = 0.0
    for old, new in zip(found.orders, orders, strict=True):
        if new is not None:
            size = found.size(old) * found.bits // 8
            far = FAR_COPY_FACTOR if is_in_mesh_llc(2 * size, target) else 1.0
            total += COPY_START_CYCLES + far * size / 4 * _element_cycles(found, old, new)
    return total


def _element_cycles(found: _Contraction, old: Order, new: Order) -> float:
    """The cycles to copy an element of 4 bytes; unless both orders end with the same indices, it is a transposition."""
    common = next((n for n, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=True)) if a != b), len(old))
    if common:
        return REORDER_RUN_CYCLES * max(1.0, REORDERED_SHORT_RUN / found.size(old[len(old) - common :]))
    return (
        REORDER_TRANSPOSE_CYCLES
        if min(found.size(_find_common_run(a, b)) for a, b in ((old, new), (new, old))) >= REORDERED_SHORT_RUN
        else REORDER_SHORT_TRANSPOSE_CYCLES
    )


def _find_common_run(order: Order, other: Order) -> Order:
    """The longest suffix of `order` that is contiguous in `other`, or its last index."""
    count = 1
    while count < len(order) and any(order[-count - 1 :] == other[k : k + count + 1] for k in range(len(other))):
        count += 1
    return order[len(order) - count :]


# --- cycles ------------------------------------------------------------------------------------------------------


def _build_structured_op(function: BoundFunction, name: str = "S0") -> StructuredOp | None:
    """The only statement as an op, with the name that lowering gives it, so that lowering finds its plan cached."""
    tensors = {t.name: t for t in function.tensors}
    cluster = match_contraction(function.statements, 0, tensors)
    if cluster is None:
        return None
    buffers = {t.name: Buffer(t.name, Type(t.dtype), t.shape, t.strides) for t in function.tensors}
    return cluster.op(name, buffers)


def _predict_op_cycles(op: StructuredOp | None, target: CpuTarget, *, parallel: bool) -> float:
    """The predicted cycles of an op with register tiles; infinite if micro-kernels do not suit it."""
    if op is None:
        return inf
    op = drop_unit_dims(op)
    if why_not_microkernel(op, target) is not None:
        return inf
    try:
        with close_book():  # only an estimate: do not record decisions
            return plan_cycles(op, select_plan(op, target, parallel=parallel), target)
    except CannotLower:
        return inf


# --- statements --------------------------------------------------------------------------------------------------


def _reorder_operands(found: _Contraction, orders: Orders) -> tuple[BoundFunction, BoundFunction]:
    """The function with copies into `orders`, and a function with the product alone."""
    function, s = found.function, found.statement
    names = {t.name for t in function.tensors}
    tensors: list[Tensor] = []
    accesses: list[tc.Access] = []
    for access, order in zip(found.accesses, orders, strict=True):
        tensor = function.tensor(access.tensor)
        if order is not None:
            name = _fresh_name(internal_name(tensor.name, "ordered"), names)
            names.add(name)
            shape = tuple(found.extents[n] for n in order)
            tensor = Tensor(name, tensor.dtype, shape, contiguous_strides(shape), Role.TEMPORARY)
            access = tc.Access(name, tuple(tc.Index(n, tc.INDEX_TYPE) for n in order), tensor.dtype)
        tensors.append(tensor)
        accesses.append(access)
    left, right, out = accesses
    written = [e.name for e in out.subscripts if isinstance(e, tc.Index)]
    ranges = {i.name: i for i in s.indices}
    multiply = replace(
        s,
        target=out.tensor,
        subscripts=out.subscripts,
        value=tc.Binary("*", left, right, s.value.dtype),
        indices=(*(ranges[n] for n in written), *s.reduction_indices),
    )
    alone = collapse(replace(function, tensors=tuple(tensors), statements=(multiply,)))
    merged = {t.name: t for t in alone.tensors}
    before: list[BoundStatement] = []
    after: list[BoundStatement] = []
    for what, given, access, order in zip(("left", "right", "out"), found.accesses, accesses, orders, strict=True):
        if order is None:
            continue
        place = replace(access, subscripts=_flat_subscripts(order, found.extents, merged[access.tensor].shape))
        if what == "out":
            after.append(_make_copy_statement(f"{s.name}_{what}", given, place, ranges))
        else:
            before.append(_make_copy_statement(f"{s.name}_{what}", place, given, ranges))
    old = {t.name for t in function.tensors}
    kept = tuple(merged.get(t.name, t) for t in function.tensors)
    temporaries = tuple(t for t in alone.tensors if t.name not in old)
    return replace(function, tensors=(*kept, *temporaries), statements=(*before, *alone.statements, *after)), alone


def _make_copy_statement(
    name: str, to: tc.Access, value: tc.Access, ranges: Mapping[str, BoundIndex]
) -> BoundStatement:
    """The statement `to = value` over all indices of `to`, in its order."""
    order = dict.fromkeys(e.name for sub in to.subscripts for e in tc.walk_expr(sub) if isinstance(e, tc.Index))
    indices = tuple(ranges[n] for n in order)
    return BoundStatement(name, to.tensor, to.subscripts, None, False, value, indices, len(indices))


def _flat_subscripts(order: Order, extents: Mapping[str, int], shape: tuple[int, ...]) -> tuple[tc.Expr, ...]:
    """Subscripts for a tensor of `shape`, each of whose dimensions fuses consecutive indices of `order`."""
    rest = list(order)
    found: list[tc.Expr] = []
    for extent in shape:
        taken = [rest.pop(0)]
        while prod(extents[n] for n in taken) < extent:
            taken.append(rest.pop(0))
        found.append(reduce(lambda e, n: _append_index(e, n, extents[n]), taken[1:], _make_index_expr(taken[0])))
    return tuple(found)


def _make_index_expr(name: str) -> tc.Expr:
    return tc.Index(name, tc.INDEX_TYPE)


def _append_index(e: tc.Expr, name: str, extent: int) -> tc.Expr:
    times = tc.Binary("*", e, tc.Const(extent, tc.INDEX_TYPE), tc.INDEX_TYPE)
    return tc.Binary("+", times, _make_index_expr(name), tc.INDEX_TYPE)


def _fresh_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
