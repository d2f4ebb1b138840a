"""Nobody looks for cycles while something is compiled, and everybody does again afterwards."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tensor_comprehensions import compiler, define, knobs
from tensor_comprehensions.uncollected import UNCOLLECTED, settle


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_nests_and_ends_with_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), UNCOLLECTED:
        with UNCOLLECTED:
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("inside")
    assert gc.isenabled()


def test_who_collects_nothing_goes_on_like_that() -> None:
    gc.disable()
    with UNCOLLECTED:
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_the_last_thread_to_leave_lets_python_look_again() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with UNCOLLECTED:
            entered.set()
            assert leave.wait(20)

    thread = threading.Thread(target=other)
    with UNCOLLECTED:
        thread.start()
        assert entered.wait(20)
    assert not gc.isenabled()
    leave.set()
    thread.join(20)
    assert gc.isenabled()


def test_what_is_there_counts_as_old_unless_somebody_froze_it() -> None:
    young: list[list[int]] = [[]]
    settle()
    assert any(x is young for x in gc.get_objects(2))
    gc.freeze()
    frozen = gc.get_freeze_count()
    settle()
    assert gc.get_freeze_count() == frozen > 0
    gc.unfreeze()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_looks_again() -> None:
    with UNCOLLECTED:
        pid = os.fork()
        if not pid:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_kernel_is_made_without_and_runs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    legalise, lower, *others = compiler.PASSES

    def watched(bound: Any, job: Any) -> Any:
        seen.append(gc.isenabled())
        return lower.run(bound, job)

    monkeypatch.setattr(compiler, "PASSES", (legalise, replace(lower, run=watched), *others))
    x = torch.randn(7)
    with knobs.override(cache="off"):
        assert torch.equal(define("def uncollected(float(N) x) -> (y) { y(i) = 2 * x(i) }").uncollected(x), 2 * x)
    assert seen == [False]
    assert gc.isenabled()
