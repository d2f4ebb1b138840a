"""Schedule heuristics: functions that return schedules, some for given tile sizes, some for an op and a target.

`op.compile(..., schedule=gett)` accepts the second kind. A schedule may have alternatives with several tile sizes: the
cost model chooses one, a search measures all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from operator import or_

from ...core.errors import CannotLower
from ...target import CpuTarget
from ...thresholds import CONVOLUTION_TILE_ROWS, CONVOLUTION_TILE_VECTORS, MAX_WORKSPACE_BYTES, OFFERED_TILES
from ..analysis.access_strides import iterator_coefficients
from ..analysis.contraction_info import ContractionInfo, analyze_contraction
from ..cost.register_tiles import RegisterTileRanking
from ..cost.tile_cost import RegisterTile
from ..language.plan_to_schedule import plan_to_schedule
from ..language.primitives import Schedule, nontemporal_stores, pack, parallel, peel, tile, unroll, vectorize
from ..language.schedule_state import NOWHERE, StateLoop, start_state
from ..match.drop_unit_dims import drop_unit_dims
from ..op import Iterator, StructuredOp, loads_in
from . import depthwise
from .blocking import BlockingHeuristic
from .plan_variants import ForcedBlocking
from .select import select_plan

Sizes = Mapping[str, int]


# --- for given sizes ---------------------------------------------------------------------------------------------


def single_tiling(sizes: Sizes, *, packs: Mapping[str, str] | None = None, unrolls: Sizes | None = None) -> Schedule:
    """A schedule with a register tile of `sizes`; `packs` and `unrolls` are the arguments of `pack` and `unroll`."""
    return _make_tiling_schedule((sizes,), packs, unrolls)


def double_tiling(
    outer: Sizes, inner: Sizes, *, packs: Mapping[str, str] | None = None, unrolls: Sizes | None = None
) -> Schedule:
    """A schedule with blocks for one cache around register tiles."""
    return _make_tiling_schedule((outer, inner), packs, unrolls)


def triple_tiling(
    outer: Sizes, middle: Sizes, inner: Sizes, *, packs: Mapping[str, str] | None = None, unrolls: Sizes | None = None
) -> Schedule:
    """A schedule with blocks for two caches around register tiles."""
    return _make_tiling_schedule((outer, middle, inner), packs, unrolls)


def _make_tiling_schedule(levels: Sequence[Sizes], packs: Mapping[str, str] | None, unrolls: Sizes | None) -> Schedule:
    found = Schedule()
    for sizes in levels:
        found = found >> tile(**sizes)
    if packs:
        found = found >> pack(**packs)
    found = found >> vectorize()
    return found >> unroll(**unrolls) if unrolls else found


# --- for an op and a target --------------------------------------------------------------------------------------


def by_cost_model(op: StructuredOp, target: CpuTarget) -> Schedule:
    """The schedule that the cost model chooses, which is the default."""
    op = drop_unit_dims(op)
    return plan_to_schedule(select_plan(op, target, parallel=True), op)


def gett(op: StructuredOp, target: CpuTarget) -> Schedule:
    """GETT: pack both operands into panels, a block of one of them in L2; a few register tiles are alternatives.

    Springer and Bientinesi, "Design of a high-performance GEMM-like Tensor-Tensor Multiplication", 2018. Raises
    CannotLower if a factor has no iterators of its own.
    """
    op = drop_unit_dims(op)
    known = analyze_contraction(op)
    if not known.exclusive_iterators(known.broadcast_operand) or known.vector in known.broadcast_operand.iterators:
        raise CannotLower("gett: the op has no rows and columns of its own")
    plans = [
        ForcedBlocking(known, target, t, True, True, True, None).plan()
        for t in RegisterTileRanking(known, target).best_tiles(OFFERED_TILES)
    ]
    return reduce(or_, (plan_to_schedule(plan, op) for plan in plans))


def ttgt(op: StructuredOp, target: CpuTarget) -> Schedule:
    """TTGT (transpose-transpose-GEMM-transpose): copy both operands into the order of a matrix product; multiply them.

    Raises CannotLower if the copies would take more than `thresholds.MAX_WORKSPACE_BYTES`.
    """
    op = drop_unit_dims(op)
    known = analyze_contraction(op)
    copied = sum(prod(known.extent(name) for name in f.iterators) for f in known.factors) * op.dtype.size
    if copied > MAX_WORKSPACE_BYTES:
        raise CannotLower(f"ttgt: the copies of both factors would take {copied >> 20} MiB")
    return pack("left", "right") >> _make_product_schedule(op, known, target)


def loop_over_gemm(op: StructuredOp, target: CpuTarget) -> Schedule:
    """Loop over matrix products that read the operands in place.

    Raises CannotLower if no factor is contiguous along the output's contiguous index.
    """
    op = drop_unit_dims(op)
    known = analyze_contraction(op)
    if known.vector_operand.step(known.vector) != 1:
        raise CannotLower("loop_over_gemm: no factor is contiguous along the contiguous index of the output")
    return _make_product_schedule(op, known, target)


def _make_product_schedule(op: StructuredOp, known: ContractionInfo, target: CpuTarget) -> Schedule:
    """Loops around register tiles, rows innermost; a few register tiles are alternatives."""
    outside = (*known.batch, *known.exclusive_iterators(known.vector_operand))
    order = (*outside, *known.exclusive_iterators(known.broadcast_operand))
    found: list[Schedule] = []
    for registers in RegisterTileRanking(known, target).best_tiles(OFFERED_TILES):
        one = _make_nest_schedule(op, order, registers, len(outside))
        found.append(
            one >> nontemporal_stores() if BlockingHeuristic(known, target, registers, True).is_nontemporal() else one
        )
    return reduce(or_, found)


def schedule_convolution(op: StructuredOp, target: CpuTarget) -> Schedule:
    """For convolutions: register tiles of a few output positions by whole vectors, several sizes as alternatives.

    Raises CannotLower for an op without a window, that is, without a subscript such as `h + kh`.
    """
    op = drop_unit_dims(op)
    known = analyze_contraction(op)
    positions = [i for i in op.parallel if i.name in _window_iterators(op)]
    if not positions:
        raise CannotLower("convolution: no subscript is the sum of an output position and an index of a window")
    rows = (
        [i for i in positions if i.name != known.vector]
        if known.vector not in known.broadcast_operand.iterators
        else []
    )
    rows = (
        rows if known.vector not in _window_iterators(op) else list(known.exclusive_iterators(known.broadcast_operand))
    )
    row = max(rows, key=lambda i: i.extent, default=None)
    order = [i for i in op.parallel if i is not row and i.name != known.vector]
    order += [i for i in op.parallel if i is row or i.name == known.vector]
    lanes = min(target.lanes(known.bits), 1 << (known.extent(known.vector) - 1).bit_length())
    options: list[Schedule] = []
    for vectors in CONVOLUTION_TILE_VECTORS:
        for size in CONVOLUTION_TILE_ROWS if row is not None else (1,):
            sizes = [(known.vector, vectors * lanes)]
            if row is not None:
                sizes.append((row.name, min(size, row.extent)))
            if vectors * size < target.vector_registers - vectors:
                options.append(_make_nest_schedule(op, order, RegisterTile(lanes, tuple(sizes)), len(op.parallel) - 1))
    return reduce(or_, dict.fromkeys(options))


def schedule_depthwise(op: StructuredOp, target: CpuTarget) -> Schedule:
    """For depthwise convolutions: load each vector of the input once and use it for all taps of the window.

    Raises CannotLower for an op without a window, or with an operand that is reused across outputs.
    """
    op = drop_unit_dims(op)
    known = analyze_contraction(op)
    if not depthwise.is_depthwise(known):
        raise CannotLower("depthwise: no window slides over a contiguous factor that has all output positions")
    return plan_to_schedule(depthwise.depthwise_plan(known, target, parallel=True), op)


def _window_iterators(op: StructuredOp) -> frozenset[str]:
    """The parallel iterators that share a subscript with a reduction."""
    names = [i.name for i in op.iterators]
    found: set[str] = set()
    for factor in op.factors:
        for index in (index for access in loads_in(factor) for index in access.indices):
            together = set(iterator_coefficients(index, names) or {})
            if any(not op.iterator(name).is_parallel for name in together):
                found |= {name for name in together if op.iterator(name).is_parallel}
    return frozenset(found)


def _make_nest_schedule(op: StructuredOp, order: Sequence[Iterator], registers: RegisterTile, shared: int) -> Schedule:
    """Loops in `order` around one register tile, the outermost `shared` of them parallel."""
    names = start_state(op, NOWHERE)
    sizes = {names.iterator_display_name(i.name): registers.size(i.name) for i in order}
    loops = [names.name(StateLoop(i.name, 1, 1)) for i in order[:shared]]
    uneven = [names.name(StateLoop(i.name, 1, 1)) for i in order[shared:] if i.extent % registers.size(i.name)]
    found = tile(**sizes)
    if uneven:
        found = found >> peel(*uneven)
    if loops:
        found = found >> parallel(*loops)
    return found >> vectorize(
        names.iterator_display_name(analyze_contraction(op).vector),
        lanes=registers.lanes,
        vectors_per_register=registers.vectors_per_register,
    )
