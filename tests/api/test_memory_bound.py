"""Reductions, permutations and copies are lowered as pipelines say, by the pieces that contractions have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions import schedules as experts
from tensor_comprehensions.runtime.cpu.host import host
from tensor_comprehensions.schedules import (
    Schedule,
    interchange,
    nontemporal_stores,
    pack,
    pad,
    parallel,
    parse_schedule,
    peel,
    tile,
    unroll,
    vectorize,
)
from tensor_comprehensions.target import AVX512

from ..helpers.anywhere import run

OPS = tc.define("""
def transpose(float(M,N) x) -> (y) { y(n,m) = x(m,n) }
def swap(float(A,B,C) x, float(C,B,A) z) -> (y) { y(c,b,a) = 2 * x(a,b,c) + z(c,b,a) }
def rows(float(M,K) x) -> (y) { y(m) +=! x(m,k) }
def columns(float(K,N) x) -> (y) { y(n) max=! x(k,n) }
def total(float(K) x) -> (y) { y +=! x(k) }
def copy(float(M,N) x, float(N) b) -> (y) { y(m,n) = x(m,n) + b(n) }
""")


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()


X = whole(61, 75)
CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]] = {
    "transpose": (OPS.transpose, (X,), torch.t),
    "swap": (OPS.swap, (whole(19, 3, 33), whole(33, 3, 19)), lambda x, z: 2 * x.permute(2, 1, 0) + z),
    "rows": (OPS.rows, (X,), lambda x: x.sum(1)),
    "columns": (OPS.columns, (X,), lambda x: x.amax(0)),
    "total": (OPS.total, (whole(1000),), torch.sum),
    "copy": (OPS.copy, (X, whole(75)), torch.add),
}
PIPELINES = {
    "turned": ("transpose", tile(n=32, m=16) >> pack("x") >> parallel("n1", "m1") >> vectorize("m", lanes=8)),
    "turned, other order": (
        "transpose",
        tile(m=16, n=32) >> pack("x") >> interchange("n1 m1") >> vectorize("m", lanes=4),
    ),
    "turned, past the caches": (
        "transpose",
        tile(n=16, m=61) >> pack("x") >> vectorize("m", lanes=16) >> nontemporal_stores(),
    ),
    "gathered": ("transpose", vectorize("m", lanes=8)),
    "scattered": ("transpose", tile(n=75) >> vectorize("n", lanes=8)),
    "three axes": (
        "swap",
        tile(c=16, a=19, b=1) >> pack("x") >> interchange("c b a") >> parallel("c", "b") >> vectorize("a", lanes=8),
    ),
    "along rows": ("rows", parallel("m") >> vectorize("k", lanes=16) >> unroll(k=4)),
    "across rows": ("rows", tile(m=32) >> vectorize("m", lanes=16)),
    "a row at a time": ("rows", vectorize("k", lanes=8)),
    "columns": ("columns", tile(n=32) >> parallel("n") >> vectorize("n", lanes=8) >> unroll(n=4)),
    "down columns": ("columns", vectorize("k", lanes=16)),
    "a sum": ("total", vectorize("k", lanes=16) >> unroll(k=8)),
    "a copy": ("copy", tile(m=4, n=75) >> parallel("m") >> unroll(n=2)),
    "nothing said": ("copy", Schedule()),
}


def check(name: str, **how: Any) -> Any:
    op, arguments, expected = CASES[name]
    kernel = op.compile(*arguments, **how)
    assert torch.equal(kernel(*arguments), expected(*arguments))
    return kernel


@pytest.mark.parametrize(("name", "pipeline"), PIPELINES.values(), ids=PIPELINES)
def test_pieces_keep_the_result(name: str, pipeline: Schedule) -> None:
    check(name, schedule=pipeline)


@pytest.mark.parametrize(
    ("name", "expert", "seen"),
    [
        ("transpose", experts.schedule_transposition, "shuffle("),
        ("swap", experts.schedule_transposition, "shuffle("),
        ("rows", experts.schedule_row_reduction, "vector for k in 0 .. 75 lanes {lanes} x 4"),
        ("total", experts.schedule_row_reduction, "vector for k in 0 .. 1000 lanes {lanes} x 4"),
        ("columns", experts.schedule_column_reduction, "vector for n in"),
        ("copy", experts.schedule_copy, "x["),
    ],
)
def test_experts(name: str, expert: Any, seen: str) -> None:
    assert seen.format(lanes=host().lanes(32)) in check(name, schedule=expert).source("loops")
    check(name, schedule=experts.schedule_memory_bound)


@pytest.mark.parametrize("columns", [2, 3, 7, 10, 17])
def test_few_columns_have_an_expert(columns: int) -> None:
    x = whole(90, columns)
    kernel = OPS.columns.compile(x, schedule=experts.schedule_column_reduction)
    assert torch.equal(kernel(x), x.amax(0))


def test_pieces_change_the_code() -> None:
    """Accumulators, lanes and tiles are what the pieces say."""
    rows = check("rows", schedule=vectorize("k", lanes=8) >> unroll(k=3)).source("loops")
    assert "vector for k in 0 .. 75 lanes 8 x 3" in rows
    assert "shuffle(" not in check("transpose", schedule=vectorize("m", lanes=8)).source("loops")
    shared = check(
        "columns", schedule=tile(n=8) >> parallel("n") >> vectorize("n"), options=tc.CpuOptions(grain_size=1)
    )
    assert "parallel" in shared.source("loops")
    assert "parallel" not in check("columns", schedule=tile(n=8) >> vectorize("n")).source("loops")


def test_searches_run_the_alternatives() -> None:
    rows = tc.define(OPS.rows.function.source).rows
    ways = tc.CpuOptions(schedule=vectorize("k") >> (unroll(k=1) | unroll(k=2)))
    found = rows.autotune(X, search="schedules", budget=10, options=ways)
    assert len({str(way.options.schedule) for way in found.outcomes}) == 2
    assert torch.equal(rows(X), X.sum(1))


@pytest.mark.parametrize(
    ("name", "pipeline", "words"),
    [
        ("copy", tile(q=4), ["'q'", "m, n"]),
        ("copy", tile(m=8) >> tile(m=4), ["m is tiled twice"]),
        ("copy", pack("x"), ["lies across"]),
        ("copy", pack(x="m"), ["transposed in registers"]),
        ("copy", tile(m=4) >> pad("x"), ["pad", "no panels"]),
        ("copy", tile(m=4) >> peel("m"), ["peel", "of their own"]),
        ("copy", unroll(m=2), ["only vectors along n"]),
        ("copy", tile(m=4, n=16) >> parallel("m"), ["all of the loops"]),
        ("rows", tile(k=4), ["long sums"]),
        ("rows", tile(m=4) >> vectorize("k") >> unroll(m=4), ["only vectors along k"]),
        ("rows", vectorize("k", lanes=8, vectors_per_register=2), ["no sums of products"]),
        ("columns", pack("x"), ["independent"]),
        ("rows", experts.schedule_transposition, ["depend on each other"]),
        ("copy", experts.schedule_column_reduction, ["nothing is summed"]),
        ("total", vectorize("k") >> pack("x"), ["all iterations are independent"]),
        ("copy", experts.gett, ["does not apply"]),
    ],
)
def test_refuses_with_a_reason(name: str, pipeline: Any, words: list[str]) -> None:
    with pytest.raises(tc.ArgumentError) as caught:
        check(name, schedule=pipeline)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("transpose", [(300, 517)]),
        ("transpose", [(4096, 4096)]),
        ("swap", [(19, 3, 33), (33, 3, 19)]),
        ("rows", [(300, 517)]),
        ("columns", [(300, 517)]),
        ("total", [(1000,)]),
        ("total", [(1 << 20,)]),
        ("copy", [(300, 517), (517,)]),
    ],
)
def test_the_default_is_a_pipeline(name: str, shapes: list[tuple[int, ...]]) -> None:
    op, arguments = CASES[name][0], [torch.empty(shape) for shape in shapes]
    default = op.compile(*arguments)
    line = next(line for line in default.source("schedule").splitlines() if "vectorize(" in line)
    scheduled = op.compile(*arguments, schedule=parse_schedule(line.split(": ", 1)[1]))
    assert scheduled.source("llvm") == default.source("llvm")


FAR = replace(AVX512, name="skylake-avx512", cache=(2048, 4096, 1 << 30))


@pytest.mark.parametrize(("rows", "together"), [(128, 4), (130, 2), (131, 1), (8, 1)])
def test_rows_from_memory_are_summed_together(rows: int, together: int) -> None:
    x = whole(rows, 1030)
    default = OPS.rows.compile(x, target=FAR)
    assert torch.equal(run(default, x), x.sum(1))
    (line,) = (line for line in default.source("schedule").splitlines() if "vectorize(" in line)
    assert (f"m={together})" in line.split("unroll(")[1]) == (together > 1)
    scheduled = OPS.rows.compile(x, target=FAR, schedule=parse_schedule(line.split(": ", 1)[1]))
    assert scheduled.source("llvm") == default.source("llvm")


@pytest.mark.parametrize(("columns", "size"), [(700, 352), (960, 320), (300, 300)])
def test_columns_from_far_rows_are_even_parts(columns: int, size: int) -> None:
    x = whole(60, columns)
    kernel = OPS.columns.compile(x, target=FAR)
    assert torch.equal(run(kernel, x), x.amax(0))
    assert size == columns or f"* {size}" in kernel.source("loops")
