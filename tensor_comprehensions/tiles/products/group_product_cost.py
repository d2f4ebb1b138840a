"""Products of warpgroups (sm_90): whether tiles are possible, the resources they need, and their cost."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.dtypes import DType
from ...loop_ir.atoms import TFLOAT32, WARP, WARPGROUP
from ...target import GpuTarget
from ..lower.box_moves import SLICE_ROWS, SLICES, part_rows, splits_sides
from ..lower.panels import panel_columns
from ..lower.tensor_core_products import SUMS
from ..lower.warpgroup_products import ROWS, instruction_columns
from .factor_boxes import box_element
from .product_region import ProductRegion, Rounding
from .product_tiles import PairOrder, ProductOrder, ProductTiles

ARRIVAL_CYCLES = 800
"""The memory latency in cycles, as in `polyhedral.gpu`."""
STEP_CYCLES = 60
"""The cycles that a block waits in a step: for its barrier and the first fragments. From published latencies."""
ISSUE_PER_CYCLE = 4
"""The warp instructions that an SM issues in a cycle."""
GROUP_OVERLAP_LOSS = 0.02
"""The fraction of the other resources' time added to the largest: small, as copies and products are asynchronous."""
MOST_SUMS = {1: 160, 2: 160, 3: 80}
"""The maximum sums of a thread without spills, by the number of multiplying warpgroups: from reports of NVRTC."""
MOST_SUMS_IN_TURN = {2: 176}
"""The same if blocks compute several tiles, since they recompute addresses for each instead of keeping them."""
STEP_INSTRUCTIONS = 20
"""The instructions of a warp in a step, apart from products: waits, arrivals, addresses."""
DEPTH_BYTES = 32
"""The bytes of a row of a factor that an instruction multiplies."""
CLUSTER_CYCLES = 300
"""The cycles of the cluster barriers before the first step and after the last."""
BARRIER_BYTES = 1024
"""An upper bound on the shared memory of all barriers of a block."""


def group_fault(region: ProductRegion, order: ProductOrder, tiles: ProductTiles) -> str | None:
    """Why warpgroups cannot compute a region with these tiles and TMA loads; None if they can."""
    types = {f.dtype for p in region.pairs for f in p.factors}
    if not types <= {*SUMS, TFLOAT32}:
        return "its factors are not half, bfloat16, bytes or tf32"
    if any(f.rounding is Rounding.TEXT for p in region.pairs for f in p.factors):
        return "it is not documented how TMA rounds halves of the last digit, and the def rounds to tf32 itself"
    if len({(p.left.dtype, f.dtype) for p in region.pairs for f in p.rights}) > 1:
        return "factors of its products have several types"
    width = instruction_columns(tiles.tile[1])
    if region.factor_bytes == 1 and width % 16 and width not in (8, 24):
        return f"no instruction multiplies bytes by {width} columns"
    if len({(p.left.transposed, right.transposed) for p in order.pairs for right in p.rights}) > 1:
        return "factors of its products lie along terms, and across"
    groups = [(order.rows, 0), (order.columns, 1), *((p.terms, 2) for p in order.pairs)]
    if any(len(indices) > 1 and tiles.tile[n] & (tiles.tile[n] - 1) for indices, n in groups):
        return "a tile along several indices is no power of two"
    return next((f for p in order.pairs if (f := pair_fault(p, order, tiles, next(iter(types)))) is not None), None)


def pair_fault(pair: PairOrder, order: ProductOrder, tiles: ProductTiles, dtype: DType) -> str | None:
    """Why TMA cannot load the factors of a product, whose elements are `dtype`; None if it can."""
    for place, own, rows in (
        (pair.left, order.rows, tiles.tile[0]), *((p, order.columns, tiles.tile[1]) for p in pair.rights)
    ):  # fmt: skip
        if place.element is None and place is pair.left and dtype.size == 2 and len(order.pairs) == 1:
            continue  # computed in registers
        if place.element is None:
            return "a factor is computed, and is not the left one of a single product of 16-bit factors"
        down, across = (pair.terms, own) if place.transposed else (own, pair.terms)
        width = panel_columns(rows if place.transposed else tiles.tile[2], dtype)
        if isinstance(width, str):
            return width
        if tiles.boxes[across[0].name] % width:
            return f"a tile has fewer than {width} neighbors along {across[0].name}"
        found = box_element(place.element, down, across, order.batch, tiles.boxes)
        if isinstance(found, str):
            return found
    return None


def cluster_fault(region: ProductRegion, order: ProductOrder, tiles: ProductTiles) -> str | None:
    """Why blocks of a cluster cannot multicast the right factors; None if they can."""
    if region.chain is not None or region.domain:
        return "blocks of chains form no clusters"
    if region.sums * tiles.tile[0] * tiles.tile[1] // (WARPGROUP * tiles.warpgroups) > MOST_SUMS[tiles.warpgroups]:
        return "a thread of a cluster has registers for fewer sums"
    if tiles.count(order.rows) % tiles.cluster:
        return f"{tiles.count(order.rows)} rows of tiles are no clusters of {tiles.cluster}"
    for pair in order.pairs:
        for place in pair.rights:
            down = pair.terms if place.transposed else order.columns
            part = part_rows(tiles.tile[2 if place.transposed else 1], tiles.cluster)
            if part is None or not splits_sides([tiles.boxes[i.name] for i in down], part):
                return f"{tiles.cluster} blocks cannot copy a part of a right factor each"
    return None


def stores_boxes(order: ProductOrder, boxes: Mapping[str, int]) -> bool:
    """Whether tiles of the output are boxes, so that TMA can store them."""
    if order.output is None or boxes[order.columns[0].name] % SLICES[-1]:
        return False
    return not isinstance(box_element(order.output, order.rows, order.columns, order.batch, boxes), str)


def slice_bytes(tiles: ProductTiles, room: int, size: int) -> int:
    """The bytes of a slice of sums that is staged in `room` bytes; 0 if none fits. size: bytes of a stored element."""
    rows = SLICE_ROWS * tiles.warpgroups
    fitting = (rows * n * size for n in SLICES if tiles.tile[1] % n == 0 and rows * n * size <= room)
    return next(fitting, 0)


def fits_groups(staged: int, tiles: ProductTiles, target: GpuTarget, each: int, held_bytes: int, count: int) -> bool:
    """Whether a block fits in the registers and shared memory of an SM.

    Args:
        count: the number of tiles.
        staged: the bytes of all stages. each: the sums per element of the output.
        held_bytes: the bytes of a left factor that threads hold in registers.
    """
    sums = (each * tiles.tile[0] * tiles.tile[1] + held_bytes // 4) // (WARPGROUP * tiles.warpgroups)
    in_turn = MOST_SUMS_IN_TURN if count > target.num_sms else MOST_SUMS
    most = in_turn.get(tiles.warpgroups, MOST_SUMS[tiles.warpgroups])
    room = target.max_shared_optin - staged - BARRIER_BYTES
    if tiles.stores_boxes and not slice_bytes(tiles, room, 2):
        return False
    return sums <= most and room >= 0


def group_step_cycles(size: int, tiles: ProductTiles, target: GpuTarget) -> dict[str, float]:
    """The cycles of an SM for one step, by resource. size: bytes of an element of the factors."""
    rows, columns, terms = tiles.tile
    width = instruction_columns(columns)
    high, wide = rows // ROWS, columns // width
    read = high * wide * (ROWS + width) * terms * size  # each instruction rereads its factors
    loaded = (rows + columns) * terms * size
    fetched = (rows + columns / tiles.cluster) * terms * size
    products = high * wide * terms * size / DEPTH_BYTES + STEP_INSTRUCTIONS
    return {
        "tensor cores": rows * columns * terms * size / target.group_ops,
        "second-level cache": fetched / target.l2_bytes,
        "shared memory": (loaded + read) / target.shared_bytes,
        "issue": WARPGROUP // WARP * products / ISSUE_PER_CYCLE,
        "latency": ARRIVAL_CYCLES / (tiles.stages - 1 - tiles.lead) + STEP_CYCLES,
    }


def most_lead(region: ProductRegion, tiles: ProductTiles) -> int:
    """The maximum lead of one of two warpgroups in steps: one stage is being loaded, and one is used by the other."""
    leads = tiles.warpgroups == 2 and region.chain is None and not region.domain
    return max(0, tiles.stages - 2) if leads else 0


def hidden_cycles(tiles: ProductTiles, each: int, multiplied: float, end: float) -> float:
    """The cycles of epilogues that overlap products of the other warpgroup, over all tiles of an SM.

    The leading warpgroup runs its epilogue while the other multiplies its last steps. The other runs its epilogue while
    the first multiplies the first steps of the next tile, if there is one.

    Args:
        each: the number of tiles. multiplied: tensor-core cycles of a step of both. end: epilogue cycles of a tile.
    """
    return (2 * each - 1) * min(tiles.lead * multiplied, end) / 2
