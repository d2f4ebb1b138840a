"""gradcheck over the conformance programs that are differentiable, in double precision."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import CASES, Case

import tensor_comprehensions as tc
from tensor_comprehensions.core.dtypes import FLOAT64
from tensor_comprehensions.core.errors import CheckError
from tensor_comprehensions.tc_lang import compile_source

pytestmark = pytest.mark.filterwarnings("ignore:.*a quotient of integers rounds down")  # as it is meant there


def differentiable() -> Iterator[Case]:
    """Programs with floating inputs and outputs, all of them in double precision once they are doubled."""
    return (case for case in all_in_double() if all(a.size for part in case.arrays() for a in part.values()))


def all_in_double() -> Iterator[Case]:
    """Those, and with them the ones whose arrays are empty: gradcheck has nothing to vary there."""
    for case in CASES:
        if case.error is not None or case.record.get("may_reject"):
            continue
        try:
            function = next(f for f in compile_source(convert_to_double(case)) if f.name == find_called_def(case))
        except CheckError:  # its literals make it a program in single precision
            continue
        outputs = [function.tensor(r).dtype for r in function.returns]
        inputs = [p.dtype for p in (*function.parameters, *function.inouts)]
        floats = [t for t in (*inputs, *outputs) if t.is_float]
        if any(t.is_float for t in inputs) and any(t.is_float for t in outputs) and set(floats) == {FLOAT64}:
            yield case


def convert_to_double(case: Case) -> str:
    """The text of a case in double precision."""
    return re.sub(r"\bfloat(32|64)?(?=[\s(])", "double", case.source)


def find_called_def(case: Case) -> str:
    return str(case.record.get("fn") or case.source.split("def", 1)[1].split("(")[0].strip())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every third program, and with `--long` all; of those with empty arrays all."""
    checked = list(differentiable())
    cases = checked[:: 1 if metafunc.config.getoption("--long") else 3]
    if metafunc.function is test_empty_arrays_have_gradients:
        cases = [case for case in all_in_double() if case not in checked]
    metafunc.parametrize("case", cases, ids=[c.id for c in cases])


def test_gradients_agree_with_finite_differences(case: Case) -> None:
    op = tc.define(convert_to_double(case))[find_called_def(case)]
    inputs, initial = case.arrays()
    values = [tensor(x) for x in (*inputs.values(), *initial.values())]

    def call(*everything: Any) -> Any:
        results = op(*everything[: len(inputs)], **dict(zip(initial, everything[len(inputs) :], strict=True)))
        return tuple(r for r in (results if isinstance(results, tuple) else (results,)) if r.is_floating_point())

    assert torch.autograd.gradcheck(call, tuple(values), fast_mode=True)


def test_empty_arrays_have_gradients(case: Case) -> None:
    op = tc.define(convert_to_double(case))[find_called_def(case)]
    inputs, initial = ({name: tensor(a) for name, a in part.items()} for part in case.arrays())
    results = op(*inputs.values(), **initial)
    floats = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
    values = [x for x in (*inputs.values(), *initial.values()) if x.requires_grad]
    found = torch.autograd.grad(floats, values, [torch.ones_like(r) for r in floats])
    assert [g.shape for g in found] == [x.shape for x in values]
    assert all(g.isfinite().all() for g in found)


def tensor(array: Any) -> torch.Tensor:
    x = torch.from_numpy(array)
    return x.double().clone(memory_format=torch.contiguous_format).requires_grad_() if x.is_floating_point() else x
