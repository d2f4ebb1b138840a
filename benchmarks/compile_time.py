"""Seconds from the text of a def to its first result in a warm process: `python -m benchmarks.compile_time`.

Every repetition has sizes that the process has not seen, and the cache on disk is off. Beside it, what importing
the package costs beyond importing torch. Of the contractions of `contractions.json`, `--contractions` tells what
compiling a kernel takes, by pass, and `--planning` the part of it in which the cost model chooses a plan: the least of
so many repetitions, in the thread's own processor time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Never

import torch

import tensor_comprehensions
from tensor_comprehensions.core import knobs
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.structured.match.drop_unit_dims import drop_unit_dims
from tensor_comprehensions.structured.op import StructuredOp
from tensor_comprehensions.structured.planners.select import select_plan
from tensor_comprehensions.target import AVX512, CpuTarget

from . import sources as tc
from .contractions import Contraction, contractions
from .runner import def_name
from .timing import Quartiles

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A def, its shapes as a function of a number that changes with every repetition, and the seconds it may take."""

    family: str
    source: str
    shapes: Callable[[int], Shapes]
    goal: float


QUICK, SLOW = 0.150, 0.400
PLANNING, CONTRACTION = 0.020, 0.120
CASES = (
    Case("pointwise", tc.ADD, lambda n: ((64, 512 + n), (64, 512 + n)), QUICK),
    Case("pointwise", tc.GELU_TANH, lambda n: ((64, 512 + n),), QUICK),
    Case("pointwise", tc.BIAS_RELU_ADD, lambda n: ((64, 512 + n), (512 + n,), (64, 512 + n)), QUICK),
    Case("movement", tc.TRANSPOSE, lambda n: ((64, 512 + n),), QUICK),
    Case("movement", tc.HEADS, lambda n: ((2, 64, 8, 32 + n),), QUICK),
    Case("reduction", tc.SOFTMAX, lambda n: ((64, 512 + n),), QUICK),
    Case("reduction", tc.LAYERNORM, lambda n: ((64, 512 + n), (512 + n,), (512 + n,)), QUICK),
    Case("reduction", tc.RMSNORM_SWIGLU, lambda n: ((64, 512 + n), (64, 512 + n), (512 + n,)), QUICK),
    Case("reduction", tc.MOMENTS, lambda n: ((16, 4096 + n),), QUICK),
    Case("reduction", tc.BATCHNORM, lambda n: ((4, 8, 14, 14 + n), (8,), (8,)), QUICK),
    Case("reduction", tc.MAXPOOL, lambda n: ((2, 8, 28, 28 + 2 * n),), QUICK),
    Case("contraction", tc.MATMUL, lambda n: ((256, 256 + n), (256 + n, 256)), SLOW),
    Case("contraction", tc.TMM, lambda n: ((128, 256 + n), (256, 256 + n)), SLOW),
    Case("contraction", tc.TBMM, lambda n: ((50, 26, 72 + n), (50, 26, 72 + n)), SLOW),
    Case("contraction", tc.MLP1, lambda n: ((128, 500 + n), (128, 500 + n), (128,)), SLOW),
    Case(
        "contraction", tc.MLP3, lambda n: ((128, 128 + n), (64, 128 + n), (64,), (32, 64), (32,), (2, 32), (2,)), SLOW
    ),
    Case("contraction", tc.KRONECKER, lambda n: ((16, 16), (16, 16), (16, 16 + n), (8, 16, 16, 16 + n)), SLOW),
    Case("convolution", tc.CONV2D, lambda n: ((2, 16, 28, 28 + n), (16, 16, 3, 3), (16,)), SLOW),
    Case("convolution", tc.CONV2D_STRIDE2, lambda n: ((1, 3, 64, 64 + 2 * n), (16, 3, 7, 7), (16,)), SLOW),
    Case("convolution", tc.GCONV, lambda n: ((2, 4, 8, 14, 14 + n), (4, 8, 8, 3, 3), (4, 8)), SLOW),
)


def first_result(case: Case, step: int) -> float:
    """Seconds from text to result at sizes that `step` makes new."""
    arguments = [torch.randn(shape) for shape in case.shapes(step)]
    start = time.perf_counter()
    library = tensor_comprehensions.define(case.source)
    getattr(library, def_name(case.source))(*arguments)
    return time.perf_counter() - start


def measure(case: Case, repeat: int) -> Quartiles:
    """Quartiles over `repeat` repetitions, after one that warms the process up."""
    first_result(case, 0)
    return Quartiles.of([first_result(case, step) for step in range(1, repeat + 1)])


def import_seconds(repeat: int, statement: str) -> float:
    """Median seconds that `statement`, an import, takes in a process that has imported torch."""
    program = f"import time, torch; s = time.perf_counter(); {statement}; print(time.perf_counter() - s)"
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(repeat)]
    return statistics.median(float(r.stdout) for r in runs)


def report(repeat: int) -> Iterator[str]:
    yield f"{'def':16} {'class':12} {'median':>8} {'quartiles':>17}   goal"
    for case in CASES:
        name = def_name(case.source)
        try:
            q = measure(case, repeat)
        except (tensor_comprehensions.TCError, AssertionError) as error:
            yield f"{name:16} {case.family:12} {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        spread = f"{q.low * 1e3:.0f} .. {q.high * 1e3:.0f} ms"
        verdict = "met" if q.median <= case.goal else "missed"
        yield f"{name:16} {case.family:12} {q.median * 1e3:5.0f} ms {spread:>17}   {case.goal * 1e3:.0f} ms {verdict}"
    for statement in ("import tensor_comprehensions", "from tensor_comprehensions import define"):
        yield f"{statement}: {import_seconds(5, statement) * 1e3:.0f} ms beyond torch's import (goal 50 ms)"


class _Recognized(BaseException):
    """Carries an op out of the compiler, of which no more than the recognition is wanted."""

    def __init__(self, op: StructuredOp) -> None:
        super().__init__()
        self.op = op


def recognize_contraction(case: Contraction) -> StructuredOp:
    """The structured op of a contraction."""

    def stop(op: StructuredOp, _: CpuTarget) -> Never:
        raise _Recognized(op)

    _, left, right = case.tensors
    contract = tensor_comprehensions.define(case.source).contract
    try:
        contract.compile(torch.empty(case.shape(left)), torch.empty(case.shape(right)), schedule=stop)
    except _Recognized as found:
        return found.op
    raise AssertionError(f"{case.name} was compiled without a schedule")


def planning_seconds(op: StructuredOp, target: CpuTarget, repeat: int) -> float:
    """The least time in which the cost model chooses a plan for `op`, without caches."""

    def once() -> float:
        start = time.thread_time()
        select_plan(drop_unit_dims(op), target, parallel=True)
        return time.thread_time() - start

    return min(once() for _ in range(repeat))


def planning_report(repeat: int) -> Iterator[str]:
    yield f"{'contractions':12} {'target':16} {'median':>9} {'worst':>9}   goal {PLANNING * 1e3:.0f} ms"
    targets = {target.name: target for target in (host(), AVX512)}
    for size in ("ci", "full"):
        ops = {case.name: recognize_contraction(case) for case in contractions(size)}
        for target in targets.values():
            seconds = {name: planning_seconds(op, target, repeat) for name, op in ops.items()}
            worst = max(seconds, key=seconds.__getitem__)
            median = statistics.median(seconds.values())
            verdict = "met" if seconds[worst] <= PLANNING else "missed"
            times = f"{median * 1e3:6.1f} ms {seconds[worst] * 1e3:6.1f} ms"
            yield f"{f'{len(ops)} {size}':12} {target.name:16} {times}   {verdict}, worst {worst}"


@dataclass(frozen=True, slots=True)
class Compiling:
    """The times of compiling a kernel: the thread's processor time, the wall clock, and each pass."""

    processor: float
    clock: float
    passes: Mapping[str, float]


def compiling(case: Contraction, repeat: int) -> Compiling:
    """The repetition with the least processor time, each from the text of the def, without a cache."""
    _, left, right = case.tensors
    arguments = [torch.empty(case.shape(t), dtype=case.dtype) for t in (left, right)]

    def once() -> Compiling:
        contract = tensor_comprehensions.define(case.source).contract
        clock, processor = time.perf_counter(), time.thread_time()
        kernel = contract.compile(*arguments)
        processor, clock = time.thread_time() - processor, time.perf_counter() - clock
        return Compiling(processor, clock, dict(kernel.compiled.seconds))

    return min((once() for _ in range(repeat)), key=lambda c: c.processor)


def contraction_report(repeat: int) -> Iterator[str]:
    """Medians over the contractions, and the worst of them."""
    compiling(contractions("ci")[0], 1)  # warms the process up
    for size in ("ci", "full"):
        took = {case.name: compiling(case, repeat) for case in contractions(size)}
        worst = max(took, key=lambda name: took[name].processor)
        processor = statistics.median(c.processor for c in took.values())
        clock = statistics.median(c.clock for c in took.values())
        yield (
            f"{len(took)} contractions, {size}: processor {processor * 1e3:.0f} ms, clock {clock * 1e3:.0f} ms "
            f"(goal {CONTRACTION * 1e3:.0f} ms {'met' if clock <= CONTRACTION else 'missed'}), "
            f"worst {took[worst].processor * 1e3:.0f} ms of processor time for {worst}"
        )
        for name in took[worst].passes:
            seconds = [c.passes[name] for c in took.values()]
            yield f"    {name:16} {statistics.median(seconds) * 1e3:6.1f} ms, worst {max(seconds) * 1e3:6.1f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--repeat", type=int, default=7, help="repetitions per def (default 7)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--contractions", action="store_true", help="time kernels of the contractions, by pass")
    what.add_argument("--planning", action="store_true", help="time the choice of plans for contractions alone")
    options = parser.parse_args(arguments)
    make_report = contraction_report if options.contractions else planning_report if options.planning else report
    with knobs.override_knobs(cache="off"):
        for text in make_report(options.repeat):
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
