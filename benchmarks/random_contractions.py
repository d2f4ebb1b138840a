"""Random contractions: what the fixed list lacks, small sides in odd orders of their indices.

A draw, all of it from one `random.Random(seed)`, so that a seed and a number name the same contraction everywhere:

1. how many indices: 3 to 8, uniformly;
2. the product of all extents: log-uniform, so that the work is 2 to 60 MFLOP;
3. each extent: the geometric mean of that, times a log-uniform factor from 1/2 to 2, rounded, 2 at least; drawn again
   until the work is 2 to 60 MFLOP in fact;
4. to which tensors each index belongs: output and left, output and right, or left and right, uniformly, drawn again
   until there is one of each;
5. the order of each tensor's indices: a uniform permutation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from string import ascii_lowercase

LEAST_INDICES, MOST_INDICES = 3, 8
LEAST_FLOPS, MOST_FLOPS = 2_000_000, 60_000_000
SPREAD = 2.0
"""Times the geometric mean of all extents that one of them is at most."""


def draw(choose: random.Random) -> tuple[str, Mapping[str, int]]:
    """A contraction as `C-A-B`, the index of unit stride last in each, and the extent of each index."""
    indices = ascii_lowercase[: choose.randint(LEAST_INDICES, MOST_INDICES)]
    sizes = _sizes(choose, indices)
    while True:
        absent = [choose.randrange(3) for _ in indices]  # from which of the three tensors
        if len(set(absent)) == 3:
            break
    tensors = []
    for tensor in range(3):
        own = [i for i, missing in zip(indices, absent, strict=True) if missing != tensor]
        choose.shuffle(own)
        tensors.append("".join(own))
    return "-".join(tensors), sizes


def _sizes(choose: random.Random, indices: str) -> dict[str, int]:
    points = math.exp(choose.uniform(math.log(LEAST_FLOPS / 2), math.log(MOST_FLOPS / 2)))
    mean = points ** (1 / len(indices))
    while True:
        sizes = {i: max(2, round(mean * SPREAD ** choose.uniform(-1, 1))) for i in indices}
        if LEAST_FLOPS <= 2 * math.prod(sizes.values()) <= MOST_FLOPS:
            return sizes
