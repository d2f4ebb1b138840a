"""Search spaces: genes made from the fields of an option record, the sizes of a def, and options to start from.

A genome has one number per gene, the index of its value among the gene's choices. Several genomes may stand for the
same options, which `Space.options` returns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import zip_longest
from random import Random
from typing import Any

from ..compiler.cpu_passes import (
    is_only_contractions,
    list_schedulable_ops,
    resolve_schedules,
    splits_reductions,
    with_split_reductions,
)
from ..core.errors import ArgumentError, CannotLower, TCError
from ..options import CpuOptions
from ..structured.cost.code_size import code_length
from ..structured.cost.plan_cost import plan_cycles
from ..structured.language.apply_primitives import plan_of_schedule
from ..structured.language.primitives import Schedule
from ..structured.language.schedule_types import schedule_for
from ..structured.language.select_schedule import check_schedule, make_contraction_plan
from ..structured.match.drop_unit_dims import drop_unit_dims
from ..structured.memory_bound.heuristics import schedule_memory_bound
from ..structured.op import StructuredOp
from ..structured.plan import Plan
from ..structured.planners.candidates import schedule_candidates
from ..target import CpuTarget
from ..tc_lang.ir import BoundFunction, Role
from .mutations import Mutation, list_mutations, mutate

Genome = tuple[int, ...]

MAX_RANKED_SCHEDULES = 64
"""The maximum number of schedules from the cost model's ranking that a gene chooses from."""
KEEP_PROBABILITY = 0.8
"""Probability that a random genome does not change a gene."""
KEEP_FIELD_PROBABILITY, KEEP_FIELD_WITH_SCHEDULES = 0.4, 0.9
"""The same for a field of the options: without schedules, and beside schedules, which matter more."""
MAX_CYCLES_RATIO = 3.0
"""Predicted cycles, relative to the default, above which a schedule is not tried."""
MAX_CODE_RATIO, ALLOWED_CODE_SIZE = 4.0, 128
"""The maximum code size, for compile time, relative to the default; and in multiply-adds, if that is larger."""
MIN_SPLIT_K_POINTS = 1 << 15
"""The minimum number of points of a reduction for which `split_k` may pay."""
MAX_TILED_LOOPS = 6
"""The maximum number of loops with tile sizes."""


@dataclass(frozen=True, slots=True)
class Gene:
    """A parameter. keep_probability: how often a random genome takes the first choice without drawing one."""

    name: str
    choices: tuple[Any, ...]
    keep_probability: float = 0.0

    def random(self, random: Random) -> int:
        if random.random() < self.keep_probability:
            return 0
        return random.randrange(len(self.choices))

    def step(self, place: int, random: Random) -> int:
        """The index of a neighboring choice, or of a random one."""
        if random.random() < 0.5:
            return max(0, min(len(self.choices) - 1, place + random.choice((-1, 1))))
        return self.random(random)


def tile_candidates(extent: int) -> tuple[int, ...]:
    """Tile sizes worth trying for a loop: powers of two, and the extent divided by them, rounded up."""
    powers = {1 << k for k in range(max(1, extent).bit_length()) if 1 << k <= extent}
    parts = {-(-extent // (1 << k)) for k in range(max(1, extent).bit_length())}
    return tuple(sorted((powers | parts) - {0}))


@dataclass(frozen=True)
class CpuSearchSpace:
    """The search space of CPU options.

    Attributes:
        start: the options to use if no gene changes them.
        ops: the contractions: the name in the schedule, the tensor, and the op.
        alone: whether the def has only contractions, so that their schedules determine its lowering.
        most, longest: the maximum predicted cycles and code size, relative to the default.
    """

    genes: tuple[Gene, ...]
    start: CpuOptions
    target: CpuTarget
    ops: tuple[tuple[str, str, StructuredOp], ...]
    alone: bool = False
    most: float = math.inf
    longest: float = math.inf

    def options(self, genome: Genome) -> CpuOptions:
        """The options of a genome."""
        values = {g.name: g.choices[place] for g, place in zip(self.genes, genome, strict=True)}
        changes: dict[str, Any] = {}
        for f in fields(self.start):
            if f.name == "schedule":
                continue
            if f.name in values:
                value = values[f.name]
                changes[f.name] = self._tuple(f.name, values) if value is _GIVEN else value
        if changes.get("split_k", self.start.split_k) != self.start.split_k:
            changes["schedule"] = None  # schedules are for the ops that the `split_k` of `start` gives
        elif self.ops and changes.get("use_microkernels", self.start.use_microkernels):
            changes["schedule"] = self._schedule(values)
        elif self.ops:
            changes["schedule"] = None
        return self._drop_irrelevant_options(replace(self.start, **changes))

    def _drop_irrelevant_options(self, options: CpuOptions) -> CpuOptions:
        """Reset options that have no effect to their starting values."""
        if not (self.alone and options.use_microkernels and options.split_k == self.start.split_k):
            return options
        has_schedules = isinstance(options.schedule, tuple) and len(options.schedule) == len(self.ops)
        shares = bool(self.start.grain_size) and (has_schedules or bool(options.grain_size))
        return replace(
            options,
            interleave=self.start.interleave,
            grain_size=self.start.grain_size if shares else options.grain_size,
        )

    def key(self, options: CpuOptions) -> Hashable | None:
        """A key that equivalent options share; None if their schedules are illegal, or hopeless."""
        plain, cycles, code = replace(options, schedule=None), 0.0, 0
        plans: list[tuple[str, Hashable]] = []
        for name, _, op in self.ops if options.use_microkernels else ():
            pipeline = schedule_for(options.schedule, name)
            if not isinstance(pipeline, Schedule):
                meaning, cost = None, self._default_schedule_costs.get(name, _NOTHING)
            elif (followed := self._cached_plan_and_cost(name, op, pipeline)) is not None:
                meaning, cost = followed
            else:
                return None
            plans.append((name, meaning))
            cycles, code = cycles + cost.cycles, code + cost.code
        if cycles > self.most * sum(u.cycles for u in self._default_schedule_costs.values()):
            return None
        if code > max(ALLOWED_CODE_SIZE, self.longest * sum(u.code for u in self._default_schedule_costs.values())):
            return None
        return plain, options.schedule is None, tuple(plans)

    def _cached_plan_and_cost(self, name: str, op: StructuredOp, pipeline: Schedule) -> _Followed | None:
        """The plan and the cost of a schedule; None if it is illegal. Related genomes share many schedules."""
        if (name, pipeline) not in self._known:
            try:
                self._known[name, pipeline] = _plan_and_cost(op, pipeline, self.target)
            except (CannotLower, TCError):
                self._known[name, pipeline] = None
        return self._known[name, pipeline]

    @cached_property
    def _known(self) -> dict[tuple[str, Schedule], _Followed | None]:
        return {}

    @cached_property
    def _default_schedule_costs(self) -> dict[str, _Cost]:
        """The cost of the cost model's schedule for every contraction that has one."""
        found = {}
        for name, _, op in self.ops:
            with contextlib.suppress(CannotLower):
                plan = make_contraction_plan(None, op, self.target, parallel=self.start.grain_size > 0)
                found[name] = _estimate_cost(op, plan, self.target)
        return found

    def _tuple(self, name: str, values: dict[str, Any]) -> tuple[int, ...]:
        numbered = [values[f"{name}.{k}"] for k in range(MAX_TILED_LOOPS) if f"{name}.{k}" in values]
        while numbered and not numbered[-1]:
            numbered.pop()
        return tuple(numbered)

    def _schedule(self, values: dict[str, Any]) -> tuple[tuple[str, Schedule], ...] | None:
        pairs = []
        for name, _, op in self.ops:
            pipeline = values.get(f"{name}.pipeline")
            if pipeline is not None:
                chosen = {e: values.get(f"{name}.{e.name}", 0) for e in self._edits[name]}
                pairs.append((name, mutate(pipeline, chosen, op)))
        return tuple(pairs) or None

    @cached_property
    def _edits(self) -> dict[str, tuple[Mutation, ...]]:
        return {name: list_mutations(op, self.target) for name, _, op in self.ops}

    def length(self, options: CpuOptions) -> int:
        """The code size of the schedules, which predicts the compile time."""
        total = 0
        for name, _, op in self.ops if options.use_microkernels else ():
            pipeline = schedule_for(options.schedule, name)
            followed = self._cached_plan_and_cost(name, op, pipeline) if isinstance(pipeline, Schedule) else None
            total += followed[1].code if followed else self._default_schedule_costs.get(name, _NOTHING).code
        return total

    def is_valid(self, options: CpuOptions) -> bool:
        """Whether the schedules are legal and promising. Lowering finds other errors."""
        return self.key(options) is not None

    def random(self, random: Random) -> Genome:
        return tuple(g.random(random) for g in self.genes)

    def genome(self, options: CpuOptions) -> Genome | None:
        """The genome of options that the space was made with; None if it has none."""
        places = []
        for g in self.genes:
            wanted = self._gene_value(g, options)
            found = [k for k, choice in enumerate(g.choices) if choice == wanted]
            if not found:
                return None
            places.append(found[0])
        genome = tuple(places)
        return genome if self.options(genome) == self._drop_irrelevant_options(options) else None

    def _gene_value(self, gene: Gene, options: CpuOptions) -> Any:
        head, _, tail = gene.name.partition(".")
        if not tail:
            value = getattr(options, head)
            return _GIVEN if _GIVEN in gene.choices and value else value
        if tail.isdigit():
            value = getattr(options, head)
            return value[int(tail)] if int(tail) < len(value) else 0
        return schedule_for(options.schedule, head) if tail == "pipeline" else gene.choices[0]


@dataclass(frozen=True, slots=True)
class _Cost:
    """The predicted cost of a schedule. code: the number of multiply-adds in its code."""

    cycles: float
    code: int


_NOTHING = _Cost(0.0, 0)
_Followed = tuple[Hashable, _Cost]
"""A plan, the same for equivalent schedules, and its cost."""


def _plan_and_cost(op: StructuredOp, pipeline: Schedule, target: CpuTarget) -> _Followed:
    """The plan and the cost of a schedule. Raises CannotLower or TCError if it is illegal."""
    if not op.is_product:
        check_schedule(pipeline, op, target)
        return pipeline, _NOTHING
    plan = plan_of_schedule(pipeline, op, target)
    return _clip_tiles(plan), _estimate_cost(op, plan, target)


def _estimate_cost(op: StructuredOp, plan: Plan, target: CpuTarget) -> _Cost:
    op = drop_unit_dims(op)
    return _Cost(plan_cycles(op, plan, target), code_length(op, plan))


def _clip_tiles(plan: Plan) -> Plan:
    """Clip each tile to the one around it, so that equivalent plans are equal."""
    around: dict[str, int] = {}
    levels = []
    for level in plan.levels:
        around[level.iterator] = min(level.size, around.get(level.iterator, level.size))
        levels.append(replace(level, size=around[level.iterator]))
    return replace(plan, levels=tuple(levels))


class _PerLevelGenes:
    """Stands for a tuple whose elements have one gene each."""

    def __repr__(self) -> str:
        return "given"


_GIVEN = _PerLevelGenes()


def search_space(
    bound: BoundFunction, target: CpuTarget, start: CpuOptions, others: Sequence[CpuOptions] = ()
) -> tuple[CpuSearchSpace, tuple[Genome, ...]]:
    """The space around `start`, and the first genomes: `start`, `others`, presets, the cost model's best.

    others: options that were good elsewhere; their values are among the choices.
    """
    every = (start, *others)
    ops = list_schedulable_ops(bound, replace(start, schedule=None), target) if start.use_microkernels else ()
    ops = tuple(found for found in ops if found[2].is_product)
    alone = bool(ops) and is_only_contractions(bound, replace(start, schedule=None), target)
    genes = [*_field_genes(bound, every, bool(ops), alone and len(ops) == 1), *_parts_gene(bound, every, target)]
    for name, tensor, op in ops:
        genes += _op_genes(name, tensor, op, every, target)
    base = replace(start, schedule=start.schedule if not ops else None)
    made = CpuSearchSpace(
        tuple(g for g in genes if len(g.choices) > 1), base, target, ops, alone, MAX_CYCLES_RATIO, MAX_CODE_RATIO
    )
    return made, _make_seed_genomes(made, every)


def schedule_space(
    bound: BoundFunction, target: CpuTarget, start: CpuOptions, count: int
) -> tuple[CpuSearchSpace, tuple[Genome, ...]]:
    """At most `count` schedules for each contraction, and the first genomes: the best schedule of each.

    They are the alternatives of the schedule of `start` if it has one for the contraction, else the cost model's best,
    preceded by None, the default of an untuned call, if that is not among them.

    Raises ArgumentError if the def has no contraction, or no alternative applies.
    """
    ops = list_schedulable_ops(bound, start, target)
    if not ops:
        raise ArgumentError(
            f"{bound.name} has no contraction", expected="a contraction, or a single reduction or permutation"
        )
    resolve_schedules(bound, start, target)  # does the schedule apply at all?
    untuned: tuple[None, ...] = ()
    if start.schedule is None:
        products = _products_if_asked(bound, start, target)
        if splits_reductions(bound, start, target) or products != ops:
            untuned = (None,)
        ops = products
    offered = ((*untuned, *_list_schedules(start, op, name, tensor, target, count)) for name, tensor, op in ops)
    genes = tuple(Gene(f"{name}.pipeline", found) for (name, _, _), found in zip(ops, offered, strict=True))
    return CpuSearchSpace(genes, replace(start, schedule=None), target, ops), (tuple(0 for _ in genes),)


def _products_if_asked(
    bound: BoundFunction, start: CpuOptions, target: CpuTarget
) -> tuple[tuple[str, str, StructuredOp], ...]:
    """The schedulable ops, including products that get a register tile only with a schedule."""
    untuned = list_schedulable_ops(bound, start, target)
    asked = list_schedulable_ops(bound, replace(start, schedule=schedule_memory_bound), target)
    try:
        for _, _, op in asked:
            if op.is_product:
                schedule_candidates(op, target, 1)
    except CannotLower:
        return untuned
    return asked


def _list_schedules(
    start: CpuOptions, op: StructuredOp, name: str, tensor: str, target: CpuTarget, count: int
) -> tuple[Schedule, ...]:
    asked = schedule_for(start.schedule, name, tensor)
    if asked is None and not op.is_product:
        asked = schedule_memory_bound
    if asked is None:
        return tuple(c.schedule for c in schedule_candidates(op, target, count, parallel=start.grain_size > 0))
    pipeline = asked if isinstance(asked, Schedule) else asked(op, target)
    return tuple(p for p in pipeline.alternatives() if _is_schedule_applicable(p, op, target))[:count]


def _is_schedule_applicable(pipeline: Schedule, op: StructuredOp, target: CpuTarget) -> bool:
    try:
        check_schedule(pipeline, op, target)
    except (CannotLower, TCError):
        return False
    return True


def _field_genes(bound: BoundFunction, every: Sequence[CpuOptions], contracts: bool, single: bool) -> Iterable[Gene]:
    """Genes of the options that can matter. single: the def is one contraction, whose schedule sets all tiling."""
    useless = {
        "tile": single and not any(options.tile for options in every),
        "fusion": len(bound.statements) < 2,
        "localize_temporaries": not any(t.role is Role.TEMPORARY for t in bound.tensors),
        "use_microkernels": not contracts,
        "split_k": True,  # has its own gene
    }
    keep = KEEP_FIELD_WITH_SCHEDULES if contracts else KEEP_FIELD_PROBABILITY
    for f in fields(every[0]):
        choices = f.metadata.get("choices")
        if choices is None or useless.get(f.name):
            continue
        values = [getattr(options, f.name) for options in every]
        if isinstance(values[0], tuple):
            yield from _tuple_genes(f.name, bound, values, keep)
        else:
            yield Gene(f.name, tuple(dict.fromkeys((*values, *choices))), keep_probability=keep)


def _parts_gene(bound: BoundFunction, every: Sequence[CpuOptions], target: CpuTarget) -> Iterable[Gene]:
    """The gene of `split_k`, without values that have the same effect as an earlier one."""
    name = "split_k"
    if not any(
        s.reduction_indices and math.prod(i.extent for i in s.indices) >= MIN_SPLIT_K_POINTS for s in bound.statements
    ):
        return
    choices = next(f.metadata["choices"] for f in fields(every[0]) if f.name == name)
    different: dict[BoundFunction, int] = {}
    for parts in dict.fromkeys((*(getattr(options, name) for options in every), *choices)):
        different.setdefault(
            with_split_reductions(bound, replace(every[0], split_k=parts, schedule=None), target), parts
        )
    yield Gene(name, tuple(different.values()), keep_probability=KEEP_FIELD_WITH_SCHEDULES)


def _tuple_genes(name: str, bound: BoundFunction, values: Sequence[tuple[int, ...]], keep: float) -> Iterable[Gene]:
    """The genes of a tuple of tile sizes, one for each outer loop; 0 leaves a loop untiled."""
    depth = max((len(s.free) for s in bound.statements), default=0)
    yield Gene(name, ((), _GIVEN), keep_probability=keep)
    for k in range(min(MAX_TILED_LOOPS, max(depth, *map(len, values)))):
        extents = {s.free[k].extent for s in bound.statements if k < len(s.free)}
        tried = sorted(
            {size for extent in extents for size in tile_candidates(extent)} | {v[k] for v in values if k < len(v)}
        )
        yield Gene(f"{name}.{k}", (0, *(size for size in tried if size)), keep_probability=0.2)


def _op_genes(
    name: str, tensor: str, op: StructuredOp, every: Sequence[CpuOptions], target: CpuTarget
) -> Iterable[Gene]:
    known = [p for o in every if isinstance(p := schedule_for(o.schedule, name, tensor), Schedule)]
    parallel = every[0].grain_size > 0
    try:
        ranked = [c.schedule for c in schedule_candidates(op, target, MAX_RANKED_SCHEDULES, parallel=parallel)]
    except CannotLower:
        ranked = []
    if not known and not ranked:
        return
    yield Gene(f"{name}.pipeline", tuple(dict.fromkeys((None, *known, *ranked))))
    for e in list_mutations(op, target):
        yield Gene(f"{name}.{e.name}", (0, *e.values), keep_probability=KEEP_PROBABILITY)


def _make_seed_genomes(made: CpuSearchSpace, every: Sequence[CpuOptions]) -> tuple[Genome, ...]:
    """Genomes to start from, most promising first: recorded options, then presets and the ranking alternately.

    So the first generation contains both, however long the ranking is.
    """
    known = [genome for o in every if (genome := made.genome(_drop_experts(o))) is not None]
    zero = known[0] if known else tuple(0 for _ in made.genes)
    ranked = _rank_genomes(made, zero)
    shared: list[Genome] = []
    for k, g in enumerate(made.genes):  # the model's choice, except for parallel loops
        if g.name.endswith(".threads"):
            shared += [(*ranked[0][:k], place, *ranked[0][k + 1 :]) for place in range(1, len(g.choices))]
    turns = zip_longest(_make_preset_genomes(made, zero), ranked)
    dealt = (genome for turn in turns for genome in turn if genome is not None)
    return tuple(dict.fromkeys((*known, *dealt, *shared)))


def _make_preset_genomes(made: CpuSearchSpace, zero: Genome) -> list[Genome]:
    """`zero` with one field changed, if that changes the options."""
    found = {made.key(made.options(zero)): zero}
    for k, g in enumerate(made.genes):
        if "." not in g.name:
            for place in (n for n, choice in enumerate(g.choices) if choice is not _GIVEN):
                preset = (*zero[:k], place, *zero[k + 1 :])
                found.setdefault(made.key(made.options(preset)), preset)
    return list(found.values())[1:]


def _drop_experts(options: CpuOptions) -> CpuOptions:
    """The options without schedule heuristics, which a search replaces."""
    pairs = options.schedule if isinstance(options.schedule, tuple) else ()
    return replace(options, schedule=tuple(p for p in pairs if isinstance(p[1], Schedule)) or None)


def _rank_genomes(made: CpuSearchSpace, zero: Genome) -> list[Genome]:
    """Genomes with the n-th best schedule for every contraction at once, for the first values of n."""
    places = {k: len(g.choices) for k, g in enumerate(made.genes) if g.name.endswith(".pipeline")}
    best = min(12, max(places.values(), default=0))
    return [tuple(min(n, places[k] - 1) if k in places else v for k, v in enumerate(zero)) for n in range(1, best)]
