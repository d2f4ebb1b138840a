"""One kernel: check every contender against float64, time them in turns, relate ours to the best of torch's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tensor_comprehensions

from .kernels import Benchmark, outputs
from .timing import Quartiles, interleave, ratios

OURS = "ours"
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured of one kernel with one number of threads.

    Attributes:
        times: seconds per call of each contender; ours under the name `ours`.
        ratios: time of each peer over ours, round by round; above 1 ours is faster.
        best: the peer with the least median time.
        errors: largest error of each contender, relative to the largest element of the float64 reference.
        failures: why a contender has no times.
        rounds, quiet: how many rounds there were, and how many of them nothing disturbed.
        warm_up: seconds from the text to our first result.
    """

    name: str
    family: str
    threads: int
    goal: float | None
    note: str
    times: Mapping[str, Quartiles]
    ratios: Mapping[str, Quartiles]
    best: str | None
    errors: Mapping[str, float]
    failures: Mapping[str, str]
    rounds: int
    quiet: int
    warm_up: float | None = None

    @property
    def ratio(self) -> Quartiles | None:
        """Time of the best peer over ours."""
        return self.ratios.get(self.best) if self.best is not None else None


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        seconds: about how long to time one kernel.
        compiled: whether `torch.compile` is among the peers.
        ours: whether our kernel is timed, or the peers alone.
        seed: of the inputs and of the order of turns.
    """

    seconds: float = 1.5
    compiled: bool = True
    ours: bool = True
    seed: int = 0


@dataclass(slots=True)
class _Field:
    """The contenders that are still in, and what is known of them."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run(benchmark: Benchmark, threads: int, settings: Settings) -> Result:
    """Measure `benchmark` with `threads` threads in this process."""
    with using_threads(threads), torch.no_grad():
        arguments = benchmark.arguments(settings.seed)
        reference = _reference(benchmark, arguments)
        contenders = _Field()
        warm_up = _admit_ours(benchmark, arguments, reference, contenders) if settings.ours else None
        for name, prepare in _peers(benchmark, arguments, settings):
            _admit(name, prepare, reference, benchmark.tolerance, contenders)
        # One thread: time of the thread, so that what neighbours take from the machine does not count.
        clock = time.thread_time if threads == 1 else time.perf_counter
        samples = interleave(contenders.calls, seconds=settings.seconds, clock=clock, seed=settings.seed)
    seconds = samples.seconds
    times = {name: Quartiles.of(values) for name, values in seconds.items()}
    peers = [name for name in times if name != OURS]
    return Result(
        benchmark.name, benchmark.family, threads, benchmark.goal, benchmark.note, times,
        {name: ratios(seconds[name], seconds[OURS]) for name in peers} if OURS in seconds else {},
        min(peers, key=lambda name: times[name].median, default=None),
        contenders.errors, contenders.failures, samples.rounds, samples.quiet, warm_up,
    )  # fmt: skip


def _admit_ours(
    benchmark: Benchmark, arguments: tuple[Tensor, ...], reference: tuple[Tensor, ...], contenders: _Field
) -> float | None:
    """Compile and check our kernel; returns the seconds from the text to the first result."""
    taken: list[float] = []

    def prepare() -> Call:
        start = time.perf_counter()
        library = tensor_comprehensions.define(benchmark.source)
        operator = getattr(library, def_name(benchmark.source))
        operator(*arguments)
        taken.append(time.perf_counter() - start)
        return lambda: operator(*arguments)

    _admit(OURS, prepare, reference, benchmark.tolerance, contenders)
    return taken[0] if taken else None


def _peers(
    benchmark: Benchmark, arguments: tuple[Tensor, ...], settings: Settings
) -> Iterator[tuple[str, Callable[[], Call]]]:
    for peer in benchmark.peers:
        yield peer.name, lambda f=peer.function: lambda: f(*arguments)  # type: ignore[misc]
        if peer.compiled and settings.compiled:
            yield f"{peer.name} compiled", lambda f=peer.function: _compile(f, arguments)  # type: ignore[misc]


def _compile(function: Callable[..., object], arguments: tuple[Tensor, ...]) -> Call:
    torch._dynamo.reset()
    compiled = torch.compile(function)
    for _ in range(3):  # the second and third call settle guards
        compiled(*arguments)
    return lambda: compiled(*arguments)


def _admit(
    name: str, prepare: Callable[[], Call], reference: tuple[Tensor, ...], tolerance: float, contenders: _Field
) -> None:
    """Take the contender in when it runs and its result is right; else note why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = prepare()
            error = _error(outputs(call()), reference)
    except Exception as failure:  # whatever goes wrong in one contender must not end the others' measurement
        contenders.failures[name] = f"{type(failure).__name__}: {failure}".strip().splitlines()[0][:200]
        return
    contenders.errors[name] = error
    if error <= tolerance:
        contenders.calls[name] = call
    else:
        contenders.failures[name] = f"wrong result: relative error {error:.2g} exceeds {tolerance:.2g}"


def _reference(benchmark: Benchmark, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    wide = (a.double() if a.is_floating_point() else a for a in arguments)
    return outputs(benchmark.peers[0].function(*wide))


def _error(actual: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> float:
    if [a.shape for a in actual] != [r.shape for r in reference]:
        raise ValueError(f"shapes {[tuple(a.shape) for a in actual]}, not {[tuple(r.shape) for r in reference]}")
    worst = 0.0
    for a, r in zip(actual, reference, strict=True):
        if r.numel():
            difference = (a.double() - r).abs().max() / r.abs().max().clamp_min(1e-30)
            worst = max(worst, difference.item()) if not difference.isnan() else float("inf")
    return worst


def def_name(source: str) -> str:
    """The name of the only def in `source`."""
    return source.split("def", 1)[1].split("(", 1)[0].strip()


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
