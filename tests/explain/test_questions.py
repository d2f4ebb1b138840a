"""Questions that users ask, each answered by a decision of the report on the right def."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.core.decisions import Decision, open_book
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.explain.advice import advise, summarize
from tensor_comprehensions.explain.kernel_report import Report

MM = "def mm(float(M,K) A, float(K,N) B) -> (C) { C(i,j) +=! A(i,k) * B(k,j) }"
TURNED = "def mm(float(M,K) A, float(N,K) B) -> (C) { C(i,j) +=! A(i,k) * B(j,k) }"
CHAIN = """
def chain(float(M,K) A, float(K,N) B, float(N,O) C) -> (y) {
    t(i,j) +=! A(i,k) * B(k,j)
    y(i,o) +=! t(i,j) * C(j,o)
}
"""


def random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


def only(report: Report, subject: str, *tensors: str) -> Decision:
    (found,) = report.about(subject, *tensors)
    return found


def test_why_two_kernels() -> None:
    few = tc.define(CHAIN).chain.explain(random(32, 256), random(256, 4096), random(4096, 1024))
    apart = only(few, "fusion", "t", "y")
    assert few.resources["kernels"] == 2
    assert apart.chosen == "two kernels"
    assert "threads would idle" in apart.why
    assert apart.number("rows") == 32
    assert apart.number("rows") <= apart.number("rows of a tile") == 64
    assert apart.number("multiply-adds") == 32 * 4096 * 1024 >= apart.number("multiply-adds worth threads") == 2**19
    assert apart.number("bytes through memory") == 32 * 4096 * 4 == few.resources["temporary_bytes"]
    assert [(o.text, o.number) for o in apart.others] == [("t", 32 * 4096 * 4)]
    assert "3 t, 4 y: two kernels" in str(few)
    assert "524 kB through memory" in str(few)
    assert "CpuOptions(fusion='max') joins them" in advise(apart, few)
    joined = tc.define(CHAIN).chain.compile(
        random(32, 256), random(256, 4096), random(4096, 1024), options=tc.CpuOptions(fusion="max")
    )
    assert joined.compiled.resources["kernels"] == 1
    first, second, *_ = summarize(few)
    assert first == "2 kernels run one after another; 524 kB of intermediate results go through memory between them."
    assert second.startswith("3 t and 4 y: two kernels, because threads would idle")


def test_why_kernels_that_an_option_keeps_apart() -> None:
    text = Path("examples/attention.tc").read_text()
    q = random(4, 8, 1024, 64)
    report = tc.define(text).attention.explain(q, q, q, options=tc.CpuOptions(fusion="min"))
    pairs = [d for d in report.about("fusion") if d.chosen == "two kernels"]
    assert len(pairs) == report.resources["kernels"] - 1 == 4
    assert all("fusion='min'" in d.why for d in pairs)
    through = {o.text: o.number for d in pairs for o in d.others}
    assert through["score"] == through["weight"] == 4 * 8 * 1024 * 1024 * 4
    (reason,) = {advise(d, report) for d in pairs}
    assert reason == "leave out fusion='min', and they share a kernel"
    assert sum(reason in sentence for sentence in summarize(report)) == 1
    fused = tc.define(text).attention.explain(q, q, q)
    (together,) = fused.about("fusion")
    assert together.chosen.startswith("one kernel, loops b.h (32), q (1024)")
    assert fused.resources == {**fused.resources, "kernels": 1, "temporary_bytes": 0}
    assert next(summarize(fused)) == (
        "One kernel computes all 6 statements; no intermediate result goes through memory."
    )


def test_why_is_a_statement_not_vectorized() -> None:
    scattered = tc.define("def put(int(N) at, float(N) x, float(M) z) -> (y) { y(i) = z(i)  y(at(n)) += x(n) }").put
    report = scattered.explain(torch.zeros(100, dtype=torch.int32), random(100), random(7))
    first, second = report.statements
    by_statement = {d.statements: d for d in report.about("vector")}
    assert by_statement[second.name,].chosen == "scalars"
    assert by_statement[second.name,].why.startswith("each iteration of n needs the one before it")
    assert "lanes along i" in by_statement[first.name,].chosen


def test_why_is_a_factor_packed_and_at_what_cost() -> None:
    report = tc.define(TURNED).mm.explain(random(256, 256), random(256, 256))
    packed = [d for d in report.about("pack", "C") if "packed" in d.chosen]
    assert packed
    for d in packed:
        assert 0 < d.number("packing") < d.number("total")
        assert "apart" in d.why or "contiguous" in d.why
        assert all(o.number is not None and o.number > 0 for o in d.others)
    assert any(d.chosen.startswith("B is packed") and "are 256 apart" in d.why for d in packed)
    touched = {name for f in report.footprints for name, _ in f.bytes}
    assert touched == {"A", "B", "C", "B, packed"}
    assert "copy of B" in {line.role for line in report.find_listing("loops").lines}


def test_why_are_parts_summed() -> None:
    report = tc.define(MM).mm.explain(random(32, 65536), random(65536, 32))
    split = only(report, "split", "C")
    assert split.number("parts") * split.number("terms of a part") == split.number("terms") == 65536
    assert split.number("results") == 32 * 32
    assert split.chosen == f"{split.number('parts')} parts of k, added up afterwards"
    assert split.why
    asked = tc.define(MM).mm.explain(random(32, 65536), random(65536, 32), options=tc.CpuOptions(split_k=4))
    assert only(asked, "split", "C").number("parts") == 4
    assert "split_k=4" in only(asked, "split", "C").why


def test_which_rival_plan_was_next() -> None:
    report = tc.define(MM).mm.explain(random(512, 512), random(512, 512))
    plan = only(report, "plan", "C")
    ratios = [o.number / plan.number("total") for o in plan.others if o.number is not None]
    assert len(ratios) > 1
    assert ratios == sorted(ratios)
    parts = dict(plan.numbers)
    total = parts.pop("total")
    assert total <= sum(parts.values())  # some of the transfer is hidden
    assert f"next: {ratios[0]:.2f} x" in str(report)


def test_why_is_shared_memory_padded() -> None:
    text = "def t(float(M,N) x) -> (y) { y(j,i) = x(i,j) }"
    report = tc.define(text).t.explain(random(512, 512), target="cuda:sm_80")
    (padding,) = report.about("padding")
    assert padding.number("pitch") > padding.number("row") == 32
    assert padding.number("turns") < padding.number("turns unpadded") == 31
    assert all(o.number is not None and o.number >= padding.number("turns") for o in padding.others)
    grid = next(s.grids[0].cells for s in report.sections if s.grids)
    column = [row[0] for row in grid]
    assert len(set(column)) == len(column)  # a column is in different banks
    assert all(row[-1] == -1 for row in grid)


def test_why_was_the_tuned_record_not_used(tmp_path: Path) -> None:
    x = random(64, 64)
    with override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        plain = tc.define(MM).mm
        assert "none of 0 records" in only(plain.explain(x, x), "tuning").why
        plain.autotune(x, x, budget=5, generations=1, population=4)
        again = only(tc.define(MM).mm.explain(x, x), "tuning")
        assert again.chosen == "no tuned record is used"
        assert "not defined with options='tuned'; the cache has record" in again.why
        tuned = tc.define(MM, options="tuned").mm
        assert only(tuned.explain(x, x), "tuning").chosen == "a tuned record is used"
        measured = only(tuned.explain(x, x), "tuning")
        assert all(o.number is not None and o.number >= measured.number("total") > 0 for o in measured.others)
        other = only(tuned.explain(x, x, options=tc.CpuOptions(interleave=2)), "tuning")
        assert other.why.startswith("other options were given")


def test_what_was_left_to_torch() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(torch.softmax(x * 2 + 1, -1), -1)[0]

    torch._dynamo.reset()
    with open_book() as book:
        torch.compile(model, backend="tensor_comprehensions")(random(300, 400))
    found = [d for d in book.decisions if d.subject == "graph"]
    assert any("aten.sort" in d.chosen and d.why == "it has no formula in the table" for d in found)
    assert any("operations are one def" in d.chosen and d.number("operations") > 1 for d in found)


@pytest.mark.parametrize("subject", ["fusion", "plan"])
def test_decisions_are_asked_for_by_tensor(subject: str) -> None:
    report = tc.define(CHAIN).chain.explain(random(64, 64), random(64, 64), random(64, 64))
    assert report.about(subject)
    assert not report.about(subject, "nothing")
    assert all("S0" in d.statements for d in report.about(subject, "t"))
