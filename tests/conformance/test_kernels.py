"""The conformance programs through the public API: compiled kernels on torch's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, agrees

import tensor_comprehensions as tc

pytestmark = pytest.mark.filterwarnings("ignore:.*a quotient of integers rounds down")  # as it is meant there


def call(case: Case, inputs: dict[str, Any], initial: dict[str, Any]) -> list[Any]:
    """The results of the def that a case calls, as arrays."""
    library = tc.define(case.source)
    op = getattr(library, case.record.get("fn") or case.source.split("def", 1)[1].split("(")[0].strip())
    results = op(*inputs.values(), **initial)
    return [np.asarray(r) for r in (results if isinstance(results, tuple) else (results,))]


@pytest.mark.parametrize("case", [c for c in CASES if c.error is None], ids=lambda c: c.id)
def test_value(case: Case) -> None:
    inputs, initial = case.arrays()
    try:
        results = call(case, inputs, initial)
    except tc.TCError:
        assert case.record.get("may_reject"), case.source
        return
    assert agrees(results, case.expected(inputs, initial)), results


@pytest.mark.parametrize("case", [c for c in CASES if c.error is not None], ids=lambda c: c.id)
def test_error(case: Case) -> None:
    assert case.error is not None
    with pytest.raises(case.error):
        call(case, *case.arrays())
