"""Python's stack while passes run."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler import cpu_passes
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.dtypes import INT64
from tensor_comprehensions.core.recursion_limit import PASS_FRAMES, raise_recursion_limit
from tensor_comprehensions.loop_ir import build
from tensor_comprehensions.loop_ir.nodes import Block, Let, Module, Stmt
from tensor_comprehensions.loop_ir.passes.simplify import simplify


def test_lets_may_nest_deeper_than_python_calls() -> None:
    deep: Stmt = Block(())
    for k in range(sys.getrecursionlimit()):
        deep = Let(f"v{k}", build.const(k, INT64), deep)
    with pytest.raises(RecursionError):
        simplify(deep)
    with raise_recursion_limit():
        assert simplify(deep) == Block(())  # no value is used


def test_every_pass_has_more_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, seen = sys.getrecursionlimit(), set[int]()

    def note_limit(module: Module) -> None:
        seen.add(sys.getrecursionlimit())

    monkeypatch.setattr(cpu_passes, "_verify", lambda name, step, module: note_limit(module))
    with knobs.override_knobs(cache="off", verify=True):
        tc.define("def f(float(N) x) -> (y) { y(i) = 2 * x(i) }").f(torch.rand(7))
    assert seen == {limit + PASS_FRAMES}
    assert sys.getrecursionlimit() == limit


def test_the_last_thread_restores_the_limit() -> None:
    limit, entered, leave = sys.getrecursionlimit(), threading.Event(), threading.Event()

    def compile_slowly() -> None:
        with raise_recursion_limit():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=compile_slowly)
    with raise_recursion_limit():
        other.start()
        assert entered.wait(60)
    assert sys.getrecursionlimit() == limit + PASS_FRAMES
    leave.set()
    other.join()
    assert sys.getrecursionlimit() == limit


def test_a_limit_that_someone_else_sets_stays() -> None:
    limit = sys.getrecursionlimit()
    try:
        with raise_recursion_limit():
            sys.setrecursionlimit(limit + 7)
        assert sys.getrecursionlimit() == limit + 7
    finally:
        sys.setrecursionlimit(limit)
