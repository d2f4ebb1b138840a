"""Plans: how one structured op is tiled, packed and vectorized. Lowering makes no further choices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Side(Enum):
    """A factor of the product."""

    LEFT = 0
    RIGHT = 1


class Edge(Enum):
    """How the remainder tile of a loop is computed: the last tile, if it is shorter than the others."""

    PEELED = "code of its own, after the loop"
    BRANCH = "a branch in the loop"
    PADDED = "a whole tile, whose points past the end read zeros and are not stored"


@dataclass(frozen=True, slots=True)
class TileLoop:
    """A loop over tiles of `size` points along an iterator; the last tile may be shorter.

    edge: the code for the remainder tile. None is `PEELED` in serial loops and `BRANCH` in parallel ones.
    """

    iterator: str
    size: int = 1
    edge: Edge | None = None


@dataclass(frozen=True, slots=True)
class PackStep:
    """Copy the part of a factor that the loops `levels[depth:]` read into a panel, before entering these loops."""

    side: Side
    depth: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The loops around the register tile, outermost first, and their packing, unrolling and stores.

    Attributes:
        vector: the parallel iterator that runs along the lanes.
        lanes: scalars per vector.
        levels: the tile loops. Every parallel iterator has at least one; the size of its last one is its share of
            the register tile. A reduction may have one, which blocks it for the caches.
        reductions: order of the reduction loops inside the register tile, outermost first.
        unrolled: how many of the innermost reduction loops are unrolled completely.
        packs: the factors that are copied into panels.
        parallel_depth: how many of the outermost levels make up the parallel loop; 0 runs serially.
        grain: least number of iterations of the parallel loop per thread.
        unroll_steps: unroll factor of the innermost remaining reduction loop.
        nontemporal: whether non-temporal stores write the output.
        instruction: the matrix instruction of the register tile, a key of `tile_plans.INSTRUCTIONS`; "" for plain
            vectors.
        prefetches: the factors whose cache lines are prefetched for the next iteration of `levels[depth - 1]`.
        vectors_per_register: neighboring vectors of a panel, also of several short rows, that share a register.
        output_panel_depth: a panel keeps the results of `levels[output_panel_depth:]` until they are complete; None
            stores them at once.
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
        """Vectors along `vector` in one register tile."""
        return -(-self.tile(self.vector) // self.lanes)

    def depth(self, iterator: str) -> int:
        """The index in `levels` of the innermost level of an iterator."""
        return max(d for d, level in enumerate(self.levels) if level.iterator == iterator)
