"""The search space of GPU mappings: genes made from `MappingOptions` and the sizes of a def.

As in the TC paper, sizes of tiles, threads and blocks are powers of two and the extents divided by them, and the
presets are among the first candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from random import Random
from typing import Any

from ..core.errors import ArgumentError
from ..dispatch.cuda.library_calls import find_library_matmuls
from ..options import MappingOptions, check_mapping
from ..target import GpuTarget
from ..tc_lang.ir import BoundFunction
from .space import MAX_TILED_LOOPS, Gene, Genome, tile_candidates

PRESETS = ("naive", "pointwise", "mlp", "convolution", "group_convolution")
LAUNCH_DIMENSIONS = 3
LIST_OPTIONS = {"tile": 0, "threads": 1, "blocks": 1}
"""The options that are lists of sizes, with the value of an absent size."""
LIBRARY_CALL_OPTION = "match_library_calls"
"""The option that has a gene only if there are library calls to match, and a device to time them on."""
MAX_UNEVEN_SIZE = 4096
"""The maximum of sizes that are not powers of two: larger tiles and blocks are too large anyway."""


@dataclass(frozen=True)
class MappingSpace:
    """The search space of mappings.

    Attributes:
        start: the options to use if no gene changes them.
        whole: whether matched library calls leave nothing to map.
    """

    genes: tuple[Gene, ...]
    start: MappingOptions
    target: GpuTarget
    whole: bool = False

    def options(self, genome: Genome) -> MappingOptions:
        """The options of a genome, without those that have no effect."""
        values = {g.name: g.choices[place] for g, place in zip(self.genes, genome, strict=True)}
        changes: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
        for name, nothing in LIST_OPTIONS.items():
            numbers = [values[f"{name}.{k}"] for k in range(MAX_TILED_LOOPS) if f"{name}.{k}" in values]
            if numbers:
                changes[name] = _trim_trailing(numbers, nothing)
        if self.whole and changes.get(LIBRARY_CALL_OPTION):
            changes = {LIBRARY_CALL_OPTION: True}
        return _drop_unused_options(replace(self.start, **changes))

    def key(self, options: MappingOptions) -> MappingOptions | None:
        """The options, if the target can launch them. Mapping finds other errors."""
        try:
            check_mapping(options, self.target)
        except ArgumentError:
            return None
        return options

    def length(self, options: MappingOptions) -> int:
        """The same for all: the code size is unknown before mapping."""
        return 0

    def random(self, random: Random) -> Genome:
        return tuple(g.random(random) for g in self.genes)

    def genome(self, options: MappingOptions) -> Genome | None:
        """The genome of options that the space was made with; None if it has none."""
        places = []
        for g in self.genes:
            name, _, axis = g.name.partition(".")
            value = getattr(options, name)
            if axis:
                value = value[int(axis)] if int(axis) < len(value) else LIST_OPTIONS[name]
            if value not in g.choices:
                return None
            places.append(g.choices.index(value))
        genome = tuple(places)
        return genome if self.options(genome) == _canonicalize_options(options) else None


def mapping_space(
    bound: BoundFunction,
    target: GpuTarget,
    start: MappingOptions,
    others: Sequence[MappingOptions] = (),
    *,
    calls: bool = False,
) -> tuple[MappingSpace, tuple[Genome, ...]]:
    """The space around `start`, and the first genomes: `start`, `others`, the presets, and `start` with one change.

    Args:
        others: options that were good elsewhere; their values are among the choices.
        calls: whether library calls can be timed.
    """
    depth = max(1, *(len(s.indices) for s in bound.statements))
    presets = [replace(o, tile=o.tile[:depth]) for o in (getattr(MappingOptions, name)() for name in PRESETS)]
    memory = replace(start, shared_memory=True, private_memory=True)
    count = len(find_library_matmuls(bound))
    matched, without = (
        ([replace(start, match_library_calls=True)], ()) if calls and count else ([], (LIBRARY_CALL_OPTION,))
    )
    every = [_canonicalize_options(o) for o in (start, *others, *matched, *presets, memory)]
    genes = tuple(g for g in _make_genes(bound, every) if len(g.choices) > 1 and g.name not in without)
    made = MappingSpace(genes, every[0], target, count == len(bound.statements))
    found: list[Genome | None] = [made.genome(o) for o in every]
    first = found[0]
    assert first is not None
    for k, gene in enumerate(genes):
        if "." not in gene.name:
            found += [(*first[:k], place, *first[k + 1 :]) for place in range(len(gene.choices))]
    usable: dict[MappingOptions, Genome] = {}
    for g in found:
        if g is not None and (g == first or made.key(made.options(g)) is not None):
            usable.setdefault(made.options(g), g)
    return made, tuple(usable.values())


def _make_genes(bound: BoundFunction, every: Sequence[MappingOptions]) -> Iterable[Gene]:
    extents = [[i.extent for i in s.indices] for s in bound.statements]
    loops = [sorted(n for n in set(column) if n is not None) for column in zip_longest(*extents)]
    whole = sorted({n for line in extents for n in line})
    for f in fields(MappingOptions):
        given = [getattr(o, f.name) for o in every]
        if f.name in LIST_OPTIONS:
            nothing = LIST_OPTIONS[f.name]
            count = min(MAX_TILED_LOOPS, len(loops)) if f.name == "tile" else LAUNCH_DIMENSIONS
            for k in range(max(count, *(len(v) for v in given))):
                own = loops[k] if f.name == "tile" and k < len(loops) else whole
                tried = {
                    n for extent in own for n in tile_candidates(extent) if n <= MAX_UNEVEN_SIZE or not n & (n - 1)
                }
                tried |= {v[k] for v in given if k < len(v)} | {nothing}
                yield Gene(f"{f.name}.{k}", tuple(sorted(tried)), keep_probability=0.0)
        elif choices := f.metadata.get("choices"):
            yield Gene(f.name, tuple(dict.fromkeys((*given, *choices))), keep_probability=0.3)


def _canonicalize_options(options: MappingOptions) -> MappingOptions:
    """`options` as a genome would give them."""
    lists: dict[str, Any] = {
        name: _trim_trailing(getattr(options, name), nothing) for name, nothing in LIST_OPTIONS.items()
    }
    return _drop_unused_options(replace(options, **lists))


def _trim_trailing(numbers: Sequence[int], nothing: int) -> tuple[int, ...]:
    kept = list(numbers)
    while len(kept) > 1 and kept[-1] == nothing:
        kept.pop()
    return tuple(kept)


def _drop_unused_options(options: MappingOptions) -> MappingOptions:
    """`options` without those that have no effect because another option is off."""
    shared = options.shared_memory
    return replace(
        options,
        max_shared_memory=options.max_shared_memory if shared else 0,
        double_buffer=options.double_buffer and shared,
        unroll_copy_shared=options.unroll_copy_shared and shared and options.unroll > 1,
    )
