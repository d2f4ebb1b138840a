"""The gain of tuning, and genetic against random search on recorded times.

`python -m benchmarks.tuning --budget 120` tunes the kernels of the paper, one after the other, and stores nothing.
`python -m benchmarks.tuning --replay` times every point of a small space once, and lets both searches look for the
fastest with these recorded times: they differ only in the points that they try.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

import tensor_comprehensions
from tensor_comprehensions import CpuOptions
from tensor_comprehensions.autotuner import op_api, worker
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.device import available_cpus
from tensor_comprehensions.autotuner.evaluators import InProcess, future_reply
from tensor_comprehensions.autotuner.problem import Problem, problem_message
from tensor_comprehensions.autotuner.search import POPULATION, SEARCHES
from tensor_comprehensions.autotuner.search_loop import TuningResult
from tensor_comprehensions.autotuner.space import CpuSearchSpace, Gene, Genome, search_space
from tensor_comprehensions.cache.options_proto import to_message
from tensor_comprehensions.core import knobs
from tensor_comprehensions.dispatch.call_steps import normalize_arguments
from tensor_comprehensions.runtime.cpu.host import host

from . import sources as tc
from .kernels import BENCHMARKS
from .runner import using_threads

NAMES = (
    "tmm_128x32x256", "tbmm_500x26x72x26", "gconv_32x32x16x14", "mlp3_128x128x64x32x2", "softmax_4096x1024",
    "lut2_1e6x64", "conv_4x128x14_3x3x128", "conv_8x64x56_3x3x64",
)  # fmt: skip
PIPELINES, BUDGETS, SEEDS = 14, (24, 48, 96), 21


def gains(names: Sequence[str], budget: float, seed: int, search: str) -> Iterator[str]:
    """A line for each kernel, and the geometric mean of the gains.

    else: the idle part of the time up to the last candidate, and of all the time: neither compiling nor running.
    """
    head = f"{'kernel':28} {'untuned':>10} {'gain':>6} {'candidates':>10} {'per second':>10}"
    yield f"{head} {'else':>6} {'in all':>6}   options"
    found: list[float] = []
    for b in BENCHMARKS:
        if b.name not in names:
            continue
        op = next(iter(tensor_comprehensions.define(b.source)))
        arguments = normalize_arguments(op._kernels.call_signature, b.arguments(), {})
        tuned = op_api.autotune(
            op._kernels, arguments, None, op_api.parse_budget(budget, 10000, POPULATION, seed, search)
        )
        found.append(tuned.speedup)
        yield (
            f"{b.name:28} {tuned.default_seconds * 1e6:8.1f} us {tuned.speedup:6.3f} {len(tuned.outcomes):10} "
            f"{len(tuned.outcomes) / tuned.outcomes[-1].elapsed:10.1f} {' '.join(map('{:6.1%}'.format, rests(tuned)))}"
            f"   {tuned.options}"
        )
    yield f"geometric mean of the gains: {math.exp(statistics.fmean(map(math.log, found))):.3f}"


def rests(tuned: TuningResult) -> tuple[float, float]:
    """The idle part of the time up to the last candidate, and of all the time: neither compiling nor running."""
    spent = sum(o.compiling for o in tuned.outcomes) / len(available_cpus()) + sum(o.running for o in tuned.outcomes)
    return 1 - spent / tuned.outcomes[-1].elapsed, 1 - (spent + tuned.raced) / tuned.elapsed


# --- searches on recorded times ----------------------------------------------------------------------------------


def small() -> tuple[Problem, CpuSearchSpace, tuple[Genome, ...]]:
    """A product of 96x72x200, and some thousand ways to lower it."""
    op = next(iter(tensor_comprehensions.define(tc.MATMUL)))
    arguments = normalize_arguments(op._kernels.call_signature, (torch.randn(96, 72), torch.randn(72, 200)), {})
    problem = Problem(problem_message(op.function, arguments, 0))
    whole, _ = search_space(problem.bound, host(), CpuOptions())
    choices = {g.name: g.choices for g in whole.genes}
    genes = (
        Gene("S0.pipeline", choices["S0.pipeline"][:PIPELINES]),
        *(Gene(name, (0, *values), keep_probability=0.5) for name, values in (
            ("S0.m.inner", (4, 6, 8, 12, 16)), ("S0.n.inner", (16, 32, 48, 64)), ("S0.k.unroll", (2, 4)),
        )),
    )  # fmt: skip
    seeds = tuple((k, 0, 0, 0) for k in range(len(genes[0].choices)))
    return problem, CpuSearchSpace(genes, whole.start, whole.target, whole.ops), seeds


def time_candidates(problem: Problem, made: CpuSearchSpace) -> dict[CpuOptions, float]:
    """Seconds of every way that is valid; ways with the same code have the same."""
    here, known, table = InProcess(), dict[str, float](), dict[CpuOptions, float]()
    try:
        for genome in itertools.product(*(range(len(g.choices)) for g in made.genes)):
            options = made.options(genome)
            if options in table or not made.is_valid(options):
                continue
            request = pb.Request(
                version=worker.VERSION, stage=pb.COMPILE, problem=problem.message, options=[to_message(options)],
                fingerprint=here.fingerprint,
            )  # fmt: skip
            code = future_reply(here.submit(request), here.fingerprint)
            if code.digest not in known:
                request.stage, request.seconds = pb.MEASURE, 0.03
                request.codes.extend(code.codes)
                reply = future_reply(here.submit(request), here.fingerprint)
                if reply.status != pb.OK:
                    continue
                known[code.digest] = reply.timings[0].low
            table[options] = known[code.digest]
    finally:
        here.close()
    return table


def replay_searches(made: CpuSearchSpace, seeds: Sequence[Genome], table: Mapping[CpuOptions, float]) -> Iterator[str]:
    """How far from the fastest both searches end, for several budgets, in the median of several seeds."""
    best, default = min(table.values()), table[made.options(seeds[0])]
    yield f"{len(table)} ways; the model's choice takes {default / best:.3f} times as long as the fastest"
    for budget in BUDGETS:
        for kind in ("genetic", "random"):
            ends = [find_best_time(kind, seed, budget, made, seeds, table) / best for seed in range(SEEDS)]
            low, median, high = statistics.quantiles(ends, n=4)
            yield f"{budget:4} candidates, {kind:8}: {median:.4f} times the fastest ({low:.4f} .. {high:.4f})"


def find_best_time(
    kind: str, seed: int, budget: int, made: CpuSearchSpace, seeds: Sequence[Genome], table: Mapping[CpuOptions, float]
) -> float:
    """The least time that a search sees."""
    search = SEARCHES[kind](made, seeds, 12, seed)
    least, left = table[made.options(seeds[0])], budget
    while left > 0 and (asked := search.ask()):
        for candidate in asked[:left]:
            seconds = table.get(candidate.options)
            search.tell(candidate, seconds)
            least, left = min(least, seconds or least), left - 1
    return least


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="kernels of `python -m benchmarks --list`")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each (default 120)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", choices=tuple(SEARCHES), default="genetic")
    parser.add_argument("--replay", action="store_true", help="compare searches on recorded times of one thread")
    given = parser.parse_args(arguments)
    with knobs.override_knobs(cache="off"), using_threads(1 if given.replay else given.threads):
        if given.replay:
            problem, made, seeds = small()
            lines = replay_searches(made, seeds, time_candidates(problem, made))
        else:
            lines = gains(given.names, given.budget, given.seed, given.search)
        for text in lines:
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
