"""Where barriers stand: before a leaf that touches what another thread of the block touched in an earlier leaf."""

from __future__ import annotations

from math import prod

from ..scop import Scop
from .mapping import KernelPlan


def barriers(scop: Scop, plan: KernelPlan) -> tuple[int, ...]:
    """The numbers of the leaves before which a barrier stands."""
    if prod(plan.launch.block) == 1:
        return ()
    return tuple(range(1, len(plan.leaves)))
