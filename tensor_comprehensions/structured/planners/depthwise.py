"""Plans for depthwise convolutions: windows slide over one factor and share nothing else.

Packing does not pay, because every vector is used by neighboring windows only. The plan loads each vector once for all
taps of these windows, in memory order.
"""

from __future__ import annotations

from math import gcd, prod

from ...target import CpuTarget
from ...thresholds import BALANCED_CHUNKS, DEPTHWISE_THREAD_FMAS, MAX_DEPTHWISE_FMAS, MAX_DEPTHWISE_TAPS
from ..analysis.access_strides import access_strides
from ..analysis.contraction_info import ContractionInfo
from ..lower.tile import num_tiles
from ..plan import Plan, TileLoop


def is_depthwise(known: ContractionInfo) -> bool:
    """Whether the op is depthwise: the lanes run along one factor, and no output position moves only the other one."""
    return (
        not known.exclusive_iterators(known.broadcast_operand)
        and known.vector_operand.step(known.vector) == 1
        and _choose_window_iterators(known) is not None
    )


def depthwise_plan(known: ContractionInfo, target: CpuTarget, *, parallel: bool) -> Plan:
    """Loops in the order of the output around a few vectors at neighboring positions of the window."""
    row, tap = _choose_window_iterators(known) or ("", "")
    order = sorted(
        (i.name for i in known.parallel), key=lambda n: (n == known.vector, n == row, -_output_stride(known, n))
    )
    lanes = _choose_lane_count(known, target)
    sizes = _register_tile(known, target, row, tap, lanes)
    levels = tuple(TileLoop(name, sizes.get(name, 1)) for name in order)
    reductions = (*(n for n in known.reductions if n != tap), tap)
    accumulators = prod(sizes.values()) // lanes
    collapsed, grain = _shared_levels(known, levels) if parallel else (0, 1)
    return Plan(
        known.vector,
        lanes,
        levels,
        reductions,
        _unrolled_reductions(known, reductions, accumulators),
        (),
        collapsed,
        grain,
    )


def _output_stride(known: ContractionInfo, name: str) -> int:
    """Elements of the output between neighboring values of an iterator."""
    return abs((access_strides(known.op.output, [name]) or {}).get(name, 0))


def _choose_window_iterators(known: ContractionInfo) -> tuple[str, str] | None:
    """The iterator whose neighboring windows overlap most, and the reduction over the taps; None without a window."""
    found: list[tuple[int, int, str, str]] = []
    for i in known.parallel:
        for r in known.op.reductions:
            stride, dilation = (abs(known.vector_operand.step(name) or 0) for name in (i.name, r.name))
            fits = stride and dilation and i.name != known.vector and 1 < r.extent <= MAX_DEPTHWISE_TAPS
            if fits and stride // gcd(stride, dilation) < r.extent:
                found.append((stride, dilation // gcd(stride, dilation), i.name, r.name))
    return min(found)[2:] if found else None


def _choose_lane_count(known: ContractionInfo, target: CpuTarget) -> int:
    lanes = target.lanes(known.bits)
    while lanes > 4 and lanes >= 2 * known.extent(known.vector):
        lanes //= 2
    return lanes


def _register_tile(known: ContractionInfo, target: CpuTarget, row: str, tap: str, lanes: int) -> dict[str, int]:
    """The register tile: adjacent vectors, at as many positions as leave registers for the broadcast operand.

    If the broadcast operand also depends on the lanes, registers must hold its vectors of all taps.
    """
    vectors = min(
        2 if known.vector in known.broadcast_operand.iterators else 4, num_tiles(known.extent(known.vector), lanes)
    )
    taps = known.extent(tap)
    kept = taps * (vectors if known.vector in known.broadcast_operand.iterators else 1)
    most = max(1, (target.vector_registers - 2 - kept) // vectors)
    positions = known.extent(row)
    return {known.vector: vectors * lanes, row: num_tiles(positions, num_tiles(positions, most))}


def _unrolled_reductions(known: ContractionInfo, reductions: tuple[str, ...], accumulators: int) -> int:
    """How many of the innermost reductions are unrolled completely."""
    products, count = accumulators, 0
    for name in reversed(reductions):
        products *= known.extent(name)
        if count and (products > MAX_DEPTHWISE_FMAS or known.extent(name) > MAX_DEPTHWISE_TAPS):
            break
        count += 1
    return count


def _shared_levels(known: ContractionInfo, levels: tuple[TileLoop, ...]) -> tuple[int, int]:
    """How many of the outermost levels become the parallel loop, and its grain."""
    if known.op.multiplications < 2 * DEPTHWISE_THREAD_FMAS:
        return 0, 1
    count = 1
    for depth, level in enumerate(levels, 1):
        count *= num_tiles(known.extent(level.iterator), level.size)
        if count >= BALANCED_CHUNKS or depth == len(levels):
            return (depth, max(1, DEPTHWISE_THREAD_FMAS * count // known.op.multiplications)) if count > 1 else (0, 1)
    return 0, 1
