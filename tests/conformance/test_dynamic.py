"""The conformance programs with every set of their sizes dynamic: right for sizes that kernels were not made for."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, _array

import tensor_comprehensions as tc
from tensor_comprehensions.api import Op
from tensor_comprehensions.dispatch.call_steps import normalize_arguments, shapes_of, sizes_of
from tensor_comprehensions.tc_lang.binding.ranges import symbolic_ranges
from tensor_comprehensions.tc_lang.dynamic_sizes.rows import list_dynamic_sizes
from tests.helpers.row_kernels import check_interpreter, check_machine_code, range_kernels

pytestmark = pytest.mark.filterwarnings("ignore:.*a quotient of integers rounds down")
COUNTS = (0, 1, 2, 7, 67)
INTERPRETED = (0, 1, 7)


def _name(case: Case) -> str:
    return str(case.record.get("fn") or case.source.split("def", 1)[1].split("(")[0].strip())


def _make_arguments(case: Case, op: Op, sizes: dict[str, int]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a case with other values of some sizes."""
    ranges = symbolic_ranges(op.function)
    rng = np.random.default_rng(zlib.crc32(repr((case.id, sizes)).encode()))

    def array(name: str, spec: str) -> Any:
        shape, colon, limits = spec.partition(":")
        letter, *dims = shape.split()
        new = [str(sizes.get(str(e), n)) for n, e in zip(dims, ranges.shape(name), strict=True)]
        return _array(f"{letter} {' '.join(new)} {colon}{limits}", rng)

    given = (case.record.get(key, {}) for key in ("inputs", "initial"))
    inputs, initial = ({name: array(name, spec) for name, spec in specs.items()} for specs in given)
    return list(inputs.values()), initial


def _sets(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Each size alone, and all of them."""
    return list(dict.fromkeys([*((name,) for name in names), names] if names else []))


@pytest.mark.sampled
@pytest.mark.parametrize("case", [c for c in CASES if c.error is None], ids=lambda c: c.id)
def test_any_size(case: Case) -> None:
    try:
        names = tc.define(case.source)[_name(case)].function.sizes
    except tc.TCError:
        return
    tried: set[tuple[str, ...]] = set()
    for dynamic in _sets(names):
        op = tc.define(case.source, dynamic=set(dynamic))[_name(case)]
        inputs, initial = _make_arguments(case, op, {})
        rows = _rows_of(op, inputs, initial, dynamic)
        if rows in tried:  # as for fewer sizes
            continue
        tried.add(rows)
        try:
            check_machine_code(op, inputs, initial)
        except tc.TCError:
            assert case.record.get("may_reject")
            continue
        kernels = range_kernels(op)
        assert [k.dynamic_sizes for k in kernels] == [rows] * bool(rows)
        if kernels:
            _check_counts(case, op)
            assert range_kernels(op) == kernels, "one kernel is for all sizes"


def _rows_of(op: Op, inputs: list[Any], initial: dict[str, Any], dynamic: tuple[str, ...]) -> tuple[str, ...]:
    """The sizes that are parameters of the kernel for these arguments; () where none are."""
    table = op._kernels
    arguments = normalize_arguments(table.call_signature, inputs, initial)
    try:
        sizes = sizes_of(table.call_signature, shapes_of(op.function, arguments))
    except tc.TCError:
        return ()
    return list_dynamic_sizes(table._ranges.find_axes(dynamic, sizes).axes)


def _check_counts(case: Case, op: Op) -> None:
    (kernel,) = range_kernels(op)
    rows = kernel.dynamic_sizes
    for n, count in enumerate(COUNTS):
        sizes = {name: COUNTS[(n + 2 * k) % len(COUNTS)] if k else count for k, name in enumerate(rows)}
        sizes |= {  # of windows
            x.original_sizes[-1]: max(0, x.step * (sizes[x.original_sizes[-1]] - 1) + x.reach)
            for x in kernel.axes
            if x.windowed
        }
        inputs, initial = _make_arguments(case, op, sizes)
        check_machine_code(op, inputs, initial)
        if count in INTERPRETED and not any(a.dtype in (np.float16,) for a in inputs if isinstance(a, np.ndarray)):
            check_interpreter(op, kernel, inputs, initial)


def test_most_programs_have_sizes_that_are_parameters() -> None:
    """So that these tests say something."""
    some, every = 0, 0
    for case in (c for c in CASES if c.error is None):
        try:
            op = tc.define(case.source)[_name(case)]
        except tc.TCError:
            continue
        inputs, initial = _make_arguments(case, op, {})
        names = op.function.sizes
        found = [_rows_of(op, inputs, initial, chosen) for chosen in _sets(names)]
        some += any(found)
        every += bool(names) and set(found[-1]) >= set(names)
    assert some > 145
    assert every >= 120
