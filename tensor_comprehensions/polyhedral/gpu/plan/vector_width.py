"""Choose how many consecutive elements a thread takes at a time, as a vector of up to 16 bytes."""

from __future__ import annotations

from collections.abc import Iterable

from ....machine import GPU_VECTOR_BYTES
from ....tc_lang import ir as tc
from ....tc_lang.ir import BoundFunction
from ...schedule.access_cost import access_stride
from ...schedule.loop_nest import LoopNest, NestDim
from ...scop.isl_affine import to_isl_affine
from ...scop.scop import Scop

LANES = (4, 2)


def vector_width_along(scop: Scop, places: Iterable[tuple[LoopNest, NestDim]]) -> int:
    """The vector width for all `places`; 1 if an access is neither contiguous nor invariant along its dimension."""
    found = [_choose_lane_count(scop.function, leaf, dim) for leaf, dim in places]
    return min(found, default=1)


def _choose_lane_count(function: BoundFunction, leaf: LoopNest, dim: NestDim) -> int:
    moving = []
    for node in leaf.nodes:
        index = dim.index(node)
        for access in (*node.reads, *node.writes):
            step = access_stride(function, access, index)
            if step not in (0, 1):
                return 1
            if step == 1:
                moving.append((access, index))
    widest = max((function.tensor(a.tensor).dtype.size for a, _ in moving), default=GPU_VECTOR_BYTES)
    return next((n for n in LANES if _has_aligned_vectors(function, dim, moving, n, n * widest)), 1)


def _has_aligned_vectors(
    function: BoundFunction, dim: NestDim, moving: list[tuple[tc.Access, str]], lanes: int, size: int
) -> bool:
    """Whether `dim` consists of whole vectors of up to 16 bytes at aligned addresses. size: the bytes of a vector."""
    whole = dim.extent % lanes == 0 and dim.lower == 0 and size <= GPU_VECTOR_BYTES and not dim.variable
    return whole and all(_is_aligned(function, access, index, lanes) for access, index in moving)


def _is_aligned(function: BoundFunction, access: tc.Access, index: str, lanes: int) -> bool:
    """Whether addresses at multiples of `lanes` along `index` are multiples of `lanes` for all other index values."""
    tensor = function.tensor(access.tensor)
    if any(tensor.stride_variables):
        return False
    for e, step in zip(access.subscripts, tensor.strides, strict=True):
        form = to_isl_affine(e)
        others = (1,) if form is None else (form.constant, *(c for name, c in form.terms if name != index))
        if any(c * step % lanes for c in others):
            return False
    return True
