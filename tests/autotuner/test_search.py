"""Search spaces and searches: what they ask for, in what order, and that it means something."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tensor_comprehensions.autotuner.mutations import OFF, list_mutations, mutate
from tensor_comprehensions.autotuner.search import SEARCHES, Candidate, GeneticSearch
from tensor_comprehensions.autotuner.space import search_space, tile_candidates
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.schedules import (
    interchange,
    nontemporal_stores,
    pack,
    pad,
    parallel,
    peel,
    prefetch,
    tile,
    unroll,
    vectorize,
)
from tensor_comprehensions.structured.cost.code_size import code_length
from tensor_comprehensions.structured.language.apply_primitives import plan_of_schedule
from tensor_comprehensions.structured.language.primitives import Schedule
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.target import AVX512

from .pretend import TMM, landscape, space_of, subject


def test_sizes_are_powers_of_two_and_ceiling_divisors() -> None:
    assert tile_candidates(100) == (1, 2, 4, 7, 8, 13, 16, 25, 32, 50, 64, 100)
    assert tile_candidates(1) == (1,)
    assert tile_candidates(0) == ()


def test_a_space_has_genes_for_what_the_def_can_vary() -> None:
    pointwise, _ = space_of(subject("def f(float(N) x) -> (y) { y(i) = x(i) }", (64,)))
    assert {g.name for g in pointwise.genes} == {"tile", "tile.0", "interleave", "grain_size"}
    chain, _ = space_of(subject())
    assert {g.name for g in chain.genes} >= {"fusion", "localize_temporaries", "tile", "tile.0", "tile.1"}
    assert "use_microkernels" not in {g.name for g in chain.genes}
    product, _ = space_of(subject(TMM, (64, 96), (48, 96)))
    assert {"use_microkernels", "S0.pipeline", "S0.m.inner", "S0.k.unroll"} <= {g.name for g in product.genes}


def test_sums_with_few_results_may_be_had_in_parts() -> None:
    """One choice for each different program; pipelines are for the whole product and not for parts of it."""
    made, seeds = space_of(
        subject("def f(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }", (8, 720), (8, 720))
    )
    (parts,) = [g.choices for g in made.genes if g.name == "split_k"]
    assert parts == (0, 2, 4, 8, 16)  # 64 parts of 720 terms would have fewer than 16, and none is the model's choice
    options = [made.options(g) for g in seeds]
    assert CpuOptions(split_k=4) in options
    r = random.Random(1)
    drawn = [made.options(made.random(r)) for _ in range(200)]
    assert {o.split_k for o in drawn} == {0, 2, 4, 8, 16}
    assert all(o.schedule is None for o in drawn if o.split_k)
    assert made.key(CpuOptions(split_k=2)) != made.key(CpuOptions(split_k=4))
    start = CpuOptions(split_k=4)
    what = subject("def f(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }", (8, 720), (8, 720))
    in_parts, begin = search_space(what.bound, what.target, start)
    assert in_parts.options(begin[0]) == start
    assert any(o.split_k == 4 and o.schedule for o in map(in_parts.options, begin))


def test_a_space_takes_in_the_values_of_what_it_starts_from() -> None:
    what = subject()
    odd = CpuOptions(tile=(11, 0, 13), grain_size=77, interleave=3)
    made, seeds = search_space(what.bound, what.target, what.start, [odd])
    assert [made.options(g) for g in seeds[:2]] == [CpuOptions(), odd]
    assert made.genome(CpuOptions(grain_size=78)) is None


def test_seeds_begin_with_the_default_and_have_presets_and_the_ranking() -> None:
    made, seeds = space_of(subject(TMM, (64, 96), (48, 96)))
    options = [made.options(g) for g in seeds]
    assert options[0] == CpuOptions()
    assert CpuOptions(use_microkernels=False) in options
    assert len({o.schedule for o in options}) >= 8
    assert any("parallel('n1', 'm1', grain_size=1)" in str(o.schedule) for o in options)
    assert sum(map(made.is_valid, options)) >= 0.8 * len(options)


def test_a_first_generation_has_presets_and_ranked_pipelines() -> None:
    """However long the ranking is, and its places are not spent on what means the same as another."""
    chain = """def two(float(M,K) A, float(N,K) B, float(P,N) C) -> (X, Y) {
        X(m,n) +=! A(m,k) * B(n,k)
        Y(m,p) +=! X(m,n) * C(p,n)
    }"""
    for what in (subject(TMM, (64, 96), (48, 96)), subject(chain, (64, 96), (48, 96), (32, 48))):
        made, seeds = space_of(what)
        first = [c.options for c in GeneticSearch(made, seeds, 24, 0).ask()]
        assert first[0] == CpuOptions()
        assert {CpuOptions(grain_size=0), CpuOptions(use_microkernels=False)} <= set(first)
        assert sum(replace(o, schedule=None) == CpuOptions() for o in first[1:]) >= 6
        seeded = {made.key(made.options(g)) for g in seeds}
        assert sum(made.key(o) in seeded for o in first) >= 14


def test_random_genomes_mean_options_that_differ_and_most_are_valid() -> None:
    made, _ = space_of(replace(subject(TMM, (64, 96), (48, 96)), target=AVX512))
    source = random.Random(1)
    options = [made.options(made.random(source)) for _ in range(200)]
    assert len(set(options)) > 100
    assert sum(map(made.is_valid, options)) > 100


def test_options_that_mean_the_same_are_one_candidate() -> None:
    made, _ = space_of(subject(TMM, (64, 96), (48, 96)))
    start = tile(n=32, m=6) >> pack(B="n1") >> vectorize("n")
    keys = [
        made.key(CpuOptions(schedule=(("S0", written),)))
        for written in (start, start >> unroll(k=1), tile(n=32, m=8) >> pack(B="n1") >> vectorize("n"))
    ]
    assert keys[0] == keys[1] != keys[2]
    assert None not in keys
    assert made.alone
    source = random.Random(0)
    found = [o for o in (made.options(made.random(source)) for _ in range(200)) if o.use_microkernels]
    assert {o.interleave for o in found} == {0}
    assert {o.grain_size for o in found if o.schedule} == {CpuOptions().grain_size}
    chain, _ = space_of(subject())
    assert not chain.alone


def test_what_a_pipeline_means_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[str] = []

    def counting(pipeline: Schedule, *others: Any) -> Any:
        followed.append(str(pipeline))
        return plan_of_schedule(pipeline, *others)

    monkeypatch.setattr("tensor_comprehensions.autotuner.space.plan_of_schedule", counting)
    made, _ = space_of(subject(TMM, (64, 96), (48, 96)))
    good, bad = tile(n=32, m=6) >> vectorize("n"), tile(n=32, z=6) >> vectorize("n")
    for _ in range(2):
        for grain in (0, 4096):
            assert made.key(CpuOptions(schedule=(("S0", good),), grain_size=grain)) is not None
            assert made.key(CpuOptions(schedule=(("S0", bad),), grain_size=grain)) is None
    assert followed == [str(good), str(bad)]


def test_pipelines_that_the_model_finds_hopeless_are_not_tried() -> None:
    made, _ = space_of(subject(TMM, (64, 96), (48, 96)))
    hopeless = CpuOptions(schedule=(("S0", tile(n=4, m=1) >> pack(B="n1") >> vectorize("n", lanes=4)),))
    assert made.key(hopeless) is None
    assert replace(made, most=math.inf).key(hopeless) is not None


def test_pipelines_that_become_long_code_are_not_tried() -> None:
    made = replace(space_of(subject(TMM, (64, 96), (48, 96)))[0], most=math.inf)
    _, _, op = made.ops[0]
    wordy = tile(m=17, n=40) >> tile(m=5, n=16) >> vectorize("n", lanes=8) >> unroll(k=8)
    assert (
        code_length(drop_unit_dims(op), plan_of_schedule(wordy, op, made.target)) == (5 + 2 + 5 + 3) * (2 + 1 + 1) * 8
    )
    options = CpuOptions(schedule=(("S0", wordy),))
    assert made.key(options) is None
    assert replace(made, longest=math.inf).key(options) is not None


def test_edits_change_one_number_each() -> None:
    what = subject(TMM, (64, 96), (48, 96))
    _, _, op = space_of(what)[0].ops[0]
    by_name = {e.name: e for e in list_mutations(op, what.target)}
    start = tile(n=32, m=6) >> pack(B="n1") >> vectorize("n") >> unroll(k=4)
    changed = {
        "m.inner": (12, tile(n=32, m=12) >> pack(B="n1") >> vectorize("n") >> unroll(k=4)),
        "m.outer": (24, tile(m=24) >> start),
        "k.inner": (48, tile(n=32, k=48, m=6) >> pack(B="n1") >> vectorize("n") >> unroll(k=4)),
        "lanes": (8, tile(n=32, m=6) >> pack(B="n1") >> vectorize("n", lanes=8) >> unroll(k=4)),
        "threads": (2, start >> parallel("n1", "m1", grain_size=1)),
        "order": (1, tile(n=32, m=6) >> interchange("m1 n1") >> pack(B="n1") >> vectorize("n") >> unroll(k=4)),
        "A.pack": (1, tile(n=32, m=6) >> pack("A") >> pack(B="n1") >> vectorize("n") >> unroll(k=4)),
        "B.pack": (1, tile(n=32, m=6) >> pack("B") >> vectorize("n") >> unroll(k=4)),
        "ends": (1, start >> peel("n1", "m1")),
        "k.unroll": (8, tile(n=32, m=6) >> pack(B="n1") >> vectorize("n") >> unroll(k=8)),
    }
    for name, (value, expected) in changed.items():
        assert mutate(start, {by_name[name]: value}, op) == expected
    assert mutate(start, {by_name["k.unroll"]: 1}, op) == tile(n=32, m=6) >> pack(B="n1") >> vectorize("n")
    assert mutate(start, {by_name["B.pack"]: OFF}, op) == tile(n=32, m=6) >> vectorize("n") >> unroll(k=4)
    padded = tile(n=32, m=6) >> pack(A="m1") >> pack(B="n1")
    assert mutate(padded >> peel("m1"), {by_name["ends"]: 3}, op) == padded >> pad("A", "B")
    assert mutate(padded >> pad("A", "B"), {by_name["B.pack"]: OFF}, op) == tile(n=32, m=6) >> pack(A="m1") >> pad("A")
    assert mutate(start, {by_name["B.pack"]: 3}, op) == start, "there is no third place"
    shared = tile(n=32, m=6) >> parallel("n1") >> vectorize("n")
    assert mutate(shared, {by_name["threads"]: OFF}, op) == tile(n=32, m=6) >> vectorize("n")
    around = mutate(shared, {by_name["m.outer"]: 24}, op)
    assert around == tile(m=24) >> tile(n=32, m=6) >> vectorize("n") >> parallel("m1")
    assert mutate(start, dict.fromkeys(by_name.values(), 0), op) == start


def test_sums_that_are_tiled_keep_their_order() -> None:
    source = "def f(float(N,K,L) A, float(M,L,K) B) -> (C) { C(n,m) +=! A(n,k,l) * B(m,l,k) }"
    what = subject(source, (24, 16, 8), (24, 8, 16))
    ops = space_of(what)[0].ops
    _, _, op = ops[0]
    k = next(e for e in list_mutations(op, what.target) if e.name == "k.inner")
    start = tile(n=4, m=16) >> interchange("k l") >> vectorize("m")
    assert mutate(start, {k: 8}, op) == tile(n=4, k=8, m=16) >> interchange("k0 l") >> vectorize("m")


def test_what_comes_from_afar_has_genes_of_its_own() -> None:
    what = subject(TMM, (64, 96), (48, 96))
    _, _, op = space_of(what)[0].ops[0]
    assert not {"stream", "A.ahead", "B.ahead"} & {e.name for e in list_mutations(op, what.target)}
    small = {e.name: e for e in list_mutations(op, replace(what.target, cache=(1024, 4096, 1 << 20)))}
    assert {"stream", "A.ahead", "B.ahead"} <= small.keys()
    start = tile(n=32, m=6) >> vectorize("n")
    assert mutate(start, {small["stream"]: 1}, op) == start >> nontemporal_stores()
    assert mutate(start, {small["B.ahead"]: 1}, op) == start >> prefetch(B="n1")
    assert (
        mutate(start >> nontemporal_stores() >> prefetch(B="n1"), {small["stream"]: OFF, small["B.ahead"]: OFF}, op)
        == start
    )


def list_requested_candidates(kind: str, seed: int, generations: int = 6, population: int = 12) -> list[Candidate]:
    """The candidates that a search asks for when times are those of the landscape."""
    made, seeds = space_of(subject())
    search = SEARCHES[kind](made, seeds, population, seed)
    found = []
    for _ in range(generations):
        for candidate in search.ask():
            found.append(candidate)
            search.tell(candidate, landscape(candidate.options))
    return found


@pytest.mark.parametrize("kind", SEARCHES)
def test_case_50_the_same_seed_gives_the_same_candidates(kind: str) -> None:
    state = random.getstate()
    first, second, other = (
        list_requested_candidates(kind, 3),
        list_requested_candidates(kind, 3),
        list_requested_candidates(kind, 4),
    )
    assert first == second
    assert (first != other) is (kind != "sweep")
    assert random.getstate() == state


@pytest.mark.parametrize("kind", SEARCHES)
def test_nothing_is_asked_for_twice(kind: str) -> None:
    options = [c.options for c in list_requested_candidates(kind, 0)]
    assert len(set(options)) == len(options) > (10 if kind == "sweep" else 50)


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_ends_when_the_space_is_exhausted(kind: str) -> None:
    made, seeds = space_of(subject("def f(float(N) x) -> (y) { y(i) = x(i) }", (2,)))
    search = SEARCHES[kind](made, seeds, 500, 0)
    total = []
    while candidates := search.ask():
        for c in candidates:
            total.append(c.options)
            search.tell(c, 1.0)
    assert len(set(total)) == len(total)
    assert CpuOptions() in total


def test_breeding_keeps_the_elite_and_beats_chance_on_a_landscape() -> None:
    bests = {
        kind: [min(landscape(c.options) for c in list_requested_candidates(kind, seed, 10, 16)) for seed in range(7)]
        for kind in SEARCHES
    }
    assert statistics.median(bests["genetic"]) < statistics.median(bests["random"])


def test_a_population_of_failures_still_breeds() -> None:
    made, seeds = space_of(subject())
    search = GeneticSearch(made, seeds, 8, 0)
    generations = []
    for _ in range(3):
        generations.append(search.ask())
        for candidate in generations[-1]:
            search.tell(candidate, None)
    assert all(generations)
    assert all(a != b for a, b in pairwise(generations))
