"""Line tables change no machine code, and lead most instructions to loops and statements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite.binding.object_file import SectionIteratorRef

import tensor_comprehensions as tc
from tensor_comprehensions.codegen.llvm.debug_lines import emit_llvm_with_lines
from tensor_comprehensions.compiler.compiled_kernel import PassContext
from tensor_comprehensions.compiler.cpu_passes import PASSES
from tensor_comprehensions.core.decisions import open_book
from tensor_comprehensions.explain.assembly import list_assembly
from tensor_comprehensions.explain.kernel_report import BY_HAND, SAME_BYTES
from tensor_comprehensions.explain.listings import list_loops
from tensor_comprehensions.loop_ir.nodes import Module, Store
from tensor_comprehensions.loop_ir.show import format_program, list_lines, separate_statements
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.runtime.cpu import host_symbols, object_code
from tensor_comprehensions.runtime.cuda import nvrtc
from tensor_comprehensions.target import AVX512
from tests.helpers.gpu_suite import Case

from .test_origins import GROUPS, cases
from .test_report import small_arguments

EXAMPLES = sorted(Path("examples").glob("*.tc"))

LEAST_SHARE = 0.7
"""Of the instructions of all programs together that have a line of the loops."""


def lower(case: Case) -> Module:
    """The loops that are printed as code."""
    context, value, results = PassContext(CpuOptions(), AVX512), case.bound, {}
    for step in PASSES:
        if step.name == "emit":
            break
        made: Any = step.apply(value, context, results)
        value = results[step.name] = made
    module: Any = value
    assert isinstance(module, Module)
    return module


@pytest.mark.sampled
@pytest.mark.parametrize("group", range(GROUPS))
def test_machine_code_with_and_without_lines_is_the_same(group: int) -> None:
    linked = instructions = 0
    for case in cases()[group::GROUPS]:
        with open_book():
            module = separate_statements(lower(case))
        lines, symbols = list(list_lines(module)), host_symbols.vector_functions()
        assert "\n".join(text for text, _ in lines) + "\n" == format_program(module)
        plain = object_code.assemble(PASSES[-3].run(module, PassContext(CpuOptions(), AVX512)), AVX512)
        text = emit_llvm_with_lines(module, AVX512, symbols, lines)
        code, assembly = object_code.assemble_and_print(text, AVX512)
        sections = object_code.code_sections(plain.data)
        assert sections
        assert any(map(len, sections.values()))
        assert object_code.code_sections(code.data) == sections, case.name
        loops = list_loops(module, lines, [text for text, _ in lines])
        for (_, s), line in zip(lines, loops.lines, strict=True):
            assert line.statements or not isinstance(s, Store), line
        listing = list_assembly(assembly, loops)
        own = [line for line in listing.lines if line.text.startswith(" ")]
        found, total = listing.count_links()
        linked, instructions = linked + found, instructions + total
        assert all(loops.lines[line.loop - 1].statements == line.statements for line in own if line.loop)
    assert linked >= LEAST_SHARE * instructions > 0, linked / instructions


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
@pytest.mark.sampled
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_code_of_nvrtc_with_and_without_lines_is_the_same(path: Path) -> None:
    """Each instruction of PTX leads to a line of CUDA, and that to a line of the loops and its statements."""
    for op in tc.define(path.read_text()):
        arguments, initial = small_arguments(op)
        report = op.explain(*arguments, **initial, target="cuda:sm_90")
        assert report.matches == SAME_BYTES
        loops, cuda, ptx = map(report.find_listing, ("loops", "cuda", "ptx"))
        assert cuda.text == op.compile(*arguments, **initial, target="cuda:sm_90").source("cuda").rstrip()
        linked, instructions = ptx.count_links()
        assert linked >= LEAST_SHARE * instructions > 0, linked / instructions
        for line in (*cuda.lines, *ptx.lines):
            assert not line.loop or line.statements == loops.lines[line.loop - 1].statements
        assert {name for line in ptx.lines for name in line.statements} == {s.name for s in report.statements}


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
@pytest.mark.parametrize(("others", "matches"), [(2, SAME_BYTES), (100, BY_HAND)])
def test_an_assembler_that_is_not_deterministic(monkeypatch: pytest.MonkeyPatch, others: int, matches: str) -> None:
    """NVRTC 13 compiles `moments` of 36,864 columns for sm_90 in two ways, with lines or without."""
    defs = tc.define("def f(float(N) x) -> (y) { y(n) = x(n) + 1 } def g(float(N) x) -> (y) { y(n) = exp(x(n)) }")
    x = torch.rand(1000)
    other = defs.g.compile(x, target="cuda:sm_90").compiled.cubin
    made = [other] * others
    real = nvrtc.compile_with_lines

    def compile_differently(text: str, architecture: str) -> tuple[str, nvrtc.Cubin]:
        ptx, code = real(text, architecture)
        return ptx, made.pop() if made else code

    monkeypatch.setattr(nvrtc, "compile_with_lines", compile_differently)
    assert defs.f.explain(x, target="cuda:sm_90").matches == matches


@pytest.mark.skipif(not nvrtc.is_nvrtc_available(), reason="compiling CUDA needs NVRTC")
def test_shared_memory_has_no_bytes_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its section has a size, which once was read from behind the file."""
    text = """extern "C" __global__ void f(float *x) {
        __shared__ float s[12000];
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = s[11999 - threadIdx.x];
    }"""
    binary = nvrtc.compile_text(text, "sm_90").binary
    read: list[int] = []
    data = SectionIteratorRef.data
    monkeypatch.setattr(SectionIteratorRef, "data", lambda s: read.append(s.size()) or data(s))
    sections = object_code.code_sections(binary)
    assert ".text.f" in sections
    assert sum(read) < len(binary)
