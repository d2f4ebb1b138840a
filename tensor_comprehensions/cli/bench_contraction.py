"""`tensorc contract`: rank, measure and emit schedules of a tensor contraction."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..api import Op, define
from ..compiler.cpu_passes import KINDS, list_schedulable_ops
from ..core.error_boundary import only_tc_errors
from ..core.errors import ArgumentError, CannotLower
from ..dispatch.arguments import parse_sizes
from ..kernel import Kernel
from ..options import CpuOptions
from ..runtime.cpu.host import host
from ..structured.language.apply_primitives import explain_schedule
from ..structured.language.primitives import Schedule
from ..structured.language.schedule_types import schedule_for
from ..structured.op import StructuredOp
from ..structured.planners.candidates import PricedSchedule, schedule_candidates

TYPES = {"float": torch.float32, "double": torch.float64}
LISTED = 8
SEARCH_SECONDS = 10.0
MOST_THREADS_PER_PROCESSOR = 8
SUFFIXES = {"llvm": "ll", "asm": "s", "schedule": "txt", "loops": "txt"}


@dataclass(frozen=True, slots=True)
class ContractionSpec:
    """`C = A * B`, summed over the indices that C lacks. In each tensor the leftmost index has stride 1.

    Attributes:
        c, a, b: the indices of each tensor, one letter per index.
        sizes: the extent of each index.
        dtype: "float" or "double".
    """

    c: str
    a: str
    b: str
    sizes: Mapping[str, int]
    dtype: str

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, float], dtype: str) -> ContractionSpec:
        """Parse a contraction such as `abcd-aebf-fdec`. Raises ArgumentError."""
        match = re.fullmatch(r"([a-z]+)-([a-z]*)-([a-z]*)", text)
        if match is None:
            raise ArgumentError(
                f"the contraction is {text!r}", expected="C-A-B in small letters, such as abcd-aebf-fdec"
            )
        c, a, b = match.groups()
        for name, indices in (("C", c), ("A", a), ("B", b)):
            if repeated := [i for i in indices if indices.count(i) > 1]:
                raise ArgumentError(f"{name} has the index {repeated[0]!r} twice", found=indices)
        if missing := [i for i in c if i not in a + b]:
            raise ArgumentError(f"C has the index {missing[0]!r}, and neither A nor B has")
        if alone := [i for i in a + b if i not in c and not (i in a and i in b)]:
            raise ArgumentError(f"the index {alone[0]!r} is in one tensor only")
        indices = dict.fromkeys(a + b)
        if unknown := [i for i in sizes if i not in indices]:
            raise ArgumentError(f"no tensor has the index {unknown[0]!r}", expected=", ".join(indices))
        for i in indices:
            size = sizes.get(i)
            if not isinstance(size, int) or size < 1:
                raise ArgumentError(
                    f"the size of {i!r} is {'not given' if size is None else size}",
                    suggestion=f"add {i}=... to --sizes, 1 or more",
                )
        return cls(c, a, b, {i: int(sizes[i]) for i in indices}, dtype)

    @property
    def source(self) -> str:
        """The contraction as a def. Its tensors are row-major, so the indices are in reverse order."""
        c, a, b = (t[::-1] for t in (self.c, self.a, self.b))
        first, second = (f"{self.dtype}({','.join(f'N{i}' for i in t)})" for t in (a, b))
        product = f"A({','.join(a)}) * B({','.join(b)})"
        return f"def contract({first} A, {second} B) -> (C) {{ C({','.join(c)}) +=! {product} }}"

    @property
    def flops(self) -> int:
        return 2 * prod(self.sizes.values())

    @only_tc_errors
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Random operands A and B."""
        generator = torch.Generator().manual_seed(0)
        shapes = ([self.sizes[i] for i in reversed(t)] for t in (self.a, self.b))
        a, b = (torch.rand(s, generator=generator, dtype=TYPES[self.dtype]) * 2 - 1 for s in shapes)
        return a, b

    def __str__(self) -> str:
        sizes = {name: self._size(name) for name in ("m", "n", "k", "l")}
        shape = " x ".join(str(sizes[name]) for name in "mnk")
        batch = f", {sizes['l']} times" if sizes["l"] > 1 else ""
        return f"{self.c}-{self.a}-{self.b}: like a matrix product {shape} (m x n x k){batch}, {self.flops:.3g} FLOP"

    def _size(self, role: str) -> int:
        def belongs(i: str) -> bool:
            places = (i in self.c, i in self.a, i in self.b)
            return places == {"m": (True, True, False), "n": (True, False, True), "k": (False, True, True)}.get(
                role, (True, True, True)
            )

        return prod(n for i, n in self.sizes.items() if belongs(i))


def add_contract_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `contract` and its arguments."""
    parser = commands.add_parser(
        "contract",
        help="show, measure and emit the ways to compute a tensor contraction",
        description=__doc__,
        epilog="The notation is that of the TCCG benchmark: C-A-B, one letter per index, the LEFTMOST index of each "
        "tensor has stride 1 (column-major). Indices that C lacks are summed.",
    )
    parser.set_defaults(command=run_contract)
    parser.add_argument("contraction", help="such as abcd-aebf-fdec")
    parser.add_argument("--sizes", default="", metavar="a=24,b=..", help="the extent of every index")
    parser.add_argument("--dtype", default="float", choices=TYPES, help="type of all three tensors (default float)")
    parser.add_argument("--search", type=int, default=0, metavar="N", help="measure up to N ways and take the fastest")
    parser.add_argument(
        "--seconds", type=float, default=SEARCH_SECONDS, help=f"time of the search (default {SEARCH_SECONDS:g})"
    )
    parser.add_argument("--threads", type=int, default=0, help="threads of the pool (default: those of torch)")
    parser.add_argument("--explain", action="store_true", help="explain every primitive of the winner")
    parser.add_argument("--emit", choices=tuple(KINDS), help="write the winner as text of this kind, such as c")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: named after the contraction)")


def run_contract(options: argparse.Namespace) -> int:
    """List the candidates, the winner first, and explain and emit the winner if requested. Returns 0."""
    contraction = ContractionSpec.parse(options.contraction, parse_sizes(options.sizes), options.dtype)
    if options.threads:
        _set_threads(options.threads)
    op = define(contraction.source).contract
    tensors = contraction.tensors()
    print(contraction)
    rows = list(
        _measure_schedules(op, tensors, options.search, options.seconds)
        if options.search
        else _rank_schedules(op, tensors)
    )
    if not rows:
        print("no register tile suits it; it runs as other loops do")
    for line in _format_candidate_table(rows, contraction.flops):
        print(line)
    kernel = op.compile(*tensors)
    if options.explain:
        for _, _, structured in _list_ops(op, tensors):
            if rows and rows[0].pipeline is not None:
                print(explain_schedule(rows[0].pipeline, structured, host()))
        print(kernel.source("schedule"))
    if options.emit:
        path = options.output or f"{options.contraction}.{SUFFIXES.get(options.emit, options.emit)}"
        _write(Path(path), kernel.source(options.emit))
    return 0


def _set_threads(number: int) -> None:
    """Set the number of threads. Raises ArgumentError below 1 or above the limit: each thread takes memory."""
    most = MOST_THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    if not 0 < number <= most:
        raise ArgumentError(f"--threads {number}: expected 1 to {most} on this machine")
    torch.set_num_threads(number)


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """A way to compute the contraction.

    Attributes:
        pipeline: the schedule; None for the default of an untuned call if it splits the sum, which no schedule
            expresses.
        cycles: predicted cycles of one core; None if unknown.
        seconds: the measured time of a call; None if not measured.
    """

    pipeline: Schedule | None
    cycles: float | None
    seconds: float | None = None


def _list_ops(op: Op, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str, StructuredOp]]:
    yield from list_schedulable_ops(cast(Kernel, op.compile(*tensors)).compiled.bound, CpuOptions(), host())


def _rank_schedules(op: Op, tensors: Sequence[Tensor]) -> Iterator[CandidateRow]:
    for _, _, structured in _list_ops(op, tensors):
        for candidate in _list_candidates(structured, LISTED):
            yield CandidateRow(candidate.schedule, candidate.cycles)


def _list_candidates(structured: StructuredOp, count: int) -> tuple[PricedSchedule, ...]:
    """The candidates that the cost model ranks first; none if no register tile computes the op."""
    try:
        return schedule_candidates(structured, host(), count)
    except CannotLower:
        return ()


def _measure_schedules(op: Op, tensors: Sequence[Tensor], count: int, seconds: float) -> Iterator[CandidateRow]:
    ops = tuple(_list_ops(op, tensors))
    if not ops:
        return
    ((name, _, structured),) = ops
    cycles = {c.schedule: c.cycles for c in _list_candidates(structured, count)}
    found = op.autotune(*tensors, search="schedules", population=count, budget=seconds)
    for o in sorted(found.outcomes, key=lambda o: (o.options != found.options, o.seconds)):
        pipeline = schedule_for(o.options.schedule, name)
        if o.seconds is not None and isinstance(pipeline, Schedule):
            yield CandidateRow(pipeline, cycles.get(pipeline), o.seconds)
        elif o.seconds is not None:
            yield CandidateRow(None, None, o.seconds)


def _format_candidate_table(rows: Sequence[CandidateRow], flops: int) -> Iterator[str]:
    clock = clock_rate()
    unit = "GFLOP/s" if clock else "FLOP/cycle"
    yield f"estimated and measured {unit}" + (f", one core at {clock / 1e9:.2f} GHz estimated" if clock else "")
    for number, row in enumerate(rows):
        guess = "-" if row.cycles is None else f"{flops / row.cycles * (clock or 1e9) / 1e9:.1f}"
        speed = "-" if row.seconds is None else f"{flops / row.seconds / 1e9:.1f}"
        yield f"{number:>3} {guess:>8} {speed:>8}  {row.pipeline or 'the sum in parts'}"


def clock_rate() -> float | None:
    """The current clock rate of the fastest core in Hz; None if the system does not report it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    rates = [float(rate) for rate in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
    return max(rates) * 1e6 if rates else None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error}") from error
    print(f"wrote {path}")
