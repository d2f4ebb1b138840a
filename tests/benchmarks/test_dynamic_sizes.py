"""The benchmark of kernels for a range of sizes: its cases have one kernel for all of their sizes."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from benchmarks import dynamic_sizes
from benchmarks.dynamic_sizes import CASES, Case
from benchmarks.runner import def_name


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_one_kernel_is_for_all_sizes(case: Case) -> None:
    made = tc.define(case.source, dynamic=set(case.dynamic))
    op = getattr(made, def_name(case.source))
    for size in (5, 9):
        arguments = case.arguments(size)
        torch.testing.assert_close(op(*arguments), case.define()(*arguments), rtol=1e-4, atol=1e-4)
    assert [kernel.is_range for kernel in op.kernels] == [True]


def test_reports_name_what_misses_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_sizes, "compile_ratio", lambda case, repeat: (0.25, 4.5))
    monkeypatch.setattr(dynamic_sizes, "run_ratios", lambda case, seconds: {8: 1.6, 33: 1.0})
    assert dynamic_sizes.main(["--cases", "pointwise*"]) == 0
    first, mean = capsys.readouterr().out.splitlines()
    expected = "pointwise by length compiles in 0.25 s, 4.50 of exact (missed) 8: 1.60! 33: 1.00"
    assert " ".join(first.split()) == expected
    assert mean == "geometric mean of other sizes: 1.265 (at most 1.15)"
