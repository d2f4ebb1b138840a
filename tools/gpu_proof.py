"""`python -m tools.gpu_proof`: every def under many random sets of mapping options, on what runs GPU kernels
here.

Each def is one job in a process of its own, since a wrong kernel may crash what emulates it; a text that was seen
before is not run again. A journal has one line for each job that is done: a run that was stopped goes on from there.
It has a digest of each text, too, so that after a change of the mapper only the texts that changed need to run:
`--known` takes journals of what is right. What an earlier version printed, its own `--way text` tells.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from hashlib import sha256
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from tensor_comprehensions.codegen.gpu import cuda_printer
from tensor_comprehensions.codegen.gpu import opencl_printer as opencl_text
from tensor_comprehensions.codegen.gpu.gpu_printer import GpuCode
from tensor_comprehensions.codegen.gpu.ptx import architecture_for
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.dtypes import BFLOAT16
from tensor_comprehensions.core.errors import ArgumentError
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.options import GpuOptions, MappingOptions
from tensor_comprehensions.runtime import opencl
from tensor_comprehensions.runtime.cuda import launch as cuda_runtime
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import GpuTarget, parse_gpu_target
from tests.helpers.atom_proof import prove_atoms
from tests.helpers.gpu_suite import Case, check, every, map_case, memory_of, random_options
from tests.helpers.product_suite import product_cases, tile_options

TARGETS = tuple(parse_gpu_target(f"cuda:{name}") for name in ("sm_90", "sm_80", "sm_90", "sm_75"))
ARCHITECTURES = ("sm_80", "sm_90")
WAYS = ("emulator", "nvrtc", "nvrtc-quick", "opencl", "interpreter", "device", "text", "tiles", "tf32", "atoms")
"""text: nothing is run. nvrtc-quick: machine code, too, but optimized little, in less than half of the time. tiles: the
emulator, with products of half, bfloat16 and int8 on tensor cores. tf32: those of float32, rounded to tf32. atoms:
each row of the table of instructions, on a device if there is one."""
QUICK = ("--Ofast-compile=max",)
TOGETHER = 24
"""Texts that are compiled in one go: that takes a tenth of the time of compiling each, a half with NVRTC."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A set of options for a def. options: None leaves the mapping to the cost model."""

    name: str
    options: GpuOptions | None
    target: GpuTarget


@dataclass(slots=True)
class Tally:
    """What became of a job.

    Attributes:
        pairs: of the def and a set of options. texts: different ones among what they give. known: of these, not tried
            since they are known to be right.
        digests: of the text of each pair, in order, but for what was refused or failed before.
    """

    case: str
    way: str
    rounds: tuple[int, int]
    pairs: int = 0
    texts: int = 0
    refused: int = 0
    known: int = 0
    seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def fail(self, choice: Choice, error: BaseException | str) -> None:
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.failures.append({"choice": choice.name, "options": repr(choice.options), "error": text[:4000]})


def choices(case: Case, rounds: range, way: str = "emulator") -> Iterator[Choice]:
    """The default and the naive mapping for round 0 and 1, then random ones: the same in every process.

    On a device all are for that. Tiles are for both targets, each by default first.
    """
    for n in rounds:
        if way in ("tiles", "tf32"):
            target = TARGETS[n % 2]
            yield Choice(f"{way} {n}", tile_options(case, n, way, target), target)
            continue
        machine = cuda_runtime.device_target(0) if way == "device" else TARGETS[n % len(TARGETS)]
        if n < 2:
            yield Choice(("default", "naive")[n], (None, MappingOptions.naive())[n], machine)
        else:
            yield Choice(f"random {n}", random_options(Random(f"{case.name} {n}"), machine), machine)


def prove(case: Case, way: str, rounds: range, known: frozenset[str] = frozenset()) -> Tally:
    """Try `case` under the options of `rounds`. known: digests of texts that need not be tried."""
    tally = Tally(case.name, way, (rounds.start, rounds.stop))
    start = time.process_time()
    seen: set[str] = set()
    waiting: list[tuple[Choice, Module, GpuCode]] = []
    for choice in choices(case, rounds, way):
        tally.pairs += 1
        try:
            module = map_case(case, choice.options, choice.target)
            code = cuda_printer.emit_cuda(module)
        except ArgumentError:
            tally.refused += 1
            continue
        except Exception as error:
            tally.fail(choice, error)
            continue
        digest = sha256(code.source.encode()).hexdigest()[:16]
        tally.digests.append(digest)
        if digest not in seen | known:
            waiting.append((choice, module, code))
        seen.add(digest)
        if len(waiting) == TOGETHER:
            _try(case, way, waiting, tally)
            waiting.clear()
    if waiting:
        _try(case, way, waiting, tally)
    tally.texts, tally.known, tally.seconds = len(seen), len(seen & known), time.process_time() - start
    return tally


def _try(case: Case, way: str, printed: Sequence[tuple[Choice, Module, GpuCode]], tally: Tally) -> None:
    if way == "text":
        return
    if way in ("emulator", "tiles", "tf32"):
        _emulate(case, printed, tally)
        return
    if way.startswith("nvrtc"):
        for _, alike in groupby(sorted(printed, key=_includes), key=_includes):
            _compile(way, tuple(alike), tally)
        return
    for choice, module, code in printed:
        try:
            arrays = memory_of(case, module)
            if way == "opencl":
                assert opencl.run_opencl(opencl_text.emit_opencl(module), module, arrays) == (0, 0)
            elif way == "device":
                assert on_device(code, module, arrays) == (0, 0)
            else:
                assert interpret(module, arrays) == []
            check(case, arrays)
        except Exception as error:
            tally.fail(choice, error)


def on_device(code: GpuCode, module: Module, arrays: dict[str, Any]) -> tuple[int, int]:
    """Run a module on the first CUDA device, compiled for that."""
    made = nvrtc.compile_text(code.source, architecture_for(code.source, cuda_runtime.device_target(0).name))
    return cuda_runtime.run_on_device(code, made, module, arrays, torch.device("cuda", 0))


def _emulate(case: Case, printed: Sequence[tuple[Choice, Module, GpuCode]], tally: Tally) -> None:
    try:
        built = emulator.build_emulated([code for *_, code in printed])
    except Exception as error:
        if len(printed) == 1:
            tally.fail(printed[0][0], error)
        else:
            for one in printed:
                _emulate(case, [one], tally)
        return
    for (choice, module, _), emulated in zip(printed, built, strict=True):
        arrays = memory_of(case, module)
        try:
            memory = _pack_bfloat16(module, arrays)
            assert emulator.run_emulated_module(emulated, module, memory) == (0, 0)
            check(case, _unpack_bfloat16(module, memory))
        except Exception as error:
            tally.fail(choice, error)
    shutil.rmtree(built[0].path.parent, ignore_errors=True)


def _pack_bfloat16(module: Module, arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays with tensors of bfloat16 as kernels see them: the upper halves of float32."""
    narrow = {b.name for b in module.arguments if b.type.dtype == BFLOAT16}
    return {n: np.asarray(x.view(np.uint32) >> 16, np.uint16) if n in narrow else x for n, x in arrays.items()}


def _unpack_bfloat16(module: Module, arrays: dict[str, Any]) -> dict[str, Any]:
    narrow = {b.name for b in module.arguments if b.type.dtype == BFLOAT16}
    return {n: (x.astype(np.uint32) << 16).view(np.float32) if n in narrow else x for n, x in arrays.items()}


def _includes(printed: tuple[Choice, Module, GpuCode]) -> tuple[str, ...]:
    return tuple(line for line in printed[2].source.splitlines() if line.startswith("#include"))


def _compile(way: str, printed: Sequence[tuple[Choice, Module, GpuCode]], tally: Tally) -> None:
    """Compile texts that include the same: in one go, and where NVRTC refuses that, one by one as they are."""
    codes = [code for *_, code in printed]
    names = {f"{_prefix(n, codes)}{k.name}" for n, code in enumerate(codes) for k in code.kernels}
    text = codes[0].source if len(codes) == 1 else "\n".join([*_includes(printed[0]), *_unit(codes)])
    try:
        for architecture in ARCHITECTURES:
            made = nvrtc.compile_text(text, architecture, more=QUICK if way == "nvrtc-quick" else ())
            assert made.binary
            assert made.resources.keys() == names
    except Exception as error:
        if len(printed) == 1:
            tally.fail(printed[0][0], error)
        else:
            for one in printed:
                _compile(way, [one], tally)


def _unit(codes: Sequence[GpuCode]) -> Iterator[str]:
    """Texts one after another, each in a namespace of its own, with kernels that have names of their own."""
    for n, code in enumerate(codes):
        yield from (f"#define {k.name} {_prefix(n, codes)}{k.name}" for k in code.kernels)
        yield f"namespace text_{n} {{\n{code.source}\n}}"
        yield from (f"#undef {k.name}" for k in code.kernels)


def _prefix(number: int, codes: Sequence[GpuCode]) -> str:
    return f"m{number}_" if len(codes) > 1 else ""


# --- jobs --------------------------------------------------------------------------------------------------------


def _child(case: Case, way: str, rounds: range, known: frozenset[str], pipe: Any) -> None:
    pipe.send(asdict(prove(case, way, rounds, known)))
    pipe.close()


def in_process(case: Case, way: str, rounds: range, known: frozenset[str] = frozenset()) -> Tally:
    """As `prove`, in a process that may crash: then by halves, until it is known which options do it."""
    receiver, sender = (fork := get_context("fork")).Pipe(duplex=False)
    process = fork.Process(target=_child, args=(case, way, rounds, known, sender))
    process.start()
    sender.close()
    try:
        found = Tally(**receiver.recv())
    except EOFError:
        found = None
    process.join()
    if found is not None:
        return found
    if len(rounds) == 1:
        tally = Tally(case.name, way, (rounds.start, rounds.stop), pairs=1)
        tally.fail(next(choices(case, rounds, way)), f"the process ended with {process.exitcode}")
        return tally
    middle = (rounds.start + rounds.stop) // 2
    first, second = (in_process(case, way, r, known) for r in (range(rounds.start, middle), range(middle, rounds.stop)))
    return Tally(
        case.name, way, (rounds.start, rounds.stop), first.pairs + second.pairs, first.texts + second.texts,
        first.refused + second.refused, first.known + second.known, first.seconds + second.seconds,
        first.failures + second.failures, first.digests + second.digests,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_proof", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="sets of options for each def")
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument("--way", choices=WAYS, default="emulator")
    parser.add_argument("--cases", default="*", help="names of defs, with shell wildcards")
    parser.add_argument("--shard", default="0/1", help="N/COUNT: one part of the defs, counted from 0")
    parser.add_argument("--seconds", type=float, default=1e9, help="no job starts after so many")
    parser.add_argument("--journal", type=Path, help="where lines of JSON go, and say what is done")
    parser.add_argument("--known", type=Path, nargs="*", default=(), help="journals whose texts are not tried again")
    options = parser.parse_args(arguments)
    if options.way == "atoms":
        return int(prove_atoms() > 0)
    part, _, count = options.shard.partition("/")
    rounds = range(options.first, options.first + options.rounds)
    defs = product_cases(options.way) if options.way in ("tiles", "tf32") else every()
    cases = [c for n, c in enumerate(defs) if n % int(count) == int(part) and fnmatch(c.name, options.cases)]
    done = {(t.case, t.way, t.rounds): t for t in read_journal(options.journal)}
    known: dict[str, set[str]] = {}
    for tally in (t for path in options.known for t in read_journal(path) if not t.failures):
        known.setdefault(tally.case, set()).update(tally.digests)
    emulator.prepare_machine()
    start, tallies = time.monotonic(), []
    for case in cases:
        key = (case.name, options.way, (rounds.start, rounds.stop))
        if key in done:
            tallies.append(done[key])
            continue
        if time.monotonic() - start > options.seconds:
            break
        tallies.append(tally := in_process(case, options.way, rounds, frozenset(known.get(case.name, ()))))
        if options.journal:
            with options.journal.open("a") as journal:
                journal.write(json.dumps(asdict(tally)) + "\n")
        for failure in tally.failures:
            print(f"{case.name}: {failure['choice']}: {failure['options']}\n    {failure['error'][:400]}", flush=True)
    _report(options.way, tallies, len(cases))
    return 1 if any(t.failures for t in tallies) else 0


def read_journal(path: Path | None) -> list[Tally]:
    """What a journal says."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Tally(**{**t, "rounds": tuple(t["rounds"])}) for t in map(json.loads, lines)]


def _report(way: str, tallies: Sequence[Tally], wanted: int) -> None:
    rows = [(t.pairs, t.texts, t.known, t.refused, len(t.failures), t.seconds) for t in tallies]
    pairs, texts, known, refused, failed, seconds = (sum(n) for n in zip(*rows, strict=True))
    print(
        f"{way}: {len(tallies)} of {wanted} defs, {pairs} pairs of a def and options, {texts} different texts, "
        f"{known} of them known, {refused} refused, {failed} failed, {seconds:.0f} s of processor time"
    )


if __name__ == "__main__":
    with knobs.override_knobs(verify=True, cache="off"):
        sys.exit(main())
