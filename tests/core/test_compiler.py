"""The pipeline as a whole: what its passes make of a def, observed from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler import compiled_kernel, cpu_passes
from tensor_comprehensions.compiler.compiled_kernel import CompiledCpuKernel, PassContext
from tensor_comprehensions.compiler.cpu_passes import PASSES, Pass, compile_function, kernel_digest
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir.nodes import Const, Kernel, Module, Store, Var
from tensor_comprehensions.loop_ir.passes.simplify import simplify
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.cpu import lower
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.target import AVX2, AVX512
from tensor_comprehensions.tc_lang import bind, compile_source

SOURCES = {
    "fcrelu": """def fcrelu(float(B,I) in, float(O,I) weight, float(O) bias) -> (out) {
    out(i,j) = bias(j)
    out(b,o) += in(b,i) * weight(o,i)
    out(i,j) = fmaxf(out(i,j), 0)
}""",
    "softmax": """def softmax(float(N,D) x) -> (out) {
    peak(n) max=! x(n,d)
    out(n,d) = exp(x(n,d) - peak(n))
    total(n) +=! out(n,d)
    out(n,d) = out(n,d) / total(n)
}""",
    "lookup": "def lookup(float(V,D) table, long(B) words) -> (out) { out(b,d) = table(words(b),d) }",
}
SIZES = {"fcrelu": {"B": 16, "I": 24, "O": 32}, "softmax": {"N": 64, "D": 100}, "lookup": {"V": 50, "D": 20, "B": 6}}


def compile_program(name: str, target: tc.CpuTarget, options: CpuOptions | None = None) -> CompiledCpuKernel:
    (function,) = compile_source(SOURCES[name])
    return compile_function(bind(function, SIZES[name]), SOURCES[name], options or CpuOptions(), target)


@pytest.mark.parametrize("name", ["softmax", "lookup"])
def test_the_kernel_as_c(name: str, golden: Any) -> None:
    golden.check(f"{name}.c", compile_program(name, AVX512).source("c"))


@pytest.mark.parametrize("name", SOURCES)
def test_the_schedule(name: str, golden: Any) -> None:
    golden.check(f"{name}.schedule", compile_program(name, AVX512).source("schedule"))


@pytest.mark.parametrize("target", [AVX512, AVX2], ids=["avx512", "avx2"])
def test_the_kernel_as_llvm(target: tc.CpuTarget, golden: Any) -> None:
    golden.check(f"lookup_{target.vector_bits}.ll", compile_program("lookup", target).source("llvm"))


def test_a_stage_made_again_is_the_same() -> None:
    kernel = compile_program("softmax", host())
    made = kernel.rerun_all_until("assemble", kernel.context)
    assert (made["emit"], made["assemble"]) == (kernel.source("llvm"), kernel.code)
    assert made["lower"] == kernel.rerun_until("lower")
    assert kernel.rerun_until("assemble") == kernel.code
    with pytest.raises(InternalError, match="no pass 'nothing'"):
        kernel.rerun_until("nothing")


def test_the_stages_of_the_last_kernel_are_kept_as_long_as_it_lives() -> None:
    first, second = compile_program("softmax", AVX512), compile_program("lookup", AVX512)
    lowered = second.rerun_until("lower")
    assert second.rerun_until("lower") is lowered
    assert second.source("loops") == second.source("loops")
    assert first.rerun_until("simplify") is first.rerun_until("simplify")
    again = second.rerun_until("lower")
    assert again is not lowered
    assert again == lowered
    del second
    assert compiled_kernel._last is None


def test_every_pass_is_named_once_and_timed() -> None:
    kernel = compile_program("softmax", host())
    names = [step.name for step in PASSES]
    assert len(set(names)) == len(names)
    assert [name for name, _ in kernel.seconds] == names
    assert kernel.compile_seconds == pytest.approx(sum(seconds for _, seconds in kernel.seconds))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_simple_is_not_simplified_again(name: str) -> None:
    kernel = compile_program(name, AVX512)
    simple = kernel.rerun_until("simplify")
    assert all(simplify(k.body) is k.body for k in simple.kernels)
    again = next(step for step in PASSES if step.repeats)
    assert again.apply(simple, kernel.context, {again.repeats: simple}) is simple
    other = kernel.rerun_until("hoist")
    repeated = again.apply(other, kernel.context, {again.repeats: simple})
    assert repeated == again.run(other, kernel.context) == kernel.rerun_until(again.name)


def test_the_digest_depends_on_sizes_strides_options_and_target() -> None:
    (function,) = compile_source(SOURCES["softmax"])
    bound = bind(function, {"N": 4, "D": 5})
    first = kernel_digest(bound, CpuOptions(), AVX2)
    others = [
        kernel_digest(bind(function, {"N": 4, "D": 6}), CpuOptions(), AVX2),
        kernel_digest(bind(function, {"N": 4, "D": 5}, strides={"x": (1, 4)}), CpuOptions(), AVX2),
        kernel_digest(bound, CpuOptions(fusion="min"), AVX2),
        kernel_digest(bound, CpuOptions(), AVX512),
    ]
    assert len({first, *others}) == 5
    assert first == kernel_digest(bind(function, {"N": 4, "D": 5}), CpuOptions(), AVX2)


def refuse(reason: str) -> Callable[..., Module]:
    def lower(*_: object) -> Module:
        raise CannotLower(reason)

    return lower


def test_a_def_that_is_not_lowered_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "lower_cpu", refuse("too odd"))
    with pytest.raises(InternalError, match="softmax cannot be lowered: too odd"):
        compile_program("softmax", host())


def test_a_pass_that_breaks_the_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(module: Module, _: PassContext) -> Module:
        target = module.arguments[-1]
        store = Store(target, (Var("ghost"),) * len(target.shape), Const(0.0, target.type))
        return replace(module, kernels=(Kernel("broken", store),))

    passes = tuple(Pass("vectorize", break_it) if step.name == "vectorize" else step for step in PASSES)
    monkeypatch.setattr(cpu_passes, "PASSES", passes)
    with knobs.override_knobs(verify=True), pytest.raises(InternalError, match="softmax: after vectorize"):
        compile_program("softmax", host())


def test_c_is_refused_with_a_reason_where_it_cannot_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cpu_passes.KINDS, "c", lambda _: refuse("no such word")())
    op = tc.define(SOURCES["softmax"]).softmax
    with pytest.raises(tc.ArgumentError, match="softmax cannot be printed as c: no such word"):
        op.compile(torch.ones(2, 3)).source("c")
