"""Versions of torch that no release was tested with: a test decides whether machine code serves calls."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.cache import package_digest
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.single_flight import SingleFlightCache
from tensor_comprehensions.runtime.fastpath import availability, boxed, call_cache, self_test, torch_layout
from tensor_comprehensions.runtime.fastpath.availability import FastPathDecision, decide_fast_path
from tensor_comprehensions.runtime.fastpath.forked_check import NoAnswer, run_forked
from tensor_comprehensions.runtime.fastpath.self_test import SelfTest, run_self_test
from tensor_comprehensions.runtime.fastpath.torch_layout import TensorLayout, UnknownLayout, tensor_layout

LAYOUT = tensor_layout()
NEGATED = torch._C._dispatch_keys(torch.zeros(1, dtype=torch.complex64).conj().imag).raw_repr()


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not decided yet."""
    monkeypatch.setattr(availability, "_verdict", SingleFlightCache(1))
    return monkeypatch


@pytest.fixture
def untested(undecided: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The same, with a torch that no release was tested with."""
    undecided.setattr(availability, "TESTED", {})
    return undecided


# --- the test ----------------------------------------------------------------------------------------------------


def test_all_answers_are_right_here() -> None:
    assert run_forked(SelfTest().find_wrong_answer, seconds=600) == ""


DOCTORED = {
    "keys are read behind their place": replace(LAYOUT, keys=LAYOUT.keys + 8),
    "the keys of a negated view are those of an ordinary tensor": replace(LAYOUT, inference=NEGATED),
    "what follows the tensor of an object is its tensor": replace(LAYOUT, tensor=LAYOUT.tensor + 8),
}
CRASHING = replace(LAYOUT, tensor=0)
"""The number of references to an object is taken for the address of its tensor."""
SOURCE = "def subtract(float(N) x, float(N) y) -> (z) { z(i) = x(i) - y(i) }"


REPLACED: list[object] = []
"""The machine code of this process: builtins of earlier calls point to it, and the garbage collector reads them."""


def decide_for_layout(layout: TensorLayout) -> str:
    """The reason why calls do not use a wrong layout, in a process that knows no other."""
    torch_layout._layouts, torch_layout.probe_in_thread = SingleFlightCache(1), lambda: layout
    for module in (call_cache, boxed):
        REPLACED.append(module._code)  # type: ignore[attr-defined]
        module._code = SingleFlightCache(1)  # type: ignore[attr-defined]
    availability._verdict = SingleFlightCache(1)
    decision = decide_fast_path()
    assert not decision.available
    return decision.reason


@pytest.mark.parametrize("layout", DOCTORED.values(), ids=list(DOCTORED))
def test_a_doctored_layout_ends_on_the_slow_path(layout: TensorLayout) -> None:
    found = run_forked(lambda: decide_for_layout(layout), seconds=600)
    assert found.startswith(f"the self-test on torch {torch.__version__} failed: ")


def test_calls_are_right_where_machine_code_would_crash() -> None:
    def call() -> str:
        reason = decide_for_layout(CRASHING)
        op = tc.define(SOURCE.replace("subtract", "doctored")).doctored
        for _ in range(3):
            for a in (x, x._neg_view(), x.clone().requires_grad_()):
                assert torch.equal(op(a, y), a - y)
                assert torch.equal(op.overload(a, y), a - y)
        return reason

    x, y = torch.randn(5), torch.randn(5)
    tc.define(SOURCE).subtract(x, y)  # imports what a call imports: the child would each time
    found = run_forked(call, seconds=600)
    assert found == f"the self-test on torch {torch.__version__} failed: it crashed with signal {int(signal.SIGSEGV)}"


# --- what decides ------------------------------------------------------------------------------------------------


def test_a_version_that_was_tested_needs_no_test(undecided: pytest.MonkeyPatch) -> None:
    undecided.setattr(self_test, "run_self_test", lambda layout: 1 / 0)
    undecided.setattr(availability, "TESTED", {"7.8": LAYOUT})
    undecided.setattr(torch, "__version__", "7.8.9+cpu")
    assert decide_fast_path() == FastPathDecision(True, "this release was tested with torch 7.8")


@pytest.mark.parametrize("wrong", ["", "the answer to a slice is nothing"])
def test_other_versions_layouts_and_processors_are_tested(wrong: str, undecided: pytest.MonkeyPatch) -> None:
    undecided.setattr(self_test, "run_self_test", lambda layout: wrong)
    undecided.setattr(torch, "__version__", "7.8.9")
    expected = f"the self-test on torch 7.8.9 {f'failed: {wrong}' if wrong else 'passed'}"
    for tested, x86 in (({"7.9": LAYOUT}, True), ({"7.8": replace(LAYOUT, keys=0)}, True), ({"7.8": LAYOUT}, False)):
        undecided.setattr(availability, "TESTED", tested)
        undecided.setattr(availability, "is_x86", lambda x86=x86: x86)
        undecided.setattr(availability, "_verdict", SingleFlightCache(1))
        assert decide_fast_path() == FastPathDecision(not wrong, expected)


def test_a_version_known_as_bad_is_not_used(undecided: pytest.MonkeyPatch) -> None:
    undecided.setattr(availability, "KNOWN_BAD", {"7.8": "results are lost"})
    undecided.setattr(torch, "__version__", "7.8.0a0")
    assert decide_fast_path() == FastPathDecision(False, "torch 7.8.0a0: results are lost")


def test_a_torch_without_a_symbol_or_a_handle_takes_the_slow_path(undecided: pytest.MonkeyPatch) -> None:
    undecided.setattr(torch_layout, "_symbols", SingleFlightCache(1))
    with undecided.context() as patch:
        patch.setattr(torch_layout, "_C10", ("no_such_function",))
        decision = decide_fast_path()
        assert not decision.available
        assert decision.reason.startswith("c10 lacks what the machine code of calls needs: ")
    undecided.setattr(availability, "_verdict", SingleFlightCache(1))
    undecided.setattr(torch_layout, "_layouts", SingleFlightCache(1))
    with undecided.context() as patch:
        patch.setattr(torch._C, "_aoti", object())
        assert "has no handles of tensors" in decide_fast_path().reason
        with pytest.raises(UnknownLayout):
            tensor_layout()


# --- verdicts in the cache ---------------------------------------------------------------------------------------


class Child:
    """Stands for the child process: answers, and counts how often."""

    def __init__(self, answer: str | Exception) -> None:
        self.answer, self.runs = answer, 0

    def __call__(self, check: Callable[[], str]) -> str:
        self.runs += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Exception], Child]:
    def make(answer: str | Exception) -> Child:
        made = Child(answer)
        monkeypatch.setattr(self_test, "run_forked", made)
        return made

    monkeypatch.setattr(package_digest, "_stamp", lambda: package_digest._imported)
    return make


@pytest.mark.parametrize("answer", ["", "it crashed with signal 11"])
def test_a_verdict_is_kept(answer: str, child: Callable[[str], Child], tmp_path: Path) -> None:
    made = child(answer)
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        assert [run_self_test(LAYOUT) for _ in range(3)] == [answer] * 3
        assert made.runs == 1
        assert run_self_test(replace(LAYOUT, keys=8)) == answer
        assert made.runs == 2
    with knobs.override_knobs(cache="read", cache_dir=str(tmp_path)):
        assert run_self_test(LAYOUT) == answer
        assert made.runs == 2
        assert run_self_test(replace(LAYOUT, keys=16)) == answer
        assert run_self_test(replace(LAYOUT, keys=16)) == answer
        assert made.runs == 4
    with knobs.override_knobs(cache="off", cache_dir=str(tmp_path)):
        assert run_self_test(LAYOUT) == answer
        assert made.runs == 5


def test_a_verdict_is_for_one_installation(
    child: Callable[[str], Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = child("")
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        run_self_test(LAYOUT)
        monkeypatch.setattr(torch.version, "git_version", "of another build")
        run_self_test(LAYOUT)
        assert made.runs == 2
        monkeypatch.setattr("sys.version", "of another Python")
        run_self_test(LAYOUT)
        assert made.runs == 3


def test_a_damaged_verdict_is_made_again(child: Callable[[str], Child], tmp_path: Path) -> None:
    made = child("")
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        store, name = self_test.current_store(), self_test._entry_name(LAYOUT)
        assert name is not None
        for payload in (b"", b"pass", b"passed!", bytes(9)):
            store.write(name, payload)
            before = made.runs
            assert run_self_test(LAYOUT) == ""
            assert made.runs == before + 1


def test_no_answer_is_not_kept(child: Callable[[Exception], Child], untested: Any, tmp_path: Path) -> None:
    made = child(NoAnswer("no child process can be started"))
    with knobs.override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        decision = decide_fast_path()
        assert not decision.available
        assert decision.reason.endswith("did not run: no child process can be started")
        made.answer = ""
        assert run_self_test(LAYOUT) == ""
        assert made.runs == 2


# --- forked children ---------------------------------------------------------------------------------------------


def test_a_child_answers_crashes_or_hangs() -> None:
    def crash() -> str:
        ctypes.string_at(0)
        return "alive"

    def leave() -> str:
        os._exit(3)

    assert run_forked(lambda: "two\nlines") == "two lines"
    assert run_forked(lambda: "x" * 10_000) == "x" * 1000
    assert run_forked(lambda: str(1 // 0)).startswith("ZeroDivisionError")
    assert run_forked(crash) == f"it crashed with signal {int(signal.SIGSEGV)}"
    assert run_forked(leave) == "it ended without an answer"
    with pytest.raises(NoAnswer, match="did not end"):
        run_forked(lambda: str(time.sleep(60)), seconds=0.1)


def test_a_child_of_a_program_that_ignores_the_ends_of_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert run_forked(lambda: "done") == "done"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_no_child_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(11, "no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(NoAnswer, match="no more processes"):
        run_forked(lambda: "")


def test_a_child_does_not_wait_for_a_thread_that_waits_for_it() -> None:
    """A thread in the middle of making a value needs the verdict, too."""
    store: SingleFlightCache[str, str] = SingleFlightCache(4)
    started, answered = threading.Event(), threading.Event()

    def wait() -> str:
        started.set()
        assert answered.wait(60)
        return "made"

    thread = threading.Thread(target=lambda: store.get("other", wait))
    thread.start()
    assert started.wait(60)
    try:
        assert store.get("verdict", lambda: run_forked(lambda: "passed")) == "passed"
    finally:
        answered.set()
        thread.join()
    assert store.get("other", lambda: "not made") == "made"
