"""The schedule language: primitives, and heuristics that return schedules.

from tensor_comprehensions.schedules import pack, tile, vectorize
"""

from .structured.language.apply_primitives import explain_schedule, plan_of_schedule
from .structured.language.plan_to_schedule import plan_to_schedule
from .structured.language.primitives import (
    Schedule,
    interchange,
    matrix_instruction,
    nontemporal_stores,
    pack,
    pack_output,
    pad,
    parallel,
    parse_schedule,
    peel,
    prefetch,
    tile,
    unroll,
    vectorize,
)
from .structured.memory_bound.heuristics import (
    schedule_column_reduction,
    schedule_copy,
    schedule_memory_bound,
    schedule_row_reduction,
    schedule_transposition,
)
from .structured.planners.candidates import PricedSchedule, schedule_candidates
from .structured.planners.experts import (
    by_cost_model,
    double_tiling,
    gett,
    loop_over_gemm,
    schedule_convolution,
    schedule_depthwise,
    single_tiling,
    triple_tiling,
    ttgt,
)

__all__ = [
    "PricedSchedule",
    "Schedule",
    "by_cost_model",
    "double_tiling",
    "explain_schedule",
    "gett",
    "interchange",
    "loop_over_gemm",
    "matrix_instruction",
    "nontemporal_stores",
    "pack",
    "pack_output",
    "pad",
    "parallel",
    "parse_schedule",
    "peel",
    "plan_of_schedule",
    "plan_to_schedule",
    "prefetch",
    "schedule_candidates",
    "schedule_column_reduction",
    "schedule_convolution",
    "schedule_copy",
    "schedule_depthwise",
    "schedule_memory_bound",
    "schedule_row_reduction",
    "schedule_transposition",
    "single_tiling",
    "tile",
    "triple_tiling",
    "ttgt",
    "unroll",
    "vectorize",
]
