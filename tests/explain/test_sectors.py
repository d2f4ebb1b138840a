"""Sectors that a warp moves, for accesses whose addresses are known by hand."""

from __future__ import annotations

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.compiler.cpu_passes import with_original_names
from tensor_comprehensions.explain.sectors import SectorCount, count_sectors
from tensor_comprehensions.options import MappingOptions

X = torch.rand(512, 512)


def counts(text: str, *tensors: torch.Tensor, options: MappingOptions | None = None) -> set[SectorCount]:
    (op,) = tc.define(text)
    compiled = op.compile(*tensors, target="cuda:sm_80", options=options).compiled  # type: ignore[union-attr]
    module = with_original_names(compiled.rerun_until("simplify"), compiled.bound)
    return {found for k in module.kernels if k.launch is not None for found, _ in count_sectors(k)}


TURN = "def turn(float(M,N) x) -> (y) { y(j,i) = x(i,j) }"
CASES = {
    "contiguous": (
        "def f(float(N) x) -> (y) { y(i) = 2 * x(i) }", (X[0],), MappingOptions.naive(),
        {("reads", "x", 32, 128, 4), ("writes", "y", 32, 128, 4)},
    ),
    "every second": (
        "def f(float(N) x) -> (y) { y(i) = x(2 * i) where i in 0:256 }", (X[0],), MappingOptions.naive(),
        {("reads", "x", 32, 128, 8), ("writes", "y", 32, 128, 4)},
    ),
    "shifted": (
        "def f(float(N) x) -> (y) { y(i) = x(i + 1) where i in 0:500 }", (X[0],), MappingOptions.naive(),
        {("reads", "x", 32, 128, 5), ("writes", "y", 32, 128, 4)},
    ),
    "the same for all": (
        "def f(float(N) x) -> (y) { y(i) = x(0) where i in 0:64 }", (X[0],), MappingOptions.naive(),
        {("reads", "x", 32, 4, 1), ("writes", "y", 32, 128, 4)},
    ),
    "turned": (TURN, (X,), MappingOptions.naive(), {("reads", "x", 32, 128, 32), ("writes", "y", 32, 128, 4)}),
    "turned in shared memory": (TURN, (X,), None, {("reads", "x", 32, 128, 4), ("writes", "y", 32, 128, 4)}),
    "few": (
        "def f(float(N) x) -> (y) { y(i) = 2 * x(i) }", (X[0, :20],), MappingOptions.naive(),
        {("reads", "x", 20, 80, 3), ("writes", "y", 20, 80, 3)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sectors_are_those_of_the_addresses(name: str) -> None:
    text, tensors, options, wanted = CASES[name]
    assert counts(text, *tensors, options=options) == {SectorCount(*c) for c in wanted}


def test_places_that_data_decides_are_left_out() -> None:
    text = "def f(float(N) x, int(M) at) -> (y) { y(i) = x(at(i)) }"
    found = counts(text, X[0], torch.zeros(64, dtype=torch.int32))
    assert {c.buffer for c in found} == {"at", "y"}


def test_a_report_shows_the_worst_first() -> None:
    report = tc.define(TURN).turn.explain(X, target="cuda:sm_80", options=MappingOptions.naive())
    (section,) = (s for s in report.sections if s.title == "global memory of turn")
    assert section.text[0] == "32 threads of a warp read 128 bytes of x: 32 sectors of 32 bytes, at least 4"
