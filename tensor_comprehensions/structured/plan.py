"""A plan says how one structured op is tiled, packed and vectorized; lowering follows it to the letter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    """A factor of the product."""

    LEFT = 0
    RIGHT = 1


class Edge(Enum):
    """The code for the last tile of a loop if it is shorter than the others."""

    PEELED = "code of its own, after the loop"
    BRANCH = "a branch in the loop"
    PADDED = "a whole tile, whose points past the end read zeros and are not stored"


@dataclass(frozen=True, slots=True)
class TileLoop:
    """A loop over tiles of `size` points along an iterator; the last tile may be shorter.

    edge: the code for that one; None peels it, except in loops that threads share, which branch.
    """

    iterator: str
    size: int = 1
    edge: Edge | None = None


@dataclass(frozen=True, slots=True)
class PackStep:
    """Copy the part of a factor that the loops inside `levels[depth:]` read into a panel, before entering them."""

    side: Side
    depth: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The loops around the register tile, outermost first, and their packing, unrolling and stores.

    Attributes:
        vector: the parallel iterator that runs along the lanes.
        lanes: scalars per vector.
        levels: every parallel iterator at least once, its last level being its share of the register tile; a
            reduction iterator may have one level, which blocks it for the caches.
        reductions: order of the reduction loops inside the register tile, outermost first.
        unrolled: how many of the innermost reduction loops are unrolled completely.
        packs: the factors that are copied first.
        parallel_depth: how many of the outermost levels make up the parallel loop; 0 runs serially.
        grain: least number of its iterations per thread.
        unroll_steps: unroll factor of the innermost remaining reduction loop.
        nontemporal: whether the output is written past the caches.
        instruction: of `tile_plans.INSTRUCTIONS`, the matrix instruction of the register tile; "" for plain vectors.
        prefetches: the factors whose lines for the next iteration around `levels[depth:]` are prefetched.
        vectors_per_register: neighboring vectors of a panel that share a register, also of several short rows.
        output_panel_depth: the results of `levels[output_panel_depth:]` are kept in a panel until they are
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
