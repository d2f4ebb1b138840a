"""What a strategy is written with: the pieces of pipelines, and the experts that return them.

from tensor_comprehensions.strategies import pack, tile, vectorize
"""

from .structured.apply import explain, plan_of
from .structured.candidates import Candidate, candidates
from .structured.describe import pipeline_of
from .structured.experts import (
    by_model,
    convolution,
    depthwise,
    double_tiling,
    gett,
    log,
    single_tiling,
    triple_tiling,
    ttgt,
)
from .structured.movers import column_reduction, copying, movement, row_reduction, transposition
from .structured.pipeline import (
    Pipeline,
    fragments,
    interchange,
    pack,
    pad,
    parallel,
    parse,
    peel,
    prefetch,
    stream,
    tile,
    unpack,
    unroll,
    vectorize,
)

__all__ = [
    "Candidate",
    "Pipeline",
    "by_model",
    "candidates",
    "column_reduction",
    "convolution",
    "copying",
    "depthwise",
    "double_tiling",
    "explain",
    "fragments",
    "gett",
    "interchange",
    "log",
    "movement",
    "pack",
    "pad",
    "parallel",
    "parse",
    "peel",
    "pipeline_of",
    "plan_of",
    "prefetch",
    "row_reduction",
    "single_tiling",
    "stream",
    "tile",
    "transposition",
    "triple_tiling",
    "ttgt",
    "unpack",
    "unroll",
    "vectorize",
]
