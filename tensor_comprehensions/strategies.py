"""What a strategy for contractions is written with: the pieces of pipelines, and the experts that return them.

from tensor_comprehensions.strategies import pack, tile, vectorize
"""

from .structured.apply import explain, pipeline_of, plan_of
from .structured.candidates import Candidate, candidates
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
from .structured.pipeline import (
    Pipeline,
    interchange,
    pack,
    pad,
    parallel,
    parse,
    peel,
    stream,
    tile,
    unroll,
    vectorize,
)

__all__ = [
    "Candidate",
    "Pipeline",
    "by_model",
    "candidates",
    "convolution",
    "depthwise",
    "double_tiling",
    "explain",
    "gett",
    "interchange",
    "log",
    "pack",
    "pad",
    "parallel",
    "parse",
    "peel",
    "pipeline_of",
    "plan_of",
    "single_tiling",
    "stream",
    "tile",
    "triple_tiling",
    "ttgt",
    "unroll",
    "vectorize",
]
