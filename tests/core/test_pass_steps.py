"""Steps inside a pass are plain calls, which a watcher of the context sees."""

from __future__ import annotations

from contextvars import copy_context
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.core.pass_steps import StepReport, run_step, watch_steps

CHAIN = "def f(float(N,K) x, float(M,K) w) -> (o) { o(n,m) +=! x(n,k) * w(m,k)  o(n,m) = fmax(o(n,m), 0) }"


def test_nothing_is_reported_outside_of_a_watch() -> None:
    assert run_step("double", lambda: 2 * 4) == 8


def test_a_watcher_sees_names_times_and_texts_in_order() -> None:
    seen: list[StepReport] = []
    with watch_steps(seen.append):
        run_step("double", lambda: 2 * 4, str)
        run_step("negate", lambda: -4)
        with watch_steps(None):
            run_step("hidden", lambda: 0)
    run_step("later", lambda: 0)
    assert [s.name for s in seen] == ["double", "negate"]
    assert all(s.seconds >= 0 for s in seen)
    assert seen[0].text is not None
    assert seen[0].text() == "8"
    assert seen[1].text is None


def test_other_contexts_are_not_watched() -> None:
    seen: list[StepReport] = []
    other = copy_context()
    with watch_steps(seen.append):
        other.run(run_step, "elsewhere", lambda: 0)
    assert not seen


def test_a_failing_step_is_not_reported() -> None:
    seen: list[StepReport] = []
    with watch_steps(seen.append), pytest.raises(ZeroDivisionError):
        run_step("divide", lambda: 1 // 0)
    assert not seen


CPU_STEPS = ["simplify_domains", "reorder", "split_reductions", "schedule"]
GPU_STEPS = ["scop", "map", "f.generate", "f.unroll", "f.partition"]


@pytest.mark.parametrize(("target", "steps"), [(None, CPU_STEPS), ("cuda:sm_80", GPU_STEPS)], ids=["cpu", "gpu"])
def test_the_steps_of_the_lowering_are_dumped(target: str | None, steps: list[str], tmp_path: Path) -> None:
    with override_knobs(dump=str(tmp_path), cache="off"):
        kernel = tc.define(CHAIN).f.compile(torch.randn(70, 30), torch.randn(50, 30), target=target)
    (folder,) = tmp_path.iterdir()
    names = sorted(path.name for path in folder.glob("04_lower.*_*.txt"))
    assert [name.split("_", 2)[2].removesuffix(".txt") for name in names] == steps
    (schedule,) = folder.glob("04_lower.*_schedule.txt" if target is None else "04_lower.*_map.txt")
    first = schedule.read_text().splitlines()[0]
    assert first.split(":")[0] in kernel.source("schedule")
