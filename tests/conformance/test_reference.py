"""The conformance programs against the reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, agrees

from tensor_comprehensions.core.dtypes import DTYPES
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.core.memory_layout import contiguous_strides
from tensor_comprehensions.tc_lang import bind, compile_source
from tensor_comprehensions.tc_lang.binding.match_arguments import TensorType, match_arguments
from tensor_comprehensions.tc_lang.ir import BoundFunction
from tensor_comprehensions.tc_lang.reference.evaluator import evaluate_def
from tensor_comprehensions.tc_lang.transforms.legalize import legalize


def type_of(a: Any) -> TensorType:
    return TensorType(DTYPES[a.dtype.name], a.shape, contiguous_strides(a.shape))


def bound_case(case: Case, inputs: dict[str, Any], initial: dict[str, Any]) -> BoundFunction:
    """Compile and bind a program for its arrays."""
    functions = {f.name: f for f in compile_source(case.source)}
    function = functions[case.record.get("fn", next(iter(functions)))]
    types = [type_of(a) for a in inputs.values()]
    scalars = {name: int(inputs[name]) for name in function.scalars}
    binding = match_arguments(function, types, {name: type_of(a) for name, a in initial.items()}, scalars)
    return bind(function, binding.sizes, binding.scalars, binding.strides)


def run(case: Case) -> tuple[BoundFunction, dict[str, Any]]:
    inputs, initial = case.arrays()
    bound = bound_case(case, inputs, initial)
    return bound, evaluate_def(bound, {**inputs, **initial})


@pytest.mark.parametrize("case", [c for c in CASES if c.error is None], ids=lambda c: c.id)
def test_value(case: Case) -> None:
    inputs, initial = case.arrays()
    try:
        bound, results = run(case)
    except TCError:
        assert case.record.get("may_reject"), case.source
        return
    assert agrees([results[name] for name in case.returns], case.expected(inputs, initial)), results
    starts = case.record.get("starts", {})
    for name, start in zip(bound.returns, bound.starts, strict=True):
        assert list(start) == starts.get(name, [0] * len(start))


@pytest.mark.parametrize("case", [c for c in CASES if c.error is None], ids=lambda c: c.id)
def test_legalized_value(case: Case) -> None:
    inputs, initial = case.arrays()
    bound = bound_case(case, inputs, initial)
    legal = legalize(bound)
    assert not any(s.reads_own_target for s in legal.statements)
    before = evaluate_def(bound, {**inputs, **initial})
    after = evaluate_def(legal, {**inputs, **initial})
    for name, expected in before.items():
        np.testing.assert_allclose(after[name].astype("f8"), expected.astype("f8"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c.error is not None], ids=lambda c: c.id)
def test_error(case: Case) -> None:
    assert case.error is not None
    with pytest.raises(case.error):
        run(case)
