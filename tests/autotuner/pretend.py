"""An evaluator that runs nothing: candidates take as long as a function of their options says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from hashlib import sha256

import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.op_api import tuning_task_of
from tensor_comprehensions.autotuner.session import TuningTask
from tensor_comprehensions.autotuner.space import CpuSearchSpace, Genome, search_space
from tensor_comprehensions.autotuner.worker import VERSION
from tensor_comprehensions.cache.options_proto import from_message
from tensor_comprehensions.cache.store import Store
from tensor_comprehensions.cache.tc_cache_pb2 import Options
from tensor_comprehensions.dispatch.call_steps import normalize_arguments
from tensor_comprehensions.options import CpuOptions

SOFTMAX = """
def softmax(float(N,D) x) -> (out) {
    peak(n) max=! x(n,d)
    e(n,d) = exp(x(n,d) - peak(n))
    total(n) +=! e(n,d)
    out(n,d) = e(n,d) / total(n)
}"""
TMM = "def tmm(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"


def subject(source: str = SOFTMAX, *shapes: tuple[int, ...], store: Store | None = None) -> TuningTask:
    """A def with tensors of these shapes, to be tuned."""
    op = next(iter(tc.define(source)))
    arguments = normalize_arguments(op._kernels.call_signature, [torch.zeros(s) for s in shapes or ((48, 64),)], {})
    return tuning_task_of(op._kernels, arguments, CpuOptions(), 0, Store(None) if store is None else store)


def space_of(what: TuningTask) -> tuple[CpuSearchSpace, tuple[Genome, ...]]:
    return search_space(what.bound, what.target, what.start)


def landscape(options: CpuOptions) -> float:
    """Seconds: a valley that no single gene leads into."""
    seconds = 1e-3 * (1.0 + 0.5 * abs(options.interleave - 4))
    seconds *= {"max": 0.8, "preserve3": 1.0, "min": 1.4}[options.fusion]
    tile = options.tile or (0,)
    seconds *= 1.0 if tile[0] == 16 else 1.3
    seconds *= 1.0 if len(tile) > 1 and tile[1] == 32 else 1.2
    return seconds * (0.9 if options.grain_size == 8192 and options.fusion == "max" else 1.0)


Reply = pb.Reply


class Pretend:
    """The evaluator. change: alters the reply to a measurement. asked: the options, in order."""

    separate, width, fingerprint = True, 4, "here"

    def __init__(
        self,
        seconds: Callable[[CpuOptions], float] = landscape,
        change: Callable[[CpuOptions, pb.Reply], None] = lambda options, reply: None,
        raced: Callable[[CpuOptions], float] | None = None,
    ) -> None:
        self.seconds, self.change, self.raced = seconds, change, raced or seconds
        self.asked: list[CpuOptions] = []
        self.closed = False

    def begin(self) -> None:
        """Nothing starts."""

    def submit(self, request: pb.Request) -> Future[bytes]:
        future: Future[bytes] = Future()
        reply = pb.Reply(version=VERSION, status=pb.OK, fingerprint=self.fingerprint)
        if request.stage == pb.COMPILE:
            data = request.options[0].SerializeToString(deterministic=True)
            reply.codes.append(pb.Code(program=data))
            reply.digest = sha256(data).hexdigest()
        elif request.stage == pb.MEASURE:
            message = request.options.add()
            message.ParseFromString(request.codes[0].program)
            options = from_message(message)
            self.asked.append(options)
            reply.timings.append(timing(self.seconds(options)))
            reply.running = 10.0
            self.change(options, reply)
        else:
            reply.timings.extend(race_without_noise([self.raced(from_message(m)) for m in _options(request)]))
        future.set_result(reply.SerializeToString())
        return future

    def close(self) -> None:
        self.closed = True


def evaluate(raw: bytes) -> bytes:
    """What workers elsewhere run: as `Pretend` answers, from options at once, and a little slowly."""
    request = pb.Request.FromString(raw)
    time.sleep(0.02)
    reply = pb.Reply(version=VERSION, status=pb.OK, fingerprint=request.fingerprint)
    reply.digest = sha256(b"".join(m.SerializeToString(deterministic=True) for m in request.options)).hexdigest()
    reply.timings.extend(race_without_noise([landscape(from_message(m)) for m in request.options]))
    return reply.SerializeToString()


def _options(request: pb.Request) -> list[Options]:
    """What a race is between: options, or codes, which are options here."""
    return [*request.options, *(Options.FromString(c.program) for c in request.codes)]


def race_without_noise(seconds: Sequence[float]) -> list[pb.Timing]:
    """What a race without noise gives."""
    found = [timing(each) for each in seconds]
    for t in found:
        t.gain = found[0].low / t.low if t.runs and found[0].runs else 0.0
    return found


def timing(seconds: float) -> pb.Timing:
    return pb.Timing(median=seconds, low=seconds, high=seconds, runs=5 if seconds == seconds and seconds > 0 else 0)
