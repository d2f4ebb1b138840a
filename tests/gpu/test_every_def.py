"""Every def of the conformance programs and of the benchmarks, on every way to run GPU kernels without a GPU.

Here each def is mapped naively, by default, and as some random options say. `pytest --long tests/gpu` tries 200 random
sets of options on each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest

from tensor_comprehensions.codegen import cuda
from tensor_comprehensions.codegen import opencl as opencl_text
from tensor_comprehensions.codegen.gpu import GpuCode
from tensor_comprehensions.loop_ir.interpret import interpret
from tensor_comprehensions.loop_ir.nodes import Module
from tensor_comprehensions.options import MappingOptions
from tensor_comprehensions.runtime import emulator, nvrtc, opencl
from tensor_comprehensions.target import target

from ..gpu_suite import Case, check, every, mapped, memory_of, random_options

GROUP = 27
TARGET = target("cuda:sm_90")
ARCHITECTURES = ("sm_80", "sm_90")
needs_compiler = pytest.mark.skipif(
    not emulator.is_available(), reason="running kernels on the CPU needs a C++ compiler"
)
needs_nvrtc = pytest.mark.skipif(not nvrtc.is_available(), reason="compiling CUDA needs NVRTC")
needs_opencl = pytest.mark.skipif(not opencl.is_available(), reason="running OpenCL needs a device, such as PoCL")

Chosen = Callable[[int], MappingOptions | None]
"""The options of a def by its number."""


def naive(_: int) -> MappingOptions:
    return MappingOptions.naive()


def default(_: int) -> None:
    return None


def at_random(round_: int) -> Chosen:
    return lambda number: random_options(Random(1000 * round_ + number), TARGET)


CHOICES: dict[str, Chosen] = {"naive": naive, "default": default, "random": at_random(0)}
GROUPS = range(8)


def cases(group: int) -> list[tuple[int, Case]]:
    """One eighth of the defs, with their numbers."""
    return [(n, c) for n, c in enumerate(every()) if n % len(GROUPS) == group]


def texts(group: int, choose: Chosen) -> list[tuple[Case, Module, GpuCode]]:
    found = []
    for number, case in cases(group):
        module = mapped(case, choose(number), TARGET)
        found.append((case, module, cuda.emit(module)))
    return found


def run_emulated(printed: Sequence[tuple[Case, Module, GpuCode]]) -> None:
    for (case, module, _), emulated in zip(printed, emulator.build([code for *_, code in printed]), strict=True):
        arrays = memory_of(case, module)
        assert emulator.run(emulated, module, arrays) == (0, 0), case.name
        check(case, arrays)


@needs_compiler
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("group", GROUPS)
def test_emulated(group: int, choice: str) -> None:
    """No race, no undefined read, no place out of bounds, no barrier that a thread misses, and the right values."""
    run_emulated(texts(group, CHOICES[choice]))


@needs_compiler
@pytest.mark.parametrize("group", GROUPS)
def test_emulated_with_many_options(group: int, request: pytest.FixtureRequest) -> None:
    """Two more random sets of options for each def; 200 with `--long`."""
    for round_ in range(1, 201 if request.config.getoption("--long") else 2):
        run_emulated(texts(group, at_random(round_)))


@needs_nvrtc
@pytest.mark.parametrize("group", GROUPS)
def test_accepted_by_nvrtc(group: int, request: pytest.FixtureRequest) -> None:
    """For one of the architectures, in turn; with `--long` for all, with all options."""
    long = request.config.getoption("--long")
    for choose in CHOICES.values() if long else (at_random(0),):
        for number, (_, _, code) in enumerate(texts(group, choose)):
            for architecture in ARCHITECTURES if long else ARCHITECTURES[number % 2 : number % 2 + 1]:
                assert nvrtc.compile_text(code.source, architecture).binary


@needs_opencl
@pytest.mark.parametrize("group", GROUPS)
def test_run_by_opencl(group: int, request: pytest.FixtureRequest) -> None:
    """A quarter of the defs, with random options; with `--long` all of them."""
    for number, case in cases(group):
        if number // len(GROUPS) % 4 and not request.config.getoption("--long"):
            continue
        module = mapped(case, at_random(0)(number), TARGET)
        arrays = memory_of(case, module)
        assert opencl.run(opencl_text.emit(module), module, arrays) == (0, 0)
        check(case, arrays)


@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: int, request: pytest.FixtureRequest) -> None:
    """By a machine that knows nothing of the text: some small defs; with `--long` all that are."""
    long = request.config.getoption("--long")
    for number, case in cases(group):
        elements = sum(a.size for a in case.arrays.values())
        if elements > 60 or (number // len(GROUPS) % 3 and not long):
            continue
        module = mapped(case, at_random(0)(number), TARGET)
        arrays = memory_of(case, module)
        assert interpret(module, arrays) == []
        check(case, arrays)
