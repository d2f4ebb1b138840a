"""The reference evaluator of sparse defs gives the values and the stored places that the conformance programs name."""

from __future__ import annotations

import numpy as np
import pytest
from sparse_cases import ERRORS, Case, cases, complete, format_of

from tensor_comprehensions.core.dtypes import BFLOAT16
from tensor_comprehensions.core.errors import TCError
from tensor_comprehensions.sparse.shared_sparsity import shared_places
from tensor_comprehensions.tc_lang import compile_source
from tensor_comprehensions.tc_lang.binding.bind import bind
from tensor_comprehensions.tc_lang.ir import Const, Function, Size
from tensor_comprehensions.tc_lang.reference.numpy_expression import convert_array, numpy_dtype
from tensor_comprehensions.tc_lang.reference.sparse_evaluator import StoredTensor, evaluate_sparse
from tensor_comprehensions.tc_lang.semantics.sparse_rules import with_formats

RUN = [c for c in cases() if "error" not in c.record and "tc" in c.record and "by_coordinates" not in c.record]
REFUSED = [c for c in cases() if c.record.get("error") in ("parse", "check", "range") or "define_formats" in c.record]
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-3}


def function_of(case: Case) -> Function:
    """The def with the formats that its operands and the case give it."""
    function = compile_source(case.record["tc"])[-1]
    formats = {name: x.format for name, x in case.operands().items() if x.format is not None}
    ranks = {t.name: t.rank for t in function.tensors}
    for name, text in case.record.get("define_formats", {}).items():
        formats[name] = format_of(text, ranks.get(name, 2))
    return with_formats(function, formats)


@pytest.mark.parametrize("case", RUN, ids=lambda c: c.id)
def test_values_and_places(case: Case) -> None:
    function, operands = function_of(case), case.operands() | case.initial()
    sizes: dict[str, int] = {}
    for t in function.parameters:
        for extent, n in zip(t.extents or (), operands[t.name].values.shape, strict=True):
            if isinstance(extent, Size):
                sizes[extent.name] = n
            else:
                assert isinstance(extent, Const)
    scalars = {name: int(operands[name].values) for name in function.scalars}
    bound = bind(function, sizes, scalars)
    stored = {}
    for name, x in operands.items():
        dtype = function.tensor(name).dtype
        values = convert_array(x.values, dtype) if dtype == BFLOAT16 else x.values.astype(numpy_dtype(dtype))
        stored[name] = StoredTensor(values, x.places)
    found = evaluate_sparse(
        bound,
        stored,
        {t.name: t.format for t in function.tensors if t.format and t.is_sparse and t.name in function.returns},
        shared_places(function, sizes | scalars),
    )
    for name, expected in zip(function.returns, case.expected(operands), strict=True):
        values = found[name].values
        tolerance = case.record.get("tolerance", TOLERANCE.get(str(values.dtype), 0))
        np.testing.assert_allclose(values, expected.astype(values.dtype), rtol=tolerance, atol=tolerance, err_msg=name)
    for name, places in case.stored(operands).items():
        format = function.tensor(name).format
        assert format is not None
        assert str(format) == str(format_of(case.record["formats"][name], places.ndim))
        np.testing.assert_array_equal(complete(np.asarray(found[name].places), format), complete(places, format))


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: c.id)
def test_what_is_refused_at_its_definition(case: Case) -> None:
    if "error" not in case.record:
        return
    with pytest.raises(ERRORS[case.record["error"]]) as error:
        function_of(case)
    assert isinstance(error.value, TCError)
    for word in case.record["says"]:
        assert word in str(error.value)
