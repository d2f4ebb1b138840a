"""The parts of a report on the search for a kernel's options, and on calls of its operator."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import tensor_comprehensions as tc
from tensor_comprehensions.autotuner import search_history
from tensor_comprehensions.autotuner import tuner_pb2 as pb
from tensor_comprehensions.autotuner.journal import Journal
from tensor_comprehensions.autotuner.recorded_options import RECORD_USED
from tensor_comprehensions.cache.key import make_key
from tensor_comprehensions.cache.options_proto import to_message
from tensor_comprehensions.cli.main import main
from tensor_comprehensions.core.knobs import override_knobs
from tensor_comprehensions.explain.kernel_report import SearchCurve, TriedOptions
from tensor_comprehensions.explain.search_report import describe_search, draw_search

from .test_report import check_page

TMM = "def tmm(float(M,K) A, float(N,K) B) -> (C) { C(m,n) +=! A(m,k) * B(n,k) }"
A, B = torch.rand(64, 96), torch.rand(48, 96)
FAST, SLOW = tc.CpuOptions(fusion="min"), tc.CpuOptions()


def circles(picture: str, name: str) -> int:
    return picture.count(f'<circle class="{name}"')


def test_a_search_of_this_process_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_history, "_remembered", OrderedDict())  # another test may have searched the same
    with override_knobs(cache="readwrite", cache_dir=str(tmp_path)):
        op = tc.define(TMM).tmm
        assert op.explain(A, B).search is None
        found = op.autotune(A, B, search="schedules", population=3, budget="20s")
        report = op.explain(A, B)
    search = report.search
    assert search is not None
    assert (search.chosen, search.seconds) == (repr(found.options), found.seconds)
    assert [c.options for c in search.candidates] == [repr(o.options) for o in found.outcomes]
    default = next(o for o in found.outcomes if o.options == found.default)
    assert default.seconds is not None
    assert search.scale * default.seconds == pytest.approx(found.default_seconds)
    timed = sum(o.seconds is not None for o in found.outcomes)
    picture = draw_search(search)
    assert (circles(picture, "own"), circles(picture, "limit")) == (timed, 1)
    assert describe_search(search) in str(report)
    check_page(report)
    assert report.json()["search"]["chosen"] == search.chosen
    if found.options != found.default:
        (tuning,) = report.about("tuning")
        assert tuning.chosen == RECORD_USED
    assert op.explain(A[:60], B).search is None


def write_journal(path: Path, *, has_ended: bool) -> None:
    """A search in which the default takes 40 us, other options 20, and others are wrong; in the race, half of that."""
    op = tc.define(TMM).tmm
    kernel = op.compile(A, B)
    key = make_key(op.function, kernel.compiled.bound, kernel.compiled.target, threads=torch.get_num_threads())
    book = Journal(path)
    book.add("other", pb.Start(key="of another def"))
    book.add("other", pb.Outcome(options=to_message(SLOW), status=pb.OK, timing=timing(1e-6), elapsed=1))
    book.add("own", pb.Start(key=key.digest))
    wrong = tc.CpuOptions(fusion="max")
    book.add("own", pb.Outcome(options=to_message(SLOW), status=pb.OK, timing=timing(40e-6), elapsed=1))
    book.add("own", pb.Outcome(options=to_message(wrong), status=pb.WRONG_RESULT, elapsed=2))
    book.add("own", pb.Outcome(options=to_message(FAST), status=pb.OK, timing=timing(20e-6), elapsed=3))
    if has_ended:
        times = [timing(20e-6), timing(10e-6, gain=1.9)]
        book.add("own", pb.Decision(finalists=[to_message(SLOW), to_message(FAST)], timings=times, elapsed=9))
    book.close()


def timing(seconds: float, gain: float = 0.0) -> pb.Timing:
    return pb.Timing(median=seconds, low=seconds, high=seconds, runs=5, gain=gain)


def test_a_journal_is_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "job.journal"
    write_journal(path, has_ended=True)
    op = tc.define(TMM).tmm
    search = op.explain(A, B, journal=path).search
    assert search is not None
    assert (search.chosen, search.seconds, search.default_seconds) == (repr(FAST), 10e-6, 20e-6)
    assert (search.scale, search.elapsed) == (0.5, 9)
    assert [(c.outcome, c.seconds) for c in search.candidates] == [("ok", 40e-6), ("wrong_result", None), ("ok", 20e-6)]
    assert [c.elapsed for c in search.improvements()] == [1, 3]
    assert "2.00 x" in describe_search(search)
    picture = draw_search(search)
    assert [circles(picture, name) for name in ("own", "failed", "limit")] == [2, 1, 1]
    assert op.explain(A[:60], B, journal=path).search is None  # other sizes


def test_a_search_that_goes_on_has_no_winner(tmp_path: Path) -> None:
    path = tmp_path / "job.journal"
    write_journal(path, has_ended=False)
    search = tc.define(TMM).tmm.explain(A, B, journal=path).search
    assert search is not None
    assert (search.chosen, search.seconds) == ("", None)
    assert "has not ended" in describe_search(search)
    assert circles(draw_search(search), "limit") == 0


def test_a_search_without_times_is_no_picture() -> None:
    search = SearchCurve((TriedOptions("a", "crash", None, 1.0),), "", None, None, 1.0, 2.0)
    assert draw_search(search) == "<p>No candidate was timed.</p>"


def test_journals_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op = tc.define(TMM).tmm
    with pytest.raises(tc.ArgumentError, match="cannot be read"):
        op.explain(A, B, journal=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "text").write_text("no journal")
    with pytest.raises(tc.ArgumentError, match="is not a journal"):
        op.explain(A, B, journal=tmp_path / "text")
    with pytest.raises(tc.ArgumentError, match="have journals"):
        op.explain(A, B, target="cuda:sm_80", journal=tmp_path / "text")
    command = ["explain", "examples/softmax.tc", "--sizes", "N=8,D=8", "--journal", str(tmp_path / "none")]
    assert main(command) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_calls_of_the_operator() -> None:
    op = tc.define(TMM, dynamic=False).tmm
    op(A, B), op(A, B)
    report = op.explain(A, B)
    calls = report.calls
    assert calls is not None
    assert calls.guards == ("A: float32 of 64 x 96, strides 96, 1", "B: float32 of 48 x 96, strides 96, 1")
    assert (calls.hindrance, calls.lanes, calls.varying) == ("", 1, ())
    assert calls.compiled + calls.loaded == len(op.kernels) == 1
    assert "kernels of this operator" not in str(report)
    op(A[:33].clone(), B), op(A[:20].clone(), B)
    report = op.explain(A[:20].clone(), B)
    assert report.calls is not None
    assert (report.calls.lanes, report.calls.varying) == (3, ("M: 20, 33, 64",))
    assert report.calls.seconds == pytest.approx(sum(k.compile_seconds for k in op.kernels))
    assert "they differ in M: 20, 33, 64" in str(report)
    check_page(report)
    assert report.json()["calls"]["varying"] == ("M: 20, 33, 64",)


def test_why_calls_take_the_long_way() -> None:
    op = tc.define(TMM).tmm
    calls = op.explain(A.clone().requires_grad_(), B).calls
    assert calls is not None
    assert "autograd" in calls.hindrance
    calls = op.explain(A.numpy(), B.numpy()).calls
    assert calls is not None
    assert "converted" in calls.hindrance


def test_guards_of_a_kernel_for_any_number_of_rows() -> None:
    op = tc.define(TMM, dynamic={"M"}).tmm
    calls = op.explain(A, B).calls
    assert calls is not None
    assert calls.guards[0] == "A: float32 of M x 96, strides 96, 1"
