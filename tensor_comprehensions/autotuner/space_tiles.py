"""The search space of tiles for tensor cores: the fields of `TileOptions` are its genes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random
from typing import Any

from ..core.errors import ArgumentError
from ..options import TileOptions, check_tiles
from ..target import GpuTarget
from .space import Gene, Genome

REDUCTION_TILE_SIZES = (16, 32, 64, 128)
"""The numbers of reduction terms of a tile to try: the fewer, the more stages fit."""


FIXED_FIELDS = ("products",)
"""Fields that are not searched: they change the precision of results, which is the user's choice."""


@dataclass(frozen=True)
class TileSpace:
    """The search space of tile options.

    Attributes:
        start: the options to use if no gene changes them.
    """

    genes: tuple[Gene, ...]
    start: TileOptions
    target: GpuTarget

    def options(self, genome: Genome) -> TileOptions:
        """The options of a genome."""
        values = {g.name: g.choices[place] for g, place in zip(self.genes, genome, strict=True)}
        return replace(self.start, **values)

    def key(self, options: TileOptions) -> TileOptions | None:
        """The options, if they are legal. Lowering checks whether they fit."""
        try:
            check_tiles(options, self.target)
        except ArgumentError:
            return None
        return options

    def length(self, options: TileOptions) -> int:
        """The same for all: the code size is unknown before lowering."""
        return 0

    def random(self, random: Random) -> Genome:
        return tuple(g.random(random) for g in self.genes)

    def genome(self, options: TileOptions) -> Genome | None:
        """The genome of options; None if it has none."""
        places = []
        for g in self.genes:
            value = getattr(options, g.name)
            if value not in g.choices:
                return None
            places.append(g.choices.index(value))
        return tuple(places)


def tile_space(
    target: GpuTarget, start: TileOptions, others: Sequence[TileOptions] = ()
) -> tuple[TileSpace, tuple[Genome, ...]]:
    """The space around `start`, and the first genomes: `start`, `others`, and `start` with one change.

    others: options that were good elsewhere; their values are among the choices.
    """
    every = (start, *others)
    genes = tuple(
        _make_gene(f.name, f.metadata["choices"], every) for f in fields(TileOptions) if f.name not in FIXED_FIELDS
    )
    made = TileSpace(genes, start, target)
    found = [made.genome(o) for o in every]
    first = found[0]
    assert first is not None
    for k, gene in enumerate(genes):
        found += [(*first[:k], place, *first[k + 1 :]) for place in range(len(gene.choices))]
    usable: dict[TileOptions, Genome] = {}
    for genome in found:
        if genome is not None and (genome == first or made.key(made.options(genome)) is not None):
            usable.setdefault(made.options(genome), genome)
    return made, tuple(usable.values())


def _make_gene(name: str, choices: Sequence[int], every: Sequence[TileOptions]) -> Gene:
    """The gene of a field; the sizes of a tile, or all numbers of warps, are chosen together."""
    own: list[Any] = list(choices)
    if name == "tile":
        own = [(), *product(choices, choices, REDUCTION_TILE_SIZES)]
    elif name == "warps":
        own = [(), *product(choices, choices)]
    return Gene(name, tuple(dict.fromkeys([*(getattr(o, name) for o in every), *own])), keep_probability=0.3)
