"""The examples run, agree with torch, and need no more memory than their statements one by one would."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.tc_lang.ir import Role

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load("demo")
CASES = {case.name: case for case in demo.cases()}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Any:
    return CASES[request.param]


def test_the_demo_agrees_with_torch(case: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(case, 1)
    row = capsys.readouterr().out
    assert row.startswith(case.name)
    assert "WRONG" not in row


def test_temporaries_take_no_more_than_unfused(case: Any) -> None:
    op = getattr(tc.define((EXAMPLES / case.file).read_text()), case.name)
    kernel = op.compile(*case.arguments, **case.initial)
    tensors = kernel.compiled.bound.tensors
    unfused = sum(t.size * t.dtype.size for t in tensors if t.role is Role.TEMPORARY)
    assert kernel.resources["temporary_bytes"] <= unfused


def test_the_demo_runs_every_example() -> None:
    defined = {op.__name__ for file in EXAMPLES.glob("*.tc") for op in tc.define(file.read_text())}
    assert set(CASES) == defined


def test_a_wrong_result_is_noticed() -> None:
    x = torch.randn(4, 5)
    assert demo.error(x, x) == demo.error((x, x), (x, x)) == 0
    assert demo.error((x, x), (x, x + 1)) > 1e-4
    assert demo.error(x, x[:1]) == demo.error(x, x.double()) == float("inf")


def test_the_page_of_operators_shows_every_def() -> None:
    page = (EXAMPLES.parent / "docs" / "operators.md").read_text()
    for file in EXAMPLES.glob("*.tc"):
        assert file.read_text().strip() in page, file.name


def test_the_recommender_learns(capsys: pytest.CaptureFixture[str]) -> None:
    train = load("train")
    first, last = train.train(epochs=5)
    assert train.NOISE < last < 0.3 * first
    assert capsys.readouterr().out.count("error") == 5
