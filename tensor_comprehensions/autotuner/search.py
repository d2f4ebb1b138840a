"""Search methods: each proposes genomes and learns their times. None knows how they are measured.

Invariant: the same seed and the same times give the same candidates; no options are proposed twice.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any, Protocol

from ..options import CpuOptions
from .space import CpuSearchSpace, Genome

GENERATIONS, POPULATION = 500, 24
"""The defaults. Generations are small, so that each can learn from the one before; the budget ends the search."""
MAX_TRIES = 200
"""The number of attempts in a row to find a new, valid genome before the space counts as exhausted."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A genome and its options."""

    genome: Genome
    options: CpuOptions


class Search(Protocol):
    """The interface of search methods."""

    def ask(self) -> list[Candidate]:
        """The next generation; empty if nothing is left to try."""

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Report the time of a candidate; None if it failed."""


class Sampler:
    """Makes valid candidates of a space, none twice."""

    def __init__(self, space: CpuSearchSpace, seed: int) -> None:
        self.space, self.random = space, Random(seed)
        self._tried: set[Genome] = set()
        self._seen: set[Hashable] = set()

    def make_candidate(self, genome: Genome) -> Candidate | None:
        """The candidate of a genome; None if it is invalid, or an earlier genome had the same options."""
        if genome in self._tried:
            return None
        self._tried.add(genome)
        options = self.space.options(genome)
        key = self.space.key(options)
        if key is None or key in self._seen:
            return None
        self._seen.add(key)
        return Candidate(genome, options)

    def draw_candidates(self, seeds: Iterable[Genome], seeded: int, count: int) -> list[Candidate]:
        """The first `seeded` candidates of `seeds`, and random ones up to `count` in all."""
        found = list(islice((c for g in seeds if (c := self.make_candidate(g)) is not None), seeded))
        tries = 0
        while len(found) < count and tries < MAX_TRIES:
            candidate = self.make_candidate(self.space.random(self.random))
            tries = tries + 1 if candidate is None else 0
            if candidate is not None:
                found.append(candidate)
        return found


class RandomSearch:
    """Random genomes, independent of earlier times."""

    def __init__(self, space: CpuSearchSpace, seeds: Sequence[Genome], population: int, seed: int) -> None:
        self._sampler, self._seeds, self._population = Sampler(space, seed), tuple(seeds[:1]), population

    def ask(self) -> list[Candidate]:
        seeds, self._seeds = self._seeds, ()
        return self._sampler.draw_candidates(seeds, len(seeds), self._population)

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        """Do nothing: a random search does not learn."""


class GeneticSearch:
    """A population that breeds: elites survive, children mix three parents and mutate (section 6 of the paper).

    Unlike in the paper, only elites survive: all others of a generation are new.
    """

    CROSSOVER, MUTATIONS, ELITES = 0.8, 2.0, 0.2
    PRESSURE = 6
    """A parent is drawn with a probability proportional to this power of its speed: half as fast, 64 times rarer."""
    SEEDED = 0.6
    """The maximum share of the first generation that comes from seeds."""

    def __init__(self, space: CpuSearchSpace, seeds: Sequence[Genome], population: int, seed: int) -> None:
        self._deap = _import_deap()
        self._sampler = Sampler(space, seed)
        self._random = Random(seed + 1)
        self._population = max(4, population)
        self._elites = max(1, round(self.ELITES * self._population))
        self._seeds: Sequence[Genome] | None = seeds
        self._pool: list[Any] = []
        self._toolbox = self._deap.base.Toolbox()
        self._toolbox.register("select", self._select_parents)
        self._toolbox.register("elite", self._deap.tools.selBest, k=self._elites)
        self._toolbox.register("mate", self._cross_parents)
        self._toolbox.register("mutate", self._mutate_genome)

    def ask(self) -> list[Candidate]:
        if self._seeds is not None:
            seeds, self._seeds = self._seeds, None
            return self._sampler.draw_candidates(seeds, round(self.SEEDED * self._population), self._population)
        elites = self._toolbox.elite(self._pool)
        children = self._breed_children(self._population - len(elites))
        self._pool = elites
        return children

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        individual = self._deap.individual(candidate.genome)
        individual.fitness.values = (0.0 if seconds is None else 1 / seconds,)
        self._pool.append(individual)

    def _breed_children(self, count: int) -> list[Candidate]:
        found: list[Candidate] = []
        tries = 0
        while len(found) < count and tries < MAX_TRIES:
            parents = self._toolbox.select()
            genome = self._toolbox.mate(parents) if self._random.random() < self.CROSSOVER else parents[0]
            child = self._sampler.make_candidate(self._toolbox.mutate(genome))
            tries = tries + 1 if child is None else 0
            if child is not None:
                found.append(child)
        return found or self._sampler.draw_candidates((), 0, count)

    def _select_parents(self) -> list[Genome]:
        """Draw three parents, faster ones with a higher probability."""
        speeds = [x.fitness.values[0] for x in self._pool]
        most = max(speeds)
        weights = [(speed / most) ** self.PRESSURE if most else 1.0 for speed in speeds]
        return [tuple(x) for x in self._random.choices(self._pool, weights, k=3)]

    def _cross_parents(self, parents: Sequence[Genome]) -> Genome:
        return tuple(self._random.choice(values) for values in zip(*parents, strict=True))

    def _mutate_genome(self, genome: Genome) -> Genome:
        """Change at least one gene, so that children of equal parents are new."""
        genes = self._sampler.space.genes
        sure = self._random.randrange(len(genes))
        rate = self.MUTATIONS / len(genes)
        return tuple(
            gene.step(place, self._random) if k == sure or self._random.random() < rate else place
            for k, (gene, place) in enumerate(zip(genes, genome, strict=True))
        )


class CoordinateSweep:
    """Tries each choice of one gene after the other, with the best choices so far for the other genes."""

    def __init__(self, space: CpuSearchSpace, seeds: Sequence[Genome], population: int, seed: int) -> None:
        self._sampler, self._population = Sampler(space, seed), population
        self._best, self._least, self._gene = seeds[0], math.inf, 0

    def ask(self) -> list[Candidate]:
        found: list[Candidate] = []
        while not found and self._gene < len(self._sampler.space.genes):
            k, best = self._gene, self._best
            places = range(len(self._sampler.space.genes[k].choices))[: self._population]
            every = (self._sampler.make_candidate((*best[:k], place, *best[k + 1 :])) for place in places)
            found = [c for c in every if c is not None]
            self._gene += 1
        return found

    def tell(self, candidate: Candidate, seconds: float | None) -> None:
        if seconds is not None and seconds < self._least:
            self._best, self._least = candidate.genome, seconds


@dataclass(frozen=True, slots=True)
class _Deap:
    base: Any
    tools: Any
    individual: Any


def _import_deap() -> _Deap:
    """The modules of deap that are used, and the class of individuals."""
    from deap import base, tools

    class Fitness(base.Fitness):  # type: ignore[misc]
        weights = (1.0,)

    class Individual(list[int]):
        def __init__(self, genes: Sequence[int]) -> None:
            super().__init__(genes)
            self.fitness = Fitness()

    return _Deap(base, tools, Individual)


SEARCHES: dict[str, type[GeneticSearch] | type[RandomSearch] | type[CoordinateSweep]] = {
    "genetic": GeneticSearch,
    "random": RandomSearch,
    "sweep": CoordinateSweep,
}
