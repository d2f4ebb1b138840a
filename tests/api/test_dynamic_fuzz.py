"""Random programs with sizes that are parameters of their kernels."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tensor_comprehensions as tc
from tests.helpers.programs import Program, programs
from tests.helpers.row_kernels import check_interpreter, check_machine_code, fits_kernel, range_kernels
from tests.helpers.row_programs import RowProgram, row_arguments, row_programs, window_programs

pytestmark = pytest.mark.filterwarnings("ignore:.*a quotient of integers rounds down")


@settings(max_examples=12)
@given(row_programs(), st.sampled_from((tc.CpuOptions(), tc.CpuOptions(fusion="max"), tc.CpuOptions(fusion="min"))))
def test_programs_of_rows(program: RowProgram, options: tc.CpuOptions) -> None:
    (op,) = tc.define(program.source, dynamic={"N"}, options=options)
    for n in (5, 0, 1, 67):
        check_machine_code(op, row_arguments(program, n), {})
    (kernel,) = range_kernels(op)
    for n in (1, 11):
        check_interpreter(op, kernel, row_arguments(program, n), {})


@settings(max_examples=8)
@given(row_programs(), st.sets(st.sampled_from("NDE"), min_size=1))
def test_programs_of_rows_of_any_length(program: RowProgram, dynamic: set[str]) -> None:
    (op,) = tc.define(program.source, dynamic=dynamic)
    for n in (5, 0, 1, 67):
        check_machine_code(op, row_arguments(program, n, dynamic), {})
    for kernel in range_kernels(op):
        for n in (1, 11):
            arguments = row_arguments(program, n, dynamic)
            if fits_kernel(op, kernel, arguments):
                check_interpreter(op, kernel, arguments, {})


@settings(max_examples=8)
@given(window_programs(), st.sampled_from(("N", "D", "ND")))
def test_programs_of_windows(program: RowProgram, dynamic: str) -> None:
    (op,) = tc.define(program.source, dynamic=set(dynamic))
    reach = dict(program.sizes)["reach"]
    for n in (20, 16, 17, 41, 67):
        d = 5 + n % 11
        rng = np.random.default_rng(zlib.crc32(repr((program, n)).encode()))
        shapes = ([n if "N" in dynamic else 20, d if "D" in dynamic else 6], [n if "N" in dynamic else 20], [reach])
        arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
        check_machine_code(op, arrays, {})
        for kernel in range_kernels(op):
            if n < 41 and fits_kernel(op, kernel, arrays):
                check_interpreter(op, kernel, arrays, {})
    assert "N" not in dynamic or all("N" in k.dynamic_sizes for k in range_kernels(op))


def test_a_size_beside_the_rows_is_part_of_the_kernel() -> None:
    """Nothing but the shape of an operand has `B`, so that it stays exact where it is asked to be a parameter."""
    text = "def f(float X, float(A,B,C) Y) -> (T) { T(a) = X + X where exists Y(a, 0, 0) }"
    (op,) = tc.define(text, dynamic={"A", "B"})
    for a, b in ((1, 1), (2, 2), (5, 1)):
        arrays = [np.float32(3.0), np.ones((a, b, 1), np.float32)]
        check_machine_code(op, arrays, {})
        fitting = [k for k in range_kernels(op) if fits_kernel(op, k, arrays)]
        assert len(fitting) == 1
        check_interpreter(op, fitting[0], arrays, {})


@settings(max_examples=12)
@given(programs(), st.sets(st.sampled_from("ABC"), min_size=1))
def test_any_programs(program: Program, dynamic: set[str]) -> None:
    """Most are not about rows; then there are kernels for each size."""
    (op,) = tc.define(program.source, dynamic=dynamic)
    for change in (0, 1, 4):
        sizes = {name: size + change * (name in dynamic) for name, size in program.sizes}
        rng = np.random.default_rng(zlib.crc32(repr((program, change)).encode()))
        arrays = [rng.uniform(-1, 1, [sizes[d] for d in dims]).astype(np.float32) for _, dims in program.inputs]
        try:
            check_machine_code(op, arrays, {})
        except tc.RangeError:
            return
        for kernel in range_kernels(op):
            if fits_kernel(op, kernel, arrays):
                check_interpreter(op, kernel, arrays, {})
