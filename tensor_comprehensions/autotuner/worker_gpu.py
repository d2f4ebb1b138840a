"""The work of a worker process for GPU mappings: map, compile, check, time.

A device is "cuda:0" or "emulated:sm_90". On the latter, CUDA source runs on the CPU, every access is checked, and
`modeled_seconds` estimates the time from the accesses and waits of threads. The estimate is rough, but the same on
every machine; it allows searching, and testing a search, without a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..cache.options_proto import from_message
from ..compiler.gpu_passes import CompiledGpuKernel, compile_gpu
from ..core.errors import ArgumentError, DeviceError, InternalError
from ..dispatch.cuda.mixed_plan import MixedPlan, Plan, kernels_of, launcher_of, make_plan, run_emulated
from ..options import GpuOptions, MappingOptions, TileOptions, check_gpu_options
from ..runtime.cuda import launch
from ..runtime.emulate import emulator
from ..runtime.emulate.emulator import Counts
from ..target import GpuTarget, parse_gpu_target
from ..tc_lang.ir import BoundFunction
from . import tuner_pb2 as pb
from .problem import KINDS, MORE_KINDS, Problem
from .timing import MAX_SAMPLES, MIN_ROUNDS, ProblemMemory, Times, calls_for
from .worker import (
    CHECK,
    COMPILE,
    FINALIST_SEED,
    RUN,
    CandidateRejected,
    MemoryCorruption,
    Phase,
    PreparedProblem,
    Stage,
    answer_request,
    place_timings,
    prepare_problem,
    timing_message,
)

LAUNCH_SECONDS = 2e-6
"""Modeled seconds of a launch."""
TENSOR_ACCESS_CYCLES, SHARED_ACCESS_CYCLES, BARRIER_CYCLES = 32.0, 4.0, 16.0
"""Modeled cycles of an access to a tensor, to shared memory, and of a thread's wait at a barrier."""


def handle_gpu_request(raw: bytes, phase: Phase) -> bytes:
    """Like `worker.handle_request`, for GPU options."""
    return answer_request(raw, phase, _STAGES, lambda request: gpu_fingerprint(request.device))


# --- devices -----------------------------------------------------------------------------------------------------


def gpu_target_of(name: str) -> GpuTarget:
    """The target of a device. Raises ArgumentError if there is no such device."""
    if match := re.fullmatch(r"emulated:(sm_[0-9]+)", name):
        return parse_gpu_target(f"cuda:{match[1]}")
    match = re.fullmatch(r"cuda:([0-9]{1,9})", name)
    if not match:
        raise ArgumentError(f"the device is {name!r}", expected='"cuda:0", or "emulated:sm_90"')
    if not torch.cuda.is_available() or int(match[1]) >= torch.cuda.device_count():
        raise ArgumentError(
            f"there is no device {name}",
            found=f"{torch.cuda.device_count()} CUDA devices",
            suggestion='"emulated:sm_90" searches by a model, without a device',
        )
    return launch.device_target(int(match[1]))


def is_modeled(name: str) -> bool:
    """Whether the times of a device are modeled."""
    return name.startswith("emulated")


def gpu_fingerprint(name: str) -> str:
    """An identifier of the kind of device: times with equal fingerprints can be compared."""
    if is_modeled(name):
        return name
    return f"{torch.cuda.get_device_name(name)} {gpu_target_of(name).name}"


class GpuRunner(Protocol):
    """Runs a kernel on a device. steady: whether every run takes the same time."""

    steady: bool

    def run(self, memory: ProblemMemory) -> float:
        """Compute the outputs of `memory` from its inputs; return the seconds. Raises CandidateRejected."""

    def sample(self, memory: ProblemMemory, first: float) -> float:
        """Seconds per run, with unchecked results. first: the seconds that a run took before."""


class ModeledRunner:
    """Runs a kernel in the emulator and models its time."""

    steady = True

    def __init__(self, kernel: CompiledGpuKernel) -> None:
        self._kernel, self._emulated = kernel, emulator.build_emulated([kernel.code])[0]

    def run(self, memory: ProblemMemory) -> float:
        memory.restore(poison=True)
        count = len(memory.problem.message.inputs)
        try:
            number, _ = run_emulated(self._kernel, self._emulated, (*memory.inputs[:count], *memory.outputs))
        except InternalError as error:
            raise CandidateRejected(pb.WRONG_RESULT, str(error)) from error
        if number:
            raise CandidateRejected(pb.WRONG_RESULT, f"it reports failure {number}")
        return modeled_seconds(self._kernel, self._emulated.counts)

    def sample(self, memory: ProblemMemory, first: float) -> float:
        return first


def modeled_seconds(kernel: CompiledGpuKernel, counts: Counts) -> float:
    """The estimated time: that of launches, plus the cycles of all threads over the threads that run at once."""
    machine = kernel.target
    threads = max((prod(k.launch.grid) * prod(k.launch.block) for k in kernel.code.kernels), default=1)
    lanes = min(threads, machine.num_sms * machine.float32_lanes)
    cycles = (
        TENSOR_ACCESS_CYCLES * counts.tensors + SHARED_ACCESS_CYCLES * counts.shared + BARRIER_CYCLES * counts.waits
    )
    return LAUNCH_SECONDS * max(1, len(kernel.code.kernels)) + cycles / lanes / machine.clock


class DeviceRunner:
    """Runs a def on a CUDA device, timed between events."""

    steady = False

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._launches = {k: launch.load_launches_on(k.code, k.cubin, device.index) for k in kernels_of(plan)}
        self._tensors: dict[int, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}

    def run(self, memory: ProblemMemory) -> float:
        memory.restore(poison=True)
        inputs, _, outputs = self._device_tensors(memory)
        for there, here in zip(outputs, memory.outputs, strict=True):
            there.copy_(here)
        seconds = self._time_calls(memory, 1)
        for there, here in zip(outputs, memory.outputs, strict=True):
            here.copy_(there)
        count = len(memory.problem.message.inputs)
        if not all(torch.equal(x.cpu(), y) for x, y in zip(inputs, memory.inputs[:count], strict=True)):
            raise MemoryCorruption("it writes to its inputs")
        return seconds

    def sample(self, memory: ProblemMemory, first: float) -> float:
        return self._time_calls(memory, calls_for(first))

    def _time_calls(self, memory: ProblemMemory, calls: int) -> float:
        inputs, accepted, outputs = self._device_tensors(memory)
        launcher = launcher_of(self._plan, self._device, accepted, self._launches.__getitem__)
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        try:
            begin.record(torch.cuda.current_stream(self._device))
            for _ in range(calls):
                launcher.run(*inputs, *outputs)
            end.record(torch.cuda.current_stream(self._device))
            torch.cuda.synchronize(self._device)
        except (DeviceError, RuntimeError) as error:
            raise CandidateRejected(pb.GPU_STICKY, str(error)) from error
        return float(begin.elapsed_time(end)) / 1e3 / calls

    def _device_tensors(self, memory: ProblemMemory) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Inputs, all arguments of a call, and outputs, on the device."""
        if id(memory) not in self._tensors:
            self._tensors.clear()
            taken = [x.to(self._device) for x in memory.inputs]
            count = len(memory.problem.message.inputs)
            outputs = [torch.empty_like(x, device=self._device) for x in memory.outputs]
            self._tensors[id(memory)] = taken[:count], taken, outputs
        return self._tensors[id(memory)]


# --- stages ------------------------------------------------------------------------------------------------------


def _prepare_runner(request: pb.Request, options: object) -> tuple[GpuRunner, str]:
    """A candidate compiled for its device, and a digest of its source. Raises TCError or CannotLower."""
    if not isinstance(options, MappingOptions | TileOptions):
        raise CandidateRejected(pb.INVALID, f"options for another device: {type(options).__name__}")
    wanted, problem = gpu_target_of(request.device), Problem(request.problem)
    check_gpu_options(options, wanted)

    def compile_piece(piece: BoundFunction, own: GpuOptions | None) -> CompiledGpuKernel:
        return compile_gpu(piece, problem.message.source, own, wanted)

    plan = make_plan(problem.bound, options, wanted, compile_piece)
    if not is_modeled(request.device):
        return DeviceRunner(plan, torch.device(request.device)), _compute_code_digest(plan)
    if isinstance(plan, MixedPlan):
        raise CandidateRejected(pb.INVALID, f"{request.device} has no model of what torch's products take")
    return ModeledRunner(plan), _compute_code_digest(plan)


def _compute_code_digest(plan: Plan) -> str:
    """A digest of the code, the same for different options with the same result."""
    parts = plan.parts if isinstance(plan, MixedPlan) else (plan,)
    texts = [p.code.source.partition("*/")[2] if isinstance(p, CompiledGpuKernel) else str(p) for p in parts]
    return sha256("\0".join(texts).encode()).hexdigest()


def _check_outputs(made: PreparedProblem, runner: GpuRunner, kind: str, seed: int) -> float:
    """Run once on inputs of a kind; return the seconds. Raises CandidateRejected if anything is wrong."""
    expected, memory = made.expected_outputs(kind, seed), made.memory(kind, seed)
    seconds = runner.run(memory)
    if place := memory.describe_guard_damage():
        raise MemoryCorruption(f"{kind}: it writes next to the memory of {place}")
    if (fault := expected.fault(memory.outputs)) is not None:
        raise CandidateRejected(fault[0], f"{kind}: {fault[1]}")
    return seconds


def _evaluate(request: pb.Request, reply: pb.Reply, phase: Phase) -> None:
    phase(COMPILE)
    start = perf_counter()
    runner, reply.digest = _prepare_runner(request, from_message(request.options[0]))
    reply.compiling = perf_counter() - start
    phase(CHECK)
    made = prepare_problem(request.problem, request.folder)
    for kind in KINDS:
        made.expected_outputs(kind, 0)
    phase(RUN)
    start = perf_counter()
    first = [_check_outputs(made, runner, kind, 0) for kind in KINDS][-1]
    if request.hopeless and first > request.hopeless:
        reply.status, reply.message = pb.SLOW, f"the first run took {first:.3g} s"
        reply.timings.append(pb.Timing(median=first, low=first, high=first, runs=1))
    else:
        reply.timings.append(
            timing_message(_time_runners([runner], made.memory(KINDS[-1], 0), [first], request.seconds)[0])
        )
    reply.running = perf_counter() - start


def _race_candidates(request: pb.Request, reply: pb.Reply, phase: Phase) -> None:
    """Check every mapping on fresh inputs, and time those that pass, interleaved."""
    phase(COMPILE)
    runners = [_prepare_runner(request, from_message(o))[0] for o in request.options]
    phase(CHECK)
    made = prepare_problem(request.problem, request.folder)
    kinds, seed = (MORE_KINDS, FINALIST_SEED) if request.fresh else (KINDS, 0)
    for kind in kinds:
        made.expected_outputs(kind, seed)
    phase(RUN)
    firsts: dict[int, float] = {}
    failures: list[str] = []
    for number, runner in enumerate(runners):
        try:
            firsts[number] = [_check_outputs(made, runner, kind, seed) for kind in kinds][-1]
        except MemoryCorruption:
            raise
        except CandidateRejected as rejection:
            if rejection.status == pb.GPU_STICKY:
                raise
            failures.append(f"{number}: {rejection.message}")
    memory = made.memory(KINDS[-1], 0)
    times = _time_runners([runners[n] for n in firsts], memory, list(firsts.values()), request.seconds)
    reply.timings.extend(place_timings(times, list(firsts), len(runners)))
    reply.message = "; ".join(failures)


def _time_runners(runners: list[GpuRunner], memory: ProblemMemory, firsts: list[float], seconds: float) -> list[Times]:
    """Time all runners, interleaved, for `seconds` per runner."""
    end = perf_counter() + seconds * max(1, len(runners))
    samples: list[list[float]] = [[] for _ in runners]
    for turn in range(MAX_SAMPLES):
        for runner, first, own in zip(runners, firsts, samples, strict=True):
            own.append(runner.sample(memory, first))
        if all(r.steady for r in runners) or (turn + 1 >= MIN_ROUNDS and perf_counter() >= end):
            break
    return [Times(tuple(own) * (MIN_ROUNDS if r.steady else 1)) for r, own in zip(runners, samples, strict=True)]


_STAGES: Mapping[int, Stage] = {pb.EVALUATE: _evaluate, pb.RACE: _race_candidates}
