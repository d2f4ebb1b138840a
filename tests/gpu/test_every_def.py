"""Every def of the conformance programs and of the benchmarks, on every way to run GPU kernels without a GPU.

Here each def is mapped naively, by default, and as some random options say. `pytest --long tests/gpu` tries 200 sets of
options on each, and so does `python -m tools.gpu_proof`, which keeps a journal and can be stopped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

import pytest

from tensor_comprehensions.codegen.gpu import cuda_printer
from tensor_comprehensions.codegen.gpu import opencl_printer as opencl_text
from tensor_comprehensions.codegen.gpu.gpu_printer import GpuCode
from tensor_comprehensions.loop_ir.interpret.interpreter import interpret
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime import opencl
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.runtime.emulate import emulator
from tensor_comprehensions.target import parse_gpu_target
from tools.gpu_proof import choices, prove

from ..helpers.gpu_suite import Case, check, every, map_case, memory_of, random_options

TARGET = parse_gpu_target("cuda:sm_90")
ARCHITECTURES = ("sm_80", "sm_90")
needs_compiler = pytest.mark.skipif(
    not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
needs_opencl = pytest.mark.skipif(
    not opencl.is_opencl_available(), reason="running OpenCL needs a device, such as PoCL"
)

GROUPS = range(8)
CHOICES = ("naive", "default", "random")


def options_of(choice: str, number: int) -> MappingOptions | None:
    """The options of the def `number`."""
    if choice == "random":
        return random_options(Random(number), TARGET)
    return MappingOptions.naive() if choice == "naive" else None


def cases(group: int) -> list[tuple[int, Case]]:
    """One eighth of the defs, with their numbers."""
    return [(n, c) for n, c in enumerate(every()) if n % len(GROUPS) == group]


@lru_cache(len(GROUPS) * len(CHOICES))
def texts(group: int, choice: str) -> list[tuple[Case, Module, GpuCode]]:
    modules = [(case, map_case(case, options_of(choice, number), TARGET)) for number, case in cases(group)]
    return [(case, module, cuda_printer.emit_cuda(module)) for case, module in modules]


def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))


@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
def test_emulated(group: int) -> None:
    """No race, no undefined read, no place out of bounds, no barrier that a thread misses, and the right values."""
    check_in_emulator(group, "default")


@needs_compiler
@pytest.mark.sampled  # every def runs with default options
@pytest.mark.parametrize("choice", ["naive", "random"])
@pytest.mark.parametrize("group", GROUPS)
def test_emulated_with_options(group: int, choice: str, request: pytest.FixtureRequest) -> None:
    check_in_emulator(group, choice)
    if choice == "random" and is_long(request):
        assert [prove(case, "emulator", range(200)).failures for _, case in cases(group)] == [[]] * len(cases(group))


def check_in_emulator(group: int, choice: str) -> None:
    printed = texts(group, choice)
    for (case, module, _), emulated in zip(
        printed, emulator.build_emulated([code for *_, code in printed]), strict=True
    ):
        arrays = memory_of(case, module)
        assert emulator.run_emulated_module(emulated, module, arrays) == (0, 0), case.name
        check(case, arrays)


@pytest.mark.sampled  # the emulator runs all
@needs_nvrtc
@pytest.mark.parametrize("group", GROUPS)
def test_accepted_by_nvrtc(group: int, request: pytest.FixtureRequest) -> None:
    """With random options, every third def for one of the architectures; with `--long` all, for all."""
    long = is_long(request)
    for choice in CHOICES if long else ("random",):
        for number, (_, _, code) in enumerate(texts(group, choice)):
            wanted = ARCHITECTURES if long else ARCHITECTURES[number % 3 : number % 3 + 1]
            for architecture in wanted:
                assert nvrtc.compile_text(code.source, architecture).binary


@needs_nvrtc
@pytest.mark.parametrize("fault", ["int missing = nowhere;", ""])
def test_the_proof_tells_which_of_several_texts_nvrtc_refuses(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is wrong, or that has no kernel."""
    case, original = next(every()), cuda_printer.emit_cuda
    sources = dict.fromkeys(original(map_case(case, o.options, o.target)).source for o in choices(case, range(6)))
    wrong = list(sources)[1]

    def emit(module: Module) -> GpuCode:
        code = original(module)
        return replace(code, source=f"{code.source * bool(fault)}{fault}") if code.source == wrong else code

    monkeypatch.setattr(cuda_printer, "emit_cuda", emit)
    tally = prove(case, "nvrtc-quick", range(6))
    assert (tally.texts, len(tally.failures)) == (len(sources), 1)
    assert ("nowhere" in tally.failures[0]["error"]) == bool(fault)
    again = prove(case, "nvrtc-quick", range(6), frozenset(tally.digests))
    assert (again.known, again.failures, again.digests) == (tally.texts, [], tally.digests)


@pytest.mark.sampled  # the emulator runs all
@needs_opencl
@pytest.mark.parametrize("group", GROUPS)
def test_run_by_opencl(group: int, request: pytest.FixtureRequest) -> None:
    """A fifth of the defs, with random options; with `--long` all of them."""
    for number, (case, module, _) in enumerate(texts(group, "random")):
        if number % 5 and not is_long(request):
            continue
        arrays = memory_of(case, module)
        assert opencl.run_opencl(opencl_text.emit_opencl(module), module, arrays) == (0, 0)
        check(case, arrays)


@pytest.mark.sampled  # the emulator runs all
@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: int, request: pytest.FixtureRequest) -> None:
    """By a machine that knows nothing of the text: some small defs; with `--long` all that are."""
    for number, (case, module, _) in enumerate(texts(group, "random")):
        if sum(a.size for a in case.arrays.values()) > 60 or (number % 3 and not is_long(request)):
            continue
        arrays = memory_of(case, module)
        assert interpret(module, arrays) == []
        check(case, arrays)
