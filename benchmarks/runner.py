"""One kernel: check every contender against float64, time them interleaved, relate ours to the best of torch's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

import tensor_comprehensions
from tensor_comprehensions.compiler.compiled_kernel import CompiledCpuKernel
from tensor_comprehensions.runtime.cpu import roofline_probes

from .kernels import Benchmark, outputs
from .timing import Quartiles, interleave, ratios

OURS = "ours"
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Limit:
    """Our kernel, without the cost of a call, next to the limit of the machine.

    Attributes:
        bound: the limit: multiply-adds, or the better of the copies of as many bytes.
        unit: of work, "FLOP" or "B".
        seconds: time of our kernel.
        speed: work per second of our kernel.
        most: work per second of the machine.
        share: speed relative to the limit, round by round.
        intensity: floating-point operations per byte of the operands.
    """

    bound: str
    unit: str
    seconds: Quartiles
    speed: float
    most: float
    share: Quartiles
    intensity: float


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of one kernel with one number of threads.

    Attributes:
        times: seconds per call of each contender; ours under the name `ours`.
        ratios: time of each peer over ours, round by round; above 1 ours is faster.
        best: the peer with the least median time.
        errors: largest error of each contender, relative to the largest element of the float64 reference.
        failures: why a contender has no times.
        rounds, quiet: the number of rounds, and of undisturbed rounds.
        warm_up: seconds from the text to our first result.
        limit: our kernel next to the limit of the machine; None if unknown, or for several threads.
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
    limit: Limit | None = None

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
    """The remaining contenders, with their times and errors."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    kernel: CompiledCpuKernel | None = None


def run(benchmark: Benchmark, threads: int, settings: Settings) -> Result:
    """Measure `benchmark` with `threads` threads in this process."""
    with using_threads(threads), torch.no_grad():
        arguments = benchmark.arguments(settings.seed)
        reference = _reference(benchmark, arguments)
        contenders = _Field()
        warm_up = _admit_ours(benchmark, arguments, reference, contenders) if settings.ours else None
        for name, prepare in _peers(benchmark, arguments, settings):
            _admit(name, prepare, reference, benchmark.tolerance, contenders)
        # One thread: the processor time of the thread, which other load does not affect.
        clock = time.thread_time if threads == 1 else time.perf_counter
        extremes = _extremes(benchmark, arguments, contenders) if threads == 1 else {}
        calls = {**contenders.calls, **{name: call for name, (call, _) in extremes.items()}}
        samples = interleave(calls, seconds=settings.seconds, clock=clock, seed=settings.seed)
    limit = _limit(benchmark, {name: work for name, (_, work) in extremes.items()}, samples.seconds)
    seconds = {name: samples.seconds[name] for name in contenders.calls}
    times = {name: Quartiles.of(values) for name, values in seconds.items()}
    peers = [name for name in times if name != OURS]
    return Result(
        benchmark.name, benchmark.family, threads, benchmark.goal, benchmark.note, times,
        {name: ratios(seconds[name], seconds[OURS]) for name in peers} if OURS in seconds else {},
        min(peers, key=lambda name: times[name].median, default=None),
        contenders.errors, contenders.failures, samples.rounds, samples.quiet, warm_up, limit,
    )  # fmt: skip


def _extremes(
    benchmark: Benchmark, arguments: tuple[Tensor, ...], contenders: _Field
) -> dict[str, tuple[Callable[[], None], float]]:
    """Our kernel by itself and its limit, with the work of one call of each."""
    work = benchmark.flops or benchmark.moved
    if contenders.kernel is None or OURS not in contenders.calls or not work:
        return {}
    call, times = roofline_probes.repeated_kernel_call(contenders.kernel, arguments, outputs(contenders.calls[OURS]()))
    most = (
        {roofline_probes.FMA: roofline_probes.peak_multiply_add_call(arguments[0].dtype)}
        if benchmark.flops
        else roofline_probes.peak_copy_calls(work)
    )
    return {roofline_probes.KERNEL: (call, float(times * work)), **most}


def _limit(benchmark: Benchmark, work: Mapping[str, float], seconds: Mapping[str, Sequence[float]]) -> Limit | None:
    if not work:
        return None
    speeds = {name: [amount / s for s in seconds[name]] for name, amount in work.items()}
    ours = speeds.pop(roofline_probes.KERNEL)
    bound = max(speeds, key=lambda name: median(speeds[name]))
    amount = benchmark.flops or benchmark.moved
    return Limit(
        bound, "FLOP" if benchmark.flops else "B", Quartiles.of([amount / v for v in ours]), median(ours),
        median(speeds[bound]), ratios(ours, speeds[bound]), benchmark.flops / max(1, benchmark.operands),
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
        contenders.kernel = operator.compile(*arguments).compiled
        return lambda: operator(*arguments)

    _admit(OURS, prepare, reference, benchmark.tolerance, contenders)
    return taken[0] if taken else None


def _peers(
    benchmark: Benchmark, arguments: tuple[Tensor, ...], settings: Settings
) -> Iterator[tuple[str, Callable[[], Call]]]:
    for peer in benchmark.peers:
        ready = arguments if peer.prepare is None else peer.prepare(*arguments)
        yield peer.name, lambda f=peer.function, a=ready: lambda: f(*a)  # type: ignore[misc]
        if peer.compiled and settings.compiled:
            yield f"{peer.name} compiled", lambda f=peer.function, a=ready: _compile(f, a)  # type: ignore[misc]


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
    except Exception as failure:  # a failure of one contender must not end the measurement of the others
        contenders.failures[name] = f"{type(failure).__name__}: {failure}".strip().splitlines()[0][:200]
        return
    contenders.errors[name] = error
    if error <= tolerance:
        contenders.calls[name] = call
    else:
        contenders.failures[name] = f"wrong result: relative error {error:.2g} exceeds {tolerance:.2g}"


def _reference(benchmark: Benchmark, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    wide = tuple(a.double() if a.is_floating_point() else a for a in arguments)
    first = benchmark.peers[0]
    return outputs(first.function(*(wide if first.prepare is None else first.prepare(*wide))))


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
