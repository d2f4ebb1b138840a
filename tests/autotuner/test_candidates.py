"""Candidates that compute something else than they should, as machine code that no lowering would emit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner import worker
from tensor_comprehensions.autotuner.evaluators import future_reply, is_tainted
from tensor_comprehensions.autotuner.expected_results import ExpectedOutputs
from tensor_comprehensions.autotuner.problem import KINDS, PERIOD, Problem, fill_inputs, problem_message
from tensor_comprehensions.autotuner.timing import MIN_SAMPLES, race_launches
from tensor_comprehensions.autotuner.worker import VERSION, phase_limits, same_bytes
from tensor_comprehensions.autotuner.worker_pool import ForkServer, WorkerConfig, WorkerPool
from tensor_comprehensions.cache.options_proto import to_message
from tensor_comprehensions.compiler.cpu_passes import compile_object
from tensor_comprehensions.dispatch.call_steps import normalize_arguments
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.runtime.cpu import object_code
from tensor_comprehensions.runtime.cpu.host import host

N = 100
TWICE = tc.define("def twice(float(N) x) -> (y) { y(i) = 2 * x(i) }").twice

_KERNEL = """
declare float @llvm.floor.f32(float)
declare i64 @llvm.readcyclecounter()
declare void @llvm.trap()
define i64 @tc_entry(ptr %arguments) {{
entry:
  %x = load ptr, ptr %arguments
  %slot = getelementptr ptr, ptr %arguments, i64 1
  %y = load ptr, ptr %slot
  %last = getelementptr float, ptr %y, i64 {last}
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %loop ]
  %from = getelementptr float, ptr %x, i64 %i
  %to = getelementptr float, ptr %y, i64 %i
  %value = load float, ptr %from
  %twice = fadd float %value, %value
  {body}
  store float %result, ptr %to
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, {count}
  br i1 %more, label %loop, label %done
done:
  {tail}
  ret i64 {code}
}}
"""
PLAIN = "%result = fadd float %twice, 0.0"
WHOLE_ONLY = """%floor = call float @llvm.floor.f32(float %value)
  %is.whole = fcmp oeq float %floor, %value
  %result = select i1 %is.whole, float %twice, float 0.0"""
CLOCK = """%now = call i64 @llvm.readcyclecounter()
  %low = and i64 %now, 1023
  %number = uitofp i64 %low to float
  %little = fmul float %number, 0x3E45798EE0000000
  %old = load float, ptr %last
  %new = fadd float %old, %little
  store float %new, ptr %last"""
HANG = "br label %for.ever\nfor.ever:\n  store volatile float 0.0, ptr %last\n  br label %for.ever\nnever:"
CRASH = "store volatile float 0.0, ptr inttoptr (i64 8 to ptr)"
BEFORE = "%before = getelementptr float, ptr %y, i64 -1\n  store float 1.0, ptr %before"


def kernel(body: str = PLAIN, tail: str = "", count: int = N, code: int = 0) -> pb.Code:
    """A kernel for `twice` that goes wrong in the way named."""
    text = _KERNEL.format(body=body, tail=tail, count=count, code=code, last=N - 1)
    made = object_code.assemble(text, host())
    return pb.Code(program=made.data, symbols=made.symbols)


@pytest.fixture(scope="module")
def group(fork_server: ForkServer) -> Iterator[WorkerPool]:
    made = WorkerPool(fork_server, [WorkerConfig()], is_tainted)
    yield made
    made.close()


def problem(op: tc.Op, *tensors: torch.Tensor, **initial: torch.Tensor) -> pb.Problem:
    return problem_message(op.function, normalize_arguments(op._kernels.call_signature, tensors, initial), seed=0)


def measure_code(group: WorkerPool, code: pb.Code, **others: float) -> pb.Reply:
    request = pb.Request(version=VERSION, stage=pb.MEASURE, codes=[code], seconds=0.005, run_limit=1.0, **others)
    request.problem.CopyFrom(problem(TWICE, torch.zeros(N)))
    return future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (kernel(), pb.OK, ""),
        (kernel(count=N + 1), pb.WRONG_RESULT, "writes next to the memory of an output"),  # case 39
        (kernel(tail=BEFORE), pb.WRONG_RESULT, "writes next to the memory of an output"),
        (kernel(tail="store float 1.0, ptr %x"), pb.WRONG_RESULT, "writes to its inputs"),
        (kernel(tail="store float 0.5, ptr %last"), pb.WRONG_RESULT, "an element is off"),  # case 40
        (kernel(body="%result = fdiv float 0.0, 0.0"), pb.NAN, "not finite"),
        (kernel(body="%result = fdiv float 1.0, 0.0"), pb.NAN, "not finite"),
        (kernel(count=N - 1), pb.NAN, "1 of 100 elements"),
        (kernel(body=WHOLE_ONLY), pb.WRONG_RESULT, "normal: "),  # case 41
        (kernel(tail=CLOCK), pb.WRONG_RESULT, "two runs on the same inputs"),  # case 42
        (kernel(tail=HANG), pb.RUN_TIMEOUT, "1 s"),  # case 34
        (kernel(tail=CRASH), pb.CRASH, "SIGSEGV"),  # case 36
        (kernel(tail="call void @llvm.trap()"), pb.CRASH, "SIGILL"),
        (kernel(code=1), pb.WRONG_RESULT, "reports failure 1"),
        (pb.Code(program=kernel().program, temporaries=[1 << 50]), pb.OUT_OF_MEMORY, "memory"),  # case 38
    ],
)
def test_cases_34_to_42_of_a_candidate_that_is_wrong(
    group: WorkerPool, code: pb.Code, status: pb.Status, message: str
) -> None:
    reply = measure_code(group, code)
    assert (pb.Status.Name(reply.status), bool(reply.timings)) == (pb.Status.Name(status), status == pb.OK)
    assert message in reply.message
    assert measure_code(group, kernel()).status == pb.OK


def test_a_hopeless_candidate_is_not_timed(group: WorkerPool) -> None:
    reply = measure_code(group, kernel(), hopeless=1e-9)
    assert reply.status == pb.SLOW
    assert reply.timings[0].runs == 1


def test_a_race_rejects_who_fails_on_inputs_that_none_has_seen(group: WorkerPool) -> None:
    request = pb.Request(version=VERSION, stage=pb.RACE, fresh=True, seconds=0.01)
    request.codes.extend([kernel(), kernel(body=WHOLE_ONLY), kernel()])
    request.problem.CopyFrom(problem(TWICE, torch.zeros(N)))
    reply = future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")
    assert reply.status == pb.OK
    assert [t.runs > 0 for t in reply.timings] == [True, False, True]
    assert reply.message.startswith("1: normal")


def test_another_device_or_version_is_refused(group: WorkerPool) -> None:
    for wrong in ({"fingerprint": "z80"}, {"version": VERSION + 1}, {"stage": pb.NOTHING}):
        request = pb.Request(**{"version": VERSION, "stage": pb.MEASURE, **wrong})  # type: ignore[arg-type]
        assert future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "").status == pb.REFUSED


# --- options that traveled --------------------------------------------------------------------------------------


def compile_options(group: WorkerPool, options: object) -> pb.Reply:
    request = pb.Request(version=VERSION, stage=pb.COMPILE)
    request.options.append(options)  # type: ignore[arg-type]
    request.problem.CopyFrom(problem(TWICE, torch.zeros(N)))
    return future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")


def test_case_53_options_out_of_range_are_refused_and_not_compiled(group: WorkerPool) -> None:
    fine = to_message(tc.CpuOptions())
    assert compile_options(group, fine).status == pb.OK
    for name, value in (("interleave", -1), ("grain_size", 1 << 31), ("interleave", 1 << 40)):
        bad = to_message(tc.CpuOptions())
        next(f for f in bad.fields if f.name == name).value.number = value
        assert compile_options(group, bad).status == pb.INVALID
    bad = to_message(tc.CpuOptions())
    next(f for f in bad.fields if f.name == "fusion").value.text = "sometimes"
    assert compile_options(group, bad).status == pb.INVALID
    bad.record = "NoOptions"
    assert compile_options(group, bad).status == pb.INVALID


# --- problems ----------------------------------------------------------------------------------------------------

PROBLEMS = {
    "in/out": (
        "def f(float(N) x) -> (float(N) y) { y(i) += x(i) }",
        lambda: ((torch.zeros(9),), {"y": torch.zeros(9)}),
    ),
    "strided": (
        "def f(float(M,N) x, double(N) w) -> (y) { y(m) +=! x(m,n) * w(n) }",
        lambda: ((torch.zeros(9, 7).T, torch.zeros(18, dtype=torch.float64)[::2]), {}),
    ),
    "overlapping": (
        "def f(float(M,N) x) -> (y) { y(m) +=! x(m,n) }",
        lambda: ((torch.zeros(10).unfold(0, 4, 1),), {}),
    ),
    "gather": (
        "def f(float(E,D) t, int32(B) i) -> (y) { y(b,d) = t(i(b),d) }",
        lambda: ((torch.zeros(5, 8), torch.tensor([4, 0, 3], dtype=torch.int32)), {}),
    ),
    "numbers": (
        "def f(float(N) x, float a, int k) -> (y, z) { y(i) = a * x(i)  z(i) = x(i) * k }",
        lambda: ((torch.zeros(5), torch.tensor(2.5), torch.tensor(3, dtype=torch.int32)), {}),
    ),
    "narrow": (
        "def f(bfloat16(N) x, half(N) h, bool(N) b) -> (y, z) { y(i) = b(i) ? x(i) : 0  z(i) = h(i) * 2 }",
        lambda: (
            (torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.half), torch.ones(8, dtype=torch.bool)),
            {},
        ),
    ),
    "empty": ("def f(float(N) x) -> (y) { y(i) = x(i) }", lambda: ((torch.zeros(0),), {})),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_of_all_kinds_are_measured(group: WorkerPool, name: str) -> None:
    source, arguments = PROBLEMS[name]
    op = tc.define(source).f
    tensors, initial = arguments()
    request = pb.Request(version=VERSION, stage=pb.EVALUATE, options=[to_message(tc.CpuOptions())], seconds=0.002)
    request.problem.CopyFrom(problem(op, *tensors, **initial))
    reply = future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")
    assert (reply.message, reply.status) == ("", pb.OK)
    assert reply.timings[0].median > 0


def test_wrong_subscripts_are_reported(group: WorkerPool) -> None:
    op = tc.define(PROBLEMS["gather"][0]).f
    request = pb.Request(version=VERSION, stage=pb.EVALUATE, options=[to_message(tc.CpuOptions())])
    request.problem.CopyFrom(problem(op, torch.zeros(5, 8), torch.tensor([9], dtype=torch.int32)))
    reply = future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")
    assert reply.status == pb.INVALID
    assert "out of bounds" in reply.message


def test_large_inputs_repeat_after_a_prime_number_of_elements() -> None:
    count = PERIOD + 1000
    assert all(PERIOD % k for k in range(2, 2049))
    op = tc.define("def f(float(N) x) -> (y) { y(i) = x(i) }").f
    arguments = normalize_arguments(op._kernels.call_signature, (torch.empty(1).expand(count),), {})
    problem = Problem(problem_message(op.function, arguments, 3))
    for kind in KINDS:
        x, again = torch.empty(count), torch.empty(count)
        fill_inputs((x,), problem, kind, 0)
        fill_inputs((again,), problem, kind, 0)
        assert torch.equal(x, again)
        assert torch.equal(x[PERIOD:], x[:1000])
        assert not torch.equal(x[1 << 20 : (1 << 20) + 1000], x[:1000])
        assert 1.0 < x.std() < 3.0 if kind == "whole" else 0.9 < x.std() < 1.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elements_that_are_not_finite_are_right_only_where_they_should_be(dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    faults = {
        (1.0, 1.0): None, (1.0, 1.0625): None, (1.0, 1.25): pb.WRONG_RESULT, (1.25, 1.0): pb.WRONG_RESULT,
        (inf, inf): None, (nan, nan): None, (-inf, inf): pb.WRONG_RESULT, (nan, inf): pb.WRONG_RESULT,
        (1.0, inf): pb.WRONG_RESULT, (1.0, nan): pb.WRONG_RESULT, (inf, 1.0): pb.NAN, (nan, 1.0): pb.NAN,
    }  # fmt: skip
    for (x, right), status in faults.items():
        for others in ((), (2.0,), (inf,), (nan,)):
            expected = ExpectedOutputs((torch.tensor((*others, right), dtype=dtype),), (0.125,))
            fault = expected.fault((torch.tensor((*others, x), dtype=dtype),))
            assert (fault[0] if fault else None) == status, (x, right, others)
    assert ExpectedOutputs((torch.empty(0, dtype=dtype),), (0.0,)).fault((torch.empty(0, dtype=dtype),)) is None


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4096 + 3])
def test_two_runs_are_compared_to_the_last_byte(count: int) -> None:
    x = torch.arange(count, dtype=torch.uint8)
    assert same_bytes(x, x.clone())
    for k in {0, count // 2, count - 1}:
        y = x.clone()
        y[k] += 1
        assert not same_bytes(x, y)
    negative = torch.tensor([0.0, 1.0], dtype=torch.float16)
    assert not same_bytes(negative, torch.tensor([-0.0, 1.0], dtype=torch.float16))


# --- times -------------------------------------------------------------------------------------------------------


class Work:
    """Takes a time that is proportional to a number."""

    memory = SimpleNamespace(accumulates=False)

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self) -> int:
        for _ in range(self.steps):
            pass
        return 0


@pytest.fixture
def one_processor() -> Iterator[int]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_case_45_what_else_a_processor_does_for_half_of_the_time_changes_no_winner(
    threads: int, one_processor: int
) -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # on the same processor, as it is inherited
    end = threading.Timer(0.3, spinning.kill)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        end.start()
        slow, quick = race_launches([Work(6000), Work(5000)], [1e-4, 1e-4], seconds=0.6)  # type: ignore[list-item]
    finally:
        torch.set_num_threads(before)
        end.cancel()
        spinning.kill()
        spinning.wait()
    assert slow.quartiles[0] / quick.quartiles[0] == pytest.approx(6 / 5, rel=0.1)


def test_a_candidate_is_timed_in_turns_with_other_code(group: WorkerPool) -> None:
    request = pb.Request(version=VERSION, stage=pb.MEASURE, codes=[kernel(), kernel()], seconds=0.02, run_limit=5.0)
    request.problem.CopyFrom(problem(TWICE, torch.zeros(N)))
    reply = future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")
    assert reply.status == pb.OK
    assert [t.runs for t in reply.timings] == [reply.timings[0].runs] * 2
    request.losing = 1e-9
    reply = future_reply(group.submit(request.SerializeToString(), phase_limits(request)), "")
    assert [t.runs for t in reply.timings] == [MIN_SAMPLES, MIN_SAMPLES]


def test_loops_that_are_the_same_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others are not taken for them: code is as without anything kept."""
    (op,) = tc.define("def f(float(N,D) x) -> (a, b) { a(n) +=! x(n,d)  b(n) = a(n) * 2.0 }")
    what = Problem(problem(op, torch.zeros(20, 30)))
    made: list[str] = []

    def counting(*given: Any) -> Any:
        made.append("")
        return compile_object(*given)

    monkeypatch.setattr(worker, "compile_object", counting)
    options = [CpuOptions(), CpuOptions(grain_size=1 << 20), CpuOptions(fusion="min"), CpuOptions(grain_size=1 << 21)]
    worker.clear_prepared_problems()
    codes = [worker.compile_candidate(what, o) for o in options]
    assert len(made) == len({c.program for c in codes}) == 2
    for o, code in zip(options, codes, strict=True):
        worker.clear_prepared_problems()
        assert worker.compile_candidate(what, o) == code
    worker.clear_prepared_problems()


def test_of_code_that_is_kept_what_was_used_longest_ago_is_forgotten() -> None:
    kept, made = worker.CompiledCodeCache(2), list[int]()

    def code(loops: int) -> pb.Code:
        def make() -> pb.Code:
            made.append(loops)
            return pb.Code(program=bytes([loops]))

        return kept.of(loops, make)

    for loops in (1, 2, 1, 3, 1, 2):
        assert code(loops).program == bytes([loops])
    assert made == [1, 2, 3, 2]
    assert hash(-1) == hash(-2)
    first = kept.of(-1, lambda: pb.Code(symbols=["-1"]))
    assert first != kept.of(-2, lambda: pb.Code(symbols=["-2"]))
