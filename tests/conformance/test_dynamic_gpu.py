"""The conformance programs with every set of their sizes dynamic on GPUs, by the emulator and the interpreter."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case

# isort: split
from test_dynamic import COUNTS, INTERPRETED, _make_arguments, _name, _rows_of, _sets

import tensor_comprehensions as tc
from tensor_comprehensions.api import Op
from tensor_comprehensions.compiler.gpu_range_passes import CompiledGpuRangeKernel
from tensor_comprehensions.dispatch.call_steps import normalize_arguments, shapes_of
from tensor_comprehensions.dispatch.cuda.gpu_kernels import GpuKernel
from tensor_comprehensions.runtime.emulate import emulator
from tests.helpers.gpu_range_kernels import check_emulator, check_interpreter, compile_range_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*a quotient of integers rounds down"),
    pytest.mark.skipif(not emulator.is_emulator_available(), reason="running kernels on the CPU needs a C++ compiler"),
]
LARGE = 2503
"""A large size, and a prime."""
MOST_POINTS = 10**6
"""The points of a statement that the emulator runs in some seconds."""
CASES_WITH_SIZES = [c for c in CASES if c.error is None and "(" in c.source]


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES_WITH_SIZES, ids=lambda c: c.id)
def test_any_size(case: Case) -> None:
    for op, rows in _dynamic_ops(case):
        inputs, initial = _make_arguments(case, op, {})
        kernel = compile_range_kernel(op, inputs, initial)
        assert kernel is not None, "the analysis of rows decides, and the mapper has to follow it"
        assert isinstance(kernel.compiled, CompiledGpuRangeKernel)
        assert kernel.compiled.dynamic_sizes == rows
        check_emulator(op, kernel, inputs, initial)
        _check_counts(case, op, kernel)


def _dynamic_ops(case: Case) -> list[tuple[Op, tuple[str, ...]]]:
    """The operator for each set of its sizes that can be parameters, with these sizes."""
    try:
        names = tc.define(case.source)[_name(case)].function.sizes
    except tc.TCError:
        return []
    found: dict[tuple[str, ...], Op] = {}
    for dynamic in _sets(names):
        op = tc.define(case.source, dynamic=set(dynamic))[_name(case)]
        found.setdefault(_rows_of(op, *_make_arguments(case, op, {}), dynamic), op)
    return [(op, rows) for rows, op in found.items() if rows]


def _check_counts(case: Case, op: Op, kernel: GpuKernel) -> None:
    compiled = kernel.compiled
    assert isinstance(compiled, CompiledGpuRangeKernel)
    rows = compiled.dynamic_sizes
    large = (LARGE,) if len(rows) == 1 and not _has_squares(op, rows[0]) else ()
    for n, count in enumerate((*COUNTS, *large)):
        sizes = {name: COUNTS[(n + 2 * k) % len(COUNTS)] if k else count for k, name in enumerate(rows)}
        sizes |= {  # of windows
            x.original_sizes[-1]: max(0, x.step * (sizes[x.original_sizes[-1]] - 1) + x.reach)
            for x in compiled.axes
            if x.windowed
        }
        inputs, initial = _make_arguments(case, op, sizes)
        if count > max(INTERPRETED) and _count_points(op, inputs, initial) > MOST_POINTS:
            continue
        check_emulator(op, kernel, inputs, initial)
        if count in INTERPRETED and not _has_halves(inputs):
            check_interpreter(op, compiled, inputs, initial)


def _has_squares(op: Op, size: str) -> bool:
    """Is a size several dimensions of an operand?"""
    return any(str(t.extents).count(f"'{size}'") > 1 for t in op.function.parameters)


def _count_points(op: Op, inputs: list[Any], initial: dict[str, Any]) -> int:
    """The points of the largest statement."""
    arguments = normalize_arguments(op._kernels.call_signature, inputs, initial)
    bound = op._kernels.bind(shapes_of(op.function, arguments))
    return max(prod(i.extent for i in s.indices) for s in bound.statements)


def _has_halves(inputs: list[Any]) -> bool:
    return any(a.dtype == np.float16 for a in inputs if isinstance(a, np.ndarray))
