"""A plan says how one structured op is tiled, packed and vectorized; lowering follows it to the letter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    """A factor of the product."""

    LEFT = 0
    RIGHT = 1


class Edge(Enum):
    """What becomes of the last tile of a loop where it is shorter than the others."""

    PEELED = "code of its own, after the loop"
    BRANCH = "a branch in the loop"
    PADDED = "a whole tile, whose points past the end read zeros and are not stored"


@dataclass(frozen=True, slots=True)
class TileLoop:
    """A loop over tiles of `size` points along an iterator; the last tile may be shorter.

    edge: what becomes of that one; None peels it, but for loops that threads share, which branch.
    """

    iterator: str
    size: int = 1
    edge: Edge | None = None


@dataclass(frozen=True, slots=True)
class PackStep:
    """Copy what the loops inside `levels[depth:]` read of a factor into a panel, before entering them."""

    side: Side
    depth: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The loops around the register tile, outermost first, and what happens at them.

    Attributes:
        vector: the parallel iterator that runs along the lanes.
        lanes: scalars per vector.
        levels: every parallel iterator at least once, its last level being its share of the register tile; a
            reduction iterator may have one level, which blocks it for the caches.
        reductions: order of the reduction loops inside the register tile, outermost first.
        unrolled: how many of the innermost reduction loops are unrolled completely.
        packs: the factors that are copied first.
        parallel_depth: how many of the outermost levels make up the parallel loop; 0 runs serially.
        grain: least number of its iterations worth a thread.
        unroll_steps: of the innermost reduction loop that is left, taken per iteration.
        nontemporal: whether the output is written past the caches.
        instruction: of `tile_plans.INSTRUCTIONS`, by which the register tile is computed; "" for plain vectors.
        prefetches: the factors of which the lines for the next iteration around `levels[depth:]` are brought near.
        vectors_per_register: neighboring vectors of a panel that share a register, those of several rows of it where
        one has few. output_panel_depth: the results of `levels[output_panel_depth:]` are kept in a panel until they are
        complete; None: stored at once.
    """

    vector: str
    lanes: int
    levels: tuple[TileLoop, ...]
    reductions: tuple[str, ...]
    unrolled: int = 0
    packs: tuple[PackStep, ...] = ()
    parallel_depth: int = 0
    grain: int = 1
    unroll_steps: int = 1
    nontemporal: bool = False
    instruction: str = ""
    prefetches: tuple[PackStep, ...] = ()
    output_panel_depth: int | None = None
    vectors_per_register: int = 1

    def tile(self, iterator: str) -> int:
        """Points of a parallel iterator in one register tile."""
        return [level.size for level in self.levels if level.iterator == iterator][-1]

    @property
    def vectors(self) -> int:
        """Vectors along the lane iterator in one register tile."""
        return -(-self.tile(self.vector) // self.lanes)

    def depth(self, iterator: str) -> int:
        """The innermost level of an iterator."""
        return max(d for d, level in enumerate(self.levels) if level.iterator == iterator)
