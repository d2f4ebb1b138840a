"""Searching: compile the candidates of the cost model, check them against one another, time them and keep the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, thread_time

import torch
from torch import Tensor

from ..calling.calls import Arguments, Sizes, allocate, fill_initial
from ..calling.kernels import Kernels, Machine, Route
from ..compiler import contractions, settle
from ..errors import ArgumentError, CannotLower, InternalError
from ..inspection import logger
from ..options import CpuOptions
from ..structured.candidates import candidates
from ..structured.op import StructuredOp
from ..structured.pipeline import Pipeline
from ..structured.strategy import meant_for

SECONDS = 10.0
"""What a search may take, unless told otherwise: half of it to compile."""
ROUNDS = 15
"""How often each candidate that stays in the race runs."""
FIRST_ROUNDS = 3
"""After so many rounds those much slower than the best leave the race."""
MUCH_SLOWER, HOPELESS = 1.3, 4.0
"""Times the best: what leaves the race then, and what does not take part after one run."""
EQUAL = 0.01
"""Of candidates that are this close the one that the model ranks first is taken: times are never exact."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative to the largest element; 2e-2 for narrower types."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate that was run.

    Attributes:
        tensor: what the contraction defines. pipeline: how it was lowered.
        cycles: what the model expected, of one core; None for what it has not made.
        seconds: median time of a call of the kernel. multiplications: that the contraction sums.
    """

    tensor: str
    pipeline: Pipeline
    cycles: float | None
    seconds: float
    multiplications: int


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: options that make the best kernel, and everything measured, best first."""

    options: CpuOptions
    measured: tuple[Measured, ...]


def search(
    kernels: Kernels, sizes: Sizes, arguments: Arguments, machine: Machine, count: int, seconds: float = SECONDS
) -> Found:
    """Measure at most `count` ways to lower each contraction of the def on `arguments`; one contraction after another.

    Raises ArgumentError where there is no contraction.
    """
    bound = kernels.bound_for(sizes, arguments)
    options = settle(bound, machine.options, machine.target)
    found = contractions(bound, options, machine.target)
    if not found:
        raise ArgumentError(f"{bound.name} has no contraction, and a search is for contractions")
    measured: list[Measured] = []
    for name, tensor, op in found:
        offered = _offered(op, machine, name, tensor, count)
        trial = _Trial(kernels, sizes, arguments, machine, options, name, seconds / len(found))
        times = trial.run([pipeline for pipeline, _ in offered])
        for (pipeline, cycles), time in zip(offered, times, strict=True):
            if time is not None:
                measured.append(Measured(tensor, pipeline, cycles, time, op.multiplications))
        options = _with(options, name, offered[_best(times)][0])
    return Found(options, tuple(sorted(measured, key=lambda m: m.seconds)))


def _offered(
    op: StructuredOp, machine: Machine, name: str, tensor: str, count: int
) -> list[tuple[Pipeline, float | None]]:
    """What is measured: the alternatives of the strategy that was asked for, or else the model's candidates."""
    asked = meant_for(machine.options.strategy, name, tensor)
    if asked is not None:
        pipeline = asked if isinstance(asked, Pipeline) else asked(op, machine.target)
        return [(alternative, None) for alternative in list(pipeline.alternatives())[:count]]
    ranked = candidates(op, machine.target, count, parallel=machine.options.grain > 0)
    return [(candidate.pipeline, candidate.cycles) for candidate in ranked]


def _with(options: CpuOptions, name: str, pipeline: Pipeline) -> CpuOptions:
    before = options.strategy if isinstance(options.strategy, tuple) else ()
    return replace(options, strategy=(*(pair for pair in before if pair[0] != name), (name, pipeline)))


def _best(times: Sequence[float | None]) -> int:
    """The first of the fastest."""
    least = min(t for t in times if t is not None)
    return next(n for n, t in enumerate(times) if t is not None and t <= least * (1 + EQUAL))


@dataclass(frozen=True, slots=True)
class _Trial:
    """The race for one contraction, the others being lowered as `options` say."""

    kernels: Kernels
    sizes: Sizes
    arguments: Arguments
    machine: Machine
    options: CpuOptions
    name: str
    seconds: float

    def run(self, pipelines: Sequence[Pipeline]) -> list[float | None]:
        """The median time of each; None for those that do not apply or for which there was no time."""
        start = perf_counter()
        routes: dict[int, Route] = {}
        for number, pipeline in enumerate(pipelines):
            if routes and perf_counter() - start > self.seconds / 2:
                break
            try:
                routes[number] = self._route(pipeline)
            except (ArgumentError, CannotLower) as refusal:
                logger("schedule").debug("search: %s: %s", pipeline, refusal)
        if not routes:
            raise ArgumentError("none of the pipelines applies to the contraction")
        deadline = start + self.seconds
        times = self._race(self._checked(routes, deadline), deadline)
        return [median(times[n]) if n in times else None for n in range(len(pipelines))]

    def _route(self, pipeline: Pipeline) -> Route:
        machine = Machine(_with(self.options, self.name, pipeline), self.machine.target)
        return self.kernels.route(self.sizes, self.arguments, (), machine)

    def _outputs(self, route: Route) -> tuple[Tensor, ...]:
        bound = route.compiled.bound
        outputs = tuple(allocate(bound, name) for name in bound.returns)
        fill_initial(bound, self.arguments, outputs)
        return outputs

    def _launch(self, route: Route, outputs: Sequence[Tensor]) -> None:
        route.launcher.run(*self.arguments.inputs, *outputs)

    def _checked(self, routes: Mapping[int, Route], deadline: float) -> dict[int, Route]:
        """Those that are not hopelessly slow, after each has run once. Do all compute what the first does?"""
        first, *others = routes.items()
        expected = self._outputs(first[1])
        outputs = self._outputs(first[1])
        self._launch(first[1], expected)
        fastest = self._timed(first[1], outputs)
        fit = dict((first,))
        for number, route in others:
            if perf_counter() > deadline:
                break
            fill_initial(route.compiled.bound, self.arguments, outputs)
            seconds = self._timed(route, outputs)
            if not all(map(_close, outputs, expected)):
                raise InternalError(
                    f"{self.kernels.function.name}: two kernels disagree: {route.compiled.options.strategy} "
                    f"and {first[1].compiled.options.strategy}"
                )
            fastest = min(fastest, seconds)
            if seconds <= HOPELESS * fastest:
                fit[number] = route
        return fit

    def _timed(self, route: Route, outputs: Sequence[Tensor]) -> float:
        clock = thread_time if torch.get_num_threads() == 1 else perf_counter
        begin = clock()
        self._launch(route, outputs)
        return clock() - begin

    def _race(self, routes: Mapping[int, Route], deadline: float) -> dict[int, list[float]]:
        """Times of calls that take turns, so that what else the machine does falls on all alike."""
        times: dict[int, list[float]] = {n: [] for n in routes}
        outputs = self._outputs(next(iter(routes.values())))
        runners = dict(routes)
        for number_of_round in range(ROUNDS):
            if number_of_round == FIRST_ROUNDS:
                fastest = min(median(t) for t in times.values())
                runners = {n: r for n, r in runners.items() if median(times[n]) <= MUCH_SLOWER * fastest}
            for number, route in runners.items():
                if number_of_round and perf_counter() > deadline:
                    return times
                fill_initial(route.compiled.bound, self.arguments, outputs)
                times[number].append(self._timed(route, outputs))
        return times


def _close(mine: Tensor, theirs: Tensor) -> bool:
    if not mine.dtype.is_floating_point:
        return torch.equal(mine, theirs)
    difference = (mine - theirs).abs_().nan_to_num_(0.0, 0.0, 0.0)  # what overflows does so in any order, nearly
    scale = max(1.0, float(theirs.abs().nan_to_num_(0.0, 0.0, 0.0).max())) if theirs.numel() else 1.0
    return not difference.numel() or float(difference.max()) <= scale * TOLERANCE.get(mine.dtype, 2e-2)
