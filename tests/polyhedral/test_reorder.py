"""Contractions around which tensors are copied into the order of a matrix product compute what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

import tensor_comprehensions as tc
from tensor_comprehensions.core import knobs
from tensor_comprehensions.core.dtypes import FLOAT32
from tensor_comprehensions.options import CpuOptions
from tensor_comprehensions.polyhedral.cpu import lower
from tensor_comprehensions.polyhedral.scop import reorder_contractions
from tensor_comprehensions.polyhedral.scop.lanes_along_sum import lanes_along_sum
from tensor_comprehensions.schedules import gett
from tensor_comprehensions.target import AVX2, AVX512, CpuTarget
from tensor_comprehensions.tc_lang import ir
from tensor_comprehensions.tc_lang.ir import BoundFunction, BoundIndex, BoundStatement

MESHED = replace(AVX512, name="sapphirerapids", cache=(49152, 2097152, 110100480))
FALLEN_BEHIND = [
    ("cdba-efabc-fed", {"a": 12, "b": 13, "c": 10, "d": 7, "e": 6, "f": 12}),
    ("bdace-bfa-efdc", {"a": 9, "b": 16, "c": 16, "d": 16, "e": 17, "f": 11}),
    ("cebfad-abgch-dgehf", {"a": 9, "b": 7, "c": 9, "d": 4, "e": 7, "f": 9, "g": 10, "h": 4}),
]
ODD = [
    ("gbcead-dcaegf-bf", {"a": 3, "b": 4, "c": 5, "d": 4, "e": 6, "f": 7, "g": 3}),
    ("cghf-hedab-fcadgbe", {"a": 3, "b": 4, "c": 5, "d": 2, "e": 6, "f": 7, "g": 3, "h": 5}),
    ("ba-ac-cb", {"a": 37, "b": 18, "c": 29}),
]
"""Output, left factor, right factor; the last index of each is that of unit stride."""

Case = tuple[str, Mapping[str, int]]


def source(name: str) -> str:
    c, a, b = (",".join(part) for part in name.split("-"))
    return f"def f(float({a.upper()}) x, float({b.upper()}) y) -> (o) {{ o({c}) +=! x({a}) * y({b}) }}"


def inputs(name: str, sizes: Mapping[str, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    _, *factors = name.split("-")
    return [torch.randint(-3, 4, [sizes[i] for i in part], generator=generator).float() for part in factors]


def compute_expected(name: str, x: Tensor, y: Tensor) -> Tensor:
    c, a, b = name.split("-")
    return torch.einsum(f"{a},{b}->{c}", x, y)


@pytest.mark.parametrize(("name", "sizes"), FALLEN_BEHIND, ids=[name for name, _ in FALLEN_BEHIND])
def test_short_indices_in_odd_orders(name: str, sizes: Mapping[str, int]) -> None:
    x, y = inputs(name, sizes)
    assert torch.equal(tc.define(source(name)).f(x, y), compute_expected(name, x, y))


def test_few_rows_are_no_reason_to_leave_register_tiles() -> None:
    name, sizes = FALLEN_BEHIND[0]
    for target in (AVX512, MESHED):
        schedule = tc.define(source(name)).f.compile(*inputs(name, sizes), target=target).source("schedule")
        assert "o.ordered" in schedule
        assert "a_b_c" in schedule


def test_what_needs_no_copies_has_none() -> None:
    for shapes in (((100, 90), (90, 80)), ((2000, 100), (100, 2000)), ((7, 1000), (1000, 300))):
        op = tc.define("def f(float(M,K) A, float(K,N) B) -> (C) { C(m,n) +=! A(m,k) * B(k,n) }").f
        assert "_ordered" not in op.compile(*map(torch.empty, shapes), target=MESHED).source("schedule")


def test_a_schedule_is_for_the_contraction_as_it_is_written() -> None:
    name, sizes = FALLEN_BEHIND[2]
    x, y = inputs(name, sizes)
    op = tc.define(source(name)).f
    assert "_ordered" not in op.compile(x, y, schedule=gett).source("schedule")
    assert torch.equal(op.compile(x, y, schedule=gett)(x, y), compute_expected(name, x, y))


def every_way(name: str, sizes: Mapping[str, int]) -> list[Callable[..., BoundFunction]]:
    """Passes that make one and the same choice each."""
    found: list[reorder_contractions.Orders] = []

    def look(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> BoundFunction:
        contraction = reorder_contractions._contraction(function)
        assert contraction is not None
        found[:] = reorder_contractions._enumerate_orders(contraction)
        return function

    with pytest.MonkeyPatch.context() as patch, knobs.override_knobs(cache="off"):
        patch.setattr(lower, "reorder", look)
        tc.define(source(name)).f.compile(*inputs(name, sizes))

    def always(orders: reorder_contractions.Orders) -> Callable[..., BoundFunction]:
        def chosen(function: BoundFunction, options: CpuOptions, target: CpuTarget) -> BoundFunction:
            contraction = reorder_contractions._contraction(function)
            assert contraction is not None
            return reorder_contractions._reorder_operands(contraction, orders)[0]

        return chosen

    return [always(orders) for orders in found]


@pytest.mark.parametrize(("name", "sizes"), ODD, ids=[name for name, _ in ODD])
def test_every_way(name: str, sizes: Mapping[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = inputs(name, sizes)
    ways = every_way(name, sizes)
    assert len(ways) >= 4
    for number, way in enumerate(Random(1).sample(ways, 4)):
        monkeypatch.setattr(lower, "reorder", way)
        with knobs.override_knobs(cache="off", verify=not number):
            assert torch.equal(tc.define(source(name)).f(x, y), compute_expected(name, x, y))


def test_copies_past_the_caches_begin_anywhere_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name, sizes = "aebc-ad-bced", {"a": 12, "b": 22, "c": 33, "d": 30, "e": 24}
    x, y = inputs(name, sizes)
    ways = every_way(name, sizes)
    for way in Random(0).sample(ways, min(3, len(ways))):
        monkeypatch.setattr(lower, "reorder", way)
        with knobs.override_knobs(cache="off"):
            assert torch.equal(tc.define(source(name)).f(x, y), compute_expected(name, x, y))


def test_no_index_is_lost() -> None:
    """Extents of 1, a batch, and an index of one tensor alone are left as they are."""
    for name in ("ab-ac-cb", "zab-zac-zcb", "ab-acd-cb"):
        sizes = dict.fromkeys("abcdz", 9) | {"a": 1}
        x, y = inputs(name, sizes)
        assert torch.equal(tc.define(source(name)).f(x, y), compute_expected(name, x, y))


ALONG_SUM = [
    ("ec-bcda-ebda", {"a": 32, "b": 16, "c": 18, "d": 31, "e": 32}),
    ("edc-ahcgbf-bdfeagh", {"a": 6, "b": 10, "c": 4, "d": 6, "e": 8, "f": 10, "g": 4, "h": 4}),
    ("gea-afdcb-cgefbd", {"a": 5, "b": 5, "c": 8, "d": 13, "e": 12, "f": 9, "g": 6}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "sizes"), ALONG_SUM, ids=[name for name, _ in ALONG_SUM])
def test_long_sums_into_few_results_have_lanes_along_them(
    name: str, sizes: Mapping[str, int], dtype: torch.dtype
) -> None:
    x, y = (t.to(dtype) for t in inputs(name, sizes))
    op = tc.define(source(name).replace("float(", "double(") if dtype == torch.float64 else source(name)).f
    assert torch.equal(op(x, y), compute_expected(name, x, y))
    if dtype == torch.float32:
        schedule = op.compile(x, y, target=MESHED).source("schedule")
        assert "o.lanes +=!" in schedule
        assert "S0_combined" in schedule


def test_lanes_along_a_sum_fill_vectors() -> None:
    def lanes(extent: int) -> int:
        left, right = (ir.Access(t, (ir.Index("k", ir.INDEX_TYPE),), FLOAT32) for t in "xy")
        value = ir.Binary("*", left, right, FLOAT32)
        return lanes_along_sum(BoundStatement("S", "o", (), "+", True, value, (BoundIndex("k", 0, extent),), 0), 16)

    assert [lanes(n) for n in (992, 585, 28, 15, 24, 11, 22, 1250, 37)] == [16, 15, 14, 15, 8, 0, 0, 0, 0]


@pytest.mark.parametrize("verify", [False, True])
def test_every_sum_of_lanes(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model thinks of it, also in parts of a block that follow one another."""
    monkeypatch.setattr(reorder_contractions, "_enumerate_orders", lambda found: ())
    monkeypatch.setattr(reorder_contractions, "REORDER_GAIN", 1e9)
    monkeypatch.setattr(reorder_contractions, "_count_product_cycles", lambda *a: 0.0)
    monkeypatch.setattr(reorder_contractions, "_copy_cycles", lambda *a: 0.0)
    monkeypatch.setattr(reorder_contractions, "combining_cycles", lambda *a: 0.0)
    names = ["ba-akl-bkl", "ba-kal-lbk", "bac-kcal-blk", "ab-mkal-bkml"]
    choose, in_lanes = Random(2), 0
    with knobs.override_knobs(cache="off", verify=verify):
        for name in names if verify else 3 * names:
            sizes = {i: choose.randint(2, 9) for i in "abcm"}
            sizes |= {"k": choose.randint(20, 60), "l": choose.choice([8, 15, 32])}
            x, y = inputs(name, sizes)
            op = tc.define(source(name)).f
            assert torch.equal(op(x, y), compute_expected(name, x, y)), (name, sizes)
            in_lanes += "o.lanes" in op.compile(x, y, target=MESHED).source("schedule")
    assert in_lanes >= (1 if verify else 6)


LAYERS = """def f(float(M,K) x, float(N,K) u, float(N,K) v, float(N) b) -> (y, z) {
    p(m,n) +=! x(m,k) * u(n,k)
    y(m,n) = fmax(p(m,n) + b(n), 0)
    q(m,n) +=! x(m,k) * v(n,k)
    z(m,n) = y(m,n) * q(m,n)
}"""


@pytest.mark.parametrize("step", [1, 3], ids=["dense", "of every third row"])
@pytest.mark.parametrize(("rows", "in_lanes"), [(1, False), (2, True), (4, True), (100, False)])
def test_layers_on_few_rows_have_lanes_along_their_sums(rows: int, in_lanes: bool, step: int) -> None:
    """The weights of a layer are contiguous along the sum; few rows do not pay for transposing them."""
    x = torch.randint(-3, 4, (rows * step, 256)).float()[::step]
    u, v = torch.randint(-3, 4, (2, 96, 256)).float()
    b = torch.randint(-3, 4, (96,)).float()
    op = tc.define(LAYERS).f
    y = (x @ u.t() + b).relu()
    for found, expected in zip(op(x, u, v, b), (y, y * (x @ v.t())), strict=True):
        assert torch.equal(found, expected)
    schedule = op.compile(x, u, v, b, target=AVX512).source("schedule")
    assert ("p.lanes +=!" in schedule, "q.lanes +=!" in schedule) == (in_lanes, in_lanes)


def test_a_product_of_strided_rows_has_lanes_along_its_sum() -> None:
    x = torch.randint(-3, 4, (12, 256)).float()[::3]
    w = torch.randint(-3, 4, (96, 256)).float()
    op = tc.define("def f(float(M,K) x, float(N,K) w) -> (y) { y(m,n) +=! x(m,k) * w(n,k) }").f
    assert torch.equal(op(x, w), x @ w.t())
    assert "y.lanes +=!" in op.compile(x, w, target=AVX512).source("schedule")


def test_every_layer_in_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model thinks of it."""
    monkeypatch.setattr(reorder_contractions, "REORDER_GAIN", 1e9)
    choose, in_lanes = Random(3), 0
    for _ in range(6):
        rows, columns, terms = choose.randint(2, 40), choose.randint(2, 40), choose.choice([24, 45, 64, 80])
        x = torch.randint(-3, 4, (rows, terms)).float()
        u, v = torch.randint(-3, 4, (2, columns, terms)).float()
        b = torch.randint(-3, 4, (columns,)).float()
        op, y = tc.define(LAYERS).f, (x @ u.t() + b).relu()
        with knobs.override_knobs(cache="off", verify=True):
            for found, expected in zip(op(x, u, v, b), (y, y * (x @ v.t())), strict=True):
                assert torch.equal(found, expected), (rows, columns, terms)
        in_lanes += "p.lanes" in op.compile(x, u, v, b, target=AVX512).source("schedule")
    assert in_lanes


def test_a_product_whose_copies_would_be_fused_with_it_keeps_its_register_tile() -> None:
    """The copy of Y joined the product along the lanes, which no tile can cut, and all ran as loops."""
    op = tc.define("def f(float(B,E,A,C,D) X, float(D,B,A,F) Y) -> (O) { O(f,e,c) +=! X(b,e,a,c,d) * Y(d,b,a,f) }").f
    x, y = torch.randint(-3, 4, (19, 15, 18, 9, 8)).float(), torch.randint(-3, 4, (8, 19, 18, 17)).float()
    assert torch.equal(op(x, y), torch.einsum("beacd,dbaf->fec", x, y))
    target = replace(AVX2, name="znver3", cache=(1 << 15, 1 << 19, 1 << 25))
    assert "S0: tile(d_l=8" in op.compile(x, y, target=target).source("schedule")
