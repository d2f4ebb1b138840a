"""The work of a worker process: compile, check, time. Bytes in, bytes out.

Invariant: a request is data; code to run was lowered here from a TC program, or by another worker of the same tuner.
`handle_request` answers all errors that Python can catch; others end the process, which the tuner survives.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import torch

from ..cache.options_proto import from_message
from ..compiler.cpu_passes import compile_object, lower_only, pass_context_of
from ..core.errors import CannotLower, TCError
from ..options import CpuOptions
from ..runtime.cpu import object_code
from ..runtime.cpu.host import host
from . import tuner_pb2 as pb
from .device import cpu_fingerprint
from .expected_results import ExpectedOutputs, OutputOracle
from .problem import KINDS, MORE_KINDS, Problem, fill_inputs
from .timing import (
    MIN_SAMPLES,
    LoadedCandidate,
    ProblemMemory,
    TimedLaunch,
    Times,
    race_launches,
    sample_run,
    speedup_lower_bound,
    thread_clock,
    time_interleaved,
    time_launch,
)

VERSION = 2
"""The version of the message format."""
MAX_PROBLEM_BYTES = 1 << 31
"""The bytes of a problem's inputs and outputs above which the least recently used are freed."""
MAX_PROBLEMS = 2
"""The number of problems whose inputs are kept."""
MAX_CODES = 256
"""The number of loop programs whose code is kept."""
CHECK, COMPILE, RUN = "prepare", "compile", "run"
"""The phases of a request."""
DEFAULT_PHASE_SECONDS = 600.0
"""The seconds of a phase for which a request sets no limit."""
MAX_INTERLEAVING_RATIO = 2.0
"""A timing is interleaved with other code only if it then takes at most this multiple of the requested time."""
HOPELESS_RERUNS = 2
"""The number of further runs of a candidate that seems hopeless, in case other load slowed the first."""
FINALIST_SEED = 0x5EED
"""The seed of the inputs that only finalists see."""

Phase = Callable[[str], None]
Stage = Callable[[pb.Request, pb.Reply, Phase], None]


class CandidateRejected(Exception):
    """A candidate failed: its status, and why."""

    def __init__(self, status: pb.Status, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def handle_request(raw: bytes, phase: Phase) -> bytes:
    """Answer one request. phase: called before each step, so that the tuner knows its time limit."""
    return answer_request(raw, phase, _STAGES, lambda request: cpu_fingerprint())


def answer_request(raw: bytes, phase: Phase, stages: Mapping[int, Stage], here: Callable[[pb.Request], str]) -> bytes:
    """Answer one request with the functions of `stages`. here: the fingerprint of the requested device."""
    reply = pb.Reply(version=VERSION)
    try:
        request = pb.Request.FromString(raw)
        reply.fingerprint = here(request)
        _check(request, reply.fingerprint, stages)
        stages[request.stage](request, reply, phase)
        reply.status = reply.status or pb.OK
    except CandidateRejected as rejection:
        reply.status, reply.message = rejection.status, rejection.message
    except (CannotLower, TCError) as refusal:
        reply.status, reply.message = pb.INVALID, str(refusal)
    except MemoryError as error:
        reply.status, reply.message = pb.OUT_OF_MEMORY, str(error)
    except Exception as error:
        lack = "not enough memory" in str(error) or "can't allocate memory" in str(error)
        reply.status = pb.OUT_OF_MEMORY if lack else pb.COMPILE_ERROR
        reply.message = f"{type(error).__name__}: {error}"
    return reply.SerializeToString()


def _check(request: pb.Request, here: str, stages: Mapping[int, Stage]) -> None:
    if request.version != VERSION:
        raise CandidateRejected(pb.REFUSED, f"a message of version {request.version}, not {VERSION}")
    if request.fingerprint and request.fingerprint != here:
        raise CandidateRejected(pb.REFUSED, f"this device is {here}, not {request.fingerprint}")
    if request.stage not in stages:
        raise CandidateRejected(pb.REFUSED, f"there is no stage {request.stage}")


def phase_limits(request: pb.Request) -> dict[str, float]:
    """Seconds that each phase of a request may take."""
    run = request.run_limit or DEFAULT_PHASE_SECONDS
    return {CHECK: DEFAULT_PHASE_SECONDS, COMPILE: request.compile_limit or DEFAULT_PHASE_SECONDS, RUN: run}


class MemoryCorruption(CandidateRejected):
    """A candidate wrote out of bounds, and may have corrupted this process."""

    def __init__(self, message: str) -> None:
        super().__init__(pb.WRONG_RESULT, message)


# --- compiling ---------------------------------------------------------------------------------------------------


def _compile(request: pb.Request, reply: pb.Reply, phase: Phase) -> None:
    phase(COMPILE)
    start = perf_counter()
    for message in request.options:
        reply.codes.append(compile_candidate(Problem(request.problem), from_message(message)))
    reply.compiling = perf_counter() - start
    reply.digest = sha256(b"".join(c.program for c in reply.codes)).hexdigest()


def compile_candidate(problem: Problem, options: object) -> pb.Code:
    """Compile `problem` with `options`. Raises TCError or CannotLower if they do not apply."""
    if not isinstance(options, CpuOptions):
        raise CandidateRejected(pb.INVALID, f"options for another device: {type(options).__name__}")
    bound, text = _cached_problem(problem).bound, problem.message.source
    job = pass_context_of(bound, options, host())
    made = lower_only(bound, text, job)

    def code() -> pb.Code:
        code, temporaries = compile_object(bound, text, job, made)
        return pb.Code(program=code.data, temporaries=temporaries, symbols=code.symbols)

    return _codes.of((made["lower"], job.target), code)


class CompiledCodeCache:
    """The code of loop programs: half of the candidates of a search have the same loops as an earlier one.

    limit: entries to keep, by last use. Loop programs have some thousand different nodes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, dict[int, tuple[Hashable, pb.Code]]()

    def of(self, loops: Hashable, make: Callable[[], pb.Code]) -> pb.Code:
        """The code of `loops`, from `make()` if it is not cached. Hashes `loops` only once, because that is slow."""
        number = hash(loops)
        known = self._kept.pop(number, None)
        if known is None or known[0] != loops:
            known = loops, make()
        self._kept[number] = known
        for oldest in list(self._kept)[: -self._limit]:
            self._kept.pop(oldest, None)
        return known[1]

    def clear(self) -> None:
        self._kept.clear()


_codes = CompiledCodeCache(MAX_CODES)


# --- measuring ---------------------------------------------------------------------------------------------------


class PreparedProblem:
    """The inputs and expected results of a problem, to run candidates on."""

    def __init__(self, problem: Problem, folder: str) -> None:
        self.problem = problem
        self._oracle = OutputOracle(problem, Path(folder) if folder else None)
        self._memories: OrderedDict[tuple[str, int], ProblemMemory] = OrderedDict()

    def memory(self, kind: str, seed: int) -> ProblemMemory:
        """Memory with inputs of a kind; new memory may replace the least recently used."""
        if (kind, seed) not in self._memories:
            while sum(m.size for m in self._memories.values()) > MAX_PROBLEM_BYTES:
                self._memories.popitem(last=False)
            made = ProblemMemory(self.problem)
            fill_inputs(made.inputs, self.problem, kind, seed)
            made.record_input_digests()
            self._memories[kind, seed] = made
        self._memories.move_to_end((kind, seed))
        return self._memories[kind, seed]

    def expected_outputs(self, kind: str, seed: int) -> ExpectedOutputs:
        """The expected results for inputs of a kind."""
        return self._oracle.expected_outputs(self.memory(kind, seed), kind, seed)


_benches: OrderedDict[str, PreparedProblem] = OrderedDict()


@functools.lru_cache(MAX_PROBLEMS)
def _parse_problem(raw: bytes) -> Problem:
    return Problem(pb.Problem.FromString(raw))


def _cached_problem(problem: Problem) -> Problem:
    """An equal problem from a cache, so that its def is checked and bound only once."""
    return _parse_problem(problem.message.SerializeToString(deterministic=True))


def prepare_problem(message: pb.Problem, folder: str) -> PreparedProblem:
    """The problem of a message, prepared to run candidates on; from a cache if possible."""
    problem = _cached_problem(Problem(message))
    if problem.digest not in _benches:
        while len(_benches) >= MAX_PROBLEMS:
            _benches.popitem(last=False)
        _benches[problem.digest] = PreparedProblem(problem, folder)
    _benches.move_to_end(problem.digest)
    return _benches[problem.digest]


def clear_prepared_problems() -> None:
    """Clear the caches of problems and of code."""
    _benches.clear()
    _parse_problem.cache_clear()
    _codes.clear()


def _measure(request: pb.Request, reply: pb.Reply, phase: Phase) -> None:
    phase(CHECK)
    made = prepare_problem(request.problem, request.folder)
    for kind in KINDS:
        made.expected_outputs(kind, 0)
    phase(RUN)
    start = perf_counter()
    _check_and_time_candidate(made, request.codes, request, reply)
    reply.running = perf_counter() - start


def _check_and_time_candidate(
    made: PreparedProblem, codes: Sequence[pb.Code], request: pb.Request, reply: pb.Reply
) -> None:
    kernel = load_candidate(codes[0])
    first = 0.0
    for kind in KINDS:
        launch, first = check_candidate(made, kernel, kind, 0)
        if request.hopeless and first > request.hopeless:  # run again, in case other load slowed it
            first = min(
                first, *(sample_run(launch, 1, launch.memory.restore_without_poison) for _ in range(HOPELESS_RERUNS))
            )
        if request.hopeless and first > request.hopeless:
            reply.status, reply.message = pb.SLOW, f"the first run took {first:.3g} s"
            reply.timings.append(pb.Timing(median=first, low=first, high=first, runs=1))
            return
    before = tuple(x.clone() for x in launch.memory.outputs)
    times = _measure_launch_times(launch, first, codes[1:], request)
    launch.run_with_poisoned_outputs()
    if not all(same_bytes(x, y) for x, y in zip(launch.memory.outputs, before, strict=True)):
        raise CandidateRejected(pb.WRONG_RESULT, "two runs on the same inputs give different results")
    reply.timings.extend(map(timing_message, times))


def _measure_launch_times(
    launch: TimedLaunch, first: float, others: Sequence[pb.Code], request: pb.Request
) -> Sequence[Times]:
    """The times of a launch, and of the code that it is interleaved with, if any and if enough runs of both fit."""
    if not others:
        return (time_launch(launch, first, request.seconds, request.losing),)
    other = TimedLaunch(load_candidate(others[0]), launch.memory)
    usual = sample_run(other, 1, launch.memory.restore_without_poison)
    if MIN_SAMPLES * (first + usual) > MAX_INTERLEAVING_RATIO * request.seconds:
        return (time_launch(launch, first, request.seconds, request.losing * usual),)
    return time_interleaved(launch, other, (first, usual), request.seconds, request.losing)


def load_candidate(code: pb.Code) -> LoadedCandidate:
    """The code, loaded, with memory for its temporaries."""
    executable = object_code.load_object(object_code.ObjectCode(code.program, tuple(code.symbols)))
    return LoadedCandidate(executable, tuple(code.temporaries))


def check_candidate(made: PreparedProblem, kernel: LoadedCandidate, kind: str, seed: int) -> tuple[TimedLaunch, float]:
    """Run once on inputs of a kind; return the launch and its seconds. Raises CandidateRejected if it is wrong."""
    expected = made.expected_outputs(kind, seed)
    launch = TimedLaunch(kernel, made.memory(kind, seed))
    now = thread_clock()
    start = now()
    failed = launch.run_with_poisoned_outputs()
    seconds = now() - start
    if failed:
        raise CandidateRejected(pb.WRONG_RESULT, f"{kind}: it reports failure {failed}")
    if place := launch.describe_guard_damage():
        raise MemoryCorruption(f"{kind}: it writes next to the memory of {place}")
    if launch.memory.has_changed_inputs():
        raise MemoryCorruption(f"{kind}: it writes to its inputs")
    if (fault := expected.fault(launch.memory.outputs)) is not None:
        raise CandidateRejected(fault[0], f"{kind}: {fault[1]}")
    return launch, seconds


def same_bytes(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether contiguous tensors hold the same bytes."""
    a, b = (t.reshape(-1).view(torch.uint8) for t in (x, y))
    words = a.numel() // 8 * 8  # compared at once
    return torch.equal(a[:words].view(torch.int64), b[:words].view(torch.int64)) and torch.equal(a[words:], b[words:])


def timing_message(times: Times) -> pb.Timing:
    low, _, high = times.quartiles
    return pb.Timing(median=times.median, low=low, high=high, runs=len(times.samples))


def _evaluate(request: pb.Request, reply: pb.Reply, phase: Phase) -> None:
    _compile(request, reply, phase)
    request.codes.extend(reply.codes)
    reply.ClearField("codes")
    _measure(request, reply, phase)


# --- the final race ----------------------------------------------------------------------------------------------


def _race_candidates(request: pb.Request, reply: pb.Reply, phase: Phase) -> None:
    """Check every code on fresh inputs, and time those that pass, interleaved.

    The timing of a code that fails has no runs. Raises MemoryCorruption if one may have harmed the others.
    """
    if request.options:
        _compile(request, reply, phase)
        request.codes.extend(reply.codes)
        reply.ClearField("codes")
    phase(CHECK)
    made = prepare_problem(request.problem, request.folder)
    kinds = MORE_KINDS if request.fresh else KINDS
    seed = FINALIST_SEED if request.fresh else 0
    for kind in kinds:
        made.expected_outputs(kind, seed)
    usual = made.memory(KINDS[-1], 0)
    launches: list[TimedLaunch] = []
    failures: list[str] = []
    places: list[int] = []
    for number, code in enumerate(request.codes):
        phase(RUN)
        try:
            kernel = load_candidate(code)
            for kind in kinds:
                check_candidate(made, kernel, kind, seed)
            launches.append(TimedLaunch(kernel, usual))
            places.append(number)
        except MemoryCorruption:
            raise
        except CandidateRejected as rejection:
            failures.append(f"{number}: {rejection.message}")
    phase(RUN)
    start = perf_counter()
    firsts = [sample_run(x, 1, usual.restore_without_poison) for x in launches]
    reply.timings.extend(place_timings(race_launches(launches, firsts, request.seconds), places, len(request.codes)))
    reply.message = "; ".join(failures)
    reply.running = perf_counter() - start


def place_timings(times: Sequence[Times], places: Sequence[int], count: int) -> Iterator[pb.Timing]:
    """Yield the timings of `count` codes of a race in order; those not at one of `places` have no runs.

    The others are compared with the first code, if that ran.
    """
    found = dict(zip(places, times, strict=True))
    for number in range(count):
        made = timing_message(found[number]) if number in found else pb.Timing()
        if number in found and 0 in found:
            made.gain = speedup_lower_bound(found[0], found[number])
        yield made


_STAGES: Mapping[int, Stage] = {
    pb.COMPILE: _compile,
    pb.MEASURE: _measure,
    pb.EVALUATE: _evaluate,
    pb.RACE: _race_candidates,
}
