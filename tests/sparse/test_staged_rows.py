"""Sums with sparse results whose rows threads write to a staging buffer first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from patterns import random_tensor, store

import tensor_comprehensions as tc
from tests.helpers.sparse_checks import interpret_def

SUMS = {
    "two": "def f(T(N,M) B: csr, T(N,M) C: csr) -> (A: csr) { A(i,j) = B(i,j) + C(i,j) }",
    "product": "def f(T(N,M) B: csr, T(N,M) C: csr) -> (A: csr) { A(i,j) = B(i,j) * C(i,j) }",
    "three": "def f(T(N,M) B: csr, T(N,M) C: csr, T(N,M) D: csr) -> (A: csr) { A(i,j) = B(i,j) - C(i,j) + D(i,j) }",
    "columns": "def f(T(N,M) B: csc, T(N,M) C: csc) -> (A: csc) { A(i,j) = B(i,j) + 2 * C(i,j) }",
    "two results": """def f(T(N,M) B: csr, T(N,M) C: csr) -> (A: csr, E: csr) {
        A(i,j) = B(i,j) + C(i,j)
        E(i,j) = A(i,j) * B(i,j)
    }""",
}
LENGTHS = {
    "random": (3, 7, 1, 4, 9, 2, 5, 8) * 5,
    "empty rows": (0, 0, 6, 0, 0, 0, 0, 9, 0, 0, 0),
    "a long row": (1, 0, 50, 2, 0, 1, 1),
    "nothing": (0,) * 9,
    "one row": (20,),
    "no rows": (),
}
"""The number of elements of each row of an operand."""


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def operand(lengths: tuple[int, ...], format: str, dtype: torch.dtype, seed: int) -> tc.SparseTensor:
    """A matrix of 60 columns with these numbers of elements, and seed more, in its rows."""
    r = np.random.default_rng(seed)
    rows = [r.choice(60, min(60, n + (n > 0) * seed), replace=False) for n in lengths]
    places = np.array([(i, j) for i, row in enumerate(rows) for j in sorted(row)], dtype=np.int64).reshape(-1, 2).T
    values = torch.from_numpy(r.integers(1, 9, places.shape[1])).to(dtype)
    return tc.SparseTensor.from_coordinates(places, values, (len(lengths), 60), format)


@pytest.mark.sampled  # sums, patterns and numbers of threads
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("number", [2, 3, 7])
def test_rounds_give_what_one_thread_gives(
    name: str, lengths: tuple[int, ...], number: int, threads: Callable[[int], None]
) -> None:
    dtype, element = (torch.float32, "float") if number == 3 else (torch.float64, "double")
    source = SUMS[name].replace("T(", f"{element}(")
    count = source.split("->")[0].count(": cs")
    given = [operand(lengths, "csc" if "csc" in source else "csr", dtype, seed) for seed in range(count)]
    expected = call(source, given, tc.SparseOptions(stage_rows="never"))
    threads(number)
    rounds, parts = (tc.SparseOptions(chunk_positions=chunk, stage_rows="always") for chunk in (1, 20))
    for found in (call(source, given, rounds), call(source, given, parts), interpret(source, given, rounds)):
        for x, y in zip(found, expected, strict=True):
            x.check()
            assert all(torch.equal(a, b) for a, b in zip(levels_of(x), levels_of(y), strict=True))
            assert torch.equal(x.values, y.values)


def call(source: str, given: list[tc.SparseTensor], options: tc.SparseOptions) -> list[tc.SparseTensor]:
    found = tc.define(source, options=options).f(*given)
    return list(found) if isinstance(found, tuple) else [found]


def interpret(source: str, given: list[tc.SparseTensor], options: tc.SparseOptions) -> list[tc.SparseTensor]:
    return list(interpret_def(tc.define(source, options=options).f._kernels.sparse, given, {}).values())


def levels_of(x: tc.SparseTensor) -> list[torch.Tensor]:
    return [array for level in x.levels if level is not None for array in level if array is not None]


def test_rows_are_staged_by_several_threads_only(threads: Callable[[int], None]) -> None:
    source = SUMS["two"].replace("T(", "double(")
    given = [store(random_tensor(np.random.default_rng(n), (9, 8), 0.4), "csr") for n in range(2)]
    for number in (1, 2):
        threads(number)
        kernel = tc.define(source).f.compile(*given)
        assert ("staged" in kernel.source("loops")) == (number > 1)
        schedule = kernel.source("schedule")
        assert "for the elements of B and C together" in schedule
        assert ("threads share its rows" in schedule) == (number > 1)


def test_the_place_of_each_row_in_its_operand_bounds_the_buffer(threads: Callable[[int], None]) -> None:
    """Repeated coordinates, which are added, and operands without a common one."""
    threads(2)
    where = torch.tensor([[0, 0, 0, 3, 3, 5], [1, 1, 4, 2, 2, 0]])
    b = tc.SparseTensor.from_coordinates(where, torch.ones(6).double(), (6, 5), "csr")
    c = tc.SparseTensor.from_coordinates(where.roll(1, 0).clamp(max=4), torch.ones(6).double(), (6, 5), "csr")
    for chunk in (1, 2, 4):
        options = tc.SparseOptions(chunk_positions=chunk)
        (found,) = call(SUMS["two"].replace("T(", "double("), [b, c], options)
        assert torch.equal(found.check().to_dense(), b.to_dense() + c.to_dense())
