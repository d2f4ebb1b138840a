"""The pipeline as a whole: what its passes make of a def, observed from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions import compiler, knobs
from tensor_comprehensions.compiled import Compiled, Job
from tensor_comprehensions.compiler import PASSES, Pass, Strategy, compile_function, digest
from tensor_comprehensions.errors import CannotLower, InternalError
from tensor_comprehensions.loop_ir.nodes import Const, Kernel, Module, Store, Var
from tensor_comprehensions.loop_ir.simplify import simplify
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.runtime.host import host
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


def compiled(name: str, target: tc.Target, options: CpuOptions | None = None) -> Compiled:
    (function,) = compile_source(SOURCES[name])
    return compile_function(bind(function, SIZES[name]), SOURCES[name], options or CpuOptions(), target)


@pytest.mark.parametrize("name", ["softmax", "lookup"])
def test_the_kernel_as_c(name: str, golden: Any) -> None:
    golden.check(f"{name}.c", compiled(name, AVX512).source("c"))


@pytest.mark.parametrize("name", SOURCES)
def test_the_schedule(name: str, golden: Any) -> None:
    golden.check(f"{name}.schedule", compiled(name, AVX512).source("schedule"))


@pytest.mark.parametrize("target", [AVX512, AVX2], ids=["avx512", "avx2"])
def test_the_kernel_as_llvm(target: tc.Target, golden: Any) -> None:
    golden.check(f"lookup_{target.vector_bits}.ll", compiled("lookup", target).source("llvm"))


def test_a_stage_made_again_is_the_same() -> None:
    kernel = compiled("softmax", host())
    assert kernel.stage("emit") == kernel.source("llvm")
    assert kernel.stage("assemble") == kernel.code
    assert kernel.stage("lower") == kernel.stage("lower")
    with pytest.raises(InternalError, match="no pass 'nothing'"):
        kernel.stage("nothing")


def test_every_pass_is_named_once_and_timed() -> None:
    kernel = compiled("softmax", host())
    names = [step.name for step in PASSES]
    assert len(set(names)) == len(names)
    assert [name for name, _ in kernel.seconds] == names
    assert kernel.compile_seconds == pytest.approx(sum(seconds for _, seconds in kernel.seconds))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_simple_is_not_simplified_again(name: str) -> None:
    kernel = compiled(name, AVX512)
    simple = kernel.stage("simplify")
    assert all(simplify(k.body) is k.body for k in simple.kernels)
    again = next(step for step in PASSES if step.again)
    assert again.of(simple, kernel.job, {again.again: simple}) is simple
    other = kernel.stage("hoist")
    repeated = again.of(other, kernel.job, {again.again: simple})
    assert repeated == again.run(other, kernel.job) == kernel.stage(again.name)


def test_the_digest_depends_on_sizes_strides_options_and_target() -> None:
    (function,) = compile_source(SOURCES["softmax"])
    bound = bind(function, {"N": 4, "D": 5})
    first = digest(bound, CpuOptions(), AVX2)
    others = [
        digest(bind(function, {"N": 4, "D": 6}), CpuOptions(), AVX2),
        digest(bind(function, {"N": 4, "D": 5}, strides={"x": (1, 4)}), CpuOptions(), AVX2),
        digest(bound, CpuOptions(fusion="min"), AVX2),
        digest(bound, CpuOptions(), AVX512),
    ]
    assert len({first, *others}) == 5
    assert first == digest(bind(function, {"N": 4, "D": 5}), CpuOptions(), AVX2)


def refuse(reason: str) -> Callable[..., Module]:
    def lower(*_: object) -> Module:
        raise CannotLower(reason)

    return lower


def test_the_next_strategy_lowers_what_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "STRATEGIES", (Strategy("first", refuse("too odd")), *compiler.STRATEGIES))
    assert compiled("softmax", host()).kernels >= 1


def test_a_def_that_no_strategy_lowers_is_our_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiler, "STRATEGIES", (Strategy("first", refuse("too odd")), Strategy("second", refuse("no")))
    )
    with pytest.raises(InternalError, match="first: too odd; second: no"):
        compiled("softmax", host())


def test_a_pass_that_breaks_the_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(module: Module, _: Job) -> Module:
        target = module.arguments[-1]
        store = Store(target, (Var("ghost"),) * len(target.shape), Const(0.0, target.type))
        return replace(module, kernels=(Kernel("broken", store),))

    passes = tuple(Pass("vectorize", break_it) if step.name == "vectorize" else step for step in PASSES)
    monkeypatch.setattr(compiler, "PASSES", passes)
    with knobs.override(verify=True), pytest.raises(InternalError, match="softmax: after vectorize"):
        compiled("softmax", host())


def test_c_is_refused_with_a_reason_where_it_cannot_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiler.KINDS, "c", lambda _: refuse("no such word")())
    op = tc.define(SOURCES["softmax"]).softmax
    with pytest.raises(tc.ArgumentError, match="softmax cannot be printed as c: no such word"):
        op.compile(torch.ones(2, 3)).source("c")
